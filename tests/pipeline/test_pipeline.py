"""The translation pipeline: what goes in whole comes out whole, for every kind of checkpoint."""

import json
from itertools import product
from threading import Thread
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from heedful import BeamSearch, HeedForConditionalGeneration, MinimumBayesRisk, Translator, pipeline_heed
from heedful.data.tokenization import TARGET_FOLDER, TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.native.engine import NativeDecoder
from heedful.pipeline_heed import TASK, TEXT_TASK, pipelines_of_folder
from heedful.symbols_heed import decoded
from helpers import assert_error, assert_refused, closure_of, shake, tiny_model
from memorised import PAIRS, memorised_model, saved_in, saved_model

KOREAN, ENGLISH = list(PAIRS), list(PAIRS.values())
ROWS = ("input_ids", "attention_mask")
SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
pytestmark = pytest.mark.filterwarnings("ignore:.*cut off.*:UserWarning:(?!_pytest)")


@pytest.fixture(scope="module")
def tokenizers():
    return train_tokenizers(KOREAN, ENGLISH, vocab_size=272)


@pytest.fixture(scope="module")
def model(tokenizers):
    return memorised_model(tokenizers, PAIRS, **SHALLOW)


@pytest.fixture(scope="module")
def folder(model, tokenizers, tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("joint"), model, tokenizers)


@pytest.fixture
def translate(model, tokenizers):
    return pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu")


def texts_of(results):
    return [result["translation_text"] for result in results]


# Texts in and out


def test_one_text_gives_a_list_and_several_give_a_list_in_their_order_also_read_lazily(translate):
    assert translate(KOREAN[0]) == [{"translation_text": ENGLISH[0]}]
    assert translate([]) == []
    rows = KeyDataset([{"ko": text} for text in KOREAN], "ko")
    for texts, expected in ((KOREAN, ENGLISH), (tuple(KOREAN[::-1]), ENGLISH[::-1]), (rows, ENGLISH)):
        assert texts_of(translate(texts, batch_size=2)) == expected
    taken = []
    stream = translate((taken.append(text) or text for text in KOREAN), batch_size=2)
    assert next(stream) == {"translation_text": ENGLISH[0]}
    assert len(taken) <= 3
    assert texts_of(stream) == ENGLISH[1:]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_results_do_not_depend_on_the_batch_size(translate, num_beams):
    texts = [*KOREAN, "", "네. 비가 온다.", "  \n 고양이가 잔다.\n"]
    settings = {"num_beams": num_beams, "return_scores": True, "split_sentences": True}
    alone = translate(texts, **settings)
    for batch_size in (2, 3, 64):
        together = translate(texts, batch_size=batch_size, **settings)
        assert texts_of(together) == texts_of(alone)
        for one, other in zip(together, alone, strict=True):
            assert one["score"] == (other["score"] and pytest.approx(other["score"], abs=1e-5))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_translation_of_a_model_whose_outputs_depend_on_all_it_reads(side, monkeypatch):
    tokenizer = train_tokenizers(KOREAN, ENGLISH, vocab_size=272).source
    tokenizer.padding_side = side
    model = tiny_model(vocab_size=272)
    model.generation_config.update(eos_token_id=2, max_new_tokens=8)
    translate = pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu")
    texts = ["네.", *KOREAN, "비가 온다. 네. 비가 온다. 고양이가 잔다."]
    alone = texts_of(translate(texts))
    assert len(set(alone)) > 4
    generate = Mock(side_effect=model.generate)
    monkeypatch.setattr(model, "generate", generate)
    assert texts_of(translate(texts, batch_size=len(texts))) == texts_of(translate(iter(texts), batch_size=3)) == alone
    tokens, given = tokenizer(texts)["input_ids"], [call.kwargs for call in generate.call_args_list]
    seen = [rows for each in given for rows in zip(*(each[name].tolist() for name in ROWS), strict=True)]
    for ids, mask in seen:
        padding = [tokenizer.pad_token_id] * mask.count(0)
        assert mask == sorted(mask, reverse=side == "right")
        assert ids in [padding + row if side == "left" else row + padding for row in tokens]
    assert any(0 in mask for _, mask in seen)


