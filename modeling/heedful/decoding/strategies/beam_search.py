"""Beam search for `generate(custom_generate=BeamSearch(…))`. Without options it gives transformers' results.

Letters in shape comments: B sentences, K hypotheses and M candidates each, V target tokens, S source and L target
length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from heedful.decoding.search_settings import HUB_MODES, LengthPenaltyForm, Numbers, end_tokens, filler
from heedful.decoding.strategies import steps
from heedful.decoding.strategies.beams import NEVER, Beam, check_found
from heedful.decoding.strategies.constraints import ForcedWords, Progress, Words, read_constraints
from heedful.decoding.strategies.steps import OnRows
from heedful.files import check_at_least
from heedful.generation_heed import check_logits
from heedful.protocols import Seq2SeqModel
from heedful.versions_heed import CACHE

SHARED = ("force_words_ids", "length_penalty_form", "tokens_beyond_source")  # also settings of generate()


@dataclass(frozen=True, eq=False)
class BeamSearch:
    """Beam search as a callable for `model.generate(…, custom_generate=BeamSearch(…))`.

    `num_beams`, `num_return_sequences`, `length_penalty`, `early_stopping`, lengths, logits processors, stopping
    criteria and `output_…` work as in `generate()`. With `num_beams=1` a search ends with its first hypothesis.
    Processors see log-probabilities. transformers passes no `streamer` or `assistant_model` to a callable: Heed's
    models refuse them, other models ignore them.

    Args:
        force_words_ids: Words that each output must contain, each as a list of token ids, or a list of alternatives
            (Hokamp and Liu, 2017; Post and Vilar, 2018). `None` takes generate()'s.
        length_penalty_form: `power` divides a hypothesis' log-probability by length^α, as transformers does; `gnmt` by
            ((5 + length) / 6)^α (Wu et al., 2016), as *Attention Is All You Need* does with α = 0.6. α is generate()'s
            `length_penalty`. `None` takes the generation config's form, else `power`.
        tokens_beyond_source: Longest output, in tokens beyond the source length; 50 in *Attention Is All You Need*
            (section 6.1). Other limits apply too. `None` takes the generation config's, if any.
        models: Further models with the same vocabulary. The mean of all probabilities chooses each token.

    Raises:
        ValueError: During a call, if a setting is out of range or excludes another, words cannot be forced within the
            length, or no token may follow a hypothesis.
    """

    force_words_ids: Sequence[Words] | None = None
    length_penalty_form: LengthPenaltyForm = None
    tokens_beyond_source: int | None = None
    models: Sequence[Seq2SeqModel] = field(default=(), repr=False)

    def __call__(
        self,
        model: Seq2SeqModel,
        input_ids: torch.Tensor,
        logits_processor: OnRows,
        stopping_criteria: OnRows,
        generation_config: GenerationConfig,
        inputs_tensor: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | ModelOutput:
        """Decode from the `(B · K, L)` prompts of `generate()`, which prepares each strategy's arguments.

        `inputs_tensor` are the `(B, S)` source tokens, `model_kwargs` the encoded source, its mask and the cache.
        Return `(B · num_return_sequences, L)` tokens, or on request a `GenerateBeamEncoderDecoderOutput`.
        """
        steps.check_request("BeamSearch", model, generation_config, model_kwargs, HUB_MODES)
        config = generation_config
        strategy = replace(self, **{name: steps.single_source_of(self, config, name) for name in SHARED})
        _check_settings(strategy, config)
        steps.check_members(model, self.models)
        prompts = input_ids.view(-1, config.num_beams or 1, input_ids.shape[1])
        first = steps.ModelSteps(model, model_kwargs, prompts.shape[1])
        members = [first, *(steps.member_steps(each, inputs_tensor, first, prompts.shape[1]) for each in self.models)]
        search = _Search(strategy, config, members, prompts, logits_processor, stopping_criteria)
        while not bool(search.beam.done.all()):
            search.step()
        return search.result(model_kwargs["encoder_outputs"])


def _check_settings(strategy: BeamSearch, config: GenerationConfig) -> None:
    beams, returned = config.num_beams or 1, config.num_return_sequences or 1
    steps.require(not config.do_sample, "do_sample", "be False with BeamSearch", True)
    steps.require(returned <= beams, "num_return_sequences", f"be at most `num_beams` ({beams})", returned)
    check_at_least(1, tokens_beyond_source=strategy.tokens_beyond_source)
    steps.require(beams > 1 or strategy.force_words_ids is None, "num_beams", "be at least 2 with forced words", beams)
    form, models = strategy.length_penalty_form, strategy.models
    steps.require(form in (None, "power", "gnmt"), "length_penalty_form", "be 'power' or 'gnmt'", repr(form))
    is_list = isinstance(models, Sequence) and not isinstance(models, str)
    steps.require(is_list, "models", "be a list of models", f"a {type(models).__name__}")
    has_logits = bool(models) and config.output_logits
    steps.require(not has_logits, "output_logits", "be False with several models (use scores)", True)


class _Search:
    def __init__(
        self,
        strategy: BeamSearch,
        config: GenerationConfig,
        members: list[steps.ModelSteps],
        prompts: torch.Tensor,  # (B, K, L)
        processor: OnRows,
        criteria: OnRows,
    ):
        self.strategy, self.config, self.members = strategy, config, members
        self.processor, self.criteria = processor, criteria
        self.ends, self.fill = end_tokens(config), filler(config)
        self.batch, self.beams, self.prompt_length = prompts.shape
        self.limits = prompts.new_full((self.batch,), config.max_length - self.prompt_length)  # (B)
        if strategy.tokens_beyond_source is not None:
            given = members[0].model_kwargs
            mask, encoded = given.get("attention_mask"), given["encoder_outputs"][0]
            mask = encoded.new_ones(encoded.shape[:2]) if mask is None else mask
            lengths = steps.once_per_sentence(mask, self.batch).sum(1).to(self.limits)
            self.limits = torch.minimum(self.limits, lengths + strategy.tokens_beyond_source)
        self.words = self._read_words()
        self.beam = Beam(config, prompts, self.limits, self.fill, strategy.length_penalty_form)
        if self.words is not None:
            self.beam.running.progress = [[Progress()] * self.beams] * self.batch
        self.records = steps.Records(config)

    def _read_words(self) -> ForcedWords | None:
        given, longest = self.strategy.force_words_ids, int(self.limits.min())
        if given is None:
            return None
        vocabulary = self.members[0].model.get_output_embeddings().weight.shape[0]
        words = read_constraints(given, vocabulary, self.ends)
        needed, must = words.remaining(Progress()), f"fit into the longest output, {longest} tokens"
        steps.require(needed <= longest, "force_words_ids", must, needed, "needs")
        return words

    def step(self) -> None:
        tokens = self.beam.running.tokens.flatten(0, 1)  # (B * K, L)
        outputs = [member.next(tokens) for member in self.members]
        each = [output["logits"][:, -1].to(tokens.device, torch.float32).log_softmax(-1) for output in outputs]
        log_probabilities = each[0] if len(each) == 1 else steps.average(each)
        log_probabilities = self.processor(tokens, log_probabilities)  # (B * K, V)
        self.records.add(log_probabilities, outputs[0])
        totals = self.beam.running.scores[..., None] + log_probabilities.view(self.batch, self.beams, -1)  # (B, K, V)
        self._advance(totals)
        if not bool(self.beam.done.all()):
            for member in self.members:
                member.reorder(self.beam.running.parents[..., -1].flatten())

    def _advance(self, totals: torch.Tensor) -> None:
        scores, places, tokens, progress = self._candidates(totals)  # (B, M)
        first = torch.arange(self.batch, device=tokens.device)[:, None] * self.beams
        candidates = self.beam.running.extended(places, tokens, scores)
        candidates.parents[..., -1] += first
        recorded = tuple(self.records.steps.get("scores", ())) or None
        ended = self.criteria(candidates.tokens.flatten(0, 1), recorded).view(tokens.shape)
        ended |= (candidates.parents.shape[-1] >= self.limits)[:, None]
        is_complete: Numbers = True
        if self.words is not None and progress is not None:
            candidates.progress = progress
            complete = [[self.words.remaining(each) == 0 for each in row] for row in progress]
            is_complete = torch.tensor(complete, device=tokens.device)
        self.beam.advance(candidates, ended, is_complete)

    def _candidates(
        self, totals: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[Progress]] | None]:
        """Return M candidates' score, hypothesis and token, best first, and their progress with forced words."""
        # K continue even if all others end, with each end token.
        count, vocabulary = max(2, 1 + len(self.ends)) * self.beams, totals.shape[-1]
        running, flat = self.beam.running, totals.flatten(1)
        if self.words is None or running.progress is None:
            scores, best = flat.topk(min(count, flat.shape[1]))
            return scores, best // vocabulary, best % vocabulary, None
        room = (self.limits - running.parents.shape[-1] - 1).tolist()
        rows = [
            self.words.order(scores, progress, count, self.ends, left)
            for scores, progress, left in zip(totals, running.progress, room, strict=True)
        ]
        # At least K always continue; empty candidates are never chosen.
        longest = max(self.beams, *map(len, rows))
        filled = [row + [(0, 0, Progress())] * (longest - len(row)) for row in rows]
        best = torch.tensor([[place * vocabulary + token for place, token, _ in row] for row in filled])
        is_empty = torch.arange(longest) >= torch.tensor([[len(row)] for row in rows])
        best, is_empty = best.to(totals.device), is_empty.to(totals.device)
        scores = flat.gather(1, best).masked_fill(is_empty, NEVER)
        return scores, best // vocabulary, best % vocabulary, [[progress for _, _, progress in row] for row in filled]

    def result(self, encoded: ModelOutput) -> torch.Tensor | ModelOutput:
        best = self.beam.finished.of((slice(None), slice(self.config.num_return_sequences or 1)))
        check_logits(best.scores, self.members[0].model.dtype)
        check_found(best.scores, None if self.words is None else self.limits)
        generated = int((best.parents >= 0).sum(-1).max())
        tokens = best.tokens[..., : self.prompt_length + generated].flatten(0, 1)
        if not self.config.return_dict_in_generate:
            return tokens
        from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

        found: dict[str, Any] = {"sequences": tokens, "sequences_scores": best.scores.flatten()}
        found["beam_indices"] = best.parents[..., :generated].flatten(0, 1)
        found[CACHE] = self.members[0].model_kwargs.get(CACHE)
        found |= self.records.fields(encoded, self.batch)
        return GenerateBeamEncoderDecoderOutput(**found)
