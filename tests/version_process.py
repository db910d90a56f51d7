"""What each side of test_versions.py does: python version_process.py write|read FOLDER RESULTS."""

import json
import sys
from pathlib import Path

import torch
import transformers

from heedful import HeedForConditionalGeneration, TokenizerPair, Translator
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from helpers import tiny_config, tiny_model

PAIRS = list(korean_english_pairs("train", 200))
KOREAN, ENGLISH = [pair["ko"] for pair in PAIRS], [pair["en"] for pair in PAIRS]


def write(folder: Path):
    """Save a model with one vocabulary and one with two, each with its tokenizers."""
    for name, sizes in {"joint": {}, "separate": {"target_vocab_size": 260}}.items():
        pair = train_tokenizers(KOREAN, ENGLISH, vocab_size=400, joint=name == "joint", **sizes)
        vocabularies = {"vocab_size": len(pair.source), "decoder_vocab_size": len(pair.target)}
        config = tiny_config(**vocabularies, **pair.special_ids(), share_encoder_decoder_embeddings=name == "joint")
        model = tiny_model(config)
        model.generation_config.eos_token_id = config.eos_token_id
        model.save_pretrained(folder / name)
        pair.save_pretrained(folder / name)


@torch.no_grad()
def read(folder: Path) -> dict:
    """Return what the models in a folder compute, generate and translate."""
    results = {"transformers": transformers.__version__}
    for name in ("joint", "separate"):
        pair = TokenizerPair.from_pretrained(folder / name)
        model = HeedForConditionalGeneration.from_pretrained(folder / name).eval()
        sources, targets = pair.encode_source(KOREAN), pair.encode_target(ENGLISH)
        inputs = torch.tensor([sources[0]])
        logits = model(input_ids=inputs, labels=torch.tensor([targets[0]])).logits
        results[name] = {
            "tokens": [sources, targets],
            "texts": pair.decode_target(targets),
            "logits": logits[0, :, ::13].tolist(),
            "greedy": model.generate(inputs, max_new_tokens=8, do_sample=False).tolist(),
            "beams": model.generate(inputs, max_new_tokens=8, num_beams=3, num_return_sequences=3).tolist(),
            "translations": [
                best.text for best, *_ in Translator.from_pretrained(folder / name).translate(KOREAN[:3])
            ],
        }
    return results


if __name__ == "__main__":
    action, place, results = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if action == "write":
        write(place)
    results.write_text(json.dumps(read(place)))
