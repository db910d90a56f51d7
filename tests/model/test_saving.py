"""Saving and loading change nothing, by every road."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

import heedful
from heedful import HeedConfig, HeedForConditionalGeneration, HeedModel
from helpers import CODE, SHARINGS, VARIANTS, assert_near, tiny_config, tiny_model

SHELF = sorted(Path(heedful.__file__).parent.glob("*_heed*.py"))
SOURCE, TARGET = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])


@torch.no_grad()
def logits_of(model):
    return model.eval()(SOURCE, decoder_input_ids=TARGET).logits


@pytest.mark.parametrize("shard", ["20KB", "5GB"])
@pytest.mark.parametrize("changes", {**VARIANTS, **SHARINGS}.values(), ids={**VARIANTS, **SHARINGS})
def test_a_loaded_model_is_the_saved_one_to_the_bit(tmp_path, changes, shard):
    model = tiny_model(**changes)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    loaded, report = HeedForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert matrices_of(loaded) == matrices_of(model)


def test_where_weights_lie_in_their_file_changes_no_bit(tmp_path):
    torch.manual_seed(0)
    model = HeedForConditionalGeneration(tiny_config(d_model=64, vocab_size=99)).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    wanted = logits_of(model)
    one_row = {"input_ids": torch.tensor([[5]]), "decoder_input_ids": torch.tensor([[1]])}
    for filling in range(16):
        save_file(weights, path, metadata={"format": "pt", "filling": "x" * filling})
        begins_at = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        if begins_at % 16:
            break
    assert begins_at % 16 == 8
    loaded = HeedForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert all(weight.data_ptr() % 16 == 0 for weight in loaded.parameters())
    assert torch.equal(logits_of(loaded), wanted)
    with torch.no_grad():
        assert torch.equal(loaded(**one_row).logits, model(**one_row).logits)


def matrices_of(model):
    """Return, for source, target and output embeddings, the first of them that is the same matrix."""
    decoder = model.model.decoder.embed_tokens.weight
    weights = [model.model.encoder.embed_tokens.weight, decoder, model.lm_head.weight]
    return [next(i for i, first in enumerate(weights) if first is weight) for weight in weights]


@pytest.mark.parametrize(
    ("sharing", "matrices"),
    [
        ("all_shared", [0, 0, 0]),
        ("nothing_shared", [0, 1, 2]),
        ("own_source", [0, 1, 1]),
        ("own_output", [0, 0, 2]),
        ("own_source_and_output", [0, 1, 2]),
        ("separate_vocabularies", [0, 1, 1]),
        ("separate_vocabularies_untied", [0, 1, 2]),
    ],
)
def test_embeddings_are_shared_as_the_config_says_and_saved_once(tmp_path, sharing, matrices):
    model = tiny_model(**SHARINGS[sharing])
    assert matrices_of(model) == matrices
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    embeddings = [name for name in saved if "embed_tokens" in name or "lm_head" in name]
    assert len(embeddings) == len(set(matrices))
    assert sum(value.numel() for value in saved.values()) == sum(value.numel() for value in model.parameters())


def test_output_embeddings_of_their_own_are_trained_on_their_own():
    model = tiny_model(tie_output_embeddings=False)
    model(SOURCE, labels=TARGET).loss.backward()
    assert not torch.equal(model.lm_head.weight.grad, model.model.encoder.embed_tokens.weight.grad)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_model_with_resized_embeddings_can_be_saved_and_loaded(tmp_path, sharing):
    model = tiny_model(**SHARINGS[sharing])
    matrices = matrices_of(model)
    model.resize_token_embeddings(105, mean_resizing=False)
    config = model.config
    assert config.vocab_size == model.model.encoder.embed_tokens.num_embeddings == 105
    assert config.decoder_vocab_size == model.model.decoder.embed_tokens.num_embeddings
    assert config.decoder_vocab_size == model.lm_head.out_features == model.lm_head.weight.shape[0]
    # A source of its own has a vocabulary of its own.
    assert config.decoder_vocab_size == (71 if "vocabularies" in sharing else 99 if "own_source" in sharing else 105)
    assert matrices_of(model) == matrices
    model.save_pretrained(tmp_path)
    loaded = HeedForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert matrices_of(loaded) == matrices


@torch.no_grad()
def test_resizing_keeps_the_old_logits():
    model = tiny_model()
    before = logits_of(model)
    model.resize_token_embeddings(105)
    assert_near(logits_of(model)[..., :99], before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model = tiny_model()
    model.save_pretrained(path)
    torch.save(logits_of(model), path.with_suffix(".pt"))
    return path


def test_the_saved_folder_holds_exactly_the_files_of_code_that_the_model_needs(folder):
    assert {path.name for path in folder.glob("**/*.py")} == CODE
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_heed.HeedConfig",
        "AutoModel": "modeling_heed.HeedModel",
        "AutoModelForSeq2SeqLM": "modeling_heed.HeedForConditionalGeneration",
    }


# Here heedful was imported first, and its models before the Auto classes; new processes try the other orders.
def test_auto_classes_know_heed_without_remote_code(folder):
    assert type(AutoConfig.for_model("heed")) is HeedConfig
    assert type(AutoConfig.from_pretrained(folder)) is HeedConfig
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model) is HeedForConditionalGeneration
    assert torch.equal(logits_of(model), torch.load(folder.with_suffix(".pt")))
    base = AutoModel.from_pretrained(folder)
    assert type(base) is HeedModel
    assert torch.equal(base.encoder.embed_tokens.weight, model.model.encoder.embed_tokens.weight)
    assert type(AutoModel.from_config(tiny_config())) is HeedModel


AUTO_CLASSES = """
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
"""
LOAD = """
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForSeq2SeqLM.from_config(config)
assert type(model).__module__ == "heedful.modeling_heed", type(model)
assert type(AutoModel.from_config(config)).__name__ == "HeedModel"
"""
SCRIPTS = {
    "heed_is_imported_before_transformers": "import sys, heedful" + AUTO_CLASSES + LOAD,
    "heed_is_imported_after_transformers": "import sys" + AUTO_CLASSES + "import heedful" + LOAD,
    # `None` makes the import fail.
    "heed_is_not_installed": """
