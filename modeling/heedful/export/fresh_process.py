"""A program that answers `asked.pt` by `answer.pt`, with transformers alone; `transformers_export.py` runs it."""

import sys
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


@torch.inference_mode()
def answer(folder: str, work: str) -> None:
    """Write the ids of texts as source and as target, the tokens of each search, and the logits of a batch."""
    sys.modules["heedful"] = None  # type: ignore[assignment]
    asked = torch.load(f"{work}/asked.pt")
    torch.set_num_threads(asked["threads"])
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    found: dict[str, Any] = {"logits": model(**asked["inputs"]).logits, "tokens": []}
    found["ids"] = [tokenizer(asked["texts"])["input_ids"], tokenizer(text_target=asked["texts"])["input_ids"]]
    for settings, inputs in asked["searches"]:
        model.generation_config.update(**settings)
        found["tokens"].append(model.generate(**inputs))
    torch.save(found, f"{work}/answer.pt")


if __name__ == "__main__":
    answer(*sys.argv[1:])
