"""What each side of test_versions.py does: python version_process.py write|read|alone FOLDER RESULTS."""

import json
import sys
from importlib import import_module
from pathlib import Path

if sys.argv[1] == "alone":
    sys.modules["heedful"] = None  # makes its import fail: the code in the folders has to do
else:
    import_module("heedful")  # makes the Auto classes know Heed's models

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

MODELS = {"joint": "transformer", "separate": "transformer", "recurrent": "recurrent"}


def write(folder: Path):
    """Save a model with one vocabulary, one with two and a recurrent one, each with its tokenizers and a batch."""
    from heedful.data.tokenizer_training import train_tokenizers
    from heedful_lab.korean_english.pairs import korean_english_pairs
    from helpers import tiny_config, tiny_model

    pairs = list(korean_english_pairs("train", 200))
    korean, english = [pair["ko"] for pair in pairs], [pair["en"] for pair in pairs]
    for name, family in MODELS.items():
        sizes = {} if name != "separate" else {"target_vocab_size": 260}
        pair = train_tokenizers(korean, english, vocab_size=400, joint=name != "separate", **sizes)
        vocabularies = {"vocab_size": len(pair.source), "decoder_vocab_size": len(pair.target)}
        shares = {"share_encoder_decoder_embeddings": name != "separate"}
        model = tiny_model(tiny_config(family, **vocabularies, **pair.special_ids(), **shares), family=family)
        model.generation_config.eos_token_id = model.config.eos_token_id
        model.save_pretrained(folder / name)
        pair.save_pretrained(folder / name)
        batch = {"input_ids": pair.encode_source(korean[:1]), "labels": pair.encode_target(english[:1])}
        (folder / name / "batch.json").write_text(json.dumps(batch))
        (folder / name / "sentences.json").write_text(json.dumps([korean, english]))


@torch.no_grad()
def computed(folder: Path) -> dict:
    """Return what the models in a folder compute and generate."""
    results = {"transformers": transformers.__version__}
    for name in MODELS:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / name, trust_remote_code=True).eval()
        own = "transformers_modules" if sys.modules["heedful"] is None else "heedful"
        assert type(model).__module__.partition(".")[0] == own
        batch = {key: torch.tensor(ids) for key, ids in json.loads((folder / name / "batch.json").read_text()).items()}
        inputs = batch["input_ids"]
        results[name] = {
            "logits": model(**batch).logits[0, :, ::13].tolist(),
            "greedy": model.generate(inputs, max_new_tokens=8, do_sample=False).tolist(),
            "beams": model.generate(inputs, max_new_tokens=8, num_beams=3, num_return_sequences=3).tolist(),
        }
    return results


def translated(folder: Path) -> dict:
    """Return the tokens and texts of the tokenizers in a folder, and translations."""
    from heedful import TokenizerPair, Translator

    results = {}
    for name in MODELS:
        korean, english = json.loads((folder / name / "sentences.json").read_text())
        pair = TokenizerPair.from_pretrained(folder / name)
        targets = pair.encode_target(english)
        found = Translator.from_pretrained(folder / name).translate(korean[:3])
        results[name] = {
            "tokens": [pair.encode_source(korean), targets],
            "texts": pair.decode_target(targets),
            "translations": [best.text for best, *_ in found],
        }
    return results


if __name__ == "__main__":
    action, place, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if action == "write":
        write(place)
    results = computed(place)
    if action != "alone":
        for name, found in translated(place).items():
            results[name] |= found
    path.write_text(json.dumps(results))
