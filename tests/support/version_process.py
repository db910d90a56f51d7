"""The program of each side in test_versions.py: python version_process.py write|read|alone FOLDER RESULTS."""

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
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

MODELS = {"joint": "transformer", "separate": "transformer", "recurrent": "recurrent"}


def write(folder: Path):
    """Save a model with one vocabulary, one with two and a recurrent one, each with its tokenizers, and sentences."""
    from heedful.data.tokenizer_training import train_tokenizers
    from heedful_lab.korean_english.pairs import korean_english_pairs
    from helpers import tiny_config, tiny_model

    sides = [[pair[side] for pair in korean_english_pairs("train", 200)] for side in ("ko", "en")]
    for name, family in MODELS.items():
        sizes = {} if name != "separate" else {"target_vocab_size": 260}
        pair = train_tokenizers(*sides, vocab_size=400, joint=name != "separate", **sizes)
        vocabularies = {"vocab_size": len(pair.source), "decoder_vocab_size": len(pair.target)}
        shares = {"share_encoder_decoder_embeddings": name != "separate"}
        model = tiny_model(tiny_config(family, **vocabularies, **pair.special_ids(), **shares), family=family)
        model.generation_config.eos_token_id = model.config.eos_token_id
        model.save_pretrained(folder / name)
        pair.save_pretrained(folder / name)
    (folder / "sentences.json").write_text(json.dumps(sides))


@torch.no_grad()
def computed(folder: Path, sentences: list[list[str]]) -> dict:
    """Return what the tokenizers and the model in a folder make of sentences."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
    own = "transformers_modules" if sys.modules["heedful"] is None else "heedful"
    assert type(model).__module__.partition(".")[0] == own
    source = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    has_two = (folder / "target_tokenizer").is_dir()
    target = AutoTokenizer.from_pretrained(folder / "target_tokenizer", trust_remote_code=True) if has_two else source
    tokens = [tokenizer(texts)["input_ids"] for tokenizer, texts in zip((source, target), sentences, strict=True)]
    inputs, labels = (torch.tensor(rows[:1]) for rows in tokens)
    beams = model.generate(inputs, max_new_tokens=8, num_beams=3, num_return_sequences=3)
    return {
        "tokens": tokens,
        "logits": model(inputs, labels=labels).logits[0, :, ::13].tolist(),
        "greedy": model.generate(inputs, max_new_tokens=8, do_sample=False).tolist(),
        "beams": beams.tolist(),
        "texts": target.batch_decode(beams, skip_special_tokens=True),
    }


if __name__ == "__main__":
    action, place, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if action == "write":
        write(place)
    sentences = json.loads((place / "sentences.json").read_text())
    results = {name: computed(place / name, sentences) for name in MODELS}
    path.write_text(json.dumps({"transformers": transformers.__version__, **results}))
