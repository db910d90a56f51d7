"""What `heedful attention` is asked for, and its answer."""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heedful.files import check_matplotlib, check_writable
from heedful.inference.attention.drawing import PICTURE_SUFFIXES, draw_attention, draw_attention_grid
from heedful.inference.attention.maps import AttentionMap, AttentionMaps, AttentionSteps, attention_maps
from heedful.inference.attention.measures import (
    GoldAlignment,
    alignment_errors,
    attention_entropy,
    attention_rollout,
    read_gold_alignments,
    word_alignment,
    word_attention,
    write_links,
)
from heedful.inference.attention.recording import Kind
from heedful.inference.attention.report import REPORT_SUFFIXES, write_attention_report
from heedful.inference.translation import Translator

Pair = tuple[str, str | None]
# Options that do not go together, and why; `page` and `picture` are an --output of that kind.
CONFLICTS = (
    ("head", "grid", "which draws all heads"),
    ("rollout", "grid", "which draws single heads"),
    ("head", "rollout", "which averages the heads"),
    ("rollout", "page", "where it can be chosen"),
    ("grid", "alignment", "which reads one map"),
    ("grid", "gold", "which reads one map"),
    ("output", "data", "because it shows one sentence"),
    ("entropy", "data", "because it is of one sentence"),
    ("steps", "data", "because they are of one sentence"),
    ("steps", "rollout", "which averages the heads"),
    ("steps", "json", "which writes no text"),
)
NAMES = {"page": "a report (.html)"}
ERROR_LINE = "AER {error_rate:.4f}  precision {precision:.4f}  recall {recall:.4f}  links {links}"


