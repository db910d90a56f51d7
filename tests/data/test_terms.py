"""Terms: aligned and marked in training, found by a glossary, and counted in the outputs."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from datasets import Dataset
from transformers import GenerationConfig

from guides import commands_of, run_commands, text_of
from heedful import Translator
from heedful.data.data_recipe import AugmentationRules
from heedful.data.epochs import terms
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.glossary import Glossary
from heedful.data.tokenization import MARKS
from heedful.data.tokenizer_training import train_tokenizers
from heedful.decoding import markup
from heedful.decoding.engines import GenerateEngine, Hypothesis
from heedful.evaluation.faults import find_faults
from heedful.training.preparation import prepare_corpus
from helpers import assert_refused, load_script, tiny_model
from tiny_runs import tiny_recipe, tiny_tree

WORDS = [f"{one}{two}{end}" for one in "bdfgklmn" for two in "aeiou" for end in ("ko", "pu", "ren", "la", "estim")]
MARKED = re.compile(r"<term>(.*?)<term-as> (.*?)<term-end>")


def pair_of(seed):
    """Return a source of five words and a full stop, and their translations with two swapped."""
    words = [WORDS[number] for number in np.random.default_rng(seed).permutation(len(WORDS))[:5]]
    target = [words[place].replace("im", ("im", "imes")[seed % 2]).capitalize() for place in (0, 2, 1, 3, 4)]
    return {"source": f"{' '.join(words)}.", "target": f"{' '.join(target)}."}


PAIRS = [pair_of(seed) for seed in range(300)]
SIDES = [[pair[side] for pair in PAIRS] for side in ("source", "target")]


def tokenizers_of(marks):
    return train_tokenizers(*SIDES, vocab_size=320, languages=marks)


@pytest.fixture(scope="module")
def tokenizers():
    return tokenizers_of(MARKS)


def texts_of(tokenizers, share, epoch=0, placeholders=0.0, **limits):
    """Return an epoch's sources as text with their marks, and targets."""
    pairs, encoder = Dataset.from_list(PAIRS), PairEncoder(tokenizers, **limits)
    rows = EncodedPairs(encoder.rows(pairs)).chosen(np.arange(5, 300))  # as `Sampling` chooses
    rules = AugmentationRules(terms=share, placeholders=placeholders)
    found = terms.Terms(rules, pairs, encoder, seed=1).rows(rows, epoch)
    assert found.numbers.tolist() == [*range(5, 300)]
    targets = tokenizers.decode_target(found[index]["labels"] for index in range(295))
    texts = [tokenizers.source.decode(found[index]["input_ids"]).removesuffix("</s>") for index in range(295)]
    assert placeholders or [MARKED.sub(r"\1", text) for text in texts] == SIDES[0][5:]
    return [*zip(texts, targets, strict=True)]


def test_words_are_aligned_with_their_translations_in_any_order():
    sides = [[text.lower().replace(".", " .").split() for text in side] for side in SIDES]
    links = terms.aligned(*sides)
    both = [(one[at], other[to]) for one, other, own in zip(*sides, links, strict=True) for at, to in own]
    assert len(both) > 0.95 * 300 * 6
    assert all(target.replace("imes", "im") == source for source, target in both)
    assert [*map(len, terms.aligned([[], ["a"], []], [["b"], [], []]))] == [0, 0, 0]


def test_a_phrase_has_words_that_are_only_linked_with_each_other():
    for links, found in {
        ((0, 0), (1, 1)): [(0, 1, 0, 1), (0, 2, 0, 2), (1, 2, 1, 2)],
        ((0, 1), (1, 0), (2, 3)): [(0, 1, 1, 2), (0, 2, 0, 2), (1, 2, 0, 1), (2, 3, 3, 4)],  # all three are too long
        ((0, 0), (0, 2), (1, 1)): [(0, 2, 0, 3), (1, 2, 1, 2)],  # a word around another's translation
        ((0, 0), (1, 0), (1, 1)): [(0, 2, 0, 2)],  # no word alone
    }.items():
        assert sorted(terms.phrases(links)) == found


def test_terms_are_marked_with_a_translation_or_an_exchanged_word(tokenizers):
    kinds = Counter()
    for (text, target), pair in zip(texts_of(tokenizers, 1.0), PAIRS[5:], strict=True):
        marked = MARKED.findall(text)
        kinds[f"{len(marked)} terms"] += 1
        for source, word in marked:
            is_right = sorted(word.lower().replace("imes", "im").split()) == sorted(source.split())
            kinds["right" if is_right else "exchanged"] += 1
            assert word in target
        assert sum(word not in pair["target"] for word in target.strip(".").split()) <= len(marked)
    assert {*kinds} - {"0 terms"} == {"1 terms", "2 terms", "3 terms", "right", "exchanged"}
    assert kinds["0 terms"] < 15
    assert 0.3 < kinds["exchanged"] / (kinds["right"] + kinds["exchanged"]) < 0.6


