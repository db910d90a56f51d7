"""Attention in numbers: rollout, entropy, alignments and their error rate, and one head step by step."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from heedful.attention.maps import AttentionMap, AttentionMaps
from heedful.attention.recording import Kind
from heedful.data.labels import Words
from heedful.files import read_lines

Link = tuple[int, int]  # source word, target word, counted from 0
LINK = re.compile(r"(\d+)([-?p])(\d+)")
ERROR_LINE = "AER {error_rate:.4f}  precision {precision:.4f}  recall {recall:.4f}  links {links}"


class View(NamedTuple):
    """The choice of one map."""

    kind: Kind = "cross"
    layer: int | None = None  # None is the last, for rollout all
    head: int | None = None  # None is the mean over all heads
    rollout: bool = False

    def map_of(self, maps: AttentionMaps) -> AttentionMap:
        """Return the chosen map."""
        if self.rollout:
            return attention_rollout(maps, self.kind, self.layer)
        return maps.map(self.kind, self.layer, self.head)

    def title_of(self, maps: AttentionMaps) -> str:
        """Return a title with kind, layer and head."""
        last, number = maps.layers(self.kind) - 1, maps.layer_number(self.kind, self.layer)
        layer = f"layer {number}" + (" (the last)" if number == last else f" of 0 to {last}")
        if self.rollout:
            return f"rollout of {self.kind} attention, {layer}"
        head = f"mean of {maps.heads(self.kind)} heads" if self.head is None else f"head {self.head}"
        return f"{self.kind} attention, {layer}, {head}"


class Entropy(NamedTuple):
    """The entropy of heads' attention: float arrays (layers, heads)."""

    nats: np.ndarray  # −Σ a·ln a of each row, averaged over the rows
    # Row entropy / ln n for n visible positions, averaged over rows with n > 1: 0 sees one position, 1 all equally.
    share: np.ndarray


class AlignmentErrors(NamedTuple):
    """Links A compared with given links: sure S and possible P ⊇ S (Och and Ney, 2003)."""

    error_rate: float  # AER, 1 − (|A∩S| + |A∩P|) / (|A| + |S|); 0 is best
    precision: float  # |A∩P| / |A|
    recall: float  # |A∩S| / |S|
    links: int  # |A|


class GoldAlignment(NamedTuple):
    """Given links for one sentence pair."""

    sure: frozenset[Link]  # S
    possible: frozenset[Link]  # P ⊇ S


def attention_rollout(maps: AttentionMaps, kind: Kind = "cross", layer: int | None = None) -> AttentionMap:
    """Follow attention through the layers down to the tokens (Abnar and Zuidema, 2020).

    Ā_l is the mean over the heads in layer l. Half of the layer's output comes through the residual connection:
    Ã_l = 0.5·Ā_l + 0.5·I. The rollout up to layer L is Ã_L · … · Ã_1, and for "cross" C̄_L · R_encoder. Each row
    sums to 1. A missing kind or layer, or for "cross" missing encoder maps, are a `ValueError`.
    """
    number = maps.layer_number(kind, layer)
    if kind != "cross":
        return maps.labelled(_rolled(maps.weights[kind][: number + 1]), kind)
    if "encoder" not in maps.weights:
        raise ValueError("Rollout to the source must have the encoder's self-attention, but there is none here.")
    return maps.labelled(maps.weights["cross"][number].mean(axis=0) @ _rolled(maps.weights["encoder"]), kind)


def _rolled(layers: np.ndarray) -> np.ndarray:
    product = np.eye(layers.shape[-1], dtype=layers.dtype)
    for heads in layers:
        product = (0.5 * heads.mean(axis=0) + 0.5 * np.eye(len(product), dtype=layers.dtype)) @ product
    return product


def attention_entropy(maps: AttentionMaps, kind: Kind = "cross") -> Entropy:
    """Measure the entropy of each head's attention; a missing kind is a `ValueError`."""
    maps.layers(kind)  # raises if the kind is missing
    weights = maps.weights[kind].astype(np.float64)
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    nats = np.abs((weights * logs).sum(axis=-1))  # (layers, heads, rows); `abs` removes -0.0
    rows, columns = weights.shape[-2:]
    distance = np.arange(rows)[:, None] - np.arange(columns)
    is_seen = (distance >= 0) | (kind != "decoder")
    if kind in maps.neighbourhoods:
        is_seen &= np.abs(distance) <= maps.neighbourhoods[kind]
    seen = is_seen.sum(axis=1)  # each row's visible positions
    choosing = seen > 1
    shares = nats[..., choosing] / np.log(seen[choosing])
    return Entropy(nats.mean(axis=-1), shares.mean(axis=-1) if choosing.any() else np.zeros(nats.shape[:2]))


