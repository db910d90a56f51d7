"""The package does everything that the README and the pages promise."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

from card_facts import card_facts
from guides import python_of, text_of
from heedful import Translator
from heedful.cards.model_card import write_model_card
from heedful.cli.main import app
from heedful.training.recipe_file import read_recipe
from heedful_lab.korean_english.pairs import korean_english_pairs
from heedful_lab.studies.catalogue import find_study
from helpers import untrained_folder
from memorised import SHOWN, saved_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
KOREAN = ROOT / "README.ko.md"
DOCUMENTS = [ROOT / "README.md", KOREAN, ROOT / "AGENTS.md", *sorted((ROOT / "skills").rglob("*.md"))]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "scripts").rglob("*.md")]
OTHERS += sorted((ROOT / "configuration").rglob("*.[my]*"))
COMMANDS = {
    line.strip().removeprefix("$ ")
    for document in DOCUMENTS
    for line in document.read_text(encoding="utf-8").splitlines()
    if re.match(r"(\$ )?(heedful |accelerate launch |torchrun |srun |python scripts/)", line.strip())
}
# Those within a sentence or a table, of which some are only begun.
SPOKEN = {
    " ".join(each.split())
    for file in [*DOCUMENTS, *OTHERS]
    for each in re.findall(r"`(heedful [^`]+|python scripts/upkeep/[^`]+)`", file.read_text(encoding="utf-8"))
}


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    transformers_logging.disable_progress_bar()
    (code,) = python_of(README)
    untrained_folder(tmp_path / "runs/quickstart/model")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.strip().startswith("[")


def test_the_korean_readme_shows_what_the_english_one_shows():
    shown = re.findall(r"```.*?\n(.*?)```", KOREAN.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for block in shown for line in block.splitlines() if line not in README] == []


def test_the_figures_of_both_readmes_are_those_of_the_benchmarks():
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    known = {*map(float, re.findall(r"\d+\.\d+", measured))}
    known |= {int(number.replace(",", "")) / 1024 for number in re.findall(r"([\d,]+) MiB", measured)}
    found = []
    for text, head in ((README, "## Figures"), (KOREAN.read_text(encoding="utf-8"), "## 수치")):
        found.append(re.findall(r"\d+\.\d+", text.partition(head)[2].partition("\n## ")[0]))
    assert found[0] == found[1] != []
    rounded = {f"{each:.{digits}f}" for each in known for digits in (1, 2)}
    assert [number for number in found[0] if number not in rounded] == []


def test_the_chatbots_answers_are_counted_as_the_guide_does(tmp_path, monkeypatch, capsys):
    (code,) = python_of(text_of("chatbot"))
    (tmp_path / "answers.txt").write_text("좋은 생각이에요.\n좋은 생각이에요.\n네.\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out == "distinct-1 0.600\ndistinct-2 0.500\n"


WRITTEN = ("pairs.yaml", "one.yaml", "forms.yaml", "czech.yaml", "documents.yaml")  # by readers
# The parser's errors for a command without its arguments, and its end after `--help`.
BEGUN = ("MissingParameter", "BadOptionUsage", "NoArgsIsHelpError", "Exit")


def parsed(words: list[str], is_begun: bool) -> dict:
    """What the command line's own parser makes of a command's words."""
    command, name = typer.main.get_command(app), "heedful"
    try:
        while hasattr(command, "get_command"):
            if not words or words[0] in ("--help", "--version", "--install-completion"):
                return {}
            name, *words = words
            command = command.get_command(None, name)
            assert command is not None, f"{name} is no command"
        return command.make_context(name, words).params
    except Exception as error:
        if is_begun and type(error).__name__ in BEGUN:
            return {}
        raise


def check_command(command: str, is_begun: bool = False) -> None:
    words = shlex.split(re.split(r" [<>|] ", command)[0], comments=True)
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    if words[0] in ("accelerate", "srun", "torchrun"):
        is_module = "-m" in words
        start = words.index("-m" if is_module else "scripts/train.py") + 1
        words = words[start:] if is_module else ["heedful", "train", *words[start:]]
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        return
    values = parsed(words[1:], is_begun)
    if words[1] == "study" and values.get("name") not in (None, "NAME"):
        find_study(values["name"])
    if words[1] in ("train", "doctor") and values and words[2] not in WRITTEN:
        read_recipe(values["recipe"], values["overrides"])


def test_every_command_of_the_documents_has_known_options_and_recipes():
    wrong = {}
    for command in SPOKEN.union(COMMANDS):
        try:
            check_command(command, is_begun=command not in COMMANDS)
        except Exception as error:
            wrong[command] = repr(error)
    assert COMMANDS
    assert not wrong


def test_every_command_of_the_readmes_runs(printed, tmp_path, monkeypatch):
    """All but what trains, what asks the Hub, and what starts processes, whose words are parsed above."""
    monkeypatch.chdir(tmp_path)
    saved_model(Path("runs/quickstart/model"), SHOWN, vocab_size=300)
    write_model_card(Path("runs/quickstart/model"), card_facts())
    rows = "".join(f"{pair['ko']}\t{pair['en']}\n" for pair in korean_english_pairs("train", 200))
    Path("pairs.tsv").write_text(f"ko\ten\n{rows}", encoding="utf-8")
    Path("page.html").write_text("<p>개가 <b>뛴다</b>.</p>\n", encoding="utf-8")
    Path("terms.tsv").write_text("개\tdog\n", encoding="utf-8")
    both = README + KOREAN.read_text(encoding="utf-8")
    commands = re.findall(r"(?:^\$ |`)((?:echo .* \| )?heedful [^`\n]+)", both, re.MULTILINE)
    assert commands
    for command in dict.fromkeys(commands):
        before, _, words = command.partition("heedful ")
        given = shlex.split(before[:-3])[1] if before else None
        words = words.replace(":1000", ":20").replace("runs/pairs", "runs/quickstart")
        first, *rest = shlex.split(words, comments=True)
        if first == "study":
            find_study(rest[0])
        elif rest and first != "convert":
            printed(first, *rest, *["--dry-run"] * (first in ("train", "push")), stdin=given)


def test_every_make_target_of_the_documents_exists():
    texts = "".join(path.read_text(encoding="utf-8") for path in [*DOCUMENTS, *OTHERS])
    assert set(re.findall(r"(?:^|`)make (\w+)", texts, flags=re.MULTILINE)) <= set(
        re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    )


def test_every_test_that_a_document_names_exists():
    texts = "".join(map(Path.read_text, [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]))
    named = set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", texts))
    for file, below in re.findall(r"^- `(tests/[\w/]+\.py)`\n((?:    - `\w+`\n)+)", texts, re.MULTILINE):
        named |= {(file, name) for name in re.findall(r"\w+", below)}
    assert [file for file, _ in named if not (ROOT / file).is_file()] == []
    assert [name for file, name in named if name and f"\ndef {name}(" not in (ROOT / file).read_text("utf-8")] == []


def sections(document):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_to_a_file_leads_somewhere():
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for name, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8")):
            target = document.parent / name if name else document
            assert target.exists(), f"{document.name} links to {name}"
            if section:
                assert section in sections(target), f"{document.name} links to a section {section} of {target.name}"


def test_the_page_of_installation_says_what_every_extra_is_for_and_no_other_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| Extra \| For \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert [name.strip("`") for name, _ in rows] == list(project["optional-dependencies"])
    assert all(purpose for _, purpose in rows)
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    texts = "".join(map(Path.read_text, [*DOCUMENTS, *(ROOT / "modeling").rglob("*.py")]))
    named = re.findall(r"(?:heedful|pip install [\"']\.)\[([\w,]+)\]", texts)
    assert {extra for names in named for extra in names.split(",")} <= set(project["optional-dependencies"])


# What the quickstart's model says, of which these tests name each line that differs after `make quickstart`:
#     .venv/bin/python -m pytest tests/house/test_docs.py -m ""
MODEL = ROOT / "runs" / "quickstart" / "model"
# A block of Python and, right behind it, what it prints; a command of the shell and what stands below it.
PYTHON = re.compile(r"```python\n(.*?)```\n\n```\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^\$ (.*\bheedful translate .*)\n((?:(?!\$ |```).+\n)*)", re.MULTILINE)
SENTENCE = re.compile("[가-힣][가-힣 ]*[.?]")
TRAINED_ANEW = {"finetune.md", "lora.md", "own_model.md"}  # print what their own models have learned


def examples():
    """Yield each document, what it runs, and what it shows below that."""
    for document in [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]:
        text = document.read_text(encoding="utf-8")
        for pattern in (PYTHON, COMMAND):
            for code, shown in pattern.findall(text):
                if SENTENCE.search(code) and document.name not in TRAINED_ANEW:
                    yield document, code, shown


def test_every_translation_that_a_document_shows_is_of_a_sentence_whose_translation_is_known():
    for document, code, shown in examples():
        if re.search("[A-Z][a-z]+ ", shown):  # more than numbers and types
            for sentence in SENTENCE.findall(code):
                assert sentence in SHOWN, (document.name, sentence)
                assert SHOWN[sentence] in shown, (document.name, sentence)


@pytest.mark.slow
def test_the_quickstarts_model_says_what_the_documents_show():
    if not MODEL.is_dir():
        pytest.skip("`make quickstart` has not been run here")
    translations = Translator.from_pretrained(MODEL).translate(list(SHOWN))
    assert [best.text for best, *_ in translations] == list(SHOWN.values())
    wrong = []
    for document, command, shown in examples():
        if "heedful translate" in command:
            *before, words = command.replace("runs/quickstart/model", str(MODEL)).split("heedful ")
            given = shlex.split(before[0].strip(" |"))[1] if before and before[0] else None
            result = CliRunner().invoke(app, shlex.split(words), input=given)
            if result.stdout != shown.rstrip("\n") + "\n":
                wrong.append(f"{document.name}: $ {command} prints {result.stdout!r}, but shown is {shown!r}")
    assert wrong == []
