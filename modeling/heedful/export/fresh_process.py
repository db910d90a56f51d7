"""Run a saved model with transformers alone, in a new process that runs this file and cannot import Heedful."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def ask(folder: Path, inputs: dict[str, Any], searches: list[tuple[Any, ...]], **others: Any) -> dict[str, Any]:
    """Return a batch's `logits`, the `tokens` from each search by settings and inputs, and the `ids` of `texts`.

    `trust_remote_code` runs the folder's code, which must then exist. Any failure is a `ValueError`.
    """
    with tempfile.TemporaryDirectory() as work:
        asked = {"dtype": torch.float32, "trust_remote_code": False, "texts": (), **others}
        asked |= {"inputs": inputs, "searches": searches, "threads": torch.get_num_threads()}
        torch.save(asked, f"{work}/asked.pt")
        # -P: no imports from the current folder or this file's.
        command = [sys.executable, "-P", __file__, str(folder.resolve()), work]
        environment = {**os.environ, "HF_MODULES_CACHE": f"{work}/modules", "HF_HUB_OFFLINE": "1"}
        options: Any = {"env": environment, "cwd": work, "encoding": "utf-8", "errors": "replace"}
        done = subprocess.run(command, capture_output=True, check=False, **options)
        if done.returncode:
            reason = ["nothing", *done.stderr.strip().splitlines()][-1]
            raise ValueError(f"transformers alone cannot run the model: {reason}")
        return torch.load(f"{work}/answer.pt")


@torch.inference_mode()
def answer(folder: str, work: str) -> None:
    """Compute the results that `ask` requests in a folder."""
    sys.modules["heedful"] = None  # type: ignore[assignment]  # makes its import fail
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    asked = torch.load(f"{work}/asked.pt", map_location="cpu")
    torch.set_num_threads(asked["threads"])
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": asked["trust_remote_code"]}
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=asked["dtype"], **options).eval()
    place = type(model).__module__
    if asked["trust_remote_code"] and not place.startswith("transformers_modules."):
        raise ImportError(f"{type(model).__name__} comes from {place}, not from the folder")
    found: dict[str, Any] = {"logits": model(**asked["inputs"], use_cache=False).logits, "tokens": []}
    for settings, inputs in asked["searches"]:
        model.generation_config.update(**settings)
        found["tokens"].append(model.generate(**inputs))
    if asked["texts"]:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        found["ids"] = [tokenizer(asked["texts"])["input_ids"], tokenizer(text_target=asked["texts"])["input_ids"]]
    torch.save(found, f"{work}/answer.pt")


if __name__ == "__main__":
    answer(*sys.argv[1:])