def test_settings_that_count_the_rows_of_a_batch_meet_its_texts_in_their_order(model, tokenizers, translate):
    texts = [KOREAN[3], "", KOREAN[1]]  # the shortest first, and a blank one
    first = [tokenizers.encode_target([word])[0][0] for word in ("It", "", "Yes")]
    settings = {"prefix_allowed_tokens_fn": lambda row, ids: [first[row]] if len(ids) == 1 else list(range(272))}
    found = texts_of(translate(texts, batch_size=3, **settings))
    by_default = pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu", **settings)
    assert texts_of(by_default(texts, batch_size=3)) == found
    assert [text[:1] for text in found] == ["I", "", "Y"]
    forced = BeamSearch(force_words_ids=[tokenizers.encode_target(["Yes"])[0][:-1]])
    found = texts_of(translate(texts, batch_size=3, num_beams=4, custom_generate=forced))
    assert ["Yes" in text for text in found] == [True, False, True]
    chosen = MinimumBayesRisk(tokenizers)
    settings = {"custom_generate": chosen, "num_beams": 4, "num_return_sequences": 4, "batch_size": 2}
    found = texts_of(translate([KOREAN[0], f"{KOREAN[3]}\n\n{KOREAN[5]}"], **settings))
    assert [text.count("\n\n") for text in found] == [0, 1]
    assert texts_of(translate(["", " "], **settings)) == ["", " "]


@pytest.mark.filterwarnings("error")
def test_stop_strings_end_a_translation_with_every_search(translate):
    expected = ["The", "The", "I eat an app", "Yes.", "She", "It rains."]
    for settings in ({}, {"num_beams": 3}, {"num_beams": 2, "custom_generate": BeamSearch()}):
        settings |= {"stop_strings": ["he", "pp"], "return_scores": True}
        found, alone = (translate(KOREAN, batch_size=size, **settings) for size in (6, 1))
        assert texts_of(found) == expected
        assert [one["score"] for one in found] == pytest.approx([one["score"] for one in alone], abs=1e-5)


def test_scores_are_those_of_the_translator_weighed_by_tokens(translate, model, tokenizers):
    for beams, search in product((1, 2), (None, NativeDecoder(model), BeamSearch())):
        strategy = {"custom_generate": search} if search else {}
        expected = Translator(model, tokenizers).translate(KOREAN, num_beams=beams)
        found = translate(KOREAN, num_beams=beams, return_scores=True, length_penalty=1.0, **strategy)
        assert [one["score"] for one in found] == pytest.approx([one[0].score for one in expected], abs=1e-4)
    settings = {"num_beams": 4, "num_return_sequences": 3}
    results = translate(KOREAN, **settings, return_scores=True, batch_size=2)
    for own, expected in zip(results, Translator(model, tokenizers).translate(KOREAN, **settings), strict=True):
        assert texts_of(own) == [each.text for each in expected]
        assert [one["score"] for one in own] == pytest.approx([each.score for each in expected], abs=1e-4)
    one, other = translate([KOREAN[0], KOREAN[1]], num_beams=2, return_scores=True)
    both = translate(f"{KOREAN[0]}\n{KOREAN[1]}", num_beams=2, return_scores=True)[0]
    counts = [len(ids) for ids in tokenizers.encode_target(ENGLISH[:2])]
    expected = (one["score"] * counts[0] + other["score"] * counts[1]) / sum(counts)
    assert both["score"] == pytest.approx(expected, abs=1e-5)


# Long texts


def test_lines_paragraphs_and_white_space_stay_where_they_are_and_are_no_text_alone(translate, monkeypatch):
    text = "\n  고양이가 잔다.\n\n\n네.\t\r\n \n비가 온다.  \n"
    expected = "\n  The cat sleeps.\n\n\nYes.\t\r\n \nIt rains.  \n"
    for batch_size in (1, 2):
        assert translate(text, batch_size=batch_size)[0]["translation_text"] == expected
    monkeypatch.setattr(translate.model, "generate", lambda **_: pytest.fail("the model was asked"))
    for text in ("", " ", "\n\n", "\u2028", "\u200b", "\ufeff", "\u2060\n \u00ad", "\u3164"):
        assert translate(text, return_scores=True) == [{"translation_text": text, "score": None}]


