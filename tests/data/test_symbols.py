"""Characters, jamo, and closed vocabularies of symbols: what they cut, keep, and refuse."""

import pickle

import pytest
from transformers import AutoTokenizer

from guides import printing_of, text_of
from heedful import Translator
from heedful.checking.doctor import diagnose
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.export import comparison
from heedful.pipeline_heed import HeedText2TextPipeline, HeedTranslationPipeline
from heedful.symbols_heed import UnknownSymbol, symbols_of
from heedful.training.preparation import prepare_corpus
from heedful.verification.samples import make_sample
from heedful.verification.verification import check_round_trip, check_special_text
from helpers import assert_error, assert_refused, tiny_model
from memorised import memorised_model
from tiny_runs import table_file, tiny_recipe

FAMILY = "\U0001f469\u200d\U0001f467"
WORDS = ["hamid", "한글 밥", f"e\u0301 {FAMILY}\r\n"]
SOUNDS = ["HH AH0 M IY1 D", "Z SH", "V UH2"]


def train(algorithm, vocab_size=None, **options) -> TokenizerPair:
    return train_tokenizers(WORDS, SOUNDS, algorithm=algorithm, vocab_size=vocab_size, **options)


def loaded(pair, folder) -> TokenizerPair:
    pair.save_pretrained(folder)
    return TokenizerPair.from_pretrained(folder)


def tokens(pair, text):
    return pair.source.convert_ids_to_tokens(pair.encode_source([text])[0])[:-1]


def test_a_character_is_what_a_reader_sees_and_what_has_no_token_is_spelled_in_code_points_or_bytes():
    pair = train("character")
    assert tokens(pair, f"한e\u0301{FAMILY}\r\n d") == ["한", "\u00e9", FAMILY, "\r\n", " ", "d"]
    assert tokens(train("jamo"), "한글") == list("\u1112\u1161\u11ab\u1100\u1173\u11af")
    assert tokens(pair, "a\u0301") == ["<0xC3>", "<0xA1>"]  # á has a code point of its own, which no text had
    assert tokens(pair, "d\u0332") == ["d", "<0xCC>", "<0xB2>"]
    texts = ["cab", "ba", "b"]  # a number keeps the most frequent, in a fixed order
    every, few = (train_tokenizers(texts, texts, algorithm="character", vocab_size=size) for size in (None, 262))
    assert tokens(every, "ab") == tokens(few, "ab") == ["a", "b"]
    assert tokens(few, "c") == ["<0x63>"]
    assert (len(every.source), len(few.source)) == (4 + 256 + 3, 262)
    assert every.source.convert_ids_to_tokens([260, 261, 262]) == ["b", "a", "c"]


PAIRS = {algorithm: train(algorithm) for algorithm in ("character", "jamo")}


def test_either_side_has_an_algorithm_of_its_own(tmp_path):
    pair = loaded(train(("character", "word"), joint=False), tmp_path)
    assert len(pair.encode_source(["hamid"])[0]) == 6
    assert len(pair.encode_target(["HH AH0"])[0]) == 3
    assert symbols_of(pair.source) is None
    assert sorted(symbols_of(pair.target)) == sorted({sound for text in SOUNDS for sound in text.split()})
    sizes = train(("word", "bpe"), joint=False, target_vocab_size=260)
    assert (len(symbols_of(sizes.source)), len(sizes.target)) == (5, 260)
    assert_error("`target_vocab_size` must be a number for bpe, but is None", train, ("word", "bpe"), joint=False)
    assert_error("`algorithm` must be a single one for a joint vocabulary, but is", train, ("word", "bpe"))


@pytest.mark.parametrize("loads", [0, 2])
def test_a_symbol_outside_a_closed_vocabulary_is_named(loads, tmp_path):
    pair = train(("character", "word"), joint=False)
    for number in range(loads):
        pair = loaded(pair, tmp_path / str(number))
    with pytest.raises(UnknownSymbol) as caught:
        pair.encode_target(["Z SH", "HH ah M"])
    told = "`texts[1]`: each symbol must be one of the 9 of the target's vocabulary, but 'ah' is none (nearest: 'AH0'"
    assert str(caught.value).startswith(told)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as it comes from another process
    assert pair.encode_source(["HH AH"])  # the other side knows every text
    assert_error(r"but '<s>' is none", pair.encode_target, ["Z <s>"], error=UnknownSymbol)


