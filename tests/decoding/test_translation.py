"""Translations: their order, scores, limits, and independence of the batch they ran in."""

import copy
import json
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, BartConfig, BartForConditionalGeneration, T5GemmaModuleConfig

from heedful import BackTranslation, BeamSearch, attention_maps, pipeline_heed
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding import translation
from heedful.decoding.engines import Translation, evaluation_mode, pad_sources
from heedful.decoding.native.engine import NativeDecoder
from heedful.decoding.paragraphs import Paragraphs
from heedful.decoding.translation import Translator
from heedful.pipeline_heed import HeedTranslationPipeline, pipelines_of_folder
from helpers import assert_error, assert_near, assert_refused, tiny_model
from memorised import memorised_model, saved_in


@pytest.fixture
def translator(model, tokenizers) -> Translator:
    return Translator(model, tokenizers)


def texts_of(results):
    return [[translation.text for translation in translations] for translations in results]


def assert_alike(found, expected):
    """Compare the best translations: the same tokens, and scores that differ by rounding alone."""
    assert [row[0].token_ids for row in found] == [row[0].token_ids for row in expected]
    assert [row[0].score for row in found] == pytest.approx([row[0].score for row in expected], abs=1e-5)


@pytest.fixture
def encoded(tokenizers, monkeypatch):
    seen, encode = [], type(tokenizers).encode_source
    record = lambda self, texts, *more: seen.extend(texts) or encode(self, texts, *more)  # noqa: E731
    monkeypatch.setattr(type(tokenizers), "encode_source", record)
    return seen


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_beams", [1, 3])
def test_results_keep_order_and_depend_on_no_batch_or_part_that_is_scored(translator, pairs, monkeypatch, num_beams):
    texts, settings = [*pairs, *list(pairs)[:2]], {"num_beams": num_beams}
    together = translator.translate(texts, **settings)
    assert texts_of(together) == [[pairs[text]] for text in texts]
    assert all(result[0].finished for result in together)
    assert_alike(translator.translate(texts[::-1], **settings)[::-1], together)
    assert_alike(translator.translate(texts, **settings, token_budget=1), together)
    monkeypatch.setattr("heedful.decoding.engines.LOGITS_BUDGET", 1)
    assert_alike(translator.translate(texts, **settings), together)


def test_sentences_cut_at_the_length_limit_are_counted_in_one_warning_and_a_forced_end_is_one(translator, monkeypatch):
    with pytest.warns(UserWarning, match="2 outputs were cut off at 7 tokens") as record:
        results = translator.translate(["비가 온다.", "네.", "고양이가 잔다."], max_new_tokens=7, token_budget=1)
    assert len(record) == 1
    assert [result[0].finished for result in results] == [False, True, False]
    assert [len(result[0].token_ids) for result in results] == [7, 5, 7]
    monkeypatch.setattr(translator.model.generation_config, "forced_eos_token_id", 2)
    with pytest.warns(UserWarning, match="1 output was cut off"):
        results = translator.translate(["비가 온다."], max_new_tokens=7)
    assert not results[0][0].finished


def test_the_default_length_comes_from_the_generation_config(translator, monkeypatch):
    config = translator.model.generation_config
    monkeypatch.setattr(config, "eos_token_id", None)  # without an end every sentence is as long as allowed
    for max_length, max_new_tokens, longest in ((80, None, 79), (20, None, 19), (None, None, 256), (80, 30, 30)):
        monkeypatch.setattr(config, "max_length", max_length)
        monkeypatch.setattr(config, "max_new_tokens", max_new_tokens)
        for engine, own, expected in (("native", None, longest), ("native", 7, 7), ("generate", 7, 7)):
            each = Translator(translator.model, translator.tokenizers, engine)
            with pytest.warns(UserWarning, match=f"cut off at {expected} tokens before"):
                ((found,),) = each.translate(["네."], max_new_tokens=own)
            assert (len(found.token_ids), found.finished) == (expected, False)


