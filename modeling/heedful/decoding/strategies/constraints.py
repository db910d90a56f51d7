"""Forced words in a translation (Hokamp and Liu, 2017), with dynamic beam allocation (Post and Vilar, 2018)."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from heedful.messages_heed import wrong

Phrase = tuple[int, ...]
Constraint = tuple[Phrase, ...]
Words = Sequence[int] | Sequence[Sequence[int]]  # a user's constraint: one or several phrases


class Progress(NamedTuple):
    """A hypothesis' progress."""

    met: frozenset[int] = frozenset()  # numbers of constraints
    recent: Phrase = ()  # its newest tokens


class ForcedWords:
    """Constraints. One contiguous phrase from each must occur; phrases may overlap."""

    def __init__(self, constraints: tuple[Constraint, ...]):
        self.constraints = constraints
        self._longest = max(len(phrase) for phrases in constraints for phrase in phrases)
        self._shortest = [min(len(phrase) for phrase in phrases) for phrases in constraints]

    def advance(self, progress: Progress, token: int) -> Progress:
        """Return a hypothesis' progress after one more token."""
        recent = (*progress.recent, token)[-self._longest :]
        met = (
            number
            for number, phrases in enumerate(self.constraints)
            if any(recent[-len(phrase) :] == phrase for phrase in phrases)
        )
        return Progress(progress.met.union(met), recent)

    def remaining(self, progress: Progress) -> int:
        """Return the most tokens needed to meet all constraints.

        One phrase can continue from the newest tokens; all others start anew. So some token always lowers the number.
        """
        unmet = [number for number in range(len(self.constraints)) if number not in progress.met]
        gains = [
            self._shortest[number] - len(phrase) + begun
            for number in unmet
            for phrase in self.constraints[number]
            for begun in _begun(phrase, progress.recent)
        ]
        return sum(self._shortest[number] for number in unmet) - max(gains, default=0)

    def next_tokens(self, progress: Progress) -> set[int]:
        """Return the tokens that begin or continue an unmet constraint's phrase."""
        return {
            phrase[begun]
            for number, phrases in enumerate(self.constraints)
            if number not in progress.met
            for phrase in phrases
            for begun in _begun(phrase, progress.recent)
        }

    def order(
        self, scores: torch.Tensor, progress: Sequence[Progress], count: int, ends: Sequence[int], room: int
    ) -> list[tuple[int, int, Progress]]:
        """Order one sentence's candidates, hypothesis, token and progress, so that the fullest banks come first.

        Candidates are the `count` best by `(K, V)` accumulated log-probabilities (-inf for forbidden tokens), each
        hypothesis' best, and all `next_tokens`. Those that end too early are excluded, and so are those whose missing
        tokens do not fit into `room`. Candidates with equally many missing tokens form a bank. The banks take turns,
        each with its best candidate. This equals Post and Vilar's (2018) allocation: the fullest bank always has a
        slot, so all constraints are met in the end.
        """
        vocabulary = scores.shape[1]
        pool = dict.fromkeys(scores.flatten().topk(min(count, scores.numel())).indices.tolist())
        for row, best in enumerate(scores.argmax(1).tolist()):
            forced = sorted(self.next_tokens(progress[row]))
            pool |= dict.fromkeys(row * vocabulary + token for token in [best, *forced])
        places = list(pool)
        values = scores.flatten()[places].tolist()
        banks: dict[int, int] = {}
        ordered = []
        for value, place in sorted(zip(values, places, strict=True), key=lambda pair: -pair[0]):
            row, token = divmod(place, vocabulary)
            after = self.advance(progress[row], token)
            missing = self.remaining(after)
            if value == float("-inf") or missing > (0 if token in ends else room):
                continue
            rank = banks[missing] = banks.get(missing, -1) + 1
            ordered.append((rank, missing, (row, token, after)))
        ordered.sort(key=lambda entry: entry[:2])
        return [candidate for _, _, candidate in ordered]


def _begun(phrase: Phrase, recent: Phrase) -> list[int]:
    """Return the possible numbers of a phrase's tokens at the end, including 0."""
    most = min(len(phrase) - 1, len(recent))
    return [0, *(begun for begun in range(1, most + 1) if recent[-begun:] == phrase[:begun])]


def read_constraints(given: object, vocabulary: int, ends: Sequence[int]) -> ForcedWords:
    """Read `force_words_ids`, in the form for `BeamSearch`; other forms raise a `ValueError`."""
    if not _is_list(given) or not given:
        raise wrong("force_words_ids", "be a list of one or more constraints", repr(given))
    constraints = tuple(_read_constraint(entry, f"force_words_ids[{number}]") for number, entry in enumerate(given))
    for number, phrases in enumerate(constraints):
        if phrases in constraints[:number]:
            raise wrong("force_words_ids", "hold different constraints", f"{given[number]!r} twice", verb="has")
        for token in (token for phrase in phrases for token in phrase):
            if not 0 <= token < vocabulary or token in ends:
                must = f"hold token ids from 0 to {vocabulary - 1} without end tokens"
                raise wrong("force_words_ids", must, token, verb="holds")
    return ForcedWords(constraints)


def _read_constraint(given: object, name: str) -> Constraint:
    phrases: Any = [given] if _is_list(given) and given and isinstance(given[0], int) else given
    are_phrases = _is_list(phrases) and phrases and all(_is_list(phrase) and phrase for phrase in phrases)
    if not are_phrases or not all(isinstance(token, int) for phrase in phrases for token in phrase):
        raise wrong(name, "be a list of token ids, or a list of alternative lists", repr(given))
    return tuple(map(tuple, phrases))


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str)
