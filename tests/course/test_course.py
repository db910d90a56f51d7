"""The course prints what it shows, in two languages that have the same cells; the site builds without a warning."""

import gzip
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from heedful.training.run_folder.folder import RECIPE_KEYS
from heedful_lab.korean_english.pairs import korean_english_pairs
from heedful_lab.studies.catalogue import NAMES
from helpers import load_script, slow_but, untrained_folder
from small_studies import SMALLEST

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course"
CHAPTERS = sorted(path.stem for path in (COURSE / "ko").glob("[0-9]*.md"))
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
SCRIPT = load_script("scripts/upkeep/course.py")


def chapter(language: str, name: str) -> str:
    return (COURSE / language / f"{name}.md").read_text(encoding="utf-8")


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def words(text: str) -> list[str]:
    return NUMBER.sub("", text).split()


def test_both_languages_have_the_same_chapters_headings_cells_output_and_figures_and_solved_exercises():
    assert CHAPTERS
    assert sorted(path.stem for path in (COURSE / "en").glob("[0-9]*.md")) == CHAPTERS
    shown, titles = set(), {"ko": {"질문", "연습문제", "풀이"}, "en": {"Questions", "Exercises", "Solutions"}}
    for name in CHAPTERS:
        cells, levels = [], []
        for language, expected in titles.items():
            text = chapter(language, name)
            cells.append([cell.group("code", "shown", "figure") for cell in SCRIPT.CELL.finditer(text)])
            headings = re.findall(r"^(#+) (.+)$", text, re.M)
            levels.append([level for level, _ in headings])
            assert expected <= {title for _, title in headings}, name
            assert "PyTorch" in text
            assert len(cells[-1]) == text.count("```python") >= 5
        assert cells[0] == cells[1], name
        assert levels[0] == levels[1], name
        exercises = text.split("## Exercises")[1]
        assert len(re.findall(r"^\d\. ", exercises, re.M)) == len(re.findall(r"^\d\\\. ", exercises, re.M)) >= 2, name
        shown |= {figure for *_, figure in cells[0] if figure}
    assert shown == {path.name for path in (COURSE / "figures").iterdir()}


# The English chapters have the same cells, see above. `runs/course` is what an earlier run of chapter 10 has left.
SLOW = {"01_markov", "03_gates", "04_seq2seq", "10_training"}


