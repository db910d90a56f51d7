"""What the README says is what the package does."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from transformers.utils import logging as transformers_logging

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.cli.main import app
from heedful.data.korean_english.pairs import korean_english_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.training.recipe_file import read_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
KOREAN = ROOT / "README.ko.md"
DOCUMENTS = [ROOT / "README.md", KOREAN, *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = sorted(
    {
        line.strip().removeprefix("$ ")
        for document in DOCUMENTS
        for line in document.read_text(encoding="utf-8").splitlines()
        if re.match(r"(\$ )?(heedful |accelerate launch |python scripts/)", line.strip())
    }
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def quickstart_model(tmp_path_factory) -> Path:
    """A folder like the one that `make quickstart` leaves, untrained."""
    folder = tmp_path_factory.mktemp("quickstart")
    pairs = list(korean_english_pairs("train", 300))
    tokenizers = train_tokenizers([p["ko"] for p in pairs], [p["en"] for p in pairs], vocab_size=400)
    model = HeedForConditionalGeneration(HeedConfig(vocab_size=400, d_model=32, encoder_layers=1, decoder_layers=1))
    model.save_pretrained(folder)
    tokenizers.save_pretrained(folder)
    return folder


def test_the_python_of_the_readme_runs(quickstart_model, capsys):
    transformers_logging.disable_progress_bar()
    (code,) = blocks("python")
    assert "runs/quickstart/model" in code
    exec(code.replace("runs/quickstart/model", str(quickstart_model)), {})
    assert capsys.readouterr().out.strip().startswith("[")


def test_the_korean_readme_shows_what_the_english_one_shows():
    shown = re.findall(r"```.*?\n(.*?)```", KOREAN.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(shown) == 5
    assert [line for block in shown for line in block.splitlines() if line not in README] == []


def test_the_chatbots_answers_are_counted_as_the_guide_does(tmp_path, monkeypatch, capsys):
    guide = (ROOT / "docs" / "guides" / "chatbot.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    (tmp_path / "answers.txt").write_text("좋은 생각이에요.\n좋은 생각이에요.\n네.\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out == "distinct-1 0.600\ndistinct-2 0.500\n"


def check_command(command: str) -> None:
    words = shlex.split(re.split(r" [<>|] ", command)[0])
    if words[0] == "accelerate":
        words = ["heedful", "train", *words[words.index("scripts/train.py") + 1 :]]
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        return
    subcommand = typer.main.get_command(app).get_command(None, words[1])
    context = subcommand.make_context(words[1], words[2:], resilient_parsing=False)
    if words[1] in ("train", "doctor") and words[2] != "pairs.yaml":  # which `heedful init` writes
        read_recipe(context.params["recipe"], context.params["overrides"])


def test_every_command_of_the_documents_has_known_options_and_recipes():
    wrong = {}
    for command in COMMANDS:
        try:
            check_command(command)
        except Exception as error:
            wrong[command] = repr(error)
    assert not wrong
    assert len(COMMANDS) >= 100


def test_every_make_target_of_the_documents_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    texts = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)", texts, flags=re.MULTILINE))
    assert {"quickstart", "test", "check"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)] == []


def test_the_quickstart_installs_what_it_uses_and_the_tests_the_rest(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for environment in (".venv", ".venv-oldest"):
        installed = []
        for target in ("quickstart", "test", "check"):
            command = ["make", "--dry-run", target, f"VENV={environment}"]
            planned = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            installed.append(re.findall(rf"^{environment}/bin/python -m pip install .* (\S+)$", planned, re.MULTILINE))
        assert installed == [["torch", '".[plots]"'], *[["torch", '".[plots]"', '".[dev,all]"']] * 2]


def test_every_link_to_a_file_leads_somewhere():
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_page_of_installation_says_what_every_extra_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| Extra \| For \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert [name.strip("`") for name, _ in rows] == list(project["optional-dependencies"])
    assert all(purpose for _, purpose in rows)
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README


def test_documents_install_only_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"pip install [\"'](?:heedful|\.)\[([\w,]+)\]", "".join(map(Path.read_text, DOCUMENTS)))
    assert len(named) >= 6
    assert {extra for names in named for extra in names.split(",")} <= set(extras)
