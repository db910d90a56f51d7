"""What single heads look at: where their weight goes, how large it gets and how widely it is spread."""

from collections import Counter

import torch

from heedful.data.encoding import EncodedPairs
from heedful.inference.translation import Translator
from heedful.studies.attention.pruning import Head, heads_of
from heedful.studies.measures import attention_along

PLACES = ("previous", "same", "next", "first", "</s>")
# Places that a head cannot look at, or that mean nothing: a source token has no target token beside it.
NOT_THERE = {"encoder": (), "decoder": ("next", "</s>"), "cross": ("previous", "same", "next")}


class Look:
    """What a head looks at, averaged over the tokens that look.

    In the decoder "same" is the token that was read last and "first" is <s>; the last source token is </s>.
    """

    def __init__(self):
        self._totals: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, weights: torch.Tensor) -> None:
        """Add the weights of a sentence, `(tokens that look, tokens that are looked at)`."""
        measured = {
            "previous": weights.diagonal(-1),
            "same": weights.diagonal(),
            "next": weights.diagonal(1),
            "first": weights[:, 0],
            "</s>": weights[:, -1],
            "largest weight": weights.amax(dim=1),
            "entropy": torch.special.entr(weights),
        }
        for name, values in measured.items():
            self._totals[name] += values.sum().item()
            self._counts[name] += len(values)

    def mean(self, name: str) -> float:
        """Return the mean weight on one of `PLACES` over the tokens that have it, "largest weight" or "entropy".

        Entropies are in nats.
        """
        return self._totals[name] / max(self._counts[name], 1)


def looks_of_heads(translator: Translator, rows: EncodedPairs) -> dict[Head, Look]:
    """Measure what every head of a model looks at, along the given translations.

    Args:
        translator: The model's.
        rows: Sentences and their translations.
    """
    looks = {head: Look() for head in heads_of(translator.model)}
    for index in range(len(rows)):
        weights = attention_along(translator, rows[index])
        for head, look in looks.items():
            look.add(weights[head.kind][head.layer][head.number])
    return looks


def has_place(head: Head, place: str) -> bool:
    """Tell whether it means something that a head looks at a place."""
    return place not in NOT_THERE[head.kind]


def most_positional(looks: dict[Head, Look], kind: str) -> tuple[float, str, Head]:
    """Return the largest share of weight on one's own or a neighbouring place, the place, and the head."""
    return max(
        (look.mean(place), place, head)
        for head, look in looks.items()
        for place in PLACES[:3]
        if head.kind == kind and has_place(head, place)
    )


def sharpest(looks: dict[Head, Look], kind: str) -> Head:
    """Return the head of a kind whose largest weight is largest on average."""
    return max((head for head in looks if head.kind == kind), key=lambda head: looks[head].mean("largest weight"))
