"""Nouns are asked for their adjectives: measured on sentences that can be checked by hand, and the study's table."""

from types import SimpleNamespace

import pytest
import torch

from heedful import Translator
from heedful.data.tokenizer_training import train_tokenizers
from heedful.studies.attention import questions
from heedful.studies.measures import Head
from helpers import tiny_model


@pytest.fixture(scope="module")
def translator():
    sentences = [text for pair in questions.described_pairs()[:50] for text in pair]
    tokenizers = train_tokenizers(sentences, sentences, vocab_size=400)
    return Translator(tiny_model(vocab_size=400, **tokenizers.special_ids()), tokenizers)


def test_adjectives_are_known_by_the_form_that_stands_before_a_noun():
    assert questions.adjectives()["용감한"] == "brave"
    assert questions.adjectives()["맛있는"] == "delicious"
    pairs = questions.described_pairs()
    assert len(pairs) > 100
    for source, target in pairs:
        found = [questions.adjectives()[word] for word in source.split()[:-1] if word in questions.adjectives()]
        assert found
        assert all(f" {english} " in target for english in found), (source, target)


def test_a_head_that_looks_at_the_token_before_asks_of_all_words_alike(translator, monkeypatch):
    def before(translator, pairs, kinds):
        length = len(translator.tokenizers.encode_source(pairs[0][:1])[0])
        heads = [Head("encoder", layer, head) for layer in (0, 1) for head in range(4)]
        yield dict.fromkeys(heads, torch.diag(torch.ones(length - 1), -1))

    monkeypatch.setattr(questions, "attention_by_head", before)
    monkeypatch.setattr(questions, "token_words", lambda _, ids: [*list(range(len(ids) - 1)), None])
    found = questions.questions_of_heads(translator, [("용감한 화가는 잔다.", "The brave painter sleeps.")])
    assert set(found.values()) == {(1.0, 1.0)}
    assert len(found) == 8


def test_translated_adjectives_are_counted_by_their_english(translator, monkeypatch):
    texts = ["The brave painter sleeps.", "The painter eats the big apple."]
    monkeypatch.setattr(translator, "translate", lambda sources: [[SimpleNamespace(text=text)] for text in texts])
    pairs = [("용감한 화가는 잔다.", ""), ("용감한 화가는 큰 사과를 먹는다.", "")]
    assert questions.translated_adjectives(translator, pairs) == pytest.approx(200 / 3)
