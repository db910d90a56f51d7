"""Saving and loading a recurrent model changes nothing, by every road."""

import json
import os
import subprocess
import sys

import pytest
import torch
from rnn_models import SEPARATE, SUTSKEVER, VARIANTS, tiny_rnn, tiny_rnn_config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration, HeedRNNModel
from helpers import RNN_CODE, assert_near

SOURCE, TARGET = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])
SHARINGS = {
    "all_shared": ({}, [0, 0, 0]),
    "nothing_shared": ({"tie_word_embeddings": False}, [0, 1, 2]),
    "own_source": ({"share_encoder_decoder_embeddings": False}, [0, 1, 1]),
    "own_output": ({"tie_output_embeddings": False}, [0, 0, 2]),
    "separate_vocabularies": (SEPARATE, [0, 1, 1]),
    "separate_vocabularies_untied": ({**SEPARATE, "tie_word_embeddings": False}, [0, 1, 2]),
}


@torch.no_grad()
def logits_of(model):
    return model.eval()(SOURCE, decoder_input_ids=TARGET).logits


def matrices_of(model):
    """Return, for source, target and output embeddings, the first of them that is the same matrix."""
    weights = [model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight, model.lm_head.weight]
    return [next(i for i, first in enumerate(weights) if first is weight) for weight in weights]


@pytest.mark.parametrize("shard", ["8KB", "5GB"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_model_is_the_saved_one_to_the_bit(tmp_path, variant, shard):
    model = tiny_rnn(**VARIANTS[variant])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "8KB")
    loaded, report = HeedRNNForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert matrices_of(loaded) == matrices_of(model)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_embeddings_are_shared_as_the_config_says_saved_once_and_resized(tmp_path, sharing):
    changes, matrices = SHARINGS[sharing]
    model = tiny_rnn(**changes)
    assert matrices_of(model) == matrices
    model.save_pretrained(tmp_path / "first")
    saved = load_file(tmp_path / "first" / "model.safetensors")
    assert sum("embed_tokens" in name or "lm_head" in name for name in saved) == len(set(matrices))
    assert sum(value.numel() for value in saved.values()) == sum(value.numel() for value in model.parameters())
    before = logits_of(model)
    model.resize_token_embeddings(105, mean_resizing=False)
    target = 71 if "vocabularies" in sharing else 99 if sharing == "own_source" else 105
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (105, target)
    assert (model.model.encoder.embed_tokens.num_embeddings, model.lm_head.out_features) == (105, target)
    assert matrices_of(model) == matrices
    assert_near(logits_of(model)[..., : before.shape[-1]], before)
    model.save_pretrained(tmp_path / "second")
    loaded = HeedRNNForConditionalGeneration.from_pretrained(tmp_path / "second")
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert matrices_of(loaded) == matrices


def test_the_targets_vocabulary_is_resized_alone_where_it_is_its_own():
    model = tiny_rnn(**SEPARATE)
    model.resize_decoder_token_embeddings(80)
    assert (model.config.vocab_size, model.config.decoder_vocab_size) == (99, 80)
    assert logits_of(model).shape[-1] == 80
    with pytest.raises(ValueError, match="`share_encoder_decoder_embeddings` must be False"):
        tiny_rnn().resize_decoder_token_embeddings(80)


def test_a_vocabulary_is_not_resized_below_a_special_id_and_nothing_changes():
    model = tiny_rnn()
    with pytest.raises(ValueError, match="`eos_token_id` must be at least 0 and below 2, but is 2"):
        model.resize_token_embeddings(2)
    with pytest.raises(ValueError, match="must not be resized within a model"):
        model.model.encoder.resize_token_embeddings(105)
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == 99


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model = tiny_rnn()
    model.save_pretrained(path)
    torch.save(logits_of(model), path.with_suffix(".pt"))
    return path


def test_the_saved_folder_holds_exactly_its_own_files_of_code(folder):
    assert {path.name for path in folder.glob("**/*.py")} == RNN_CODE
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_heed_rnn.HeedRNNConfig",
        "AutoModel": "modeling_heed_rnn.HeedRNNModel",
        "AutoModelForSeq2SeqLM": "modeling_heed_rnn.HeedRNNForConditionalGeneration",
    }


