"""Attention as pictures: one map, or a grid of all heads, with labels in any script."""

import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.files import check_matplotlib, check_writable, written_whole
from heedful.inference.attention.maps import AttentionMap, AttentionMaps, Kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
# Largest side of a picture in inches: image viewers do not open larger ones.
LARGEST = 60

# Tried in this order for letters that matplotlib's own font, DejaVu Sans, lacks; then the other fonts of the system.
WIDE_FONTS = (
    "NanumGothic", "Noto Sans CJK KR", "Noto Sans KR", "Malgun Gothic", "Apple SD Gothic Neo", "AppleGothic",
    "UnDotum", "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "Arial Unicode MS", "Noto Sans",
)  # fmt: skip


def draw_attention(attention: AttentionMap, path: str | Path, title: str | None = None) -> Path:
    """Draw an attention map as a heat map: rows look at columns, darker is more.

    Neither pyplot nor matplotlib's settings are touched. Letters that matplotlib's own font lacks are taken from the
    system's fonts, or from the Korean font of the extra `heedful[plots]`; a letter that no font has is written as its
    code point, ⟨1F98A⟩.

    Args:
        attention: What to draw.
        path: File to write: .png, .svg or .pdf.
        title: A line above the picture.

    Returns:
        The path of the file.

    Raises:
        ValueError: If the path has another suffix.
        FileNotFoundError: If the folder of `path` does not exist.
        ImportError: If matplotlib is not installed.
    """
    path = check_writable(path, PICTURE_SUFFIXES)
    rows, columns = attention.weights.shape
    # 0.3 inches hold one label.
    figure = _figure(2.5 + 0.3 * columns, 2 + 0.3 * rows)
    (source, target, (title,)), style = _writable(attention.source_tokens, attention.target_tokens, [title or ""])
    axes = figure.add_subplot()
    image = axes.imshow(attention.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(columns), source, rotation=90, **style)
    axes.set_yticks(range(rows), target, **style)
    axes.xaxis.tick_top()
    if title:
        axes.set_title(title, **style)
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    return _save(figure, path)


def draw_attention_grid(
    maps: AttentionMaps, path: str | Path, kind: Kind = "cross", layer: int | None = None, title: str | None = None
) -> Path:
    """Draw all heads in one picture: a row for each layer, a column for each head, darker is more.

    Rows and columns of each small map are those of the attention map; the outer maps have labels.

    Args:
        maps: What to draw.
        path: File to write: .png, .svg or .pdf.
        kind: "cross", "encoder" or "decoder".
        layer: The only layer to draw, from 0, or from -1 for the last; None draws all.
        title: A line above the picture.

    Returns:
        The path of the file.

    Raises:
        ValueError: If the path has another suffix, or there is no such kind or layer.
        FileNotFoundError: If the folder of `path` does not exist.
        ImportError: If matplotlib is not installed.
    """
    path = check_writable(path, PICTURE_SUFFIXES)
    numbers = range(maps.layers(kind)) if layer is None else [maps.layer_number(kind, layer)]
    first = maps.map(kind, numbers[0], 0)
    height, width = first.weights.shape
    (source, target, (title,)), style = _writable(first.source_tokens, first.target_tokens, [title or ""])
    # 0.13 inches hold one label of 7 points.
    figure = _figure(
        1 + maps.heads(kind) * max(1.2, 0.13 * width + 0.2), 1.2 + len(numbers) * max(1.2, 0.13 * height + 0.3)
    )
    grid = figure.subplots(len(numbers), maps.heads(kind), squeeze=False, sharex=True, sharey=True)
    for row, number in enumerate(numbers):
        for head, axes in enumerate(grid[row]):
            weights = maps.weights[kind][number, head]
            axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            axes.set_title(f"layer {number}, head {head}", fontsize=8, pad=3)
            axes.tick_params(labelsize=7, length=1.5, pad=1.5)
    grid[-1][0].set_yticks(range(height), target, **style)
    for axes in grid[-1]:
        axes.set_xticks(range(width), source, rotation=90, **style)
    if title:
        figure.suptitle(title, **style)
    return _save(figure, path)


def _figure(width: float, height: float) -> "Figure":
    """Make a figure of so many inches, without pyplot."""
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(min(width, LARGEST), min(height, LARGEST)), dpi=150, layout="constrained")


def _save(figure: "Figure", path: Path) -> Path:
    with warnings.catch_warnings(), written_whole(path) as written:
        # Such letters are written as code points, and `_fonts_for` has warned of them.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(written, format=path.suffix[1:].lower())
    return path


def _writable(*texts: Sequence[str]) -> tuple[list[list[str]], dict[str, Any]]:
    """Return texts that the fonts here can write, and matplotlib's arguments for them."""
    families, missing = _fonts_for("".join(text for group in texts for text in group))
    written = [
        ["".join(f"⟨{ord(c):X}⟩" if ord(c) in missing else c for c in text) for text in group] for group in texts
    ]
    return written, {"family": families, "parse_math": False, "usetex": False}


def _fonts_for(text: str) -> tuple[list[str], set[int]]:
    """List fonts that have the letters of a text together, matplotlib's own first, and the letters that none has."""
    from matplotlib import font_manager

    families = ["DejaVu Sans"]
    # Variation selectors and joiners have no shape, so that no font needs them.
    missing = {ord(letter) for letter in text if letter.isprintable() and not 0xFE00 <= ord(letter) <= 0xFE0F}
    missing -= _letters_of(font_manager.findfont(families[0]))
    for family, path in _wide_fonts(font_manager.fontManager):
        if not missing:
            break
        letters = _letters_of(path)
        if missing & letters:
            families.append(family)
            missing -= letters
    if missing:
        sample = "".join(sorted(map(chr, missing))[:10])
        warnings.warn(
            f"No font here has {len(missing)} of the letters to draw ({sample}); their code points are drawn instead."
            " A Korean font comes with: pip install 'heedful[plots]'. A report (.html) needs none.",
            stacklevel=4,
        )
    return families, missing


def _letters_of(path: str) -> set[int]:
    from matplotlib.ft2font import FT2Font

    font = FT2Font(path)
    # Fonts of colour bitmaps, such as emoji, cannot be drawn.
    return set(font.get_charmap()) if font.scalable else set()


def _wide_fonts(manager: Any) -> Iterator[tuple[str, str]]:
    """Yield (family, file) of the known fonts, of koreanize_matplotlib's font, and of all fonts of the system."""
    files = {entry.name: entry.fname for entry in manager.ttflist if _is_upright(entry)}
    for family in WIDE_FONTS:
        if family in files:
            yield family, files[family]
    # Not imported: to import it changes matplotlib's settings for everybody.
    package = find_spec("koreanize_matplotlib")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "fonts" / "NanumGothic.ttf"
        if path.is_file():
            manager.addfont(path)
            yield "NanumGothic", str(path)
    yield from sorted(files.items())


def _is_upright(entry: Any) -> bool:
    # matplotlib's "Last Resort" has a box for every letter.
    if "Last Resort" in entry.name or entry.style != "normal":
        return False
    return entry.weight in (400, "normal", "regular") and Path(entry.fname).is_file()
