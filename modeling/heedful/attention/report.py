"""An interactive page: one HTML file with all of one pair's attention, which needs no network."""

import base64
import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from heedful.attention.maps import AttentionMaps
from heedful.attention.measures import attention_rollout, between_words, scores_between_words, word_attention
from heedful.attention.recording import Kind, check_number
from heedful.files import check_writable, json_in_html, write_text

REPORT_SUFFIXES = (".html",)
TEMPLATE = Path(__file__).with_name("report.html")
PARTS = 10_000  # parts of 1, for weights
LARGEST_PART, MASKED = 32_767, -32_768  # parts of the largest score; the code for −∞
CONTROL = re.compile(r"</?[^<>\s]*>")


def write_attention_report(
    maps: AttentionMaps,
    path: str | Path,
    title: str | None = None,
    *,
    kind: Kind | None = None,
    layer: int = -1,
    head: int | None = None,
    tokens: bool = False,
) -> Path:
    """Write a page where hovering, focusing or tapping a word shows its attention, and return its path.

    You can choose kind, layer, head, mean and rollout, and for a Heed Transformer raw scores. Words have weights as in
    `word_attention`, and mean scores. The page works with a keyboard and a screen reader.

    Args:
        maps: The maps.
        path: File to write: .html.
        title: Heading of the page; None takes "Attention".
        kind: The kind to show first; None takes the maps' first, cross if possible.
        layer: The layer to show first, numbered from 0; -1 is the last.
        head: The head to show first, or None for the mean over all heads.
        tokens: Whether to show the tokenizer's tokens, not words.

    Raises:
        ValueError: If the path has another suffix, or the kind, layer or head is missing.
        FileNotFoundError: If the folder of `path` does not exist.
    """
    path = check_writable(path, REPORT_SUFFIXES)
    kind = maps.kinds[0] if kind is None else kind
    number = maps.layer_number(kind, layer)
    if head is not None:
        check_number("head", head, maps.heads(kind))
    if tokens:
        maps = replace(maps, source_shown=None, target_shown=None)
    (target, source), (_, fed) = maps.shown("cross"), maps.shown("decoder")
    data = {
        "source": _sequence(source.labels),
        "target": _sequence(target.labels),
        "fed": _sequence(fed.labels),
        "kinds": {name: _kind(maps, name) for name in maps.kinds},
        "start": {"kind": kind, "layer": number, "head": head},
    }
    parts = {"title": html.escape(title or "Attention"), "data": json_in_html(data)}
    report = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    write_text(path, report.render(parts))
    return path


def _sequence(tokens: Sequence[str]) -> dict[str, Any]:
    """Return tokens with the direction of the first letter that has one, like browsers for `dir=auto`."""
    # Control tokens have Latin letters in any script.
    text = "".join(token for token in tokens if not CONTROL.fullmatch(token))
    directions = (direction for direction in map(unicodedata.bidirectional, text) if direction in ("L", "R", "AL"))
    return {"tokens": list(tokens), "direction": "ltr" if next(directions, "L") == "L" else "rtl"}


def _kind(maps: AttentionMaps, kind: Kind) -> dict[str, Any]:
    words = maps.shown(kind)
    weights = between_words(maps.weights[kind], *words)
    can_roll = kind != "cross" or "encoder" in maps.weights
    return {
        **dict(zip(("layers", "heads", "rows", "columns"), weights.shape, strict=True)),
        "weights": _packed(weights),
        "rollout": _packed(word_attention(maps, attention_rollout(maps, kind)).weights) if can_roll else None,
        "scores": _packed_scores(scores_between_words(maps.scores(kind), *words)) if kind in maps.states else None,
    }


def _packed(weights: np.ndarray) -> str:
    """Pack weights as little-endian 16-bit parts of 1 in base64, a third as long as digits."""
    return base64.b64encode(np.rint(weights.clip(0, 1) * PARTS).astype("<u2").tobytes()).decode("ascii")


def _packed_scores(scores: np.ndarray) -> dict[str, Any]:
    """Pack scores as little-endian 16-bit parts of the largest score, and return this too."""
    is_finite = np.isfinite(scores)
    largest = float(np.abs(scores[is_finite]).max(initial=1e-9))
    parts = np.where(is_finite, np.rint(scores / largest * LARGEST_PART), MASKED).astype("<i2")
    return {"largest": largest, "parts": base64.b64encode(parts.tobytes()).decode("ascii")}
