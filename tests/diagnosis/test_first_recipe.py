"""A first recipe for somebody's own pairs: what it says of them, and that it trains."""

import csv
import io
import json
import re
from collections import Counter
from itertools import permutations
from random import Random

import pytest

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.sources import read_pairs
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


KOREAN = [korean for korean, _ in PAIRS]
ENGLISH = [english for _, english in PAIRS]
# What is in the two columns; one is the other's in a language nobody speaks.
SIDES = [
    (KOREAN, ENGLISH),
    (ENGLISH, KOREAN),
    ([text.lower().rstrip(".?!") for text in ENGLISH], [text[::-1].lower().strip(".?!") for text in ENGLISH]),
    (ENGLISH, [text[::-1] for text in ENGLISH]),
    ([f"{text} {text} {text}" for text in ENGLISH], [" ".join(text.split()[:4]) for text in ENGLISH]),
]
# What two columns are called, and whether that says which is the source.
TITLES = [
    (("ko", "en"), False),
    (("English", "Korean"), False),
    (("en_US", "ko-KR"), False),
    (("source", "target"), True),
    (("질문", "답변"), True),
    (("원문", "번역문"), True),
    (("한국어", "영어"), False),
    (("text", "summary"), True),
    (("고객 질문", "상담원 답변"), True),
    (("source_text", "target_text"), True),
    (("sentence1", "sentence2"), False),
    (("Satz A", "Satz B"), False),
    (("lhs", "rhs"), False),
]
OTHERS = {
    "id": lambda number, _: str(number),
    "SID": lambda number, _: f"S{number:05}",
    "": lambda number, _: str(number),
    "번호": lambda _, random: str(random.randrange(10**7)),
    "score": lambda _, random: f"{random.uniform(0, 2):.6f}",
    "LASER": lambda _, random: f"{random.uniform(0, 2):.4f}",
    "날짜": lambda number, _: f"2024-03-{number % 28 + 1:02}",
    "created_at": lambda number, _: f"2024-03-01T10:{number % 60:02}:00Z",
    "lang": lambda *_: "en",
    "split": lambda number, _: ["train", "dev"][number % 9 == 8],
    "담당자": lambda _, random: random.choice(["김민수", "이영희", "박철수"]),
    "license": lambda number, _: f"CC-BY 2.0 (France) Attribution: tatoeba.org #{number} (CK)",
    "note": lambda number, _: f"{ENGLISH[number % 7]} {KOREAN[number % 11]}",
    "url": lambda number, _: f"https://example.org/{number}.html",
}


def made_table(random, path):
    """Write a table of a random kind, and return the right columns, by names or numbers, and the number of pairs."""
    sources, targets = random.choice(SIDES)
    count = random.randint(25, len(sources))
    rows = random.sample(list(zip(sources, targets, strict=True)), count)
    names, has_roles = random.choice(TITLES)
    has_names = random.random() < 0.6
    columns = [(name, [row[side] for row in rows], name) for side, name in enumerate(names)]
    others = random.sample(sorted(OTHERS), random.choice([0, 0, 1, 1, 2, 3]))
    columns += [(other, [OTHERS[other](number, random) for number in range(1, count + 1)], "") for other in others]
    random.shuffle(columns)
    places = [1 + number for number, (*_, text) in enumerate(columns) if text]
    lines = [[cells[number] for _, cells, _ in columns] for number in range(count)]
    if path.suffix == ".jsonl":
        texts = [json.dumps(dict(zip([name for name, *_ in columns], line, strict=True))) for line in lines]
        expected = [columns[place - 1][0] for place in places]
    else:
        lines = [[name for name, *_ in columns]] * has_names + lines
        separator = random.choice({".csv": ",,;"}.get(path.suffix, "\t\t;|"))
        expected = [columns[place - 1][0] if has_names else str(place) for place in places]
        if path.suffix == ".csv":
            buffer = io.StringIO()
            quoting = random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
            csv.writer(buffer, delimiter=separator, lineterminator="\n", quoting=quoting).writerows(lines)
            texts = buffer.getvalue().splitlines()
            texts = [f"sep={separator}"] * (random.random() < 0.2) + texts
        else:
            texts = [separator.join(line) for line in lines]
    if has_roles and (has_names or path.suffix == ".jsonl"):
        expected = list(names)
    end = random.choice(["\n", "\r\n", "\r"]) if path.suffix == ".csv" else "\n"
    path.write_bytes((random.choice(["", "\ufeff"]) + "".join(text + end for text in texts)).encode())
    return tuple(expected), count


def test_of_tables_made_at_random_hardly_any_is_refused_and_none_is_taken_wrongly(tmp_path):
    found = Counter()
    wrong, refused = [], []
    for number in range(200):
        random = Random(number)
        path = tmp_path / f"{number}{random.choice(['.csv', '.csv', '.tsv', '.txt', '.jsonl'])}"
        expected, count = made_table(random, path)
        beginning = path.read_text(encoding="utf-8-sig").splitlines()[:2]
        try:
            *columns, why = find_columns(str(path))
        except ValueError as error:
            refused.append((str(error)[:300], beginning))
            continue
        pairs = len(read_pairs(str(path), *columns))
        found["right"] += (tuple(columns), pairs) == (expected, count)
        if (tuple(columns), pairs) != (expected, count):
            wrong.append((columns, why, pairs, expected, count, beginning))
    assert wrong == []
    assert all("must say which columns to take" in told for told, _ in refused)
    assert found["right"] >= 190, refused
