"""Time Marian's and Heed's `generate()` (plain and prepared), the native decoder and CTranslate2 on the CPU.

    python scripts/benchmarks/generate.py                          # small and base, greedy and beam 5
    python scripts/benchmarks/generate.py --sizes base --cases 1x5 --source-length 256 --json out.json

All have the same weights and, in float32, the same tokens; CTranslate2 is called directly. Each sentence gets the same
number of tokens. Figures are speeds relative to Marian. Calls take turns, and medians are compared.
"""

from functools import partial
from typing import Annotated, Any

import typer
from harness import Json, Rounds, Row, Sizes, Threads, Vocabulary, begin, median_seconds, ratios, report
from peers import CTranslate2, endless_search, make_heed, make_marian, make_sources, native

from heedful import prepare_for_inference
from heedful.decoding.native.engine import NativeDecoder


def compare(size: str, batch: int, beams: int, options: dict[str, Any]) -> Row:
    """Time a case and return its figures.

    Raises:
        RuntimeError: If float32 tokens differ.
    """
    vocabulary, new_tokens = options["vocabulary"], options["new_tokens"]
    marian = make_marian(size, vocabulary).eval()
    heed, prepared = (make_heed(marian).eval() for _ in range(2))
    prepare_for_inference(prepared)
    tokens, mask = make_sources(batch, options["source_length"], vocabulary)
    inputs, settings = {"input_ids": tokens, "attention_mask": mask}, endless_search(beams, new_tokens)
    sources = [row[:length].tolist() for row, length in zip(tokens, mask.sum(1).tolist(), strict=True)]
    calls = {
        "marian": lambda: marian.generate(**inputs, **settings),
        "generate": lambda: heed.generate(**inputs, **settings),
        "prepared": lambda: prepared.generate(**inputs, **settings),
    }
    decoders = {name: NativeDecoder(heed, name) for name in options["precisions"]}
    engines = {name: CTranslate2(heed, name) for name in options["precisions"]}
    for name, decoder in decoders.items():
        calls[f"native {name}"] = partial(native, heed, decoder, inputs, settings)
    for name, engine in engines.items():
        calls[f"ctranslate2 {name}"] = partial(engine.translate, sources, beams, new_tokens, new_tokens)
    wanted = calls["marian"]().tolist()
    for name in ("generate", "prepared", "native float32"):
        if name in calls and calls[name]().tolist() != wanted:
            raise RuntimeError(f"{name} must give Marian's tokens at {size}, {batch} x {beams}, but does not.")
    seconds = median_seconds(calls, options["rounds"])
    per_step = 1000 * seconds["marian"].processor / new_tokens
    row = {"size": size, "batch": batch, "beams": beams, "marian_ms_per_step": round(per_step, 2)}
    return row | ratios(seconds, "marian")


def main(
    sizes: Sizes = "small,base",
    cases: Annotated[str, typer.Option(help="Comma-separated batch x beams.")] = "1x1,16x1,64x1,1x5,16x5,64x5",
    source_length: Annotated[int, typer.Option(help="Tokens of the longest source.")] = 24,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each sentence.")] = 24,
    vocabulary: Vocabulary = 10_000,
    precisions: Annotated[str, typer.Option(help="Comma-separated, for the native decoder.")] = "float32,int8",
    rounds: Rounds = 5,
    threads: Threads = 1,
    json: Json = None,
):
    """Print a line of ratios for each size and case."""
    begin(threads)
    options = {"vocabulary": vocabulary, "new_tokens": new_tokens, "rounds": rounds, "source_length": source_length}
    options["precisions"] = [name for name in precisions.split(",") if name]
    shapes = [[int(number) for number in case.split("x")] for case in cases.split(",")]
    report((compare(size, *shape, options) for size in sizes.split(",") for shape in shapes), json)


if __name__ == "__main__":
    typer.run(main)
