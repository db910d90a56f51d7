"""What searches for a translator: token ids in, hypotheses out.

`GenerateEngine` is transformers' `generate()` and `NativeEngine` Heed's own decoder for the CPU; CTranslate2's stands
in `ctranslate2/engine.py`. What a sentence becomes does not depend on the sentences beside it: padding is masked.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from heedful.generation_heed import stopped
from heedful.inference import graphs
from heedful.inference.native.decoder import NativeDecoder
from heedful.inference.native.weights import Precision
from heedful.inference.scoring import count_tokens, score_sequences
from heedful.inference.search_settings import SEARCH_SETTINGS, active_settings, device_of
from heedful.inference.strategies.beam_search import BeamSearch

# Makes the logits processors of a batch, from the numbers of its sentences among all that are searched.
Processors = Callable[[Sequence[int]], Any]
Progress = Callable[[int], Any]  # gets how many more sentences or lines are done


@dataclass(frozen=True)
class Hypothesis:
    """What a search found for a sentence."""

    token_ids: tuple[int, ...] = ()  # generated, </s> included
    # The tokens' log-probability, divided by the length penalty of the generation config: what `generate()` calls
    # `sequences_scores` for beams. Greedy search and sampling give it too.
    score: float = 0.0
    finished: bool = True  # whether the model ended the sentence itself, and not the length limit


class Engine(Protocol):
    """Searches for translations of encoded sentences with one model."""

    @property
    def is_current(self) -> bool:
        """Whether the engine still computes what the model does."""

    def search(self, sources: Sequence[Sequence[int]], config: Any, token_budget: int) -> list[list[Hypothesis]]:
        """Return `num_return_sequences` hypotheses, best first, for the token ids of each sentence, in any order.

        The generation config sets `num_beams` and `max_new_tokens` too. The padded source tokens of a batch × rows per
        sentence keep within the budget.
        """


class GenerateEngine:
    """transformers' own `generate()`, of an encoder-decoder that is put into evaluation mode while it searches.

    The mean of the probabilities of an `ensemble` of further models chooses each token; `tokenizer` is the target's.
    """

    def __init__(self, model: Any, ensemble: Sequence[Any] = (), tokenizer: Any = None):
        self.model, self.ensemble, self.tokenizer = model, ensemble, tokenizer

    @property
    def is_current(self) -> bool:
        """Whether the engine still computes what the model does: always, for it has no copy."""
        return True

    def search(
        self,
        sources: Sequence[Sequence[int]],
        config: Any,
        token_budget: int,
        processors: Processors | None = None,
        progress: Progress = lambda count: None,
    ) -> list[list[Hypothesis]]:
        """Translate sentences batch by batch, as `Engine.search` says; `progress` gets the number of each batch's."""
        settings = self._settings(config)
        costs = {number: len(source) * rows_per_sentence(config) for number, source in enumerate(sources)}
        results: list[list[Hypothesis]] = [[] for _ in sources]
        with evaluation_mode(self.model), torch.no_grad():  # `generate()` goes further where it may
            for batch in token_batches(costs, token_budget):
                own = None if processors is None else processors(batch)
                found = self._search_batch([sources[number] for number in batch], settings, config, own)
                for number in batch:
                    results[number] = [next(found) for _ in range(config.num_return_sequences)]
                progress(len(batch))
        return results

    def generate(
        self, inputs: dict[str, torch.Tensor], settings: Any, processor: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the `(rows, length)` tokens of a batch, and their scores if the search has computed them."""
        if not self.ensemble and processor is None and graphs.may_use_graphs(self.model, inputs, settings):
            return graphs.generate(self.model, inputs, settings), None
        search: dict[str, Any] = {"generation_config": settings, "logits_processor": processor}
        if self.ensemble or active_settings(settings, SEARCH_SETTINGS):
            search["custom_generate"] = BeamSearch(models=self.ensemble)
        if settings.stop_strings is not None:
            search["tokenizer"] = self.tokenizer
        if not self.ensemble:
            return self.model.generate(**inputs, **search), None
        found = self.model.generate(**inputs, **search, return_dict_in_generate=True)
        return found.sequences, found.sequences_scores

    def _settings(self, config: Any) -> Any:
        """Return a generation config that `generate()` does not fill in with a second length, and warn of it."""
        settings = copy.deepcopy(config)
        if self.model.generation_config.max_new_tokens is None:
            settings.max_length, settings.max_new_tokens = config.max_new_tokens + 1, None  # with the start token
        return settings

    def _search_batch(
        self, sources: list[Sequence[int]], settings: Any, config: Any, processor: Any
    ) -> Iterator[Hypothesis]:
        inputs = pad_sources(sources, self.model.config.pad_token_id, device_of(self.model))
        sequences, scores = self.generate(inputs, settings, processor)
        counts, finished = count_tokens(sequences, inputs["attention_mask"], config)
        if config.stop_strings is not None:
            counts, finished = stopped(sequences[:, 1:], counts, finished, config.stop_strings, self.tokenizer)
        if scores is None:
            scores = score_sequences(self.model, inputs, sequences, counts, config)
        # The first token is the decoder's start, and padding follows </s>.
        rows = (tuple(row[1 : count + 1]) for row, count in zip(sequences.tolist(), counts.tolist(), strict=True))
        yield from map(Hypothesis, rows, scores.tolist(), finished.tolist())


class NativeEngine(GenerateEngine):
    """Heed's own decoder for the CPU; a `ValueError` if the `NativeDecoder` cannot take the model's place."""

    def __init__(self, model: Any, precision: Precision = "float32"):
        super().__init__(model)
        self.decoder = NativeDecoder(model, precision)

    @property
    def is_current(self) -> bool:
        """Whether the packed weights are still the model's."""
        return self.decoder.is_current

    def generate(
        self, inputs: dict[str, torch.Tensor], settings: Any, processor: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the `(rows, length)` tokens of a batch, and their scores unless logits processors changed them."""
        encoded = self.decoder.encoded(**inputs)
        own = {"custom_generate": self._decode, "logits_processor": processor}
        return self.model.generate(**encoded, **own, generation_config=settings)

    def _settings(self, config: Any) -> Any:
        settings = super()._settings(config)
        settings.return_dict_in_generate = True
        return settings

    def _decode(self, model: Any, input_ids: torch.Tensor, logits_processor: Any, **rest: Any) -> Any:
        output = self.decoder(model, input_ids, logits_processor, **rest)
        return output.sequences, None if len(logits_processor) else output.sequences_scores


def rows_per_sentence(config: Any) -> int:
    """Return how many rows of a batch one sentence takes."""
    return max(config.num_beams, config.num_return_sequences)


# One thread at a time translates with a model: another would bring dropout back while it is at work.
_LOCKS: "WeakKeyDictionary[torch.nn.Module, threading.RLock]" = WeakKeyDictionary()


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off for a while, and leave each module in the mode that it was in."""
    with _LOCKS.setdefault(model, threading.RLock()):
        training = [module for module in model.modules() if module.training]
        if training:
            model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def token_batches(lengths: dict[int, int], token_budget: int) -> Iterator[list[int]]:
    """Yield groups of numbers of sentences of similar cost, which is their tokens × their rows.

    The sentences of a group × the cost of the longest keep within the budget; a sentence above it is a group of its
    own. The longest come first, so that what does not fit into memory fails at once.
    """
    batch: list[int] = []
    longest = 0
    for number in sorted(lengths, key=lambda number: -lengths[number]):
        if batch and longest * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        longest = longest if batch else lengths[number]
        batch.append(number)
    if batch:
        yield batch


def pad_sources(sources: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` of a batch, both `(batch, longest source)` and padded on the right."""
    longest = max(map(len, sources))
    filled = [[*source, *[pad_token_id] * (longest - len(source))] for source in sources]
    mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
    return {"input_ids": torch.tensor(filled, device=device), "attention_mask": torch.tensor(mask, device=device)}
