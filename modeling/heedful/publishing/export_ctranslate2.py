"""Heed models for CTranslate2: its model.bin and vocabularies, the tokenizers, and what `Translator` needs to know.

Before the folder appears, CTranslate2 has translated real sentences from it. In float32 each must have the tokens of
`generate()`, greedily and with beams; of other types it is told how many differ.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from heedful.files import check_is_new, new_folder
from heedful.inference.ctranslate2.engine import FORMAT_VERSION, METADATA_FILE, ComputeType, check_compute_type
from heedful.inference.ctranslate2.specification import import_ctranslate2, obstacle, positions_of_table, save_model
from heedful.inference.loading import resolve_device
from heedful.inference.translation import Translator
from heedful.publishing.export_check import Comparison, compare, load_pair

BEAMS = 5
# Longer translations than the longest source and this are cut off while comparing.
MORE_THAN_SOURCE = 50
# Below it, quantized outputs have lost the model: the mean share of tokens that they have in common.
LEAST_LIKENESS = 0.5


@dataclass(frozen=True)
class CTranslate2Export:
    """What was exported, and how it compared.

    Attributes:
        folder: Where it lies.
        quantization: The type of its weights.
        size: Of model.bin, in bytes.
        comparisons: By the name of a search, what `generate()` and CTranslate2 made of the sentences.

    """

    folder: Path
    quantization: str
    size: int
    comparisons: dict[str, Comparison] = field(default_factory=dict)


def export_ctranslate2(
    model: str | Path,
    target: str | Path,
    sentences: Sequence[str],
    quantization: ComputeType = "float32",
    device: str | None = None,
) -> CTranslate2Export:
    """Write a folder for CTranslate2, which `Translator.from_pretrained` and CTranslate2 itself can load.

    The folder appears whole or not at all.

    Args:
        model: Folder of a Heed model, or its id on the Hub.
        target: The folder to write; it must not exist.
        sentences: Sources to compare on.
        quantization: Type of the weights, as CTranslate2 calls it.
        device: Where CTranslate2 computes the comparison: "cpu", "cuda"; None takes CUDA where there is one.

    Raises:
        ValueError: If `target` exists, CTranslate2 cannot express the model or the device not compute in the type, a
            translation differs in float32, or most of them are lost in another type. The message names the field or
            the sentence.
        FileNotFoundError: If the model or its tokenizers are missing.
        ImportError: If CTranslate2 is not installed.

    """
    import_ctranslate2()
    if quantization not in get_args(ComputeType):
        known = ", ".join(get_args(ComputeType))
        raise ValueError(f"`quantization` must be one of {known}, but is {quantization!r} instead.")
    place = resolve_device(device)
    check_compute_type(quantization, place, "quantization")
    target = Path(target)
    check_is_new(target)
    loaded, tokenizers = load_pair(model)
    reason = obstacle(loaded)
    if reason is not None:
        raise ValueError(reason)
    with new_folder(target) as folder:
        save_model(loaded, tokenizers, folder, quantization)
        tokenizers.save_pretrained(folder)
        _write_metadata(folder, loaded, quantization)
        exported = Translator.from_pretrained(folder, str(place))
        comparisons = compare_translations(
            Translator(loaded.to(place), tokenizers, engine="generate"), exported, sentences
        )
        _refuse(comparisons, quantization)
        size = (folder / "model.bin").stat().st_size
    return CTranslate2Export(target, quantization, size, comparisons)


def compare_translations(expected: Translator, found: Translator, sentences: Sequence[str]) -> dict[str, Comparison]:
    """Translate sentences by two translators, greedily and with beams, and compare the tokens.

    Args:
        expected: By `generate()`.
        found: By CTranslate2.
        sentences: The sources; where the tokenizers know several languages, into each in turn.

    Returns:
        The comparison of each search, by its name.

    """
    sentences = [sentence for sentence in sentences if sentence.strip()]
    searches: dict[str, dict[str, Any]] = {
        "greedy": {"num_beams": 1},
        f"{BEAMS} beams": {"num_beams": BEAMS, "early_stopping": True},
    }
    comparisons = {}
    for name, search in searches.items():
        outputs = [_outputs(translator, sentences, **search) for translator in (expected, found)]
        comparisons[name] = compare(sentences, *outputs)
    return comparisons


def _outputs(translator: Translator, sentences: list[str], **search: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each translation, with none of the model's own settings but its length penalty."""
    from transformers import GenerationConfig

    own = translator.model.generation_config
    kept = {name: getattr(own, name) for name in ("eos_token_id", "pad_token_id", "decoder_start_token_id")}
    penalty = 1.0 if own.length_penalty is None else own.length_penalty
    translator.model.generation_config = GenerationConfig(**kept, length_penalty=penalty, **search)
    positions = positions_of_table(translator.model.config)
    outputs: list[tuple[int, ...]] = [()] * len(sentences)
    languages = translator.tokenizers.languages if len(translator.tokenizers.languages) > 1 else (None,)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lengths, and of the search that is compared here
            for first, language in enumerate(languages):
                part = sentences[first :: len(languages)]
                longest = max(map(len, translator.tokenizers.encode_source(part, language)), default=0)
                limit = min(longest + MORE_THAN_SOURCE, positions or longest + MORE_THAN_SOURCE)
                translated = translator.translate(part, target_language=language, max_new_tokens=limit)
                outputs[first :: len(languages)] = [best.token_ids for best, *_ in translated]
    finally:
        translator.model.generation_config = own
    return outputs


def _refuse(comparisons: dict[str, Comparison], quantization: str) -> None:
    for name, comparison in comparisons.items():
        if quantization == "float32":
            comparison.refuse(f"CTranslate2 ({name})")
    lost = comparisons["greedy"]
    if not lost.sentences:
        raise ValueError("`sentences` must hold a sentence to compare on, but hold none.")
    if lost.likeness < LEAST_LIKENESS:
        raise ValueError(
            f"`quantization` {quantization} loses the model, so that no folder is left: translations have "
            f"{100 * lost.likeness:.0f} % of their tokens in common with generate()'s."
        )


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
