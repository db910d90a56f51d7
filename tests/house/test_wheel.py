"""The wheel has all that the package needs, with `configuration/`, and requires all that the package imports."""

import os
import re
import shutil
import subprocess
import sys
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest

import heedful
from import_graph import imports_of

pytestmark = pytest.mark.multiprocess
ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "modeling"
# What a name that is imported comes with, where that is another distribution.
DISTRIBUTIONS = {"yaml": "pyyaml"}
# What transformers, torch and datasets cannot be installed without.
THEIRS = {"huggingface_hub", "numpy", "safetensors", "tokenizers", "tqdm", "pyarrow", "regex"}
# Packages of extras, imported by modules that are loaded after a check that the package is installed.
OF_EXTRAS = {"matplotlib", "optuna"}


def files_below(folder):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the working tree, built from a copy of it without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("modeling", "configuration"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_a_wheel_holds_every_file_of_the_package_and_the_configuration_once(wheel):
    names = [name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name]
    package = {f"{top}/{name}" for top in ("heedful", "heedful_lab") for name in files_below(SOURCES / top)}
    configuration = {f"heedful/configuration/{name}" for name in files_below(ROOT / "configuration")}
    assert configuration
    assert sorted(names) == sorted(package | configuration)


def test_recipes_and_sizes_are_found_in_an_installed_wheel(wheel, tmp_path):
    ZipFile(wheel).extractall(tmp_path / "site")
    code = "from heedful.training.recipe_file import *; print(MODELS, read_recipe('paper-base').name)"
    code += "; from heedful.training.model_of_recipe import *; print(read_config('small')['d_model'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, cwd=tmp_path, text=True)
    assert printed.split() == [str(tmp_path / "site/heedful/configuration/models"), "paper-base", "256"]


def test_what_training_evaluation_and_translation_need_is_asked_for_without_an_extra(wheel):
    archive = ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = message_from_string(archive.read(metadata).decode()).get_all("Requires-Dist")
    core = {re.match(r"[\w-]+", entry)[0] for entry in required if "extra ==" not in entry}
    assert core >= {"torch", "transformers", "accelerate", "datasets", "evaluate", "sacrebleu", "pyyaml", "typer"}
    imported = {
        name.split(".")[0]
        for path in SOURCES.rglob("*.py")
        for name in imports_of(path, SOURCES, when_imported=True) - {""}
    }
    ours = {"heedful", "heedful_lab"}
    needed = {DISTRIBUTIONS.get(name, name) for name in imported - set(sys.stdlib_module_names) - ours}
    assert needed - core <= THEIRS | OF_EXTRAS


def test_the_citation_and_the_changelog_are_of_the_version_that_the_wheel_has(wheel):
    assert f"-{heedful.__version__}-" in wheel.name
    assert f"\nversion: {heedful.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (.*?),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest[1] == heedful.__version__
