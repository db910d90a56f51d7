"""Translate with a saved Heed model in the same way as with any encoder-decoder of transformers.

    python scripts/generate.py runs/quickstart/model "제 이모는 변호사예요." "여자는 친절했어요." --num-beams 4

`heedful translate` does more: it sorts and batches, reads files, returns scores, and decodes several times as fast.
"""

from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoModelForSeq2SeqLM

from heedful import TokenizerPair
from heedful.cli.main import run
from heedful.cli.options import safe_at_terminals


def generate(
    model: Annotated[Path, typer.Argument(help="Folder with a saved model.")],
    texts: Annotated[list[str], typer.Argument(help="Sentences of the source language.")],
    num_beams: Annotated[int, typer.Option(help="Number of beams; 1 is greedy search.")] = 1,
):
    """Print the translation of each sentence."""
    # Importing heedful registers Heed's models. Without it, pass trust_remote_code=True.
    network = AutoModelForSeq2SeqLM.from_pretrained(model, trust_remote_code=False)
    tokenizers = TokenizerPair.from_pretrained(model)
    inputs = tokenizers.source(texts, padding=True, return_tensors="pt")  # input_ids, attention_mask: (batch, length)
    tokens = network.generate(**inputs, num_beams=num_beams)
    print("\n".join(tokenizers.decode_target(tokens)))


if __name__ == "__main__":
    run(lambda: typer.run(safe_at_terminals(generate)))
