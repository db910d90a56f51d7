"""Greedy and beam search over a `NativeNetwork`, with the tokens of `generate()`.

Letters in shape comments: N sentences still open, K hypotheses of each, V target tokens, C candidates, t generated
tokens so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from heedful.inference.native.network import NEVER, DecodingState, NativeNetwork
from heedful.inference.strategies.steps import check_found, picked

# The share of finished sentences at which they leave the batch: until then they cost time at each step, and when they
# leave, the cache of the others is copied.
LEAVING_SHARE = 1 / 8
# Tokens per chunk: `best_tokens` sorts only the best chunks of a row.
CHUNK = 64

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class SearchSettings:
    """The settings of one search.

    Attributes:
        beams: K; 1 is greedy search.
        returned: Hypotheses returned per sentence, at most `beams`.
        max_new_tokens: Longest hypothesis, the end token included.
        ends: Ids that end a hypothesis.
        fill: Id that follows the end.
        length_penalty: The log-probability of a hypothesis is divided by its length to this power.
        early_stopping: As in `generate()`: True, False or "never".
        processor: Applied to the next tokens' `(N·K, V)` logits (greedy search) or log-probabilities (beam search),
            with the `(N·K, length)` tokens so far as its first argument.
        scored: Whether greedy search scores its tokens; beam search always does.
        keeps_rows: Whether finished sentences stay in the batch, because `processor` tells rows apart by their number.
    """

    beams: int
    returned: int
    max_new_tokens: int
    ends: Sequence[int]
    fill: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    processor: Processor | None = None
    scored: bool = False
    keeps_rows: bool = False

    def is_worth_leaving(self, finished: int, count: int) -> bool:
        """Return whether enough of `count` sentences have finished to take them out of the batch."""
        return finished >= (count if self.keeps_rows else max(1, LEAVING_SHARE * count))


def greedy_search(
    network: NativeNetwork, state: DecodingState, prompt: torch.Tensor, settings: SearchSettings
) -> Result:
    """Take the most likely token at each step.

    Args:
        network: The weights.
        state: As `network.start` returned it, for `(N)` sentences with one hypothesis each.
        prompt: `(N, length)` tokens that every translation begins with.
        settings: When to stop, and whether to score.

    Returns:
        `(N, length)` tokens with the prompt, and `(N)` scores if `settings.scored`: the log-probability of the
        generated tokens in nats, divided by their number to the power of the length penalty.
    """
    count, start = prompt.shape
    room = prompt.new_full((count, start + settings.max_new_tokens), settings.fill)
    room[:, :start] = prompt
    ends = torch.tensor(list(settings.ends), dtype=torch.long)
    rows = torch.arange(count)  # the sentences that are still in the batch
    is_open = torch.ones(count, dtype=torch.bool)
    length = start
    totals, lengths = torch.zeros(count), torch.zeros(count)  # log-probability and number of the generated tokens
    for position in range(start - 1):
        network.step(prompt[:, position], state)
    newest = prompt[:, -1]
    for length in range(start, room.shape[1]):
        logits = network.step(newest, state)  # (N, V)
        if settings.processor is not None:
            logits = settings.processor(room[rows, :length], logits.float())
        best, newest = logits.max(-1)
        if settings.scored:
            totals[rows] += (best - logits.logsumexp(-1)).float() * is_open
            lengths[rows] += is_open
        newest = newest.masked_fill(~is_open, settings.fill)
        room[rows, length] = newest
        if len(ends):
            is_open &= ~torch.isin(newest, ends)
            left = int(is_open.sum())
            if not left:
                break
            if settings.is_worth_leaving(len(rows) - left, len(rows)):
                kept = is_open.nonzero()[:, 0]
                state.keep(kept)
                rows, newest, is_open = rows[kept], newest[kept], is_open[kept]
    scores = totals / lengths**settings.length_penalty if settings.scored else None
    return room[:, : length + 1], scores


def beam_search(
    network: NativeNetwork, state: DecodingState, prompt: torch.Tensor, settings: SearchSettings
) -> Result:
    """Keep the K best hypotheses of each sentence at each step, as transformers' beam search does.

    Args:
        network: The weights.
        state: As `network.start` returned it, for `(N)` sentences with K hypotheses each.
        prompt: `(N, length)` tokens that every translation begins with.
        settings: When to stop, and how many hypotheses to return.

    Returns:
        `(N·returned, length)` tokens with the prompt and `(N·returned)` scores, as of greedy search.

    Raises:
        ValueError: If the processor leaves a sentence fewer hypotheses than are to be returned.
    """
    search = _BeamSearch(network, state, prompt, settings)
    while len(search.rows):
        search.step()
    return search.result()


class _BeamSearch:
    """The open sentences of one beam search, and the results of those that left the batch."""

    def __init__(self, network: NativeNetwork, state: DecodingState, prompt: torch.Tensor, settings: SearchSettings):
        self.network, self.state, self.settings = network, state, settings
        count, self.start = prompt.shape
        beams, longest = settings.beams, self.start + settings.max_new_tokens
        self.ends = torch.tensor(list(settings.ends), dtype=torch.long)
        self.length = self.start
        self.rows = torch.arange(count)  # (N), the numbers of the open sentences
        self.tokens = prompt.new_full((count, beams, longest), settings.fill)  # (N, K, room)
        self.tokens[:, :, : self.start] = prompt[:, None]
        self.scores = torch.full((count, beams), NEVER)  # (N, K), log-probabilities
        self.scores[:, 0] = 0.0  # otherwise all hypotheses would be alike
        self.finished = self.tokens.clone()
        self.finished_scores = torch.full((count, beams), NEVER)  # normalised by length, best first
        self.done = torch.zeros(count, dtype=torch.bool)
        self.best = prompt.new_full((count, settings.returned, longest), settings.fill)
        self.best_scores = torch.full((count, settings.returned), NEVER)
        for position in range(self.start - 1):
            network.step(self._newest(position), state)

    def _newest(self, position: int) -> torch.Tensor:
        return self.tokens[:, :, position].flatten()

    def step(self) -> None:
        """Choose the next tokens of every open sentence, and take those that are done out of the batch."""
        beams = self.settings.beams
        logits = self.network.step(self._newest(self.length - 1), self.state)
        log_probabilities = logits.log_softmax(-1, dtype=torch.float32)  # (N·K, V)
        if self.settings.processor is not None:
            seen = self.tokens[:, :, : self.length].flatten(0, 1)
            log_probabilities = self.settings.processor(seen, log_probabilities)
        # So many that K hypotheses go on even if each of the others ends, with each end token.
        count = max(2, 1 + len(self.ends)) * beams
        scores, parents, tokens = best_tokens(log_probabilities, self.scores, count)  # (N, C)
        ended = torch.isin(tokens, self.ends)
        if self.length + 1 == self.start + self.settings.max_new_tokens:
            ended.fill_(True)
        if bool(ended.any()):
            self._finish(scores, parents, tokens, ended)
            places = torch.arange(ended.shape[1])
            order = (places + ended * ended.shape[1]).argsort(1)[:, :beams]
            scores = scores.masked_fill(ended | self.done[:, None], NEVER)
            scores, parents, tokens = (each.gather(1, order) for each in (scores, parents, tokens))
        else:
            scores, parents, tokens = (each[:, :beams] for each in (scores, parents, tokens))
        self.scores = scores
        self.tokens[:, :, : self.length] = picked(self.tokens[:, :, : self.length], parents)
        self.tokens[:, :, self.length] = tokens
        self.state.follow(parents)
        self.length += 1
        self._leave()

    def _finish(self, scores: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor, ended: torch.Tensor) -> None:
        """Store the ending hypotheses among the K best candidates, if they are better than those stored."""
        beams = self.settings.beams
        scores, parents, tokens, ended = (each[:, :beams] for each in (scores, parents, tokens, ended))
        length = self.length + 1 - self.start
        final = (scores / length**self.settings.length_penalty).masked_fill(~ended | self.done[:, None], NEVER)
        ending = picked(self.tokens, parents)
        ending[:, :, self.length] = tokens
        merged = torch.cat([self.finished_scores, final], dim=1)
        self.finished_scores, best = merged.topk(beams)
        self.finished = picked(torch.cat([self.finished, ending], dim=1), best)

    def _leave(self) -> None:
        """Mark the sentences whose stored hypotheses cannot get better, and let them go once they are enough."""
        settings = self.settings
        best, worst = self.scores[:, 0], self.finished_scores[:, -1]  # (N)
        full = worst > NEVER
        if not bool(full.any()) and self.length < self.tokens.shape[-1]:
            return
        length = self.length - self.start
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = settings.max_new_tokens
        stops_when_full = settings.early_stopping is True
        hopeless = best / length**settings.length_penalty <= worst
        self.done |= (best == NEVER) | (full & (hopeless | stops_when_full))
        self.scores = self.scores.masked_fill(self.done[:, None], NEVER)
        if not settings.is_worth_leaving(int(self.done.sum()), len(self.rows)):
            return
        rows = self.rows[self.done]
        self.best[rows] = self.finished[self.done][:, : settings.returned]
        self.best_scores[rows] = self.finished_scores[self.done][:, : settings.returned]
        kept = (~self.done).nonzero()[:, 0]
        if len(kept):
            self.state.keep(kept)
        self.rows, self.done = self.rows[kept], self.done[kept]
        self.tokens, self.scores = self.tokens[kept], self.scores[kept]
        self.finished, self.finished_scores = self.finished[kept], self.finished_scores[kept]

    def result(self) -> Result:
        """Return the best hypotheses of every sentence, in the order and with the padding of `generate()`."""
        check_found(self.best_scores)
        tokens = self.best.flatten(0, 1)
        return tokens[:, : self._longest(tokens)], self.best_scores.flatten()

    def _longest(self, tokens: torch.Tensor) -> int:
        generated = tokens[:, self.start :]
        ended = torch.isin(generated, self.ends)
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, generated.shape[1])
        return self.start + int(lengths.max())


def best_tokens(
    log_probabilities: torch.Tensor, scores: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the most likely continuations of each sentence's hypotheses, best first.

    To sort all K·V is slow. The best `count` tokens lie in the `count` chunks with the highest maxima, and only those
    are sorted.

    Args:
        log_probabilities: `(N·K, V)` of the next token.
        scores: `(N, K)` of the hypotheses.
        count: C.

    Returns:
        Scores, hypotheses and tokens, each `(N, C)`, or `(N, K·V)` if that is less.
    """
    (sentences, beams), vocabulary = scores.shape, log_probabilities.shape[-1]
    whole = vocabulary // CHUNK
    chunks = [log_probabilities[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).amax(-1)] if whole else []
    if vocabulary % CHUNK:
        chunks.append(log_probabilities[:, whole * CHUNK :].amax(-1, keepdim=True))
    maxima = torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0]
    number = maxima.shape[1]  # chunks of a row
    maxima = (maxima.view(sentences, beams, number) + scores[..., None]).flatten(1)
    best = maxima.topk(min(count, maxima.shape[1])).indices  # (N, chunks looked at)
    parents = best // number
    tokens = (best % number)[..., None] * CHUNK + torch.arange(CHUNK)  # (N, chunks looked at, CHUNK)
    is_beyond, tokens = tokens >= vocabulary, tokens.clamp(max=vocabulary - 1)
    places = parents[..., None] * vocabulary + tokens
    found = log_probabilities.reshape(sentences, -1).gather(1, places.flatten(1)).view(places.shape)
    found = (found + scores.gather(1, parents)[..., None]).masked_fill(is_beyond, NEVER)
    totals, order = found.flatten(1).topk(min(count, beams * vocabulary))
    return totals, parents.gather(1, order // CHUNK), tokens.flatten(1).gather(1, order)