def test_a_vocabulary_of_the_most_frequent_words_is_open_and_transformers_alone_knows_a_closed_one(tmp_path):
    pair = loaded(train("word", 8), tmp_path)
    assert symbols_of(pair.source) is None
    assert pair.encode_source(["never seen"]) == [[3, 3, 2]]
    train("word").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("Z SH")["input_ids"][-1] == 2
    assert_error("Missing", tokenizer, "Z zh", error=Exception)


@pytest.fixture
def sounds(tmp_path):
    """Return what a recipe of words and their sounds says, with a test that has a sound of its own."""
    known = [("ab", "A B"), ("ba", "B A"), ("abb", "A B B"), ("bab", "B A B")]
    where = {
        "data.train": table_file(tmp_path / "train.tsv", known * 10),
        "data.validation": table_file(tmp_path / "validation.tsv", [("aab", "A A B")]),
        "data.test": {"other": table_file(tmp_path / "test.tsv", [("aa", "A A"), ("ac", "A ZH")])},
    }
    own = {"algorithm": "character", "vocab_size": None, "joint": False, "target_algorithm": "word"}
    return where | {"data.source": "1", "data.target": "2"} | {f"tokenizer.{key}": own[key] for key in own}


def prepared(tmp_path, changes, name="run"):
    return prepare_corpus(tiny_recipe(tmp_path / "run", changes), tmp_path / f"tokenizer-{name}")


def error_of_doctor(tmp_path, changes):
    """Return the message of the only error, which must be of unknown tokens."""
    found = [each for each in diagnose(tiny_recipe(tmp_path / "run", changes)).findings if each.level == "error"]
    assert [each.check for each in found] == ["unknown_tokens"]
    return found[0].message


def test_a_symbol_in_held_out_data_stops_a_run_at_its_start(sounds, tmp_path):
    message = r"`data.test.other`, pair 2: each symbol must be one of the 2 .* 'ZH' is none"
    assert_error(message, prepared, tmp_path, sounds)
    # A target may lack what is taken out of both.
    assert prepared(tmp_path, sounds | {"decoding.ignore": "[0-9]"}, "ignoring")
    sounds["data.validation"] = sounds["data.test"]["other"]
    assert_error(r"`data.validation`, pair 2: each symbol .* 'ZH' is none", prepared, tmp_path, sounds, "other")
    assert "'ZH' is none" in error_of_doctor(tmp_path, sounds)


def test_a_symbol_that_a_given_tokenizer_lacks_is_named_in_training_data(sounds, tmp_path):
    given = train_tokenizers(["ab"], ["A"], algorithm=("character", "word"), vocab_size=None, joint=False)
    given.save_pretrained(tmp_path / "given")
    own = {key: sounds[key] for key in ("data.train", "data.source", "data.target")}
    own |= {"data.validation": table_file(tmp_path / "few.tsv", [("aa", "A A")])}
    own |= {"tokenizer.path": str(tmp_path / "given")}
    rows = prepared(tmp_path, own | {"data.streaming": True}, "a").training.updates(0)
    assert_error(r"^'ab' → 'A B': each symbol must be one of the 1 of the target's", list, rows)
    assert_error(r"^`data.train` after cleaning, pair 1: .* 'B' is none", prepared, tmp_path, own, "b")
    assert error_of_doctor(tmp_path, own).startswith("`data.train` after c")


def test_symbols_of_pairs_that_are_held_out_of_the_training_data_are_known(sounds, tmp_path):
    once = table_file(tmp_path / "once.tsv", [(f"{number}", f"S{number}") for number in range(60)])
    changes = sounds | {"data.train": once, "data.validation": None, "data.test": {}}
    corpus = prepared(tmp_path, changes)
    assert len(symbols_of(corpus.tokenizers.target)) == 60 > corpus.training.pairs
    findings = diagnose(tiny_recipe(tmp_path / "run", changes)).findings
    assert "unknown_tokens" not in {finding.check for finding in findings}


