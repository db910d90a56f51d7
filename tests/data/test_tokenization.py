import base64
import json
import random
import unicodedata
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, MarianConfig, PreTrainedTokenizerFast

from heedful.data import tokenization, tokenizer_training
from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.symbols_heed import trimmed
from helpers import assert_error, assert_refused, change_json


def sentences(stems, endings):
    """Texts of many different words, some of them frequent."""
    words = [stem + ending for stem in stems.split() for ending in endings.split()]
    generator = random.Random(0)
    return [" ".join(words[int(len(words) * generator.random() ** 2)] for _ in range(6)) + "." for _ in range(400)]


KOREAN = sentences("책 물 편지 학교 친구 사람 나무 하늘 바다 노래", "은 을 에게 에서 처럼 보다 까지")
ENGLISH = sentences("read drink send walk talk sing jump paint open climb", "s ing ed er able less ish")
LOOKS_LIKE_CONTROL = ["<s>", "a </s> b", "<2en> hello", "<pad><unk><s></s>", " <s> ", "<2ko><2ko>"]
HARD = [
    *(*LOOKS_LIKE_CONTROL, "", " ", "  two  spaces\tand\n lines\r\n", "\u2028\x0b\x85\x00\x7f", "a\xa0b\u3000c"),
    *("\U0001f600\U0001f469\u200d\U0001f467 \u1100 \ue000", "don 't , stop ."),
    "한글 <0x41> \U0001f1f0\U0001f1f7\U0001f1fa\U0001f1f8",
]
# Families, flags, marks behind syllables, ends of lines, and what looks like a token.
ANYTHING = st.characters(exclude_categories=["Cs"]) | st.sampled_from(f"{HARD[-3]}{HARD[-1]}가\u0301\r\n<sx0>")
BYTES = 256


def train(algorithm="bpe", vocab_size=300, **options):
    return train_tokenizers(KOREAN, ENGLISH, algorithm=algorithm, vocab_size=vocab_size, **options)


@pytest.fixture(scope="module", params=["bpe", "unigram", "character", "jamo"])
def trained(request):
    return train(request.param, languages=["ko", "en"])


@pytest.fixture(scope="module", params=[0, 2], ids=["as trained", "loaded twice"])
def lossless(request, trained, tmp_path_factory):
    pair = trained
    for _ in range(request.param):
        folder = tmp_path_factory.mktemp("tokenizer")
        pair.save_pretrained(folder)
        pair = TokenizerPair.from_pretrained(folder)
    return pair


def test_hard_and_long_texts_come_back_exactly_and_what_looks_like_a_control_token_is_text(lossless):
    assert lossless.decode_target(lossless.encode_target(HARD)) == HARD
    assert lossless.decode_target(lossless.encode_source(HARD, "ko")) == list(map(trimmed, HARD))
    long = ["물을 마신다 " * 4000 + "."]  # none is truncated
    assert lossless.decode_target(lossless.encode_source(long, "ko")) == long
    assert lossless.encode_source([], "ko") == lossless.encode_target([]) == lossless.decode_target([]) == []
    for ids in lossless.encode_target(LOOKS_LIKE_CONTROL):
        assert ids[-1] == 2
        assert min(ids[:-1]) >= 6


@settings(max_examples=60, deadline=None)
@given(st.text(ANYTHING))
def test_any_target_comes_back_in_composed_form_and_becomes_no_control_token(trained, text):
    (ids,) = trained.encode_target([text])
    assert min(ids[:-1], default=6) >= 6
    assert trained.decode_target([ids]) == [unicodedata.normalize("NFC", text)]


def test_white_space_around_a_source_is_no_part_of_it_and_inside_it_is(trained):
    (plain,), (spaced,) = (trained.encode_source([text], "ko") for text in ("물을  마신다", "물을 마신다"))
    for around in (" {}", "{} ", "\t{}\r\n", "\u3000{}\u00a0"):
        assert trained.encode_source([around.format("물을  마신다")], "ko") == [plain] != [spaced]
    for text in (" \n", "\u200b", "\ufeff", "\u2060 \u00ad", "\x00\x7f", "\u3164"):  # nothing of these can be seen
        assert trained.encode_source([text], "ko") == trained.encode_source([""], "ko")
        assert trained.encode_source([f"{text}a"], "ko") == trained.encode_source([f"{text.lstrip()}a"], "ko")


