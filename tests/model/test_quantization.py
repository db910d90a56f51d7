"""int8 and int4 weights with torchao: near the model, small on the disk, and the same after saving."""

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("torchao")
from torchao import quantization
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
from transformers import AutoModelForSeq2SeqLM, TorchAoConfig

from heedful import HeedForConditionalGeneration, pretrained_heed, processor_heed
from heedful.data.epochs.micro_batches import collate
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.translation import Translator
from helpers import assert_error, each_once, matrices_of, slow_but, tiny_model
from memorised import PAIRS, saved_model

SIZES = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 1, "decoder_layers": 1}
# How far the logits may be from the model's, as a share of their largest.
SAVED = {
    "int8": (Int8WeightOnlyConfig(), 0.03),
    "int8_activations_too": (quantization.Int8DynamicActivationInt8WeightConfig(), 0.06),
    "int4_in_bytes": (IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), 0.5),
}
if not processor_heed.multiplies_bytes_exactly():
    del SAVED["int8_activations_too"]  # refused, as a test below says
IN_MEMORY = {"int4": (PrototypeInt4WeightOnlyConfig(group_size=32), 0.5)}


@pytest.fixture(scope="module", params=slow_but(["joint"], ["joint", "separate"]))
def folder(request, tmp_path_factory):
    """Save a model that knows the pairs, its three matrices one or its target's and output's one."""
    sizes = {} if request.param == "joint" else {"target_vocab_size": 266, "joint": False}
    return saved_model(tmp_path_factory.mktemp(request.param), vocab_size=267, **sizes, **SIZES)


def quantized(folder, config, dtype=torch.float32):
    return AutoModelForSeq2SeqLM.from_pretrained(folder, quantization_config=TorchAoConfig(config), dtype=dtype).eval()


@torch.no_grad()
def logits_of(model, folder):
    tokenizers = TokenizerPair.from_pretrained(folder)
    rows = zip(tokenizers.encode_source(list(PAIRS)), tokenizers.encode_target(list(PAIRS.values())), strict=True)
    return model(**collate([{"input_ids": source, "labels": target} for source, target in rows], 0)).logits.float()


def assert_translates(translator, **settings):
    assert [row[0].text for row in translator.translate(list(PAIRS), **settings)] == list(PAIRS.values())


def linear_layers_of(model):
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {f"{name}.weight" for name in layers if name != "lm_head"}


@pytest.mark.parametrize(("name", "dtype"), each_once([*SAVED, *IN_MEMORY], [torch.float32, torch.bfloat16]))
def test_a_quantized_model_translates_as_before_and_its_tied_matrices_stay_one(folder, name, dtype):
    config, tolerance = {**SAVED, **IN_MEMORY}[name]
    original = HeedForConditionalGeneration.from_pretrained(folder).eval()
    model = quantized(folder, config, dtype)
    assert set(model.quantized_weights()) == linear_layers_of(model)
    assert matrices_of(model) == matrices_of(original)
    assert model.lm_head.weight.dtype == dtype
    expected = logits_of(original, folder)
    difference = (logits_of(model, folder) - expected).abs().max() / expected.abs().max()
    assert 0 < difference < tolerance
    assert_translates(Translator(model, TokenizerPair.from_pretrained(folder)), num_beams=3)


@pytest.mark.parametrize(("name", "shard"), each_once(SAVED, ["30KB", "5GB"]))
def test_a_quantized_model_is_small_on_the_disk_and_the_same_when_loaded(folder, tmp_path, name, shard):
    model = quantized(folder, SAVED[name][0])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "30KB")
    names = [key for path in files for key in safe_open(path, "pt").keys()]  # noqa: SIM118
    matrices = matrices_of(model)
    assert sum("embed_tokens" in key or "lm_head" in key for key in names) == len(set(matrices))
    embeddings = {id(p): p.nbytes for p in (model.model.encoder.embed_tokens.weight, model.lm_head.weight)}
    sizes = (sum(path.stat().st_size for path in paths) for paths in (files, [folder / "model.safetensors"]))
    small, original = (size - sum(embeddings.values()) for size in sizes)
    assert small < 0.5 * original
    loaded, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert matrices_of(loaded) == matrices
    assert set(loaded.quantized_weights()) == set(model.quantized_weights())
    assert torch.equal(logits_of(loaded.eval(), folder), logits_of(model, folder))
    TokenizerPair.from_pretrained(folder).save_pretrained(tmp_path)
    assert_translates(Translator.from_pretrained(tmp_path))


def test_quantizing_in_memory_is_the_same_as_quantizing_while_loading(folder, tmp_path):
    model = HeedForConditionalGeneration.from_pretrained(folder).eval()
    matrices = matrices_of(model)
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: f"{name}.weight" in linear_layers_of(model))
    assert matrices_of(model) == matrices
    assert torch.equal(logits_of(model, folder), logits_of(quantized(folder, Int8WeightOnlyConfig()), folder))
    assert_error(r"must be quantized by `from_pretrained` to be saved.*TorchAoConfig", model.save_pretrained, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_products_of_bytes_that_would_be_wrong_are_refused(tmp_path, monkeypatch):
    tiny_model(**SIZES).save_pretrained(tmp_path)
    monkeypatch.setattr(pretrained_heed, "multiplies_bytes_exactly", lambda: False)
    with pytest.raises(ValueError, match=r"lacks VNNI instructions, but quantizes activations too"):
        quantized(tmp_path, quantization.Int8DynamicActivationInt8WeightConfig())
    assert quantized(tmp_path, Int8WeightOnlyConfig()).quantized_weights()


def test_torch_multiplies_bytes_exactly_where_the_processor_is_said_to():
    weight = torch.full((64, 16), 127, dtype=torch.int8)
    is_exact = bool((torch._int_mm(weight.T.contiguous(), weight) == 64 * 127**2).all())
    assert is_exact == processor_heed.multiplies_bytes_exactly()


def test_what_cannot_be_quantized_or_saved_is_refused(tmp_path):
    tiny_model(**SIZES).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no weight could be quantized.*`group_size` must divide `d_model` \(64\)"):
        quantized(tmp_path / "model", PrototypeInt4WeightOnlyConfig(group_size=256))
    for packing in ("plain", "plain_int32", "tile_packed_to_4d"):  # of graphics cards
        with pytest.raises(RuntimeError):
            quantized(tmp_path / "model", Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing))
    model = quantized(tmp_path / "model", IN_MEMORY["int4"][0])
    assert_error("Int4OpaqueTensor", model.save_pretrained, tmp_path / "small")
    assert not list(tmp_path.glob("small/*.safetensors"))
