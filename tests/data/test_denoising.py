"""Texts are damaged as BART's paper says, anew in every epoch, and a run of texts comes before one of pairs."""

import gzip
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from guides import commands_of, run_commands, text_of
from heedful import TokenizerPair
from heedful.checking.doctor import diagnose
from heedful.data.data_recipe import MASK
from heedful.data.epochs.draws import drawn_numbers, infilled
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.preparation import corpus_of, prepare_corpus
from heedful.training.recipe_file import read_recipe
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_refused
from tiny_runs import SIZES, tiny_recipe, tiny_tree

TEXTS = [pair["en"] for pair in korean_english_pairs("train", 380)][300:]


@settings(max_examples=200, deadline=None)
@given(length=st.integers(1, 80), seed=st.integers(0, 999))
def test_infilling_has_one_mask_for_each_span_and_keeps_the_rest_in_order(length, seed):
    source = infilled(list(range(length)), -1, drawn_numbers(seed))
    kept = [token for token in source if token >= 0]
    assert kept == sorted(kept)
    assert (-1, -1) not in pairwise(source)
    gone, wanted = length - len(kept), max(1, round(length * 0.3))
    assert gone == wanted or (gone < wanted and source.count(-1) == length - wanted + 1)  # as many as fit


def test_the_lengths_of_infilled_spans_are_poissons():
    lengths = Counter()
    for seed in range(1000):
        source = [-1, *infilled(list(range(200)), -2, drawn_numbers(seed)), 200]
        lengths.update(source[place + 1] - source[place - 1] - 1 for place, token in enumerate(source) if token == -2)
    assert lengths[0] / lengths.total() == pytest.approx(np.exp(-3), abs=0.01)  # a mask where nothing is missing
    assert lengths[3] / lengths.total() == pytest.approx(27 / 6 * np.exp(-3), abs=0.02)


@pytest.fixture
def recipe_of(tmp_path):
    """Make a tiny recipe with 80 texts in a packed file, and 50 pairs."""
    with gzip.open(tmp_path / "own.txt.gz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{text}\n" for text in TEXTS))

    def make(changes=None):
        given = {"data.train": "builtin:train:50", "data.denoise": [str(tmp_path / "own.txt.gz")]}
        return tiny_recipe(tmp_path / "run", given | (changes or {}))

    return make


def rows_of(corpus, epoch=0):
    return [corpus.training._rows_of(epoch)[number] for number in range(corpus.training.pairs)]


def test_a_model_learns_texts_alone_each_damaged_anew_by_its_number_and_the_tokenizer_knows_the_pairs(recipe_of):
    corpus, again, other = (corpus_of(recipe_of({"seed": seed}), None) for seed in (1, 1, 2))
    assert corpus.training.parts == {"data.denoise.1": 80}
    first, second = rows_of(corpus), rows_of(corpus, 1)
    assert first == rows_of(again) != rows_of(other)
    assert sum(one != other for one, other in zip(first, second, strict=True)) > 60
    tokenizers = corpus.tokenizers
    assert sorted(tokenizers.decode_target(row["labels"] for row in first)) == sorted(TEXTS)
    for row in [*first, *(corpus.validation[number] for number in range(20))]:
        assert re.fullmatch("<denoise>.+</s>", tokenizers.source.decode(row["input_ids"]))
        assert tokenizers.source.convert_tokens_to_ids(MASK) in row["input_ids"]
    held_out = tokenizers.decode_target(corpus.validation[number]["labels"] for number in range(20))
    assert held_out == [pair["target"] for pair in corpus.validation_pairs]
    assert corpus.fingerprint == again.fingerprint
    korean = tokenizers.encode_source(["아이가 학교에 간다."])[0]
    assert len(korean) < 24  # it has 27 bytes and an end
    short = corpus_of(recipe_of({"data.max_source_tokens": 12}), None)
    assert max(len(row["input_ids"]) for epoch in range(5) for row in rows_of(short, epoch)) <= 12


def test_held_out_texts_are_no_texts_to_learn_from(tmp_path, recipe_of):
    held_out = [pair["en"] for pair in korean_english_pairs("validation", 20)]
    (tmp_path / "more.txt").write_text("\n".join([*held_out, "A <mask> text."]), encoding="utf-8")
    corpus = corpus_of(recipe_of({"data.denoise": [str(tmp_path / "more.txt")]}), None)
    assert corpus.tokenizers.decode_target([row["labels"] for row in rows_of(corpus)]) == ["A <mask> text."]