def test_only_tokenizers_of_the_library_can_be_looked_into(monkeypatch):
    pair = train()
    pair.check_is_fast("a page")
    monkeypatch.setattr(type(pair.source), "is_fast", False)
    message = r"must be a fast one \(of the library `tokenizers`\) for a page, but is a Tok"
    assert_error(message, pair.check_is_fast, "a page")


def test_auto_tokenizer_loads_what_was_saved_with_the_class_old_versions_know_and_nothing_local(trained, tmp_path):
    trained.save_pretrained(tmp_path / "first")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    encoded = tokenizer(HARD, text_target=KOREAN[: len(HARD)])
    assert encoded["labels"] == trained.encode_target(KOREAN[: len(HARD)])
    assert set(encoded) == {"input_ids", "attention_mask", "labels"}
    *decoded, korean = (tokenizer.decode(ids, skip_special_tokens=True) for ids in encoded["input_ids"])
    assert [*decoded, unicodedata.normalize("NFC", korean)] == HARD  # jamo are put together by `decode_target`
    assert tokenizer.padding_side == "right"
    TokenizerPair.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    text = (tmp_path / "second" / "tokenizer_config.json").read_text("utf-8")
    saved = json.loads(text)
    assert (saved["tokenizer_class"], saved["split_special_tokens"]) == ("PreTrainedTokenizerFast", True)
    assert not {"local_files_only", "is_local", "name_or_path", "backend"} & set(saved)
    assert str(tmp_path) not in text


@pytest.mark.parametrize("algorithm", ["bpe", "unigram", "character", "jamo", "word"])
def test_special_tokens_and_tags_come_first_and_the_same_texts_give_the_same_tokenizer(algorithm):
    pair = train(algorithm, vocab_size=None if algorithm == "word" else 290, languages=["ko", "zh-Hans"])
    assert pair.source.convert_ids_to_tokens(range(6)) == ["<pad>", "<s>", "</s>", "<unk>", "<2ko>", "<2zh-Hans>"]
    assert pair.languages == ("ko", "zh-Hans")
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    assert pair.special_ids() == dict(zip(names, (0, 1, 2, 1), strict=True))
    size = 20 if algorithm == "word" else 300
    assert len({train(algorithm, size).source.backend_tokenizer.to_str() for _ in range(3)}) == 1


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_the_vocabulary_has_the_size_asked_for_or_as_much_as_the_texts_allow(algorithm, caplog):
    for size in (BYTES + 5, 263, 300):
        pair = train(algorithm, size)
        assert len(pair.source) == size
        assert sorted(pair.source.get_vocab().values()) == list(range(size))
    possible = len(train(algorithm, 5000).source)
    assert f"`vocab_size` is lowered from 5000 to {possible}: the texts give no more tokens." in caplog.text
    caplog.clear()
    assert len(train(algorithm, possible).source) == possible < 5000
    assert not caplog.text


def test_letters_under_a_tie_bar_are_one_character_and_modifiers_are_characters_of_their_own():
    words = ["t͡ʃʼa", "kʷaː", "k͜p͡bõ"]
    pair = train_tokenizers(words, words, vocab_size=None, algorithm="character")
    tokens = [pair.source.convert_ids_to_tokens(ids)[:-1] for ids in pair.encode_source(words)]
    assert tokens == [["t͡ʃ", "ʼ", "a"], ["k", "ʷ", "a", "ː"], ["k͜p͡b", "õ"]]
    assert pair.decode_target(pair.encode_target(words)) == words


WRONG = [  # arguments of `train_tokenizers`, and the message
    (("bpe", 260, {"languages": ["ko"]}), r"`vocab_size` must be at least 261 for bpe .* but is 260 instead"),
    (("bpe", 300, {"joint": False, "target_vocab_size": 100}), "`target_vocab_size` must be at least 260"),
    (("bpe", None, {}), "`vocab_size` must be a number for bpe, but is None"),
    (("bpe", 10**9, {}), "`vocab_size` must be at most 1048576, but is 1000000000 instead"),
    (("bpe", 300, {"target_vocab_size": 280}), "`target_vocab_size` must be None for a joint vocabulary, but is 280"),
    (("sentencepiece", 300, {}), r"`algorithm` must be one of bpe, unigram, .*, word, but is 'sentencepiece'"),
    (("bpe", 300, {"languages": "ko"}), "`languages` must be a list"),
    *((("bpe", 300, {"languages": each}), "must be different codes") for each in (["ko", "ko"], ["k o"], ["ko>"])),
]


