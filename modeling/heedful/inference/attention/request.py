"""What `heedful attention` is asked for, and its answer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.files import check_matplotlib, check_writable
from heedful.inference.attention.drawing import PICTURE_SUFFIXES, draw_attention, draw_attention_grid
from heedful.inference.attention.maps import AttentionMap, AttentionMaps, attention_maps
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
    tokens: bool = False
    # What to print.
    alignment: bool = False
    gold: Path | None = None
    entropy: bool = False
    json: bool = False

    def __post_init__(self):
        given = {name for name, value in vars(self).items() if value is not None and value is not False}
        if not given & {"output", "alignment", "gold", "entropy", "json"}:
            raise ValueError("Something must be asked for: -o FILE, --alignment, --gold FILE, --entropy or --json.")
        if self.output is not None:
            check_writable(self.output, (*PICTURE_SUFFIXES, *REPORT_SUFFIXES))
            given.add("page" if self.is_page else "picture")
        if self.grid and "picture" not in given:
            raise ValueError(f"`--grid` must come with a picture to draw (-o FILE, {', '.join(PICTURE_SUFFIXES)}).")
        if self.tokens and self.output is None:
            raise ValueError("`--tokens` must come with a picture or page (-o FILE): nothing else shows words.")
        for one, other, reason in CONFLICTS:
            if {one, other} <= given:
                raise ValueError(f"`--{one}` must not come with {NAMES.get(other, f'--{other}')}, {reason}.")
        if given & {"alignment", "gold"} and self.kind not in (None, "cross"):
            raise ValueError("`--kind` must be cross to align words.")
        if given & {"layer", "head", "rollout"} and not given & {"output", "alignment", "gold", "json"}:
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
        and as a `share`) and `maps`, as far as they were asked for.
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
            return draw_attention_grid(maps, path, kind, self.layer, f"{kind} attention of each head", self.tokens)
        attention = self._map(maps)
        return draw_attention(attention if self.tokens else word_attention(maps, attention), path, self._title(maps))

    def _title(self, maps: AttentionMaps) -> str:
        """Say which layer and head a picture shows."""
        kind = self.kind or "cross"
        last, heads = maps.layers(kind) - 1, maps.heads(kind)
        number = maps.layer_number(kind, -1 if self.layer is None else self.layer)
        layer = f"layer {number}" + (" (the last)" if number == last else f" of 0 to {last}")
        if self.rollout:
            return f"rollout of {kind} attention, {layer}"
        return f"{kind} attention, {layer}, {f'mean of {heads} heads' if self.head is None else f'head {self.head}'}"


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
    if "output" in answer:
        yield answer["output"]
