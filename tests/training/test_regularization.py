"""What keeps a model from learning a small corpus by heart keeps the contract, through the real loop."""

import re
from pathlib import Path

import pytest
import torch

from heedful import HeedConfig
from heedful.data.mixture import AugmentationRules
from heedful.training.preparation import prepare_corpus
from process_checks import weights_of, write_teacher
from tiny_runs import logged, tiny_recipe

MODEL = {"model.options.source_word_dropout": 0.1, "model.options.target_word_dropout": 0.1}
MODEL |= {"model.options.attention_dropout": 0.1, "model.options.activation_dropout": 0.1}
RECURRENT = {"model.options": {"model_type": "heed_rnn", "hidden_size": 32, "embedding_size": 16, "dropout": 0.2}}
RECURRENT["model.options"] |= {"source_word_dropout": 0.1, "target_word_dropout": 0.1}
SEVERAL = {
    "data.mixture": {"back": {"train": "builtin:train:40", "source": "en", "target": "ko", "to": "ko", "tag": "bt"}},
    "data.temperature": 2.0,
    "data.augmentation": {"lower_case": 0.2, "typos": 0.1, "no_final_punctuation": 0.3, "joined": 0.2},
}
R_DROP = {"optimization.r_drop": 5.0}
KINDS = {
    "all": R_DROP | MODEL | SEVERAL,
    "student": R_DROP | {"optimization.mixed_precision": "bf16"},
    "recurrent student": R_DROP | RECURRENT,
}
FEW = {"data.train": "builtin:train:80"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_in_an_epoch_and_after_one_goes_on_bit_for_bit(kind, make_loop, tmp_path):
    changes, found = FEW | KINDS[kind] | {"optimization.token_budget": 700}, []
    corpus = prepare_corpus(tiny_recipe(tmp_path, changes), tmp_path / "tokenizer")
    names = ["train/loss", "train/r_drop"]
    if kind != "all":
        changes |= write_teacher(tmp_path / "teacher", corpus.tokenizers, FEW["data.train"])
        names.append("train/distillation")
    epoch = len(list(corpus.updates(0)))
    assert epoch >= 2
    for stops in ((), (1, epoch + 1)):
        folder = tmp_path / str(len(stops))
        for number, stop in enumerate((*stops, epoch + 2)):
            make_loop({**changes, "optimization.max_updates": stop, "resume": bool(number)}, folder, corpus).run()
        found.append((weights_of(folder, epoch + 2), [logged(folder, name) for name in names]))
    assert found[0][1] == found[1][1]
    assert [len(values) for values in found[0][1]] == [epoch + 2] * len(names)
    assert all(torch.equal(found[1][0][name], weight) for name, weight in found[0][0].items())


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


def test_a_removed_key_is_read_where_it_is_off_and_refused_with_the_reason_where_it_is_on(tmp_path):
    for off in (0.0, 0, None):
        assert tiny_recipe(tmp_path, {"tokenizer.dropout": off}) == tiny_recipe(tmp_path)
    must = (
        r"`tokenizer.dropout` must be left out, but is 0.1 instead: it was removed \(BPE-dropout lost in every row of "
    )
    with pytest.raises(ValueError, match=must) as error:
        tiny_recipe(tmp_path, {"tokenizer.dropout": 0.1})
    page = str(error.value).rpartition(" ")[2].rstrip(").")
    assert "BPE-dropout" in (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
