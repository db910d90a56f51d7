import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heedful.data.micro_batches import collate
from heedful.studies import pairs as study_pairs
from heedful.studies.models import markov
from heedful.studies.study import Lab, run_study

TEST = "builtin:test:12"


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory):
    """Run the study with eight updates a training; return its settings and results."""
    folder = tmp_path_factory.mktemp("markov")
    small = {
        "data.test": {"test": TEST},
        "tokenizer.vocab_size": 400,
        "optimization.tokens_per_update": 256,
        "decoding.max_length": 8,
    }
    study = replace(markov.STUDY, changes={**markov.STUDY.changes, **small})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_pairs, "TEST_PAIRS", TEST)
        patch.setattr(markov, "TRANSLATED", 2)
        lab = Lab(study, updates=8, data="builtin:train:400", folder=folder / "trainings")
        written = run_study(lab, folder / "out")
        pairs = study_pairs.held_out_pairs()
    return lab, json.loads((written / "results.json").read_text()), pairs


def test_all_models_foretell_the_same_tokens_with_the_same_tokenizer(laboratory):
    lab, _, pairs = laboratory
    encoded = []
    for training in lab.trainings:
        tokenizers = training.translator().tokenizers
        encoded.append(tokenizers.encode_target([target for _, target in pairs]))
    assert len(lab.trainings) == 5
    assert all(rows == encoded[0] for rows in encoded)
    assert all(row[-1] == tokenizers.special_ids()["eos_token_id"] for row in encoded[0])


def test_perplexity_is_of_all_tokens_together(laboratory):
    lab, results, pairs = laboratory
    table = {row[0]: row for row in results["tables"][0]["rows"]}
    for training, name, nothing in (
        (lab.trainings[0], "Transformer with the source", False),
        (lab.trainings[-1], "Transformer without the source", True),
    ):
        translator = training.translator()
        loss, tokens = 0.0, 0
        for own_source, target in pairs:
            source = markov.NOTHING if nothing else own_source
            row = {
                "input_ids": translator.tokenizers.encode_source([source])[0],
                "labels": translator.tokenizers.encode_target([target])[0],
            }
            batch = collate([row], 0)
            with torch.no_grad():
                logits = translator.model(**batch).logits[0]
            loss += torch.nn.functional.cross_entropy(logits, batch["labels"][0], reduction="sum").item()
            tokens += len(row["labels"])
        assert table[name][4] == pytest.approx(math.exp(loss / tokens), rel=1e-5)


def test_models_without_the_source_are_trained_on_the_same_targets(laboratory):
    lab, _, _ = laboratory
    blind = [training for training in lab.trainings if "without" in training.name]
    assert len(blind) == 2
    for training in blind:
        lines = Path(training.changes["data.train"]).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert {row["source"] for row in rows} == {markov.NOTHING}
        assert [row["target"] for row in rows] == [target for _, target in markov.training_pairs(lab)]


def test_counts_are_of_the_training_targets(laboratory):
    lab, results, _ = laboratory
    tokenizers = lab.trainings[0].translator().tokenizers
    rows = tokenizers.encode_target([target for _, target in markov.training_pairs(lab)])
    table = {row[0]: row for row in results["tables"][0]["rows"]}
    assert len(rows) == 400
    assert table["unigram"][2] == len({token for row in rows for token in row})
    assert table["first-order Markov"][3] == sum(map(len, rows))
    assert table["first-order Markov"][4] < 0.5 * table["unigram"][4]


def test_every_kind_of_memory_has_its_row(laboratory):
    _, results, _ = laboratory
    names = [row[0] for row in results["tables"][0]["rows"]]
    assert names == [
        *("unigram", "first-order Markov", "window of 2", "window of 3", "window of 4"),
        *("GRU without the source", "Transformer without the source"),
        *("GRU, the source through its state", "GRU with additive attention", "Transformer with the source"),
    ]
    kinds = [one["changes"].get("model.options", {}).get("model_type", "heed") for one in results["trainings"]]
    assert sorted(kinds) == ["heed", "heed", "heed_rnn", "heed_rnn", "heed_rnn"]
