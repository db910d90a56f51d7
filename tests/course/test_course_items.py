"""Each of the 54 items of the course is opened or run: its pages, its cells in both languages, its commands."""

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.studies.catalogue import NAMES
from helpers import untrained_folder
from small_studies import SMALLEST

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course"
MARK = re.compile(r"^<!-- items: ([\d, ]+) -->\n\n", re.MULTILINE)
LINK = re.compile(r"\]\(([^)]+)\)")


class Item(NamedTuple):
    number: int
    title: str
    what: str  # command or page
    chapters: str


ITEMS = [
    Item(int(number), *cells)
    for number, *cells in re.findall(
        r"^\| (\d+) \| \w+ \| (.+) \| (.*) \| (.*) \|$", (COURSE / "items.md").read_text("utf-8"), re.MULTILINE
    )
]


@cache
def marks(language: str, chapter: str) -> list[tuple[int, str, str, int]]:
    """Return of each mark of an item in a chapter: its number, its section, what is right behind, the cells before."""
    text = (COURSE / language / f"{chapter}.md").read_text(encoding="utf-8")
    found = []
    for mark in MARK.finditer(text):
        before, behind = text[: mark.start()], text[mark.end() :]
        part = before[max(before.rfind("\n## "), 0) :] + behind[: behind.find("\n## ")]
        found += [(number, part, behind, before.count("```python")) for number in map(int, mark[1].split(", "))]
    return found


def part_of(item: Item, chapter: str) -> str:
    """Return the sections of an item in an English chapter."""
    return "".join(part for number, part, *_ in marks("en", chapter) if number == item.number)


def section(link: str) -> str:
    """Return the text that a link of the table leads to: a page, or the section of its anchor."""
    path, _, anchor = link.partition("#")
    text = (COURSE / path).read_text(encoding="utf-8")
    if not anchor:
        return text
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        if re.sub(r"[^\w\s-]", "", part.splitlines()[0].lower()).strip().replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"{path} has no section {anchor}")


# What a page or chapter has to speak of, to be about an item.
SAYS = {
    **{1: "state", 2: "score of 3", 3: "both directions", 4: "W_Q", 5: "one at a time|one by one", 6: "sequential"},
    **{7: "softmax", 8: "d_v", 9: "√d_k|square root of d_k", 10: "meaning", 11: "how far it has moved"},
    **{12: "last line", 13: "adjective", 14: "−∞", 15: "d_k", 16: "one pass", 17: "−∞", 18: "value up"},
    **{19: "picture|speech", 20: "heads", 21: "layer", 22: "Markov", 23: "unroll", 24: "sigmoid", 25: "linear"},
    **{26: "forget", 27: "GRU", 28: "swapped", 29: "--kind decoder|cross-attention", 30: "another length|N = 6"},
    **{31: r"0\.88", 32: "1,000|memory", 33: "heads", 34: "nn.Transformer", 35: "n × n", 36: "answer|dialogue"},
    **{37: "Korean", 38: "state", 39: "additive", 40: "AI is awesome", 41: "softmax", 42: "multiplications"},
    **{43: "2048", 44: "cosine", 45: "embedding", 46: "sine|sinusoid", 47: "Table 1", 48: "n < d", 49: "사랑해"},
    **{50: "English", 51: "last (hidden )?state", 52: "vanish", 53: "query|heads", 54: "강의"},
}


def test_the_pages_and_chapters_of_each_of_54_items_are_there_and_speak_of_it():
    assert [item.number for item in ITEMS] == list(range(1, 55))
    silent = []
    for item in ITEMS:
        chapters = re.findall(r"\]\(en/(\d\d_\w+)\.md\)", item.chapters)
        opened = {link: section(link) for link in LINK.findall(item.what)}
        opened |= {chapter: part_of(item, chapter) for chapter in chapters}
        if item.number == 54:  # Korean as the language
            opened = {"index": section("ko/index.md")}
        assert opened or "heedful train en-ko" in item.what, item
        texts = {name: " ".join(text.split()) for name, text in opened.items()}
        says = re.compile(SAYS[item.number], re.IGNORECASE)
        silent += [(item.number, name) for name, text in texts.items() if not says.search(text)]
    assert silent == []


def test_both_languages_have_the_marks_of_the_table_at_the_same_cells_and_an_item_without_a_command_has_one():
    with_cells = {54}
    for name in (path.stem for path in (COURSE / "en").glob("[0-9]*.md")):
        korean, english = ([(one[0], one[-1]) for one in marks(language, name)] for language in ("ko", "en"))
        assert korean == english, name
        for language in ("ko", "en"):
            listed = {item.number for item in ITEMS if f"]({language}/{name}.md)" in item.chapters}
            assert {number for number, _ in korean} == listed, name
        with_cells |= {number for number, _, behind, _ in marks("en", name) if behind.startswith("```python\n")}
    assert {item.number for item in ITEMS if not item.what} <= with_cells


SENTENCE = "제 이모는 변호사예요."
SMALL = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
FEW = [f"model.options={json.dumps(SMALL)}", "tokenizer.vocab_size=400", "optimization.max_updates=2"]
FEW += ["optimization.tokens_per_update=512", "optimization.device=cpu", "decoding.max_length=4"]
# Each command of the table that is no study: arguments with which it takes seconds, and what it says.
COMMANDS = {
    "heedful embeddings": (["embeddings", "model", "이모는", "--sentence", SENTENCE], "layer 0"),
    "heedful attention-numbers": (["attention-numbers", "model", SENTENCE], "softmax"),
    "heedful attention --grid --scores": (["attention", "model", SENTENCE, "--grid", "--scores", "-o=a.svg"], "a.svg"),
    "heedful train quickstart --dry-run": (
        ["train", "quickstart", "--dry-run", "data.train=builtin:train:200", *FEW],
        "value up",
    ),
    "heedful train en-ko": (["train", "en-ko", "data.folder=.", *FEW], "bleu"),
}


def test_the_commands_of_the_table_run_here_and_its_studies_in_their_tests(tmp_path, printed, monkeypatch):
    named = {command for item in ITEMS for command in re.findall(r"`(heedful [^`]+)`", item.what)}
    studies = {command.split()[2] for command in named - COMMANDS.keys()}
    assert len(studies) >= 15
    assert named == COMMANDS.keys() | {f"heedful study {name}" for name in studies}
    assert studies <= SMALLEST.keys() == set(NAMES)
    # What the recipe en-ko reads.
    for name, split in {"train": "train", "validation": "validation", "test_indomain": "test"}.items():
        pairs = korean_english_pairs(split, 200 if split == "train" else 4)
        rows = "".join(json.dumps({"translation": pair}, ensure_ascii=False) + "\n" for pair in pairs)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    untrained_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for command, (arguments, shown) in COMMANDS.items():
        assert shown in printed(*arguments), command