def test_sentences_are_translated_one_by_one_where_needed(translate, monkeypatch):
    text, expected = " ".join(KOREAN), [" ".join(ENGLISH)]
    for settings in ({"split_sentences": True}, {"max_source_tokens": 40}):
        assert texts_of(translate(text, **settings)) == expected
    # Short enough: the model gets the line whole, and this one has not learned such lines.
    assert texts_of(translate(text, max_new_tokens=60)) != expected
    generate = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(translate.model, "generate", generate)
    assert_error(None, translate, "네.\n네. ", split_sentences=False, error=ZeroDivisionError)
    ids = generate.call_args.kwargs["input_ids"]
    assert translate.tokenizer.batch_decode(ids, skip_special_tokens=True) == ["네.\n네."]


def test_nothing_is_cut_off_silently_at_256_tokens_or_what_the_folder_says(translate, tokenizers, monkeypatch):
    message = r"at most 6 tokens, but '개가 공원에서 달린다.'… has \d+ instead"
    assert_error(message, translate, "네. 개가 공원에서 달린다.", max_source_tokens=6)
    model = tiny_model(vocab_size=272, position_encoding="learned", max_position_embeddings=12)
    short = pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu")
    assert_error("at most 12 tokens", short, "x" * 30)
    assert len(short("Yes. " * 20)) == 1
    with pytest.warns(UserWarning, match="2 sentences were cut off at 2 tokens"):
        translate(f"{KOREAN[0]}\n{KOREAN[1]}", max_new_tokens=2)
    monkeypatch.setattr(translate.model.generation_config, "eos_token_id", 99)
    for max_length, longest in ((120, 119), (20, 19), (None, 256)):
        monkeypatch.setattr(translate.model.generation_config, "max_length", max_length)
        with pytest.warns(UserWarning, match=f"cut off at {longest} tokens"):
            translate("네.")


# Streams of tokens


def test_a_streamer_gets_the_sentences_of_a_text_as_one_stream(translate):
    streamer = TextIteratorStreamer(translate.target_tokenizer, skip_special_tokens=True, timeout=60)
    text = "고양이가 잔다. 네.\n비가 온다."
    thread = Thread(target=translate, args=(text,), kwargs={"streamer": streamer, "split_sentences": True})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == "The cat sleeps. Yes.\nIt rains."
    assert len(pieces) > 3


# Languages, by kind of checkpoint


def test_a_heed_model_of_several_languages_selects_one_by_the_tag_of_its_tokenizers():
    pair = train_tokenizers(KOREAN, ENGLISH, vocab_size=272, languages=["ko", "en"])
    model = memorised_model(pair, PAIRS, "en", **SHALLOW)
    translate = pipeline(TASK, model=model, tokenizer=pair.source, device="cpu")
    assert translate.languages.known == pair.languages == ("ko", "en")
    for language in pair.languages:
        ids = translate.languages.encode(pair.source, "<2ko> 네.", None, language)
        assert ids == pair.encode_source(["<2ko> 네."], language)[0]
    assert texts_of(translate(KOREAN, tgt_lang="en", batch_size=2)) == ENGLISH
    cases = [({}, "`tgt_lang` must be one of ko, en, but is None")]
    cases.append(({"tgt_lang": "de"}, r"`tgt_lang` must be a language of the model \(ko, en\), but is 'de'"))
    cases.append(({"src_lang": "ko", "tgt_lang": "en"}, "`src_lang` must be None for this model, which selects"))
    assert_refused(cases, lambda settings: translate("네.", **settings))


SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SIZES |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64}


def served(config, tokenizer, **options):
    """Return a pipeline, its model, random, with answers that are short and differ from each other, and tokenizer."""
    sizes = {"vocab_size": len(tokenizer), **SIZES, **options}
    model = transformers.AutoModelForSeq2SeqLM.from_config(config(**sizes))
    torch.manual_seed(1)
    shake(model)
    model.generation_config.max_new_tokens = 9
    model.generation_config.no_repeat_ngram_size = 1
    return pipeline(TASK, model=model.eval(), tokenizer=tokenizer, device="cpu"), model, tokenizer