def test_arguments_of_a_training_that_cannot_be_are_named_and_generators_are_as_good_as_lists():
    assert_refused(WRONG, lambda given: train(*given[:2], **given[2]))
    assert_error("`source_texts` must be a list or a stream", train_tokenizers, "hello", ["hello"], vocab_size=300)
    pair = train_tokenizers(iter(KOREAN), (text for text in ENGLISH), vocab_size=300)
    assert pair.source.get_vocab() == train().source.get_vocab()


def test_words_are_what_stands_between_spaces_be_it_like_a_control_token():
    commands, actions = ["jump twice", "walk and  jump"], ["JUMP JUMP", "WALK JUMP"]
    pair = train_tokenizers(commands, actions, algorithm="word", vocab_size=None)
    assert len(pair.source) == 4 + len({"jump", "twice", "walk", "and", "JUMP", "WALK"})
    assert pair.decode_target(pair.encode_target(actions)) == actions
    assert pair.decode_target(pair.encode_source([" walk\tand jump "])) == ["walk and jump"]
    most_frequent = train_tokenizers(["a a a b b c"], ["a b"], algorithm="word", vocab_size=6)
    assert most_frequent.decode_target(most_frequent.encode_target(["a b c a"])) == ["a b <unk> a"]
    pair = train_tokenizers(["a <s> b"], ["</s>"], algorithm="word", vocab_size=100, languages=["ko"])
    ids = pair.encode_target(["<s> </s>", "<2ko> <pad>"])
    assert min(ids[0][:-1]) > 4
    assert ids[1] == [3, 3, 2]
    assert pair.decode_target(ids[:1]) == ["<s> </s>"]


def test_separate_tokenizers_lie_in_two_folders(tmp_path):
    pair = train(joint=False, target_vocab_size=280, languages=["en", "de"])
    assert (len(pair.source), len(pair.target), pair.is_joint) == (300, 280, False)
    pair.save_pretrained(tmp_path)
    assert (tmp_path / "target_tokenizer" / "tokenizer.json").is_file()
    loaded = TokenizerPair.from_pretrained(str(tmp_path))
    assert (loaded.is_joint, loaded.languages) == (False, ("en", "de"))
    assert loaded.encode_source(KOREAN, "de") == pair.encode_source(KOREAN, "de")
    assert loaded.encode_target(ENGLISH) == pair.encode_target(ENGLISH)
    assert len(pair.encode_source(KOREAN[:1], "de")[0]) < len(pair.encode_target(KOREAN[:1])[0])  # of its own texts
    message = "must not hold a `target_tokenizer` if its tokenizer is for both sides.* remove it"
    assert_error(message, train().save_pretrained, tmp_path)
    train().source.save_pretrained(tmp_path)  # as transformers' Trainer does
    assert_error(message, TokenizerPair.from_pretrained, tmp_path)


def test_the_tag_of_the_target_language_comes_first_and_must_be_known():
    pair, none = train(languages=["ko", "en"]), "left out for a model without tags"
    plain = pair.encode_target(["hello"])[0]
    assert pair.encode_source(["hello"], "en") == [[5, *plain]]
    assert pair.encode_source(["hello"], target_language="ko") == [[4, *plain]]
    one = "one of ko, en"
    for tokenizers, wrong, known in ((pair, "fr", one), (pair, None, one), (train(), "ko", none)):
        message = f"`target_language` must be {known}, but is {wrong!r} instead"
        assert_error(message, tokenizers.encode_source, ["hello"], wrong)
    assert train(languages=["ko"]).encode_source(["hello"]) == train(languages=["ko"]).encode_target(["hello"])


def test_what_is_no_list_of_texts_is_named_and_labels_with_padding_can_be_decoded():
    import torch

    pair = train()
    cases = [
        ("hello", "`texts` must be a list or a stream, but is the text 'hello' instead"),
        ({"text": "hello"}, "`texts` must be a list or a stream, but is a dict"),
        (b"hello", "`texts` must be a list or a stream, but is a bytes"),
        (None, "`texts` must be a list or a stream, but is a NoneType"),
        (["hello", None], r"`texts\[1\]` must be a string, but is NoneType"),
    ]
    assert_refused(cases, pair.encode_target)
    ids = pair.encode_target(["hello"])[0]
    assert pair.decode_target(torch.tensor([[*ids, -100, -100], [1, *ids, 0]])) == ["hello", "hello"]


