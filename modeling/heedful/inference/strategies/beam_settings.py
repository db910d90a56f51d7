"""The settings of one beam search, checked against each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from heedful.files import check_at_least
from heedful.inference.strategies.penalties import LengthPenaltyForm, length_penalty
from heedful.inference.strategies.steps import Averaging, require


@dataclass(frozen=True)
class BeamSettings:
    """The settings of one call, those of the strategy and of generate() together."""

    strategy: Any
    beams: int
    groups: int
    diversity: float
    returned: int
    length_penalty_form: LengthPenaltyForm
    tokens_beyond_source: int | None
    force_words_ids: Sequence[Any] | None
    config: Any

    @classmethod
    def resolve(cls, strategy: Any, config: Any) -> "BeamSettings":
        """Read the settings of a `BeamSearch` and of generate()'s config, and check them.

        Raises:
            ValueError: If one is out of range, or two cannot be combined.
        """
        beams, returned = config.num_beams or 1, config.num_return_sequences or 1
        groups = _either("num_beam_groups", strategy.num_beam_groups, config, 1)
        diversity = _either("diversity_penalty", strategy.diversity_penalty, config, 0.0)
        words = _either("force_words_ids", strategy.force_words_ids, config, None)
        form: Any = _either("length_penalty_form", strategy.length_penalty_form, config, None) or "power"
        beyond = _either("tokens_beyond_source", strategy.tokens_beyond_source, config, None)
        alpha = getattr(config, "penalty_alpha", None)
        require(not config.do_sample, "do_sample", "be False with BeamSearch", True)
        require(not alpha, "penalty_alpha", "not be set with BeamSearch", alpha)
        require(returned <= beams, "num_return_sequences", f"be at most `num_beams` ({beams})", returned)
        _check_groups(beams, groups, diversity)
        _check_words(strategy, words, beams, groups)
        _check_penalties(form, strategy.coverage_penalty, beyond)
        _check_votes(strategy, config)
        return cls(
            strategy=strategy,
            beams=beams,
            groups=groups,
            diversity=diversity,
            returned=returned,
            length_penalty_form=form,
            tokens_beyond_source=beyond,
            force_words_ids=words,
            config=config,
        )

    def penalty(self, length: Any) -> Any:
        """Return what the log-probability of a hypothesis of `length` generated tokens is divided by."""
        return length_penalty(length, self.config.length_penalty, self.length_penalty_form)


def _either(name: str, own: Any, config: Any, unset: Any) -> Any:
    """Return a setting that may stand in the strategy or in generate()'s config."""
    given = getattr(config, name, None)
    given = unset if given is None else given
    if own is None:
        return given
    if given not in (unset, own):
        raise ValueError(f"`{name}` must be given once, but is {own!r} in BeamSearch and {given!r} in generate().")
    return own


def _check_groups(beams: int, groups: int, diversity: float) -> None:
    if groups < 1 or beams % groups:
        raise ValueError(f"`num_beams` must be divisible by `num_beam_groups`, but they are {beams} and {groups}.")
    require(diversity >= 0, "diversity_penalty", "be at least 0", diversity)
    is_idle = groups == 1 and diversity > 0
    require(not is_idle, "num_beam_groups", f"be at least 2 with a `diversity_penalty` of {diversity}", groups)
    are_alike = groups > 1 and not diversity
    require(not are_alike, "diversity_penalty", f"be above 0 with {groups} groups, or they would be alike", diversity)


def _check_words(strategy: Any, words: Any, beams: int, groups: int) -> None:
    if words is not None and strategy.sentence_force_words_ids is not None:
        raise ValueError("`sentence_force_words_ids` must be None with `force_words_ids`, but both are given instead.")
    if words is not None or strategy.sentence_force_words_ids is not None:
        require(groups == 1, "num_beam_groups", "be 1 with forced words", groups)
        require(beams > 1, "num_beams", "be at least 2 with forced words", beams)


def _check_penalties(form: str, coverage_penalty: float, beyond: int | None) -> None:
    require(form in ("power", "gnmt"), "length_penalty_form", "be 'power' or 'gnmt'", repr(form))
    check_at_least(0, coverage_penalty=coverage_penalty)
    check_at_least(1, tokens_beyond_source=beyond)


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
