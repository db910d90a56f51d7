"""The built-in corpus: its grammar in both languages, its splits, and that it never changes."""

import hashlib
import unicodedata
from collections import Counter
from itertools import combinations, islice, pairwise, product
from math import prod
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful_lab.korean_english import conjugation
from heedful_lab.korean_english import pairs as corpus
from heedful_lab.korean_english.lexicon import add_ed, add_ing, add_s, lexicon
from heedful_lab.korean_english.pairs import BUILTIN_SPLITS, LARGEST_COUNTS, is_held_out, korean_english_pairs
from heedful_lab.korean_english.patterns import patterns
from heedful_lab.korean_english.phrases import PLAIN, POLITE
from heedful_lab.korean_english.predicates import copula_forms, korean_forms
from helpers import assert_error, assert_refused

NOUNS, VERBS, ADJECTIVES = lexicon()

# Of 20,000 pairs of "train" and 3,000 of the others: a change changes every result that was measured on the corpus.
CHECKSUMS = {
    "train": "c6c442b016cf1502e14193589d6369a1cc63e24e13fd4cc38f76259c0a41dbe8",
    "validation": "861d7fdabe2e3634809eafbbc4aae3aa852fb2e2b48b8da3df7dd087562ba7e9",
    "test": "650c7554df8ede2cdd0debd9233204c64f82562b02aab5d239d09c47ffc23004",
    "compositional": "5e448a395b2f6982648cb8f67ae7d5b0cc9e151e09c4f94833c5bbafd1ac87fa",
}
EXPECTED_FIRST = [
    {"ko": "과학자들은 왜 새로운 선풍기를 껐어요?", "en": "Why did the scientists turn off the new fan?"},
    {"ko": "너는 그들의 녹차를 좋아하니?", "en": "Do you like their green tea?"},
    {"ko": "소녀 다섯 명이 부엌에서 울 것이다.", "en": "Five girls will cry in the kitchen."},
]


@pytest.fixture(scope="module")
def train():
    return list(korean_english_pairs("train", 100_000))


@pytest.fixture(scope="module")
def others():
    return {split: list(korean_english_pairs(split, 3000)) for split in BUILTIN_SPLITS[1:]}


@pytest.fixture(scope="module")
def drawn():
    """Return sentences of all splits, before they are told apart."""
    return list(islice(corpus._sentences(Random(3).random), 50_000))


def test_verbs_and_adjectives_are_conjugated_as_in_the_table():
    lines = Path(__file__).with_name("conjugations.tsv").read_text(encoding="utf-8").splitlines()
    counts = Counter()
    for word, *forms in (line.split("\t") for line in lines if not line.startswith("#")):
        past, question = conjugation.past_stem(word) + "다", conjugation.question(word)
        if len(forms) == 5:
            made = [conjugation.plain_present(word), past, conjugation.prospective(word), question]
        else:
            made = [past, conjugation.attributive(word), question]
        assert [conjugation.infinitive(word), *made] == forms
        counts[len(forms)] += 1
    assert counts == {5: 39, 4: 18}  # verbs and adjectives


def test_tense_negation_and_style_are_built_on_the_stems():
    for found, expected in (
        (korean_forms("읽다", "progressive", "negative"), ("읽고 있지 않다", "읽고 있지 않아요")),
        (korean_forms("돕다", "future", "question"), ("도울 거니", "도울 거예요")),
        (korean_forms("크다", "present", "negative", adjective=True), ("크지 않다", "크지 않아요")),
        (korean_forms("놀다", "can", "negative"), ("놀 수 없다", "놀 수 없어요")),
        (copula_forms("의사", "present", "statement"), ("의사다", "의사예요")),
        (copula_forms("학생", "present", "statement"), ("학생이다", "학생이에요")),
        (copula_forms("의사", "past", "statement"), ("의사였다", "의사였어요")),
        (copula_forms("학생", "past", "negative"), ("학생이 아니었다", "학생이 아니었어요")),
    ):
        assert found == expected


@given(st.sampled_from("가각간강낮배벌소솥읽칼") | st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3))
def test_a_syllable_comes_apart_and_together_again(syllable):
    initial, vowel, final = conjugation.split_syllable(syllable)
    assert conjugation.join_syllable(initial, vowel, final) == syllable
    decomposed = unicodedata.normalize("NFD", syllable)
    assert (len(decomposed) == 3) == (final != "")


@given(st.sampled_from(NOUNS))
def test_particles_follow_the_final_consonant(noun):
    letters = unicodedata.normalize("NFD", noun.korean[-1])
    closed = len(letters) == 3
    for particle, forms in {"topic": "은는", "subject": "이가", "object": "을를", "and": "과와"}.items():
        assert conjugation.attach(noun.korean, particle) == noun.korean + forms[0 if closed else 1]
    after_consonant = closed and letters[2] != "\u11af"  # ㄹ
    assert conjugation.attach(noun.korean, "toward") == noun.korean + ("으로" if after_consonant else "로")


