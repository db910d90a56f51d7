"""Greedy and beam search over a `NativeNetwork`, with the same tokens as `generate()`.

Letters in shape comments: N open sentences, K hypotheses each, V target tokens, C candidates.
"""

import torch
import torch.nn.functional as F
from transformers.generation import GenerationConfig, LogitsProcessorList, logits_process

from heedful.decoding.engines import Result
from heedful.decoding.native.network import DecodingState, NativeNetwork, best_tokens
from heedful.decoding.search_settings import end_tokens, filler
from heedful.decoding.strategies.beams import Beam, Hypotheses, check_found
from heedful.decoding.strategies.sampling import Draws
from heedful.decoding.strategies.steps import OnRows
from heedful.generation_heed import FiniteLogits, check_logits

# Share of finished sentences at which they leave the batch, which copies the others' state.
LEAVING_SHARE = 1 / 8
# transformers' logits processors that depend on the row number.
ROW_PROCESSORS = logits_process.PrefixConstrainedLogitsProcessor, logits_process.SynthIDTextWatermarkLogitsProcessor


class SearchSettings:
    """A search's settings, from a generation config and its logits processors."""

    def __init__(self, config: GenerationConfig, processor: LogitsProcessorList, prompt_length: int):
        self.config = config
        others = LogitsProcessorList(each for each in processor if not isinstance(each, FiniteLogits))
        self.processor: OnRows | None = others or None
        self.beams: int = config.num_beams or 1  # K
        self.returned: int = config.num_return_sequences or 1  # returned hypotheses per sentence
        self.max_new_tokens: int = config.max_length - prompt_length
        ends, fill = end_tokens(config), filler(config)
        # transformers' beam search treats id 0 as no padding token.
        self.fill = ends[0] if fill == 0 and self.beams > 1 and ends else fill
        self.ends = torch.tensor(ends, dtype=torch.long)
        self.draws = [each for each in others if isinstance(each, Draws)]  # these follow the rows that stay
        # Other libraries' processors may depend on the row number too; then finished sentences stay.
        self.keeps_rows = any(
            type(each).__module__ != logits_process.__name__ or isinstance(each, ROW_PROCESSORS)
            for each in others
            if not isinstance(each, Draws)
        )

    def are_ends(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a mask of end tokens, in the tokens' shape, faster than `torch.isin`."""
        return tokens == self.ends if len(self.ends) == 1 else (tokens[..., None] == self.ends).any(-1)

    def is_worth_leaving(self, finished: int, count: int) -> bool:
        """Return whether enough of `count` sentences have finished to leave the batch."""
        return finished >= (count if self.keeps_rows else max(1, LEAVING_SHARE * count))


def greedy_search(
    network: NativeNetwork, state: DecodingState, prompt: torch.Tensor, settings: SearchSettings
) -> Result:
    """Take the most likely token at each step after `(N, length)` prompts: `(N, length)` tokens with the prompt.

    If a dictionary is requested, also `(N)` scores: log-probabilities in nats, divided by the length penalty.
    """
    count, start = prompt.shape
    room = F.pad(prompt, (0, settings.max_new_tokens), value=settings.fill)
    is_scored = bool(settings.config.return_dict_in_generate)
    rows = torch.arange(count)  # sentences still in the batch
    is_open, left = torch.ones(count, dtype=torch.bool), count
    length, nothing = start, torch.zeros(count, 1)
    totals, lengths = torch.zeros(count), torch.zeros(count)  # the generated tokens' log-probability and number
    newest = prompt[:, -1]
    for length in range(start, room.shape[1]):
        logits = network.step(newest, state)  # (N, V)
        if length == start:
            check_logits(logits, torch.float32)
        if settings.processor is not None:
            logits = settings.processor(room[rows, :length], logits.float())
        scores, _, tokens = network.continuations(logits, nothing[: len(rows)], 1)
        newest = tokens[:, 0]
        if is_scored:
            totals[rows] += scores[:, 0] * is_open
            lengths[rows] += is_open
        if left < len(rows):
            newest = newest.masked_fill(~is_open, settings.fill)
        room[rows, length] = newest
        if bool((ended := settings.are_ends(newest)).any()):
            is_open &= ~ended
            left = int(is_open.sum())
            if not left:
                break
            if settings.is_worth_leaving(len(rows) - left, len(rows)):
                kept = is_open.nonzero()[:, 0]
                state.keep(kept)
                for draws in settings.draws:
                    draws.keep(kept)
                rows, newest, is_open = rows[kept], newest[kept], is_open[kept]
    normalised = totals / lengths**settings.config.length_penalty if is_scored else None
    return room[:, : length + 1], normalised


def beam_search(
    network: NativeNetwork, state: DecodingState, prompt: torch.Tensor, settings: SearchSettings
) -> Result:
    """Keep the K best hypotheses at each step: `(N·returned, length)` tokens with the prompt, and scores."""
    prompts = prompt[:, None].expand(-1, settings.beams, -1)
    beam = Beam(settings.config, prompts, settings.max_new_tokens, settings.fill, None)
    rows = torch.arange(len(prompt))  # sentences still in the batch
    found: list[tuple[torch.Tensor, Hypotheses]] = []  # sentences that left, and their hypotheses
    while len(rows):
        _step(network, state, beam, settings)
        if settings.is_worth_leaving(int(beam.done.sum()), len(rows)):
            found.append((rows[beam.done], beam.finished.of(beam.done)))
            kept = (~beam.done).nonzero()[:, 0]
            if len(kept):
                state.keep(kept)
            beam.keep(kept)
            rows = rows[kept]
    best = [(places, each.of((slice(None), slice(settings.returned)))) for places, each in found]
    longest = max(int((each.parents >= 0).sum(-1).max()) for _, each in best)
    tokens = prompt.new_full((len(prompt), settings.returned, prompt.shape[1] + longest), settings.fill)
    scores = torch.empty(tokens.shape[:2])
    for places, each in best:
        ended = each.tokens[..., : tokens.shape[-1]]
        tokens[places, :, : ended.shape[-1]], scores[places] = ended, each.scores
    check_found(scores)
    return tokens.flatten(0, 1), scores.flatten()


def _step(network: NativeNetwork, state: DecodingState, beam: Beam, settings: SearchSettings) -> None:
    logits = network.step(beam.running.tokens[:, :, -1].flatten(), state)  # (N·K, V)
    if not beam.running.parents.shape[-1]:
        check_logits(logits, torch.float32)
    # K hypotheses continue even if all others end, with each end token.
    count = max(2, 1 + len(settings.ends)) * settings.beams
    if settings.processor is None:
        scores, parents, tokens = network.continuations(logits, beam.running.scores, count)  # (N, C)
    else:
        log_probabilities = logits.log_softmax(-1, dtype=torch.float32)
        log_probabilities = settings.processor(beam.running.tokens.flatten(0, 1), log_probabilities)
        scores, parents, tokens = best_tokens(log_probabilities, beam.running.scores, count)
    ended = settings.are_ends(tokens)
    if beam.running.parents.shape[-1] + 1 == settings.max_new_tokens:
        ended.fill_(True)
    if not bool(ended.any()):
        scores, parents, tokens, ended = (each[:, : settings.beams] for each in (scores, parents, tokens, ended))
    beam.advance(beam.running.extended(parents, tokens, scores), ended)
    state.follow(beam.running.parents[..., -1])
