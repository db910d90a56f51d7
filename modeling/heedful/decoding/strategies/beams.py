"""Beam search state: running hypotheses, the best finished ones, and finished sentences.

Letters in shape comments: N sentences, K hypotheses each, M candidates, L target length.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from heedful.decoding.search_settings import LengthPenaltyForm, Numbers, length_penalty
from heedful.decoding.strategies.constraints import Progress

NEVER = float("-inf")


@dataclass
class Hypotheses:
    """Some hypotheses per sentence, best first."""

    tokens: torch.Tensor  # (N, K, L)
    parents: torch.Tensor  # (N, K, generated): each token's hypothesis row, -1 after the end
    scores: torch.Tensor  # (N, K): running hypotheses' log-probabilities, finished ones' final scores
    progress: list[list[Progress]] | None = None  # (N, K)

    def pick(self, places: torch.Tensor) -> "Hypotheses":
        """Return the hypotheses at `(N, n)` places."""
        progress = self.progress and [
            [row[place] for place in chosen] for row, chosen in zip(self.progress, places.tolist(), strict=True)
        ]
        tokens, parents = _picked(self.tokens, places), _picked(self.parents, places)
        return Hypotheses(tokens, parents, self.scores.gather(1, places), progress)

    def extended(self, places: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> "Hypotheses":
        """Return the hypotheses at `(N, M)` places with one more token and new scores."""
        longer = self.pick(places)
        longer.scores = scores
        longer.tokens = torch.cat([longer.tokens, tokens[..., None]], -1)
        longer.parents = torch.cat([longer.parents, places[..., None]], -1)
        return longer

    def of(self, some: torch.Tensor | tuple[slice, slice]) -> "Hypotheses":
        """Return the tokens, parents and scores for some sentences, or an index into `(N, K)`."""
        return Hypotheses(self.tokens[some], self.parents[some], self.scores[some])


def _picked(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the `(N, K, …)` states at `(N, n)` places: `(N, n, …)`."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))


def _best_of(finished: Hypotheses, ending: Hypotheses, count: int, fill: int) -> Hypotheses:
    """Return the best among finished and longer hypotheses, with `fill` after the shorter ones' ends."""
    room = 0, ending.parents.shape[-1] - finished.parents.shape[-1]
    merged = Hypotheses(
        torch.cat([F.pad(finished.tokens, room, value=fill), ending.tokens], 1),
        torch.cat([F.pad(finished.parents, room, value=-1), ending.parents], 1),
        torch.cat([finished.scores, ending.scores], 1),
    )
    return merged.pick(merged.scores.topk(count).indices)


class Beam:
    """Each sentence's K running and K best finished hypotheses, by transformers' rules.

    A sentence is done when no hypothesis continues, or when K have finished and none can beat them, depending on the
    generation config's `early_stopping`. With K = 1 its first ends it.
    """

    def __init__(
        self, config: GenerationConfig, prompts: torch.Tensor, limits: Numbers, fill: int, form: LengthPenaltyForm
    ):
        """Begin with `(N, K, L)` prompts, followed by at most `limits` tokens: `(N)`, or one for all."""
        self.config, self.limits, self.fill, self.form = config, limits, fill, form
        self.size = prompts.shape[1]  # K
        parents = prompts.new_zeros((*prompts.shape[:2], 0))
        scores = torch.full(prompts.shape[:2], NEVER, device=prompts.device)
        self.finished = Hypotheses(prompts, parents, scores)
        self.running = Hypotheses(prompts, parents, scores.clone())
        self.running.scores[:, 0] = 0.0  # else all first hypotheses would be equal
        self.done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)  # (N)

    def advance(self, candidates: Hypotheses, ended: torch.Tensor, is_complete: Numbers = True) -> None:
        """Store the ended ones among the K best candidates if better than stored ones; continue with the best others.

        Only candidates in `is_complete`, `(N, M)`, are stored.
        """
        places = torch.arange(ended.shape[1], device=ended.device)
        if bool(ended.any()):
            counted = ended & is_complete & (places < self.size) & ~self.done[:, None]
            final = candidates.scores / self._penalty(candidates.parents.shape[-1])
            ending = Hypotheses(candidates.tokens, candidates.parents, final.masked_fill(~counted, NEVER))
            self.finished = _best_of(self.finished, ending, self.size, self.fill)
            candidates.scores = candidates.scores.masked_fill(ended, NEVER)
        if len(places) > self.size:
            candidates = candidates.pick((places + ended * len(places)).argsort(1)[:, : self.size])
        self.running = candidates
        self._stop()

    def _stop(self) -> None:
        best, worst = self.running.scores.amax(1), self.finished.scores.amin(1)  # (N)
        is_over, full = best == NEVER, worst > NEVER
        if not bool((is_over | full).any()):
            return
        is_patient = self.config.early_stopping == "never" and self.config.length_penalty > 0
        length = self.limits if is_patient else self.running.parents.shape[-1]
        cannot_improve = best / self._penalty(length) <= worst
        stops_when_full = self.config.early_stopping is True or self.size == 1
        self.done = self.done | is_over | (full & (cannot_improve | stops_when_full))
        self.running.scores = self.running.scores.masked_fill(self.done[:, None], NEVER)

    def _penalty(self, length: Numbers) -> Numbers:
        return length_penalty(length, self.config.length_penalty, self.form)

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except those with the given numbers."""
        self.running, self.finished = self.running.of(sentences), self.finished.of(sentences)
        self.done = self.done[sentences]


def check_found(scores: torch.Tensor, limits: torch.Tensor | None = None) -> None:
    """Raise a `ValueError` if one of `(N, returned)` hypotheses is missing. `limits` are for forced words."""
    for number in scores.isneginf().any(1).nonzero().flatten().tolist():
        must, few = "be at most the number of hypotheses that settings allow", f"fewer than {scores.shape[1]}"
        if limits is None:
            raise ValueError(f"`num_return_sequences` must {must}, but {few} were found for sentence {number}.")
        raise ValueError(
            f"`force_words_ids` of sentence {number} must be possible within {int(limits[number])} tokens, but {few} "
            "hypotheses with them were found: other settings forbid tokens, or length and beams are too small."
        )
