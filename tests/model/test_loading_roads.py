"""`from_pretrained` with everything people give it, and what it says when that cannot work."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNForConditionalGeneration
from heedful.configuration_base_heed import FORMAT_VERSION
from heedful.inference.loading import load_model
from helpers import FAMILIES, assert_refused, pairwise, tiny_model

SOURCE, TARGET = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])


@torch.no_grad()
def logits_of(model):
    return model.eval()(SOURCE, decoder_input_ids=TARGET).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return folders by family and by whether their weights are in several files; nobody may change them."""
    place, found = tmp_path_factory.mktemp("folders"), {}
    for family in FAMILIES:
        for size in ("8KB", "5GB"):
            found[family, size] = place / f"{family} {size}"
            tiny_model(family=family).save_pretrained(found[family, size], max_shard_size=size)
            assert (found[family, size] / "model.safetensors.index.json").exists() == (size == "8KB")
    return found


@pytest.fixture
def folder(folders):
    return folders["transformer", "5GB"]


OPTIONS = [
    ({}, torch.float32),
    ({"dtype": torch.bfloat16}, torch.bfloat16),
    ({"dtype": "float16"}, torch.float16),
    ({"dtype": "auto"}, torch.float32),
    ({"low_cpu_mem_usage": True}, torch.float32),
    ({"device_map": "auto"}, torch.float32),
    ({"device_map": {"": "cpu"}, "dtype": torch.bfloat16}, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("options_and_dtype", "family", "is_auto", "size"), pairwise(OPTIONS, FAMILIES, [True, False], ["8KB", "5GB"])
)
def test_options_of_from_pretrained_change_the_dtype_and_nothing_else(
    folders, options_and_dtype, family, is_auto, size, tmp_path
):
    options, dtype = options_and_dtype
    road = AutoModelForSeq2SeqLM if is_auto else FAMILIES[family][1]
    model, report = road.from_pretrained(folders[family, size], output_loading_info=True, **options)
    assert not any(report.values())
    assert {(parameter.dtype, parameter.device.type) for parameter in model.parameters()} == {(dtype, "cpu")}
    assert torch.equal(logits_of(model), logits_of(tiny_model(family=family).to(dtype)))
    model.save_pretrained(tmp_path)
    assert road.from_pretrained(tmp_path, dtype="auto").dtype == dtype


def test_no_layer_is_split_between_devices():
    model = tiny_model().model
    layers = {type(layer).__name__ for layer in (*model.encoder.layers, *model.decoder.layers)}
    assert layers == set(HeedForConditionalGeneration._no_split_modules)


# What cannot work


def test_weights_that_are_not_the_config_of_a_recurrent_model_are_errors(folders, tmp_path):
    cases = [
        ({"encoder_layers": 3}, "lacks model.encoder.layers.2.first_cell"),
        ({"bidirectional": False}, "holds, unknown to it, model.encoder.layers.0.second_cell"),
        ({"hidden_size": 18}, "weights of the shapes that its config says"),
        ({"format_version": 99}, "`format_version` must be at most 1, but is 99"),
    ]
    folder = shutil.copytree(folders["recurrent", "5GB"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())

    def load(changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        HeedRNNForConditionalGeneration.from_pretrained(folder)

    assert_refused(cases, load, (ValueError, RuntimeError))


def test_a_model_of_a_newer_heed_is_refused_by_every_road(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == FORMAT_VERSION
    newer = shutil.copytree(folder, tmp_path / "model")
    (newer / "config.json").write_text(json.dumps(config | {"format_version": FORMAT_VERSION + 1, "tomorrow": True}))
    message = f"`format_version` must be at most {FORMAT_VERSION}, but is {FORMAT_VERSION + 1} .*newer Heedful"
    roads = AutoConfig.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained, HeedConfig.from_pretrained, load_model
    for load in roads:
        with pytest.raises(ValueError, match=message):
            load(newer)
