"""A model in one HTML file for offline use: int8 weights, a tokenizer, and JavaScript that computes."""

import base64
import html
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import torch

from heedful.configuration_base_heed import position_limit
from heedful.conversion.families import plain_heads
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import model_folder
from heedful.decoding.search_settings import MOST_SOURCE_TOKENS, asked_of, end_tokens
from heedful.export import comparison
from heedful.files import check_writable, json_in_html, write_text
from heedful.generation_heed import DEFAULT_MAX_NEW_TOKENS
from heedful.protocols import Seq2SeqModel

PAGE, TRANSFORMER, RECURRENT = map(Path(__file__).with_name, ("page.html", "transformer.js", "recurrent.js"))
LARGEST = 100_000_000  # bytes in all models' weights; browsers do not open much larger files
WIDEST = 127  # symmetrical int8
LIMITS = re.compile(r"^## (?:Intended use and limits|Limits)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)  # card's
# The example text in a card's code, a JSON string.
EXAMPLE = re.compile(r'\b(?:translate|generate|tokenizer)\(\[?("(?:[^"\\\n]|\\["\\/bfnrt]|\\u[0-9a-f]{4})*")')
CHOICES: dict[str, Sequence[Any]] = {
    "attention_scoring": ("scaled_dot",),
    "position_encoding": ("sinusoidal", "learned"),
    "norm_type": ("layernorm",),
    "activation_function": ("relu", "gelu", "silu", "tanh"),
    **dict.fromkeys(("encoder_neighbourhood", "decoder_neighbourhood"), (None,)),
    "share_layers": (False,),
}


def write_page(models: Sequence[str | Path], path: str | Path, example: str | None = None) -> Path:
    """Write an HTML page with one or several models, which translate a text side by side.

    `models` are Transformers or recurrent models with attention, each with a byte-level BPE tokenizer for both sides.
    The page opens with `example`, by default from a model's card. A `ValueError` names unsupported parts.
    """
    path = check_writable(path, [".html"])
    packed, cards = [], []
    for model in models:
        loaded, tokenizers = comparison.load_for("a page", model)
        if loaded.config.model_type == "heed":
            comparison.check_fields(loaded.config, CHOICES | plain_heads(loaded.config), "A page")
        cards.append(comparison.card_of(model_folder(model)))
        packed.append(_packed(comparison.model_name(model), cards[-1], loaded, tokenizers))
    size = sum(len(each["weights"]) * 3 // 4 for each in packed)
    if size > LARGEST:
        raise ValueError(f"The models of a page must have at most {LARGEST:,} bytes of weights, but have {size:,}.")
    if example is None:
        example = json.loads(next(chain.from_iterable(map(EXAMPLE.findall, cards)), '""'), strict=False)
    parts = {"title": html.escape(" · ".join(each["name"] for each in packed)), "example": html.escape(example)}
    parts |= {script.stem: script.read_text(encoding="utf-8") for script in (TRANSFORMER, RECURRENT)}
    page = jinja2.Template(PAGE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    write_text(path, page.render(parts, models=json_in_html(packed)))
    return path


def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rows, columns)` int8 numbers and their `(rows)` float32 scales."""
    scales = (matrix.abs().amax(1) / WIDEST).clamp(min=1e-12)
    return (matrix / scales[:, None]).round().to(torch.int8), scales


def _packed(name: str, card: str, model: Seq2SeqModel, tokenizers: TokenizerPair) -> dict[str, Any]:
    config, search, limits = model.config, model.generation_config, LIMITS.search(card)
    tensors, weights = _tensors(model)
    most = search.max_new_tokens or (search.max_length or DEFAULT_MAX_NEW_TOKENS + 1) - 1
    start = (search if search.decoder_start_token_id is not None else config).decoder_start_token_id
    lengths = {"max_new_tokens": most, "longest": min(most, position_limit(config) or most)}
    lengths["positions"] = position_limit(config) or MOST_SOURCE_TOKENS
    others = {"num_beams": search.num_beams or 1, "start": start, "ends": end_tokens(search), **lengths}
    return {
        "name": name,
        "limits": limits[1].strip() if limits else "",
        "config": {field: value for field, value in config.to_dict().items() if field[0] != "_"},
        "tokenizer": _tokenizer(tokenizers),
        "search": asked_of(search) | others,
        "tensors": tensors,
        "weights": base64.b64encode(weights).decode("ascii"),
    }


def _tensors(model: Seq2SeqModel) -> tuple[dict[str, Any], bytes]:
    """Return each tensor's place in the bytes: all float32 numbers, then int8 matrices, shared ones once."""
    vectors, matrices, places = bytearray(), bytearray(), {}
    tensors: dict[str, Any] = {}
    for name, value in model.float().state_dict().items():
        name = name.removeprefix("model.")
        if value.dim() == 2 and "embed_positions" not in name:
            if value.data_ptr() not in places:
                int8, scales = quantize(value)
                places[value.data_ptr()] = {"at": len(matrices), "scales": len(vectors)}
                matrices += int8.numpy().tobytes()
                vectors += scales.numpy().tobytes()
            tensors[name] = {"rows": value.shape[0], "columns": value.shape[1], **places[value.data_ptr()]}
        else:
            key = name.removesuffix(".weight") if value.dim() == 2 else name
            tensors[key] = {"columns": value.numel(), "at": len(vectors)}
            vectors += value.numpy().tobytes()
    for tensor in tensors.values():
        tensor["at"] += len(vectors) if "rows" in tensor else 0
    return tensors, bytes(vectors + matrices)


def _tokenizer(tokenizers: TokenizerPair) -> dict[str, Any]:
    tokenizers.check_is_fast("a page")
    tokenizer: Any = tokenizers.source
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kind = [(state[part] or {}).get("type") for part in ("model", "pre_tokenizer", "normalizer")]
    if kind != ["BPE", "ByteLevel", "NFC"]:
        found = ", ".join(map(str, kind))
        raise ValueError(f"The tokenizer must be byte-level BPE with NFC for a page, but is {found} instead.")
    return {
        "vocabulary": tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))),
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]],
        "special": sorted(tokenizer.added_tokens_decoder),
        "end": tokenizer.eos_token_id,
    }
