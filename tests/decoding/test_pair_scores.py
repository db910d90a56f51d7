"""Scores of given pairs: what they are, what they do not depend on, and how they relate to others."""

import gzip
import itertools
import json
import math
from functools import partial

import pytest
import torch

from guides import assert_named
from heedful import Translator
from heedful.data.tokenizer_training import train_tokenizers
from helpers import assert_error, assert_refused, tiny_model, tiny_rnn
from memorised import saved_in


@pytest.fixture(scope="module")
def recurrent(tokenizers):
    return tiny_rnn(vocab_size=290, **tokenizers.special_ids())


@pytest.fixture(params=["transformer", "recurrent"])
def translator(request, model, recurrent, tokenizers) -> Translator:
    return Translator(model if request.param == "transformer" else recurrent, tokenizers)


@pytest.fixture
def mixed(pairs) -> list[tuple[str, str]]:
    """Right pairs, wrong ones, and an empty side, of many lengths."""
    texts = list(pairs.values())
    odd = [("", "Yes."), ("네.", ""), ("네.", "No! " * 8 + "No!")]
    return [*pairs.items(), *zip(pairs, reversed(texts), strict=True), *odd]


def test_a_score_is_the_log_probability_of_each_token_of_the_target(translator, tokenizers, mixed):
    for (source, target), found in zip(mixed, translator.score_pairs(mixed), strict=True):
        labels = torch.tensor(tokenizers.encode_target([target]))
        logits = translator.model(input_ids=torch.tensor(tokenizers.encode_source([source])), labels=labels).logits
        expected = logits.log_softmax(dim=-1).gather(2, labels[..., None]).flatten().tolist()
        assert found.token_ids == tuple(labels[0].tolist())
        assert found.token_scores == pytest.approx(expected, abs=1e-5)
        assert found.log_probability == pytest.approx(sum(expected), abs=1e-4)
        assert found.per_token == pytest.approx(sum(expected) / labels.shape[1], abs=1e-5)
        assert "".join(found.tokens).replace("▁", " ").replace("…", "") == target + "</s>"


def test_scores_do_not_depend_on_the_batch_its_padding_or_the_rows_read_together(translator, mixed, monkeypatch):
    alone = list(translator.score_pairs(mixed, token_budget=1))
    monkeypatch.setattr("heedful.decoding.engines.LOGITS_BUDGET", 12_000)
    for budget, rows in itertools.product((24, 60, 8192), (1, 5, 4096)):
        for one, other in zip(alone, translator.score_pairs(mixed, token_budget=budget, chunk_size=rows), strict=True):
            assert one.token_ids == other.token_ids
            assert one.token_scores == pytest.approx(other.token_scores, abs=1e-5)
    assert list(translator.score_pairs(reversed(mixed), token_budget=1, chunk_size=3)) == alone[::-1]  # to the bit


@pytest.mark.parametrize(("engine", "num_beams"), itertools.product(("native", "generate"), (1, 3)))
def test_a_translations_score_is_its_pairs(model, tokenizers, pairs, monkeypatch, engine, num_beams):
    monkeypatch.setattr(model.generation_config, "length_penalty", 0.6)
    translator = Translator(model, tokenizers, engine=engine)
    translations = [best for (best,) in translator.translate(list(pairs), num_beams=num_beams)]
    scores = translator.score_pairs(zip(pairs, (best.text for best in translations), strict=True))
    for translation, score in zip(translations, scores, strict=True):
        assert score.token_ids == translation.token_ids
        assert score.log_probability / len(score.tokens) ** 0.6 == pytest.approx(translation.score, abs=1e-4)


