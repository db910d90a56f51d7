"""Korean sentences with other nouns, so that a model learns the ends of words that its texts lack."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from random import Random

from heedful.files import read_lines
from heedful_lab.korean_english.conjugation import final_consonant

NOUN = re.compile("[가-힣]{2,6}")
PARTICLES = re.compile("(을|를|이|가|은|는|에|의|에서|에게|으로|로|와|과|도|만|부터|까지|랑|이랑|하고)?")
SHARE = 0.7  # share of known nouns that are replaced


class KoreanNouns:
    """Nouns that replace each other.

    A particle depends on the end of its noun: 을 follows a consonant, 를 a vowel, and 로 also ㄹ. So the new noun has
    the same kind of ending. Nouns have two to six Korean syllables. A slash and the text after it are ignored, as in
    hunspell's dictionaries.
    """

    def __init__(self, words: Iterable[str]):
        composed = (unicodedata.normalize("NFC", word).partition("/")[0].strip() for word in words)
        self._by_ending: dict[str, list[str]] = defaultdict(list)
        self._known = dict.fromkeys(word for word in composed if NOUN.fullmatch(word))
        for noun in self._known:
            self._by_ending[_ending(noun)].append(noun)

    def __len__(self) -> int:
        return len(self._known)

    def replaced(self, text: str, random: Random) -> str:
        """Return a text with most of its nouns replaced, and one space between words."""
        return " ".join(self._other(word, random) if random.random() < SHARE else word for word in text.split())

    def _other(self, word: str, random: Random) -> str:
        for end in range(len(word), 1, -1):
            noun, particle = word[:end], word[end:]
            if noun in self._known and PARTICLES.fullmatch(particle):
                return random.choice(self._by_ending[_ending(noun)]) + particle
        return word


def read_nouns(path: str) -> KoreanNouns:
    """Read nouns from a UTF-8 file, one per line; raise a `ValueError` if there are none."""
    nouns = KoreanNouns(read_lines(path, "nouns"))
    if not nouns:
        raise ValueError(f"`nouns` must be a file with a Korean noun in each line, but {path} has none.")
    return nouns


def _ending(noun: str) -> str:
    """Return a noun's ending: "" for a vowel, "ㄹ", or "consonant"."""
    final = final_consonant(noun)
    return final if final in ("", "ㄹ") else "consonant"
