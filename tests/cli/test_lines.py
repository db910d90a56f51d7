"""What is a line: outputs that hold line breaks of every kind, in files of one text a line and in files of pairs."""

import json
from pathlib import Path

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
    candidates = [{"source": row["source"], "candidates": [f" {row['target']}\n"]} for row in rows]
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
    printed("backtranslate", "model", "texts.txt", "--method", "noised", "-o", "noised.jsonl")
    lines = {path.name: path.read_bytes().decode().splitlines() for path in Path().iterdir() if path.is_file()}
    for name in ("out.txt", "predicted.txt"):
        assert lines[name] == ["if a: \tb  c"] * 11, name
    for name, side in (("out", "text"), ("distilled", "target"), ("chosen", "target"), ("back", "source")):
        assert [json.loads(line)[side] for line in lines[f"{name}.jsonl"]] == [*TEXTS.values()], name
    noised = [json.loads(line)["source"] for line in lines["noised.jsonl"]]
    assert any(LINE_END.search(text) for text in noised)
    assert {*noised} - {*TEXTS.values()}


def test_a_file_has_the_lines_that_its_line_feeds_end(tmp_path):
    text = "".join(f"a{end}b" for end in ENDS if end != "\n")
    (tmp_path / "lines.txt").write_bytes(f"\ufeff{text}\n{text}\r\n\n".encode())
    assert read_lines(tmp_path / "lines.txt", "--data") == [text, text, ""]
    assert json.loads(json_line({text: text})) == {text: text}