def test_shares_are_drawn_anew_in_every_epoch_from_the_seed_and_long_rows_stay(tokenizers):
    first, again, second = (texts_of(tokenizers, 0.3, epoch) for epoch in (0, 0, 1))
    assert first == again != second
    assert all(60 < sum("<term>" in text for text, _ in texts) < 120 for texts in (first, second))
    plain = [pair for pair in first if "<term>" not in pair[0]]
    assert {*plain} < {*zip(*SIDES, strict=True)}
    longest = max(map(len, tokenizers.encode_source(SIDES[0])))
    assert 0 < sum("<term>" in text for text, _ in texts_of(tokenizers, 1.0, max_source_tokens=longest + 8)) < 250


def test_numbers_replace_words_and_their_translations_in_a_share_of_the_pairs(tokenizers):
    kinds, plain = Counter(), [*zip(*SIDES, strict=True)][5:]
    for texts, (source, target) in zip(texts_of(tokenizers, 0.3, placeholders=0.5), plain, strict=True):
        numbers = [re.findall(r"\d+", text) for text in texts]
        kinds["numbers" if numbers[0] else "marks" if "<term>" in texts[0] else "plain"] += 1
        assert sorted(numbers[0]) == sorted({*numbers[1]})
        kinds["several"] += len(numbers[0]) > 1
        if len(numbers[0]) == 1:
            patterns = [re.sub(r"\d+", "(.+)", re.escape(text)) for text in texts]
            found = [re.fullmatch(*both)[1].split() for both in zip(patterns, (source, target), strict=True)]
            words = [sorted(word.lower().replace("imes", "im") for word in side) for side in found]
            assert all(map(str.startswith, words[1], words[0]))
            kinds[sum(map(len, words[1])) - sum(map(len, words[0]))] += 1  # letters that stay
    assert 60 < kinds["marks"] < 120 < kinds["numbers"] < 180
    assert min(kinds[kind] for kind in ("several", 0, 1, 2)) > 10
    without_marks = tokenizers_of(())
    assert sum("3" in text for text, _ in texts_of(without_marks, 0.0, placeholders=1.0)) > 100


def test_words_are_counted_in_their_order_so_that_all_processes_draw_the_same():
    assert [*terms._counts([WORDS])] == WORDS


def test_no_text_becomes_a_mark_and_a_mark_needs_its_token(tmp_path, tokenizers):
    marks = {tokenizers.source.added_tokens_encoder[mark] for mark in MARKS}
    assert marks.isdisjoint(tokenizers.encode_source(["a <term>b<term-as> c<term-end>"])[0])
    tokenizers_of(()).save_pretrained(tmp_path / "plain")
    cases = [
        ({"tokenizer.path": str(tmp_path / "plain")}, r"`data.augmentation.terms` must be a special token .* <term>"),
        ({"data.mixture": {"a": {"train": "x", "tag": "term"}}}, r"`data.mixture.a.tag` must be .* term, denoise or"),
        ({"data.streaming": True}, r"`data.streaming` must be false if .*`data.augmentation`"),
        ({"data.augmentation.placeholders": 1}, "`data.augmentation.placeholders` must be at most 1 - "),
    ]
    own = {"data.augmentation": {"terms": 0.1}}
    assert_refused(cases, lambda changes: prepare_corpus(tiny_recipe(tmp_path, own | changes), tmp_path / "own"))


GLOSSARY = "cat\tKatze\tKater\ncat flap\tKatzenklappe\nflap door\tTür\nPolish\tPolnisch\npolish\tpolieren\n\n"
GLOSSARY += "C++\nXK-42\tXK-42\nNew York\n猫\tKatze\ncat\tMieze\n"


def glossary_of(path, text, own):
    (path / "terms.tsv").write_text(text, encoding="utf-8")
    return Glossary(path / "terms.tsv", own)


def test_a_glossary_finds_the_longest_terms_as_whole_words(tmp_path, tokenizers):
    glossary = glossary_of(tmp_path, GLOSSARY, train_tokenizers([GLOSSARY], [GLOSSARY], vocab_size=270))
    for text, found in {
        "A Cat, and CATS.": [("Cat", "Katze")],
        "the cat flap door": [("cat flap", "Katzenklappe")],
        "a flap door, cat": [("flap door", "Tür"), ("cat", "Katze")],
        "Polish your Polish, POLISH": [("Polish", "Polnisch"), ("Polish", "Polnisch"), ("POLISH", "polieren")],
        "C++ in New York, not new york": [("C++", "C++"), ("New York", "New York")],
        "an XK-42 or XK-421": [("XK-42", "XK-42")],
        "黑猫在": [("猫", "Katze")],  # no spaces around words
    }.items():
        assert [(text[mark.start : mark.end], mark.targets[0]) for mark in glossary.marks(text)] == found
    outputs = ["Der KATER", "die Mieze", "Das Kätzchen", "die Katzen", "XK-42", "XK-43"]
    assert glossary.counts([*["The cat"] * 4, *["XK-42"] * 2], outputs) == {"in_sources": 6, "in_outputs": 4}
    assert find_faults("A cat and XK-42", "XK-42", GenerationConfig(), True, glossary) == {"lost_term": "cat"}


