"""Heed models for CTranslate2, whose beam search ends like `generate()` with `early_stopping=True`."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import torch

from heedful.data.tokenization import TokenizerPair
from heedful.decoding.engines import Hypothesis, Sources
from heedful.decoding.loading import resolve_device
from heedful.decoding.search_settings import GREEDY_SETTINGS, asked_of, end_tokens
from heedful.decoding.strategies.steps import require
from heedful.export import comparison
from heedful.export import ctranslate2_specification as specification
from heedful.protocols import Seq2SeqModel

BEAMS = 5
ALMOST_ZERO = 1e-30  # instead of a length penalty of 0, with which CTranslate2 stops at the first hypothesis


def export_ctranslate2(
    model: str | Path,
    target: str | Path,
    sentences: Sequence[str],
    quantization: str = "float32",
    device: str | None = None,
) -> comparison.Export:
    """Write a folder for CTranslate2, and compare it on `device`: "cpu", "cuda", or None for CUDA if possible.

    Raises a `ValueError` if the device does not support the weight type, or if the model gives other tokens.
    """
    resolved = resolve_device(device)
    check_compute_type(quantization, resolved)
    with comparison.begun_export(model, target, sentences, "CTranslate2") as draft:
        loaded, folder = draft.model, draft.folder
        comparison.check_fields(loaded.config, specification.CHOICES, "CTranslate2")
        specification.save_model(loaded, draft.tokenizers, folder, quantization)
        searches, limit = _searches(loaded), specification.positions_of_table(loaded.config)
        there: Seq2SeqModel = cast("Any", loaded).to(resolved)
        tried = CTranslate2Engine(folder, there, TokenizerPair.from_pretrained(folder), quantization)
        found = draft.outputs(tried, searches, limit)
        comparisons = draft.compare(found, searches, limit, "CTranslate2", quantization)
        size = (folder / "model.bin").stat().st_size
    return comparison.Export(Path(target), quantization, size, comparisons)


class CTranslate2Engine:
    """Greedy and beam search by CTranslate2, on the model's device."""

    def __init__(self, folder: Path, model: Seq2SeqModel, tokenizers: TokenizerPair, compute_type: str):
        self.model = model
        self._source_tokens = specification.vocabulary(tokenizers.source)
        self._target_tokens = specification.vocabulary(tokenizers.target)
        self._target_ids = {token: number for number, token in enumerate(self._target_tokens)}
        options = {"device_index": model.device.index or 0, "compute_type": compute_type}
        options["intra_threads"] = torch.get_num_threads()
        self._translator = specification.import_ctranslate2().Translator(str(folder), model.device.type, **options)

    def search(self, sources: Sources, config: Any, token_budget: int) -> list[list[Hypothesis]]:
        """Return hypotheses like `GenerateEngine.search`, without scores. CTranslate2 makes the batches."""
        words = [[self._source_tokens[token] for token in source] for source in sources]
        shortest = (config.min_length or 1) - 1 if config.min_new_tokens is None else config.min_new_tokens
        # As in generate(), end tokens are not bad words.
        bad = [row for row in config.bad_words_ids or [] if len(row) > 1 or row[0] not in end_tokens(config)]
        banned = [*bad, *([token] for token in config.suppress_tokens or [])]
        results = self._translator.translate_batch(
            words,
            max_batch_size=max(token_budget // config.num_beams, max(map(len, words))),
            batch_type="tokens",
            max_input_length=0,
            return_end_token=True,  # counted in the length, as in generate()
            beam_size=config.num_beams,
            length_penalty=1.0 if config.length_penalty is None else config.length_penalty or ALMOST_ZERO,
            max_decoding_length=config.max_new_tokens,
            min_decoding_length=min(shortest, config.max_new_tokens),
            end_token=[self._target_tokens[token] for token in end_tokens(config)],
            repetition_penalty=config.repetition_penalty or 1.0,
            no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
            suppress_sequences=[[self._target_tokens[token] for token in row] for row in banned] or None,
        )
        ids = self._target_ids
        return [[Hypothesis(tuple(map(ids.__getitem__, row))) for row in result.hypotheses] for result in results]


def check_settings(config: Any, model_config: Any) -> None:
    """Raise a `ValueError` for a setting that CTranslate2 does not support in this search."""
    ends, beams = end_tokens(config), config.num_beams or 1
    start, own = config.decoder_start_token_id, model_config.decoder_start_token_id
    for name, value in asked_of(config).items():
        # In beam search CTranslate2 changes logits, but `generate()` log-probabilities.
        is_taken = beams == 1 or name not in GREEDY_SETTINGS
        require(is_taken, name, "not be set in CTranslate2's beam search", repr(value))
    require(bool(ends), "eos_token_id", "be set with CTranslate2", None)
    require(beams == 1 or len(ends) == 1, "eos_token_id", "be one token in CTranslate2's beam search", ends)
    must = f"be {own} with CTranslate2, as in the model's config"
    require(start in (None, own), "decoder_start_token_id", must, start)


def check_compute_type(name: str, device: torch.device) -> None:
    """Raise a `ValueError` if CTranslate2 does not support the device or the weight type on it."""
    require(device.type in ("cpu", "cuda"), "device", "be cpu or cuda for CTranslate2", repr(str(device)))
    supported = specification.import_ctranslate2().get_supported_compute_types(device.type, device.index or 0)
    must = f"be one of {', '.join(sorted(supported))}, which CTranslate2 can compute with on this {device.type}"
    require(name in supported, "quantization", must, repr(name))


def _searches(model: Seq2SeqModel) -> dict[str, Any]:
    """Return the model's settings for each search, without beam search if it does not support them."""
    own, searches = model.generation_config, {}
    has_beams = (own.num_beams or 1) > 1
    for name, search in comparison.searches_of(own, BEAMS, early_stopping=True).items():
        with suppress(ValueError) if search.num_beams > 1 and not has_beams else nullcontext():
            check_settings(search, model.config)
            searches[name] = search
    if has_beams and own.early_stopping is not True and own.length_penalty != 0:
        is_not = f"`early_stopping` of the generation config is {own.early_stopping}"
        warnings.warn(f"{is_not}, but CTranslate2 always ends as with True.", stacklevel=3)
    return searches