def test_paths_lie_beside_the_recipe_and_its_card_is_not_that_of_other_texts(tmp_path):
    (tmp_path / "own.txt").write_text("A text.", encoding="utf-8")
    tree = tiny_tree(tmp_path / "run", {"data.denoise": ["own.txt"], "card.license": "mit"})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    recipe = read_recipe(tmp_path / "mine.yaml")
    assert recipe.data.parts["data.denoise.1"].train == [str(tmp_path / "own.txt")] * 2
    assert recipe.card.license == "mit"
    other = read_recipe(tmp_path / "mine.yaml", ["data.denoise=[other.txt]", "data.folder=texts"])
    assert (other.card.license, other.data.parts["data.denoise.1"].train) == (None, ["texts/other.txt"] * 2)


def test_the_guides_commands_learn_from_texts(tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    section = text_of("backtranslate").split("## Learn from texts first")[1]
    tree = tiny_tree("runs/pairs", {"data.train": "builtin:train:60", "optimization.warmup_updates": 1})
    Path("pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    Path("english.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    mend, _ = run_commands(printed, commands_of(re.sub(r"max_updates=\d+", "max_updates=4", section))).values()
    assert "model: runs/mend/model" in mend
    assert "of these data.denoise.1 | 80" in Path("runs/mend/model/README.md").read_text(encoding="utf-8")
    assert read_recipe("runs/pairs/model/recipe.yaml").model.start_from.endswith("runs/mend/model")
    assert {"<denoise>", MASK} < {*TokenizerPair.from_pretrained("runs/pairs/model").source.added_tokens_encoder}


def test_the_doctor_takes_no_text_for_a_pair(recipe_of):
    diagnosis = diagnose(recipe_of())
    assert not {"identical", "length_ratio", "scripts", "sides"} & {finding.check for finding in diagnosis.findings}
    assert diagnosis.total == 130


def test_wrong_use_is_refused_by_name(tmp_path, recipe_of):
    plain = train_tokenizers(TEXTS, TEXTS, vocab_size=300)
    unmarked = train_tokenizers(TEXTS, TEXTS, vocab_size=400, languages=["<denoise>"])
    separate = train_tokenizers(TEXTS, TEXTS, vocab_size=400, joint=False, languages=["<denoise>"])
    for name, each in {"plain": plain, "unmarked": unmarked, "separate": separate}.items():
        each.save_pretrained(tmp_path / name)
    (tmp_path / "blank.txt").write_text("\n \n", encoding="utf-8")
    learned = {**SIZES, "position_encoding": "learned", "max_position_embeddings": 64}
    alone = "must be left out if `data.denoise` is given"
    tag = "`data.denoise` must be a special token .* but is <{}>"
    cases = [
        ({"data.validation": None}, r"`data.validation` must be given if `data.denoise` is"),
        ({"data.augmentation": {"typos": 0.1}}, rf"`data.augmentation` {alone}"),
        ({"data.streaming": True}, rf"`data.streaming` {alone}"),
        ({"data.mixture": {"a": {"train": "x.tsv"}}}, rf"`data.mixture` {alone}"),
        ({"data.cleaning.drop_identical": True}, r"`data.cleaning.drop_identical` must be false if `data.denoise`"),
        ({"tokenizer.joint": False}, r"`tokenizer.joint` must be true if .*`data.denoise`"),
        ({"tokenizer.sentences": 9}, r"`tokenizer.sentences` must be empty if"),
        ({"optimization.distillation": "x"}, r"`data.denoise` must be empty with `optimization"),
        ({"data.mixture": {"a": {"train": "x", "tag": "denoise"}}}, r"`data.mixture.a.tag` must be .* 'denoise'"),
        ({"data.denoise": [str(tmp_path / "blank.txt")]}, r"`data.denoise.1` must hold pairs to train on"),
        ({"tokenizer.path": str(tmp_path / "plain")}, tag.format("denoise")),
        ({"tokenizer.path": str(tmp_path / "unmarked")}, tag.format("mask")),
        ({"tokenizer.path": str(tmp_path / "separate")}, r"must be empty if source and target have separate"),
        ({"model.options": learned}, r"`data.max_source_tokens` must be at most 64, .*`data.denoise`"),
    ]
    assert_refused(cases, lambda changes: prepare_corpus(recipe_of(changes), tmp_path / "tokenizer"))
    assert not (tmp_path / "tokenizer").exists()
