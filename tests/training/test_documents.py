"""Documents: windows of their sentences in training, and translation with the sentences before as context."""

import re
import warnings
from collections import Counter
from itertools import chain, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from guides import commands_of, run_commands, text_of
from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.data_recipe import DocumentRules
from heedful.data.sources import read_pairs, sources_of
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding.engines import Hypothesis
from heedful.decoding.translation import Translator
from heedful.training.loop.validation import translate_on_ranks
from heedful.training.preparation import corpus_of
from heedful_lab.korean_english.documents import document_pairs
from helpers import assert_error, assert_refused
from tiny_runs import SIZES, table_file, tiny_recipe, tiny_tree

SOURCES = [[f"{letter}{number}." for number in range(7 - 2 * place)] for place, letter in enumerate("abcd")]
HELD_OUT, LANGUAGES = "a3.", ("<2target>", "<2source>")
LINES = ["a.", "b.", "", "c.", "d.", "e.", "f.", "  "]
WINDOWS = [["a."], ["a.", "b."], ["c."], ["c.", "d."], ["c.", "d.", "e."], ["d.", "e.", "f."]]


@pytest.fixture
def recipe_of(tmp_path):
    rows = [(text, text.swapcase(), letter[0]) for letter in SOURCES for text in letter]
    for name, kept in (("train", rows), ("held", [("x.", "X.", "d"), (HELD_OUT, HELD_OUT.swapcase(), "d")])):
        table_file(tmp_path / f"{name}.tsv", [("source", "target", "doc"), *kept])
    back = {"train": str(tmp_path / "train.tsv"), "source": "target", "target": "source", "to": "source"}
    data = {"train": back["train"], "validation": str(tmp_path / "held.tsv"), "mixture": {"back": back}}
    data |= {"source": "source", "target": "target", "documents": {"column": "doc", "sentences": 3}}
    return lambda more: tiny_recipe(tmp_path / "run", {"data": {**data}, "tokenizer.vocab_size": 290, **more})


def test_a_line_break_before_a_source_begins_a_document(tmp_path):
    for name, blank in (("a.ko", " "), ("a.en", "")):
        (tmp_path / name).write_text(f"1\n2\n{blank}\n3\n4\n5\n6\n\n\n7\n", encoding="utf-8")
    rows = [(str(number), str(number), "xxyyyyx"[number - 1]) for number in range(1, 8)]
    places = [([str(tmp_path / "a.ko"), str(tmp_path / "a.en")], "ko", "en", None)]
    places += [(table_file(tmp_path / "b.tsv", [("ko", "en", "d"), *rows]), "ko", "en", "d")]
    places += [(table_file(tmp_path / "c.tsv", rows), "1", "2", "3")]
    for *place, column in places:
        pairs = read_pairs(*place, documents=DocumentRules(column, sentences=3))
        assert "".join(sources_of(list(pairs))).strip() == "12\n3456\n7", column


def test_windows_are_neighbours_in_a_document_drawn_anew_in_every_epoch(recipe_of):
    kept = [text for text in chain(*SOURCES) if text != HELD_OUT]  # it leaves a gap, which no window spans
    following = {pair for texts in SOURCES for pair in pairwise(texts)}
    given, lengths = [{}, {}, {"seed": 2}, {"data.max_source_tokens": 10}], [set() for _ in range(4)]
    corpora, drawn = [corpus_of(recipe_of(changes), None) for changes in given], []
    for epoch in range(9):
        rows = [[found[n] for n in range(len(found))] for c in corpora for found in [c.training._rows_of(epoch)]]
        assert rows[0] == rows[1] != rows[2]
        assert rows[0] not in drawn
        drawn.append(rows[0])
        for corpus, sizes in zip(rows, lengths, strict=True):
            texts = Counter()
            for row in corpus:
                sides = (corpora[0].tokenizers.source.decode(row[side]) for side in ("input_ids", "labels"))
                source, target = (side.removesuffix("</s>").split("<sep>") for side in sides)
                assert {text[:9] for text in source} in ({language} for language in LANGUAGES)
                assert [text[9:].swapcase() for text in source] == target
                assert {(one[9:].lower(), other[9:].lower()) for one, other in pairwise(source)} <= following
                texts.update((text[:9], text[9:].lower()) for text in source)
                sizes.add(len(source))
            assert texts == Counter((language, text) for language in LANGUAGES for text in kept)
        assert max(len(row["input_ids"]) for row in rows[3]) <= 10
    assert lengths == [{1, 2, 3}] * 3 + [{1, 2}]
    one_document = corpus_of(recipe_of({"data.documents": {"sentences": 3}}), None)
    assert corpora[0].fingerprint == corpora[1].fingerprint != one_document.fingerprint


