"""CTranslate2's search with the settings of `generate()`, by which an exported folder is compared with its model.

Greedy search gives the tokens of `generate()`. So does beam search with `early_stopping=True`: both end a sentence
with its `num_beams`-th finished hypothesis. With `early_stopping=False` `generate()` goes on while the best open
hypothesis has a better score than the worst finished one. CTranslate2 has no such rule, so this is refused.
"""

from pathlib import Path
from typing import Any, Literal

import torch

from heedful.data.tokenization import TokenizerPair
from heedful.decoding.engines import Hypothesis, Sources
from heedful.decoding.search_settings import GREEDY_SETTINGS, asked_of, end_tokens
from heedful.decoding.strategies.steps import require
from heedful.export.ctranslate2 import specification

Mixed = Literal["int8_float32", "int8_float16", "int8_bfloat16"]
ComputeType = Literal["float32", "int8", "int16", "float16", "bfloat16", Mixed]
ALMOST_ZERO = 1e-30  # in place of a length penalty of 0, with which CTranslate2 stops at the first hypothesis


class CTranslate2Engine:
    """Greedy and beam search by CTranslate2 over an exported folder of a model, which is on the same device."""

    def __init__(self, folder: Path, model: Any, tokenizers: TokenizerPair, compute_type: ComputeType):
        self.model = model
        self._source_tokens = specification.vocabulary(tokenizers.source)
        self._target_tokens = specification.vocabulary(tokenizers.target)
        self._target_ids = {token: number for number, token in enumerate(self._target_tokens)}
        kind, index = _place(model.device)
        options = {"device_index": index, "compute_type": compute_type, "intra_threads": torch.get_num_threads()}
        self._translator = specification.import_ctranslate2().Translator(str(folder), kind, **options)

    def search(self, sources: Sources, config: Any, token_budget: int) -> list[list[Hypothesis]]:
        """Return hypotheses as `GenerateEngine.search`, without scores: CTranslate2 sorts and batches sentences."""
        words = [[self._source_tokens[token] for token in source] for source in sources]
        results = self._translator.translate_batch(
            words,
            max_batch_size=max(token_budget // config.num_beams, max(map(len, words))),
            batch_type="tokens",
            max_input_length=0,
            return_end_token=True,  # so that it counts in the length, as it does in generate()
            **self._search_options(config),
        )
        ids = self._target_ids
        return [[Hypothesis(tuple(map(ids.__getitem__, row))) for row in result.hypotheses] for result in results]

    def _search_options(self, config: Any) -> dict[str, Any]:
        shortest = (config.min_length or 1) - 1 if config.min_new_tokens is None else config.min_new_tokens
        # As in generate(), an end token is not a bad word.
        bad = [row for row in config.bad_words_ids or [] if len(row) > 1 or row[0] not in end_tokens(config)]
        banned = [*bad, *([token] for token in config.suppress_tokens or [])]
        return {
            "beam_size": config.num_beams,
            "length_penalty": 1.0 if config.length_penalty is None else config.length_penalty or ALMOST_ZERO,
            "max_decoding_length": config.max_new_tokens,
            "min_decoding_length": min(shortest, config.max_new_tokens),
            "end_token": [self._target_tokens[token] for token in end_tokens(config)],
            "repetition_penalty": config.repetition_penalty or 1.0,
            "no_repeat_ngram_size": config.no_repeat_ngram_size or 0,
            "suppress_sequences": [[self._target_tokens[token] for token in row] for row in banned] or None,
        }


def check_settings(config: Any, model_config: Any) -> None:
    """Raise a `ValueError` that names one of a form's settings which CTranslate2 cannot follow in this search."""
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
    """Raise a `ValueError` if CTranslate2 does not compute in a type on a device."""
    kind, index = _place(device)
    supported = specification.import_ctranslate2().get_supported_compute_types(kind, index)
    must = f"be one of {', '.join(sorted(supported))}, which CTranslate2 can compute with on this {kind}"
    require(name in supported, "quantization", must, repr(name))


def _place(device: torch.device) -> tuple[str, int]:
    """Return CTranslate2's name and number of a device."""
    if device.type == "cpu":
        return "cpu", 0
    require(device.type == "cuda", "device", "be cpu or cuda for CTranslate2", repr(str(device)))
    return "cuda", device.index or 0
