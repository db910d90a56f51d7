"""A first recipe for somebody's own pairs: what it says of them, and that it trains."""

import json
import re
from itertools import permutations

import pytest

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.diagnosis.doctor import diagnose
from heedful.diagnosis.first_recipe import find_columns, write_first_recipe
from heedful.training.recipe_file import read_recipe
from heedful.training.run import train

PAIRS = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("train", 60)]


def table(path, rows, separator="\t"):
    path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.tsv", "ko\ten\nx\ty\n", ("ko", "en")),
        ("a.csv", "id;DE;en_US\n1;x;y\n", ("DE", "en_US")),
        ("a.csv", "source,target\nx,y\n", ("source", "target")),
        ("a.tsv", "Hallo\tHello\nx\ty\n", ("1", "2")),
        ("a.txt", "Hello there.\tHallo.\tCC-BY\nx\ty\tz\n", ("1", "2")),
        ("a.jsonl", '{"translation": {"de": "x", "en": "y"}}\n', ("de", "en")),
        ("a.json", '[{"id": 3, "src": "x", "tgt": "y"}]', ("src", "tgt")),
        ("a.jsonl", '{"word": "x", "sounds": "y"}\n', ("word", "sounds")),
    ],
)
def test_columns_are_found(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert find_columns(str(tmp_path / name)) == expected


@pytest.mark.parametrize("text", ['{"a": "x", "b": "y", "c": "z"}', '{"de": "x", "en": "y", "fr": "z"}'])
def test_columns_that_could_be_others_are_asked_for(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"`--source` and `--target` must say which columns .* has \w+, \w+, \w+\."):
        find_columns(str(tmp_path / "a.jsonl"))


def test_a_recipe_fits_its_data_and_is_commented(tmp_path):
    rows = [*PAIRS, *PAIRS[:20], ("하나", "an answer that is more than twenty times as long as what was asked for")]
    data = table(tmp_path / "my pairs.tsv", rows)
    (tmp_path / "recipes").mkdir()
    written = write_first_recipe(data, tmp_path / "recipes" / "mine.yaml")
    recipe = read_recipe(written.path)
    assert recipe.name == "my-pairs"
    assert recipe.data.locations.train == str(tmp_path / "recipes" / ".." / "my pairs.tsv")
    assert (recipe.data.source, recipe.data.target) == ("1", "2")
    assert recipe.data.cleaning.drop_duplicates
    assert "25 % of the pairs came before" in written.path.read_text()
    # Only Korean is written in its letters; Latin ones say nothing. And nobody's license but the user's own.
    assert (recipe.card.source_language, recipe.card.target_language, recipe.card.license) == ("ko", None, None)
    lines = [line for line in written.path.read_text().splitlines() if re.match(r"  \w+: \S", line)]
    assert sum("  # " in line for line in lines) > len(lines) / 2
    assert not diagnose(recipe).has_errors
    with pytest.raises(ValueError, match=r"`--output` must be .* does not exist yet"):
        write_first_recipe(data, written.path)


def test_texts_that_are_alike_are_kept_where_they_are_what_there_is_to_learn(tmp_path):
    alike = [(ko, ko) for ko, _ in PAIRS]
    for rows, drops in ((PAIRS + alike[:2], True), (PAIRS + alike, False)):
        path = tmp_path / f"{drops}.yaml"
        write_first_recipe(table(tmp_path / "a.tsv", rows), path)
        assert read_recipe(path).data.cleaning.drop_identical is drops


def test_a_language_that_yaml_reads_as_false_stays_one(tmp_path):
    written = write_first_recipe(table(tmp_path / "a.tsv", [("no", "ko"), *PAIRS]), tmp_path / "a.yaml")
    assert read_recipe(written.path).card.source_language == "no"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "nowhere.tsv"}, r"`--data` must be a file or folder that exists, but .*nowhere.tsv does not"),
        ({"source": "1"}, "`--source` and `--target` must be given both or not at all"),
        ({"data": "few.tsv"}, "`--data` must hold at least 20 pairs to learn from, but .* holds 3"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(tmp_path, arguments, message):
    table(tmp_path / "a.tsv", PAIRS)
    table(tmp_path / "few.tsv", PAIRS[:3])
    data = tmp_path / arguments.pop("data", "a.tsv")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        write_first_recipe(data, tmp_path / "a.yaml", **arguments)
    assert not (tmp_path / "a.yaml").exists()


def test_a_first_recipe_trains_a_model_that_translates(tmp_path):
    written = write_first_recipe(table(tmp_path / "a.csv", [("ko", "en"), *PAIRS], ","), tmp_path / "a.yaml")
    shortened = ["max_updates=12", "warmup_updates=2", "tokens_per_update=500", "device=cpu"]
    overrides = [f"optimization.{change}" for change in shortened] + ["validation.every_updates=6"]
    overrides += [f"output={tmp_path / 'run'}", "checkpoints.every_updates=6", "decoding.bootstrap=0"]
    result = train(read_recipe(written.path, overrides))
    assert result.corpus.pairs == 57
    assert json.loads((result.folder / "metrics.json").read_text())["validation"]["count"] == 3
    assert result.progress.best


def test_a_recipe_of_spelling_to_sound_has_characters_and_symbols_with_reasons(tmp_path):
    rows = [(word, " ".join(word.upper())) for word in ("".join(letters) for letters in permutations("abcd"))]
    path = write_first_recipe(table(tmp_path / "a.tsv", rows), tmp_path / "a.yaml").path
    recipe = read_recipe(path)
    assert recipe.tokenizer.sides == (("character", None), ("word", None))
    written = path.read_text()
    assert "algorithm: character  # of the source: single words" in written
    assert "target_algorithm: word  # of the target: between spaces stand few different symbols" in written
    assert not diagnose(recipe).has_errors


def test_who_names_an_algorithm_gets_it(tmp_path):
    rows = [(word, " ".join(word.upper())) for word in ("".join(letters) for letters in permutations("abcd"))]
    table(tmp_path / "a.tsv", rows)
    path = tmp_path / "a.yaml"
    sides = []
    for more in ("", "tokenizer: {algorithm: bpe}\n"):
        path.write_text(f"data: {{train: a.tsv, source: 1, target: 2}}\n{more}")
        sides.append(read_recipe(path).tokenizer.sides)
    assert sides == [(("character", None), ("word", None)), (("bpe", 500), ("bpe", 500))]
