"""The code that lies in a saved folder does its work where heedful is not installed; one process looks at all folders.

The pieces of code below are that process's: what they raise is in the test of their name.
"""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import WatermarkingConfig

from helpers import FAMILIES, SOURCE, WITHOUT_HEEDFUL, closure_of, fresh_process, logits_of, shake, tiny_model
from memorised import PAIRS, saved_model

pytestmark = pytest.mark.multiprocess
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
PIECES = {
    **{f"a {family} model is loaded and saved": f"family = {family!r}\n{SAVED}" for family in FAMILIES},
    "lost weights are named": f"folder, named = 'damaged', {LOST!r}\n{REFUSED}",
    "a lost file is named": f"folder, named = 'without_file', {FILE!r}\n{REFUSED}",
    "tokens are counted by the target's vocabulary": TWO_VOCABULARIES,
    "weights are quantized": QUANTIZED,
    "adapters are taken and made": ADAPTED,
    **{f"{name} tokenizers": f"folder = {name!r}\n{TRANSLATED}" for name in ("joint", "separate")},
}


def save_models(place):
    for family in FAMILIES:
        model = tiny_model(family=family)
        model.save_pretrained(place / family)
        torch.save(logits_of(model), place / f"{family}.pt")
    (shutil.copytree(place / "transformer", place / "without_file") / FILE).unlink()
    weights = load_file(shutil.copytree(place / "transformer", place / "damaged") / "model.safetensors")
    del weights[LOST]
    save_file(weights, place / "damaged" / "model.safetensors", metadata={"format": "pt"})
    model = get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules="all-linear"))
    shake(torch.nn.ParameterList([weight for weight in model.parameters() if weight.requires_grad]))
    model.save_pretrained(place / "adapter")
    model.eval().merge_and_unload().save_pretrained(place / "merged")
    for name, sizes in {"joint": {"vocab_size": 272}, "separate": {"vocab_size": 264, "joint": False}}.items():
        saved_model(place / name, **sizes)


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
    save_two_vocabularies(place)
    pieces = {name: IMPORTS + code for name, code in PIECES.items()}
    return fresh_process(pieces, {"place": str(place), "texts": PAIRS}, place / "process", WITHOUT_HEEDFUL)


@pytest.mark.parametrize("piece", PIECES)
def test_without_heedful(piece, raised):
    assert piece not in raised, raised[piece]
