"""Time the translation of real sentences with a trained model, and with Marian and its weights.

    python scripts/benchmarks/translate.py MODEL --data path/to/test.jsonl.gz --source de --target en

Marian's `generate()` translates sentences in the given order, as do the rows "unsorted" and `generate`. The others
sort by length first. Only ids are timed; batches have equal sizes. Float32 tokens must equal Marian's, except for
counted ties by rounding; CTranslate2 ends beams by a different rule. Each row has its BLEU.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import Json, Row, begin, median_seconds, report
from peers import CTranslate2, marian_like, native
from torch.nn.utils.rnn import pad_sequence

from heedful import HeedForConditionalGeneration, TokenizerPair
from heedful.data.sources import read_pairs
from heedful.decoding.engines import pad_sources
from heedful.decoding.native.engine import NativeDecoder
from heedful.evaluation.metrics import score_translations

Rows = list[list[int]]


def translated(generate: Callable[..., torch.Tensor], is_sorted: bool, sources: Rows, size: int, config: Any) -> Rows:
    """Return each sentence's output of `generate`, up to its end, in batches of equal size.

    Args:
        generate: Function of each batch's `input_ids` and `attention_mask`.
        is_sorted: Sort the sentences by length.
        sources: Token ids of each sentence.
        size: Sentences per batch.
        config: The model's config.
    """
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]) if is_sorted else number)
    found: Rows = [[] for _ in order]
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        batch = pad_sources([sources[number] for number in numbers], config.pad_token_id, torch.device("cpu"))
        for number, row in zip(numbers, generate(**batch).tolist(), strict=True):
            end = row.index(config.eos_token_id, 1) if config.eos_token_id in row[1:] else len(row)
            found[number] = row[1:end]
    return found


def contestants(model: Any, beams: int, longest: int, precisions: list[str]) -> dict[str, tuple[Callable, bool]]:
    """Return by name the function that translates a batch, and whether its sentences are sorted."""
    marian = marian_like(model)
    settings = {"num_beams": beams, "do_sample": False, "max_new_tokens": longest, "max_length": None}
    chosen = {name: getattr(model.generation_config, name) for name in ("length_penalty", "early_stopping")}
    settings |= {name: value for name, value in chosen.items() if value is not None}

    def decoded(precision: str) -> Callable[..., torch.Tensor]:
        decoder = NativeDecoder(model, precision)
        return lambda **batch: native(model, decoder, batch, settings)

    def exported(engine: CTranslate2) -> Callable[..., torch.Tensor]:
        def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            lengths = attention_mask.sum(1).tolist()
            sources = [row[:length].tolist() for row, length in zip(input_ids, lengths, strict=True)]
            found = [torch.tensor([0, *row]) for row in engine.translate(sources, beams, longest)]
            return pad_sequence(found, batch_first=True, padding_value=model.config.eos_token_id)

        return generate

    calls = {
        "marian": (lambda **batch: marian.generate(**batch, **settings), False),
        "marian sorted": (lambda **batch: marian.generate(**batch, **settings), True),
        "generate": (lambda **batch: model.generate(**batch, **settings), False),
        "native float32 unsorted": (decoded("float32"), False),
    }
    calls |= {f"native {name}": (decoded(name), True) for name in precisions}
    return calls | {f"ctranslate2 {name}": (exported(CTranslate2(model, name)), True) for name in precisions}


def compare(
    model: Any, tokenizers: TokenizerPair, pairs: list[dict[str, str]], options: dict[str, Any]
) -> Iterator[Row]:
    """Time a beam width and yield a row for each decoder."""
    sources = tokenizers.encode_source([pair["source"] for pair in pairs])
    found = {}

    def translate(name: str, generate: Callable, is_sorted: bool) -> None:
        found[name] = translated(generate, is_sorted, sources, options["batch"], model.config)

    entries = contestants(model, options["beams"], options["longest"], options["precisions"])
    calls = {name: partial(translate, name, *entry) for name, entry in entries.items()}
    seconds = median_seconds(calls, options["rounds"])
    references = [pair["target"] for pair in pairs]
    for name in calls:
        score = score_translations(tokenizers.decode_target(found[name]), references)["bleu"]
        yield {
            "beams": options["beams"],
            "name": name,
            "ratio": round(seconds["marian"].processor / seconds[name].processor, 2),
            "ratio, clock": round(seconds["marian"].clock / seconds[name].clock, 2),
            "sentences_per_second": round(len(pairs) / seconds[name].processor, 1),
            "differing": sum(ours != theirs for ours, theirs in zip(found[name], found["marian"], strict=True)),
            "bleu": round(score, 2),
        }


def main(
    model: Annotated[Path, typer.Argument(help="Folder with a trained model that has only Marian's options.")],
    data: Annotated[str, typer.Option(help="Sentences and references, a location as in a recipe.")],
    source: Annotated[str, typer.Option(help="Source language or column.")],
    target: Annotated[str, typer.Option(help="Reference language or column.")],
    limit: Annotated[int, typer.Option(help="Most sentences.")] = 1000,
    beams: Annotated[str, typer.Option(help="Comma-separated beam widths.")] = "1,5",
    batch: Annotated[int, typer.Option(help="Sentences per batch.")] = 64,
    longest: Annotated[int, typer.Option(help="Largest number of tokens in a translation.")] = 100,
    precisions: Annotated[str, typer.Option(help="Comma-separated, for the native decoder.")] = "float32,int8",
    rounds: Annotated[int, typer.Option(help="Timed runs over all sentences.")] = 3,
    json: Json = None,
):
    """Print a line for each beam width and decoder; `ratio` is relative to Marian."""
    begin(threads=1)
    trained = HeedForConditionalGeneration.from_pretrained(model).eval()
    tokenizers = TokenizerPair.from_pretrained(model)
    pairs = list(islice(read_pairs(data, source, target), limit))
    options = {"batch": batch, "longest": longest, "rounds": rounds, "precisions": precisions.split(",")}
    widths = [int(width) for width in beams.split(",")]
    rows = (compare(trained, tokenizers, pairs, options | {"beams": width}) for width in widths)
    report((row for compared in rows for row in compared), json)


if __name__ == "__main__":
    typer.run(main)