def test_auto_classes_know_recurrent_models_without_remote_code(folder):
    assert type(AutoConfig.for_model("heed_rnn")) is HeedRNNConfig
    assert type(AutoConfig.from_pretrained(folder)) is HeedRNNConfig
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is HeedRNNForConditionalGeneration
    assert torch.equal(logits_of(model), torch.load(folder.with_suffix(".pt")))
    base = AutoModel.from_pretrained(folder)
    assert type(base) is HeedRNNModel
    assert torch.equal(base.decoder.out_proj.weight, model.model.decoder.out_proj.weight)
    assert type(AutoModel.from_config(tiny_rnn_config())) is HeedRNNModel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"device_map": "cpu"}], ids=str)
def test_a_model_is_loaded_in_16_bits(folder, dtype, options):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, **options)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert_near(logits_of(model).float(), torch.load(folder.with_suffix(".pt")), 0.05)


SCRIPTS = {
    # Nothing but the model is imported, and no Auto class.
    "only_the_model_is_imported": """
import sys
from pathlib import Path
from heedful import HeedRNNForConditionalGeneration
HeedRNNForConditionalGeneration.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[3])
files = sorted(path.name for path in Path(sys.argv[3]).glob("*.py"))
"""
    + f"assert files == {sorted(RNN_CODE)}, files\n",
    "heed_is_not_installed": """
import sys
sys.modules["heedful"] = None  # makes the import fail
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM
source, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
logits = model(source, decoder_input_ids=target).logits
assert torch.equal(logits, torch.load(sys.argv[2]))
assert model.generate(source, num_beams=3, max_length=7).shape[0] == 1
base = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(base).__name__ == "HeedRNNModel"
model.save_pretrained(sys.argv[3])
again = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[3], trust_remote_code=True).eval()
assert torch.equal(again(source, decoder_input_ids=target).logits, logits)
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_folder_is_saved_and_loaded_in_a_new_process_when(folder, tmp_path, script):
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    arguments = [str(folder), str(folder.with_suffix(".pt")), str(tmp_path / "again")]
    command = [sys.executable, "-c", script + "\nprint('done')", *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1:] == ["done"], process.stderr


@pytest.mark.parametrize("is_fused", [True, False])
def test_weights_on_the_disk_are_loaded_when_they_are_needed(tmp_path, is_fused):
    model = tiny_rnn(tie_word_embeddings=False, use_fused_cells=is_fused)
    model.save_pretrained(tmp_path / "model")
    places = {"model.encoder": "disk", "model.decoder": "disk", "lm_head": "cpu"}
    loaded = HeedRNNForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    )
    assert loaded.model.decoder.layers[0].weight_hh_l0.is_meta
    assert_near(logits_of(loaded), logits_of(model))
    settings = {"max_length": 8, "do_sample": False}
    assert torch.equal(loaded.generate(SOURCE, **settings), model.generate(SOURCE, **settings))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_layers": 3}, "lacks model.encoder.layers.2.first_cell"),
        ({"bidirectional": False}, "holds, unknown to it, model.encoder.layers.0.second_cell"),
        ({"hidden_size": 18}, "weights of the shapes that its config says"),
        ({"format_version": 99}, "`format_version` must be at most 1, but is 99"),
    ],
)
def test_weights_that_are_not_the_configs_are_errors(tmp_path, change, message):
    tiny_rnn().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises((ValueError, RuntimeError), match=message):
        HeedRNNForConditionalGeneration.from_pretrained(tmp_path)


def test_two_different_matrices_for_one_are_an_error(tmp_path):
    model = tiny_rnn(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"must hold one matrix for lm_head.weight"):
        HeedRNNForConditionalGeneration.from_pretrained(tmp_path)


def test_a_model_without_attention_has_no_weights_for_it(tmp_path):
    tiny_rnn(**SUTSKEVER).save_pretrained(tmp_path)
    assert not any("cross_attn" in name or "bridge" in name for name in load_file(tmp_path / "model.safetensors"))