@dataclass(frozen=True)
class Request:
    """The options of `heedful attention`, by their names there; they do not contradict each other.

    It is a `ValueError` to ask for nothing, and to give an option that would be ignored.
    """

    pairs: Sequence[Pair]  # each source with its target, or None to follow the model's own translation
    data: bool = False  # whether the pairs come from files
    # What to draw, or which map to read: by default the mean over all heads of the last layer's cross-attention, and
    # all layers of a grid or rollout.
    output: Path | None = None
    kind: Kind | None = None
    layer: int | None = None
    head: int | None = None
    grid: bool = False
    rollout: bool = False
    scores: bool = False
    tokens: bool = False
    # What to print.
    alignment: bool = False
    gold: Path | None = None
    entropy: bool = False
    steps: bool = False  # of head 0, unless another is chosen
    json: bool = False

    def __post_init__(self):
        given = {name for name, value in vars(self).items() if value is not None and value is not False}
        asked = "-o FILE, --alignment, --gold FILE, --entropy, --steps or --json"
        if not given & {"output", "alignment", "gold", "entropy", "steps", "json"}:
            raise ValueError(f"Something must be asked for: {asked}.")
        if self.output is not None:
            check_writable(self.output, (*PICTURE_SUFFIXES, *REPORT_SUFFIXES))
            given.add("page" if self.is_page else "picture")
        if self.grid and "picture" not in given:
            raise ValueError(f"`--grid` must come with a picture to draw (-o FILE, {', '.join(PICTURE_SUFFIXES)}).")
        if self.scores and not self.grid:
            raise ValueError("`--scores` must come with --grid; a page shows them, and --steps writes them.")
        if self.tokens and self.output is None:
            raise ValueError("`--tokens` must come with a picture or page (-o FILE): nothing else shows words.")
        for one, other, reason in CONFLICTS:
            if {one, other} <= given:
                raise ValueError(f"`--{one}` must not come with {NAMES.get(other, f'--{other}')}, {reason}.")
        if given & {"alignment", "gold"} and self.kind not in (None, "cross"):
            raise ValueError("`--kind` must be cross to align words.")
        if given & {"layer", "head", "rollout"} and not given & {"output", "alignment", "gold", "steps", "json"}:
            options = "`--layer`, `--head` and `--rollout`"
            raise ValueError(f"{options} must not come with --entropy alone, which tells of all heads.")
        if "picture" in given:
            check_matplotlib()

    @property
    def is_page(self) -> bool:
        """Whether a page is written, and not a picture."""
        return self.output is not None and self.output.suffix.lower() in REPORT_SUFFIXES

    def gold_alignments(self) -> list[GoldAlignment]:
        """Read the given alignments, if any; links of missing words belong to other pairs, or count from 1."""
        if self.gold is None:
            return []
        gold = read_gold_alignments(self.gold)
        if len(gold) != len(self.pairs):
            raise ValueError(
                f"`--gold` must have {len(self.pairs)} lines, one for each pair, but has {len(gold)} instead."
            )
        for line, (given, (source, target)) in enumerate(zip(gold, self.pairs, strict=True), start=1):
            sizes = len(source.split()), math.inf if target is None else len(target.split())
            for link in sorted(given.possible):
                if link[0] >= sizes[0] or link[1] >= sizes[1]:
                    words = f"{sizes[0]} words" if target is None else f"{sizes[0]} and {sizes[1]} words"
                    raise ValueError(
                        f"`--gold` must link words of the pair, counted from 0, but links {link[0]}-{link[1]} of "
                        f"{words} instead, in line {line} of {self.gold}."
                    )
        return gold

    def answer(
        self, translator: Translator, gold: Sequence[GoldAlignment] = (), target_language: str | None = None
    ) -> dict[str, Any]:
        """Compute and write what is asked for, with the gold alignments that were read.

        What was found can be JSON: `output`, `alignments`, `alignment_errors`, `entropy` (by layer and head, in `nats`
        and as a `share`), `steps` (lines of text) and `maps`, as far as they were asked for.
        """
        kind, answer, links = self.kind or "cross", dict[str, Any](), []
        # A page shows all kinds, and rollout to the source needs the encoder's.
        kinds = None if self.is_page or (self.rollout and kind == "cross") else [kind]
        options: dict[str, Any] = {"kinds": kinds, "target_language": target_language}
        for source, target in self.pairs:
            maps = attention_maps(translator, translator.tokenizers, source, target, **options)
            if self.alignment or self.gold:
                links.append(word_alignment(maps, self._map(maps)))
            if self.output is not None:
                answer["output"] = str(self._write(maps, self.output))
            if self.entropy:
                entropy = attention_entropy(maps, kind)
                answer["entropy"] = {"nats": entropy.nats.tolist(), "share": entropy.share.tolist()}
            if self.steps:
                steps = maps.steps(kind, -1 if self.layer is None else self.layer, self.head or 0)
                answer["steps"] = [self._title(maps, self.head or 0), *_steps_lines(steps)]
            if self.json:
                attention = self._map(maps)
                numbers = [[round(float(weight), 6) for weight in row] for row in attention.weights]
                answer.setdefault("maps", []).append({"kind": kind, **vars(attention), "weights": numbers})
        if self.alignment or self.gold:
            answer["alignments"] = [write_links(each) for each in links]
        if self.gold:
            answer["alignment_errors"] = alignment_errors(links, gold)._asdict()
        return answer

    def _map(self, maps: AttentionMaps) -> AttentionMap:
        if self.rollout:
            return attention_rollout(maps, self.kind or "cross", self.layer)
        return maps.map(self.kind or "cross", -1 if self.layer is None else self.layer, self.head)

    def _write(self, maps: AttentionMaps, path: Path) -> Path:
        if self.is_page:
            layer = -1 if self.layer is None else self.layer
            chosen: dict[str, Any] = {"kind": self.kind, "layer": layer, "head": self.head, "tokens": self.tokens}
            return write_attention_report(maps, path, self.pairs[0][0], **chosen)
        kind = self.kind or "cross"
        if self.grid:
            title = f"{kind} attention of each head"
            return draw_attention_grid(maps, path, kind, self.layer, title, self.tokens, self.scores)
        attention = self._map(maps)
        return draw_attention(
            attention if self.tokens else word_attention(maps, attention), path, self._title(maps, self.head)
        )

    def _title(self, maps: AttentionMaps, head: int | None) -> str:
        """Say which layer and head a picture or the steps show."""
        kind = self.kind or "cross"
        last, heads = maps.layers(kind) - 1, maps.heads(kind)
        number = maps.layer_number(kind, -1 if self.layer is None else self.layer)
        layer = f"layer {number}" + (" (the last)" if number == last else f" of 0 to {last}")
        if self.rollout:
            return f"rollout of {kind} attention, {layer}"
        return f"{kind} attention, {layer}, {f'mean of {heads} heads' if head is None else f'head {head}'}"