def test_a_wrong_glossary_is_refused(tmp_path):
    cases = [
        ("", r"`glossary` must have a tab between .*, but is .*terms.tsv without any instead"),
        ("cat;Katze\n", r"to keep terms as they are, write each twice"),
        ("a\tb\n\n\tc\n", r"text before and after each tab, but has '\\tc' in line 3 of"),
        ("a\tBeko\nb\tЖ\n", r"`glossary` must be in tokens of the target vocabulary, but has 'Ж' in line 2 of"),
    ]
    own = train_tokenizers(*SIDES, vocab_size=900, algorithm="word")
    assert_refused(cases, lambda text: glossary_of(tmp_path, text, own))


def test_a_translator_marks_terms_after_the_language_and_forces_those_that_are_missing(tmp_path, monkeypatch):
    own, seen = tokenizers_of(["en", "de", *MARKS]), []
    (tmp_path / "terms.tsv").write_text("bako\tFoto\nbipu lula\tRad\tEi", encoding="utf-8")
    translator = Translator(tiny_model(**own.vocabularies()), own, "generate", glossary=tmp_path / "terms.tsv")

    def recorded(self, sources, *given, **options):
        seen.append([*map(own.source.decode, sources)])
        if given[0].force_words_ids:
            return [[Hypothesis(tuple(own.encode_target([" Rad Foto"])[0]), 0.0)] * 5]
        return [[Hypothesis(tuple(own.encode_target(["Ein Foto"])[0]), 0.0)] for _ in sources]

    monkeypatch.setattr(GenerateEngine, "search", recorded)
    texts = [" Bako, bipu  lula.", "nako"]
    (forced,), (plain,) = translator.translate(texts, target_language="de", num_beams=1)
    marked = "<2de><term>Bako<term-as> Foto<term-end>,<term> bipu  lula<term-as> Rad<term-end>.</s>"
    assert seen == [[marked, "<2de>nako</s>"], [marked]]
    assert plain.text == "Ein Foto"
    assert forced.text == "Rad Foto"  # without the space of a word inside a sentence
    monkeypatch.setattr(translator.model.generation_config, "do_sample", True)
    with pytest.warns(UserWarning, match="Glossary terms that are not in the output: 1."):
        translator.translate(texts, target_language="de")


def test_tags_are_placed_by_the_attention_to_a_source_without_marks(tmp_path, tokenizers, monkeypatch):
    (tmp_path / "terms.tsv").write_text("bako\tRad\n", encoding="utf-8")
    translator = Translator(tiny_model(**tokenizers.vocabularies()), tokenizers, glossary=tmp_path / "terms.tsv")
    seen, attention = [], markup.cross_attention

    def recorded(model, pairs, budget):
        seen.extend(tokenizers.source.decode(pair["input_ids"]) for pair in pairs)
        return attention(model, pairs, budget)

    monkeypatch.setattr(markup, "cross_attention", recorded)
    ((found,),) = translator.translate(["<b>Bako</b> nako <br>"], markup="html", max_new_tokens=24)
    assert seen == ["Bako nako</s>"]
    assert re.fullmatch(r".*<b>.*</b>.*<br>.*", found.text)
    assert "rad" in found.text.lower()
    with pytest.warns(UserWarning, match="Glossary terms that are not in the output: 1."):
        translator.translate(["Bako"], max_new_tokens=2)  # too short for the word
    row = (1, 0, tokenizers.encode_source(["Bako"])[0])
    assert translator.glossary.marked(["Bako"], [row], most=len(row[2])) == [row]
    assert translator.glossary.marked(["Bako"], [row], most=None) != [row]


def test_the_guides_commands_train_and_use_terms(tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    commands = commands_of(text_of("terms_tags_documents").split("## Terms")[1].split("\n## ")[0])
    tree = tiny_tree("runs/pairs", {"data.train": "builtin:train:60", "optimization.max_updates": 2})
    Path("pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    Path("terms.tsv").write_text("학교\tacademy\n", encoding="utf-8")
    Path("letter.txt").write_text("아이가 학교 에 간다.\n", encoding="utf-8")
    found = run_commands(printed, commands)
    assert re.search(r"\d+ of \d+ terms in the outputs", found[commands[2]])
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts/benchmarks"))
    columns = {"train": "builtin:train:60", "test": "builtin:test:20", "source": "ko", "target": "en"}
    load_script("scripts/benchmarks/terms.py").main("runs/pairs/model", **columns, num_beams=1, json=Path("rows.json"))
    plain, _, forced = json.loads(Path("rows.json").read_text(encoding="utf-8"))[-3:]
    assert plain["terms"] == forced["terms"] > 5
    assert plain["in outputs"] < forced["in outputs"]
