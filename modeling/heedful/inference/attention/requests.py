"""What `heedful attention` is asked for: which requests go together, and their answers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heedful.files import check_writable
from heedful.inference.attention.drawing import PICTURE_SUFFIXES, check_matplotlib, draw_attention, draw_attention_grid
from heedful.inference.attention.maps import AttentionMap, AttentionMaps, attention_maps
from heedful.inference.attention.measures import (
    AlignmentErrors,
    GoldAlignment,
    Link,
    alignment_errors,
    attention_entropy,
    attention_rollout,
    read_gold_alignments,
    word_alignment,
    write_links,
)
from heedful.inference.attention.recording import Kind
from heedful.inference.attention.report import REPORT_SUFFIXES, write_attention_report
from heedful.inference.translation import Translator

Pair = tuple[str, str | None]


@dataclass(frozen=True)
class View:
    """Which weights are looked at.

    Attributes:
        kind: "cross", "encoder" or "decoder"; None means cross.
        layer: From 0, or from -1 for the last; None means the last, of a grid or of rollout all.
        head: From 0; None means the mean.
        grid: Whether all heads are drawn.
        rollout: Whether attention is followed through the layers.

    """

    kind: Kind | None = None
    layer: int | None = None
    head: int | None = None
    grid: bool = False
    rollout: bool = False

    def of(self, maps: AttentionMaps) -> AttentionMap:
        """Return the weights themselves."""
        if self.rollout:
            return attention_rollout(maps, self.kind or "cross", self.layer)
        return maps.map(self.kind or "cross", -1 if self.layer is None else self.layer, self.head)


@dataclass(frozen=True)
class Wanted:
    """What is to be told of the weights.

    Attributes:
        output: Picture or report to write.
        alignment: Whether words are aligned.
        gold: File of given alignments to compare with.
        entropy: Whether the heads' entropies are told.
        weights: Whether the weights themselves are told.

    """

    output: Path | None = None
    alignment: bool = False
    gold: Path | None = None
    entropy: bool = False
    weights: bool = False

    @property
    def is_report(self) -> bool:
        """Whether a page is written and not a picture."""
        return self.output is not None and self.output.suffix.lower() in REPORT_SUFFIXES


@dataclass
class Answer:
    """What was found.

    Attributes:
        output: The file that was written.
        alignments: Links of each pair, where they were asked for.
        errors: How they compare with the given ones.
        entropy: For each layer the heads' entropies: `nats` and `share`.
        maps: For each pair its tokens, kind and weights.

    """

    output: Path | None = None
    alignments: list[list[Link]] | None = None
    errors: AlignmentErrors | None = None
    entropy: dict[str, list[list[float]]] | None = None
    maps: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return what was found as JSON can hold it."""
        found: dict[str, Any] = {}
        if self.output is not None:
            found["output"] = str(self.output)
        if self.alignments is not None:
            found["alignments"] = [write_links(links) for links in self.alignments]
        if self.errors is not None:
            found["alignment_errors"] = self.errors._asdict()
        if self.entropy is not None:
            found["entropy"] = self.entropy
        if self.maps:
            found["maps"] = self.maps
        return found

    def lines(self) -> Iterator[str]:
        """Return what was found as people read it."""
        for links in self.alignments or []:
            yield write_links(links)
        if self.errors is not None:
            error_rate, precision, recall, count = self.errors
            yield f"AER {error_rate:.4f}  precision {precision:.4f}  recall {recall:.4f}  links {count}"
        if self.entropy is not None:
            heads = range(len(self.entropy["nats"][0]))
            yield "nats (share of log n)  " + "".join(f"{f'head {head}':<15}" for head in heads).rstrip()
            for layer, (nats, shares) in enumerate(zip(self.entropy["nats"], self.entropy["share"], strict=True)):
                cells = (f"{nat:.2f} ({share:4.0%})" for nat, share in zip(nats, shares, strict=True))
                yield f"{f'layer {layer}':<23}" + "".join(f"{cell:<15}" for cell in cells).rstrip()
        if self.output is not None:
            yield str(self.output)


