"""A first recipe for somebody's own pairs: what it says of them, and that it trains."""

import csv
import io
import json
import re
from itertools import permutations
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from heedful.checking.doctor import diagnose
from heedful.data.sources import read_pairs
from heedful.proposals.first_recipe import find_columns, write_first_recipe
from heedful.proposals.proposal import complete
from heedful.training.preparation import prepare_corpus
from heedful.training.recipe_file import read_recipe
from heedful_lab.korean_english.pairs import korean_english_pairs
from helpers import assert_error
from tiny_runs import table_file

PAIRS = [(pair["ko"], pair["en"]) for pair in korean_english_pairs("train", 60)]


def write(data, output, *columns, **named):
    """Write a first recipe, and return its path and what was told."""
    return SimpleNamespace(told=write_first_recipe(Path(data), output, *columns, **named), path=output)


# Words and their sounds: of the source single words, of the target few symbols.
WORDS = ["".join(letters) for letters in permutations("abcd")]
SPELLINGS = [(word, " ".join(word.upper())) for word in WORDS]


def test_columns_are_found_or_asked_for(tmp_path):
    licensed = "Hello.\tHallo.\tCC-BY\n" + "".join(f"A {n}.\tB {n}.\tCC-BY\n" for n in range(30))
    for name, text, expected in [
        ("a.tsv", "ko\ten\nNo. Yes.\tIt is.\n", ("ko", "en")),
        ("a.csv", "id;DE;en_US\n1;x;y\n", ("DE", "en_US")),
        ("a.tsv", "Hallo\tHello\nx\ty\n", ("1", "2")),
        ("a.txt", licensed, ("1", "2")),
        ("a.jsonl", '{"word": "x", "sounds": "y"}\n', ("word", "sounds")),
        ("a.csv", "en,de\n" + "".join(f"A b {n},D e {n}\n" for n in range(30)) + "Hello,Hallo\n", ("en", "de")),
        ("a.tsv", "palabra\tAFI\n" + "".join(f"{text}\t{text}\n" for text in WORDS), ("palabra", "AFI")),
        ("a.tsv", "0\t1\nA b c.\tD e f.\n", ("0", "1")),  # as pandas numbers columns
        ("a.tsv", "de\tde\nen\ten\n", ("1", "2")),
        ("a.csv", "Satz;Wort\n" + "".join(f"Es sind {n},50.;Sind {n}.\n" for n in range(99, 199)), ("Satz", "Wort")),
    ]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert find_columns(str(tmp_path / name))[:2] == expected
    for text in ('{"a": "x", "b": "y", "c": "z"}', '{"de": "x", "en": "y", "fr": "z"}'):
        (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
        message = r"`--source` and `--target` must name the columns, .* has '\w+': texts, '\w+': texts, '\w+': texts\."
        assert_error(message, find_columns, str(tmp_path / "a.jsonl"))


def test_targets_without_spaces_get_a_tokenizer_and_empty_sides_have_no_ratio(tmp_path):
    texts = [
        (f"This is what he has for you: {chr(97 + n % 26) * 3}.", f"我没有读那本书{chr(0x4E00 + n)}。")
        for n in range(60)
    ]
    data = table_file(tmp_path / "zh.tsv", [*texts, *((source, "") for source, _ in texts[:6])])
    written = write(data, tmp_path / "r.yaml")
    recipe = read_recipe(written.path)
    assert recipe.decoding.bleu_tokenizer == "zh"
    assert recipe.data.cleaning.max_ratio < 10
    assert written.told[-1] == "languages: en → zh"


def test_a_recipe_fits_its_data_and_is_commented(tmp_path):
    rows = [*PAIRS, *PAIRS[:20], ("하나", "an answer that is more than twenty times as long as what was asked for")]
    data = table_file(tmp_path / "my pairs.tsv", rows)
    (tmp_path / "recipes").mkdir()
    path = write(data, tmp_path / "recipes" / "mine.yaml").path
    recipe, text = read_recipe(path), path.read_text()
    assert recipe.name == "my-pairs"
    (tmp_path / "yes.tsv").write_text("ein Satz\ta sentence\n" * 40)
    told = write(tmp_path / "yes.tsv", tmp_path / "yes.yaml", "1", "2").told
    assert told[2:5] == [
        "limits: 256 source tokens, 256 target tokens",
        "duplicates: 98 % of the pairs; source and target alike: 0 % of the pairs",
        "warning: only 1 pairs differ, and they set the sizes",
    ]
    assert read_recipe(tmp_path / "yes.yaml").name == "yes"
    assert recipe.data.located.train == str(tmp_path / "recipes" / ".." / "my pairs.tsv")
    assert (recipe.data.source, recipe.data.target) == ("1", "2")
    assert recipe.data.cleaning.drop_duplicates
    assert "25 % of the pairs are repeats" in text
    # Only Korean is written in its letters, and only English has these words. And nobody's license but the user's own.
    assert (recipe.card.source_language, recipe.card.target_language, recipe.card.license) == ("ko", "en", None)
    lines = [line for line in text.splitlines() if re.match(r"  \w+: \S", line)]
    assert sum("  # " in line for line in lines) > len(lines) / 2
    assert not diagnose(recipe).has_errors
    must = r"`--output` must be .* does not exist yet, but .*mine.yaml does: choose another, or delete it first\."
    assert_error(must, write, data, path)
    assert_error("`--source` and `--target` must be given together", write, data, path, source="1")  # said at once


def test_texts_that_are_alike_are_kept_where_they_are_what_there_is_to_learn(tmp_path):
    alike = [(ko, ko) for ko, _ in PAIRS]
    for rows, drops in ((PAIRS + alike, False), ([("no", "ko"), *PAIRS, *alike[:2]], True)):
        recipe = read_recipe(write(table_file(tmp_path / "a.tsv", rows), tmp_path / f"{drops}.yaml").path)
        assert recipe.data.cleaning.drop_identical is drops
    assert recipe.card.source_language == "no"  # which YAML reads as false


def test_what_cannot_be_looked_at_is_refused(tmp_path):
    table_file(tmp_path / "a.tsv", PAIRS)
    table_file(tmp_path / "few.tsv", PAIRS[:3])
    for name, arguments, message in [
        ("nowhere.tsv", {}, r"`--data` must be an existing file or folder, but .*nowhere.tsv does not"),
        ("a.tsv", {"source": "1"}, "`--source` and `--target` must be given together"),
        ("few.tsv", {}, "`--data` must hold at least 20 pairs, but .* holds 3"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            write(tmp_path / name, tmp_path / "a.yaml", **arguments)
    assert not (tmp_path / "a.yaml").exists()


def test_a_recipe_of_spelling_to_sound_has_characters_and_symbols_with_reasons(tmp_path):
    path = write(table_file(tmp_path / "a.tsv", SPELLINGS), tmp_path / "a.yaml").path
    recipe = read_recipe(path)
    assert recipe.tokenizer.sides == (("character", None), ("word", None))
    written = path.read_text()
    assert "algorithm: character  # of the source: single words" in written
    assert "target_algorithm: word  # of the target: few different symbols between spaces" in written
    assert not diagnose(recipe).has_errors
    for more, sides in (
        ("", (("character", None), ("word", None))),
        ("tokenizer: {algorithm: bpe}\n", (("bpe", 300), ("bpe", 300))),  # who names one gets it
    ):
        path.write_text(f"data: {{train: a.tsv, source: 1, target: 2}}\n{more}")
        assert read_recipe(path, complete=complete).tokenizer.sides == sides


LEMMAS = ["".join(letters) for letters in permutations("aeknr", 4)]
FORMS = [
    (lemma, lemma + tag[2:4].lower() * (number != 4), tag)
    for lemma in LEMMAS
    for number, tag in enumerate(["V;PST;3;PL", "V;PRS;1;SG", "V;FUT;2;PL", "N;ACC;SG", "V;NFIN"])
]


def test_a_table_of_word_forms_gets_its_tags_as_a_second_source_column_and_characters(tmp_path):
    named = [("lemma", "form", "features"), *FORMS]
    other = [(f"{lemma} is {tag}", form) for lemma, form, tag in FORMS]
    spaced = [(f"{lemma} {tag.replace(';', ' ')}", form) for lemma, form, tag in FORMS]
    dates = [(f"{day} {month} 1999", f"1999-{month}-{day}") for day in range(1, 29) for month in ("May", "Juni")]
    reinflected = [(lemma, "V;NFIN", tag, form) for lemma, form, tag in FORMS]
    for name, rows, given, columns, first in (
        ("named", named, {}, ("lemma,features", "form"), "character"),
        ("plain", FORMS, {}, ("1,3", "2"), "character"),
        ("asked", named, {"source": "1,3", "target": "2"}, ("lemma,features", "form"), "character"),
        ("spaced", spaced, {}, ("1", "2"), "character"),
        ("dates", dates, {"source": "1", "target": "2"}, ("1", "2"), "bpe"),
        ("reinflected", reinflected, {}, ("1,3", "4"), "character"),
        ("other", other, {}, ("1", "2"), "bpe"),
    ):
        data = table_file(tmp_path / f"{name}.tsv", rows)
        recipe = read_recipe(write(data, tmp_path / f"{name}.yaml", **given).path)
        assert (recipe.data.source, recipe.data.target) == columns, name
        assert [algorithm for algorithm, _ in recipe.tokenizer.sides] == [first, "character"], name
        assert not recipe.data.cleaning.drop_identical  # a form may be equal to its word


KOREAN = [korean for korean, _ in PAIRS]
ENGLISH = [english for _, english in PAIRS]
# What is in the two columns; one is the other's in a language nobody speaks.
SIDES = [
    (KOREAN, ENGLISH),
    (ENGLISH, KOREAN),
    ([text.lower().rstrip(".?!") for text in ENGLISH], [text[::-1].lower().strip(".?!") for text in ENGLISH]),
    (ENGLISH, [text[::-1] for text in ENGLISH]),
    ([f"{text} {text} {text}" for text in ENGLISH], [" ".join(text.split()[:4]) for text in ENGLISH]),
    ([f"Hello, {text}" for text in ENGLISH], [f"Hallo, {text[::-1]}" for text in ENGLISH]),
    ([f"It costs {number},50 or so" for number in range(60)], [f"Es macht {number} Komma 50" for number in range(60)]),
    ([f'"{text}", says she' for text in ENGLISH], [f'{text} "{text[:5]}"' for text in KOREAN]),
]
# What two columns are called, and whether that says which is the source.
TITLES = [
    *((names, False) for names in (("ko", "en"), ("English", "Korean"), ("en_US", "ko-KR"), ("한국어", "영어"))),
    *((names, False) for names in (("sentence1", "sentence2"), ("Satz A", "Satz B"), ("lhs", "rhs"))),
    *((names, True) for names in (("source", "target"), ("질문", "답변"), ("원문", "번역문"), ("text", "summary"))),
    *((names, True) for names in (("고객 질문", "상담원 답변"), ("source_text", "target_text"))),
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
    sides = random.choice(SIDES)
    count = random.randint(25, len(sides[0]))
    rows = random.sample(list(zip(*sides, strict=True)), count)
    names, has_roles = random.choice(TITLES)
    has_names = random.random() < 0.6 or path.suffix == ".jsonl"
    columns = [(name, [row[side] for row in rows], True) for side, name in enumerate(names)]
    others = random.sample(sorted(OTHERS), random.choice([0, 0, 1, 1, 2, 3]))
    columns += [(other, [OTHERS[other](number, random) for number in range(1, count + 1)], False) for other in others]
    random.shuffle(columns)
    header = [name for name, *_ in columns]
    places = [number for number, (*_, is_text) in enumerate(columns) if is_text]
    expected = [header[place] if has_names else str(place + 1) for place in places]
    lines = [list(line) for line in zip(*(cells for _, cells, _ in columns), strict=True)]
    end = "\n"
    if path.suffix == ".jsonl":
        texts = [json.dumps(dict(zip(header, line, strict=True))) for line in lines]
    elif path.suffix == ".csv":
        separator, buffer = random.choice(",,;;\t|"), io.StringIO()
        quoting = random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        writer = csv.writer(buffer, delimiter=separator, lineterminator="\n", quoting=quoting)
        writer.writerows([header] * has_names + lines)
        texts = [f"sep={separator}"] * (random.random() < 0.2) + buffer.getvalue().splitlines()
        end = random.choice(["\n", "\r\n", "\r"])
    else:
        separator, is_csv, buffer = random.choice("\t\t;|"), random.random() < 0.3, io.StringIO()
        csv.writer(buffer, delimiter=separator, lineterminator="\n").writerows([header] * has_names + lines)
        plain = [separator.join(line) for line in [header] * has_names + lines]
        texts = buffer.getvalue().splitlines() if is_csv else plain
    path.write_bytes((random.choice(["", "\ufeff"]) + "".join(text + end for text in texts)).encode())
    return tuple(names if has_roles and has_names else expected), count


def test_of_tables_made_at_random_hardly_any_is_refused_and_none_is_taken_wrongly(tmp_path):
    wrong, refused = [], []
    for number in range(260):
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
        if (tuple(columns), pairs) != (expected, count):
            wrong.append((columns, why, pairs, expected, count, beginning))
    assert wrong == []
    assert all("must name the columns" in told for told, _ in refused)
    assert len(refused) <= 13, refused


def test_numbers_of_columns_of_a_table_with_names_become_these_and_what_may_be_names_or_a_pair_is_asked_for(tmp_path):
    rows = [("번호", "고객 질문", "날짜", "답변")]
    rows += [(str(number), ko, "2024-01-02", en) for number, (ko, en) in enumerate(PAIRS)]
    data = table_file(tmp_path / "a.csv", rows, ",")
    written = write(data, tmp_path / "a.yaml", "2", "4")
    recipe = read_recipe(written.path)
    assert (recipe.data.source, recipe.data.target) == ("고객 질문", "답변")
    assert written.told[0].startswith("60 pairs")
    assert "columns 2 and 4: the first line is a header" in written.told[0]
    assert written.told[1].startswith(f"first pair: '{PAIRS[0][0]}'")
    table_file(tmp_path / "a.csv", rows[1:], ",")
    written = write(data, tmp_path / "b.yaml", "2", "4")
    assert (read_recipe(written.path).data.source, written.told[0][:8]) == ("2", "60 pairs")
    data = table_file(tmp_path / "a.tsv", [("Satz A", "Satz B"), *((english, english[::-1]) for english in ENGLISH)])
    message = r"by names if the first line of .*a\.tsv \('Satz A', 'Satz B'\) is a header, or else by numbers"
    assert_error(message, write, data, tmp_path / "c.yaml")
    words = table_file(tmp_path / "words.tsv", [("en", "de"), *((word, word[::-1]) for word in WORDS)])
    assert_error("by names if the first line of .* .'en', 'de'. is a header", write, words, tmp_path / "c.yaml")
    (tmp_path / "cmu.txt").write_text(";;; by hand; or so\n" + "WORD  W ER1 D\n" * 30)
    message = r"`--data` must be a table with two cells .* without comments, but .*cmu\.txt has ';;; by hand; or so'"
    assert_error(message, write, tmp_path / "cmu.txt", tmp_path / "c.yaml")
    for number, columns in enumerate([("Satz A", "Satz B"), ("1", "2")]):
        told = write(data, tmp_path / f"{number}.yaml", *columns).told[0]
        assert told.startswith(f"{60 + number} pairs")


def test_what_strangers_call_things_stays_text_in_a_recipe(tmp_path):
    evil = "ko\noutput: /tmp/somewhere\noverwrite: true\r\x85\u2028#"
    name = evil.replace("/", ":")
    plain = write(table_file(tmp_path / "plain.tsv", [("ko", "en"), *PAIRS]), tmp_path / "plain.yaml").path
    for key, file, output in ((evil, "a", "a"), ("ko", name, "b"), ("ko", "a", name)):
        data = tmp_path / f"{file}.jsonl"
        data.write_text("\n".join(json.dumps({key: korean, "en": english}) for korean, english in PAIRS))
        path = write(data, tmp_path / f"{output}.yaml").path
        recipe = read_recipe(path)
        assert (recipe.data.source, recipe.overwrite) == (key, False)
        assert recipe.data.located.train == str(data)
        assert recipe.output.startswith("runs/")
        settings = [[line for line in file.read_text().splitlines() if "#" not in line[:9]] for file in (path, plain)]
        assert len(settings[0]) == len(settings[1])


def test_a_recipe_is_called_after_the_folder_and_says_how_its_table_is_written(tmp_path, printed, monkeypatch):
    (tmp_path / "my.corpus" / "more").mkdir(parents=True)
    rows = [("name", "text"), *((f"{english} x", f'Er sagt\n"{korean}"') for korean, english in PAIRS)]
    with (tmp_path / "my.corpus" / "a.tsv").open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows(rows)
    for folder, given in (("my.corpus", "."), ("my.corpus/more", "..")):
        monkeypatch.chdir(tmp_path / folder)
        first = printed("init", "--data", given).splitlines()[0]
        assert "quotation marks around cells are removed" in first
        assert read_recipe(Path("my.yaml")).name == "my"
        found = diagnose(read_recipe(Path("my.yaml"))).findings
        told = {finding.check: finding for finding in reversed(found)}
        assert told["layout"].message == "Quotation marks around cells are removed, and doubled ones become one."
        line = re.match(r"train line (\d+): '(.*) x' →", told["tabs"].examples[1])
        assert ENGLISH[(int(line[1]) - 2) // 2] == line[2]  # each pair has two lines


def test_two_files_of_aligned_lines_make_a_recipe(tmp_path, printed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for side, name in enumerate(("my corpus.xaa", "corpus.xbb")):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    arguments = ["--data", "my corpus.xaa", "--data", "corpus.xbb", "--source", "ko", "--target", "en"]
    first, *_, next_one, last = printed("init", *arguments).splitlines()
    assert (next_one, last) == ("Now: heedful doctor 'my corpus.yaml'", "then: heedful train 'my corpus.yaml'")
    assert first.startswith("60 pairs in my corpus.xaa and corpus.xbb, source 'ko', target 'en'")
    recipe = read_recipe(tmp_path / "my corpus.yaml")
    assert recipe.data.located.train == [str(tmp_path / "my corpus.xaa"), str(tmp_path / "corpus.xbb")]
    assert recipe.card.target_language == "en"
    assert "#   heedful train 'my corpus.yaml'" in (tmp_path / "my corpus.yaml").read_text()


def test_long_texts_are_kept_and_what_is_generated_is_as_long_as_its_targets(tmp_path):
    random = Random(3)
    words = ["".join(random.choices("bcdfgklmaeiou", k=6)) for _ in range(3000)]
    texts = [" ".join(random.choices(words, k=random.randint(250, 400))) for _ in range(60)]
    rows = [("text", "summary"), *((text, " ".join(text.split()[:8])) for text in texts)]
    recipe = read_recipe(write(table_file(tmp_path / "a.csv", rows, ","), tmp_path / "a.yaml").path)
    corpus = prepare_corpus(recipe, tmp_path / "tokenizer")
    assert corpus.training.rows.left_out == 0
    assert corpus.validation.target_lengths.max() < recipe.validation.max_new_tokens < 80
    assert recipe.optimization.tokens_per_update >= 4 * corpus.training.rows.source_lengths.mean()


def test_outputs_in_scripts_of_many_bytes_are_not_cut(tmp_path):
    for first, step, count in ((0xAC00, 28, 399), (0x0905, 1, 52), (0x0430, 1, 32)):
        draw, letters = Random(1), [chr(first + step * number) for number in range(count)]
        texts = [" ".join("".join(draw.choices(letters, k=5)) for _ in range(draw.randint(3, 30))) for _ in range(80)]
        data = table_file(tmp_path / "a.tsv", [(f"{text.split()[0]} ok.", text) for text in texts])
        recipe = read_recipe(write(data, tmp_path / f"{first}.yaml").path)
        corpus = prepare_corpus(recipe, tmp_path / f"tokenizer{first}")
        longest = max(corpus.validation.target_lengths.max(), corpus.training.rows.target_lengths.max())
        assert longest <= recipe.validation.max_new_tokens < 5 * longest
        assert longest < recipe.decoding.max_length