import sys
sys.modules["heedful"] = None
"""
    + AUTO_CLASSES
    + """
import torch
source, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules."), type(model)
logits = model(source, decoder_input_ids=target).logits
assert torch.equal(logits, torch.load(sys.argv[2]))
base = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(base).__name__ == "HeedModel"
assert torch.equal(base.encoder.embed_tokens.weight, model.model.encoder.embed_tokens.weight)
model.save_pretrained(sys.argv[3])
again = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[3], trust_remote_code=True).eval()
assert torch.equal(again(source, decoder_input_ids=target).logits, logits)
""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_auto_classes_load_a_saved_folder_in_a_new_process_when(folder, tmp_path, script):
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    arguments = [str(folder), str(folder.with_suffix(".pt")), str(tmp_path / "again")]
    command = [sys.executable, "-c", script + "\nprint('done')", *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1:] == ["done"], process.stderr


@pytest.mark.parametrize("path", SHELF, ids=lambda path: path.name)
def test_a_shelf_file_imports_only_what_every_hub_user_has(path):
    siblings = {other.stem for other in SHELF}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"line {node.lineno}"
            assert node.module in siblings, f"line {node.lineno}"
            continue
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module]
        else:
            continue
        for name in imported:
            package = name.split(".")[0]
            assert package in {"torch", "transformers"} or package in sys.stdlib_module_names, f"line {node.lineno}"


@pytest.mark.parametrize("path", SHELF, ids=lambda path: path.name)
def test_no_text_of_a_shelf_file_looks_like_a_relative_import(path):
    source = path.read_text()
    found = re.findall(r"^\s*(?:from\s+\.\S*\s+import|import\s+\.\S+).*$", source, re.MULTILINE)
    real = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level]
    assert len(found) == len(real)
    assert "TYPE_CHECKING" not in source