def test_a_fitting_config_passes_and_one_that_disagrees_is_refused():
    fields = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    fields |= {"decoder_vocab_size": None}
    pair, separate = train(), train(joint=False, target_vocab_size=280)
    for tokenizers, size in ((pair, None), (pair, 300), (separate, 280)):
        tokenizers.check_config(MarianConfig(**fields | {"decoder_vocab_size": size}))
    for tokenizers, change, expected in (
        (pair, {"vocab_size": 301, "decoder_vocab_size": 300}, 300),
        (pair, {"decoder_vocab_size": 299}, 300),
        (separate, {"decoder_vocab_size": 300}, 280),
        (pair, {"pad_token_id": 1}, 0),
        (pair, {"bos_token_id": None}, 1),
        (pair, {"eos_token_id": 0}, 2),
        (pair, {"decoder_start_token_id": 0}, 1),
    ):
        (name, value), *_ = change.items()
        message = f"does not fit the tokenizers: `{name}` must be {expected}, but is {value} instead"
        assert_error(message, tokenizers.check_config, MarianConfig(**fields | change))


def strangers_tokenizer(pad_token="<pad>", eos_token="</s>"):
    backend = train().source.backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad_token, eos_token=eos_token)


def test_somebody_elses_tokenizer_can_be_used_where_there_is_one_that_pads_ends_and_does_not_cut_at_random(tmp_path):
    for folder, message in ((tmp_path, r"has no tokenizer_config\.json"), (tmp_path / "nowhere", "does not exist")):
        message = f"must be a folder with a tokenizer, but {message}"
        assert_error(message, TokenizerPair.from_pretrained, folder, error=FileNotFoundError)
    whole = strangers_tokenizer()
    whole.save_pretrained(tmp_path)
    pair = TokenizerPair.from_pretrained(tmp_path)
    assert (pair.is_joint, pair.languages) == (True, ())
    assert list(pair.special_ids().values()) == [0, None, 2, 0]  # padding, beginning, end, start of a decoder
    assert pair.decode_target(pair.encode_source(ENGLISH)) == ENGLISH
    endless, unpadded = strangers_tokenizer(eos_token=None), strangers_tokenizer(pad_token="<unk>")
    assert_error("`eos_token_id` of the target tokenizer must be set", TokenizerPair, whole, endless)
    assert_error(r"`pad_token_id` must be the same in both .*, but is 0 .* and 3", TokenizerPair, whole, unpadded)
    whole.backend_tokenizer.model.dropout = 0.1
    whole.save_pretrained(tmp_path)
    message = r"`dropout` of the source tokenizer .+ must be null, .+ but is 0.1"
    assert_error(message, TokenizerPair.from_pretrained, tmp_path)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_a_word_as_long_as_a_book_is_cut_where_a_tokenizer_is_trained(algorithm):
    cut = tokenizer_training._without_long_words(["가 나", "x" * 2500 + " y", "z " * 2500, "z" + "\u00a0" * 1500])
    cut_spaces = ["z" + "\u00a0" * 1000, "\u00a0" * 500]
    with pytest.warns(UserWarning, match="pieces of 2 texts with 1000 letters or spaces in a row"):
        assert [*cut] == ["가 나", "x" * 1000, "x" * 1000, "x" * 500 + " y", "z " * 2500, *cut_spaces]
    texts = [f"a sentence with {number}" for number in range(200)]
    long = ["a" * 300_000, "a" + " " * 300_000, "a" + "\u3000" * 300_000]
    with pytest.warns(UserWarning, match="pieces of 3 texts"):
        pair = train_tokenizers([*texts, *long], texts, vocab_size=280, algorithm=algorithm)
    assert pair.decode_target(pair.encode_target([texts[7]])) == [texts[7]]


def test_tokens_that_a_user_adds_are_read_as_the_guide_says(tmp_path):
    train().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<name>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<ent>"]})
    names = [tokenizer.convert_tokens_to_ids(token) for token in ("<name>", "<ent>", "<s>")]

    def read(changed):
        return set(changed("a <name> b <ent> c <s>")["input_ids"]) & set(names)

    assert read(tokenizer) == {names[0]}
    with pytest.warns(UserWarning, match=r"^<ent> will be split in texts, .*use `tokenizer.add_tokens`, or find"):
        TokenizerPair(tokenizer, tokenizer)
    tokenizer.split_special_tokens = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TokenizerPair(tokenizer, tokenizer)
    tokenizer.save_pretrained(tmp_path / "changed")
    assert read(tokenizer) == read(AutoTokenizer.from_pretrained(tmp_path / "changed")) == set(names)