def test_what_has_no_windows_is_refused_by_name_and_no_text_spells_a_separator(tmp_path, recipe_of):
    given, plain = (["a<sep>b"], ["<sep>"]), train_tokenizers(["a"], ["b"], vocab_size=290)
    pairs = [train_tokenizers(*given, vocab_size=290, joint=joint, languages=["<sep>"]) for joint in (True, False)]
    for side in (side for pair in pairs for side in (pair.source, pair.target)):
        assert side.added_tokens_encoder["<sep>"] not in side("a<sep>b <sep>")["input_ids"]
    learned = {**SIZES, "position_encoding": "learned", "max_position_embeddings": 64}
    cases = [
        ({"data.documents": {"column": "doc"}}, r"`data.documents.sentences` must be given if .*column` is"),
        ({"data.documents": {"sentences": 1}}, r"`data.documents.sentences` must be at least 2"),
        ({"data.documents": {"column": "x", "sentences": 2}}, r"held.tsv must have the language or column 'x'"),
        ({"data.validation": None}, r"`data.validation` must be given if `data.documents` is"),
        ({"data.streaming": True}, r"`data.streaming` must be false if .*`data.documents` is given"),
        ({"data.denoise": ["x"], "data.mixture": {}}, r"`data.documents` must be left out if `data.denoise"),
        ({"optimization.distillation": "x"}, r"`data.documents.sentences` must be empty with `optimization"),
        ({"data.mixture": {"a": {"train": "x", "tag": "sep"}}}, r"`data.mixture.a.tag` must be .* 'sep'"),
        ({"data.mixture": {}, "seed": 3}, r"`data.documents` must be a special token .*<sep>"),
        ({"model.options": learned}, r"`data.max_source_tokens` must be at most 64, .*`data.documents`"),
    ]
    assert_refused(cases, lambda changes: corpus_of(recipe_of(changes), plain if "seed" in changes else None))


@pytest.fixture
def scripted():
    """Translates by a model that says what a function makes of the sentences of a window."""
    tokenizers = train_tokenizers(LINES, LINES, vocab_size=261, joint=False, languages=["<sep>"])
    config = HeedConfig(**SIZES, **tokenizers.vocabularies(), share_encoder_decoder_embeddings=False)
    translator, separator = Translator(HeedForConditionalGeneration(config), tokenizers), 4

    def translated(say, lines=LINES, **settings):
        def search(sources, config, budget, **_):
            translated.windows += (windows := [tokenizers.source.decode(ids[:-1]).split("<sep>") for ids in sources])
            said = [say([text.upper() for text in window]) for window in windows]
            ids = [[i for row in tokenizers.encode_target(texts) for i in (*row[:-1], separator)] for texts in said]
            found = [Hypothesis((*row[:-1], 2), -1.0, "!" not in texts) for row, texts in zip(ids, said, strict=True)]
            return [[one] * config.num_return_sequences for one in found]

        translated.windows, translator._engine = [], lambda _: SimpleNamespace(search=search)
        return [[one.text for one in row] for row in translator.translate_lines(lines, **{"context": 2} | settings)]

    translated.config, translated.translator = translator.model.generation_config, translator
    return translated


# What a model says of a window, and of how many windows of several sentences it is wrong.
SAYINGS = {
    "every sentence": (list, 0),
    "one too few": (lambda window: window[1:], 4),
    "one too many": (lambda window: [*window, "MORE"], 4),
    "an empty last one": (lambda window: [*window[:-1], ""], 4),
    "an empty first one": (lambda window: ["", *window[1:]], 4),
    "no end": (lambda window: [*window[:-1], "!"], 4),
    "only pairs": (lambda window: window[: 2 * (len(window) < 3)], 2),
}


