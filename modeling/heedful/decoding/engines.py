"""Engines for a translator's searches. In float32, outputs do not depend on the batch."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from heedful.configuration_base_heed import special_token
from heedful.decoding.search_settings import SEARCH_SETTINGS, Inputs, asked_of, device_of, length_penalty
from heedful.decoding.strategies import graphs
from heedful.decoding.strategies.beam_search import BeamSearch
from heedful.generation_heed import COMPILED_DEVICES, check_logits, counted
from heedful.protocols import Seq2SeqModel

EngineName = Literal["auto", "native", "generate"]

Processor = LogitsProcessorList | None
Processors = Callable[[Sequence[int]], Processor]  # for a batch, from its sentence numbers
Tokenizer = PreTrainedTokenizerBase | None
Progress = Callable[[int], object]  # gets the number of newly finished sentences or lines
Sources = Sequence[Sequence[int]]  # sentences as token ids
Result = tuple[torch.Tensor, torch.Tensor | None]  # `(rows, length)` tokens, and `(rows)` scores or None


def ignored(_: object) -> None:
    """Ignore progress, or make no processors."""


@dataclass(frozen=True)
class Hypothesis:
    """One search result for a sentence.

    Attributes:
        token_ids: The generated tokens, </s> included; `encode_target(text)` may give others.
        score: The tokens' log-probability, divided by the generation config's length penalty; `None` for an empty
            line, markup, or a too long text.
        finished: Whether the model ended the sentence itself; `False` if the length limit did.
    """

    token_ids: tuple[int, ...] = ()
    score: float | None = None
    finished: bool = True


@dataclass(frozen=True)
class Translation(Hypothesis):
    """A sentence's translation: a hypothesis and its decoded `text`."""

    text: str = ""


class GenerateEngine:
    """transformers' `generate()`. `ensemble` are more models to average with; `tokenizer` is for targets."""

    def __init__(self, model: Seq2SeqModel, ensemble: Sequence[Seq2SeqModel] = (), tokenizer: Tokenizer = None):
        self.model, self.ensemble, self.tokenizer = model, ensemble, tokenizer

    @property
    def is_current(self) -> bool:
        """Whether the engine has the model's current weights."""
        return True

    def check(self, config: GenerationConfig) -> None:
        """Raise a `ValueError` for a setting that the engine does not support."""

    def search(
        self,
        sources: Sources,
        config: GenerationConfig,
        token_budget: int,
        processors: Processors = ignored,
        progress: Progress = ignored,
    ) -> list[list[Hypothesis]]:
        """Return `num_return_sequences` hypotheses per sentence, best first, for sentences in any order.

        Each batch's padded tokens × rows stay within the budget. `progress` gets the finished sentences' number.
        """
        settings = copy.deepcopy(config)
        if self.model.generation_config.max_new_tokens is None:  # `generate()` warns about two lengths
            settings.max_length, settings.max_new_tokens = config.max_new_tokens + 1, None  # with the start token
        rows = max(config.num_beams, config.num_return_sequences)  # per sentence
        costs = {number: len(source) * rows for number, source in enumerate(sources)}
        results: list[list[Hypothesis]] = [[] for _ in sources]
        with evaluation_mode(self.model), torch.no_grad():
            for batch in token_batches(costs, token_budget):
                found = self._search_batch([sources[number] for number in batch], settings, config, processors(batch))
                for number in batch:
                    results[number] = [next(found) for _ in range(config.num_return_sequences)]
                progress(len(batch))
        return results

    def generate(self, inputs: Inputs, settings: GenerationConfig, processor: Processor) -> Result:
        """Return a batch's `(rows, length)` tokens, and their scores if the search has computed them."""
        is_plain = self.model.device.type in COMPILED_DEVICES and not self.ensemble and processor is None
        if is_plain and graphs.may_use_graphs(self.model, inputs, settings):
            return graphs.generate(self.model, inputs, settings), None
        search: dict[str, Any] = {"generation_config": settings, "logits_processor": processor}
        if self.ensemble or asked_of(settings, (*SEARCH_SETTINGS, "force_words_ids")):
            search["custom_generate"] = BeamSearch(models=self.ensemble)
        if settings.stop_strings is not None:
            search["tokenizer"] = self.tokenizer
        if not self.ensemble:
            return self.model.generate(**inputs, **search), None
        found = self.model.generate(**inputs, **search, return_dict_in_generate=True)
        return found.sequences, found.sequences_scores

    def _search_batch(
        self, sources: Sources, settings: GenerationConfig, config: GenerationConfig, processor: Processor
    ) -> Iterator[Hypothesis]:
        inputs = pad_sources(sources, special_token(self.model, "pad_token_id"), device_of(self.model))
        sequences, scores = self.generate(inputs, settings, processor)
        counts, finished = count_tokens(sequences, inputs["attention_mask"], config, self.tokenizer)
        if scores is None:
            scores = score_sequences(self.model, inputs, sequences, counts, config)
        # The first token is the decoder's start token, and padding follows </s>.
        rows = (tuple(row[1 : count + 1]) for row, count in zip(sequences.tolist(), counts.tolist(), strict=True))
        yield from map(Hypothesis, rows, scores.tolist(), finished.tolist())


