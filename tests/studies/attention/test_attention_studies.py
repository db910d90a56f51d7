"""What the studies of dilution, scaling and questions measure, on what can be checked by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful import HeedConfig, HeedForConditionalGeneration, Translator
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.studies.attention import dilution, questions, scaling
from heedful.studies.catalogue import find_study
from heedful.studies.measures import Head
from heedful.studies.study import Lab
from helpers import tiny_model


def test_one_score_of_three_keeps_the_known_weights():
    for others, count, percent in ((0, 10, "69.1"), (0, 100, "16.9"), (1, 10, "45.1"), (1, 100, "6.9")):
        assert f"{100 * dilution.kept_weight(3, others, count):.1f}" == percent


@given(st.floats(-20, 20), st.floats(-20, 20), st.integers(2, 300))
def test_the_kept_weight_is_torchs_softmax(score, others, count):
    scores = torch.full((count,), others, dtype=torch.float64)
    scores[0] = score
    assert dilution.kept_weight(score, others, count) == pytest.approx(scores.softmax(0)[0].item(), rel=1e-9)


def test_entropy_over_equal_scores_grows_by_one_and_of_a_sharp_head_not_at_all():
    spread = [(n, math.log(n)) for n in (3, 10, 40)]
    assert dilution.growth(spread) == pytest.approx(1)
    assert dilution.growth([(n, 0.7) for n, _ in spread]) == pytest.approx(0)
    assert dilution.growth([(n, 0.25 * value) for n, value in spread]) == pytest.approx(0.25)
    assert dilution.by_length([(10, 1.0), (10, 3.0), (80, 4.0)]) == [(10, 2.0), (80, 4.0)]


def test_joined_texts_are_sentences_one_after_the_other():
    singles = [pair["en"] for pair in korean_english_pairs("test", 6, 2)]
    texts = [target for _, target in dilution.texts("test", (1, 2), 4, 2)]
    assert texts == [singles[0], " ".join(singles[1:3]), singles[3], " ".join(singles[4:6])]


def test_entropies_are_those_of_the_weights_row_by_row(tmp_path, monkeypatch):
    """A model whose queries are zero looks at all it may alike, in decoder rows at one more each."""
    monkeypatch.setattr(dilution, "PAIRS", {"train": 300, "validation": 5, "test": 4})
    training = dilution.train_on_texts(Lab(find_study("dilution"), updates=1, folder=tmp_path / "trainings"))
    translator = training.translator()
    for name, weight in translator.model.named_parameters():
        if "q_proj" in name:
            torch.nn.init.zeros_(weight)
    training.translator = lambda: translator
    rows = dilution.attention_rows(training, dilution.texts("test", (2,), 2, 1))
    for points in rows.values():
        assert [value for _, value in points] == pytest.approx([math.log(n) for n, _ in points], abs=1e-5)
    assert {n for n, _ in rows["decoder", 0, 0]} >= set(range(1, 10))


def test_products_have_the_variance_d_k_and_saturate_with_the_width_and_scaled_ones_have_one_and_do_not():
    narrow, wide = (scaling.softmax_of_random(d_k, False, 2) for d_k in (16, 1024))
    assert (narrow.variance, wide.variance) == (pytest.approx(16, rel=0.03), pytest.approx(1024, rel=0.03))
    assert wide.largest > 0.9 > narrow.largest
    assert wide.entropy < 0.2 * narrow.entropy
    assert wide.gradient < 0.3 * narrow.gradient
    narrow, wide = (scaling.softmax_of_random(d_k, True, 2) for d_k in (16, 1024))
    assert (narrow.variance, wide.variance) == (pytest.approx(1, rel=0.03), pytest.approx(1, rel=0.03))
    assert wide.largest == pytest.approx(narrow.largest, abs=0.02)
    assert wide.gradient == pytest.approx(narrow.gradient, abs=0.02)


def test_the_derivatives_norm_is_autograds(monkeypatch):
    monkeypatch.setattr(scaling, "QUERIES", 1)
    monkeypatch.setattr(scaling, "KEYS", 5)
    found = scaling.softmax_of_random(8, True, 3)
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 1, 8, generator=generator)
    keys = torch.cat([torch.randn(1, 1, 8, generator=generator) for _ in range(5)], dim=1)
    scores = (query @ keys.transpose(1, 2))[0, 0].double() / math.sqrt(8)
    derivative = torch.autograd.functional.jacobian(lambda values: values.softmax(-1), scores)
    assert found.gradient == pytest.approx(derivative.norm().item(), rel=1e-5)
    assert found.largest == pytest.approx(scores.softmax(-1).max().item(), rel=1e-5)


@pytest.mark.parametrize("d_k", scaling.TRAINED_WIDTHS)
@pytest.mark.parametrize("scoring", scaling.SCORINGS)
def test_the_trained_models_have_queries_of_the_width_and_of_variance_one(scoring, d_k):
    """Fresh ones, at inputs of variance 1: so that q·k has variance d_k."""
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), scaling.D_MODEL // d_k)
    sizes = {"d_model": scaling.D_MODEL, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 10}
    model = HeedForConditionalGeneration(HeedConfig(**sizes, **heads, attention_scoring=scoring))
    attention = model.get_encoder().layers[0].self_attn
    assert attention.d_k == d_k
    assert attention.scaling == (d_k**-0.5 if scoring == "scaled_dot" else 1)
    queries = attention.q_proj(torch.randn(2000, scaling.D_MODEL))
    assert queries.var().item() == pytest.approx(1, rel=0.05)


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
