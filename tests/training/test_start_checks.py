"""What would end or ruin a run is told before its first update, by training and by `heedful doctor` alike."""

import json
import logging

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.diagnosis.doctor import diagnose
from heedful.training.preparation import prepare_corpus
from heedful.training.run import train
from heedful.training.start_checks import check_start, faults_of_targets
from helpers import tiny_config
from tiny_runs import tiny_recipe

PAIRS = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("train", 60)]
TARGETS = [english for _, english in PAIRS]
LONG = {"decoding.max_length": 200}


def made_by_others(folder, lowers=False, joins=False, ends=True):
    """Save a tokenizer of byte pairs that changes texts, or puts no end."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase() if lowers else None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *[decoders.Replace(" ", "")] * joins])
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 400, "special_tokens": special, "show_progress": False, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator([text for pair in PAIRS for text in pair], trainers.BpeTrainer(**options))
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)


def jsonl(path, pairs):
    rows = [json.dumps({"ko": korean, "en": english}, ensure_ascii=False) for korean, english in pairs]
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


def check(folder, changes, **config):
    recipe = tiny_recipe(folder / "run", {**LONG, **changes})
    corpus = prepare_corpus(recipe, folder / "tokenizer")
    config = tiny_config(vocab_size=len(corpus.tokenizers.source), **config)
    check_start(recipe, corpus, config)


def test_our_own_tokenizers_give_targets_back():
    targets = [*TARGETS, "", " two  spaces\u00a0", "▁ mark▁s", "e\u0301 \u1112\u1161\u11ab <s> </s>", "\u3000a\tb\r\n"]
    for algorithm in ("bpe", "unigram", "character", "jamo", "word"):
        size = None if algorithm == "word" else 400
        pair = train_tokenizers(targets, targets, algorithm=algorithm, vocab_size=size)
        assert list(faults_of_targets("tokenizer.path", pair, targets)) == [], algorithm


CHANGED = {"lower case": ({"lowers": True}, "'ANSWER' to 'answer'"), "joined words": ({"joins": True}, "to '[^ ]+'")}


@pytest.mark.parametrize("kind", CHANGED)
def test_targets_that_a_tokenizer_does_not_give_back_end_a_run_before_it_begins(kind, tmp_path):
    options, told = CHANGED[kind]
    pairs = [(korean, english.upper() if kind == "lower case" else english) for korean, english in PAIRS]
    pairs[0] = (PAIRS[0][0], "ANSWER")
    where = jsonl(tmp_path / "a.jsonl", pairs)
    changes = {"data.train": where, "data.validation": where, "data.cleaning": {"drop_overlap": False}}
    changes["tokenizer.path"] = made_by_others(tmp_path / "given", **options)
    with pytest.raises(ValueError, match=rf"must give targets back .* changes \d+ of 60, .*{told}"):
        check(tmp_path, changes)
    findings = {finding.check: finding for finding in diagnose(tiny_recipe(tmp_path / "run", changes)).findings}
    assert findings["round_trip"].level == "error"


def test_few_targets_that_are_changed_are_a_warning(tmp_path, caplog):
    lower = [(korean, english.lower()) for korean, english in PAIRS]
    where = jsonl(tmp_path / "a.jsonl", [*lower, *PAIRS[:5]])
    check(tmp_path, {"data.validation": where, "tokenizer.path": made_by_others(tmp_path / "given", lowers=True)})
    assert "but changes 5 of 65, such as" in caplog.text


def test_a_tokenizer_that_puts_no_end_is_refused_by_training_and_an_error_of_the_doctor(tmp_path):
    changes = {"tokenizer.path": made_by_others(tmp_path / "given", ends=False)}
    recipe = tiny_recipe(tmp_path / "run", changes)
    with pytest.raises(ValueError, match=r"must end each target in its end token \(id 2\), but does not end 20 of 20"):
        train(recipe)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert ("error", "ends") in [(finding.level, finding.check) for finding in diagnose(recipe).findings]


def test_a_text_that_becomes_a_control_token_is_not_given_back(tmp_path):
    pair = TokenizerPair.from_pretrained(made_by_others(tmp_path / "given"))
    (fault,) = faults_of_targets("tokenizer.path", pair, ["a </s> b", "a <pad> b", *TARGETS])
    assert (fault.check, fault.level) == ("round_trip", "warning")
    assert "changes 2 of 62, such as 'a </s> b' to 'a  b'" in fault.message


def test_targets_that_are_mostly_unknown_are_told(tmp_path, caplog):
    words = train_tokenizers(["word"], ["word"], algorithm="word", vocab_size=5)
    words.save_pretrained(tmp_path / "given")
    check(tmp_path, {"tokenizer.path": str(tmp_path / "given")})
    assert "(`tokenizer.path`) does not know" in caplog.text


POSITIONS = {"position_encoding": "learned", "max_position_embeddings": 64}
TOO_LONG = (" ".join(korean for korean, _ in PAIRS[:9]), "An answer.")


@pytest.mark.parametrize("key", ["data.train", "data.validation", "data.test.more"])
def test_rows_longer_than_the_models_positions_are_told_before_the_run(key, tmp_path):
    where = jsonl(tmp_path / "a.jsonl", [*PAIRS, TOO_LONG])
    changes = {"data.test": {"more": where}} if key == "data.test.more" else {key: where}
    message = rf"`{key}` must have at most 64 tokens in a row, the model's positions, but 1 of \d+ rows have more"
    with pytest.raises(ValueError, match=message):
        check(tmp_path, changes, **POSITIONS)
    check(tmp_path, changes)  # sinusoids have no end
    if key == "data.train":
        check(tmp_path, {**changes, "data.max_source_tokens": 64}, **POSITIONS)
        options = {f"model.options.{name}": value for name, value in POSITIONS.items()}
        findings = diagnose(tiny_recipe(tmp_path / "run", {**changes, **options, **LONG})).findings
        (finding,) = (finding for finding in findings if finding.check == "positions")
        assert (finding.level, finding.where) == ("error", "data.train")
        assert finding.examples[0].startswith("train row 61: ")


def test_a_stream_whose_rows_may_be_longer_than_the_positions_is_refused(tmp_path):
    changes = {"data.streaming": True, **{f"model.options.{name}": value for name, value in POSITIONS.items()}}
    with pytest.raises(ValueError, match=r"`data.max_source_tokens` must be at most 64, .*`data.streaming`.* is 256"):
        prepare_corpus(tiny_recipe(tmp_path / "run", changes), tmp_path / "tokenizer")


def test_a_pair_as_long_as_a_book_needs_a_limit_of_its_own(tmp_path):
    where = jsonl(tmp_path / "a.jsonl", [*PAIRS, ("가 나 " * 9000, "two")])
    changes = {"data.train": where, "data.max_source_tokens": None}
    with pytest.raises(ValueError, match=r"at most 8192 tokens in a row, of which attention .*max_source_tokens`"):
        check(tmp_path, changes)
    check(tmp_path, {**changes, "data.max_source_tokens": 100_000})


def test_limits_that_cut_or_drop_much_are_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    changes = {"validation.max_new_tokens": 100, "validation.sentences": 5}
    check(tmp_path, changes)
    assert caplog.text == ""
    with pytest.raises(ValueError, match=r"`validation.max_new_tokens` must be at most 64, the model's positions"):
        check(tmp_path, changes, **POSITIONS)
    check(tmp_path, {**changes, "validation.max_new_tokens": 64}, **POSITIONS)
    changes |= {"validation.max_new_tokens": 9, "data.max_source_tokens": 25}
    check(tmp_path, {**changes, "decoding.max_length": 5, "optimization.tokens_per_update": 5})
    for name in ("decoding.max_length", "validation.max_new_tokens", "optimization.tokens_per_update"):
        assert f"`{name}` must be at least" in caplog.text
    assert r"`data.max_source_tokens` (25) and `data.max_target_tokens` (256) drop" in caplog.text


def test_references_that_no_translation_can_reach_are_found_by_the_doctor(tmp_path):
    found = {}
    for limit in (10, 40, 100):
        recipe = tiny_recipe(tmp_path / "run", {"decoding.max_length": limit, "tokenizer.vocab_size": 300})
        found[limit] = [each.level for each in diagnose(recipe).findings if each.check == "decoding_lengths"]
    assert found == {10: ["error"], 40: ["warning"], 100: []}
