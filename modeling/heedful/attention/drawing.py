"""Attention as pictures: one map, or a grid of all heads, with labels in any script."""

import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from heedful.attention.maps import AttentionMap, AttentionMaps
from heedful.attention.measures import between_words, scores_between_words
from heedful.attention.recording import Kind
from heedful.files import check_writable, import_extra, written_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
LARGEST = 60  # inches per side, for image viewers
READABLE = 9  # inches; up to this total width, columns are as wide as their labels
NUMBERED = 12  # rows and columns; score maps up to this size show numbers
SIDES = {
    "cross": ("source (looked at)", "target (looks)"),
    "encoder": ("source (looked at)", "source (looks)"),
    "decoder": ("target so far (looked at)", "target (looks)"),
}
REGULAR = (400, "normal", "regular")  # font weights
# For letters that DejaVu Sans lacks, in this order, before the system's other fonts.
WIDE_FONTS = (
    "NanumGothic", "Noto Sans CJK KR", "Noto Sans KR", "Malgun Gothic", "Apple SD Gothic Neo", "AppleGothic",
    "UnDotum", "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "Arial Unicode MS", "Noto Sans",
)  # fmt: skip


def draw_attention(attention: AttentionMap, path: str | Path, title: str | None = None) -> Path:
    """Draw an attention map as a heat map, and return the file's path. Rows attend to columns; darker is more.

    Pass a map from `word_attention` to show words instead of tokens. Neither pyplot nor matplotlib's settings change.
    A letter without a font on this system becomes its code point, ⟨1F98A⟩; `heedful[plots]` has a Korean font.

    Args:
        attention: The map.
        path: File to write: .png, .svg or .pdf.
        title: A line above the picture.

    Raises:
        ValueError: If the path has another suffix.
        FileNotFoundError: If the folder of `path` does not exist.
        ImportError: If matplotlib is not installed.
    """
    path = check_writable(path, PICTURE_SUFFIXES)
    rows, columns = attention.weights.shape
    (source, target, (title,)), style = writable(attention.source_tokens, attention.target_tokens, [title or ""])
    style["fontsize"] = 11
    widest, longest = _inches(source), _inches(target)
    is_wide = columns * widest <= READABLE
    # 0.34 inches hold one label.
    width, height = columns * (max(0.6, widest) if is_wide else 0.34), 0.34 * rows
    across, down = width + longest + 1.2, height + (0.3 if is_wide else widest) + (1.0 if title else 0.6)
    figure = _figure(max(across, _inches([title], 12)), down)
    axes = figure.add_subplot()
    image = axes.imshow(attention.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    if is_wide:
        axes.set_xticks(range(columns), source, **style)
    else:
        _set_upright(axes, source, style)
    axes.set_yticks(range(rows), target, **style)
    for number, (axis, side) in enumerate(zip((axes.xaxis, axes.yaxis), SIDES[attention.kind], strict=True)):
        axis.set_label_text(side, color="dimgray", fontsize=9)
        axis.set_ticks([place - 0.5 for place in range(1, (columns, rows)[number])], minor=True)
    axes.tick_params(which="both", length=0)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.spines[:].set_visible(False)
    if title:
        figure.suptitle(title, **{**style, "fontsize": 12})
    tall = min(4, height)
    sizes: Any = {"shrink": tall / height, "aspect": tall / 0.2, "fraction": 0.1, "pad": 0.02}
    bar = figure.colorbar(image, ax=axes, anchor=(0, 1), **sizes)
    bar.set_label("attention weight", color="dimgray", fontsize=9)
    bar.outline.set_visible(False)
    return _save(figure, path)


def draw_attention_grid(
    maps: AttentionMaps,
    path: str | Path,
    kind: Kind = "cross",
    layer: int | None = None,
    title: str | None = None,
    tokens: bool = False,
    scores: bool = False,
) -> Path:
    """Draw all heads in one picture, layers as rows and heads as columns, and return the file's path.

    Scores are dots below the weights: blue above 0, red below 0, larger further from 0, with a scale for each head.

    Args:
        maps: The maps.
        path: File to write: .png, .svg or .pdf.
        kind: "cross", "encoder" or "decoder".
        layer: The only layer to draw, numbered from 0 (-1 is the last); None draws all.
        title: A line above the picture.
        tokens: Whether to show the tokenizer's tokens, not words.
        scores: Whether to draw the scores before the softmax; a word's score is the mean over its tokens.

    Raises:
        ValueError: If the kind, layer or scores are missing. `draw_attention` lists further errors.
    """
    path = check_writable(path, PICTURE_SUFFIXES)
    numbers = range(maps.layers(kind)) if layer is None else [maps.layer_number(kind, layer)]
    dots = maps.scores(kind) if scores else None
    if tokens:
        maps = replace(maps, source_shown=None, target_shown=None)
    rows, columns = maps.shown(kind)
    height, width = len(rows.labels), len(columns.labels)
    (source, target, (title,)), style = writable(columns.labels, rows.labels, [title or ""])
    # 0.15 inches hold one label of 8 points, 0.3 one number.
    cell = 0.3 if scores and max(height, width) <= NUMBERED else 0.15
    lines = len(numbers) * (1 + scores)
    across, down = max(1.2, cell * width + 0.2), max(1.2, cell * height + 0.3)
    figure = _figure(1 + maps.heads(kind) * across, 1.2 + lines * down)
    grid = figure.subplots(lines, maps.heads(kind), squeeze=False, sharex=True, sharey=True)
    for row, number in enumerate(numbers):
        for head in range(maps.heads(kind)):
            axes = grid[row * (1 + scores)][head]
            weights = between_words(maps.weights[kind][number, head], rows, columns)
            axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            axes.set_title(f"layer {number}, head {head}", fontsize=9, pad=3)
            if dots is not None:
                _draw_dots(grid[row * 2 + 1][head], scores_between_words(dots[number, head], rows, columns))
    for axes in grid.flat:
        axes.tick_params(labelsize=8, length=1.5, pad=1.5)
    for axes in grid[:, 0]:  # each has its own labels
        axes.set_yticks(range(height), target, **style)
    for axes in grid[-1]:
        _set_upright(axes, source, style)
    if title:
        figure.suptitle(title, **style, fontsize=12)
    return _save(figure, path)


def _draw_dots(axes: "Axes", scores: np.ndarray) -> None:
    rows, columns = np.nonzero(np.isfinite(scores))
    values = scores[rows, columns]
    largest = float(np.abs(values).max(initial=1e-9))
    is_small = max(scores.shape) <= NUMBERED
    sizes = (16 if is_small else 9) ** 2 * np.abs(values) / largest  # areas in square points
    axes.scatter(columns, rows, sizes, values, cmap="RdBu", vmin=-1.6 * largest, vmax=1.6 * largest, linewidths=0)
    axes.set_title(f"scores, up to ±{largest:.1f}", fontsize=8, pad=3)
    for row, column in np.ndindex(scores.shape) if is_small else ():
        score = scores[row, column]
        text = f"{score:.1f}" if np.isfinite(score) else "−∞"
        axes.text(column, row, text, fontsize=6, ha="center", va="center")


def _is_wide(letter: str) -> bool:
    return unicodedata.east_asian_width(letter) in "WF"


def _inches(labels: Sequence[str], points: int = 11) -> float:
    return (max(sum(1.0 if _is_wide(letter) else 0.6 for letter in label) for label in labels) + 0.8) * points / 72


def _set_upright(axes: "Axes", labels: Sequence[str], style: dict[str, Any]) -> None:
    """Write narrow columns' labels: wide letters below each other, other labels turned."""
    is_stacked = [any(map(_is_wide, label)) for label in labels]
    texts = ["\n".join(label) if stacked else label for label, stacked in zip(labels, is_stacked, strict=True)]
    axes.set_xticks(range(len(labels)), texts, **style)
    for text, stacked in zip(axes.get_xticklabels(), is_stacked, strict=True):
        text.set(rotation=0 if stacked else 90, linespacing=1.1)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(min(width, LARGEST), min(height, LARGEST)), dpi=150, layout="constrained")


