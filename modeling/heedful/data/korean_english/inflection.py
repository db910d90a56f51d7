"""English plurals and verb forms by rule, for the built-in corpus; irregular forms are given by its lexicon."""

CONSONANTS = "bcdfghjklmnpqrstvwxz"
HISSING = ("s", "x", "z", "ch", "sh")


def add_s(word: str) -> str:
    """Add the s of a plural or of the third person: boxes, parties, goes, plays."""
    if word == "have":
        return "has"
    if word.endswith(HISSING) or word == "go":
        return word + "es"
    if word[-1] == "y" and word[-2] in CONSONANTS:
        return word[:-1] + "ies"
    return word + "s"


def _doubles(word: str) -> bool:
    """Tell whether the last consonant is doubled: one syllable that ends in one vowel letter and one consonant."""
    vowels = [letter in "aeiou" for letter in word]
    return sum(vowels) == 1 and len(word) > 2 and vowels[-2] and word[-1] in CONSONANTS and word[-1] not in "wx"


def add_ed(word: str) -> str:
    """Form a regular past: opened, washed, hugged, studied, liked."""
    if word.endswith("e"):
        return word + "d"
    if word[-1] == "y" and word[-2] in CONSONANTS:
        return word[:-1] + "ied"
    return word + (word[-1] if _doubles(word) else "") + "ed"


def add_ing(word: str) -> str:
    """Form the progressive: opening, making, cutting."""
    if word.endswith("e") and not word.endswith("ee"):
        return word[:-1] + "ing"
    return word + (word[-1] if _doubles(word) else "") + "ing"


def inflect_first(phrase: str, inflect) -> str:
    """Inflect the first word of a verb of several words: turn on, turns on."""
    first, space, rest = phrase.partition(" ")
    return inflect(first) + space + rest