def pairs_of(
    text: str | None, target: str | None, data: Sequence[str] | None, source: str | None, target_column: str | None
) -> list[Pair]:
    """Return the sentence of the command line, or the pairs of its files."""
    if (text is None) == (data is None):
        raise ValueError("Either TEXT or --data must be given, and not both.")
    if text is not None and (source or target_column):
        raise ValueError("`--source-column` and `--target-column` must come with --data, whose columns they name.")
    if text is not None:
        return [(text, target)]
    if target is not None:
        raise ValueError("`--target` must come with TEXT: the pairs of --data have targets.")
    from heedful.data.sources import read_pairs

    files: Any = data[0] if data and len(data) == 1 else data
    pairs = read_pairs(files, source=source or "source", target=target_column or "target", split="test")
    if not len(pairs):
        raise ValueError("`--data` must hold pairs, but has none.")
    return [(pair["source"], pair["target"]) for pair in pairs]


def answer_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Write an answer as lines of text."""
    yield from answer.get("alignments", [])
    if "alignment_errors" in answer:
        yield ERROR_LINE.format(**answer["alignment_errors"])
    if "entropy" in answer:
        nats, shares = answer["entropy"]["nats"], answer["entropy"]["share"]
        cells = ["nats (share of log n)", *(f"head {head}" for head in range(len(nats[0])))]
        table = [cells, *([f"layer {layer}"] for layer in range(len(nats)))]
        for cells, row, parts in zip(table[1:], nats, shares, strict=True):
            cells += [f"{nat:.2f} ({share:4.0%})" for nat, share in zip(row, parts, strict=True)]
        for first, *others in table:
            yield f"{first:<23}" + "".join(f"{cell:<15}" for cell in others).rstrip()
    yield from answer.get("steps", [])
    if "output" in answer:
        yield answer["output"]


def _steps_lines(steps: AttentionSteps) -> Iterator[str]:
    """Write equation 1 with its numbers and shapes, rows and columns labelled by their tokens."""
    rows, columns, weights = steps.attention.target_tokens, steps.attention.source_tokens, steps.attention.weights
    d_k, shape = steps.key.shape[1], weights.shape
    yield f"Q {steps.query.shape}: a query for each row; K {steps.key.shape} and V {steps.value.shape}: columns"
    yield f"\n1. Scores q·k, Q Kᵀ {shape}; −∞ where a later token is masked"
    yield from _table(rows, columns, steps.scores, 2)
    divisor = f"√d_k = √{d_k} = {math.sqrt(d_k):.3f}" if steps.scaling != 1 else "1: this model does not scale"
    yield f"\n2. Scores divided by {divisor}"
    yield from _table(rows, columns, steps.scaled, 2)
    yield "\n3. Weights, the softmax of each row: their sum is 1"
    yield from _table(rows, [*columns, "sum"], np.c_[weights, weights.sum(axis=1)], 3)
    yield f"\n4. Output, the sum of the values by these weights {steps.output.shape}: the norm of each row"
    yield from _table(rows, ["norm"], np.linalg.norm(steps.output, axis=1, keepdims=True), 3)


def _table(rows: Sequence[str], columns: Sequence[str], numbers: np.ndarray, digits: int) -> Iterator[str]:
    """Yield the lines of a table, in which Korean and Chinese letters are two places wide, as in a terminal."""
    cells = [[f"{one:.{digits}f}".replace("-inf", "−∞") for one in row] for row in numbers]
    lines = [["", *columns], *([label, *row] for label, row in zip(rows, cells, strict=True))]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for label, *others in lines:
        padded = (" " * (2 + width - _width(cell)) + cell for cell, width in zip(others, widths[1:], strict=True))
        yield f"{label}{' ' * (widths[0] - _width(label))}{''.join(padded)}"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