def test_transformers_has_nothing_to_say_of_lengths(translator, monkeypatch):
    logger = logging.getLogger("transformers.generation.utils")
    monkeypatch.setattr(logger, "warning", lambda *words: pytest.fail(str(words)))
    assert translator.model.generation_config.max_length not in (None, 20)
    for engine, num_beams in product(("native", "generate"), (1, 3)):
        own = Translator(translator.model, translator.tokenizers, engine)
        own.translate(["네.", "비가 온다."], num_beams=num_beams, token_budget=1)


def test_translating_turns_dropout_off_and_leaves_the_model_as_it_was(training_model, tokenizers, pairs, translator):
    learning = Translator(training_model, tokenizers)
    found = [learning.translate(list(pairs)), list(learning.score_pairs(pairs.items()))]
    assert training_model.training
    training_model.eval()
    assert found == [learning.translate(list(pairs)), list(learning.score_pairs(pairs.items()))]
    before = translator.model.generation_config.to_dict()
    translator.model.train()
    translator.model.get_encoder().eval()  # as a frozen one
    translator.translate(["네."], num_beams=2, max_new_tokens=9)
    assert translator.model.training
    assert translator.model.get_decoder().layers[0].training
    assert not any(module.training for module in translator.model.get_encoder().modules())
    assert translator.model.generation_config.to_dict() == before
    translator.model.eval()


