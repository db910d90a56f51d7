"""Time `generate()` of Marian and of Heed, as it is and prepared, the native decoder and CTranslate2, on the CPU.

    python scripts/benchmarks/generate.py                          # small and base, greedy and beam 5
    python scripts/benchmarks/generate.py --sizes base --cases 1x5 --source-length 256 --json out.json

All have the same weights and, in float32, give the same tokens; CTranslate2 is called directly. Every sentence gets as
many tokens. Each figure is a ratio to Marian: how often one translates while Marian translates once. The calls take
turns, and medians are compared.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peers import CTranslate2, interleaved_seconds, make_heed, make_marian, make_sources, write_rows
from transformers.utils import logging

from heedful import NativeDecoder, prepare_for_inference


def compare(size: str, batch: int, beams: int, source_length: int, options: dict[str, Any]) -> dict[str, Any]:
    """Time one case and return its figures.

    Raises:
        RuntimeError: If in float32 the tokens differ.
    """
    vocabulary, new_tokens = options["vocabulary"], options["new_tokens"]
    marian = make_marian(size, vocabulary).eval()
    heed = make_heed(marian).eval()
    tokens, mask = make_sources(batch, source_length, vocabulary)
    ends = {"eos_token_id": None, "forced_eos_token_id": None, "bad_words_ids": None}
    settings = {"num_beams": beams, "do_sample": False, "max_new_tokens": new_tokens, "max_length": None, **ends}
    decoders = {precision: NativeDecoder(heed, precision) for precision in options["precisions"]}
    engines = {
        precision: CTranslate2(heed, precision) for precision in options["precisions"] if precision != "bfloat16"
    }
    prepared = make_heed(marian).eval()
    prepare_for_inference(prepared)
    sources = [row[:length].tolist() for row, length in zip(tokens, mask.sum(1).tolist(), strict=True)]

    def native(decoder: NativeDecoder) -> torch.Tensor:
        return heed.generate(**decoder.encoded(tokens, mask), custom_generate=decoder, **settings)

    calls = {
        "marian": lambda: marian.generate(input_ids=tokens, attention_mask=mask, **settings),
        "generate": lambda: heed.generate(input_ids=tokens, attention_mask=mask, **settings),
        "prepared": lambda: prepared.generate(input_ids=tokens, attention_mask=mask, **settings),
        **{f"native {name}": lambda decoder=decoder: native(decoder) for name, decoder in decoders.items()},
        **{
            f"ctranslate2 {name}": lambda engine=engine: engine.translate(sources, beams, new_tokens, new_tokens)
            for name, engine in engines.items()
        },
    }
    wanted = calls["marian"]().tolist()
    for name in ("generate", "prepared", "native float32"):
        if name in calls and calls[name]().tolist() != wanted:
            raise RuntimeError(f"{name} must give Marian's tokens at {size}, {batch} x {beams}, but does not.")
    seconds = interleaved_seconds(calls, options["rounds"])
    ratios = {name: round(seconds["marian"] / value, 2) for name, value in seconds.items() if name != "marian"}
    per_step = 1000 * seconds["marian"] / new_tokens
    return {"size": size, "batch": batch, "beams": beams, "marian_ms_per_step": round(per_step, 2), **ratios}


def main(
    sizes: Annotated[str, typer.Option(help="Of tiny, small and base, with commas.")] = "small,base",
    cases: Annotated[str, typer.Option(help="Batch x beams, with commas.")] = "1x1,16x1,64x1,1x5,16x5,64x5",
    source_length: Annotated[int, typer.Option(help="Tokens of the longest source.")] = 24,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 24,
    vocabulary: Annotated[int, typer.Option(help="Number of tokens.")] = 10_000,
    precisions: Annotated[str, typer.Option(help="Of the native decoder, with commas.")] = "float32,int8",
    rounds: Annotated[int, typer.Option(help="Timed calls of each.")] = 5,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
):
    """Print one line of ratios per size and case."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    options = {"vocabulary": vocabulary, "new_tokens": new_tokens, "rounds": rounds}
    options["precisions"] = [name for name in precisions.split(",") if name]
    rows = []
    for size in sizes.split(","):
        for case in cases.split(","):
            batch, beams = (int(number) for number in case.split("x"))
            rows.append(compare(size, batch, beams, source_length, options))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    write_rows(rows, json)


if __name__ == "__main__":
    typer.run(main)
