"""One beam search for `generate(custom_generate=BeamSearch(…))`, whose parts can be combined.

Without options it gives the tokens and scores of transformers' own. Options: groups that differ from each other, words
that must occur, several models, GNMT's length and coverage penalties, and a length limit relative to the source.

Letters in shape comments: B sentences, K hypotheses of a sentence (k of a group), M candidates of a group,
V target tokens, S source length, L target length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from heedful.files import check_at_least
from heedful.inference.search_settings import LengthPenaltyForm, end_tokens
from heedful.inference.strategies.beams import NEVER, Beam, best_of, check_found, coverage_penalty
from heedful.inference.strategies.constraints import ForcedWords, Progress, read_constraints
from heedful.inference.strategies.steps import (
    Averaging,
    ModelSteps,
    Records,
    average,
    check_members,
    check_request,
    filler,
    given_once,
    member_steps,
    once_per_sentence,
    require,
    source_attention,
)
from heedful.versions_heed import CACHE, by_name

# Settings that may stand in the strategy or in generate()'s config, and what they are where neither has them.
SHARED = {
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "force_words_ids": None,
    "length_penalty_form": None,
    "tokens_beyond_source": None,
}


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
        config = generation_config
        strategy = replace(self, **{name: given_once(self, config, name, unset) for name, unset in SHARED.items()})
        _check_settings(strategy, config)
        check_members(model, self.models)
        prompts = input_ids.view(-1, config.num_beams or 1, input_ids.shape[1])  # (B, K, L)
        voters = _Voters(strategy, prompts, model, inputs_tensor, model_kwargs)
        search = _Search(strategy, config, voters, prompts, logits_processor, stopping_criteria)
        while not search.is_done:
            search.step()
        return search.result(model_kwargs["encoder_outputs"])


def _check_settings(strategy: BeamSearch, config: Any) -> None:
    """Raise a `ValueError` if a setting is out of range, or two cannot be combined."""
    beams, returned = config.num_beams or 1, config.num_return_sequences or 1
    require(not config.do_sample, "do_sample", "be False with BeamSearch", True)
    alpha = getattr(config, "penalty_alpha", None)
    require(not alpha, "penalty_alpha", "not be set with BeamSearch", alpha)
    require(returned <= beams, "num_return_sequences", f"be at most `num_beams` ({beams})", returned)
    groups, diversity = strategy.num_beam_groups or 0, strategy.diversity_penalty or 0.0
    fit = groups >= 1 and beams % groups == 0
    require(fit, "num_beams", f"be divisible by `num_beam_groups` ({groups})", beams)
    check_at_least(0, diversity_penalty=diversity, coverage_penalty=strategy.coverage_penalty)
    is_idle, are_alike = groups == 1 and diversity > 0, groups > 1 and not diversity
    require(not is_idle, "num_beam_groups", f"be at least 2 with a `diversity_penalty` of {diversity}", groups)
    require(not are_alike, "diversity_penalty", f"be above 0 with {groups} groups, or they would be alike", diversity)
    has_shared, has_own = strategy.force_words_ids is not None, strategy.sentence_force_words_ids is not None
    require(not (has_shared and has_own), "sentence_force_words_ids", "be None with `force_words_ids`", "a list")
    if has_shared or has_own:
        require(groups == 1, "num_beam_groups", "be 1 with forced words", groups)
        require(beams > 1, "num_beams", "be at least 2 with forced words", beams)
    form, averaging = strategy.length_penalty_form, strategy.averaging
    is_form = form in (None, *get_args(LengthPenaltyForm))
    require(is_form, "length_penalty_form", "be 'power' or 'gnmt'", repr(form))
    check_at_least(1, tokens_beyond_source=strategy.tokens_beyond_source)
    is_averaging = averaging in get_args(Averaging)
    require(is_averaging, "averaging", "be 'probabilities' or 'log_probabilities'", repr(averaging))
    models, weights = strategy.models, strategy.weights
    is_list = isinstance(models, Sequence) and not isinstance(models, str)
    require(is_list, "models", "be a list of models", f"a {type(models).__name__}")
    count = 1 + len(models)
    fit = weights is None or (len(weights) == count > 1 and all(0 < weight < math.inf for weight in weights))
    require(fit, "weights", f"hold a positive number for each of the {count} models, two or more", weights)
    has_logits = bool(models) and config.output_logits
    require(not has_logits, "output_logits", "be False with several models (ask for scores)", True)


class _Voters:
    """The model or models that say how likely each next token is."""

    def __init__(self, strategy: BeamSearch, prompts: torch.Tensor, model: Any, source: Any, model_kwargs: dict):
        sentences, beams, _ = prompts.shape
        self.averaging = strategy.averaging
        weights = strategy.weights or [1.0] * (1 + len(strategy.models))
        self.weights = [weight / sum(weights) for weight in weights]
        encoded, mask = model_kwargs["encoder_outputs"][0], model_kwargs.get("attention_mask")
        mask = encoded.new_ones(encoded.shape[:2]) if mask is None else mask
        self.source_mask = once_per_sentence(mask, sentences)  # (B, S)
        if strategy.models and (source is None or source.is_floating_point() or (source < 0).any()):
            raise ValueError(
                "`input_ids` must be given to generate() with several models, each of which encodes the source, "
                "but `inputs_embeds` or `encoder_outputs` are given instead."
            )
        self.members = [ModelSteps(model, model_kwargs)]
        self.members += [member_steps(member, source, self.members[0], beams) for member in strategy.models]
        self.needs_attention = strategy.coverage_penalty > 0
        if self.needs_attention:
            for each in self.members:
                each.model_kwargs["output_attentions"] = True

    def next(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return `(B * K, V)` log-probabilities, `(B * K, S)` attention where needed, and the first model's output."""
        outputs, device = [member.next(tokens) for member in self.members], tokens.device
        each = [output.logits[:, -1].to(device, torch.float32).log_softmax(-1) for output in outputs]
        log_probabilities = each[0] if len(each) == 1 else average(each, self.weights, self.averaging)
        attention = None
        if self.needs_attention:
            pairs = zip(self.weights, outputs, strict=True)
            attention = torch.stack([weight * source_attention(output).to(device) for weight, output in pairs]).sum(0)
        return log_probabilities, attention, outputs[0]

    def reorder(self, rows: torch.Tensor) -> None:
        for member in self.members:
            member.reorder(rows)


