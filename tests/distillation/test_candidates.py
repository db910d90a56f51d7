"""One of several given candidates becomes the target of each source, and what is wrong with them is named."""

import json
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import sacrebleu
from pyarrow import parquet

from guides import assert_named, commands_of, run_commands, text_of
from heedful import Translator
from heedful.data.sources import read_pairs
from heedful.distillation.candidates import CandidateChoice, read_candidates
from helpers import assert_error, assert_refused
from memorised import saved_in
from tiny_runs import tiny_tree

SECTION = text_of("distill").split("## Candidates from any system")[1]
SOURCE = "고양이가 잔다."
TEXTS = ["It rains.", "The cat sleeps.", "A cat sleeps.", "The cats sleep here."]


def written(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chosen(candidates: list[str], source: str = SOURCE, **settings) -> tuple[list[str], dict[str, int]]:
    """Return the target chosen for a source, and what was left out."""
    choice, scored = CandidateChoice(**settings), [(text, 0.0) for text in candidates]
    # A second source, so that there is a pair whatever becomes of the first.
    found = list(choice.pairs([(source, scored), ("x", [("y", 0.0)])]))
    left_out = {reason: count for reason, count in choice.left_out.items() if count}
    return [pair["target"] for pair in found if pair["source"] == source], left_out


def test_every_form_of_a_file_gives_the_same_candidates(tmp_path):
    names, rows = ("source", "candidate", "score"), [("a", "b", 1), ("a", " c\n d", 2.5), ("e\u0301", "b", -3)]
    lines = [dict(zip(names, row, strict=True)) for row in rows]
    whole = [{"source": "a", "candidates": ["b", " c\n d"], "scores": [1, 2.5]}]
    whole.append({"source": "e\u0301", "candidates": ["b"], "scores": [-3]})
    expected = [("a", [("b", 1.0), ("c\n d", 2.5)]), ("é", [("b", -3.0)])]
    for number, form in enumerate((whole, lines, [*lines[:2], whole[1]])):
        place = written(tmp_path / f"{number}.jsonl", *form)
        assert list(read_candidates(place, "source", "target", with_scores=True)) == expected, form
    columns = [{"source": source, "target": text, "score": score} for source, text, score in rows]
    for name, form in (("whole", whole), ("lines", columns)):
        parquet.write_table(pa.Table.from_pylist(form), tmp_path / f"{name}.parquet")
        place = str(tmp_path / f"{name}.parquet")
        assert list(read_candidates(place, "source", "target", with_scores=True)) == expected, place
    expected[0][1][1] = ("c  d", 2.5)
    table = [("source", "target", "score"), ("a", "b", "1"), ("a", " c  d", "2.5"), ("e\u0301", "b", "-3")]
    (tmp_path / "lines.tsv").write_text("".join("\t".join(row) + "\n" for row in table), encoding="utf-8")
    assert list(read_candidates(str(tmp_path / "lines.tsv"), "source", "target", with_scores=True)) == expected
    (tmp_path / "bare.tsv").write_text("".join(f"{a}\t{b}\n" for a, b, _ in table[1:]), encoding="utf-8")
    without = [(source, [(text, 0.0) for text, _ in candidates]) for source, candidates in expected]
    assert list(read_candidates(str(tmp_path / "bare.tsv"), "1", "2")) == without
    # Two whole rows of one source are two choices.
    twice = written(tmp_path / "twice.jsonl", *[{"source": "a", "candidates": ["b"]}] * 2)
    assert len(list(read_candidates(twice, "source", "target"))) == 2


def test_the_candidate_most_like_the_others_is_chosen():
    worth = [sum(sacrebleu.sentence_chrf(text, [other]).score for other in TEXTS) for text in TEXTS]
    assert chosen(TEXTS, method="chrf") == ([TEXTS[worth.index(max(worth))]], {})


def test_candidates_are_left_out_before_the_choice_and_counted_under_the_first_reason():
    left = {"empty": 1, "duplicate": 2, "identical": 1, "ratio": 1, "language": 1}
    useless = ["", TEXTS[1], SOURCE, "The cat sleeps. " * 3, "개가 잔다 또"]
    texts = [TEXTS[1], *useless, TEXTS[1]]
    assert chosen(texts, max_ratio=3, language="en_US") == ([TEXTS[1]], left)
    # What is not asked for is kept.
    assert chosen([*TEXTS, *useless])[1] == {"empty": 1, "duplicate": 1, "identical": 1}
    # Repeated candidates have one vote each: twice the same is not most like the others by that alone.
    assert chosen(["It rains."] * 9 + TEXTS)[0] == chosen(TEXTS)[0]
    assert chosen(["", SOURCE]) == ([], {"empty": 1, "identical": 1, "sources without another": 1})
    rows = [(SOURCE, [("a", 0.0)]), (f" {SOURCE}", [("a", 0.0)]), (SOURCE, [("b", 0.0)])]
    choice = CandidateChoice()
    assert [pair["target"] for pair in choice.pairs(rows)] == ["a", "b"]
    again = "; 2 sources occurred again, each with a separate choice"
    assert choice.summary() == f"left out: 1 pairs that came before{again}"
    message = r"`candidates` or `data` must give a usable candidate, .+: left out: 1 empty, 1 sources without another"
    assert_error(message, list, CandidateChoice().pairs([(SOURCE, [("", 0.0)])]))


def test_a_copy_of_the_source_is_left_out_whatever_its_spaces(tmp_path):
    copied = {"source": "A  cat\nsleeps.", "candidates": ["A  cat\nsleeps.", "A cat sleeps.", "고양이가  잔다."]}
    ((source, candidates),) = read_candidates(written(tmp_path / "copied.jsonl", copied), "source", "target")
    assert chosen([text for text, _ in candidates], source) == (["고양이가  잔다."], {"identical": 2})
    assert chosen(["A dog."], f"A{' ' * 30}cat.", max_ratio=2.0) == (["A dog."], {})


def test_the_highest_score_is_chosen_also_of_a_candidate_that_is_repeated():
    choice = CandidateChoice("score")
    (pair,) = choice.pairs([(SOURCE, [("a", 1.0), ("b", 2.0), (SOURCE, 9.0), ("a", 3.0), ("c", 3.0)])])
    assert pair == {"source": SOURCE, "target": "a"}
    assert choice.summary() == "left out: 1 identical, 1 duplicate"
    # Of equals by a measure the one with the higher score is taken, or else the first.
    for scores, best in (((0.0, 1.0), "b"), ((0.0, 0.0), "a")):
        (pair,) = CandidateChoice("chrf").pairs([(SOURCE, list(zip("ab", scores, strict=True)))])
        assert pair["target"] == best


@pytest.fixture
def backward(model, tokenizers) -> Translator:
    """A model from Korean to English: the reverse one of English sources with Korean candidates."""
    return Translator(model, tokenizers)


def test_the_reverse_model_chooses_the_likeliest_candidate(backward, pairs, monkeypatch):
    rows = [(source, [(text, 0.0) for text in [*pairs][::-1]]) for source in pairs.values()]
    choice = CandidateChoice("reverse")
    found = list(choice.pairs(rows, backward, token_budget=100, chunk_size=3))
    assert {pair["target"]: pair["source"] for pair in found} == pairs
    monkeypatch.setattr(backward.model.config, "max_position_embeddings", 12)
    monkeypatch.setattr(backward.model.config, "position_encoding", "learned")
    choice = CandidateChoice("reverse")
    rows = [("Yes.", [("네." * 20, 0.0), ("비가", 0.0), ("네.", 0.0)]), ("No.", [("네." * 20, 0.0)])]
    with pytest.warns(UserWarning, match="are too long to be scored"):
        assert list(choice.pairs(rows, backward)) == [{"source": "Yes.", "target": "네."}]
    assert choice.left_out == {"too long": 2, "sources without another": 1}


def test_the_reverse_model_has_a_quarter_of_the_scores_weight():
    class Reverse:
        def score_pairs(self, given, **_):
            return (SimpleNamespace(per_token={"a": -4.0, "b": -1.0}[text]) for text, _ in given)

    for scores, expected in (((-0.2, -0.5), "b"), ((-0.2, -1.2), "a"), ((0.0, 0.0), "b")):
        (pair,) = CandidateChoice("reverse").pairs([(SOURCE, list(zip("ab", scores, strict=True)))], Reverse())
        assert pair["target"] == expected, scores


@pytest.mark.parametrize(("nats", "count", "warned"), [(1.8, 150, 0), (7.8, 99, 0), (7.8, 150, 1)])
def test_a_model_of_the_same_direction_is_no_reverse_model(recwarn, nats, count, warned):
    class Reverse:
        tokenizers = SimpleNamespace(target=range(8000))

        def score_pairs(self, given, **_):
            return (SimpleNamespace(per_token=-nats) for _ in given)

    rows = [(f"source {number}", [(f"{number}", -0.5), ("other", -0.6)]) for number in range(count)]
    assert len([*CandidateChoice("reverse").pairs(rows, Reverse())]) == count
    message = (
        "`reverse` must translate targets into sources, but the first 100 sources are improbable: 7.8 nats a token."
    )
    assert [str(each.message) for each in recwarn] == [message] * warned


def test_pairs_come_before_the_rest_is_read(backward, tmp_path):
    rows = [{"source": f"{number}", "candidates": ["a", "b"]} for number in range(3)]
    place = written(tmp_path / "broken.jsonl", *rows, {"source": "x"})
    assert next(read_candidates(place, "source", "target"))[0] == "0"
    read = []

    def endless():
        for number in count():
            read.append(number)
            yield f"{number}", [("네.", 1.0), ("비가 온다.", 0.0)]

    assert next(CandidateChoice("score").pairs(endless())) == {"source": "0", "target": "네."}
    assert len(read) == 1
    next(CandidateChoice("reverse").pairs(endless(), backward, chunk_size=6))
    assert len(read) <= 1 + 6


def test_what_is_wrong_in_a_file_or_a_setting_is_named_with_its_row(tmp_path, backward):
    good, one = {"source": "a", "candidates": ["b", "c"]}, {"source": "a", "candidate": "b"}
    columns, texts = "Row 2 of .+ must have the columns 'source' and ", "must hold at least one text, but is"
    numbers = "'scores' must be a list of one number for each candidate, but is "
    cases = [
        ({"candidates": ["b"]}, f"{columns}'target', .+, but has 'candidates' inst"),
        ({"source": "a"}, f"{columns}.+, but has 'source' instead"),
        (good | {"score": [1, 2]}, "and perhaps 'scores', but has 'source', 'candidates', 'score' instead"),
        (one | {"model": "c"}, "perhaps 'score', but has 'source', 'candidate', 'model'"),
        (good | {"source": " "}, "'source' must be a text, but is ' ' instead in row 2 of .+c.jsonl"),
        (good | {"source": None}, "'source' must be a text, but is None instead in row 2"),
        (good | {"candidates": []}, rf"'candidates' {texts} \[\] instead in row 2"),
        (good | {"candidates": "bc"}, f"'candidates' {texts} 'bc' instead in row 2"),
        (one | {"candidate": None}, f"'candidate' {texts} None instead in row 2"),
        (good | {"scores": [1]}, rf"{numbers}\[1\] instead in row 2"),
        *((good | {"scores": wrong}, numbers) for wrong in ([1, "high"], [1, float("nan")], [1, 10**400], 3, "12")),
        ({"source": "a", "candidates": ["b"], "scores": 3}, numbers),
        (good | {"scores": {"1": 0, "2": 0}}, numbers),
        ({"source": "a", "target": "b", "score": "high"}, "'score' must be a number, but is 'high' instead in row 2"),
    ]

    def read(row, with_scores=False):
        place = written(tmp_path / "c.jsonl", good | {"scores": [1, 2]}, row)
        return list(read_candidates(place, "source", "target", with_scores))

    assert_refused(cases, read)
    assert len(read(good)) == 2
    cases = [(good, f"{numbers}None"), ({"source": "a", "target": "b"}, "'score' must be a num")]
    assert_refused(cases, partial(read, with_scores=True))
    cases = [
        ({"method": "best"}, "`method` must be one of chrf, reverse, score, but is 'best'"),
        ({"language": "xx"}, "`language` must be a language with one script, .+ but is 'xx'"),
        ({"max_ratio": 0.5}, "`data.cleaning.max_ratio` must be at least 1, but is 0.5"),
    ]
    assert_refused(cases, lambda settings: CandidateChoice(**settings))
    for method, reverse in (("reverse", None), ("chrf", backward), ("score", backward)):
        message = f"`reverse` must be a model for reverse, .+, but is {type(reverse).__name__} for {method} instead"
        assert_error(message, list, CandidateChoice(method).pairs([], reverse))


@pytest.fixture
def place(model, tokenizers, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved_in("runs/backward/model", model, tokenizers)
    rows = [line for line in SECTION.splitlines() if line.startswith("{")]
    others = [
        {"source": source, "candidates": [target, "Ja."], "scores": [-1, -2]} for source, target in pairs.items()
    ]
    written(Path("candidates.jsonl"), *map(json.loads, rows), *others)
    table = ["ko\ten", *(f"{source}\t{text}" for source, target in pairs.items() for text in (target, "No."))]
    Path("candidates.tsv").write_text("\n".join(table) + "\n", encoding="utf-8")
    return tmp_path


def test_the_commands_of_the_guide_run(place, printed, pairs, fresh_accelerate):
    commands = commands_of(SECTION)
    assert [command.split()[0] for command in commands] == ["distill"] * 4 + ["train"]
    changes = {"data.train": "pairs.tsv", "data.validation": "columns.jsonl", "data.cleaning.drop_overlap": False}
    changes |= {"name": "student", "output": None, "optimization.max_updates": 1}
    Path("pairs.yaml").write_text(json.dumps(tiny_tree(Path(), changes)))
    run_commands(printed, commands)
    assert len(read_pairs("columns.jsonl", "ko", "en")) == len(pairs)
    known = {pair["source"]: pair["target"] for pair in read_pairs("scored.jsonl.gz", "source", "target")}
    assert known == pairs
    assert len(read_pairs("reversed.jsonl", "source", "target")) >= len(pairs)
    assert read_pairs("alike.jsonl", "source", "target")[0]["target"] in ("It rains.", "It is raining.")


def test_the_command_says_what_is_left_out_and_wrong_use_leaves_nothing(place, heedful_command):
    distill = partial(heedful_command, "distill")
    same = {"source": SOURCE, "candidates": ["A cat.", "A cat.", SOURCE]}
    written(Path("few.jsonl"), same, same)
    code, output, errors = distill("--candidates", "few.jsonl", "-o", "new.jsonl.gz")
    assert (code, output) == (0, "")
    left = "2 duplicate, 2 identical, 1 pairs that came before; 1 sources occurred again, each with a separate choice"
    assert errors.splitlines()[-2:] == ["1 pairs in new.jsonl.gz", f"left out: {left}"]
    written(Path("bad.jsonl"), same, {"source": "a", "candidates": []})
    written(Path("judged.jsonl"), {"source": "a", "candidates": ["b", "c"], "scores": [-1, 0.9]})
    written(Path("none.jsonl"), {"source": "a", "candidates": ["a"]})
    given, teacher = ["--candidates", "few.jsonl"], ["teacher", "--data", "few.jsonl"]
    reverse, backward = ["--reverse", "runs/backward/model"], [*given, "--choose", "reverse"]
    cases = [
        ([], "`TEACHER` must be given without --candidates"),
        (["teacher"], "`--data` must be given without --candidates"),
        ([*teacher, "--choose", "chrf"], "`--choose` must be left out without --cand"),
        ([*teacher, *reverse, "--choose", "reverse"], "`--choose` must be left out without --candidates"),
        ([*teacher, "--max-ratio", "2"], "`--max-ratio` must be left out without --candidates and --reverse"),
        ([*teacher, "--reverse-to", "ko"], "`--reverse-to` must be left out without --candidates and --reverse"),
        ([*given, "teacher"], "`TEACHER` must be left out with --candidates and --choose chrf"),
        ([*given, "--data", "few.jsonl"], "`--data` must be left out with --candidates"),
        ([*given, "--num-beams", "1"], "`--num-beams` must be left out with --candidates"),
        ([*given, "--max-new-tokens", "1"], "`--max-new-tokens` must be left out with --candidates"),
        ([*given, *reverse], "`--reverse` must be left out with --candidates and --choose chrf"),
        ([*given, "--to", "ko"], "`--to` must be left out with --candidates and --choose chrf"),
        ([*given, "--reverse-to", "ko"], "`--reverse-to` must be left out with --candidates and --choose chrf"),
        (backward, "`--reverse` must be given with --choose reverse"),
        ([*backward, *reverse, "--num-beams", "2"], "`--num-beams` must be left out with"),
        ([*backward, *reverse, "--to", "de"], "`--to` must be left out with --choose reverse"),
        ([*backward, *reverse, "--reverse-to", "de"], "`--reverse-to` must be left out for a model without tags"),
        ([*given, "--choose", "score"], "'scores' must be a list of one number for each candidate, but is None"),
        ([*given, "--choose", "best"], "Invalid value for '--choose'"),
        ([*given, "--source", "ko"], "Row 1 of few.jsonl must have the columns 'ko' and 'target'"),
        ([*given, "--target", "source"], "`--target` must be another column than `--source`, but both are"),
        (["--candidates", "nowhere.jsonl"], "`--candidates` must be a file"),
        ([*given, "-o", "few.jsonl"], "`--output` must not be an input file"),
        ([*given, "-o", "out.tsv"], "`--output` must end in .jsonl or .jsonl.gz"),
        (["--candidates", "none.jsonl"], "`--candidates` or `--data` must give a usable candidate"),
        (
            ["--candidates", "judged.jsonl", "--choose", "reverse", *reverse],
            "at most 0, for reverse, but one is 0.9 for",
        ),
        # The last row is read before any model.
        (["--candidates", "bad.jsonl", "--choose", "reverse", "--reverse", "no/model"], "instead in row 2 of bad"),
    ]
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    assert_named(lambda *arguments: distill("-o", "out.jsonl", *arguments), cases)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