def _save(figure: "Figure", path: Path) -> Path:
    with warnings.catch_warnings(), written_whole(path) as written:
        # `_fonts_for` has warned about these letters.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(written, format=path.suffix[1:].lower())
    return path


def writable(*texts: Sequence[str]) -> tuple[list[list[str]], dict[str, Any]]:
    """Return texts that fonts here can write, and matplotlib's arguments for them."""
    import_extra("matplotlib", "plots")
    families, missing = _fonts_for("".join(text for group in texts for text in group))
    codes = {number: f"⟨{number:X}⟩" for number in missing}
    written = [[text.translate(codes) for text in group] for group in texts]
    return written, {"family": families, "parse_math": False, "usetex": False}


def _fonts_for(text: str) -> tuple[list[str], set[int]]:
    """Return fonts for a text's letters, matplotlib's first, and the letters without a font."""
    from matplotlib import font_manager

    families = ["DejaVu Sans"]
    # Variation selectors and joiners have no shape.
    missing = {ord(letter) for letter in text if letter.isprintable() and not 0xFE00 <= ord(letter) <= 0xFE0F}
    missing -= _letters_of(font_manager.findfont(families[0]))
    for family, path in _wide_fonts(font_manager.fontManager):
        if not missing:
            break
        if missing & (letters := _letters_of(path)):
            families.append(family)
            missing -= letters
    if missing:
        sample = "".join(sorted(map(chr, missing))[:10])
        warnings.warn(
            f"No font here has {len(missing)} of the letters ({sample}): their code points are drawn instead."
            " A Korean font comes with: pip install 'heedful[plots]'. A report (.html) needs none.",
            stacklevel=4,
        )
    return families, missing


def _letters_of(path: str) -> set[int]:
    from matplotlib.ft2font import FT2Font

    font = FT2Font(path)
    # matplotlib cannot draw fonts with colour bitmaps, such as emoji.
    return set(font.get_charmap()) if font.scalable else set()


def _wide_fonts(manager: Any) -> Iterator[tuple[str, str]]:
    upright = (entry for entry in manager.ttflist if entry.style == "normal" and entry.weight in REGULAR)
    # matplotlib's "Last Resort" has a box for every letter.
    usable = (entry for entry in upright if "Last Resort" not in entry.name and Path(entry.fname).is_file())
    files = {entry.name: entry.fname for entry in usable}
    for family in WIDE_FONTS:
        if family in files:
            yield family, files[family]
    # Its import would change matplotlib's settings.
    package = find_spec("koreanize_matplotlib")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "fonts" / "NanumGothic.ttf"
        if path.is_file():
            manager.addfont(path)
            yield "NanumGothic", str(path)
    yield from sorted(files.items())
