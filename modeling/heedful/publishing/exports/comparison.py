"""What `generate()` and an exported model make of the same sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.files import check_at_least

# A compared translation may have this many tokens more than the longest source.
MORE_THAN_SOURCE = 50
# The least mean share of tokens in common; a quantized model below it has lost what it learned.
LEAST_LIKENESS = 0.5


class Difference(NamedTuple):
    """One sentence for which an engine gave other tokens than `generate()`, and its number, from 0."""

    number: int
    sentence: str
    expected: Sequence[int]
    found: Sequence[int]


@dataclass(frozen=True)
class Comparison:
    """What `generate()` and an engine made of the same sentences.

    Attributes:
        sentences: How many were compared.
        differences: Those with other tokens, in their order.
    """

    sentences: int
    differences: tuple[Difference, ...]

    @property
    def likeness(self) -> float:
        """Share of tokens that the outputs have in common, the mean over the sentences: 1 where none differs."""
        matchers = (SequenceMatcher(None, each.expected, each.found, autojunk=False) for each in self.differences)
        return 1 - sum(1 - matcher.ratio() for matcher in matchers) / self.sentences


def refuse(comparisons: dict[str, Comparison], engine: str, quantization: str) -> None:
    """Raise a `ValueError` if an export in float32 gives other tokens, or one in another type has lost the model.

    Args:
        comparisons: What was compared, by the name of a search.
        engine: Name of the engine, for the message.
        quantization: Type of the weights.
    """
    for search, comparison in comparisons.items():
        if quantization == "float32" and comparison.differences:
            number, sentence, expected, found = comparison.differences[0]
            raise ValueError(
                f"The exported model's output differs from generate()'s for {len(comparison.differences)} of "
                f"{comparison.sentences} sentences, so that no folder is left. The first is sentence {number + 1}, "
                f"{sentence!r}: generate() gives tokens {list(expected)}, {engine} ({search}) tokens {list(found)}."
            )
        if comparison.likeness < LEAST_LIKENESS:
            raise ValueError(
                f"`quantization` {quantization} loses the model, so that no folder is left: its translations "
                f"({search}) have {100 * comparison.likeness:.0f} % of their tokens in common with generate()'s."
            )


def compare(sentences: Sequence[str], expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Comparison:
    """Compare what `generate()` and an engine made of sentences.

    Args:
        sentences: The sources.
        expected: The tokens of `generate()` for each sentence, `</s>` included and padding not.
        found: The tokens of the engine, likewise.
    """
    rows = enumerate(zip(sentences, expected, found, strict=True))
    differences = (Difference(number, *row) for number, row in rows if list(row[1]) != list(row[2]))
    return Comparison(len(sentences), tuple(differences))


def sentences_to_compare(path: str | Path | None = None, count: int = 500) -> list[str]:
    """Return the first sentences of a text file, or built-in Korean and English ones.

    The built-in sentences try a model of any language with tokens and lengths of real text.

    Args:
        path: A text file in UTF-8 with one sentence a line; blank lines are left out.
        count: The most sentences.

    Raises:
        ValueError: If the file holds no sentence or is not UTF-8, or `count` is below 1.
        FileNotFoundError: If there is no such file.
    """
    check_at_least(1, count=count)
    if path is None:
        pairs = korean_english_pairs("test", (count + 1) // 2)
        return [sentence for pair in pairs for sentence in (pair["ko"], pair["en"])][:count]
    try:
        # Only "\n" ends a line: str.splitlines would split at other characters too.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"`sentences` must be a text file in UTF-8, but {path} is not: {error}") from error
    sentences = [line.strip() for line in lines if line.strip()][:count]
    if not sentences:
        raise ValueError(f"`sentences` must hold a sentence to compare on, but {path} has none.")
    return sentences