# One thread at a time translates with a model, because another would restore dropout too early.
_LOCKS: "WeakKeyDictionary[Seq2SeqModel, threading.RLock]" = WeakKeyDictionary()


@contextmanager
def evaluation_mode(model: Seq2SeqModel) -> Iterator[None]:
    """Switch dropout off, and restore each module's mode afterwards."""
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
    """Yield groups of sentences with similar cost (tokens × rows), within the budget if possible, longest first."""
    batch: list[int] = []
    for number in sorted(lengths, key=lambda number: -lengths[number]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def pad_sources(sources: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> Inputs:
    """Return sentences as a batch, padded on the right."""
    longest = max(map(len, sources))
    filled = [[*source, *[pad_token_id] * (longest - len(source))] for source in sources]
    mask = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
    return {"input_ids": torch.tensor(filled, device=device), "attention_mask": torch.tensor(mask, device=device)}


LOGITS_BUDGET = 2**25  # logits in memory at a time: 128 MiB


def count_tokens(
    sequences: torch.Tensor, source_mask: torch.Tensor, config: GenerationConfig, tokenizer: Tokenizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the generated tokens in `(rows, length)` sequences, with </s>, and return whether each ended in </s>."""
    counts, ended = counted(sequences[:, 1:], config.eos_token_id, config.stop_strings, tokenizer)
    if config.forced_eos_token_id is not None:
        ended &= counts < config.max_new_tokens  # a </s> in the last possible position was forced
    beyond = getattr(config, "tokens_beyond_source", None)
    if beyond is not None:  # limits differ by sentence
        limits = source_mask.sum(dim=1) + beyond
        counts = torch.minimum(counts, limits.repeat_interleave(config.num_return_sequences))
    return counts, ended


def score_sequences(
    model: Seq2SeqModel, inputs: Inputs, sequences: torch.Tensor, counts: torch.Tensor, config: GenerationConfig
) -> torch.Tensor:
    """Return `(rows, length)` sequences' log-probabilities in nats, divided by the length penalty: `(rows)`.

    The model computes them in one pass; `generate()` would keep the whole vocabulary's scores at each step.
    """
    inputs = {name: tensor.repeat_interleave(config.num_return_sequences, dim=0) for name, tensor in inputs.items()}
    log_probabilities = token_log_probabilities(model, inputs, sequences[:, :-1], sequences[:, 1:])
    places = torch.arange(sequences.shape[1] - 1, device=sequences.device)
    totals = log_probabilities.masked_fill(places >= counts[:, None], 0.0).sum(dim=1)
    alpha = 1.0 if config.length_penalty is None else config.length_penalty
    return totals / length_penalty(counts, alpha, getattr(config, "length_penalty_form", None))


def token_log_probabilities(
    model: Seq2SeqModel, inputs: Inputs, decoder_inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return each label's log-probability in nats, `(rows, length)`; 0 for the label -100."""
    score, parts = torch.nn.functional.cross_entropy, logits_in_parts(model, inputs, decoder_inputs)
    found = torch.cat([-score(logits.transpose(1, 2), labels[part], reduction="none") for part, logits in parts])
    check_logits(found, model.dtype)
    return found


def logits_in_parts(
    model: Seq2SeqModel, inputs: Inputs, decoder_inputs: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield parts of a batch: some rows with their float32 logits `(rows, length, V)`."""
    rows = max(1, LOGITS_BUDGET // (decoder_inputs.shape[1] * model.get_output_embeddings().weight.shape[0]))
    for start in range(0, len(decoder_inputs), rows):
        part = slice(start, start + rows)
        encoder_inputs = {name: tensor[part] for name, tensor in inputs.items()}
        yield part, model(**encoder_inputs, decoder_input_ids=decoder_inputs[part], use_cache=False).logits.float()
