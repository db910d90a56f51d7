"""The settings of one beam search, checked against each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heedful.inference.strategies.penalties import LengthPenaltyForm, length_penalty


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
        form = _either("length_penalty_form", strategy.length_penalty_form, config, None) or "power"
        beyond = _either("tokens_beyond_source", strategy.tokens_beyond_source, config, None)
        if config.do_sample:
            raise ValueError("`do_sample` must be False with BeamSearch, but is True instead.")
        if getattr(config, "penalty_alpha", None):
            raise ValueError(
                f"`penalty_alpha` must not be set with BeamSearch, but is {config.penalty_alpha} instead."
            )
        if returned > beams:
            raise ValueError(
                f"`num_return_sequences` must be at most `num_beams` ({beams}), but is {returned} instead."
            )
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
    if diversity < 0:
        raise ValueError(f"`diversity_penalty` must be at least 0, but is {diversity} instead.")
    if groups == 1 and diversity:
        raise ValueError(
            f"`num_beam_groups` must be at least 2 with a `diversity_penalty` of {diversity}, but is 1 instead."
        )
    if groups > 1 and not diversity:
        raise ValueError(
            f"`diversity_penalty` must be above 0 with {groups} groups, which would all be alike, "
            f"but is {diversity} instead."
        )


def _check_words(strategy: Any, words: Any, beams: int, groups: int) -> None:
    if words is not None and strategy.sentence_force_words_ids is not None:
        raise ValueError("`sentence_force_words_ids` must be None with `force_words_ids`, but both are given instead.")
    if words is None and strategy.sentence_force_words_ids is None:
        return
    if groups > 1:
        raise ValueError(f"`num_beam_groups` must be 1 with forced words, but is {groups} instead.")
    if beams < 2:
        raise ValueError(f"`num_beams` must be at least 2 with forced words, but is {beams} instead.")


def _check_penalties(form: str, coverage_penalty: float, beyond: int | None) -> None:
    if form not in ("power", "gnmt"):
        raise ValueError(f"`length_penalty_form` must be 'power' or 'gnmt', but is {form!r} instead.")
    if coverage_penalty < 0:
        raise ValueError(f"`coverage_penalty` must be at least 0, but is {coverage_penalty} instead.")
    if beyond is not None and beyond < 1:
        raise ValueError(f"`tokens_beyond_source` must be at least 1, but is {beyond} instead.")


def _check_votes(strategy: Any, config: Any) -> None:
    if strategy.averaging not in ("probabilities", "log_probabilities"):
        raise ValueError(
            f"`averaging` must be 'probabilities' or 'log_probabilities', but is {strategy.averaging!r} instead."
        )
    if not isinstance(strategy.models, Sequence) or isinstance(strategy.models, str):
        raise ValueError(f"`models` must be a list of models, but is a {type(strategy.models).__name__} instead.")
    count, weights = 1 + len(strategy.models), strategy.weights
    are_shares = weights is None or all(0 < weight < math.inf for weight in weights)
    if weights is not None and (len(weights) != count or count == 1 or not are_shares):
        raise ValueError(
            f"`weights` must hold a positive number for each of the {count} models, two or more, "
            f"but is {list(weights)} instead."
        )
    if strategy.models and config.output_logits:
        raise ValueError("`output_logits` must be False with several models, but is True instead: ask for scores.")
