"""What keeps a model from learning a small corpus by heart keeps the contract, through the real loop."""

import re
from pathlib import Path

import pytest
import torch

from heedful import HeedConfig, TokenizerPair
from heedful.data.epochs.augmentation import AugmentationRules
from heedful.files import write_text
from heedful.training.preparation import prepare_corpus
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.checkpoints import checkpoint_path
from heedful.training.run_folder.folder import check_output_folder
from tiny_runs import logged, tiny_recipe

BPE_DROPOUT = {"tokenizer.dropout": 0.2}
MODEL = {"model.options.source_word_dropout": 0.1, "model.options.target_word_dropout": 0.1}
MODEL |= {"model.options.attention_dropout": 0.1, "model.options.activation_dropout": 0.1}
RECURRENT = {"model.options": {"model_type": "heed_rnn", "hidden_size": 32, "embedding_size": 16, "dropout": 0.2}}
RECURRENT["model.options"] |= {"source_word_dropout": 0.1, "target_word_dropout": 0.1}
STREAM = {"data.streaming": True, "data.pool_size": 70}
SEVERAL = {
    "data.mixture": {
        "back": {"train": "builtin:train:40", "source": "en", "target": "ko", "to": "ko", "tag": "bt"},
    },
    "data.temperature": 2.0,
    "data.augmentation": {"lower_case": 0.2, "typos": 0.1, "no_final_punctuation": 0.3, "joined": 0.2},
}
KINDS = {
    "stream": BPE_DROPOUT | STREAM,
    "all": {"optimization.r_drop": 5.0, **BPE_DROPOUT, **MODEL},
    "parts and noise": {"optimization.r_drop": 5.0, **BPE_DROPOUT, **SEVERAL},
    "recurrent": {"optimization.r_drop": 5.0, **BPE_DROPOUT, **RECURRENT},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Corpora by what is special about them, with one tokenizer."""
    folder, made = tmp_path_factory.mktemp("corpora"), {}

    def of(changes):
        changes = {name: value for name, value in changes.items() if name.startswith(("tokenizer", "data"))}
        key = str(changes)
        if key not in made:
            tokenizer = folder / ("tagged" if "data.mixture" in changes else "tokenizer")
            made[key] = prepare_corpus(tiny_recipe(folder, changes), tokenizer)
        return made[key]

    return of


def rows_of(corpus, epoch=0):
    return sorted(str(row) for update in corpus.updates(epoch) for bucket in update for row in bucket)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_in_an_epoch_and_after_one_goes_on_bit_for_bit(kind, make_loop, tmp_path, weights_of, data):
    changes, found = {"optimization.token_budget": 700, **KINDS[kind]}, []
    corpus = data(changes)
    end = len(list(corpus.updates(0))) + 2
    for stops in ((), (2, end - 1)):
        folder = tmp_path / str(len(stops))
        for number, stop in enumerate((*stops, end)):
            make_loop({**changes, "optimization.max_updates": stop, "resume": bool(number)}, folder, corpus).run()
        found.append((weights_of(folder, end), logged(folder, "train/loss")))
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == end
    assert all(torch.equal(found[1][0][name], weight) for name, weight in found[0][0].items())


def test_validation_test_and_the_saved_tokenizer_know_nothing_of_bpe_dropout(data, make_loop, tmp_path):
    plain, dropped = data({}), data(BPE_DROPOUT)
    assert dropped.validation.fingerprint() == plain.validation.fingerprint()
    assert rows_of(dropped) != rows_of(plain)
    assert rows_of(dropped, 0) != rows_of(dropped, 1)
    make_loop({**BPE_DROPOUT, "optimization.max_updates": 1}, tmp_path / "run", dropped).run()
    saved = TokenizerPair.from_pretrained(checkpoint_path(tmp_path / "run/checkpoints", 1))
    text = "나는 학교에 갑니다."
    assert saved.encode_source([text]) == plain.tokenizers.encode_source([text])
    assert saved.source.backend_tokenizer.model.dropout is None


@pytest.mark.parametrize("changes", [BPE_DROPOUT, BPE_DROPOUT | STREAM])
def test_every_pair_comes_once_in_every_epoch_and_fits_its_bucket(data, changes):
    corpus, plain = data(changes), data({})
    decode = plain.tokenizers.source.decode
    wanted = sorted(decode(row["labels"]) for update in plain.updates(0) for bucket in update for row in bucket)
    for epoch in (0, 1):
        updates = list(corpus.updates(epoch))
        assert sorted(decode(row["labels"]) for update in updates for bucket in update for row in bucket) == wanted
        for bucket in (bucket for update in updates for bucket in update):
            longest = [max(len(row[side]) for row in bucket) for side in ("input_ids", "labels")]
            assert len(bucket) * sum(longest) <= 2000


def test_the_data_are_known_by_their_pairs_whatever_was_dropped(make_loop, tmp_path, data):
    corpus = data(BPE_DROPOUT)
    make_loop({**BPE_DROPOUT, "optimization.max_updates": 2}, tmp_path / "run", corpus).run()
    other = prepare_corpus(tiny_recipe(tmp_path, {**BPE_DROPOUT, "data.train": "builtin:train:299"}), tmp_path / "t")
    with pytest.raises(ValueError, match="their rows have changed"):
        make_loop({**BPE_DROPOUT, "resume": True}, tmp_path / "run", other)
    assert make_loop({**BPE_DROPOUT, "resume": True}, tmp_path / "run", corpus).progress.update == 2


def test_bpe_dropout_may_be_changed_where_changes_are_allowed(make_loop, tmp_path, data):
    loop = make_loop({"optimization.max_updates": 1}, tmp_path / "run", data({}))
    loop.run()
    write_text(tmp_path / "run/recipe.yaml", to_yaml(loop.recipe))
    changes = {**BPE_DROPOUT, "resume": True}
    with pytest.raises(ValueError, match=r"`tokenizer.dropout` must be as in the run that is resumed \(0.0\)"):
        check_output_folder(tiny_recipe(tmp_path / "run", changes))
    check_output_folder(tiny_recipe(tmp_path / "run", {**changes, "allow_changes": True}))


def test_the_keys_of_the_guide_exist(tmp_path):
    guide = (Path(__file__).parents[2] / "docs/guides/low_resource.md").read_text(encoding="utf-8")
    keys = [
        key for row in re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE) for key in re.findall(r"`(\S+?)[:`]", row)
    ]
    assert len(keys) >= 10
    for key in keys:
        section, _, name = key.rpartition(".")
        if section in ("optimization", "tokenizer"):
            assert hasattr(getattr(tiny_recipe(tmp_path), section), name)
        else:
            assert hasattr(HeedConfig(), name) or hasattr(AugmentationRules(), name)


def test_wrong_recipes_are_refused_by_name(tmp_path):
    cases = [
        ({"tokenizer.dropout": 1.0}, r"`tokenizer.dropout` must be at least 0 and below 1, but is 1.0"),
        ({"tokenizer.dropout": -0.1}, r"`tokenizer.dropout` must be at least 0 and below 1, but is -0.1"),
        ({"tokenizer.dropout": 0.1, "tokenizer.algorithm": "unigram"}, r"0 unless `tokenizer.algorithm` is bpe"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            tiny_recipe(tmp_path, changes)
