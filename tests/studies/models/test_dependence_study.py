"""The study of long-range dependence: its data, its measures, and the whole at a small size."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from heedful.studies.measures import score
from heedful.studies.models import dependence
from heedful.studies.pairs import corpus_pairs
from heedful.studies.study import Lab, run_study


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    """Run the study with three updates a training; return its settings and results."""
    folder = tmp_path_factory.mktemp("dependence")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dependence, "SENTENCES", {"train": 900, "validation": 20, "test": 900})
        patch.setattr(dependence, "SEQUENCES", {"train": 200, "validation": 10, "test": 40})
        patch.setattr(dependence, "MEASURED", 2)
        for settings in (dependence.JOINED, dependence.REVERSAL):
            patch.setitem(settings, "decoding.max_length", 6)
            patch.setitem(settings, "optimization.tokens_per_update", 512)
        lab = Lab(dependence.STUDY, updates=3, folder=folder / "trainings")
        written = run_study(lab, folder / "out")
    return lab, json.loads((written / "results.json").read_text()), written


def test_sources_are_one_to_three_neighbouring_sentences_and_none_is_lost():
    pairs = corpus_pairs("builtin:train:50")
    joined = dependence.joined_sentences("train", 50, seed=1)
    assert " ".join(source for source, _ in joined) == " ".join(source for source, _ in pairs)
    assert " ".join(target for _, target in joined) == " ".join(target for _, target in pairs)
    assert {sum(mark in "?." for mark in target) for _, target in joined} == {1, 2, 3}


def test_reversal_pairs_are_reversed_as_long_as_asked_for_and_repeatable():
    pairs = dependence.reversed_sequences(7, 300, seed=3)
    lengths = {len(source.split()) for source, _ in pairs}
    assert lengths == set(range(1, 8))
    assert all(target.split() == source.split()[::-1] for source, target in pairs)
    assert pairs == dependence.reversed_sequences(7, 300, seed=3) != dependence.reversed_sequences(7, 300, seed=4)


def test_each_model_is_trained_on_both_tasks_and_scored_by_length(laboratory):
    lab, results, _ = laboratory
    names = [training.name for training in lab.trainings]
    assert names == [f"{task}, {name}" for task in ("joined", "reversal") for name in dependence.MODELS]
    bleu, gradients, reversal, reversal_gradients = results["tables"]
    lengths = ["1 to 10", "11 to 18", "19 to 26", "27 to 34", "35 to 50"]
    assert bleu["columns"] == gradients["columns"] == ["model", *lengths]
    symbols = ["1 to 5", "6 to 10", "11 to 15", "16 to 20", "21 to 25", "26 to 30"]
    assert reversal_gradients["columns"] == ["model", *symbols]
    assert reversal["columns"] == ["model", "BLEU", *(f"exact in %, {span}" for span in symbols)]
    for columns, ends in ((lengths, dependence.GROUPS), (symbols, dependence.SEQUENCE_GROUPS)):
        assert columns == [f"{low + 1} to {high}" for low, high in pairwise((0, *ends))]
    for table in results["tables"]:
        assert [row[0] for row in table["rows"]] == list(dependence.MODELS)
    assert all(value > 0 for table in (gradients, reversal_gradients) for row in table["rows"] for value in row[1:])


def test_the_longest_reversals_are_longer_than_any_in_training(laboratory):
    lab, _, _ = laboratory
    changes = lab.trainings[-1].changes
    lengths = {}
    for split, path in {"train": changes["data.train"], **changes["data.test"]}.items():
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        lengths[split] = max(len(json.loads(line)["source"].split()) for line in lines)
    assert lengths == {"train": dependence.SEEN, "test": dependence.LONGEST}


@pytest.mark.parametrize("name", dependence.MODELS)
def test_the_gradient_at_the_first_token_is_that_of_its_embedding(laboratory, name):
    lab, _, _ = laboratory
    translator = next(one for one in lab.trainings if one.name == f"joined, {name}").translator()
    model, tokenizers = translator.model, translator.tokenizers
    pairs = dependence.joined_sentences("test", 9, seed=1)[:2]
    embedded = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, given, output: embedded.append(output))
    shares = []
    for source, target in pairs:
        embedded.clear()
        labels = torch.tensor([list(tokenizers.encode_target([target])[0])])
        loss = model(input_ids=torch.tensor([tokenizers.encode_source([source])[0]]), labels=labels).loss
        # The first is the encoder's: source and target may be looked up in one matrix.
        (gradient,) = torch.autograd.grad(loss, embedded[0])
        norms = gradient[0].norm(dim=-1)
        shares.append((norms[0] / norms.mean()).item())
    hook.remove()
    assert dependence._share_at_the_first(translator, pairs) == pytest.approx(sum(shares) / 2, rel=1e-3)
    assert dependence._share_at_the_first(translator, pairs[:1]) == pytest.approx(shares[0], rel=1e-3)


def test_sequences_are_grouped_by_their_number_of_symbols():
    pairs = dependence.reversed_sequences(dependence.LONGEST, 500, seed=1)
    groups = dependence._grouped(dependence.SEQUENCE_GROUPS, pairs, dependence._symbols(None, pairs))
    assert sorted(pair for group in groups for pair in group) == sorted(pairs)
    for group, (low, high) in zip(groups, pairwise((0, *dependence.SEQUENCE_GROUPS)), strict=True):
        assert {len(source.split()) for source, _ in group} == set(range(low + 1, high + 1))


def test_an_exact_match_has_every_symbol_in_its_place():
    class Echo:
        def translate(self, sources):
            return [[type("Found", (), {"text": " ".join(reversed(source.split()))})()] for source in sources]

    pairs = [("a b", "b a"), ("a b", "a b"), ("a b", "b"), ("a", "a")]
    assert score(Echo(), pairs, "exact_match") == 50
