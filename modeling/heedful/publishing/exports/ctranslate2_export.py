"""Heed models for CTranslate2: its model.bin and vocabularies, the tokenizers, and what `Translator` needs to know.

Before the folder appears, CTranslate2 has translated sentences from it. In float32 each translation must have the
tokens of `generate()`, greedily and with beams; for other types the number of differences is told.
"""

import json
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from heedful.inference.ctranslate2.engine import FORMAT_VERSION, METADATA_FILE, ComputeType, check_compute_type
from heedful.inference.ctranslate2.specification import import_ctranslate2, obstacle, positions_of_table, save_model
from heedful.inference.loading import resolve_device
from heedful.inference.translation import Translator
from heedful.publishing.exports.comparison import MORE_THAN_SOURCE, compare, refuse
from heedful.publishing.exports.export import Export, begun_export, check_quantization

BEAMS = 5
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    f"{BEAMS} beams": {"num_beams": BEAMS, "early_stopping": True},
}


def export_ctranslate2(
    model: str | Path,
    target: str | Path,
    sentences: Sequence[str],
    quantization: ComputeType = "float32",
    device: str | None = None,
) -> Export:
    """Write a folder for CTranslate2, which `Translator.from_pretrained` and CTranslate2 itself can load.

    The folder appears whole or not at all.

    Args:
        model: A folder or an id on the Hub, of a Heed model or of an adapter.
        target: The folder to write; it must not exist.
        sentences: Sources to compare on.
        quantization: Type of the weights, as CTranslate2 calls it.
        device: Where CTranslate2 computes the comparison: "cpu", "cuda"; None takes CUDA where there is one.

    Raises:
        ValueError: If `target` exists, CTranslate2 cannot express the model, the device cannot compute in the type, a
            translation differs in float32, or most tokens are others in another type. The message names the field or
            the sentence.
        FileNotFoundError: If the model or its tokenizers are missing.
        ImportError: If CTranslate2 is not installed.
    """
    import_ctranslate2()
    check_quantization(quantization, get_args(ComputeType))
    resolved = resolve_device(device)
    check_compute_type(quantization, resolved, "quantization")
    with begun_export(model, target, sentences) as (loaded, tokenizers, compared, folder):
        reason = obstacle(loaded)
        if reason is not None:
            raise ValueError(reason)
        save_model(loaded, tokenizers, folder, quantization)
        _write_metadata(folder, loaded, quantization)
        expected = Translator(loaded.to(resolved), tokenizers, engine="generate")
        translators = (expected, Translator.from_pretrained(folder, str(resolved)))
        comparisons = {
            name: compare(compared, *(_translated(each, compared, search) for each in translators))
            for name, search in _searches(loaded).items()
        }
        refuse(comparisons, "CTranslate2", quantization)
        size = (folder / "model.bin").stat().st_size
    return Export(Path(target), quantization, size, comparisons)


def _searches(model: Any) -> dict[str, Any]:
    """Return the settings of each search: of the model's own only its special ids and its length penalty."""
    from transformers import GenerationConfig

    own = model.generation_config
    kept = {name: getattr(own, name) for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id")}
    kept["length_penalty"] = 1.0 if own.length_penalty is None else own.length_penalty
    return {name: GenerationConfig(**kept, **search) for name, search in SEARCHES.items()}


def _translated(translator: Translator, sentences: list[str], search: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each translation, into the target languages in turn where there are several."""
    tokenizers, own = translator.tokenizers, translator.model.generation_config
    positions = positions_of_table(translator.model.config)
    languages = tokenizers.languages if len(tokenizers.languages) > 1 else (None,)
    outputs: list[tuple[int, ...]] = [()] * len(sentences)
    translator.model.generation_config = search
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they tell of translations that were cut off
            for first, language in enumerate(languages):
                part = sentences[first :: len(languages)]
                longest = max(map(len, tokenizers.encode_source(part, language)), default=0)
                limit = min(longest + MORE_THAN_SOURCE, positions or longest + MORE_THAN_SOURCE)
                translated = translator.translate(part, target_language=language, max_new_tokens=limit)
                outputs[first :: len(languages)] = [best.token_ids for best, *_ in translated]
    finally:
        translator.model.generation_config = own
    return outputs


def _write_metadata(folder: Path, model: Any, quantization: str) -> None:
    config = model.config.to_diff_dict()
    for name in ("auto_map", "custom_pipelines"):  # the folder holds no code
        config.pop(name, None)
    metadata = {
        "format": "ctranslate2",
        "format_version": FORMAT_VERSION,
        "heed_version": version("heedful"),
        "ctranslate2_version": version("ctranslate2"),
        "quantization": quantization,
        "config": config,
        "generation_config": model.generation_config.to_diff_dict(),
    }
    text = json.dumps(metadata, indent=2, ensure_ascii=False, sort_keys=True)
    (folder / METADATA_FILE).write_text(text + "\n", encoding="utf-8")
