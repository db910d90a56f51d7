"""`from_pretrained` with everything people give it, and what it says when that cannot work."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNForConditionalGeneration
from heedful.configuration_base_heed import FORMAT_VERSION
from heedful.inference.loading import load_model
from helpers import FAMILIES, SHARINGS, pairwise, tiny_model

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
    ({"device_map": "cpu"}, torch.float32),
    ({"device_map": "auto"}, torch.float32),
    ({"device_map": {"": "cpu"}, "dtype": torch.bfloat16}, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("options_and_dtype", "family", "by_auto_class", "size"),
    pairwise(OPTIONS, FAMILIES, [True, False], ["8KB", "5GB"]),
    ids=str,
)
def test_options_of_from_pretrained_change_the_dtype_and_nothing_else(
    folders, options_and_dtype, family, by_auto_class, size
):
    options, dtype = options_and_dtype
    road = AutoModelForSeq2SeqLM if by_auto_class else FAMILIES[family][1]
    model, report = road.from_pretrained(folders[family, size], output_loading_info=True, **options)
    assert not any(report.values())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(logits_of(model), logits_of(tiny_model(family=family).to(dtype)))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_layers": 3}, "lacks model.encoder.layers.2.first_cell"),
        ({"bidirectional": False}, "holds, unknown to it, model.encoder.layers.0.second_cell"),
        ({"hidden_size": 18}, "weights of the shapes that its config says"),
        ({"format_version": 99}, "`format_version` must be at most 1, but is 99"),
    ],
)
def test_weights_that_are_not_the_config_of_a_recurrent_model_are_errors(folders, tmp_path, change, message):
    folder = changed_config(folders["recurrent", "5GB"], tmp_path, **change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        HeedRNNForConditionalGeneration.from_pretrained(folder)


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