class _Search:
    """The state of one beam search and its step; each group has a beam of its own."""

    def __init__(
        self, strategy: BeamSearch, config: Any, voters: _Voters, prompts: torch.Tensor, processor: Any, criteria: Any
    ):
        self.strategy, self.config, self.voters = strategy, config, voters
        self.processor, self.criteria = processor, criteria
        self.ends, self.fill = end_tokens(config), filler(config)
        self.batch, self.beams, self.prompt_length = prompts.shape
        self.size = self.beams // (strategy.num_beam_groups or 1)  # k
        self.limits = prompts.new_full((self.batch,), config.max_length - self.prompt_length)  # (B)
        if strategy.tokens_beyond_source is not None:
            lengths = voters.source_mask.sum(1).to(self.limits)
            self.limits = torch.minimum(self.limits, lengths + strategy.tokens_beyond_source)
        self.words = self._read_words()
        self.groups = [self._new_group(part) for part in prompts.split(self.size, dim=1)]
        self.records = Records(config)

    @property
    def is_done(self) -> bool:
        """Whether no hypothesis of any sentence goes on."""
        return all(bool(group.done.all()) for group in self.groups)

    def _read_words(self) -> list[ForcedWords] | None:
        shared, each = self.strategy.force_words_ids, self.strategy.sentence_force_words_ids
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
        vocabulary = self.voters.members[0].model.get_output_embeddings().weight.shape[0]
        words = [read_constraints(constraints, vocabulary, self.ends, name) for name, constraints in given]
        for (name, _), wanted, limit in zip(given, words, self.limits.tolist(), strict=True):
            needed = wanted.remaining(wanted.start)
            if needed > limit:
                raise ValueError(
                    f"`{name}` must fit into the longest output, {limit} tokens, but needs {needed} tokens instead."
                )
        return words

    def _new_group(self, prompts: torch.Tensor) -> Beam:
        group = Beam(self.config, prompts, self.limits, self.fill, self.strategy.length_penalty_form)
        if self.voters.needs_attention:
            source_length = self.voters.source_mask.shape[1]
            group.running.coverage = group.running.scores.new_zeros((self.batch, self.size, source_length))
        if self.words is not None:
            group.running.progress = [[words.start] * self.size for words in self.words]
        return group

    def step(self) -> None:
        """Let every group choose its next tokens."""
        tokens = torch.cat([group.running.tokens for group in self.groups], 1).flatten(0, 1)  # (B * K, L)
        log_probabilities, attention, outputs = self.voters.next(tokens)
        log_probabilities = self.processor(tokens, log_probabilities)  # (B * K, V)
        self.records.add(log_probabilities, outputs)
        log_probabilities = log_probabilities.view(self.batch, self.beams, -1)
        counts = log_probabilities.new_zeros((self.batch, log_probabilities.shape[-1]))  # (B, V)
        for number, group in enumerate(self.groups):
            rows = slice(number * self.size, (number + 1) * self.size)
            if attention is not None and group.running.coverage is not None:
                newest = attention.view(self.batch, self.beams, -1)[:, rows]
                group.running.coverage = group.running.coverage + newest
            self._advance(group, rows.start, log_probabilities[:, rows], counts)
        if not self.is_done:
            parents = torch.cat([group.running.parents[..., -1] for group in self.groups], 1)  # (B, K)
            self.voters.reorder(parents.flatten())

    def _advance(self, group: Beam, row: int, log_probabilities: torch.Tensor, counts: torch.Tensor) -> None:
        """Choose the candidates of the group from `row` on, go on with the best, and count the tokens chosen."""
        totals = group.running.scores[..., None] + log_probabilities  # (B, k, V)
        scores, places, tokens, progress = self._candidates(group, totals, counts)  # (B, M)
        first = torch.arange(self.batch, device=tokens.device)[:, None] * self.beams + row
        candidates = group.running.extended(places, tokens, scores, first)
        ended = self.criteria(candidates.tokens.flatten(0, 1), self.records.scores).view(tokens.shape)
        ended |= (candidates.parents.shape[-1] >= self.limits)[:, None]
        is_complete: Any = True
        if self.words is not None and progress is not None:
            candidates.progress = progress
            pairs = zip(self.words, progress, strict=True)
            complete = [[words.remaining(each) == 0 for each in row] for words, row in pairs]
            is_complete = torch.tensor(complete, device=tokens.device)
        bonus: Any = 0.0
        if candidates.coverage is not None:
            mask = self.voters.source_mask[:, None]
            bonus = coverage_penalty(candidates.coverage, mask, self.strategy.coverage_penalty)
        finishing = group.advance(candidates, ended, is_complete, bonus)
        counts.scatter_add_(1, tokens, finishing.to(counts))
        running = group.running
        counts.scatter_add_(1, running.tokens[..., -1], (running.scores > NEVER).to(counts))

    def _candidates(self, group: Beam, totals: torch.Tensor, counts: torch.Tensor) -> tuple[Any, Any, Any, Any]:
        """Return score, hypothesis and token of M candidates, best first, and their progress with forced words.

        They are so many that k go on even if each of the others ends, with each end token.
        """
        count = max(2, 1 + len(self.ends)) * self.size
        vocabulary = totals.shape[-1]
        if self.words is None or group.running.progress is None:
            ranking = totals - (self.strategy.diversity_penalty or 0.0) * counts[:, None]
            best = ranking.flatten(1).topk(min(count, ranking[0].numel())).indices
            return totals.flatten(1).gather(1, best), best // vocabulary, best % vocabulary, None
        room = (self.limits - group.running.parents.shape[-1] - 1).tolist()
        rows = [
            words.order(scores, progress, count, self.ends, left)
            for words, scores, progress, left in zip(self.words, totals, group.running.progress, room, strict=True)
        ]
        # At least k, so that k always go on, even if some of them are empty candidates, which are never chosen.
        longest = max(self.size, *map(len, rows))
        filled = [row + [(0, 0, Progress(frozenset(), ()))] * (longest - len(row)) for row in rows]
        best = torch.tensor([[place * vocabulary + token for place, token, _ in row] for row in filled])
        is_empty = torch.arange(longest) >= torch.tensor([[len(row)] for row in rows])
        best, is_empty = best.to(totals.device), is_empty.to(totals.device)
        scores = totals.flatten(1).gather(1, best).masked_fill(is_empty, NEVER)
        return scores, best // vocabulary, best % vocabulary, [[progress for _, _, progress in row] for row in filled]

    def result(self, encoded: Any) -> Any:
        """Return the best hypotheses of all groups, as generate() does."""
        best = best_of([group.finished for group in self.groups], self.config.num_return_sequences or 1, self.fill)
        self._check_found(best.scores)
        generated = int((best.parents >= 0).sum(-1).max())
        tokens: Any = best.tokens[..., : self.prompt_length + generated].flatten(0, 1)
        beam_indices: Any = best.parents[..., :generated].flatten(0, 1)
        if not self.config.return_dict_in_generate:
            return tokens
        from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

        return GenerateBeamEncoderDecoderOutput(
            sequences=tokens,
            sequences_scores=best.scores.flatten(),
            beam_indices=beam_indices,
            **by_name(self.voters.members[0].model_kwargs.get(CACHE)),
            **self.records.fields(encoded, self.batch),
        )

    def _check_found(self, scores: torch.Tensor) -> None:
        missing = (scores == NEVER).any(1).nonzero().flatten().tolist()
        if missing and self.words is not None:
            raise ValueError(
                f"`force_words_ids` of sentence {missing[0]} must be possible within {int(self.limits[missing[0]])}"
                f" tokens, but fewer than {scores.shape[1]} hypotheses that contain them were found: other"
                " settings forbid tokens, or length and beams are too small."
            )
        check_found(scores)
