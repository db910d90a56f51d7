"""Minimum Bayes risk decoding for `generate(custom_generate=MinimumBayesRisk(tokenizer))`.

Letters in shape comments: B sentences, N candidates per sentence, L target length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from heedful.data.tokenization import TokenizerPair
from heedful.decoding.search_settings import HUB_MODES, filler
from heedful.decoding.strategies.steps import check_request, require
from heedful.protocols import Seq2SeqModel

Utility = Callable[[str, str], float]


@dataclass
class MinimumBayesRiskOutput(ModelOutput):
    """The output of `generate(return_dict_in_generate=True)` with `MinimumBayesRisk`."""

    sequences: torch.Tensor | None = None  # (B, L)
    sequences_scores: torch.Tensor | None = None  # (B) expected utilities
    candidate_sequences: torch.Tensor | None = None  # (B * N, L), all candidates
    utilities: torch.Tensor | None = None  # (B, N) expected utilities
    candidates: torch.Tensor | ModelOutput | None = None  # from the candidates' strategy


@dataclass(frozen=True, eq=False)
class MinimumBayesRisk:
    """Choose the candidate most like all others (Kumar and Byrne, 2004; Eikema and Aziz, 2022).

    The candidates are the N = `num_return_sequences` results of `generate()` with its other settings: samples with
    `do_sample=True`, the best of a beam with `num_beams=N`, or another strategy's results. All candidates, with
    repetitions, are references for each; the highest mean utility wins.

    Args:
        tokenizer: Decodes target tokens: a `TokenizerPair` or a transformers tokenizer.
        candidates: A callable such as `BeamSearch(…)` that finds the candidates; `None` is transformers' own.
        utility: A hypothesis' value if a reference is right. `None` is sacrebleu's sentence chrF (chrF2, from 0
            to 100), as in Eikema and Aziz (2022).

    Raises:
        ValueError: During a call, if a sentence has fewer than two candidates, or a setting is ignored.
    """

    tokenizer: TokenizerPair | PreTrainedTokenizerBase = field(repr=False)
    candidates: Callable[..., Any] | None = None
    utility: Utility | None = None

    def __call__(
        self,
        model: Seq2SeqModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        **given: Any,
    ) -> torch.Tensor | MinimumBayesRiskOutput:
        """Find N = `num_return_sequences` candidates with `BeamSearch`'s arguments, and return `(B, L)`."""
        count = generation_config.num_return_sequences or 1
        self._check(count)
        unread = [*HUB_MODES, "force_words_ids"] if self.candidates is None else []  # other strategies may use them
        check_request("MinimumBayesRisk", model, generation_config, given, unread)
        utility = self.utility or character_f_score()
        if self.candidates is not None:
            search: Callable[..., Any] = partial(self.candidates, inputs_tensor=inputs_tensor)
        else:
            kind = cast("type[GenerationMixin]", type(model))
            search = kind._beam_search if (generation_config.num_beams or 1) > 1 else kind._sample
        found = search(model, input_ids, generation_config=generation_config, **given)
        sequences = found if isinstance(found, torch.Tensor) else found.sequences  # (B * N, L)
        prompt_length = input_ids.shape[1]
        if isinstance(self.tokenizer, TokenizerPair):
            texts = self.tokenizer.decode_target(sequences[:, prompt_length:])
        else:
            texts = self.tokenizer.batch_decode(sequences[:, prompt_length:], skip_special_tokens=True)
        batches = [texts[start : start + count] for start in range(0, len(texts), count)]
        utilities = torch.tensor([expected_utilities(batch, utility) for batch in batches])  # (B, N)
        places = torch.arange(len(batches)) * count + utilities.argmax(1)
        best = sequences[places.to(sequences.device)]
        # Without final columns of only padding.
        used = (best[:, prompt_length:] != filler(generation_config)).any(0).nonzero().flatten()
        best = best[:, : prompt_length + (int(used.max()) + 1 if len(used) else 0)]
        if not generation_config.return_dict_in_generate:
            return best
        return MinimumBayesRiskOutput(best, utilities.flatten()[places], sequences, utilities, found)

    def _check(self, count: int) -> None:
        require(count >= 2, "num_return_sequences", "be at least 2 with MinimumBayesRisk, as candidates", count)
        can_decode = isinstance(self.tokenizer, TokenizerPair) or hasattr(self.tokenizer, "batch_decode")
        require(can_decode, "tokenizer", "be a TokenizerPair or a transformers tokenizer", repr(self.tokenizer))
        for name, function in {"utility": self.utility, "candidates": self.candidates}.items():
            require(function is None or callable(function), name, "be a function or None", repr(function))


def expected_utilities(texts: list[str], utility: Utility) -> list[float]:
    """Return each text's mean utility, with all texts (also itself) as references."""
    remembered = lru_cache(maxsize=None)(utility)  # samples repeat
    return [sum(remembered(text, reference) for reference in texts) / len(texts) for text in texts]


def character_f_score() -> Utility:
    """Return sacrebleu's sentence chrF as a utility."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    return lambda hypothesis, reference: metric.sentence_score(hypothesis, [reference]).score