def check_request(
    view: View, wanted: Wanted, pairs: Sequence[Pair], *, is_corpus: bool = False
) -> list[GoldAlignment] | None:
    """Refuse what does not go together, before anything is computed.

    Args:
        view: Which weights.
        wanted: What of them.
        pairs: Sources, each with its target or None for the model's own.
        is_corpus: Whether they come from files, and not one sentence from the command line.

    Returns:
        The given alignments, where there are any.

    Raises:
        ValueError: For a setting that would be ignored, nothing to do, or given alignments that are not of the pairs.
        FileNotFoundError: When the gold file or the folder of the output does not exist.
        ImportError: When a picture is to be drawn, and matplotlib is not installed.

    """
    aligns = wanted.alignment or wanted.gold is not None
    draws = wanted.output is not None and not wanted.is_report
    if not (wanted.output or aligns or wanted.entropy or wanted.weights):
        raise ValueError("Something must be asked for: -o FILE, --alignment, --gold FILE, --entropy or --json.")
    if wanted.output is not None:
        check_writable(wanted.output, (*PICTURE_SUFFIXES, *REPORT_SUFFIXES))
    ignored = [
        (
            view.grid and not draws,
            "`--grid` must come with a picture to draw (-o FILE, " + ", ".join(PICTURE_SUFFIXES) + ")",
        ),
        (view.grid and view.head is not None, "`--head` must not come with --grid, which draws all heads"),
        (view.grid and view.rollout, "`--rollout` must not come with --grid, for it is no head's"),
        (view.rollout and view.head is not None, "`--head` must not come with --rollout, which averages the heads"),
        (view.rollout and wanted.is_report, "`--rollout` must not come with a report (.html), where it can be chosen"),
        (aligns and view.kind not in (None, "cross"), "`--kind` must be cross to align words"),
        (aligns and view.grid, "`--grid` must not come with --alignment or --gold, which read one map"),
        (
            is_corpus and wanted.output is not None,
            "`--output` must not come with --data: it shows one sentence",
        ),
        (is_corpus and wanted.entropy, "`--entropy` must not come with --data: it is of one sentence"),
        (wanted.entropy and not _reads_a_map(wanted) and _is_chosen(view), _ENTROPY_IS_OF_ALL),
    ]
    for is_ignored, message in ignored:
        if is_ignored:
            raise ValueError(f"{message}.")
    if draws:
        check_matplotlib()
    return None if wanted.gold is None else _gold_of(wanted.gold, pairs)


def _gold_of(path: Path, pairs: Sequence[Pair]) -> list[GoldAlignment]:
    """Read the given alignments of pairs; links of words that are not there tell of another file or other counts."""
    gold = read_gold_alignments(path)
    if len(gold) != len(pairs):
        raise ValueError(f"`--gold` must have {len(pairs)} lines, one for each pair, but has {len(gold)} instead.")
    for line, (given, (source, target)) in enumerate(zip(gold, pairs, strict=True), start=1):
        sizes = len(source.split()), math.inf if target is None else len(target.split())
        for link in sorted(given.possible):
            if link[0] >= sizes[0] or link[1] >= sizes[1]:
                words = f"{sizes[0]} words" if target is None else f"{sizes[0]} and {sizes[1]} words"
                raise ValueError(
                    f"`--gold` must link words of the pair, counted from 0, but links {link[0]}-{link[1]} of {words} "
                    f"instead, in line {line} of {path}."
                )
    return gold


_ENTROPY_IS_OF_ALL = "`--layer`, `--head` and `--rollout` must not come with --entropy alone, which tells of all heads"


def _reads_a_map(wanted: Wanted) -> bool:
    return wanted.output is not None or wanted.alignment or wanted.gold is not None or wanted.weights


def _is_chosen(view: View) -> bool:
    return view.rollout or view.layer is not None or view.head is not None


def answer_request(
    translator: Translator,
    pairs: Sequence[Pair],
    view: View,
    wanted: Wanted,
    gold: list[GoldAlignment] | None = None,
    target_language: str | None = None,
) -> Answer:
    """Compute, write and tell what is asked for.

    Args:
        translator: The model with its tokenizers.
        pairs: Sources, each with its target or None for the model's own.
        view: Which weights.
        wanted: What of them; checked.
        gold: Given alignments of the pairs.
        target_language: Language to translate into, where the tokenizers know several.

    Raises:
        ValueError: As `attention_maps`, and for a kind, layer or head that does not exist.

    """
    answer = Answer(alignments=[] if wanted.alignment or gold is not None else None)
    kind = view.kind or "cross"
    kinds: list[Kind] | None = [kind]
    if wanted.is_report or (view.rollout and kind == "cross"):  # rollout tells of itself what it lacks
        kinds = None
    for source, target in pairs:
        maps = attention_maps(
            translator, translator.tokenizers, source, target, kinds=kinds, target_language=target_language
        )
        if answer.alignments is not None:
            answer.alignments.append(word_alignment(maps, view.of(maps)))
        if wanted.weights:
            answer.maps.append(_as_numbers(view.of(maps)))
        if wanted.entropy:
            found = attention_entropy(maps, kind)
            answer.entropy = {"nats": found.nats.tolist(), "share": found.share.tolist()}
        if wanted.output is not None:
            answer.output = _write(maps, view, wanted, source)
    if gold is not None:
        answer.errors = alignment_errors(answer.alignments or [], gold)
    return answer


def _write(maps: AttentionMaps, view: View, wanted: Wanted, source: str) -> Path:
    assert wanted.output is not None
    kind = view.kind or "cross"
    if wanted.is_report:
        layer = -1 if view.layer is None else view.layer
        return write_attention_report(maps, wanted.output, source, kind=view.kind, layer=layer, head=view.head)
    if view.grid:
        return draw_attention_grid(maps, wanted.output, kind, view.layer)
    return draw_attention(view.of(maps), wanted.output)


def _as_numbers(attention: AttentionMap) -> dict[str, Any]:
    return {
        "kind": attention.kind,
        "source_tokens": attention.source_tokens,
        "target_tokens": attention.target_tokens,
        "weights": [[round(float(weight), 6) for weight in row] for row in attention.weights],
    }
