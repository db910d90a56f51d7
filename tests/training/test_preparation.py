"""What a run prepares, and what would end or ruin it and is said before its first update."""

import json
import logging
import re
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from heedful.checking.doctor import diagnose
from heedful.data.cleaning import read_splits
from heedful.data.sources import sample
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training import preparation
from heedful.training.model_of_recipe import check_model, make_model, read_config
from heedful.training.preparation import prepare_corpus, tokenizers_of
from heedful.training.run import train
from heedful.training.start_checks import check_start, faults, faults_of_targets
from heedful.training.updates.model_size import parameters_of
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error, assert_refused, tiny_config
from tiny_runs import tiny_recipe


def lines(path, rows):
    path.write_text("".join(f"{source}\t{target}\n" for source, target in [("ko", "en"), *rows]), encoding="utf-8")
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Five training pairs, one of them also in the validation set, another with an empty side."""
    rows = [("하나", "one"), ("둘", "twelve hundred and forty"), ("셋", "three"), ("넷", "four"), ("", "five")]
    train = lines(tmp_path / "train.tsv", rows)
    validation = lines(tmp_path / "validation.tsv", [("넷", "4")])
    return {"data.train": train, "data.validation": validation, "tokenizer.vocab_size": 260}


def texts(corpus):
    rows = [row for update in corpus.training.updates(0) for bucket in update for row in bucket]
    return sorted(corpus.tokenizers.decode_target(row["labels"] for row in rows))


def test_what_is_held_out_empty_or_too_long_is_not_trained_on(files, tmp_path):
    test = {"t": lines(tmp_path / "test.tsv", [("하나", "1")])}
    for key in ("data.test", "data.held_out"):
        tested = prepare_corpus(tiny_recipe(tmp_path, {**files, key: test}), tmp_path / key)
        assert texts(tested) == ["three", "twelve hundred and forty"]
    long = lines(tmp_path / "long.tsv", [("넷", "4" * 60)])  # no validation pair is dropped for its length
    changes = {**files, "data.validation": long, "data.max_target_tokens": 10}
    corpus = prepare_corpus(tiny_recipe(tmp_path, changes), tmp_path / "tokenizer")
    assert texts(corpus) == ["one", "three"]
    assert (corpus.training.pairs, corpus.training.rows.left_out) == (2, 1)
    assert corpus.report.to_dict()["dropped"] == {"empty": 1, "overlap": 1}
    assert corpus.validation_pairs == [{"source": "넷", "target": "4" * 60}]
    assert len(corpus.validation) == 1


def test_the_tokenizer_is_trained_once_and_then_loaded_and_a_given_one_used(files, tmp_path, corpus):
    folder = tmp_path / "tokenizer"
    first = prepare_corpus(tiny_recipe(tmp_path, files), folder).tokenizers
    changed = (folder / "tokenizer.json").stat().st_mtime_ns
    second = prepare_corpus(tiny_recipe(tmp_path, files), folder).tokenizers
    assert (folder / "tokenizer.json").stat().st_mtime_ns == changed
    assert second.source.get_vocab() == first.source.get_vocab()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    prepare_corpus(tiny_recipe(tmp_path, files), tmp_path / "other", Mock(is_main_process=False))
    corpus.tokenizers.save_pretrained(tmp_path / "given")
    recipe = tiny_recipe(tmp_path, {**files, "tokenizer.path": str(tmp_path / "given")})
    assert len(prepare_corpus(recipe, tmp_path / "other").tokenizers.source) == 400
    assert not (tmp_path / "other").exists()


def test_a_sorted_file_is_looked_at_from_its_beginning_to_its_end_each_time_the_same(tmp_path):
    rows = [(f"수{number:03}", "a" * (number + 1)) for number in range(200)]
    data = {"data.train": lines(tmp_path / "sorted.tsv", rows), "data.validation": lines(tmp_path / "v.tsv", rows[:9])}
    recipe = tiny_recipe(tmp_path, {**data, "tokenizer.sentences": 20, "tokenizer.algorithm": "word"})
    recipe.tokenizer.vocab_size = 99
    kept = read_splits(recipe.data).train
    drawn = read_splits(recipe.data, 20).train
    numbers = drawn["row"][:]
    assert numbers == sorted(numbers) == read_splits(recipe.data, 20).train["row"][:]
    assert [kept[number - 1]["source"] for number in numbers] == drawn["source"][:]
    tokenizers = tokenizers_of(recipe.tokenizer, recipe.data, read_splits(recipe.data))
    words = set(tokenizers.source.get_vocab()) - {"<pad>", "<s>", "</s>", "<unk>"}
    lengths = [len(word.strip()) for word in words if "a" in word], [len(text) for text in drawn["target"][:]]
    assert all(len(some) == 20 and min(some) < 40 and max(some) > 160 for some in lengths)
    assert sample(rows, None) == sample(rows, 200) == rows
    assert sample(rows, 3, is_drawn=False) == rows[:3]


def test_joined_rows_count_among_the_longest_and_must_fit_into_learned_positions(files, tmp_path):
    recipes = (tiny_recipe(tmp_path, {**files, "data.augmentation": {"joined": share}}) for share in (0, 1))
    plain, joined = (prepare_corpus(recipe, tmp_path / "tokenizer") for recipe in recipes)
    rows = [row for update in joined.training.updates(0) for bucket in update for row in bucket]
    assert joined.training.longest_source == max(len(row["input_ids"]) for row in rows) > plain.training.longest_source
    changes = {"data.augmentation": {"joined": 0.1}, "data.max_source_tokens": 48, "data.max_target_tokens": 49}
    recipe = tiny_recipe(tmp_path, {**files, **changes})
    check_model(recipe, None)
    recipe.model.options |= {"position_encoding": "learned", "max_position_embeddings": 48}
    assert_error(r"`data.max_target_tokens` must be at most 48, .+ positions.+ but is 49", check_model, recipe, None)
    recipe.data.max_target_tokens = 48
    check_model(recipe, None)


def test_an_option_that_contradicts_the_tokenizer_is_refused(corpus, tmp_path):
    for name, value, right in (("vocab_size", 8000, 400), ("pad_token_id", 5, 0), ("decoder_vocab_size", 3, 400)):
        recipe = tiny_recipe(tmp_path, {f"model.options.{name}": value})
        message = f"`model.options.{name}` must be left to the tokenizer.*but is {value} inst"
        assert_error(message, make_model, recipe.model, corpus.tokenizers)
        recipe.model.options[name] = right
        make_model(recipe.model, corpus.tokenizers)


def test_options_win_over_the_config_file_whose_vocabulary_is_not_taken(corpus, tmp_path):
    config = {"model_type": "heed", "d_model": 64, "encoder_layers": 3, "vocab_size": 9, "architectures": ["x"]}
    config |= {"decoder_vocab_size": 60, "pad_token_id": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json"):
        found = make_model(tiny_recipe(tmp_path, {"model.config": str(where)}).model, corpus.tokenizers).config
        assert (found.d_model, found.encoder_layers, found.vocab_size, found.pad_token_id) == (32, 1, 400, 0)
    recipe = tiny_recipe(tmp_path, {"model.config": str(tmp_path), "model.options": {"d_model": 16}})
    assert make_model(recipe.model, corpus.tokenizers).config.encoder_layers == 3


def test_a_config_that_is_none_or_missing_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"The model config .* \(`model.config`\) does not exist"):
        read_config(tmp_path)
    for text, message in {
        "{": "must be JSON, but is not",
        "[" * 100_000: "must be JSON, but is not",
        "[1]": "must be of type heed or heed_rnn, but is of list instead",
        '{"model_type": "marian"}': "must be of type heed or heed_rnn, but is of marian instead",
    }.items():
        (tmp_path / "config.json").write_text(text)
        assert_error(rf"The model config .*config.json \(`model.config`\) {message}", read_config, tmp_path)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_kernel_is_the_one_asked_for_and_a_model_goes_on_with_its_own_tokenizers(corpus, tmp_path, kernel):
    settings = tiny_recipe(tmp_path, {"model.attn_implementation": kernel}).model
    model = make_model(settings, corpus.tokenizers)
    assert model.model.encoder.layers[0].self_attn.config._attn_implementation == kernel
    model.save_pretrained(tmp_path / "start")
    settings.options, settings.start_from = {}, str(tmp_path / "start")
    again = make_model(settings, corpus.tokenizers)
    assert again.model.decoder.layers[0].cross_attn.config._attn_implementation == kernel
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    other = train_tokenizers(["가"], ["a"], vocab_size=260)
    assert_error("`vocab_size` must be 260, but is 400 instead", make_model, settings, other)


TOO_LARGE = [
    ({"model.options.d_model": 10**9}, "must make a model that fits into .* GB"),
    ({"model.options.encoder_layers": 10**9}, "must make a model that fits into .* GB"),
    ({"model.options.d_model": 10**21}, "must make a model that fits into .* GB"),
    ({"tokenizer.vocab_size": 10**9}, "`tokenizer.vocab_size` must make a model that fits into .* GB"),
    ({"model.options": {"model_type": "heed_rnn", "d_model": 10**7}}, "must make a model that fits into .* GB"),
    ({"decoding.num_beams": 5000}, "`decoding.num_beams` must be at most 260, .* but is 5000 instead"),
    ({"model.options.d_modle": 32}, r"`d_modle` is not a field.*`d_model`"),
    ({"model.options.encoder_attention_heads": 5}, "`d_model` must be divisible by `encoder_attention_heads`"),
    ({"model.options.dropout": "0.1"}, "`model.options.dropout` must be float or int, but is '0.1' instead"),
    ({"model.options.d_model": "64"}, "`model.options.d_model` must be int, but is '64' instead"),
    ({"model.options.model_type": "bart"}, "`model.options.model_type` must be heed or heed_rnn"),
]


def test_what_is_wrong_with_the_model_is_refused_before_anything_slow(files, tmp_path, monkeypatch):
    def prepare(changes):
        prepare_corpus(tiny_recipe(tmp_path, {**files, **changes}), tmp_path / "tokenizer")

    words = {"tokenizer": {"algorithm": "word", "vocab_size": 99}, "decoding.num_beams": 100}
    assert_refused([(words, r"`decoding\.num_beams` must be at most ")], prepare)  # once its words are known
    monkeypatch.setattr(preparation, "read_splits", Mock(side_effect=AssertionError("read")))
    assert_refused(TOO_LARGE, prepare)


@pytest.mark.parametrize("kind", ["heed", "heed_rnn"])
def test_parameters_are_counted_without_a_model_as_with_one(files, tmp_path, kind):
    options = {"model_type": kind, "d_model": 8, "encoder_layers": 3, "decoder_layers": 2}
    options |= {} if kind == "heed_rnn" else {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
    recipe = tiny_recipe(tmp_path, {**files, "model.options": options})
    corpus = prepare_corpus(recipe, tmp_path / "tokenizer")
    state = torch.get_rng_state()
    model = make_model(recipe.model, corpus.tokenizers)
    assert parameters_of(type(model), model.config) == model.num_parameters()
    torch.set_rng_state(state)
    parameters_of(type(model), model.config)
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_pairs_are_held_out_of_the_training_pairs_where_none_are_given(tmp_path):
    changes = {"data.validation": None, "tokenizer.vocab_size": 270, "data.cleaning.drop_overlap": False}

    def prepared(name, **more):
        return prepare_corpus(tiny_recipe(tmp_path / name, {**changes, **more}), tmp_path / name)

    rows = [(f"소스 {number % 50}", f"target {number}") for number in range(100)]  # each source twice
    files = [lines(tmp_path / f"{name}.tsv", order) for name, order in (("a", rows), ("b", rows[::-1]))]
    corpora = [prepared(name, **{"data.train": file}) for name, file in zip("ab", files, strict=True)]
    held_out = [{tuple(pair.values()) for pair in corpus.validation_pairs} for corpus in corpora]
    assert held_out[0] == held_out[1]  # whatever their order
    assert len(held_out[0]) == len(corpora[0].validation) == 4  # two of the fifty sources, with both of their targets
    assert set(texts(corpora[0])) == {target for _, target in rows} - {target for _, target in held_out[0]}
    # Of two source columns the first decides, here a lemma with a space in it.
    forms = "".join(f"w {n % 40}\tw{n}{tag}\t{tag} SG\n" for n in range(120) for tag in "abc")
    joined = "".join(f"w{n % 40} V;PST;{tag}\tw{n}{tag}\n" for n in range(120) for tag in "abc")
    for name, text, source, tags in (
        ("c", forms, [1, 3], "a SG|b SG|c SG"),
        ("d", joined, 1, "V;PST;a|V;PST;b|V;PST;c"),
    ):
        (tmp_path / f"{name}.tsv").write_text(text)
        columns = {"data.train": str(tmp_path / f"{name}.tsv"), "data.source": source, "data.target": 2}
        sources = [pair["source"] for pair in prepared(name, **columns).validation_pairs]
        lemmas = {re.sub(f" ({tags})$", "", each) for each in sources}
        assert (len(lemmas), len(sources)) == (2, 18)
        assert {*sources} == {f"{lemma} {tag}" for lemma in lemmas for tag in tags.split("|")}


def test_what_scores_could_not_use_is_refused_before_training(tmp_path):
    rows = {"good": {"right": ["four", "4"]}, "bad": {"right": []}, "digits": {"right": ["4"]}}
    for name, row in rows.items():
        line = json.dumps({"ko": "넷", "en": row["right"][-1] if row["right"] else "4", **row})
        (tmp_path / f"{name}.jsonl").write_text(line, encoding="utf-8")
    files = {name: str(tmp_path / f"{name}.jsonl") for name in rows}
    changes = {"data.train": lines(tmp_path / "train.tsv", [("하나", "one")] * 3), "tokenizer.vocab_size": 260}
    changes |= {"data.references": "right", "decoding.ignore": "[0-9]", "data.validation": files["good"]}
    corpus = prepare_corpus(tiny_recipe(tmp_path, {**changes, "data.test": {"t": files["good"]}}), tmp_path / "good")
    assert corpus.validation_pairs == [{"source": "넷", "target": "4", "references": ["4", "four"]}]
    for name, message in {
        "bad": r"`right` must be a list of texts, but is \[\] instead in row 1 of .*bad.jsonl",
        "digits": r"`decoding.ignore` must leave some text in the references, but '\[0-9\]' removes all",
    }.items():
        for given in ({"data.validation": files[name]}, {"data.test": {"t": files[name]}}):
            assert_error(message, prepare_corpus, tiny_recipe(tmp_path, {**changes, **given}), tmp_path / name)


def test_what_leaves_no_pair_is_refused(files, tmp_path):
    one = {"data.train": lines(tmp_path / "a.tsv", [("하나", "one")]), "data.validation": None}
    positions = {"data.streaming": True, **{f"model.options.{name}": value for name, value in POSITIONS.items()}}
    book = {
        "data.train": lines(tmp_path / "b.tsv", [*PAIRS, ("가 나 " * 9000, "two")]),
        "data.max_source_tokens": None,
    }
    cases = [
        ({"data.max_source_tokens": 1}, r"No training pair is left: 3 exceed `data.max_source_tokens` \(1\)"),
        (one, "`data.validation` must be given if the training pairs have fewer than two"),
        (positions, "`data.max_source_tokens` must be at most 64, .*`data.streaming`.* is 256"),
        (book, "at most 8192 tokens in a row, because attention .*max_source_tokens`"),
    ]
    assert_refused(cases, lambda changes: check(tmp_path, files | changes))
    check(tmp_path, {**files, **book, "data.max_source_tokens": 100_000})


def test_what_cannot_be_compiled_is_refused_before_anything_is_read(tmp_path):
    cases = [
        ({"model.activation_checkpointing": True}, "`model.activation_checkpointing` is true"),
        ({"model.options": {"model_type": "heed_rnn", "d_model": 8}}, "the model is recurrent"),
        ({"model.options.position_encoding": "learned"}, "`model.options.position_encoding` is learned"),
        ({"model.options.position_encoding": "t5"}, "`model.options.position_encoding` is t5"),
    ]
    cases = [(changes, f"`optimization.compile` must be auto or false if {reason}") for changes, reason in cases]
    compiled = {"optimization.compile": True, "data.train": "nowhere.jsonl"}
    assert_refused(cases, lambda changes: check_model(tiny_recipe(tmp_path / "run", compiled | changes), None))


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


def check(folder, changes, **config):
    recipe = tiny_recipe(folder / "run", {**LONG, **changes})
    corpus = prepare_corpus(recipe, folder / "tokenizer")
    config = tiny_config(vocab_size=len(corpus.tokenizers.source), **config)
    check_start(faults(recipe, corpus, config))


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
    where = lines(tmp_path / "a.tsv", pairs)
    changes = {"data.train": where, "data.validation": where, "data.cleaning": {"drop_overlap": False}}
    changes["tokenizer.path"] = made_by_others(tmp_path / "given", **options)
    assert_error(rf"must restore targets .* changes \d+ of 60, .*{told}", check, tmp_path, changes)
    findings = {finding.check: finding for finding in diagnose(tiny_recipe(tmp_path / "run", changes)).findings}
    assert findings["round_trip"].level == "error"


def test_few_targets_that_are_changed_or_unknown_are_a_warning(tmp_path, caplog):
    lower = [(korean, english.lower()) for korean, english in PAIRS]
    where = lines(tmp_path / "a.tsv", [*lower, *PAIRS[:5]])
    check(tmp_path, {"data.validation": where, "tokenizer.path": made_by_others(tmp_path / "given", lowers=True)})
    assert "but changes 5 of 65, such as" in caplog.text
    pair = TokenizerPair.from_pretrained(made_by_others(tmp_path / "control"))
    (fault,) = faults_of_targets("tokenizer.path", pair, ["a </s> b", "a <pad> b", *TARGETS])
    assert (fault.check, fault.level) == ("round_trip", "warning")
    assert "changes 2 of 62, such as 'a </s> b' to 'a  b'" in fault.message
    words = train_tokenizers(["word"], ["word"], algorithm="word", vocab_size=5)
    words.save_pretrained(tmp_path / "words")
    check(tmp_path, {"tokenizer.path": str(tmp_path / "words")})
    assert "(`tokenizer.path`) lacks" in caplog.text
    (fault,) = faults_of_targets("tokenizer.vocab_size", words, ["word " * 197, "a word"])
    assert "lacks 0.5 % of the tokens in targets: the model would write <unk> for them" in fault.message


def test_a_tokenizer_that_puts_no_end_is_refused_by_training_and_an_error_of_the_doctor(tmp_path):
    changes = {"tokenizer.path": made_by_others(tmp_path / "given", ends=False)}
    recipe = tiny_recipe(tmp_path / "run", changes)
    assert_error(r"must end each target in its end token \(id 2\), but does not end 20 of 20", train, recipe)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert ("error", "ends") in [(finding.level, finding.check) for finding in diagnose(recipe).findings]


POSITIONS = {"position_encoding": "learned", "max_position_embeddings": 64}
TOO_LONG = (" ".join(korean for korean, _ in PAIRS[:9]), "An answer.")


@pytest.mark.parametrize("key", ["data.train", "data.validation", "data.test.more"])
def test_rows_longer_than_the_models_positions_are_told_before_the_run(key, tmp_path):
    where = lines(tmp_path / "a.tsv", [*PAIRS, TOO_LONG])
    changes = {"data.test": {"more": where}} if key == "data.test.more" else {key: where}
    message = rf"`{key}` must have at most 64 tokens in a row, the model's positions, but 1 of \d+ rows have more"
    assert_error(message, check, tmp_path, changes, **POSITIONS)
    check(tmp_path, changes)  # sinusoids have no end
    if key == "data.train":
        check(tmp_path, {**changes, "data.max_source_tokens": 64}, **POSITIONS)
        options = {f"model.options.{name}": value for name, value in POSITIONS.items()}
        findings = diagnose(tiny_recipe(tmp_path / "run", {**changes, **options, **LONG})).findings
        (finding,) = (finding for finding in findings if finding.check == "positions")
        assert (finding.level, finding.where) == ("error", "data.train")
        assert finding.examples[0].startswith("train line 62: ")


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