def test_transformers_loads_either_tokenizer_and_the_source_s_refuses_texts_of_the_target(tmp_path):
    pair = train(joint=False)
    pair.save_pretrained(tmp_path)
    source = AutoTokenizer.from_pretrained(tmp_path)
    target = AutoTokenizer.from_pretrained(tmp_path, subfolder="target_tokenizer")
    assert target(text_target=ENGLISH[:3])["input_ids"] == pair.encode_target(ENGLISH[:3])
    source.save_pretrained(tmp_path / "again")
    both, alone = {"text": KOREAN[:2], "text_target": ENGLISH[:2]}, {"text_target": ENGLISH[:2]}
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    for tokenizer, texts in ((source, both), (source, alone), (again, alone)):
        assert_error("`text_target` must be given to the target's tokenizer", tokenizer, **texts)
    assert source(KOREAN[:2])["input_ids"] == pair.encode_source(KOREAN[:2])


MARKED = ["▁The ▁wom an ▁buys ▁an ▁app le.", "T h e ▁ d o g", "▁", "▁▁ ▁a▁", "<s> ▁</s> <unk>"]


@pytest.mark.parametrize("joint", [True, False])
def test_words_with_the_mark_of_sentencepiece_come_back(joint, tmp_path):
    pair = train_tokenizers(MARKED, MARKED, algorithm="word", vocab_size=None, joint=joint)
    pair.save_pretrained(tmp_path)
    for each in (pair, TokenizerPair.from_pretrained(tmp_path)):
        assert each.decode_target(each.encode_target(MARKED)) == MARKED
        assert each.decode_target(each.encode_target(["  ▁ \u00a0T\u3000h "])) == ["▁ T h"]
    assert_error(r"each symbol must be one of the 19 .* but '▁dog' is none", pair.encode_target, ["▁dog"])


def replacing(pattern, content, count):
    kind = "Regex" if pattern == "." else "String"
    replaces = [{"type": "Replace", "pattern": {kind: pattern}, "content": content}] * count
    return {"type": "Sequence", "normalizers": replaces, "decoders": replaces}


def there_and_back(folder):
    loaded = TokenizerPair.from_pretrained(folder)
    loaded.decode_target(loaded.encode_source(["a cat"]))


def test_a_tokenizer_that_makes_too_much_of_a_text_or_is_broken_is_a_value_error(tmp_path, monkeypatch):
    """Each change of tokenizer.json, or of the settings, and what is said of it: mostly before it is loaded."""
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": []}
    end = {"</s>": {"id": "</s>", "ids": [2] * 20_000, "tokens": ["</s>"] * 20_000}}
    too_much = [
        ("normalizer", replacing("a", "aa", 40)),
        ("normalizer", {"type": "Sequence", "normalizers": [replacing(".", "b", 20)]}),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 10**7}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 8).decode()}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 20_000}),
        ("decoder", replacing("e", "ee", 40)),
        ("post_processor", template | {"special_tokens": end}),
        ("post_processor", template | {"single": template["single"] * 20_000}),
    ]
    slow = "must have patterns that end their search in 1 seconds"
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    broken = [
        ("pre_tokenizer", split | {"pattern": {"Regex": "(?:네{1,9}){2,7}b"}}, slow),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}, slow),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "cannot encode texts: PanicException"),
        ("decoder", {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}, "cannot decode ids: PanicExcep"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "cannot be loaded: PanicException"),
        ("model", {"type": "BPE", "vocab": {}, "merges": [["zzz", "yyy"]]}, "cannot be loaded: Exception"),
        ("tokenizer_class", 7, "cannot be loaded: AttributeError"),
        ("model_max_length", "x", "cannot encode texts: TypeError"),
    ]
    assert tokenization.are_quick(
        ("(?:\\p{L}\\p{M}*)+", "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s]+[\\r\\n]*|\\s+(?!\\S)")
    )
    monkeypatch.setattr(tokenization, "PATIENCE", 1)
    pair = train_tokenizers(["a cat", "a dog"], ["a cat", "a dog"], vocab_size=270)
    much = "must make at most 1000 characters from one"
    for key, value, message in [(*case, much) for case in too_much] + broken:
        pair.save_pretrained(tmp_path)
        name = "tokenizer.json" if isinstance(value, dict) else "tokenizer_config.json"
        change_json(tmp_path / name, **{key: value})
        (tmp_path / "heed_checksums.json").unlink()
        assert_error(message, there_and_back, tmp_path)
