"""Lines: outputs with line breaks of every kind, in files of texts and of pairs; and pipes, read line by line."""

import io
import json
import os
import re
import select
import sys
from pathlib import Path
from threading import Thread

import pytest

from heedful.files import LINE_END, json_line, read_lines
from memorised import saved_model

ENDS = [chr(number) for number in range(0x3000) if len(f"a{chr(number)}b".splitlines()) == 2]
# What the model writes, to words without a line break.
TEXTS = {f"w{number}": f"if a:{end}\tb  c" for number, end in enumerate([*ENDS, "\r\n"], start=100)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a model that writes line breaks, and what it reads and should have written."""
    folder = tmp_path_factory.mktemp("lines")
    saved_model(folder / "model", TEXTS, vocab_size=300)
    (folder / "texts.txt").write_text("".join(f"{source}\n" for source in TEXTS))
    rows = [{"source": source, "target": target} for source, target in TEXTS.items()]
    candidates = [{"source": source, "candidates": [f" {target}\n"]} for source, target in TEXTS.items()]
    for name, lines in (("pairs", rows), ("candidates", candidates)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_no_output_adds_a_line_to_a_file_and_pairs_keep_what_was_written(folder, printed, monkeypatch):
    assert len(ENDS) == 10
    monkeypatch.chdir(folder)
    printed("translate", "model", "--input", "texts.txt", "-o", "out.txt")
    printed("translate", "model", "--input", "texts.txt", "--json", "-o", "out.jsonl")
    printed("evaluate", "model", "--data", "pairs.jsonl", "--bootstrap", 0, "--predictions", "predicted.txt")
    printed("distill", "model", "--data", "pairs.jsonl", "-o", "distilled.jsonl")
    printed("distill", "--candidates", "candidates.jsonl", "-o", "chosen.jsonl")
    printed("backtranslate", "model", "texts.txt", "-o", "back.jsonl")
    lines = {path.name: path.read_bytes().decode().splitlines() for path in Path().iterdir() if path.is_file()}
    for name in ("out.txt", "predicted.txt"):
        assert lines[name] == ["if a: \tb  c"] * 11, name
    for name, side in (("out", "text"), ("distilled", "target"), ("chosen", "target"), ("back", "source")):
        assert [json.loads(line)[side] for line in lines[f"{name}.jsonl"]] == [*TEXTS.values()], name


def test_texts_of_a_table_are_those_of_one_column(folder, heedful_command, printed, refused, tmp_path, monkeypatch):
    def first(name):
        return json.loads(read_lines(f"{name}.jsonl", "")[0])

    monkeypatch.chdir(tmp_path)
    texts = {"t.jsonl": "", "t.csv": "ko,en\nw100,0 a b\nw101,1 a b\n", "texts.txt": "w100\nw101\n"}
    for number in range(2):
        texts["t.jsonl"] += json.dumps({"id": number, "ko": f"w{100 + number}", "en": f"{number} a b"}) + "\n"
    texts["t.tsv"] = texts["t.txt"] = "w100\t0 a b\nw101\t1 a b\n"
    texts["words.csv"] = "text\n" + "".join(f"w words{end}\n" for end in "ab")
    lines = [*map(str, range(10)), "a\ttab", *map(str, range(10)), "And now, a comma."]
    texts["plain.txt"] = "".join(f"x {line}\n" for line in lines)
    for name, text in texts.items():
        Path(name).write_text(text)
    for name, column in (("t.jsonl", "ko"), ("t.csv", "ko"), ("t.csv", "1"), ("t.tsv", "1"), ("t.txt", "1")):
        output = printed("translate", folder / "model", "--input", name, "--source", column)
        assert output == "if a: \tb  c\n" * 2, (name, column)
        printed("backtranslate", folder / "model", name, "--target", column, "-o", f"{name}.b.jsonl")
        assert [json.loads(line)["target"] for line in read_lines(f"{name}.b.jsonl", "")] == ["w100", "w101"], name
        asked = f"must name a column of {name}, which has .*'w100'" if name != "t.csv" else "which has 'ko', 'en'"
        for command in (
            ["translate", folder / "model", "--input", name],
            ["pairs", "spelling", "--texts", name, "-o", "a.jsonl"],
        ):
            assert re.search(asked, refused(*command)), command
    for name, column, out in (("t.jsonl", "ko", "d"), ("t.csv", "1", "e"), ("texts.txt", "1", "f")):
        printed("distill", folder / "model", "--data", name, "--source", column, "-o", f"{out}.jsonl")
        assert [*first(out).values()] == ["w100", TEXTS["w100"]], name
    for name, out in (("words.csv", "s"), ("plain.txt", "p")):
        printed("pairs", "spacing", "--texts", name, "-o", f"{out}.jsonl")
    assert first("s") == {"source": "wwordsa", "target": "w wordsa"}
    assert len(Path("p.jsonl").read_text().splitlines()) == len(lines)
    table = ["--data", "t.csv", "--source", "1", "--target", "2"]
    said = heedful_command("evaluate", folder / "model", *table)[2]
    assert "t.csv: columns 1 and 2 are 'ko' and 'en' in the first line" in said
    assert "`--source` must come with a table" in refused("translate", folder / "model", "w100", "--source", "ko")


def test_a_file_has_the_lines_that_its_line_feeds_end(tmp_path):
    text = "".join(f"a{end}b" for end in ENDS if end != "\n")
    (tmp_path / "lines.txt").write_bytes(f"\ufeff{text}\n{text}\r\n\n".encode())
    assert read_lines(tmp_path / "lines.txt", "--data") == [text, text, ""]
    assert json.loads(json_line({text: text})) == {text: text}


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal, None])
def test_who_writes_a_line_and_waits_gets_its_answer(folder, heedful_command, monkeypatch, kind, tmp_path):
    sources, given, found = [f"{source}\n".encode() for source in [*TEXTS][:5]], [], []
    expected = [LINE_END.sub(" ", text) for text in [*TEXTS.values()][:5]]
    if kind is None:
        given = ["--input", tmp_path / "in", "-o", tmp_path / "out"]
        for path in given[1::2]:
            os.mkfifo(path)
    else:
        (reading, asking), (answered, answering) = os.pipe(), os.pipe()
        monkeypatch.setattr(sys, "stdin", kind(os.fdopen(reading, "rb")))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(os.fdopen(answering, "wb")))

    def ask():
        out = asking if kind else os.open(given[1], os.O_WRONLY)
        back = answered if kind else os.open(given[3], os.O_RDONLY)
        for lines in (sources[:1], sources[1:2], sources[2:]):
            os.write(out, b"".join(lines))
            answer = b""
            while answer.count(b"\n") < len(lines) and select.select([back], [], [], 20)[0]:
                answer += os.read(back, 2**16)
            found.extend(answer.decode().splitlines())
        os.close(out)

    thread = Thread(target=ask)
    thread.start()
    code, _, errors = heedful_command("translate", folder / "model", *given)
    thread.join()
    assert (code, found) == (0, expected)
    assert ("Type sentences, one per line. Ctrl-D ends." in errors) == (kind is Terminal)


def test_standard_input_and_output_have_names(folder, printed, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    text, expected = f"{next(iter(TEXTS))}\n", "if a: \tb  c\n"
    for name in ("-", "/dev/stdin"):
        assert printed("translate", "model", "--input", name, stdin=text) == expected
    for name in ("-", "/dev/stdout"):
        assert printed("translate", "model", "--input", "texts.txt", "-o", name) == expected * 11
        assert len(printed("backtranslate", "model", "texts.txt", "-o", name).splitlines()) == 11
    output = printed("evaluate", "model", "--data", "pairs.jsonl", "--bootstrap", 0, "--predictions", "-")
    assert output.startswith(expected * 11)