@pytest.mark.parametrize("name", slow_but({*CHAPTERS} - SLOW, CHAPTERS))
def test_a_chapter_prints_what_it_shows_the_second_time_too(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("runs/course/checkpoints").mkdir(parents=True)
    Path("runs/course/recipe.yaml").write_text("".join(f"{key}:\n" for key in RECIPE_KEYS))
    text = chapter("ko", name)
    for cell, printed in zip(SCRIPT.CELL.finditer(text), SCRIPT.outputs_of(text), strict=True):
        shown = (cell["shown"] or "").strip("`\n")
        assert words(printed) == words(shown), cell["code"]
        assert numbers(printed) == pytest.approx(numbers(shown), rel=0.05, abs=0.02), cell["code"]


def test_the_glossaries_have_the_same_terms():
    terms = {
        language: re.findall(r"^\| ([^|]+) \| ([^|]+) \|.*\]\((.+)\) \|$", chapter(language, "glossary"), re.M)
        for language in ("ko", "en")
    }
    assert terms["ko"]
    assert sorted(terms["en"]) == sorted((english, korean, page) for korean, english, page in terms["ko"])


@pytest.mark.parametrize(
    ("site", "repository", "installed"),
    [
        (None, None, f'"heedful[plots] @ {ROOT.as_uri()}"'),
        ("https://a.org/b/", "https://c.org/d", '"heedful[plots] @ git+https://c.org/d"'),
    ],
)
def test_a_notebook_alone_installs_heedful_first_and_needs_no_file_beside_it(tmp_path, site, repository, installed):
    pytest.importorskip("jupytext")
    import nbformat

    config, targets = SimpleNamespace(site_url=site, repo_url=repository), set()
    hooks = load_script("docs/site_hooks.py")
    for language, name in product(("ko", "en"), CHAPTERS):
        text, uri = chapter(language, name), f"course/{language}/{name}.md"
        hooks.write_notebook(text, tmp_path / "one.ipynb", config, uri)
        install, *cells = nbformat.read(tmp_path / "one.ipynb", as_version=4).cells
        assert install.source.startswith("try:\n    import heedful\nexcept ImportError:\n    %pip install")
        assert install.source.strip().endswith(installed)
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        assert code == [cell["code"].strip() for cell in SCRIPT.CELL.finditer(text)]
        shown = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        targets |= set(re.findall(r"\]\(([^)]+)\)", shown))
    assert ("https://a.org/b/course/ko/02_rnn.html" in targets) == bool(site)
    assert all(target.startswith("https://") for target in targets)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site, built without a warning."""
    for module in ("jupytext", "mkdocstrings", "mkdocs", "material"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_site_offers_every_chapter_as_a_notebook_has_the_reference_and_both_languages_and_is_searched(site):
    assert len(list(site.glob("course/*/*.ipynb"))) == 2 * len(CHAPTERS)
    assert "heedful.modeling_heed.HeedModel" in (site / "reference" / "index.html").read_text(encoding="utf-8")
    for page in ("reference/commands", "guides/backtranslate"):
        assert "--max-new-tokens &lt;int&gt;" in (site / f"{page}.html").read_text(encoding="utf-8")
    for language, contents, search in (("ko", "목차", "검색"), ("en", "Table of contents", "Search")):
        for page in (site / "course" / language).glob("*.html"):
            html = page.read_text(encoding="utf-8")
            assert all(words in html for words in (f'<html lang="{language}"', contents, f'placeholder="{search}"'))
    # The search finds a chapter before those that come later.
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert index["config"]["lang"] == ["en", "ko"]
    boosts = {entry["location"].split("#")[0]: entry.get("boost", 1) for entry in index["docs"]}
    for language in ("ko", "en"):
        of_chapters = [boosts[f"course/{language}/{name}.html"] for name in CHAPTERS]
        assert of_chapters == sorted(set(of_chapters), reverse=True)


@pytest.mark.slow
def test_a_notebook_of_the_site_runs(site, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    notebook = nbformat.read(site / "course" / "ko" / "02_rnn.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    drawn = [output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in str(output)]
    assert len(drawn) == 1


# Each of the 54 items has a mark in chapters of both languages, or a command that runs.
MARK = re.compile(r"^<!-- items: ([\d, ]+) -->\n\n", re.MULTILINE)


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


def marks(language: str, name: str) -> list[tuple[int, bool, int]]:
    """Return of each mark of an item in a chapter: its number, whether a cell is right behind, the cells before."""
    text, found = chapter(language, name), []
    for mark in MARK.finditer(text):
        is_cell, before = text.startswith("```python\n", mark.end()), text.count("```python", 0, mark.start())
        found += [(number, is_cell, before) for number in map(int, mark[1].split(", "))]
    return found


def test_both_languages_have_the_marks_of_the_table_at_the_same_cells_and_an_item_without_a_command_has_one():
    assert [item.number for item in ITEMS] == list(range(1, 55))
    with_cells = {54}  # Korean as the language
    for name in CHAPTERS:
        found = marks("en", name)
        assert found == marks("ko", name), name
        for language in ("ko", "en"):
            listed = {item.number for item in ITEMS if f"]({language}/{name}.md)" in item.chapters}
            assert {number for number, *_ in found} == listed, name
        with_cells |= {number for number, is_cell, _ in found if is_cell}
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
    pytest.importorskip("matplotlib")
    named = {command for item in ITEMS for command in re.findall(r"`(heedful [^`]+)`", item.what)}
    studies = {command.split()[2] for command in named - COMMANDS.keys()}
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