def word_tokenizer(words, start=("<s>", "<pad>", "</s>", "<unk>")):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate([*start, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    end = ("</s>", vocabulary["</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


WORDS = [*"abcdefgh", "translate", "English", "to", "German", "French", ":"]


@torch.no_grad()
def answers(model, tokenizer, rows, **options):
    """Generate from rows of ids, one by one: the plainest way."""
    outputs = [
        model.generate(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(), **options)[0]
        for row in rows
    ]
    return [decoded(tokenizer, output.tolist()) for output in outputs]  # which shows unknown words


def test_marian_of_several_targets_selects_one_by_a_tag():
    tokenizer = word_tokenizer([*WORDS, "<pad>"], ("</s>", "<unk>", ">>deu<<", ">>fra<<"))
    ids = {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": tokenizer.pad_token_id}
    ids |= {"eos_token_id": 0, "forced_eos_token_id": 0}
    translate, model, tokenizer = served(transformers.MarianConfig, tokenizer, **ids)
    for language, tag in (("deu", 2), ("fra", 3)):
        rows = [[tag, *tokenizer(text)["input_ids"]] for text in ("a b c", "d")]
        assert texts_of(translate(["a b c", "d"], tgt_lang=language)) == answers(model, tokenizer, rows)
    assert_error("deu, fra", translate, "a", tgt_lang="de")
    assert_error("at most 64 tokens", translate, "a " * 70, tgt_lang="deu")


def nllb():
    vocabulary = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefgh"])}
    languages = ["eng_Latn", "fra_Latn", "kor_Hang"]
    tokenizer = transformers.NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=languages)
    return served(transformers.M2M100Config, tokenizer)


def test_nllb_marks_the_source_and_begins_with_the_target():
    translate, model, tokenizer = nllb()
    assert translate.languages.known == ("eng_Latn", "fra_Latn", "kor_Hang")
    found, texts = set(), ["a b c", "d", "e f g h"]
    for source, target in product((None, "kor_Hang"), ("fra_Latn", "kor_Hang")):
        code, begin = (tokenizer.convert_tokens_to_ids(name) for name in (source or "eng_Latn", target))
        rows = [[code, *tokenizer(text, add_special_tokens=False)["input_ids"], 2] for text in texts]
        expected = answers(model, tokenizer, rows, forced_bos_token_id=begin)
        assert texts_of(translate(texts, src_lang=source, tgt_lang=target, batch_size=3)) == expected
        found.add(tuple(expected))
    assert len(found) == 4
    assert tokenizer.src_lang == "eng_Latn"
    assert_error("`tgt_lang` must be one of eng_Latn, fra_Latn, kor_Hang, but is None", translate, "a")
    for name in ("src_lang", "tgt_lang"):
        assert_error(f"`{name}` must be a language of the model .*eng_Latn.*'fr'", translate, "a", **{name: "fr"})


def test_a_source_is_marked_with_its_language_while_other_threads_use_the_tokenizer(monkeypatch):
    _, model, tokenizer = nllb()
    vocabulary = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")] + [("▁", -2.0), ("a", -3.0)]
    for each in (tokenizer, transformers.MBartTokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="ro_RO")):
        languages, before, expected = pipeline_heed.Languages(each, model), each.src_lang, {}
        for language in languages.known[:3]:
            each.src_lang = language
            expected[language] = each("a")["input_ids"]
        each.src_lang = before
        monkeypatch.setattr(type(each), "src_lang", property(lambda self, before=before: before))  # none can be set
        found = {language: languages.encode(each, "a", language, before) for language in expected}
        assert found == expected
        assert len(set(map(tuple, found.values()))) == 3


@pytest.mark.parametrize("starts_with_language", [False, True])
def test_mbart_begins_with_the_target_in_either_of_its_ways(starts_with_language):
    vocabulary = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    vocabulary += [("▁", -2.0), *[(letter, -3.0) for letter in "abcdefgh"]]
    tokenizer = transformers.MBartTokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="ro_RO")
    german, romanian = tokenizer.convert_tokens_to_ids(["de_DE", "ro_RO"])
    start = romanian if starts_with_language else 2
    translate, model, tokenizer = served(transformers.MBartConfig, tokenizer, decoder_start_token_id=start)
    option = "decoder_start_token_id" if starts_with_language else "forced_bos_token_id"
    expected = answers(model, tokenizer, tokenizer(["a b"])["input_ids"], **{option: german})
    assert texts_of(translate("a b", tgt_lang="de_DE")) == expected


def test_t5_gets_its_task_in_words_by_a_prefix():
    tokenizer = word_tokenizer([*WORDS, "<s>"], ("<pad>", "</s>", "<unk>"))
    sizes, prefix = {"d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "translate English to German : "
    sizes |= {"decoder_start_token_id": 0, "task_specific_params": {"translation_en_to_de": {"prefix": prefix}}}
    translate, model, tokenizer = served(transformers.T5Config, tokenizer, **sizes)
    expected = answers(model, tokenizer, tokenizer([prefix + "a b"])["input_ids"])
    assert texts_of(translate("a b", prefix=prefix)) == expected
    message = r"`src_lang` must be a language of the model \(none: it has one direction"
    assert_error(message, translate, "a b", src_lang="en", tgt_lang="de")


# Wrong settings


WRONG_SETTINGS = [
    ({"num_beam": 2}, "`num_beam` must be a setting .*`num_beams`"),
    ({"target_language": "en"}, "`target_language` must be a setting"),
    ({"output_scores": True}, "`output_scores` must be a setting"),
    ({"max_source_tokens": 0}, "`max_source_tokens` must be at least 1, but is 0"),
]


def test_wrong_settings_and_what_is_no_text_are_named(translate, model, tokenizers):
    given = {"model": model, "tokenizer": tokenizers.source, "device": "cpu"}
    streamed = {"streamer": TextIteratorStreamer(tokenizers.target), "batch_size": 2}
    call = [({"tgt_lang": "en"}, r"`tgt_lang` must be .*none: it has one direction.*'en'")]
    call.append((streamed, "`batch_size` must be 1"))
    assert_refused(WRONG_SETTINGS + call, lambda settings: translate(KOREAN, **settings))
    assert_refused(WRONG_SETTINGS, lambda settings: pipeline(TASK, **given, **settings))
    wrong = [(["네.", 3], "must be a string, but is int"), ([["네."]], "must be a string, but is list")]
    wrong += [(each, f"`inputs` must be a list or a stream, but is a {type(each).__name__}") for each in (3.5, None)]
    wrong += [({"text": "네."}, "but is a dict"), ("네.".encode(), "but is a bytes")]
    assert_refused(wrong, translate)


def test_settings_and_a_generation_config_are_defaults_of_a_call(model, tokenizers, translate, monkeypatch):
    settings = {"num_beams": 2, "num_return_sequences": 2, "return_scores": True, "batch_size": 2}
    two = pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu", **settings)
    assert [len(result) for result in two(KOREAN)] == [2] * len(KOREAN)
    assert set(two("네.", num_return_sequences=1)[0]) == {"translation_text", "score"}
    three = transformers.GenerationConfig(num_beams=3, num_return_sequences=3)
    assert len(translate("네.", generation_config=three)) == 3
    own = transformers.GenerationConfig(num_beams=2)
    by_default = pipeline(TASK, model=model, tokenizer=tokenizers.source, device="cpu", generation_config=own)
    assert texts_of(by_default(KOREAN, batch_size=2)) == ENGLISH
    monkeypatch.setattr(model.generation_config, "num_beams", 3)
    monkeypatch.setattr(model.generation_config, "num_return_sequences", 2)
    assert [len(each) for each in translate(KOREAN[:2], generation_config=own, num_beams=3)] == [2, 2]
    monkeypatch.setattr(model.generation_config, "max_length", None)
    own = transformers.GenerationConfig(eos_token_id=99, num_beams=1, num_return_sequences=1)
    with pytest.warns(UserWarning, match="1 sentence was cut off at 256 tokens"):
        translate("네.", generation_config=own)
    with pytest.warns(UserWarning, match="1 sentence was cut off at 9 tokens"):
        translate("네.", eos_token_id=None, max_new_tokens=9, num_beams=1, num_return_sequences=1)


def test_tokenizers_that_do_not_fit_are_named(model, tokenizers):
    other = train_tokenizers(KOREAN, ENGLISH, vocab_size=270)
    cases = [
        ((other.source, None), "number of tokens of the `tokenizer` must be 272, but is 270"),
        ((tokenizers.source, other.target), "number of tokens of the `target_tokenizer` must be 272, but is 270"),
        ((word_tokenizer(WORDS), None), "`pad_token_id` of the `tokenizer` must be 0, but is 1"),
    ]
    given = {"model": model, "device": "cpu"}
    assert_refused(cases, lambda pair: pipeline(TASK, tokenizer=pair[0], target_tokenizer=pair[1], **given))


# Folders


def test_the_task_is_known_trusts_no_copied_code_and_finds_the_target_tokenizer(folder, tmp_path):
    translate = pipeline(TASK, model=str(folder), device="cpu")
    assert type(translate) is pipeline_heed.HeedTranslationPipeline
    assert texts_of(translate(KOREAN)) == ENGLISH
    trusted = pipeline(model=str(folder), device="cpu", trust_remote_code=True)
    assert type(trusted) is pipeline_heed.HeedTranslationPipeline
    assert pipeline_heed.TARGET_FOLDER == TARGET_FOLDER
    separate = saved_model(tmp_path / "separate", vocab_size=264, joint=False, **SHALLOW)  # of one size
    translate = pipeline(TASK, model=str(separate), device="cpu")
    assert translate.target_tokenizer.get_vocab() != translate.tokenizer.get_vocab()
    assert texts_of(translate(KOREAN, batch_size=2)) == ENGLISH
    translate.save_pretrained(tmp_path)
    assert texts_of(pipeline(TASK, model=str(tmp_path), device="cpu")(KOREAN)) == ENGLISH
    translate.tokenizer.init_kwargs.pop(TARGET_FOLDER)  # as tokenizers that were just trained
    translate.save_pretrained(tmp_path)
    assert not TokenizerPair.from_pretrained(tmp_path).is_joint
    pipeline(TASK, model=str(folder), device="cpu").save_pretrained(tmp_path)  # of one tokenizer, where two were
    assert texts_of(pipeline(TASK, model=str(tmp_path), device="cpu")(KOREAN)) == ENGLISH
    translate.target_tokenizer.save_pretrained(tmp_path / TARGET_FOLDER)
    assert_error("must not hold a `target_tokenizer`", pipeline, TASK, model=str(tmp_path), device="cpu")


def test_what_does_not_translate_takes_a_text_whole(model, folder, tmp_path, tokenizers, monkeypatch):
    generate = pipeline(TEXT_TASK, model=str(folder), device="cpu")
    assert generate(KOREAN) == [{"generated_text": text} for text in ENGLISH]
    generate.save_pretrained(tmp_path)
    trusted = pipeline(model=str(tmp_path), device="cpu", trust_remote_code=True)
    assert type(trusted) is pipeline_heed.HeedText2TextPipeline
    HeedForConditionalGeneration.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    offered = json.loads((tmp_path / "again" / "config.json").read_text())["custom_pipelines"]
    assert offered == pipelines_of_folder(TEXT_TASK) != pipelines_of_folder(TASK)
    encode = Mock(return_value=[5])
    monkeypatch.setattr(pipeline_heed.Languages, "encode", encode)
    generate = pipeline(TEXT_TASK, model=model, tokenizer=tokenizers.source, device="cpu", max_new_tokens=1)
    generate("One. Two.\n\nThree.")
    generate("One. Two.", split_sentences=True)
    assert [call.args[1] for call in encode.call_args_list] == ["One. Two.\n\nThree.", "One.", "Two."]
    encode.return_value = [5] * 3
    assert_error("A text must have at most 2 tokens", generate, "One. Two.", max_source_tokens=2)


def test_a_pipeline_saves_models_that_are_not_heeds_with_itself(tmp_path):
    _, model, tokenizer = nllb()
    translate = pipeline(TASK, model=model, tokenizer=tokenizer, device="cpu", tgt_lang="fra_Latn")
    translate.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["custom_pipelines"] == pipelines_of_folder(TASK)
    assert {path.name for path in tmp_path.glob("*.py")} == closure_of("pipeline_heed.py")
    again = pipeline(model=str(tmp_path), device="cpu", trust_remote_code=True)
    assert again("a b", tgt_lang="fra_Latn") == translate("a b")