def word_alignment(maps: AttentionMaps, attention: AttentionMap | None = None) -> list[Link]:
    """Link each target word to the source word with most attention: (source word, target word), sorted by target.

    The map must be cross-attention, by default the last layer's mean over heads. The weights of each word's tokens are
    added; tokens without a word, such as </s>, are left out. If weights are equal, the first word is linked.
    """
    attention = maps.map("cross") if attention is None else attention
    if attention.kind != "cross":
        raise ValueError(f"An alignment needs cross attention, but the map is {attention.kind} attention instead.")
    columns, rows = _membership(maps.source_words), _membership(maps.target_words)
    if not columns.any():
        return []
    by_words = rows.T @ attention.weights @ columns  # (target words, source words), each row times its tokens
    return [(int(column), row) for row, column in enumerate(by_words.argmax(axis=1)) if rows[:, row].any()]


def word_attention(maps: AttentionMaps, attention: AttentionMap | None = None) -> AttentionMap:
    """Turn attention between tokens, by default the last layer's cross-attention, into attention between words.

    The columns of each word's tokens are added and their rows averaged, so each row still sums to 1. White space
    separates words. Control tokens, and tokens in scripts without spaces, count as words.
    """
    attention = maps.map("cross") if attention is None else attention
    rows, columns = maps.shown(attention.kind)
    return AttentionMap(columns.labels, rows.labels, between_words(attention.weights, rows, columns), attention.kind)


def between_words(weights: np.ndarray, rows: Words, columns: Words) -> np.ndarray:
    """Average the rows of weights (…, rows, columns) over each word's tokens, and add the columns."""
    looking = _membership(rows.of_tokens)
    return np.asarray((looking / looking.sum(axis=0)).T @ weights @ _membership(columns.of_tokens))


def scores_between_words(scores: np.ndarray, rows: Words, columns: Words) -> np.ndarray:
    """Average scores (…, rows, columns) over each word's unmasked tokens; −∞ if all are masked."""
    looking, seen = _membership(rows.of_tokens).T, _membership(columns.of_tokens)
    is_finite = np.isfinite(scores)
    counts = looking @ is_finite.astype(np.float32) @ seen
    sums = looking @ np.where(is_finite, scores, 0) @ seen
    return np.where(counts > 0, sums / counts.clip(min=1), -np.inf).astype(np.float32)


def _membership(words: Sequence[int | None]) -> np.ndarray:
    """Return (tokens, words), 1 where a token belongs to a word."""
    numbers = np.array([-1 if word is None else word for word in words])
    return np.asarray(numbers[:, None] == np.arange(numbers.max(initial=-1) + 1), np.float32)


def write_links(links: Iterable[Link]) -> str:
    """Write links in Pharaoh's format: `0-0 1-2`, source before target, sorted."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def read_gold_alignments(path: str | Path, pairs: Sequence[tuple[str, str | None]]) -> list[GoldAlignment]:
    """Load the pairs' alignments, one pair a line: `0-0` is a sure link, `0?1` or `0p1` a possible one.

    Words are counted from 0. A link to a missing word is a `ValueError`.
    """
    lines = read_lines(path, "gold")
    if len(lines) != len(pairs):
        raise ValueError(f"`--gold` must have {len(pairs)} lines, one for each pair, but has {len(lines)} instead.")
    found = []
    for number, (line, texts) in enumerate(zip(lines, pairs, strict=True), start=1):
        sizes = [len(text.split()) for text in texts if text is not None]
        sure, possible = set(), set()
        for word in line.split():
            match = LINK.fullmatch(word)
            if match is None:
                where = f"in line {number} of {path}"
                raise ValueError(f"A link must look like 0-1, 0?1 or 0p1, but is {word!r} instead, {where}.")
            link = int(match[1]), int(match[3])
            if any(word >= size for word, size in zip(link, sizes, strict=False)):
                links = f"links {match[1]}-{match[3]} of {' and '.join(map(str, sizes))} words instead"
                must = "`--gold` must link words of the pair, counted from 0"
                raise ValueError(f"{must}, but {links}, in line {number} of {path}.")
            possible.add(link)
            if match[2] == "-":
                sure.add(link)
        found.append(GoldAlignment(frozenset(sure), frozenset(possible)))
    return found


def alignment_errors(found: Sequence[Iterable[Link]], gold: Sequence[GoldAlignment]) -> AlignmentErrors:
    """Compare links with given links over all sentences; no links are a `ValueError`."""
    links = sure = sure_found = possible_found = 0
    for own, given in zip(map(set, found), gold, strict=True):
        links += len(own)
        sure += len(given.sure)
        sure_found += len(own & given.sure)
        possible_found += len(own & (given.possible | given.sure))
    if links + sure == 0:
        raise ValueError("`gold` must have links to compare with, but neither it nor the alignments have any.")
    return AlignmentErrors(
        1 - (sure_found + possible_found) / (links + sure),
        possible_found / links if links else 0.0,
        sure_found / sure if sure else 0.0,
        links,
    )
