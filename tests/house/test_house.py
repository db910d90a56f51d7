"""The sizes of folders and files, and the tour, which follows the code that runs."""

import itertools
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import heedful
from heedful.training.recipe_file import to_yaml
from helpers import WITHOUT_HEEDFUL, assert_error, assert_refused, fresh_process, pairwise
from tiny_runs import tiny_recipe

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "scripts" / "upkeep" / "rooms.py"))
PACKAGE = Path(heedful.__file__).resolve().parent
TOUR = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
STATIONS = [match[1] for match in TOOL["STATION"].findall(TOUR)]


def test_product_and_tests_keep_their_limits_and_so_does_every_file():
    assert {folder.name for folder, most in TOOL["MOST"].items() if TOOL["lines_of"](folder) > most} == set()
    files = [path for top in ("modeling", "scripts", "tests") for path in (ROOT / top).rglob("*.py")]
    assert [path for path in files if TOOL["lines_of"](path) > TOOL["MOST_OF_A_FILE"]] == []


def test_the_tour_has_todays_lines_and_names_files_of_the_rooms_that_a_reader_needs():
    assert TOOL["with_todays_lines"](TOUR) == TOUR, "python scripts/upkeep/rooms.py --write"
    assert {name.split("/")[0] for name in STATIONS if "/" in name} <= {*TOOL["NEEDED"]}


def own_files() -> set[str]:
    """Return our files on the call stack, by their names in the package."""
    files = {Path(frame.filename) for frame in traceback.extract_stack()}
    return {str(file.relative_to(PACKAGE)) for file in files if file.is_relative_to(PACKAGE)}


def test_the_tour_passes_every_file_on_the_way_from_the_command_to_backward_and_to_attention(tmp_path, monkeypatch):
    changes = {"optimization.max_updates": 1, "data.test": {}, "validation.sentences": 1}
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny_recipe(tmp_path / "run", changes)))
    found, backward = set(), torch.Tensor.backward

    def look_and_go_backward(*arguments, **options):
        found.update(own_files())
        return backward(*arguments, **options)

    def look_at_attention(module, _):
        if type(module).__name__.endswith("Attention") and module.training:
            found.update(own_files())

    monkeypatch.setattr(torch.Tensor, "backward", look_and_go_backward)
    monkeypatch.setattr(sys, "argv", ["heedful", "train", str(tmp_path / "recipe.yaml")])
    hook = torch.nn.modules.module.register_module_forward_pre_hook(look_at_attention)
    try:
        with pytest.raises(SystemExit) as end:  # click ends every command so
            runpy.run_module("heedful", run_name="__main__")
    finally:
        hook.remove()
    assert not end.value.code
    assert {"training/loop/loop.py", "training/updates/engine.py", "modeling_heed.py"} <= found
    # What begins the command, its options, and the names of the cache say enough by their names.
    assert found - {"__main__.py", "cli/options.py", "versions_heed.py"} <= {*STATIONS}


# What many tests rest on: pairs of options, and new processes.
@pytest.mark.parametrize("sizes", [(3,), (2, 3), (13, 3, 2), (2, 2, 2, 2, 2)], ids=str)
def test_every_pair_of_values_is_in_few_combinations(sizes):
    axes = [{f"{name}{value}": value for value in range(size)} for name, size in zip("abcde", sizes, strict=False)]
    found = pairwise(*axes)
    assert set(found) <= set(itertools.product(*axes))
    for one, other in itertools.combinations(range(len(axes)), 2):
        pairs = {(values[one], values[other]) for values in found}
        assert pairs == set(itertools.product(axes[one], axes[other]))
    largest = sorted(sizes)[-2:]
    assert len(found) == len(set(found)) <= largest[0] * largest[-1] * (1.5 if len(sizes) > 2 else 1)


def test_whatever_is_not_refused_as_it_should_be_is_named():
    assert_refused([("a", "invalid literal"), ("b", "'b'")], int)
    with pytest.raises(AssertionError) as raised:
        assert_refused([("a", "invalid literal"), ("b", "'c'"), ("3", "invalid")], int)
    assert str(raised.value).splitlines()[-2:] == [
        "b: invalid literal for int() with base 10: 'b' does not say 'c'",
        "3 is accepted",
    ]


def test_tests_and_the_processes_that_they_start_see_no_graphics_card():
    code = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == repr(os.environ["CUDA_VISIBLE_DEVICES"]) == "''"


@pytest.mark.parametrize("kind", [DeprecationWarning, FutureWarning])
def test_our_own_use_of_what_is_deprecated_is_an_error_and_that_inside_other_libraries_is_not(kind):
    for module in ("heedful.data.sources", "transformers_modules.model.modeling_heed", "helpers", __name__):
        assert_error("old", warnings.warn_explicit, "old", kind, "file.py", 1, module, error=kind)
    with pytest.raises(kind, match="of the docs"):
        exec(f"import warnings; warnings.warn('of the docs', {kind.__name__}, stacklevel=1)", {})
    warnings.warn_explicit("old", kind, "file.py", 1, "transformers.trainer")


def test_a_new_process_tells_which_piece_raised_and_has_no_heedful_where_it_is_not_to_be(tmp_path):
    pieces = {"right": "assert number == 3", "wrong": "assert number == 4", "import": "import heedful"}
    raised = fresh_process(pieces, {"number": 3}, tmp_path / "one", WITHOUT_HEEDFUL)
    assert raised.keys() == {"wrong", "import"}
    assert raised["wrong"].endswith("AssertionError\n")
    assert "ModuleNotFoundError" in raised["import"]
