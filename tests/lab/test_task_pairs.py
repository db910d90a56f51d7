import gzip
import json
import unicodedata
from datetime import date

import pytest

from heedful_lab.tasks import task_pairs
from heedful_lab.tasks.task_pairs import number_pairs, reverse_pairs, scan_pairs, spacing_pairs
from helpers import assert_refused


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("나는 학교에 간다.\n\n오늘은 날씨가 참 좋다.\n", encoding="utf-8")
    return path


def test_spacing_gives_texts_back_their_spaces_and_scan_turns_its_lines_into_commands_and_actions(texts):
    made = [("나는학교에간다.", "나는 학교에 간다."), ("오늘은날씨가참좋다.", "오늘은 날씨가 참 좋다.")]
    assert spacing_pairs(str(texts)) == made
    texts.write_text("IN: jump twice OUT: I_JUMP I_JUMP\nIN: run OUT: I_RUN\n", encoding="utf-8")
    jump, run = ("jump twice", "I_JUMP I_JUMP"), ("run", "I_RUN")
    assert scan_pairs(str(texts)) == [jump, run]
    assert scan_pairs(str(texts), "1-1") == [run]
    assert scan_pairs(str(texts), "2-48", 1) == [jump]


def test_nouns_of_korean_texts_give_way_to_others_that_end_alike_and_keep_their_particles(texts, tmp_path):
    nouns = tmp_path / "nouns.dic"
    lines = ["학교/25", "날씨/25", unicodedata.normalize("NFD", "바다/25"), "서울/10", "연필/10", "책/10", "noun"]
    nouns.write_text("\n".join(lines), encoding="utf-8")
    texts.write_text("나는  학교에 간다.\n서울로 간 책은 좋다.\n참 좋다.\n", encoding="utf-8")
    made = {seed: spacing_pairs(str(texts), nouns=str(nouns), seed=seed) for seed in range(20)}
    assert spacing_pairs(str(texts), nouns=str(nouns), seed=3) == made[3]
    assert all(source == target.replace(" ", "") for pairs in made.values() for source, target in pairs)
    # "책" is one syllable, and "서울" ends in ㄹ as "연필" does.
    others = {target for pairs in made.values() for _, target in pairs}
    assert others == {"나는 날씨에 간다.", "나는 바다에 간다.", "연필로 간 책은 좋다."}


def test_spelling_mends_words_that_were_typed_badly_and_another_seed_types_them_otherwise(texts):
    right = [f"the quick brown fox number{place} jumped" for place in "abcdefgh"]
    texts.write_text("\n".join(right), encoding="utf-8")
    one, again, other = (task_pairs.spelling_pairs(str(texts), typos=0.5, count=8, seed=seed) for seed in (1, 1, 2))
    assert [target for _, target in one] == right
    assert one == again != other
    changed = [word for source, target in one for word in source.split() if word not in target.split()]
    assert 10 <= len(changed) <= 40  # of 48


@pytest.mark.parametrize(("language", "group", "point"), [("de", ".", ","), ("fr", " ", ","), ("ko", ",", ".")])
def test_numbers_are_written_as_in_the_language_of_their_words(language, group, point):
    num2words = pytest.importorskip("num2words").num2words
    for (english, _), (text, words) in zip(number_pairs(300), number_pairs(300, language), strict=True):
        assert text == english.translate({ord(","): group, ord("."): point})
        assert words == num2words(english.replace(",", ""), lang=language)


def test_dates_are_read_out():
    pytest.importorskip("num2words")
    for language, months in (("ko", {6: "유월", 10: "시월", 12: "십이월"}), ("en", {6: "June", 12: "December"})):
        dates = {date.fromisoformat(source): target for source, target in task_pairs.date_pairs(400, language)}
        assert all(months[day.month] in read.split() for day, read in dates.items() if day.month in months)
        assert len({day.year for day in dates}) > 100


def test_reverse_says_symbols_from_the_last_to_the_first():
    pairs = list(reverse_pairs(300, "2-5", 3))
    assert all(source.split() == target.split()[::-1] for source, target in pairs)
    assert {len(source.split()) for source, _ in pairs} == {2, 3, 4, 5}
    assert {symbol for source, _ in pairs for symbol in source.split()} == {"0", "1", "2"}


def test_a_wrong_setting_is_named(texts):
    pytest.importorskip("num2words")
    path = str(texts)
    cases = [
        (lambda: spacing_pairs(path, nouns=path), "`nouns` must be a file with a Korean noun in each"),
        (lambda: task_pairs.spelling_pairs(path, typos=0.0), "`typos` must be above 0 and at most 1, but is 0.0"),
        (lambda: scan_pairs(path), "A line of SCAN must be like 'IN: jump OUT: I_JUMP', but is '나는 학교"),
        (lambda: spacing_pairs(path, count=3), "`count` must be at most 2, the number of texts, but is 3"),
        (lambda: reverse_pairs(0), "`count` must be at least 1, but is 0"),
        (lambda: reverse_pairs(1, "5-2"), "`lengths` must be two numbers from 1 on, such as 1-25, but is '5-"),
        (lambda: reverse_pairs(1, "0-2"), "`lengths` must be two numbers from 1 on"),
        (lambda: reverse_pairs(1, symbols=0), "`symbols` must be at least 1, but is 0"),
        (lambda: number_pairs(1, "xx"), r"`language` must be one of .*, ko,.*, but is 'xx'"),
        (lambda: number_pairs(1, "fa"), "but is 'fa'"),  # at which num2words fails
        (lambda: task_pairs.date_pairs(1, "de"), "`language` must be one of en, ko, but is 'de'"),
    ]
    assert_refused(cases, lambda make: make())


def test_the_command_writes_pairs_to_train_on_and_leaves_nothing_half_written(heedful_command, texts, tmp_path):
    output = tmp_path / "pairs.jsonl.gz"
    assert heedful_command("pairs", "spacing", "--texts", texts, "-o", output)[0] == 0
    with gzip.open(output, "rt", encoding="utf-8") as stream:
        assert json.loads(next(stream)) == {"source": "나는학교에간다.", "target": "나는 학교에 간다."}
    assert heedful_command("pairs", "reverse", "-o", output, "--count", 3)[::2] == (0, f"3 pairs in {output}\n")
    no = tmp_path / "no" / "pairs.jsonl"
    for options, message, *other in (
        (("spacing", "--texts", texts, "--count", 9), "`--count` must be at most 2"),
        (("reverse",), "Missing option '--count'"),
        (("rhymes",), "No such command 'rhymes'"),
        (("spacing", "--texts", texts, "--typos", 0.1), "No such option: --typos"),
        (("reverse", "--count", 2), "pairs.jsonl is not: Not a directory", texts / "pairs.jsonl"),
        (("reverse", "--count", 2), "`--output` must be writable", texts / "no" / "pairs.jsonl"),
        (("reverse", "--count", 2), "", tmp_path / "no.txt"),
    ):
        code, _, error = heedful_command("pairs", *options, "-o", *(other or [no]))
        assert (code, no.parent.exists()) == (2, False)
        assert message in error
