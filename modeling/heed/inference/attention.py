"""Attention maps: which tokens a model looks at, as numbers with readable labels and as a picture.

Section 3.2.3 of the paper names the three kinds: in "cross" attention every target position looks at the source, in
"encoder" and "decoder" self-attention at its own sequence; the pictures of the paper's appendix are such maps.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from heed.data.tokenization import TokenizerPair
from heed.inference.translation import Translator, position_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["cross", "encoder", "decoder"]

SPACE_MARK = "▁"
CONTINUATION_MARK = "…"
FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")

# Tried in this order for what matplotlib's own font, DejaVu Sans, lacks.
WIDE_FONTS = (
    *("NanumGothic", "Noto Sans CJK KR", "Noto Sans KR", "Malgun Gothic", "Apple SD Gothic Neo", "AppleGothic"),
    *("UnDotum", "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "Arial Unicode MS", "Noto Sans"),
)


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """Attention weights between labelled tokens.

    Attributes:
        source_tokens: Labels of the columns, the tokens that are looked at: of the source, or for "decoder" those that
            the decoder has been fed, <s> first.
        target_tokens: Labels of the rows, the tokens that look: for "cross" and "decoder" the token that is
            *predicted* at that step (row i holds the attention by which target token i was chosen), for "encoder" the
            source's.
        weights: float32 array (rows, columns); each row sums to 1.
        kind: "cross", "encoder" or "decoder".

    """

    source_tokens: list[str]
    target_tokens: list[str]
    weights: np.ndarray
    kind: Kind = "cross"


def attention_map(
    model: "PreTrainedModel",
    tokenizers: TokenizerPair,
    source: str,
    target: str | None = None,
    layer: int = -1,
    head: int | None = None,
    kind: Kind = "cross",
) -> AttentionMap:
    """Compute the attention of one layer for one sentence.

    For a model of several target languages, whose sources begin with a tag, use `attention_of_ids`.

    Args:
        model: A `HeedForConditionalGeneration` or another encoder-decoder of transformers (loaded with
            `attn_implementation="eager"`; Heed's own switches by itself).
        tokenizers: Its tokenizers.
        source: A sentence.
        target: A translation to follow (teacher forcing); None takes the model's own.
        layer: Number of the layer, from 0, or from -1 for the last.
        head: Number of the head, or None for the mean over all heads.
        kind: "cross", "encoder" or "decoder".

    Raises:
        ValueError: For an empty source, a layer, head or kind that does not exist, a sentence beyond the model's
            learned positions, or a model that does not give its attention weights.

    """
    if not source.strip():
        raise ValueError(f"`source` must be a sentence, but is {source!r} instead.")
    _check_model(model)
    _check_kind(kind)
    source_ids = tokenizers.encode_source([source])[0]
    if target is None:
        target_ids = Translator(model, tokenizers).translate([source])[0][0].token_ids
    else:
        target_ids = tuple(tokenizers.encode_target([target])[0])
    return attention_of_ids(model, tokenizers, source_ids, target_ids, layer, head, kind)


def attention_of_ids(
    model: "PreTrainedModel",
    tokenizers: TokenizerPair,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    layer: int = -1,
    head: int | None = None,
    kind: Kind = "cross",
) -> AttentionMap:
    """Compute the attention of one layer for token ids.

    Args:
        model: As in `attention_map`.
        tokenizers: As in `attention_map`.
        source_ids: What `TokenizerPair.encode_source` gives for one sentence, language tag included.
        target_ids: What `TokenizerPair.encode_target` or `Translation.token_ids` gives: no <s>, but </s>.
        layer: As in `attention_map`.
        head: As in `attention_map`.
        kind: As in `attention_map`.

    Raises:
        ValueError: As in `attention_map`.

    """
    _check_model(model)
    _check_kind(kind)
    _check_lengths(model, source_ids, target_ids)
    fed_ids = [model.config.decoder_start_token_id, *target_ids[:-1]]
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            outputs = model(
                input_ids=torch.tensor([list(source_ids)], device=model.device),
                decoder_input_ids=torch.tensor([fed_ids], device=model.device),
                **{"output_attentions": True, "use_cache": False, "return_dict": True},
            )
    finally:
        model.train(was_training)
    layers = outputs.get(f"{kind}_attentions")
    if not layers or layers[0] is None:
        raise ValueError(
            f"`model` must give its {kind} attention, but does not: load it with attn_implementation='eager'."
        )
    _check_number("layer", layer, len(layers), from_the_end=True)
    heads = layers[layer][0].float().cpu()  # (heads, rows, columns)
    if head is not None:
        _check_number("head", head, len(heads), from_the_end=False)
    weights = heads.mean(dim=0) if head is None else heads[head]
    source_labels = token_labels(tokenizers.source, source_ids)
    if kind == "encoder":
        return AttentionMap(source_labels, source_labels, weights.numpy(), kind)
    target_labels = token_labels(tokenizers.target, target_ids)
    columns = source_labels if kind == "cross" else token_labels(tokenizers.target, fed_ids)
    return AttentionMap(columns, target_labels, weights.numpy(), kind)


def token_labels(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str]:
    """Make readable labels of tokens.

    Control tokens keep their name (`</s>`), a space is ▁. Byte-level pieces become the characters that begin in them;
    where a piece continues a character of the piece before, as Korean ones often do, its label begins with …; bytes
    that are no character are shown as ‹EC›.

    Args:
        tokenizer: The tokenizer that the ids come from.
        ids: Token ids of one sequence.

    """
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    is_byte_level = _is_byte_level(tokenizer)
    labels = list(pieces)
    run: list[tuple[int, bytes]] = []  # neighbouring pieces whose bytes may form a character together
    for index, (id_, piece) in enumerate(zip(ids, pieces, strict=True)):
        fallback = FALLBACK_BYTE.fullmatch(piece)
        if id_ not in control and (is_byte_level or fallback):
            run.append((index, bytes.fromhex(fallback[1]) if fallback else _piece_bytes(piece)))
            continue
        _label_run(run, labels)
        run = []
        if id_ not in control:
            labels[index] = "".join(map(_visible, piece))
    _label_run(run, labels)
    return labels


def draw_attention(attention: AttentionMap, path: str | Path, title: str | None = None) -> Path:
    """Draw an attention map as a heat map: rows look at columns, darker is more.

    Neither pyplot nor matplotlib's settings are touched. Letters that matplotlib's own font lacks are taken from a
    Korean font of the system, or from the one that comes with the extra `heed[plots]`.

    Args:
        attention: What to draw.
        path: File to write: .png, .svg or .pdf.
        title: A line above the picture.

    Returns:
        The path of the file.

    Raises:
        ValueError: For another suffix.
        FileNotFoundError: When the folder of `path` does not exist.
        ImportError: When matplotlib is not installed.

    """
    path = Path(path)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ValueError(f"`path` must end in one of {', '.join(PICTURE_SUFFIXES)}, but is {path} instead.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`path` must lie in an existing folder, but {path.parent} does not exist.")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Drawing attention needs matplotlib: pip install 'heed[plots]'") from error

    rows, columns = attention.weights.shape
    # 0.3 inches hold one label; beyond 60 inches the picture would be larger than image viewers open.
    figure = Figure(figsize=(min(2.5 + 0.3 * columns, 60), min(2 + 0.3 * rows, 60)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    texts = [*attention.source_tokens, *attention.target_tokens, title or ""]
    style: dict[str, Any] = {"family": _font_families("".join(texts)), "parse_math": False, "usetex": False}
    axes = figure.add_subplot()
    image = axes.imshow(attention.weights, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(columns), attention.source_tokens, rotation=90, **style)
    axes.set_yticks(range(rows), attention.target_tokens, **style)
    axes.xaxis.tick_top()
    if title:
        axes.set_title(title, **style)
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    with warnings.catch_warnings():
        # `_font_families` has said so already, once and with what to do.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(path)
    return path


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            "The model must be one of transformers to tell its attention weights, but was exported for another engine "
            "instead."
        )


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise ValueError(f"`kind` must be cross, encoder or decoder, but is {kind!r} instead.")


def _check_lengths(model: "PreTrainedModel", source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
    limit = position_limit(model.config)
    for field, ids in (("source", source_ids), ("target", target_ids)):
        if not ids:
            raise ValueError(f"The {field} must have at least one token, but has none.")
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"The {field} must have at most {limit} tokens, the model's number of positions,"
                f" but has {len(ids)} instead."
            )


def _check_number(field: str, number: int, count: int, *, from_the_end: bool) -> None:
    least = -count if from_the_end else 0
    if not least <= number < count:
        raise ValueError(f"`{field}` must be between {least} and {count - 1}, but is {number} instead.")


def _is_byte_level(tokenizer: "PreTrainedTokenizerBase") -> bool:
    from tokenizers import decoders

    return tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)


def _byte_of_letter() -> dict[str, int]:
    """Undo GPT-2's table, where each byte is a printable letter: printable ones themselves, the rest from Ā on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_of_letter()


def _piece_bytes(piece: str) -> bytes:
    return bytes(BYTE_OF_LETTER[letter] for letter in piece)


def _label_run(run: list[tuple[int, bytes]], labels: list[str]) -> None:
    """Write the labels of neighbouring byte-level pieces."""
    owners = [index for index, piece in run for _ in piece]
    for index, _ in run:
        labels[index] = ""
    for start, size, text in _characters(b"".join(piece for _, piece in run)):
        first = owners[start]
        labels[first] += text
        for index in sorted(set(owners[start : start + size]) - {first}):
            labels[index] += CONTINUATION_MARK


def _characters(text: bytes) -> Iterator[tuple[int, int, str]]:
    """Cut UTF-8 into (start, number of bytes, what to show), a byte that begins no character on its own."""
    start = 0
    while start < len(text):
        for size in range(1, 5):
            try:
                character = text[start : start + size].decode()
            except UnicodeDecodeError:
                continue
            break
        else:
            size, character = 1, ""
        yield start, size, _visible(character) if character else f"‹{text[start]:02X}›"
        start += size


def _visible(character: str) -> str:
    if character == " ":
        return SPACE_MARK
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def _font_families(text: str) -> list[str]:
    """List fonts that have all letters of a text together, matplotlib's own first, as far as there are any."""
    from matplotlib import font_manager
    from matplotlib.font_manager import fontManager

    families = ["DejaVu Sans"]
    # What has no shape of its own (variation selectors, joiners) is nothing to miss.
    missing = {ord(letter) for letter in text if letter.isprintable() and not 0xFE00 <= ord(letter) <= 0xFE0F}
    missing -= _letters_of(font_manager.findfont(families[0]))
    for family, path in _wide_fonts(fontManager):
        if not missing:
            break
        letters = _letters_of(path)
        if missing & letters:
            families.append(family)
            missing -= letters
    if missing:
        sample = "".join(sorted(map(chr, missing))[:10])
        warnings.warn(
            f"No font here has {len(missing)} of the letters to draw ({sample}). A Korean font comes with:"
            " pip install 'heed[plots]'",
            stacklevel=3,
        )
    return families


def _letters_of(path: str) -> set[int]:
    from matplotlib.ft2font import FT2Font

    return set(FT2Font(path).get_charmap())


def _wide_fonts(manager: Any) -> Iterator[tuple[str, str]]:
    """Give (family, file) of fonts with Korean letters: the system's, then koreanize_matplotlib's."""
    files = {entry.name: entry.fname for entry in manager.ttflist if Path(entry.fname).is_file()}
    for family in WIDE_FONTS:
        if family in files:
            yield family, files[family]
    # Found, not imported: importing it changes matplotlib's settings for everybody.
    package = find_spec("koreanize_matplotlib")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "fonts" / "NanumGothic.ttf"
        if path.is_file():
            manager.addfont(path)
            yield "NanumGothic", str(path)
