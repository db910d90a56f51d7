"""Korean particles and conjugation by rule, from the dictionary form.

Unicode orders all 11,172 Hangul syllables by initial consonant, vowel and final consonant (받침), so arithmetic
takes them apart.
"""

from functools import cache

FIRST_SYLLABLE = ord("가")
LAST_SYLLABLE = ord("힣")
VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
FINALS = ["", *"ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ"]
BRIGHT_VOWELS = "ㅏㅑㅗ"

# A stem's end gives its class, but not whether it is irregular: these are the common exceptions.
REGULAR: dict[str, tuple[str, ...]] = {
    "하": (),
    "르": ("따르", "치르", "들르"),
    "ㅂ": ("입", "잡", "좁", "접", "씹", "뽑", "꼽", "업", "집"),
    "ㅎ": ("좋", "넣", "놓", "쌓", "낳", "찧", "땋"),
}
IRREGULAR = {"ㄷ": ("듣", "걷", "묻", "싣", "깨닫"), "ㅅ": ("짓", "붓", "낫", "잇", "긋", "젓")}
ROUND_B = ("돕", "곱")  # their ㅂ becomes 오, not 우, before 아

BEFORE_VOWEL = {"ㅂ": "", "ㄷ": "ㄹ", "ㅅ": ""}  # changes of irregular final consonants
# Vowels that contract with a following 어 or 아, and the results.
CONTRACTIONS = dict(zip("ㅏㅓㅐㅔㅕㅗㅜㅣㅚㅡ", "ㅏㅓㅐㅔㅕㅘㅝㅕㅙㅓ", strict=True))


def split_syllable(syllable: str) -> tuple[int, str, str]:
    """Return the initial consonant's number, the vowel, and the final consonant or ""."""
    if len(syllable) != 1 or not FIRST_SYLLABLE <= ord(syllable) <= LAST_SYLLABLE:
        raise ValueError(f"`syllable` must be one Hangul syllable, but is {syllable!r} instead.")
    initial, rest = divmod(ord(syllable) - FIRST_SYLLABLE, len(VOWELS) * len(FINALS))
    vowel, final = divmod(rest, len(FINALS))
    return initial, VOWELS[vowel], FINALS[final]


def join_syllable(initial: int, vowel: str, final: str = "") -> str:
    """Join a Hangul syllable: the inverse of `split_syllable`."""
    return chr(FIRST_SYLLABLE + (initial * len(VOWELS) + VOWELS.index(vowel)) * len(FINALS) + FINALS.index(final))


def final_consonant(word: str) -> str:
    """Return the final consonant of the last syllable, or ""."""
    return split_syllable(word[-1])[2]


def with_final(word: str, final: str) -> str:
    """Return a word with another final consonant in its last syllable."""
    initial, vowel, _ = split_syllable(word[-1])
    return word[:-1] + join_syllable(initial, vowel, final)


PARTICLES = {
    "topic": ("은", "는"),
    "subject": ("이", "가"),
    "object": ("을", "를"),
    "and": ("과", "와"),
    "together": ("과 함께", "와 함께"),
    "toward": ("으로", "로"),  # 로 after ㄹ too
    "copula": ("이", ""),  # 이다's 이
}


def attach(word: str, particle: str) -> str:
    """Attach one of `PARTICLES` in the form for the noun's last syllable, or Korean text such as 에서."""
    after_consonant, after_vowel = PARTICLES[particle] if particle.isascii() else (particle, particle)
    open_finals = ("", "ㄹ") if particle == "toward" else ("",)
    return word + (after_vowel if final_consonant(word) in open_finals else after_consonant)


def stem(dictionary_form: str) -> str:
    """Return a verb's or adjective's stem: the part before 다."""
    if len(dictionary_form) < 2 or not dictionary_form.endswith("다"):
        raise ValueError(f"`dictionary_form` must end in 다, but is {dictionary_form!r} instead.")
    return dictionary_form[:-1]


def irregularity(stem_: str) -> str:
    """Return a stem's irregular class (하, 르, or the changing consonant ㅂ, ㄷ, ㅅ, ㅎ), or "" if regular."""
    kind = stem_[-1] if stem_.endswith(("하", "르")) else final_consonant(stem_)
    if kind in REGULAR:
        return "" if stem_.endswith(REGULAR[kind]) else kind
    return kind if stem_.endswith(IRREGULAR.get(kind, ())) else ""


@cache
def infinitive(dictionary_form: str) -> str:
    """Return the form in 아 or 어 (먹어, 가, 해, 도와, 빨개), the base of 요 and of the past's ㅆ."""
    root = stem(dictionary_form)
    kind = irregularity(root)
    initial, vowel, final = split_syllable(root[-1])
    if kind == "하":
        return root[:-1] + "해"
    if kind == "르":  # 고르다 골라, 부르다 불러
        bright = split_syllable(root[-2])[1] in BRIGHT_VOWELS
        return with_final(root[:-1], "ㄹ") + ("라" if bright else "러")
    if kind == "ㅂ":
        return with_final(root, "") + ("와" if root.endswith(ROUND_B) else "워")
    if kind == "ㅎ":  # 빨갛다 빨개, 하얗다 하얘
        return root[:-1] + join_syllable(initial, "ㅒ" if vowel in "ㅑㅕ" else "ㅐ")
    if kind in BEFORE_VOWEL:
        root = with_final(root, BEFORE_VOWEL[kind])
    elif final == "" and vowel in CONTRACTIONS:
        contracted = CONTRACTIONS[vowel]
        if vowel == "ㅡ" and len(root) > 1 and split_syllable(root[-2])[1] in BRIGHT_VOWELS:
            contracted = "ㅏ"  # 바쁘다 바빠, but 쓰다 써
        return root[:-1] + join_syllable(initial, contracted)
    return root + ("아" if vowel in BRIGHT_VOWELS else "어")


def past_stem(dictionary_form: str) -> str:
    """Return the past stem: 먹었, 갔, 했, 도왔, 빨갰."""
    return with_final(infinitive(dictionary_form), "ㅆ")


def _with_eu_ending(dictionary_form: str, final: str) -> str:
    """Add an ending: ㄴ or ㄹ after a vowel, 은 or 을 after a consonant."""
    root = stem(dictionary_form)
    kind = irregularity(root)
    if final_consonant(root) in ("", "ㄹ") or kind == "ㅎ":
        return with_final(root, final)
    changed = with_final(root, BEFORE_VOWEL[kind]) if kind in BEFORE_VOWEL else root
    return changed + with_final("우" if kind == "ㅂ" else "으", final)


def prospective(dictionary_form: str) -> str:
    """Return the form in (으)ㄹ for the future and "can": 먹을, 갈, 만들, 들을, 도울."""
    return _with_eu_ending(dictionary_form, "ㄹ")


def attributive(dictionary_form: str) -> str:
    """Return an adjective's form before a noun: 큰, 작은, 긴, 무거운, 빨간, 맛있는."""
    root = stem(dictionary_form)
    return root + "는" if root.endswith(("있", "없")) else _with_eu_ending(dictionary_form, "ㄴ")


def plain_present(dictionary_form: str) -> str:
    """Return a verb's plain present: 먹는다, 간다, 만든다. Adjectives use the dictionary form."""
    root = stem(dictionary_form)
    return with_final(root, "ㄴ") + "다" if final_consonant(root) in ("", "ㄹ") else root + "는다"


def question(dictionary_form: str) -> str:
    """Return the plain question in 니: 먹니, 가니, 만드니."""
    root = stem(dictionary_form)
    return (with_final(root, "") if final_consonant(root) == "ㄹ" else root) + "니"
