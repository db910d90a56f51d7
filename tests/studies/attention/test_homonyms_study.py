from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from heedful.studies.attention.homonyms import (
    WORDS,
    Meaning,
    sentences,
    separation,
    split_meanings,
    translated_meanings,
)


def test_a_verb_or_a_modifier_decides_the_meaning():
    word = WORDS[0]
    pear, _, belly = (sentences(word["form"], meaning) for meaning in word["meanings"])
    assert ("나는 배를 먹었다.", "I ate the pear.") in pear[0]
    assert ("어제 소녀는 배를 문질렀다.", "The girl rubbed her belly yesterday.") in belly[0]
    assert ("지난주에 의사는 잘 익은 배를 기억했다.", "The doctor remembered the ripe pear last week.") in pear[6]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word["form"])
def test_nothing_else_tells_the_meanings_apart(word):
    form, rests = f" {word['form']} ", []
    for meaning in word["meanings"]:
        rest, deciding = set(), [korean for korean, _ in (*meaning["verbs"], *meaning["modifiers"])]
        for decides, own in zip(deciding, sentences(word["form"], meaning), strict=True):
            assert all(source.count(form) == 1 for source, _ in own)
            assert all(f" {decides}{form}" in source or f"{form}{decides}." in source for source, _ in own)
            rest |= {source.replace(f" {decides}{form}", form).replace(f"{form}{decides}.", form) for source, _ in own}
        rests.append((rest, set(deciding)))
    (first, one), (second, other) = rests[:2]
    assert first == second
    assert one.isdisjoint(other)


def test_held_out_sentences_are_not_learned_from_and_meanings_have_equally_many():
    meanings = split_meanings(WORDS[0], seed=1)
    assert [meaning.noun for meaning in meanings] == ["pear", "ship", "belly"]
    for meaning in meanings:
        assert [(len(own), len(held)) for own, held in zip(meaning.train, meaning.test, strict=True)] == [(40, 10)] * 9
        assert len({pair for some in (*meaning.train, *meaning.test) for pair in some}) == 9 * 50
    assert split_meanings(WORDS[0], seed=1) == meanings != split_meanings(WORDS[0], seed=2)


def test_one_vector_cannot_be_told_apart_and_two_can():
    torch.manual_seed(0)
    same, one, other = torch.randn(3, 8)
    states = torch.stack([torch.stack([same, own]).repeat(2, 3, 1, 1) for own in (one, other)])
    states[1, :, :, 0] += 2e-3 * torch.randn(8)  # less than what counts
    before, after = separation(states, 2 * states)
    assert tuple(before) == pytest.approx((0.5, 0.5, 1, 1), abs=1e-4)
    cosine = torch.cosine_similarity(one, other, dim=0).item()
    assert tuple(after) == pytest.approx((1, 1, 1, cosine), abs=1e-5)
    assert separation(states, states.flip(0))[1][:2] == (0, 0)


def test_what_a_meaning_has_in_common_is_told_of_unseen_words_and_what_one_word_has_is_not():
    torch.manual_seed(0)
    own = torch.randn(2, 4, 1, 1, 50).expand(2, 4, 3, 1, 50)  # of each deciding word
    (layer,) = separation(own, own)
    assert layer.seen == 1
    flat = own.reshape(2, 12, 50)
    cosines = [torch.cosine_similarity(one, other, dim=0) for each in flat for one, other in combinations(each, 2)]
    assert layer.within == pytest.approx(float(torch.stack(cosines).mean()), abs=1e-5)
    common = torch.randn(2, 1, 1, 1, 50).expand(2, 4, 3, 1, 50)
    (layer,) = separation(own + 3 * common, own + 3 * common)
    assert (layer.seen, layer.unseen) == (1, 1)
    # A centroid without the deciding word is the mean of the others'.
    near = own.clone()
    near[0, 0], near[1, 0] = own[1, 1], own[0, 1]
    (layer,) = separation(near, near)
    assert layer.unseen < 1


def test_translations_are_right_wrong_or_neither():
    said = {"a": "I ate the pear.", "b": "I ate the ship.", "c": "I ate the pears."}
    translator = SimpleNamespace(translate=lambda texts: [[SimpleNamespace(text=said[text])] for text in texts])
    meanings = [Meaning("pear", [], [[("a", ""), ("b", "")], [("c", "")]]), Meaning("ship", [], [[("b", "")]])]
    assert translated_meanings(translator, meanings) == (2 / 4, 1 / 4)
