"""`heedful score`: the log-probability of given translations."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from operator import itemgetter
from typing import Annotated, Any

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.translate import CHUNK
from heedful.files import json_line

SIDES = (("source", "target"), ("target", "source"))


def score(
    model: options.AnyModel,
    pairs: Annotated[list[str], Argument(metavar="PAIRS", help="File (or two), Hub dataset or builtin:SPLIT:COUNT.")],
    source: options.Source = "source",
    target: options.Target = "target",
    output: options.TextFile = None,
    tokens: Annotated[bool, Option("--tokens", help="Also write each token with its score.")] = False,
    backward: Annotated[str | None, Option(help="Model of the reverse direction, to combine both.")] = None,
    to: options.TargetLanguage = None,
    backward_to: Annotated[str | None, Option(help="Source language, for a multilingual --backward model.")] = None,
    token_budget: Annotated[int, Option(help="Padded tokens per batch, sources and targets.")] = 8192,
    as_json: Annotated[bool, Option("--json", help="Write JSON lines; implied if --output ends in .jsonl.")] = False,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Score the log-probability of given translations in nats. The order is kept.

    Writes a tab-separated table with a header, or pairs with scores as JSON lines.
    """
    options.check_output(output, "--output", pairs)
    rows = options.read_pairs(pairs, source, target, streaming=True)
    directions = [(options.load_translator(model, device, revision), to)]
    if backward is not None or backward_to is not None:
        other = directions[0][0] if backward is None else options.load_translator(backward, device)
        options.check_reverse(other, backward_to, "--backward-to")
        directions.append((other, backward_to))
    found = _scored(rows, directions, token_budget)
    as_json = as_json or (output is not None and ".jsonl" in output.suffixes)
    sums = [[0, 0, 0.0] for _ in directions]  # pairs, tokens and their log-probability
    is_shown = output is not None or not sys.stdout.isatty()
    with options.progress_bar(is_shown=is_shown) as bar, options.writing(output) as stream:
        for number, (pair, scores) in enumerate(found):
            bar.update()
            values = _score_values(scores, tokens)
            line = "\t".join(map(_cell, values.values()))
            if as_json:
                line = json_line(pair | values, ensure_ascii=output is None and not options.writes_unicode())
            elif number == 0:
                print(*values, sep="\t", file=stream)
            print(line, file=stream)
            for sum_, each in zip(sums, scores, strict=True):
                if each is not None:
                    sum_[:] = sum_[0] + 1, sum_[1] + len(each.token_ids), sum_[2] + each.log_probability
    for (_, side), (count, length, total) in zip(SIDES, sums, strict=False):
        nats = -total / max(length, 1)
        mean = f": {nats:.4f} nats a token, perplexity {math.exp(min(nats, 100)):.2f}" if count else ""
        print(f"{count:,} pairs, {length:,} {side} tokens{mean}", file=sys.stderr)


def _scored(rows: Iterable[dict[str, str]], directions: list[tuple[Any, str | None]], budget: int) -> Iterator[Any]:
    pairs, *copies = tee(rows, 1 + len(directions))
    settings: dict[str, Any] = {"token_budget": budget, "keep_going": True, "chunk_size": CHUNK}
    found = [
        translator.score_pairs(map(itemgetter(*sides), copy), target_language=language, **settings)
        for (translator, language), copy, sides in zip(directions, copies, SIDES, strict=False)
    ]
    # Strictly, so that each iterator ends and warns.
    yield from zip(pairs, zip(*found, strict=True), strict=True)


def _score_values(scores: Sequence[Any], with_tokens: bool) -> dict[str, Any]:
    """Return a pair's scores as columns, `None` for a missing score."""
    from heedful.decoding.scoring import dual_cross_entropy

    values: dict[str, Any] = {}
    for prefix, score in zip(("", "backward_"), scores, strict=False):
        for name in ("log_probability", "per_token"):
            values[prefix + name] = score and round(getattr(score, name), 6)
        values[f"{prefix}tokens"] = score and len(score.token_ids)
        if with_tokens:
            parts = score and zip(score.tokens, score.token_scores, strict=True)
            values[f"{prefix}token_scores"] = parts and [[token, round(value, 6)] for token, value in parts]
    if len(scores) > 1:
        values["dual_cross_entropy"] = round(dual_cross_entropy(*scores), 6) if all(scores) else None
    return values


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{token}:{score:.4f}" for token, score in value)
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
