"""Saving and loading change nothing, by every road and in both families of models."""

import ast
import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, WatermarkingConfig

import heedful
import helpers
from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNForConditionalGeneration
from heedful.configuration_base_heed import FORMAT_VERSION
from heedful.decoding.loading import load_model
from helpers import FAMILIES, SOURCE, assert_near, closure_of, logits_of, matrices_of, tiny_config, tiny_model
from memorised import PAIRS, saved_model

SHELF = sorted(Path(heedful.__file__).parent.glob("*_heed*.py"))
# Every variant of each family, and every way to share embeddings.
VARIANTS = [
    (family, name, changes)
    for family, (_, _, variants) in FAMILIES.items()
    for name, changes in {**helpers.SHARINGS, **variants}.items()
    if name != "all_shared"  # which is the default
]
MATRICES = {"own_source": [0, 1, 1], "separate_vocabularies": [0, 1, 1], "own_output": [0, 0, 2]}
MATRICES |= {key: [0, 1, 2] for key in ("nothing_shared", "own_source_and_output", "separate_vocabularies_untied")}
WHOLE = "ForConditionalGeneration"
# For the entry files of the saved folder; all else that is to travel follows from their imports.
CODE = {
    family: (f"configuration_{file}", f"{name}Config", f"modeling_{file}", f"{name}Model", f"{name}{WHOLE}")
    for family, file, name in (("transformer", "heed", "Heed"), ("recurrent", "heed_rnn", "HeedRNN"))
}


@pytest.mark.parametrize(
    ("family", "name", "changes", "is_sharded"),
    [(*variant, number % 2 == 0) for number, variant in enumerate(VARIANTS)],
    ids=[f"{family}-{name}" for family, name, _ in VARIANTS],
)
def test_a_loaded_model_is_the_saved_one_to_the_bit_and_shares_embeddings_as_its_config_says(
    tmp_path, family, name, changes, is_sharded
):
    model = tiny_model(family=family, **changes)
    model.save_pretrained(tmp_path, max_shard_size="8KB" if is_sharded else "5GB")
    saved = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert (len(saved) > 1) == is_sharded
    assert sum(weight.numel() for file in saved for weight in file.values()) == model.num_parameters()
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert matrices_of(loaded) == matrices_of(model) == MATRICES.get(name, [0, 0, 0])


