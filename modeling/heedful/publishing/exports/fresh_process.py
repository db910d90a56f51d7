"""What transformers alone makes of an exported folder; `transformers_export.py` runs this file as a program.

It reads requests from standard input, a line of JSON each, and answers each with a line. No code in the folder is
trusted, and Heedful cannot be imported.
"""

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


def answer(model: Any, tokenizer: Any, request: dict[str, Any]) -> Any:
    """Return the ids of texts as source and as target, the tokens of a batch, or how far logits in a file differ."""
    if "texts" in request:
        return [tokenizer(request["texts"])["input_ids"], tokenizer(text_target=request["texts"])["input_ids"]]
    if "settings" in request:
        inputs = {name: torch.tensor(request[name]) for name in ("input_ids", "attention_mask")}
        model.generation_config.update(**request["settings"])
        return model.generate(**inputs).tolist()
    inputs = load_file(request["file"])
    expected, is_compared = inputs.pop("logits"), inputs.pop("is_compared")
    found = model(**inputs).logits[is_compared][:, : expected.shape[-1]]
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


@torch.inference_mode()
def serve(folder: str, threads: str) -> None:
    """Answer until standard input ends."""
    sys.modules["heedful"] = None  # type: ignore[assignment]
    torch.set_num_threads(int(threads))
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(model, tokenizer, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