def test_what_a_recipe_can_not_ask_for_is_refused_such_as_to_change_words_of_a_closed_source(sounds, tmp_path):
    cases = [
        ({"target_algorithm": "word"}, "`tokenizer.target_algorithm` must be empty if `tokenizer.joint` is true"),
        ({"vocab_size": None}, "`tokenizer.vocab_size` must be a number for bpe, but is None"),
        ({"joint": False, "target_algorithm": "unigram"}, "`tokenizer.target_vocab_size` must be a number for uni"),
        ({"algorithm": "letters"}, "`tokenizer.algorithm` must be .*character"),
    ]
    assert_refused(cases, lambda given: tiny_recipe(tmp_path, {f"tokenizer.{key}": given[key] for key in given}))
    changes = {"data.source": "2", "data.target": "1", "tokenizer.algorithm": "word", "data.test": {}}
    changes = sounds | changes | {"tokenizer.target_algorithm": "character"}
    assert prepared(tmp_path, changes | {"data.augmentation": {"joined": 0.5}}, "a")
    message = "`data.augmentation` must be empty except for `joined`"
    assert_error(message, prepared, tmp_path, changes | {"data.augmentation": {"typos": 0.5}}, "b")
    message = "`data.augmentation.placeholders` must be 0 if the target vocabulary is closed, but is 0.5"
    changes = {"data.test": {}, "data.augmentation": {"placeholders": 0.5}}
    assert_error(message, prepared, tmp_path, sounds | changes, "c")


@pytest.fixture(scope="module")
def symbols():
    return train_tokenizers(["a b c"], ["X Y"], algorithm="word", vocab_size=None, joint=False)


@pytest.fixture(scope="module")
def translator(symbols):
    sizes = {"vocab_size": len(symbols.source), "decoder_vocab_size": len(symbols.target)}
    return Translator(tiny_model(**sizes, share_encoder_decoder_embeddings=False, **symbols.special_ids()), symbols)


def test_a_closed_vocabulary_is_verified_with_its_own_symbols_and_the_pipeline_names_others(translator, symbols):
    assert check_round_trip(symbols).level == check_special_text(symbols).level == "pass"
    assert len(make_sample(translator.model, symbols)) == 6
    turn = HeedText2TextPipeline(model=translator.model, tokenizer=symbols.source, target_tokenizer=symbols.target)
    assert turn("a b", max_new_tokens=2)
    message = r"^'a d': each symbol must be one of the 3 of the source's .* 'd' is none"
    assert_error(message, turn, ["a b", "a d"], max_new_tokens=2)
    model = memorised_model(PAIRS["jamo"], {"밥": "한글 밥"})
    translate = HeedTranslationPipeline(model=model, tokenizer=PAIRS["jamo"].source)
    assert translate("밥")[0]["translation_text"] == "한글 밥"  # it puts jamo together


def test_the_guide_s_example_prints_what_it_says(capsys):
    (code, printed), *_ = printing_of(text_of("tokenizers"))
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_whoever_reads_texts_names_the_line_of_an_unknown_symbol(translator, symbols, tmp_path, heedful_command):
    told = "each symbol must be one of the 3 of the source's vocabulary, but 'd' is none"
    lines = translator.translate_lines(["a b", "", "a d"], chunk_size=2, max_new_tokens=2)
    assert_error(f"^Line 3: {told}", list, lines)
    scored = translator.score_pairs([("a", "X"), ("b", "Y"), ("c", "X Z")], chunk_size=2)
    assert_error("^Line 3: each symbol .* target's vocabulary, but 'Z' is none", list, scored)
    message = "Comparison sentence 2 .* but 'Hello' is none"
    assert_error(message, comparison.encode, symbols, ["a b", "Hello"], None)
    for each in (translator.model, symbols):
        each.save_pretrained(tmp_path / "model")
    data = table_file(tmp_path / "data.tsv", [("a b", "X"), ("c", "Y Z")])
    arguments = ["evaluate", tmp_path / "model", "--data", data, "--source", "1", "--target", "2"]
    told = "`--data`, pair 2: each symbol must be one of the 2 of the target's vocabulary"
    assert told in heedful_command(*arguments)[2]
    assert heedful_command(*arguments, "--ignore", "Q", "--max-new-tokens", "3")[0] == 0
