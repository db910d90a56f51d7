"""The settings of one beam search, checked against each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from heedful.files import check_at_least
from heedful.inference.strategies.penalties import LengthPenaltyForm, length_penalty
from heedful.inference.strategies.steps import Averaging, given_once, require

# Settings that may stand in the strategy or in generate()'s config, and what they are where neither has them.
SHARED = {
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "force_words_ids": None,
    "length_penalty_form": None,
    "tokens_beyond_source": None,
}


@dataclass(frozen=True)
class BeamSettings:
    """The settings of one call.

    Attributes:
        strategy: The `BeamSearch`, with those settings of generate() that it leaves open.
        config: generate()'s own.
        beams: Hypotheses of each sentence, of all groups together.
        returned: Hypotheses that are returned for each sentence.
    """

    strategy: Any
    config: Any
    beams: int
    returned: int

    @classmethod
    def resolve(cls, strategy: Any, config: Any) -> "BeamSettings":
        """Read the settings of a `BeamSearch` and of generate()'s config, and check them.

        Raises:
            ValueError: If one is out of range, or two cannot be combined.
        """
        strategy = replace(strategy, **{name: given_once(strategy, config, name, SHARED[name]) for name in SHARED})
        beams, returned = config.num_beams or 1, config.num_return_sequences or 1
        alpha = getattr(config, "penalty_alpha", None)
        require(not config.do_sample, "do_sample", "be False with BeamSearch", True)
        require(not alpha, "penalty_alpha", "not be set with BeamSearch", alpha)
        require(returned <= beams, "num_return_sequences", f"be at most `num_beams` ({beams})", returned)
        _check_groups(beams, strategy.num_beam_groups, strategy.diversity_penalty)
        _check_words(strategy, beams)
        form = strategy.length_penalty_form
        require(
            form in (None, *get_args(LengthPenaltyForm)), "length_penalty_form", "be 'power' or 'gnmt'", repr(form)
        )
        check_at_least(0, coverage_penalty=strategy.coverage_penalty)
        check_at_least(1, tokens_beyond_source=strategy.tokens_beyond_source)
        _check_votes(strategy, config)
        return cls(strategy, config, beams, returned)

    def penalty(self, length: Any) -> Any:
        """Return what the log-probability of a hypothesis of `length` generated tokens is divided by."""
        return length_penalty(length, self.config.length_penalty, self.strategy.length_penalty_form or "power")


def _check_groups(beams: int, groups: int, diversity: float) -> None:
    if groups < 1 or beams % groups:
        raise ValueError(f"`num_beams` must be divisible by `num_beam_groups`, but they are {beams} and {groups}.")
    require(diversity >= 0, "diversity_penalty", "be at least 0", diversity)
    is_idle = groups == 1 and diversity > 0
    require(not is_idle, "num_beam_groups", f"be at least 2 with a `diversity_penalty` of {diversity}", groups)
    are_alike = groups > 1 and not diversity
    require(not are_alike, "diversity_penalty", f"be above 0 with {groups} groups, or they would be alike", diversity)


def _check_words(strategy: Any, beams: int) -> None:
    given = [words for words in (strategy.force_words_ids, strategy.sentence_force_words_ids) if words is not None]
    if len(given) == 2:
        raise ValueError("`sentence_force_words_ids` must be None with `force_words_ids`, but both are given instead.")
    if given:
        groups = strategy.num_beam_groups
        require(groups == 1, "num_beam_groups", "be 1 with forced words", groups)
        require(beams > 1, "num_beams", "be at least 2 with forced words", beams)


def _check_votes(strategy: Any, config: Any) -> None:
    models, weights, averaging = strategy.models, strategy.weights, strategy.averaging
    require(
        averaging in get_args(Averaging), "averaging", "be 'probabilities' or 'log_probabilities'", repr(averaging)
    )
    is_list = isinstance(models, Sequence) and not isinstance(models, str)
    require(is_list, "models", "be a list of models", f"a {type(models).__name__}")
    if weights is not None:
        count = 1 + len(models)
        fit = len(weights) == count > 1 and all(0 < weight < math.inf for weight in weights)
        require(fit, "weights", f"hold a positive number for each of the {count} models, two or more", list(weights))
    if models and config.output_logits:
        raise ValueError("`output_logits` must be False with several models, but is True instead: ask for scores.")
