"""Documents from the built-in corpus's grammar, with pronouns that only the sentences before decide.

The next one or two sentences about a person have the same subject, which Korean leaves out: 소녀는 사과를 먹었다. 책을
읽었다. (The girl ate the apple. She read the book.) Without context, nothing decides between he, she and they.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from heedful.messages_heed import wrong
from heedful_lab.korean_english.pairs import BUILTIN_SPLITS, _english, _hash, _korean, _sentences, _split
from heedful_lab.korean_english.patterns import Pattern
from heedful_lab.korean_english.phrases import PLURAL, PRONOUN_LEMMAS, STYLES

HE, SHE = ["boy", "man", "prince", "son", "uncle", "nephew"], ["girl", "woman", "princess", "daughter", "aunt"]
PRONOUNS = dict.fromkeys(HE, "he") | dict.fromkeys(SHE, "she")


def document_pairs(count: int, split: str = "train", seed: int = 1) -> Iterator[tuple[str, str, int]]:
    """Yield the Korean and English sentences of `count` documents, each with its document's number, from 1.

    Every sentence, with its subject, is in a split of the built-in corpus.
    """
    if split not in BUILTIN_SPLITS:
        raise wrong("split", f"be one of {', '.join(BUILTIN_SPLITS)}", repr(split))
    draw = Random(f"{seed} {split} documents").random
    sentences = _with_pronouns(each for each in _sentences(draw) if _split(_hash(_english(*each)), each[1]) == split)
    for document in range(1, count + 1):
        style = STYLES[int(draw() * 2)]
        for _ in range(2 + int(draw() * 2)):  # persons
            pronoun, number = "", 0
            for _ in range(2 + int(draw() * 2)):
                pattern, choices, own = next(sentences)
                if pronoun:
                    place = pattern.korean.index("subject")
                    choices[place] = replace(choices[place], korean=("", ""), english=pronoun, number=number)
                else:
                    pronoun, number = own, choices[pattern.korean.index("subject")].number
                choices[-1] = style
                yield " ".join(_korean(pattern, choices).split()), _english(pattern, choices), document


def _with_pronouns(sentences: Iterator[tuple[Pattern, list[Any]]]) -> Iterator[tuple[Pattern, list[Any], str]]:
    """Yield the statements about a person, or people, that a pronoun could name, with the pronoun."""
    for pattern, choices in sentences:
        if pattern.punctuation == "." and {"subject", "object"} <= {*pattern.korean} and "first" not in pattern.korean:
            subject = choices[pattern.korean.index("subject")]
            is_plural = subject.number == PLURAL and not {*subject.nouns} & PRONOUN_LEMMAS
            if pronoun := "they" if is_plural else PRONOUNS.get(subject.english.split()[-1], ""):
                yield pattern, choices, pronoun
