"""`from_pretrained` with everything people give it, and what it says when that cannot work."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.configuration_heed import FORMAT_VERSION
from heedful.inference.loading import load_model
from helpers import SHARINGS, tiny_model

SOURCE, TARGET = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])


@torch.no_grad()
def logits_of(model):
    return model.eval()(SOURCE, decoder_input_ids=TARGET).logits


@pytest.fixture(scope="module", params=["single", "sharded"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_model().save_pretrained(path, max_shard_size="20KB" if request.param == "sharded" else "5GB")
    assert (path / "model.safetensors.index.json").exists() == (request.param == "sharded")
    return path


@pytest.mark.parametrize("road", [AutoModelForSeq2SeqLM, HeedForConditionalGeneration])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "auto"}, torch.float32),
        ({"low_cpu_mem_usage": True}, torch.float32),
        ({"device_map": "cpu"}, torch.float32),
        ({"device_map": "auto"}, torch.float32),
        ({"device_map": {"": "cpu"}, "dtype": torch.bfloat16}, torch.bfloat16),
    ],
    ids=str,
)
def test_options_of_from_pretrained_change_the_dtype_and_nothing_else(folder, road, options, dtype):
    model, report = road.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(logits_of(model), logits_of(tiny_model().to(dtype)))


def test_auto_is_the_dtype_that_was_saved(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    model = HeedForConditionalGeneration.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("sharing", SHARINGS)
def test_layers_that_do_not_fit_in_memory_are_read_from_disk(sharing, tmp_path):
    original = tiny_model(**SHARINGS[sharing])
    original.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    memory = {"cpu": original.get_memory_footprint() * 2 // 3}
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory=memory, offload_folder=tmp_path / "offload"
    )
    places = set(model.hf_device_map.values())
    assert places == {"cpu", "disk"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    assert torch.equal(logits_of(model), logits_of(original))
    assert torch.equal(model.generate(SOURCE, max_new_tokens=8), original.generate(SOURCE, max_new_tokens=8))


def test_no_layer_is_split_between_devices():
    layers = {
        type(layer).__name__ for layer in (*tiny_model().model.encoder.layers, *tiny_model().model.decoder.layers)
    }
    assert layers == set(HeedForConditionalGeneration._no_split_modules)


# What cannot work


def changed_config(folder, tmp_path, **changes):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / "model"


def test_a_model_of_a_newer_heed_is_refused_by_every_road(folder, tmp_path):
    assert json.loads((folder / "config.json").read_text())["format_version"] == FORMAT_VERSION
    newer = changed_config(folder, tmp_path, format_version=FORMAT_VERSION + 1, norm_of_tomorrow=True)
    message = f"`format_version` must be at most {FORMAT_VERSION}, but is {FORMAT_VERSION + 1} .*newer Heedful"
    for load in (AutoConfig.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained, HeedConfig.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(newer)
    with pytest.raises(ValueError, match=message):
        load_model(newer)


@pytest.mark.parametrize("road", [AutoModelForSeq2SeqLM, HeedForConditionalGeneration])
def test_an_unknown_attention_implementation_is_named(folder, road):
    with pytest.raises(ValueError, match="no_such_kernel"):
        road.from_pretrained(folder, attn_implementation="no_such_kernel")


def test_a_kernel_that_would_compute_something_else_is_refused(tmp_path):
    tiny_model(attention_scoring="additive", attention="eager").save_pretrained(tmp_path / "additive")
    with pytest.raises(ValueError, match="`attn_implementation` must be eager where `attention_scoring` is additive"):
        HeedForConditionalGeneration.from_pretrained(tmp_path / "additive", attn_implementation="sdpa")
    tiny_model(d_k=6, d_v=10).save_pretrained(tmp_path / "uneven")
    with pytest.raises((ValueError, ImportError), match=r"[Ff]lash"):
        HeedForConditionalGeneration.from_pretrained(tmp_path / "uneven", attn_implementation="flash_attention_2")