def test_english_inflection_follows_spelling():
    for inflect, words, expected in (
        (add_s, "box city toy go watch have", "boxes cities toys goes watches has"),
        (add_ed, "hug study play like open fix", "hugged studied played liked opened fixed"),
        (add_ing, "cut make read draw visit", "cutting making reading drawing visiting"),
    ):
        assert " ".join(map(inflect, words.split())) == expected


def test_the_lexicon_is_large_no_word_is_ambiguous_and_every_class_that_one_asks_for_has_nouns():
    assert (len(NOUNS) >= 200, len(VERBS) >= 60, len(ADJECTIVES) >= 40) == (True, True, True)
    for language in ("korean", "english"):
        counts = Counter(getattr(word, language) for word in (*NOUNS, *VERBS, *ADJECTIVES))
        assert [word for word, count in counts.items() if count > 1] == []
    known = set().union(*(noun.classes for noun in NOUNS))
    asked = [name for verb in VERBS for names in (verb.objects, *verb.combines.values()) for name in names]
    asked += [name for adjective in ADJECTIVES for name in adjective.describes]
    assert set(asked) - known == set()


def test_no_two_predicates_share_a_conjugated_form():
    owners: dict[str, set[str]] = {}
    tenses, kinds = ("present", "past", "future"), ("statement", "question")
    for word, tense, kind in product([*VERBS, *ADJECTIVES], tenses, kinds):
        for text in korean_forms(word.korean, tense, kind, adjective=word in ADJECTIVES):
            owners.setdefault(text, set()).add(word.korean)
    assert {text: words for text, words in owners.items() if len(words) > 1} == {}


def test_the_same_arguments_give_the_same_pairs_and_another_seed_gives_others():
    first = list(korean_english_pairs("test", 200, seed=7))
    assert first == list(korean_english_pairs("test", 200, seed=7))
    assert first != list(korean_english_pairs("test", 200, seed=8))
    for split in BUILTIN_SPLITS:  # a smaller count is a prefix of a larger one
        assert list(korean_english_pairs(split, 100)) == list(korean_english_pairs(split, 300))[:100]


def test_the_pairs_never_change(train, others):
    assert train[:3] == EXPECTED_FIRST
    digests = {}
    for split, pairs in {"train": train[:20_000], **others}.items():
        text = "".join(f"{pair['ko']}\t{pair['en']}\n" for pair in pairs)
        digests[split] = hashlib.sha256(text.encode()).hexdigest()
    assert digests == CHECKSUMS


def test_pairs_are_distinct_and_no_sentence_is_in_two_splits_in_either_language(train, others):
    assert len({pair["ko"] for pair in train}) == len(train) == 100_000
    for language in ("ko", "en"):
        texts = [{pair[language] for pair in pairs} for pairs in (train, *others.values())]
        assert all(one.isdisjoint(other) for one, other in combinations(texts, 2))


def test_a_korean_sentence_has_one_english_and_an_english_one_at_most_one_korean_in_a_style(drawn):
    english_of, korean_of = {}, {}
    for pattern, choices in drawn:
        korean, english = corpus._korean(pattern, choices), corpus._english(pattern, choices)
        assert english_of.setdefault(korean, english) == english
        assert korean_of.setdefault((english, choices[-1]), korean) == korean


def test_every_pattern_and_both_styles_occur_and_every_sentence_is_in_the_split_of_its_combinations(drawn):
    assert {pattern.name for pattern, _ in drawn} == {pattern.name for pattern in patterns()}
    assert {choices[-1] for _, choices in drawn} == {PLAIN, POLITE}
    splits = {True: set(), False: set()}  # by whether a combination is held out
    for pattern, choices in drawn:
        split = corpus._split(corpus._hash(corpus._english(pattern, choices)), choices)
        splits[any(is_held_out(*pair) for pair in corpus.combinations_of(choices))].add(split)
    assert splits == {True: {"compositional"}, False: {"train", "validation", "test"}}


def test_no_held_out_combination_is_in_the_training_text(train):
    # Read from the text, not from the grammar.
    drawing = {form for tense in ("present", "past", "future") for form in korean_forms("그리다", tense, "statement")}
    drawn_words: set[str] = set()
    neighbours: set[tuple[str, str]] = set()
    for pair in train:
        words = pair["ko"][:-1].split()
        neighbours.update(pairwise(words))
        if words[-1] in drawing or " ".join(words[-2:]) in drawing:
            drawn_words.update(words)
    objects = {noun.korean: conjugation.attach(noun.korean, "object") for noun in NOUNS}
    held_out = {objects[noun] for noun in objects if is_held_out(noun, "그리다")}
    assert len(held_out) >= 3
    assert len(drawn_words & set(objects.values())) > 20
    assert drawn_words & held_out == set()
    described = {True: 0, False: 0}  # by whether the combination is held out
    for adjective, noun in product(ADJECTIVES, NOUNS):
        marked = {conjugation.attach(noun.korean, particle) for particle in ("topic", "subject", "object")}
        found = {(conjugation.attributive(adjective.korean), word) for word in marked} & neighbours
        described[is_held_out(noun.korean, adjective.korean)] += len(found)
    assert described[True] == 0
    assert described[False] > 1000