@pytest.mark.parametrize(
    ("before", "after"), [("5GB", "8KB"), ("8KB", "20KB"), ("20KB", "8KB"), ("8KB", "5GB"), ("torch's", "5GB")]
)
def test_what_is_saved_replaces_what_was_there(tmp_path, before, after):
    old, new = tiny_model(), tiny_model(seed=1)
    old.save_pretrained(tmp_path, max_shard_size="5GB" if before == "torch's" else before)
    if before == "torch's":
        (tmp_path / "model.safetensors").unlink()
        torch.save(old.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    others = {"model.fp16.safetensors", "model-of-mine.safetensors"}
    for name in others:
        (tmp_path / name).write_bytes(b"")
    for folder in (tmp_path, tmp_path / "alone"):
        new.save_pretrained(folder, max_shard_size=after)
    assert_near(load_model(tmp_path).lm_head.weight, new.lm_head.weight, 0)
    names, wanted = ({path.name for path in folder.glob("*model*")} for folder in (tmp_path, tmp_path / "alone"))
    assert names == wanted | others


def test_weights_that_were_copied_with_their_config_are_whole_beside_an_older_models_checksums(tmp_path):
    """So transformers' Trainer pushes a checkpoint: it copies files from a list of its own."""
    for seed in (0, 1):
        tiny_model(seed=seed).save_pretrained(tmp_path / str(seed))
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(tmp_path / "1" / name, tmp_path / "0")
    assert_near(load_model(tmp_path / "0").lm_head.weight, tiny_model(seed=1).lm_head.weight, 0)
    assert not hasattr(load_model(tmp_path / "0").config, "_weights_checksums")
    weights = bytearray((tmp_path / "0" / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (tmp_path / "0" / "model.safetensors").write_bytes(weights)
    helpers.assert_error(r"model\.safetensors changed", load_model, tmp_path / "0")


def test_where_weights_lie_in_their_file_changes_no_bit(tmp_path):
    torch.manual_seed(0)
    model = HeedForConditionalGeneration(tiny_config(d_model=64)).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for filling in range(16):
        save_file(weights, path, metadata={"format": "pt", "filling": "x" * filling})
        begins_at = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        if begins_at % 16:
            break
    assert begins_at % 16 == 8
    loaded = HeedForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert all(weight.data_ptr() % 16 == 0 for weight in loaded.parameters())
    one_row = {"input_ids": torch.tensor([[5]]), "decoder_input_ids": torch.tensor([[1]])}
    for given in (one_row, {"input_ids": SOURCE, "decoder_input_ids": helpers.TARGET}):
        assert torch.equal(loaded(**given).logits, model(**given).logits)


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


# Here heedful was imported first, and its models before the Auto classes; new processes try the other orders.
@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_know_heed_and_the_folder_has_exactly_its_models_files_of_code(folders, family):
    configuration, config, modeling, base_class, name = CODE[family]
    files = {path.name for path in folders[family, "5GB"].glob("**/*.py")}
    assert files == closure_of(f"{configuration}.py", f"{modeling}.py", "pipeline_heed.py")
    assert json.loads((folders[family, "5GB"] / "config.json").read_text())["auto_map"] == {
        "AutoConfig": f"{configuration}.{config}",
        "AutoModel": f"{modeling}.{base_class}",
        "AutoModelForSeq2SeqLM": f"{modeling}.{name}",
    }
    config_class, model_class, _ = FAMILIES[family]
    assert type(AutoConfig.for_model(config_class.model_type)) is config_class
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[family, "5GB"])
    assert (type(model), type(model.config)) == (model_class, config_class)
    assert torch.equal(logits_of(model), logits_of(tiny_model(family=family)))
    base = AutoModel.from_pretrained(folders[family, "5GB"])
    assert type(base) is type(AutoModel.from_config(tiny_config(family))) is type(model.model)
    assert all(torch.equal(base.get_parameter(name), weight) for name, weight in model.model.named_parameters())


AUTO_CLASSES = "from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM\n"
BY_AUTO_CLASSES = """
for family, (_, _, modeling, base, name) in code.items():
    config = AutoConfig.from_pretrained(f"{place}/{family} 5GB")
    model = AutoModelForSeq2SeqLM.from_config(config)
    assert (type(model).__module__, type(model).__name__) == (f"heedful.{modeling}", name), type(model)
    assert type(AutoModel.from_config(config)).__name__ == base
"""
WITHOUT_AUTO_CLASSES = """
from pathlib import Path
import heedful
for family, (*_, name) in code.items():
    model = getattr(heedful, name).from_pretrained(f"{place}/{family} 5GB")
    model.save_pretrained(f"{place}/{family} again")
    folders = (Path(place, f"{family} {which}") for which in ("5GB", "again"))
    ours, theirs = ({path.name for path in folder.glob("*.py")} for folder in folders)
    assert ours == theirs, theirs
"""
# What each process imports first, and what it does then. Where heedful is not installed: below.
ORDERS = {
    "heed_is_imported_before_transformers": ("import heedful", [AUTO_CLASSES + BY_AUTO_CLASSES]),
    "heed_is_imported_after_transformers": (AUTO_CLASSES + "import heedful", [AUTO_CLASSES + BY_AUTO_CLASSES]),
    "only_the_models_are_imported_at_first": ("", [WITHOUT_AUTO_CLASSES, AUTO_CLASSES + BY_AUTO_CLASSES]),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("order", helpers.slow_but([*ORDERS][2:], ORDERS))
def test_auto_classes_load_a_saved_folder_in_a_new_process_when(folders, tmp_path, order):
    first, pieces = ORDERS[order]
    values = {"place": str(folders["transformer", "5GB"].parent), "code": CODE}
    pieces = {f"piece {number}": code for number, code in enumerate(pieces)}
    assert helpers.fresh_process(pieces, values, tmp_path, first) == {}


def test_a_shelf_file_imports_only_what_every_hub_user_has_and_no_text_of_it_looks_like_a_relative_import():
    siblings, allowed = {path.stem for path in SHELF}, {"torch", "transformers", *sys.stdlib_module_names}
    for path in SHELF:
        source, relative = path.read_text(), 0
        for node in ast.walk(ast.parse(source)):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level:
                assert (node.level, node.module in siblings) == (1, True), f"{path.name}, line {node.lineno}"
                relative += 1
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module]
            assert {name.split(".")[0] for name in imported} <= allowed, f"{path.name}, line {node.lineno}"
        found = re.findall(r"^\s*(?:from\s+\.\S*\s+import|import\s+\.\S+).*$", source, re.MULTILINE)
        assert len(found) == relative, path.name
        assert "TYPE_CHECKING" not in source, path.name


OPTIONS = [
    ({}, torch.float32),
    ({"dtype": torch.bfloat16}, torch.bfloat16),
    ({"dtype": "float16"}, torch.float16),
    ({"dtype": "auto"}, torch.float32),
    ({"low_cpu_mem_usage": True}, torch.float32),
    *(({"device_map": where}, torch.float32) for where in ("cpu", "auto")),
    ({"device_map": {"": "cpu"}, "dtype": torch.bfloat16}, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("options_and_dtype", "family", "is_auto", "size"),
    helpers.pairwise(OPTIONS, FAMILIES, [True, False], ["8KB", "5GB"]),
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
    assert {weight.dtype for weight in road.from_pretrained(tmp_path, dtype="auto").parameters()} == {dtype}


def test_weights_that_are_not_the_config_of_a_recurrent_model_are_errors(folders, tmp_path):
    cases = [
        ({"encoder_layers": 3}, "lacks model.encoder.layers.2.first_cell"),
        ({"bidirectional": False}, "also holds model.encoder.layers.0.second_cell"),
        ({"hidden_size": 18}, "weights of its config.s shapes"),
    ]
    folder = shutil.copytree(folders["recurrent", "5GB"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())

    def load(changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        HeedRNNForConditionalGeneration.from_pretrained(folder)

    helpers.assert_refused(cases, load, (ValueError, RuntimeError))


def test_a_model_of_a_newer_heed_is_refused_by_every_road(folders, tmp_path):
    folder = folders["transformer", "5GB"]
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == FORMAT_VERSION
    newer = shutil.copytree(folder, tmp_path / "model")
    (newer / "config.json").write_text(json.dumps(config | {"format_version": FORMAT_VERSION + 1, "tomorrow": True}))
    message = f"`format_version` must be at most {FORMAT_VERSION}, but is {FORMAT_VERSION + 1} .*newer Heedful"
    roads = AutoConfig.from_pretrained, AutoModelForSeq2SeqLM.from_pretrained, HeedConfig.from_pretrained, load_model
    for load in roads:
        helpers.assert_error(message, load, newer)


# The code that lies in a saved folder does its work where heedful is not installed; one process looks at all folders.
# The pieces of code below are that process's: what they raise is in the test of their name.

LOST = "model.encoder.layers.0.self_attn.q_proj.weight"
FILE = sorted(closure_of("modeling_heed.py"))[0]  # the others fail as it does

IMPORTS = """
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, pipeline
source, target = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 13, 14]])

def load(name, **settings):
    model = AutoModelForSeq2SeqLM.from_pretrained(f"{place}/{name}", trust_remote_code=True, **settings).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    return model

def logits_of(model):
    with torch.no_grad():
        return model(input_ids=source, decoder_input_ids=target).logits
"""
SAVED = """
model = load(family)
assert torch.equal(logits_of(model), torch.load(f"{place}/{family}.pt"))
assert model.generate(source, num_beams=3, max_length=7).shape[0] == 1
base = AutoModel.from_pretrained(f"{place}/{family}", trust_remote_code=True)
assert type(base).__name__ == type(model.model).__name__
name = "encoder.embed_tokens.weight"
assert torch.equal(base.get_parameter(name), model.model.get_parameter(name))
model.save_pretrained(f"{place}/{family}_again")
assert torch.equal(logits_of(load(f"{family}_again")), logits_of(model))
"""
REFUSED = """
for open_it in (load, lambda name: pipeline(model=f"{place}/{name}", trust_remote_code=True, device="cpu")):
    try:
        open_it(folder)
    except (OSError, ValueError) as error:
        assert named in str(error), error
    else:
        raise AssertionError(open_it)
"""
# transformers imports the config's code and the model's apart from each other, so neither may rely on the other's.
TWO_VOCABULARIES = """
from transformers import WatermarkingConfig
model = load("two_vocabularies")
for settings, tokens in torch.load(f"{place}/two_vocabularies.pt", weights_only=False):
    assert torch.equal(model.generate(source, **settings), tokens), settings
"""
QUANTIZED = """
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig
model = load("transformer", quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
model.save_pretrained(f"{place}/small")
assert load("small").quantized_weights() == model.quantized_weights() != []
"""
ADAPTED = """
from peft import LoraConfig, PeftModel, get_peft_model
merged = load("merged")
adapted = PeftModel.from_pretrained(load("transformer"), f"{place}/adapter").eval()
torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-4, atol=1e-4)
assert not torch.allclose(logits_of(merged), logits_of(load("transformer")), atol=1e-2)
fresh = get_peft_model(merged, LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules="all-linear", r=2))
fresh.train()(input_ids=source, labels=target, num_items_in_batch=6).loss.backward()
assert sum(p.grad is not None and bool(p.grad.any()) for p in fresh.parameters()) > 10
fresh.merge_and_unload().save_pretrained(f"{place}/merged_again")
load("merged_again")
"""
TRANSLATED = """
def assert_translates(*task, folder):
    translate = pipeline(*task, model=f"{place}/{folder}", trust_remote_code=True, device="cpu")
    assert type(translate).__module__.startswith("transformers_modules."), type(translate)
    assert translate(list(texts), batch_size=3) == [{"translation_text": text} for text in texts.values()]
    return translate

assert_translates(folder=folder).save_pretrained(f"{place}/{folder}_again")
assert_translates("heed-translation", folder=f"{folder}_again")
"""
ADAPTERS = "adapters are taken and made"
PIECES = {
    **{f"a {family} model is loaded and saved": f"family = {family!r}\n{SAVED}" for family in FAMILIES},
    "lost weights are named": f"folder, named = 'damaged', {LOST!r}\n{REFUSED}",
    "a lost file is named": f"folder, named = 'without_file', {FILE!r}\n{REFUSED}",
    "tokens are counted by the target's vocabulary": TWO_VOCABULARIES,
    "weights are quantized": QUANTIZED,
    ADAPTERS: ADAPTED,
    **{f"{name} tokenizers": f"folder = {name!r}\n{TRANSLATED}" for name in ("joint", "separate")},
}
NEEDED = {"weights are quantized": "torchao", ADAPTERS: "peft"}  # of extras


def save_models(place):
    torch.set_num_threads(1)  # as in the process that compares to the bit
    for family in FAMILIES:
        model = tiny_model(family=family)
        model.save_pretrained(place / family)
        torch.save(logits_of(model), place / f"{family}.pt")
    (shutil.copytree(place / "transformer", place / "without_file") / FILE).unlink()
    weights = load_file(shutil.copytree(place / "transformer", place / "damaged") / "model.safetensors")
    del weights[LOST]
    save_file(weights, place / "damaged" / "model.safetensors", metadata={"format": "pt"})
    for name, sizes in {"joint": {"vocab_size": 272}, "separate": {"vocab_size": 264, "joint": False}}.items():
        saved_model(place / name, **sizes)


def save_adapter(place):
    import peft

    adapter = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules="all-linear")
    model = peft.get_peft_model(tiny_model(), adapter)
    helpers.shake(torch.nn.ParameterList([weight for weight in model.parameters() if weight.requires_grad]))
    model.save_pretrained(place / "adapter")
    model.eval().merge_and_unload().save_pretrained(place / "merged")


def save_two_vocabularies(place):
    model = tiny_model(vocab_size=40, decoder_vocab_size=71, share_encoder_decoder_embeddings=False)
    model.save_pretrained(place / "two_vocabularies")
    asked = [{"num_beams": 3}, {"watermarking_config": WatermarkingConfig(bias=50.0)}, {"prompt_lookup_num_tokens": 2}]
    asked = [{**settings, "max_new_tokens": 6, "do_sample": False} for settings in asked]
    found = [(settings, model.generate(SOURCE, **settings)) for settings in asked]
    assert any((tokens >= 40).any() for _, tokens in found)
    torch.save(found, place / "two_vocabularies.pt")


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    place = tmp_path_factory.mktemp("folders")
    save_models(place)
    if find_spec(NEEDED[ADAPTERS]):
        save_adapter(place)
    save_two_vocabularies(place)
    pieces = {name: IMPORTS + code for name, code in PIECES.items()}
    values = {"place": str(place), "texts": PAIRS}
    return helpers.fresh_process(pieces, values, place / "process", helpers.WITHOUT_HEEDFUL)


@pytest.mark.multiprocess
@pytest.mark.parametrize("piece", PIECES)
def test_without_heedful(piece, raised):
    if piece in NEEDED:
        pytest.importorskip(NEEDED[piece])
    assert piece not in raised, raised[piece]