def test_each_line_gives_one_line_whatever_the_model_says(scripted, recwarn):
    warnings.simplefilter("always")
    numbers = {"chunk_size": 1}, {"num_return_sequences": 2, "num_beams": 2}
    for (say, wrong), settings in product(SAYINGS.values(), ({}, *numbers)):
        found = scripted(lambda window, say=say: say(window) if window[1:] else window, **settings)
        assert found == [[line.upper().strip()] * settings.get("num_return_sequences", 1) for line in LINES]
        warned = [str(one.message) for one in recwarn.list if "without context" in str(one.message)]
        assert [re.findall(r"\d+", message) for message in warned] == [[str(wrong)]] * bool(wrong)
        recwarn.clear()


def test_windows_hold_the_lines_before_up_to_a_blank_one_and_the_longest_training_source(scripted, recwarn):
    scripted(list)
    assert scripted.windows == WINDOWS
    scripted.config.longest_trained_source = 6  # "d.", the separator, "e." and the end
    scripted(list)
    assert scripted.windows == [window[-2:] for window in WINDOWS]
    long = ["One.", "word " * 9000, "two."]
    assert scripted(list, long, keep_going=True) == [["ONE."], [""], ["TWO."]]
    assert_error("Sentence 2 must have at most 8192 tokens", scripted, list, long)
    assert_error("`context` must be at least 0", scripted, list, context=-1)
    scripted.config.longest_trained_source = 40
    long[1:] = ["I am here. You are not.", "\nTwo."]  # a line break begins a document
    assert scripted(list, long, paragraphs=True) == [["ONE."], ["I AM HERE. YOU ARE NOT."], ["\nTWO."]]
    assert scripted.windows == [long[:1], ["One.", "I am here."], ["One.", "I am here.", "You are not."], ["Two."]]


def test_sentences_have_the_same_windows_on_every_number_of_ranks(scripted, recwarn):
    texts = ["a.", "b.", "\nc.", "d.", "e.", "f.", "g."]
    scripted(lambda window: [*window[:-1], " ".join(window)])
    for world_size in range(1, 9):
        ranks = (SimpleNamespace(process_index=rank, num_processes=world_size) for rank in range(world_size))
        found = [one.text for rank in ranks for one in translate_on_ranks(scripted.translator, texts, rank, context=2)]
        assert found == ["A.", "A. B.", "C.", "C. D.", "C. D. E.", "D. E. F.", "E. F. G."]


def test_the_guides_commands_run_and_other_models_are_refused(tmp_path, monkeypatch, printed, refused):
    monkeypatch.chdir(tmp_path)
    section = text_of("terms_tags_documents").split("## Documents")[1].split("\n## ")[0]
    (recipe,) = re.findall("```yaml\n(.*?)```", section, re.DOTALL)
    tree = tiny_tree("runs/documents", {"optimization.max_updates": 4, "validation.sentences": 9})
    tree["data"] = yaml.safe_load(recipe)["data"] | {"test": {"test": "documents/test.jsonl"}}
    Path("documents.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    Path("story.txt").write_text("소녀는 책을 읽었다.\n사과를 먹었다.\n\n네.", encoding="utf-8")
    *_, translated = run_commands(printed, commands_of(re.sub("--count [0-9]+", "--count 9", section))).values()
    assert (translated.count("\n"), translated.split("\n")[2]) == (4, "")
    assert "document" in refused("translate", "runs/documents/model", "네.", "--document", "--confidence")
    del tree["data"]["documents"]
    Path("runs/documents/model/recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    for command, *more in (["translate", "네."], ["evaluate", "--data", "documents/test.jsonl"]):
        assert "data.documents" in refused(command, "runs/documents/model", *more, "--document")


def test_a_pronoun_of_the_laboratorys_documents_follows_from_the_person_named_before():
    pairs = [*document_pairs(40, "test", seed=2)]
    named = {"he": "boy|man|prince|son|uncle|nephew", "she": "girl|woman|princess|daughter|aunt", "they": r"\w+(s|en)"}
    for pronoun, people in named.items():
        both = [pair for pair in pairwise(pairs) if pair[1][1].lower().startswith(f"{pronoun} ")]
        assert len(both) > 9
        for (_, before, one), (korean, _, document) in both:
            assert re.search(rf"\b({people})\b|^{pronoun}\b", before, re.IGNORECASE)
            assert (one, re.match("그는|그녀는|그들은", korean)) == (document, None)