def test_pairs_that_cannot_be_scored_are_named_and_settings_that_would_be_ignored(model, tokenizers, pairs):
    translator = Translator(model, tokenizers)
    settings = [
        ({"token_budget": 0}, "`token_budget` must be at least 1"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1"),
        ({"target_language": "fr"}, "`target_language` must be left out for a model without tags"),
    ]
    assert_refused(settings, lambda given: translator.score_pairs(pairs.items(), **given))
    wrong = [(pair, "Pair 2 must be a source and a target") for pair in ("ab", ("a",), ("a", None), ("a", "b", "c"))]
    wrong.append((("a", "\ud800"), "must be Unicode"))
    assert_refused(wrong, lambda pair: list(translator.score_pairs([("a", "b"), pair], chunk_size=1)))
    message = "`engine`, `precision` and `ensemble` must be left out, because"
    assert_error(message, Translator(model, tokenizers, precision="int8").score_pairs, [])


@pytest.mark.parametrize("side", [0, 1])
def test_a_pair_that_is_too_long_is_told_with_its_number(model, tokenizers, monkeypatch, side):
    monkeypatch.setattr(model.config, "max_position_embeddings", 12)
    monkeypatch.setattr(model.config, "position_encoding", "learned")
    score = partial(Translator(model, tokenizers).score_pairs, chunk_size=1)
    pairs = [("네.", "Yes."), tuple("네." * 20 if number == side else "네." for number in (0, 1)), ("네.", "No.")]
    message = r"^Sentence 2 must have at most 12 tokens, the model's number of positions"
    assert_error(message, lambda: list(score(pairs)))
    with pytest.warns(UserWarning, match=r"Sentence 2 with \d+ tokens is too long to be scored, and left empty"):
        found = list(score(pairs, keep_going=True))
    assert found == [*score(pairs[:1]), None, *score(pairs[2:])]


def test_sources_longer_than_the_training_are_told_once_without_advice_on_translating(model, tokenizers, monkeypatch):
    monkeypatch.setattr(model.generation_config, "longest_trained_source", 4, raising=False)
    pairs = [("네." * 9, "Yes."), ("a", "Yes." * 9), ("네." * 8, "")]
    with pytest.warns(UserWarning, match=r"^2 sentences \(the first is sentence 1 .* scored too low\.$") as told:
        list(Translator(model, tokenizers).score_pairs(pairs, chunk_size=1))
    assert len(told) == 1


@pytest.fixture
def score(heedful_command, folder):
    return partial(heedful_command, "score", folder)


def table(text: str) -> list[dict[str, str]]:
    names, *rows = (line.split("\t") for line in text.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_the_command_writes_a_table_and_the_perplexity(score, tmp_path, model, tokenizers, pairs):
    (tmp_path / "ko.txt").write_text("".join(f"{source}\n" for source in pairs), encoding="utf-8")
    (tmp_path / "en.txt").write_text("".join(f"{target}\n" for target in pairs.values()), encoding="utf-8")
    code, output, errors = score(tmp_path / "ko.txt", tmp_path / "en.txt", "--tokens", "--token-budget", 20)
    assert code == 0, errors
    scores = list(Translator(model, tokenizers).score_pairs(pairs.items()))
    for row, expected in zip(table(output), scores, strict=True):
        assert float(row["log_probability"]) == pytest.approx(expected.log_probability, abs=2e-4)
        assert float(row["per_token"]) == pytest.approx(expected.per_token, abs=2e-4)
        assert int(row["tokens"]) == len(expected.tokens)
        assert [each.rpartition(":")[0] for each in row["token_scores"].split(" ")] == list(expected.tokens)
    tokens = sum(len(each.tokens) for each in scores)
    nats = -sum(each.log_probability for each in scores) / tokens
    told = f"8 pairs, {tokens} target tokens: {nats:.4f} nats a token, perplexity {math.exp(nats):.2f}"
    assert errors.splitlines()[-1] == told


def test_json_lines_hold_the_pairs_too_also_compressed(score, tmp_path, pairs):
    rows = [{"translation": {"ko": source, "en": target}} for source, target in pairs.items()]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    arguments = (tmp_path / "pairs.jsonl", "--source", "ko", "--target", "en")
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert score(*arguments, "-o", tmp_path / name)[:2] == (0, "")
    written = (tmp_path / "a.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "b.jsonl.gz").read_bytes()) == written
    assert (tmp_path / "b.jsonl.gz").read_bytes()[:10] == b"\x1f\x8b\x08" + bytes(5) + b"\x02\xff"  # no name, no time
    found = [json.loads(line) for line in written.splitlines()]
    assert [(row["source"], row["target"]) for row in found] == list(pairs.items())
    assert list(found[0]) == ["source", "target", "log_probability", "per_token", "tokens"]
    assert score(*arguments, "--json")[1].encode() == written


def test_both_directions_are_combined(score, heedful_command, folder, recurrent, tokenizers, pairs, tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs.items()), encoding="utf-8")
    saved_in(tmp_path / "backward", recurrent, tokenizers)
    arguments = (tmp_path / "pairs.tsv", "--source", 1, "--target", 2)
    code, output, errors = score(*arguments, "--backward", tmp_path / "backward", "--json", "--tokens")
    assert code == 0, errors
    forward = Translator.from_pretrained(folder).score_pairs(pairs.items())
    turned = Translator(recurrent, tokenizers).score_pairs((target, source) for source, target in pairs.items())
    for line, one, other in zip(output.splitlines(), forward, turned, strict=True):
        row, apart = json.loads(line), abs(one.per_token - other.per_token)
        assert row["per_token"] == pytest.approx(one.per_token, abs=1e-5)
        assert row["backward_per_token"] == pytest.approx(other.per_token, abs=1e-5)
        assert row["backward_token_scores"][-1] == ["</s>", pytest.approx(other.token_scores[-1], abs=1e-5)]
        dual = apart - (one.per_token + other.per_token) / 2  # of nats, which are not negative
        assert row["dual_cross_entropy"] == pytest.approx(dual, abs=2e-5)
    assert [line.split(":")[0] for line in errors.splitlines()[-2:]] == [
        f"8 pairs, {sum(map(len, tokenizers.encode_target(list(texts))))} {side} tokens"
        for side, texts in (("target", pairs.values()), ("source", pairs))
    ]
    both = train_tokenizers(list(pairs), list(pairs.values()), vocab_size=300, languages=("ko", "en"))
    place = saved_in(tmp_path / "both", tiny_model(vocab_size=len(both.source), **both.special_ids()), both)
    code, output, errors = heedful_command("score", place, *arguments, "--to", "en", "--backward-to", "ko")
    assert code == 0, errors
    turned = [(target, source) for source, target in pairs.items()]
    turned = Translator.from_pretrained(place).score_pairs(turned, target_language="ko")
    found = [float(row["backward_per_token"]) for row in table(output)]
    assert found == pytest.approx([each.per_token for each in turned], abs=1e-4)
    code, _, errors = heedful_command("score", place, *arguments, "--to", "en", "--backward-to", "fr")
    assert (code, "`--backward-to` must be one of" in errors) == (2, True)


def test_a_bad_line_is_told_and_a_pair_that_is_too_long_has_empty_cells(score, tmp_path, pairs, monkeypatch):
    lines = [json.dumps({"source": source, "target": target}) for source, target in pairs.items()]
    for bad, message in (("{", "line 9 is broken"), ('{"source": "a"}', "'target' must be text in every row")):
        (tmp_path / "pairs.jsonl").write_text("\n".join([*lines, bad]), encoding="utf-8")
        assert_named(score, [((tmp_path / "pairs.jsonl", "-o", tmp_path / "scores.tsv"), message)])
        assert not (tmp_path / "scores.tsv").exists()
    assert_named(score, [((tmp_path / "none.jsonl",), "must be a file that exists")])
    monkeypatch.setattr("heedful.decoding.translation.MOST_SOURCE_TOKENS", 12)
    monkeypatch.setattr(Translator, "_longest_trained", lambda self: None)
    (tmp_path / "pairs.tsv").write_text(f"source\ttarget\n네.\tYes.\n네.\t{'No! ' * 9}\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="Sentence 2 with 36 tokens is too long to be scored"):
        code, output, errors = score(tmp_path / "pairs.tsv")
    assert (code, table(output)[1]) == (0, {"log_probability": "", "per_token": "", "tokens": ""})
    assert "1 pairs, 5 target tokens: " in errors
    (tmp_path / "pairs.tsv").write_text(f"source\ttarget\n네.\t{'No! ' * 9}\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="Sentence 1 with 36 tokens is too long to be scored"):
        assert "0 pairs, 0 target tokens\n" in score(tmp_path / "pairs.tsv")[2]
