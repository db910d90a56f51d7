"""One beam search for `generate(custom_generate=BeamSearch(…))`, whose parts can be combined.

Without options it gives the tokens and scores of transformers' own. Options: groups that differ from each other, words
that must occur, several models, GNMT's length and coverage penalties, and a length limit relative to the source.

Letters in shape comments: B sentences, K hypotheses of a sentence (k of a group), M candidates of a group,
V target tokens, S source length, L target length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from heedful.inference.strategies.beam_settings import BeamSettings
from heedful.inference.strategies.constraints import ForcedWords, Progress, read_constraints
from heedful.inference.strategies.penalties import LengthPenaltyForm, coverage_penalty
from heedful.inference.strategies.steps import (
    Averaging,
    ModelSteps,
    Records,
    average,
    check_found,
    check_members,
    check_request,
    end_tokens,
    filler,
    member_steps,
    once_per_sentence,
    picked,
    source_attention,
)

NEVER = float("-inf")


@dataclass(frozen=True, eq=False)
class BeamSearch:
    """Beam search as a callable for `model.generate(…, custom_generate=BeamSearch(…))`.

    `num_beams`, `num_return_sequences`, `length_penalty`, `early_stopping`, lengths, logits processors and stopping
    criteria are generate()'s own and mean what they mean there; with `num_beams=1` (or groups of one beam) a search
    ends with its first hypothesis, as greedy search does. Processors see log-probabilities, as in transformers' beam
    search. With `return_dict_in_generate` the result is a `GenerateBeamEncoderDecoderOutput` with `sequences_scores`;
    `output_scores`, `output_attentions` (of the first model) and so on add the rest.

    transformers hands no `streamer` and no `assistant_model` to a callable: Heed's models refuse them, with other
    models do not give them.

    Args:
        num_beam_groups: Number of groups that share the beams evenly and decode in turn, each avoiding at each step
            the tokens that earlier groups chose (diverse beam search, Vijayakumar et al., 2018). The hypotheses of
            all groups are returned, best first. `None` takes generate()'s `num_beam_groups`.
        diversity_penalty: λ of the paper: taken off a token's log-probability for each hypothesis of an earlier
            group that chose it at this step. It guides the choice and, as in the paper's equation 4, is no part of the
            score. `None` takes generate()'s `diversity_penalty`.
        force_words_ids: Words that every output contains: for each a list of token ids, or a list of such lists of
            which one must occur (Hokamp and Liu, 2017; Post and Vilar, 2018). `None` takes generate()'s.
        sentence_force_words_ids: The same for each sentence of the batch by itself, in place of `force_words_ids`;
            an empty list where nothing is forced.
        length_penalty_form: `power` divides a hypothesis' log-probability by length^α, as transformers does; `gnmt`
            by ((5 + length) / 6)^α (Wu et al., 2016), as *Attention Is All You Need* does with α = 0.6. α is
            generate()'s `length_penalty`. `None` takes the generation config's form, `power` where it has none.
        coverage_penalty: β of Wu et al. (2016, equation 14): hypotheses that leave source tokens unattended are
            ranked lower. The weights are the last layer's, averaged over heads (and models).
        tokens_beyond_source: Longest output, in tokens more than the sentence's own source has; 50 in *Attention Is
            All You Need* (section 6.1). `max_length` or `max_new_tokens` hold too: the smaller one counts. `None`
            takes the generation config's, no limit where it has none.
        models: Further models that choose each token together with the one that generates (an ensemble). They must
            share its vocabulary.
        weights: Of the model that generates and of each of `models`, positive; brought to sum 1. `None` is equal.
        averaging: Whether `probabilities` or `log_probabilities` of the models are averaged.

    Raises:
        ValueError: If, when it is called, a setting is out of range or cannot be combined with another, constraints
            do not fit into the length or cannot be met, or no token may follow a hypothesis.
    """

    num_beam_groups: int | None = None
    diversity_penalty: float | None = None
    force_words_ids: Sequence[Any] | None = None
    sentence_force_words_ids: Sequence[Sequence[Any]] | None = None
    length_penalty_form: LengthPenaltyForm | None = None
    coverage_penalty: float = 0.0
    tokens_beyond_source: int | None = None
    models: Sequence[Any] = field(default=(), repr=False)
    weights: Sequence[float] | None = None
    averaging: Averaging = "probabilities"

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as `Strategy` says; with `return_dict_in_generate` a `GenerateBeamEncoderDecoderOutput`."""
        check_request("BeamSearch", model, generation_config, model_kwargs)
        settings = BeamSettings.resolve(self, generation_config)
        check_members(model, self.models)
        voters = _Voters(settings, len(input_ids) // settings.beams, model, inputs_tensor, model_kwargs)
        search = _Search(settings, voters, input_ids, logits_processor, stopping_criteria)
        while not search.is_done:
            search.step()
        return search.result(model_kwargs["encoder_outputs"])


class _Voters:
    """The model or models that say how likely each next token is."""

    def __init__(self, settings: BeamSettings, sentences: int, model: Any, source: Any, model_kwargs: dict):
        strategy: BeamSearch = settings.strategy
        self.model = model
        self.averaging = strategy.averaging
        self.needs_attention = strategy.coverage_penalty > 0
        if self.needs_attention:
            model_kwargs = model_kwargs | {"output_attentions": True}
        first = ModelSteps(model, model_kwargs)
        self.members = [first]
        weights = strategy.weights or [1.0] * (1 + len(strategy.models))
        self.weights = [weight / sum(weights) for weight in weights]
        encoded = model_kwargs["encoder_outputs"][0]
        mask = model_kwargs.get("attention_mask")
        mask = encoded.new_ones(encoded.shape[:2]) if mask is None else mask
        self.source_mask = once_per_sentence(mask, sentences)  # (B, S)
        if strategy.models and (source is None or source.is_floating_point() or (source < 0).any()):
            raise ValueError(
                "`input_ids` must be given to generate() with several models, each of which encodes the source, "
                "but `inputs_embeds` or `encoder_outputs` are given instead."
            )
        for member in strategy.models:
            self.members.append(member_steps(member, source, first, settings.beams))
            if self.needs_attention:
                self.members[-1].model_kwargs["output_attentions"] = True

    def next(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return `(B * K, V)` log-probabilities, `(B * K, S)` attention where needed, and the first model's output."""
        outputs = [member.next(tokens) for member in self.members]
        logits = [output.logits[:, -1].to(tokens.device, torch.float32) for output in outputs]
        log_probabilities = [each.log_softmax(-1) for each in logits]
        attention = None
        if self.needs_attention:
            shares = [
                weight * source_attention(output).to(tokens.device)
                for weight, output in zip(self.weights, outputs, strict=True)
            ]
            attention = torch.stack(shares).sum(0)
        if len(outputs) == 1:
            return log_probabilities[0], attention, outputs[0]
        return average(log_probabilities, self.weights, self.averaging), attention, outputs[0]

    def reorder(self, rows: torch.Tensor) -> None:
        for member in self.members:
            member.reorder(rows)


@dataclass
class _Hypotheses:
    """Some hypotheses of each sentence, best first."""

    tokens: torch.Tensor  # (B, k, L)
    parents: torch.Tensor  # (B, k, steps): the row that each token was chosen from, -1 after the end
    scores: torch.Tensor  # (B, k): log-probabilities of running hypotheses, final scores of finished ones
    coverage: torch.Tensor | None = None  # (B, k, S)
    progress: list[list[Progress]] | None = None  # (B, k)

    def pick(self, places: torch.Tensor) -> "_Hypotheses":
        """Return the hypotheses at `(B, n)` places."""
        return _Hypotheses(
            picked(self.tokens, places),
            picked(self.parents, places),
            self.scores.gather(1, places),
            None if self.coverage is None else picked(self.coverage, places),
            self.progress
            and [[row[place] for place in chosen] for row, chosen in zip(self.progress, places.tolist(), strict=True)],
        )

    def grow(self, tokens: torch.Tensor, parents: torch.Tensor) -> None:
        """Append `(B, k)` tokens and the rows they come from."""
        self.tokens = torch.cat([self.tokens, tokens[..., None]], -1)
        self.parents = torch.cat([self.parents, parents[..., None]], -1)


def _merge(one: _Hypotheses, other: _Hypotheses, count: int) -> _Hypotheses:
    """Return the best of two lists of finished hypotheses."""
    merged = _Hypotheses(
        torch.cat([one.tokens, other.tokens], 1),
        torch.cat([one.parents, other.parents], 1),
        torch.cat([one.scores, other.scores], 1),
    )
    return merged.pick(merged.scores.topk(count).indices)


@dataclass
class _Group:
    """A beam of its own: with one group, the whole search."""

    first_row: int
    running: _Hypotheses
    finished: _Hypotheses
    done: torch.Tensor  # (B)


class _Search:
    """The state of one beam search and its step."""

    def __init__(self, settings: BeamSettings, voters: _Voters, prompt: torch.Tensor, processor: Any, criteria: Any):
        self.settings = settings
        self.voters = voters
        self.processor = processor
        self.criteria = criteria
        self.ends, self.fill = end_tokens(settings.config), filler(settings.config)
        self.prompt_length = prompt.shape[1]
        self.size = settings.beams // settings.strategy.num_beam_groups  # k
        tokens = prompt.view(-1, settings.beams, self.prompt_length)  # (B, K, L)
        self.batch = len(tokens)
        self.limits = self._limits(tokens)
        self.words = self._read_words()
        self.groups = [self._new_group(part, tokens) for part in range(settings.strategy.num_beam_groups)]
        self.records = Records(settings.config)

    @property
    def is_done(self) -> bool:
        """Whether no hypothesis of any sentence goes on."""
        return all(bool(group.done.all()) for group in self.groups)

    def _limits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the most tokens that each sentence may have, `(B)`."""
        limits = tokens.new_full((self.batch,), self.settings.config.max_length - self.prompt_length)
        beyond = self.settings.strategy.tokens_beyond_source
        if beyond is None:
            return limits
        return torch.minimum(limits, self.voters.source_mask.sum(1).to(limits) + beyond)

    def _read_words(self) -> list[ForcedWords] | None:
        strategy = self.settings.strategy
        shared, each = strategy.force_words_ids, strategy.sentence_force_words_ids
        if shared is None and each is None:
            return None
        if each is None:
            if not shared:
                raise ValueError("`force_words_ids` must hold at least one constraint, but is empty instead.")
            given = [("force_words_ids", shared)] * self.batch
        else:
            if len(each) != self.batch:
                raise ValueError(
                    f"`sentence_force_words_ids` must hold a list for each of the {self.batch} sentences, "
                    f"but holds {len(each)} instead."
                )
            given = [(f"sentence_force_words_ids[{number}]", own) for number, own in enumerate(each)]
        vocabulary = self.voters.model.get_output_embeddings().weight.shape[0]
        words = [read_constraints(constraints, vocabulary, self.ends, name) for name, constraints in given]
        for (name, _), wanted, limit in zip(given, words, self.limits.tolist(), strict=True):
            needed = wanted.remaining(wanted.start)
            if needed > limit:
                raise ValueError(
                    f"`{name}` must fit into the longest output, {limit} tokens, but needs {needed} tokens instead."
                )
        return words

    def _new_group(self, number: int, tokens: torch.Tensor) -> _Group:
        size, first_row = self.size, number * self.size
        prompts = tokens[:, first_row : first_row + size]
        scores = torch.full((self.batch, size), NEVER, device=tokens.device)
        started = scores.clone()
        started[:, 0] = 0.0  # otherwise all beams of the first step would be alike
        parents = tokens.new_zeros((self.batch, size, 0))
        source_length = self.voters.source_mask.shape[1]
        coverage = scores.new_zeros((self.batch, size, source_length)) if self.voters.needs_attention else None
        progress = None if self.words is None else [[words.start] * size for words in self.words]
        return _Group(
            first_row,
            _Hypotheses(prompts, parents, started, coverage, progress),
            _Hypotheses(prompts, parents, scores),
            torch.zeros(self.batch, dtype=torch.bool, device=tokens.device),
        )

    def step(self) -> None:
        """Let every group choose its next tokens."""
        tokens = torch.cat([group.running.tokens for group in self.groups], 1).flatten(0, 1)  # (B * K, L)
        log_probabilities, attention, outputs = self.voters.next(tokens)
        log_probabilities = self.processor(tokens, log_probabilities)  # (B * K, V)
        self.records.add(log_probabilities, outputs)
        log_probabilities = log_probabilities.view(self.batch, self.settings.beams, -1)
        counts = log_probabilities.new_zeros((self.batch, log_probabilities.shape[-1]))  # (B, V)
        for group in self.groups:
            rows = slice(group.first_row, group.first_row + self.size)
            if attention is not None and group.running.coverage is not None:
                newest = attention.view(self.batch, self.settings.beams, -1)[:, rows]
                group.running.coverage = group.running.coverage + newest
            self._advance(group, log_probabilities[:, rows], counts)
        if not self.is_done:
            parents = torch.cat([group.running.parents[..., -1] for group in self.groups], 1)  # (B, K)
            self.voters.reorder(parents.flatten())

    def _advance(self, group: _Group, log_probabilities: torch.Tensor, counts: torch.Tensor) -> None:
        """Choose the candidates of one group, store those that end, go on with the best others, and count tokens."""
        totals = group.running.scores[..., None] + log_probabilities  # (B, k, V)
        places, tokens, progress = self._candidates(group, totals, counts)  # (B, M)
        candidates = group.running.pick(places)
        candidates.scores = totals.flatten(1).gather(1, places * totals.shape[-1] + tokens)
        if progress is not None:
            candidates.progress = progress
            # A sentence with fewer candidates than another gets empty ones, which are never chosen.
            real = [[number < len(row) for number in range(places.shape[1])] for row in progress]
            candidates.scores = candidates.scores.masked_fill(~torch.tensor(real, device=tokens.device), NEVER)
            for row in progress:
                row.extend([Progress(frozenset(), ())] * (places.shape[1] - len(row)))
        first = torch.arange(self.batch, device=tokens.device)[:, None] * self.settings.beams + group.first_row
        candidates.grow(tokens, places + first)
        ended = self._ended(candidates.tokens)  # (B, M)
        finishing = self._finish(group, candidates, ended)
        counts.scatter_add_(1, tokens, finishing.to(counts))
        order = torch.arange(ended.shape[1], device=ended.device) + ended * ended.shape[1]
        places = order.argsort(1)[:, : self.size]
        running = candidates.pick(places)
        running.scores = running.scores.masked_fill(ended.gather(1, places) | group.done[:, None], NEVER)
        group.running = running
        self._stop(group)
        counts.scatter_add_(1, running.tokens[..., -1], (running.scores > NEVER).to(counts))

    def _candidates(self, group: _Group, totals: torch.Tensor, counts: torch.Tensor) -> tuple[Any, Any, Any]:
        """Return hypothesis and token of each of M candidates, best first, and their progress with forced words.

        They are so many that k go on even if each of the others ends, with each end token.
        """
        count = max(2, 1 + len(self.ends)) * self.size
        vocabulary = totals.shape[-1]
        if self.words is None or group.running.progress is None:
            ranking = totals - self.settings.strategy.diversity_penalty * counts[:, None]
            best = ranking.flatten(1).topk(min(count, ranking[0].numel())).indices
            return best // vocabulary, best % vocabulary, None
        room = (self.limits - group.running.parents.shape[-1] - 1).tolist()
        rows = [
            words.order(scores, progress, count, self.ends, left)
            for words, scores, progress, left in zip(self.words, totals, group.running.progress, room, strict=True)
        ]
        # At least k, so that k always go on, even if some of them are empty.
        longest = max(self.size, *(len(row) for row in rows))
        filled = [[(place, token) for place, token, _ in row] + [(0, 0)] * (longest - len(row)) for row in rows]
        best = torch.tensor(filled, device=totals.device)  # (B, M, 2)
        return best[..., 0], best[..., 1], [[progress for _, _, progress in row] for row in rows]

    def _ended(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.flatten(0, 1)
        ended = self.criteria(flat, self.records.scores).view(tokens.shape[:2])
        return ended | (tokens.shape[-1] - self.prompt_length >= self.limits)[:, None]

    def _finish(self, group: _Group, candidates: _Hypotheses, ended: torch.Tensor) -> torch.Tensor:
        """Store the ended hypotheses among the k best candidates, if they are better than those stored.

        Returns:
            Which candidates these are, `(B, M)`.
        """
        length = candidates.parents.shape[-1]
        counted = ended & (torch.arange(ended.shape[1], device=ended.device) < self.size)
        if self.words is not None and candidates.progress is not None:
            complete = [
                [words.remaining(progress) == 0 for progress in row]
                for words, row in zip(self.words, candidates.progress, strict=True)
            ]
            counted &= torch.tensor(complete, device=ended.device)
        scores = candidates.scores / self.settings.penalty(length)
        if candidates.coverage is not None:
            mask = self.voters.source_mask[:, None]
            scores = scores + coverage_penalty(candidates.coverage, mask, self.settings.strategy.coverage_penalty)
        scores = scores.masked_fill(~counted | group.done[:, None], NEVER)
        fill = torch.full_like(group.finished.tokens[..., 0], self.fill)
        group.finished.grow(fill, torch.full_like(fill, -1))
        ending = _Hypotheses(candidates.tokens, candidates.parents, scores)
        group.finished = _merge(group.finished, ending, self.size)
        return scores > NEVER

    def _stop(self, group: _Group) -> None:
        """Mark the sentences whose stored hypotheses cannot get better, by the rules of transformers."""
        settings = self.settings
        best, worst = group.running.scores.amax(1), group.finished.scores.amin(1)  # (B)
        length: Any = group.running.parents.shape[-1]
        if settings.config.early_stopping == "never" and settings.config.length_penalty > 0:
            length = self.limits
        full = worst > NEVER
        hopeless = best / settings.penalty(length) <= worst
        stops_when_full = settings.config.early_stopping is True or self.size == 1
        group.done = group.done | (best == NEVER) | (full & (hopeless | stops_when_full))
        group.running.scores = group.running.scores.masked_fill(group.done[:, None], NEVER)

    def result(self, encoded: Any) -> Any:
        """Return the best hypotheses of all groups, as generate() does."""
        every = self.groups[0].finished
        for group in self.groups[1:]:
            every = _merge(every, group.finished, every.scores.shape[1] + self.size)
        best = every.pick(every.scores.topk(self.settings.returned).indices)
        self._check_found(best.scores)
        generated = int((best.parents >= 0).sum(-1).max())
        tokens: Any = best.tokens[..., : self.prompt_length + generated].flatten(0, 1)
        beam_indices: Any = best.parents[..., :generated].flatten(0, 1)
        if not self.settings.config.return_dict_in_generate:
            return tokens
        from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

        return GenerateBeamEncoderDecoderOutput(
            sequences=tokens,
            sequences_scores=best.scores.flatten(),
            beam_indices=beam_indices,
            past_key_values=self.voters.members[0].model_kwargs.get("past_key_values"),
            **self.records.fields(encoded, self.batch),
        )

    def _check_found(self, scores: torch.Tensor) -> None:
        missing = (scores == NEVER).any(1).nonzero().flatten().tolist()
        if missing and self.words is not None:
            raise ValueError(
                f"`force_words_ids` of sentence {missing[0]} must be possible within {int(self.limits[missing[0]])}"
                f" tokens, but fewer than {self.settings.returned} hypotheses that contain them were found: other"
                " settings forbid tokens, or length and beams are too small."
            )
        check_found(scores)
