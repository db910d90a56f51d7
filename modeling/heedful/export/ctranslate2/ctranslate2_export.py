"""Heed models for CTranslate2: its model.bin and vocabularies, and the tokenizers.

Before the folder appears, CTranslate2 has translated sentences from it. In float32 each translation must have the
tokens of `generate()`, greedily and with beams; for other types the number of differences is returned.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, get_args

from heedful.data.tokenization import TokenizerPair
from heedful.decoding.loading import resolve_device
from heedful.export import comparison
from heedful.export.ctranslate2 import engine
from heedful.export.ctranslate2.specification import CHOICES, import_ctranslate2, positions_of_table, save_model

BEAMS = 5


def export_ctranslate2(
    model: str | Path,
    target: str | Path,
    sentences: Sequence[str],
    quantization: engine.ComputeType = "float32",
    device: str | None = None,
) -> comparison.Export:
    """Write a folder that CTranslate2 loads.

    The comparison on `sentences` runs on `device`: "cpu", "cuda"; None takes CUDA where there is one. It is a
    `ValueError` too if the device cannot compute in the type, or most tokens are others in another type than float32.
    """
    import_ctranslate2()
    comparison.check_quantization(quantization, get_args(engine.ComputeType))
    resolved = resolve_device(device)
    engine.check_compute_type(quantization, resolved)
    with comparison.begun_export(model, target, sentences, "CTranslate2") as draft:
        loaded, folder = draft.model, draft.folder
        comparison.check_fields(loaded.config, CHOICES, "CTranslate2")
        save_model(loaded, draft.tokenizers, folder, quantization)
        searches, limit = _searches(loaded), positions_of_table(loaded.config)
        loaded.to(resolved)
        tried = engine.CTranslate2Engine(folder, loaded, TokenizerPair.from_pretrained(folder), quantization)
        found = draft.outputs(tried, searches, limit)
        comparisons = draft.compare(found, searches, limit, "CTranslate2", quantization)
        size = (folder / "model.bin").stat().st_size
    return comparison.Export(Path(target), quantization, size, comparisons)


def _searches(model: Any) -> dict[str, Any]:
    """Return the model's own settings for each search; without beams, if those cannot have what greedy search can."""
    own, searches = model.generation_config, {}
    has_beams = (own.num_beams or 1) > 1
    for name, search in comparison.searches_of(own, BEAMS, early_stopping=True).items():
        with suppress(ValueError) if search.num_beams > 1 and not has_beams else nullcontext():
            engine.check_settings(search, model.config)
            searches[name] = search
    if has_beams and own.early_stopping is not True and own.length_penalty != 0:
        is_not = f"`early_stopping` of the generation config is {own.early_stopping}"
        warnings.warn(f"{is_not}, but CTranslate2 ends as with True.", stacklevel=3)
    return searches