def test_ids_of_the_generation_config_alone_are_found_and_ends_may_be_several(tokenizers, tmp_path):
    sizes = {"vocab_size": 290, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    parts = {side: T5GemmaModuleConfig(**sizes, cross_attention_hidden_size=16) for side in ("encoder", "decoder")}
    config = transformers.T5GemmaConfig(**parts, vocab_size=290, eos_token_id=[2, 9])
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    model.config.pad_token_id = model.config.bos_token_id = None
    model.generation_config.update(pad_token_id=0, bos_token_id=1, decoder_start_token_id=1, max_new_tokens=4)
    assert not hasattr(model.config, "decoder_start_token_id")
    source, sources = "나는 사과를 먹는다.", tokenizers.encode_source(["나는 사과를 먹는다."])
    expected = model.generate(torch.tensor(sources))[0, 1:].tolist()
    for translator in (
        Translator(model, tokenizers),
        Translator.from_pretrained(saved_in(tmp_path, model, tokenizers)),
    ):
        ((best,),) = translator.translate([source])
        assert list(best.token_ids) == expected
        (pair,) = translator.score_pairs([(source, "I eat.")])
        given = torch.tensor([[1, *pair.token_ids[:-1]]])
        logits = model(torch.tensor(sources), decoder_input_ids=given).logits[0]
        found = logits.log_softmax(-1)[range(len(pair.tokens)), pair.token_ids]
        assert_near(found, torch.tensor(pair.token_scores))
        assert attention_maps(translator, tokenizers, source, "I eat.").fed_tokens[0] == "<s>"
    model.generation_config.decoder_start_token_id = 5
    assert_error("`decoder_start_token_id` must be 1, but is 5 instead", Translator, model, tokenizers)


def test_a_stream_of_lines_is_translated_in_order_reads_no_further_than_its_chunk_and_warns_once(translator, pairs):
    lines = [f"{source}\n" for source in pairs]  # a line end is no part of a sentence, nor is a byte order mark
    results = list(translator.translate_lines(["\ufeff" + lines[0], *lines[1:]], chunk_size=3, num_beams=2))
    assert_alike(results, translator.translate(list(pairs), num_beams=2))
    taken = []
    stream = translator.translate_lines((taken.append(source) or source for source in pairs), chunk_size=2)
    assert next(stream)[0].text == next(iter(pairs.values()))
    assert len(taken) == 2
    with pytest.warns(UserWarning, match="3 outputs were cut off") as record:
        list(translator.translate_lines(["비가 온다."] * 3, chunk_size=1, max_new_tokens=5))
    assert len(record) == 1


WRONG_SETTINGS = [
    ({"num_return_sequences": 2}, r"`num_return_sequences` must be at most `num_beams` \(1\), but is 2"),
    ({"num_beams": 0}, "`num_beams` must be at least 1, but is 0"),
    ({"num_beams": 10**12}, r"`num_beams` must be at most 290, the number of tokens in the vocabulary, but is 10+ "),
    ({"num_return_sequences": 0}, "`num_return_sequences` must be at least 1"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
    ({"token_budget": 0}, "`token_budget` must be at least 1"),
]


def test_wrong_settings_are_named(translator):
    assert_refused(WRONG_SETTINGS, lambda settings: translator.translate(["네."], **settings))
    stream = [({"beams": 3}, "`beams` must be a keyword"), ({"chunk_size": 0}, "`chunk_size` must be at least 1")]
    assert_refused(WRONG_SETTINGS + stream, lambda settings: translator.translate_lines(["네."], **settings))
    assert_error("`target_language`", translator.translate, ["네."], target_language="xx")
    assert_error("vocab_size", Translator, tiny_model(vocab_size=50), translator.tokenizers)


def test_what_is_no_list_of_texts_is_named(translator, tokenizers):
    wrong = [("네.", "must be a list or a stream"), ({"text": "네."}, "but is a dict"), (None, "but is a NoneType")]
    wrong += [(b"a", "but is a bytes"), (["네.", 3], r"`(texts|lines)\[1\]` must be a string, but is int")]
    texts = [
        (["네.", b"a"], r"\[1\]` must be a string, but is bytes"),
        (["네.", "a\udcff"], r"`texts\[1\]` must be Unic"),
    ]
    assert_refused([*wrong, *texts], translator.translate)
    third = (["네.", "네.", "네.", None], r"`lines\[3\]`")
    assert_refused([*wrong, third], lambda lines: list(translator.translate_lines(lines, chunk_size=2)))
    pairs = [(given, "`pairs` must be a list or a stream") for given in ("네.", None)] + [([None], "Pair 1 must be")]
    pairs += [([{"source": "네.", "target": "Yes."}], "Pair 1 must be a source and a target text, but is {'source'")]
    assert_refused(pairs, lambda pairs: list(translator.score_pairs(pairs)))
    assert_refused(wrong[:1], lambda lines: list(BackTranslation("greedy").pairs(translator, lines)))
    model, message = translator.model, r"`model` must be loaded, with `generate\(\)`, but is a "
    assert_error("`tokenizers` must be a `TokenizerPair`, but is a Tokenizers", Translator, model, tokenizers.source)
    models = [((torch.nn.DataParallel(model),), f"{message}DataParallel")]
    models += [((translator,), f"{message}Translator"), (("path",), f"{message}str instead")]
    models += [((model, wrong), "`ensemble` must be a list") for wrong in (model, "path")]
    models += [((model, [model, "path"]), "`ensemble` must be loaded, .* but is a str instead")]
    assert_refused(models, lambda given: Translator(given[0], tokenizers, ensemble=given[1] if given[1:] else ()))


def test_white_space_around_a_text_changes_nothing_and_alone_is_no_text(translator, pairs, monkeypatch):
    plain, scores = translator.translate(list(pairs)), list(translator.score_pairs(pairs.items()))
    for around in (" {}", "{} ", "{}\n", "\u00a0{}\t"):
        spaced = [around.format(text) for text in pairs]
        assert translator.translate(spaced) == list(translator.translate_lines(spaced)) == plain
        spaced_pairs = list(zip(spaced, map(around.format, pairs.values()), strict=True))
        assert list(translator.score_pairs(spaced_pairs)) == scores
    results = translator.translate(["", "네.", "  \t"], num_beams=2, num_return_sequences=2)
    assert results[0] == results[2] == [Translation()] * 2
    assert results[1][0].text == pairs["네."]
    monkeypatch.setattr(translator.model, "generate", lambda **_: pytest.fail("the model was asked"))
    for text in ("", "\u200b", "\ufeff", "\u2060", "\u00ad", "\u200b \u3164\n"):  # nothing of it can be seen
        assert translator.translate([text]) == [[Translation()]]
    assert translator.translate([]) == []


def test_a_translator_that_has_translated_can_be_sent_to_another_process(folder):
    # A model of its own: transformers leaves hooks that cannot be sent in one that was asked for attention weights.
    translator = Translator.from_pretrained(folder)
    expected = texts_of(translator.translate(["고양이가 잔다."]))
    sent = pickle.loads(pickle.dumps(translator))
    assert texts_of(sent.translate(["고양이가 잔다."])) == expected


def test_threads_share_a_model_and_leave_its_settings_as_they_were(model, tokenizers):
    config, beams = model.generation_config, [1, 3, 1, 3] * 8

    def translate(num_beams):
        return texts_of(Translator(model, tokenizers).translate(["고양이가 잔다.", "네."], num_beams=num_beams))

    expected = [*map(translate, beams[:4])] * 8
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(translate, beams)] == expected
    assert model.generation_config is config


def test_a_thread_waits_until_another_has_given_a_training_model_its_mode_back():
    model, entered, released, seen = torch.nn.Dropout().train(), threading.Event(), threading.Event(), []

    def translate():
        with evaluation_mode(model):
            entered.set()
            released.wait(10)
            seen.append(model.training)

    thread = threading.Thread(target=translate)
    with evaluation_mode(model):
        thread.start()
        entered.wait(0.3)  # it would enter now
    released.set()
    thread.join()
    assert seen == [False]
    assert model.training


@pytest.fixture
def short_sources(model, tokenizers) -> Translator:
    """A translator whose model says that it has learned from sources of 20 tokens and fewer."""
    model = copy.deepcopy(model)
    model.generation_config.longest_trained_source = 20
    return Translator(model, tokenizers)


LONG = "고양이가 잔다. 비가 온다.  네."


def test_a_source_longer_than_the_training_or_the_positions_is_warned_of(short_sources, model, tokenizers):
    tokens = len(short_sources.tokenizers.encode_source([LONG])[0])
    with pytest.warns(UserWarning, match=f"Sentence 2 with {tokens} tokens is longer than the 20 .* `--split`"):
        short_sources.translate(["네.", LONG])
    with pytest.warns(UserWarning, match="2 sentences .the first is sentence 1 with") as record:
        list(short_sources.translate_lines([LONG, "네.", LONG], chunk_size=1))
    assert ["longer" in str(entry.message) for entry in record].count(True) == 1
    model = copy.deepcopy(model)
    model.config.max_position_embeddings = 12
    with pytest.warns(UserWarning, match="longer than the 12 tokens"):
        Translator(model, tokenizers).translate([LONG])


def test_split_takes_a_long_source_apart_and_nothing_else_and_joins_the_n_best(short_sources):
    (whole,), (parts,) = short_sources.translate_lines(["네. 네.", LONG], split=True)
    assert whole.token_ids == short_sources.translate(["네. 네."])[0][0].token_ids
    alone = [best for (best,) in short_sources.translate(["고양이가 잔다.", "비가 온다.", "네."])]
    assert (parts.text, parts.finished) == ("The cat sleeps. It rains.  Yes.", True)
    assert parts.token_ids == sum((each.token_ids for each in alone), ())
    assert parts.score == pytest.approx(sum(each.score for each in alone) / 3, abs=1e-5)
    ((best, second),) = short_sources.translate_lines([LONG], split=True, num_beams=3, num_return_sequences=2)
    assert best.text == parts.text
    assert best.score > second.score


@pytest.mark.filterwarnings("ignore")
def test_logits_that_are_no_numbers_are_an_error_in_every_road(model, tokenizers, pairs, tmp_path, heedful_command):
    ids, huge = {"input_ids": torch.tensor(tokenizers.encode_source(["네."]))}, copy.deepcopy(model)
    shown, widest = "logits must be finite numbers, but some are not in torch.float", huge.model.decoder.layers[1]
    weights = [getattr(widest.feed_forward, name).weight.data for name in ("fc1", "fc2")]
    for weight in weights:
        weight *= 1e4  # float32 holds it
    half = copy.deepcopy(huge).half()
    assert huge(**ids, decoder_input_ids=torch.ones(1, 1).long()).logits.isfinite().all()
    for weight, factor in zip(weights, (1e16, 1e30), strict=True):
        weight *= factor
    sizes = {"vocab_size": 290, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    stock = BartForConditionalGeneration(BartConfig(**sizes, **tokenizers.special_ids())).eval()
    for layer in (stock.lm_head, stock.model.decoder.layernorm_embedding):
        layer.weight.data *= 1e38
    for broken in (half, huge, stock):
        pipeline = HeedTranslationPipeline(broken, tokenizers.source)
        searches = [{"num_beams": 1}, {"num_beams": 3}, {"custom_generate": BeamSearch(), "num_beams": 2}]
        searches += [{"do_sample": True}] * (broken is not stock)
        searches += [{"custom_generate": NativeDecoder(broken), "num_beams": n} for n in (1, 2) if broken is huge]
        for search in searches:
            if broken is not stock or "custom_generate" in search:
                assert_error(shown, broken.generate, **ids, max_new_tokens=3, **search)
            for more in ({}, {"return_scores": True}):
                assert_error(shown, pipeline, "네.", max_new_tokens=3, **search, **more)
        roads = [{}, {"ensemble": [broken]}, *({"engine": "native"},) * (broken is huge)]
        for road, beams in product(roads, (1, 3)):
            assert_error(shown, Translator(broken, tokenizers, **road).translate, ["네."], num_beams=beams)
        assert_error(shown, list, Translator(broken, tokenizers).score_pairs([("네.", "Yes.")]))
    code, _, errors = heedful_command("translate", saved_in(tmp_path, half, tokenizers), "네.")
    assert code == 2
    assert "in torch.float16: load the model with `dtype=torch.float32`, or bfloat16, and save it so." in errors


def test_unknown_words_in_outputs_are_shown_and_counted_in_every_road(tmp_path, heedful_command):
    pairs = {"가": "the zebra sees a cat", "나": "the cat sees a cat", "다": "zebra", "라": "a cat sees the cat"}
    words = train_tokenizers(
        [*pairs], [*pairs.values()], vocab_size=8, target_vocab_size=8, algorithm="word", joint=False
    )
    model = memorised_model(words, pairs)
    shown = [text.replace("zebra", "<unk>") for text in pairs.values()]
    with pytest.warns(UserWarning, match="^2 outputs have the unknown token"):
        assert texts_of(Translator(model, words).translate(list(pairs))) == [[text] for text in shown]
    translate = HeedTranslationPipeline(model, words.source, words.target)
    with pytest.warns(UserWarning, match="^1 of this text's outputs have the unknown token"):
        assert [result["translation_text"] for result in translate(list(pairs))] == shown
    (tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs.items()))
    data = ("--data", tmp_path / "pairs.tsv", "--source", 1, "--target", 2, "--bootstrap", 0, "--confusions", 9)
    with pytest.warns(UserWarning, match="^2 outputs have the unknown token"):
        found = heedful_command("evaluate", saved_in(tmp_path / "model", model, words), *data, "--json")
    confusions = json.loads(found[1])["confusions"]
    assert [(each["reference"], each["prediction"], each["count"]) for each in confusions] == [("zebra", "<unk>", 2)]


def test_lines_are_translated_alone_by_every_road(translator, tokenizers, tmp_path, printed, monkeypatch, encoded):
    text, expected = "네.\r\n\n  비가 온다. \r네.", "Yes.\r\n\n  It rains. \rYes."
    folder = saved_in(tmp_path, translator.model, tokenizers)
    for model in (translator.model, Translator.from_pretrained(folder).model):
        translator = Translator(model, tokenizers)
        assert translator.translate([text])[0][0].text == expected
        assert texts_of(translator.translate_lines(["비가 온다.\n", text])) == [["It rains."], [expected]]
        assert HeedTranslationPipeline(model, tokenizers.source)(text)[0]["translation_text"] == expected
    assert json.loads(printed("translate", folder, text, "--json"))["text"] == expected
    assert printed("translate", folder, text) == "Yes.    It rains.  Yes.\n"  # a line for each text
    encoded.clear()
    list(translator.translate_lines([text], split=False, max_new_tokens=1))
    monkeypatch.setattr(translator.model.config, "custom_pipelines", pipelines_of_folder("heed-text2text"))
    translator.translate([text], max_new_tokens=1)
    assert encoded == [text, text]


def test_code_within_a_line_opens_no_fence():
    page = Paragraphs(every_line=True)
    assert page.take_apart(0, "```heedful train``` 은 학습합니다.") == ["```heedful train``` 은 학습합니다."]
    assert page.take_apart(1, "네.") == ["네."]
    for number, line in enumerate(("```py", "네.", "``` 네.", "```"), start=2):
        assert page.take_apart(number, line) == [""]
    assert page.take_apart(9, "네.") == ["네."]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_paragraphs_keep_what_is_no_text_of_subtitles_and_pages(translator, end):
    lines = [
        *(("---",) * 2, ("title: 네.",) * 2, ("more: >",) * 2, ("  네.",) * 2, ("--- ",) * 2, ("1", "1"), ("", "")),
        *(("00:00:02,830 --> 00:00:05,560",) * 2, ("- 네.", "- Yes."), ("<i>네.</i>", "<i>Yes.</i>"), ("<p>", "<p>")),
        *(("| 네. | 12 |", "| Yes. | 12 |"), ("|---|---|",) * 2, ("|네.|", "|Yes.|"), ("![네.](a.png)",) * 2),
        *(("https://a.b/네",) * 2, ("네. www.a.b", "Yes. www.a.b"), ("$$",) * 2, ("네. = y",) * 2, (" $$",) * 2),
        *((r"\[",) * 2, ("네",) * 2, (r"\]",) * 2, ("비가 온다. 네.", "It rains. Yes."), ("```",) * 2),
        *(("네. # 네.",) * 2, ("```",) * 2, ("고양이가 잔다.  네. ", "The cat sleeps.  Yes. ")),
        *(("  - 비가 온다.", "  - It rains."), ("1. 네.\t네.", "1. Yes.\tYes.")),
    ]
    given, expected = ([f"{text}{end}" for text in texts] for texts in zip(*lines, strict=True))
    for size in (1, 100):
        found = list(translator.translate_lines(given, paragraphs=True, chunk_size=size))
        assert texts_of(found) == [[text] for text in expected]
    (cat,), (yes,) = translator.translate(["고양이가 잔다.", "네."])
    by_text = {text: row[0] for text, row in zip(given, found, strict=True)}
    assert by_text[f"고양이가 잔다.  네. {end}"].token_ids == cat.token_ids + yes.token_ids
    assert by_text[f"<p>{end}"].score is None
    rule = ["---", "네.", "a: 네.", "---"]  # before a text, not around front matter
    assert texts_of(translator.translate_lines(rule, paragraphs=True))[1] == ["Yes."]
    (pairs,) = translator.translate_lines(["- 네. 네."], paragraphs=True, num_beams=3, num_return_sequences=2)
    assert len({pair.text for pair in pairs}) == 2
    assert all(pair.text.startswith("- ") for pair in pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "pieces",
    [["Dr. Kim met J. S. Bach.", " 1. He left, i.e. went."], ["\u200b  「三三三三三三三三三三三三。」", "四"]],
)
def test_a_source_is_split_where_the_pipeline_splits_it(short_sources, encoded, monkeypatch, pieces):
    text, pieces = "".join(pieces), [piece.lstrip(" ") for piece in pieces]
    list(short_sources.translate_lines([text], split=True, max_new_tokens=1))
    assert encoded == [text, *pieces]
    seen, tokenizers = [], short_sources.tokenizers
    translate = HeedTranslationPipeline(short_sources.model, tokenizers.source, tokenizers.target)
    monkeypatch.setattr(pipeline_heed.Languages, "encode", lambda self, tokenizer, text, *_: seen.append(text) or [5])
    translate(text, split_sentences=True, max_new_tokens=1)
    assert [piece for piece in seen if piece] == pieces


def test_too_long_sources_are_refused_or_left_out(translator, monkeypatch, tokenizers):
    monkeypatch.setattr(translation, "MOST_SOURCE_TOKENS", 600)
    lines = ["네.", "x" * 1000, "비가 온다."]
    assert_error(r"Sentence 2 must have at most 600 tokens, .* but has 1001 instead", translator.translate, lines)
    with pytest.warns(UserWarning, match="Sentence 2 with 1001 tokens is too long to be translated, and left empty"):
        found = texts_of(translator.translate_lines(lines, keep_going=True))
    assert found == [["Yes."], [""], ["It rains."]]
    config = copy.deepcopy(translator.model.config)
    config.position_encoding, config.max_position_embeddings = "learned", 12
    torch.manual_seed(1)
    translator = Translator(type(translator.model)(config).eval(), tokenizers)  # it has learned nothing
    long = ["네.", "x" * 30]
    assert_error(r"Sentence 2 must have at most 12 tokens.* but has 31 instead", translator.translate, long)
    assert_error("Sentence 3 ", list, translator.translate_lines(["", "", "x" * 30], chunk_size=2))
    assert_error("`max_new_tokens` must be at most 12", translator.translate, ["네."], max_new_tokens=13)
    with pytest.warns(UserWarning, match="11 tokens"):  # the config's 12 with the start token
        translator.translate(["네."])
    with pytest.warns(UserWarning, match="12 tokens"):
        translator.translate(["네."], max_new_tokens=12)


@pytest.mark.filterwarnings("ignore")
def test_by_default_an_engine_is_taken_that_reads_the_settings(translator, model, tokenizers):
    for setting in ("output_logits", "low_memory", "assistant_early_exit", "prompt_lookup_num_tokens", "dola_layers"):
        beams = 1 if setting == "low_memory" else 2  # with which `generate()` itself refuses it
        plain = translator.translate(["네."], num_beams=beams)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(translator.model.generation_config, setting, 2)
            assert translator.translate(["네."], num_beams=beams)[0][0].token_ids == plain[0][0].token_ids
    model, texts = copy.deepcopy(model), ["고양이가 잔다.", "네."]
    plain = texts_of(Translator(model, tokenizers).translate(texts))
    model.generation_config.update(encoder_no_repeat_ngram_size=1, max_new_tokens=20)
    found = [texts_of(Translator(model, tokenizers, name).translate(texts)) for name in ("auto", "generate")]
    assert found[0] == found[1] != plain
    model.generation_config.do_sample = True  # samples may be more than beams
    assert len(Translator(model, tokenizers).translate(["네."], num_return_sequences=3, num_beams=1)[0]) == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_stop_string_ends_a_translation_alike_in_every_batch(translator, pairs, monkeypatch, num_beams):
    monkeypatch.setattr(translator.model.generation_config, "stop_strings", ["he", "pp"])
    together = translator.translate(list(pairs), num_beams=num_beams)
    expected = ["The", "The", "I eat an app", "She", "Yes.", "We do not go to school tomorrow.", "a café in Paris"]
    assert [row[0].text for row in together] == [*expected, "It rains."]
    assert all(row[0].finished for row in together)
    assert_alike(translator.translate(list(pairs), num_beams=num_beams, token_budget=1), together)


def test_a_model_whose_weights_lie_on_disk_translates_scores_and_searches(folder, model, tokenizers, tmp_path, pairs):
    sources = ["네.", "비가 온다."]  # short: every step reads the weights anew
    on_disk = AutoModelForSeq2SeqLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    ours, theirs = (Translator(each, tokenizers, engine="generate") for each in (on_disk, model))
    assert ours.translate(sources, num_beams=2) == theirs.translate(sources, num_beams=2)
    assert list(ours.score_pairs(pairs.items())) == list(theirs.score_pairs(pairs.items()))
    inputs = pad_sources(tokenizers.encode_source(sources), 0, torch.device("cpu"))
    search = {"max_length": None, "max_new_tokens": 30, "num_beams": 2}
    found = on_disk.generate(**inputs, **search, custom_generate=BeamSearch(models=[on_disk]))
    assert tokenizers.decode_target(found) == [pairs[source] for source in sources]
    maps = [attention_maps(each, tokenizers, sources[0], pairs[sources[0]]) for each in (on_disk, model)]
    assert np.array_equal(*(each.weights["cross"] for each in maps))


def test_progress_counts_the_lines_that_are_done_once_and_not_those_that_are_read(translator, short_sources):
    counts, lines = [], ["네.", "", "비가 온다.", "고양이가 잔다."]
    found = translator.translate_lines(lines, token_budget=1, num_beams=1, progress=counts.append)
    next(found)
    assert counts == [1, 1, 1, 1]
    assert (len(list(found)), sum(counts)) == (3, len(lines))
    counts = []
    list(short_sources.translate_lines(["네.", LONG], split=True, progress=counts.append))
    assert sum(counts) == 2