def test_every_word_of_compositional_sentences_is_in_training(train, others):
    known, words = (
        {word for pair in pairs for word in pair["en"][:-1].lower().split()}
        for pairs in (train, others["compositional"])
    )
    assert words - known == set()
    # Korean words carry particles, so it is the noun or the stem that must be known.
    text = " " + " ".join(pair["ko"] for pair in train)
    nouns = sorted((noun.korean for noun in NOUNS), key=len, reverse=True)
    for word in {word for pair in others["compositional"] for word in pair["ko"][:-1].split()}:
        if f" {word}" not in text:
            assert any(word.startswith(noun) and f" {noun}" in text for noun in nouns), word


def test_every_word_of_the_lexicon_is_frequent_in_training(train):
    known: Counter[str] = Counter()
    for pair in train:
        words = pair["en"][:-1].lower().replace("'s", "").split()
        known.update(words)
        known.update(" ".join(two) for two in pairwise(words))
    forms = [{word.english} for word in (*NOUNS, *ADJECTIVES)] + [{verb.english, verb.past} for verb in VERBS]
    assert [words for words in forms if sum(known[word] for word in words) < 50] == []


def test_every_pattern_makes_the_example_of_its_row():
    for pattern in patterns():
        found = {text for row in pattern.rows for text in _sentences_that_begin(pattern, row, pattern.example)}
        assert pattern.example in found, pattern.name


def test_there_are_more_than_a_billion_pairs():
    # At least: of all ways to fill the slots of a row, those in which two given slots have no noun in common, for
    # every two slots. Different choices make different sentences, as the next test has it.
    known: dict[int, Counter] = {}
    total = 0
    for row in (row for pattern in patterns() for row in pattern.rows):
        for tree in row[:-1]:
            if id(tree) not in known:
                known[id(tree)] = Counter(noun for leaf in _all_leaves(tree) for noun in [None, *leaf.nouns])
        counts = [known[id(tree)] for tree in row[:-1]]
        same = sum(
            sum(one[noun] * other[noun] for noun in one if noun) / (one[None] * other[None])
            for one, other in combinations(counts, 2)
        )
        total += prod(count[None] for count in counts) * len(row[-1]) * max(1 - same, 0)
    assert total > 1_000_000_000


def test_different_choices_make_different_sentences():
    # Slot by slot: the leaves of a slot differ, and any two rows of a pattern differ in some slot altogether.
    texts: dict[int, frozenset] = {}
    for pattern in patterns():
        for tree in (tree for row in pattern.rows for tree in row[:-1] if id(tree) not in texts):
            leaves = [leaf.korean for leaf in _all_leaves(tree)]
            texts[id(tree)] = frozenset(leaves)
            assert len(texts[id(tree)]) == len(leaves)
        for one, other in combinations(pattern.rows, 2):
            pairs = zip(one[-2::-1], other[-2::-1], strict=True)
            assert any(texts[id(a)].isdisjoint(texts[id(b)]) for a, b in pairs), pattern.name


def test_a_wrong_argument_and_a_word_that_is_not_korean_are_named_at_once():
    cases = [
        (("dev", 1), r"`split` must be one of train, validation, test, compositional, but is 'dev' instead"),
        (("train", 0), r"`count` must be between 1 and 5,000,000 for the split 'train', but is 0 instead"),
        (("test", LARGEST_COUNTS["test"] + 1), r"`count` must be between 1 and 500,000 .* but is 500001 instead"),
    ]
    assert_refused(cases, lambda given: korean_english_pairs(*given))
    assert_error(r"`syllable` must be one Hangul syllable, but is 'k' instead", conjugation.attach, "book", "object")
    assert_error(r"`dictionary_form` must end in 다, but is '먹어' instead", conjugation.infinitive, "먹어")


def _all_leaves(tree):
    if type(tree) is not tuple:
        return [tree]
    return [leaf for child in tree for leaf in _all_leaves(child)]


def _sentences_that_begin(pattern, row, text):
    """Return the pairs "Korean English" of a row whose Korean begins as the text does."""
    found = [([], "")]
    for tree in row[:-1]:
        found = [
            ([*choices, leaf], korean)
            for choices, before in found
            for leaf in _all_leaves(tree)
            if text.startswith(korean := f"{before} {leaf.korean[PLAIN]}".strip())
        ]
    return {
        f"{korean}{pattern.punctuation} {corpus._english(pattern, [*choices, PLAIN])}" for choices, korean in found
    }
