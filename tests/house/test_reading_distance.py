"""From `heedful train` to `loss.backward()` is a short way to read, and the list of its files does not lie."""

import runpy
import sys
import traceback
from pathlib import Path

import pytest
import torch

import heedful
from heedful.training.recipe_file import to_yaml
from tiny_runs import tiny_recipe

SCRIPT = Path(__file__).parents[2] / "scripts" / "reading_distance.py"
COUNTED = runpy.run_path(str(SCRIPT))
PACKAGE = Path(heedful.__file__).resolve().parent


def own_files() -> set[str]:
    """Return our files on the call stack, by their names in the package."""
    files = {Path(frame.filename) for frame in traceback.extract_stack()}
    return {str(file.relative_to(PACKAGE)) for file in files if file.is_relative_to(PACKAGE)}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """Our files on the call stack of one tiny `heedful train`, at `loss.backward()` and in the attention's forward."""
    folder = tmp_path_factory.mktemp("distance")
    changes = {"optimization.max_updates": 1, "data.test": {}, "validation.sentences": 1}
    (folder / "recipe.yaml").write_text(to_yaml(tiny_recipe(folder / "run", changes)))
    found = {"backward": set(), "attention": set()}
    backward = torch.Tensor.backward

    def look_and_go_backward(*arguments, **options):
        found["backward"] |= own_files()
        return backward(*arguments, **options)

    def look_at_attention(module, _):
        if type(module).__name__.endswith("Attention") and module.training:
            found["attention"] |= own_files()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look_at_attention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", look_and_go_backward)
        patch.setattr(sys, "argv", ["heedful", "train", str(folder / "recipe.yaml")])
        try:
            with pytest.raises(SystemExit) as end:  # click ends every command so
                runpy.run_module("heedful", run_name="__main__")
        finally:
            hook.remove()
    assert not end.value.code
    return found


def test_the_way_to_the_models_door_is_short():
    assert COUNTED["distance"]("to the model's door") <= COUNTED["LIMITS"]["to the model's door"] == 1900


def test_the_way_behind_the_door_is_short():
    assert COUNTED["distance"]("behind it") <= COUNTED["LIMITS"]["behind it"] == 1400


@pytest.mark.parametrize("part", COUNTED["WAY"])
def test_every_file_of_the_way_is_there_and_has_its_reason(part):
    missing = [name for name in COUNTED["WAY"][part] if not (PACKAGE / name).is_file()]
    assert not missing
    assert all(COUNTED["WAY"][part].values())


def test_every_side_door_is_there_and_none_is_on_the_way():
    assert not [name for name in COUNTED["SIDE_DOORS"] if not (PACKAGE / name).exists()]
    counted = {name for files in COUNTED["WAY"].values() for name in files}
    assert not [name for name in counted if name.startswith(tuple(COUNTED["SIDE_DOORS"]))]


def test_our_files_on_the_way_to_backward_are_counted(stacks):
    assert {"cli/main.py", "training/run.py", "training/loop/loop.py", "training/loop/engine.py"} <= stacks["backward"]
    assert stacks["backward"] <= COUNTED["TO_THE_DOOR"].keys()


def test_our_files_on_the_way_to_attention_are_counted(stacks):
    assert "modeling_heed.py" in stacks["attention"]
    assert stacks["attention"] <= COUNTED["TO_THE_DOOR"].keys() | COUNTED["BEHIND_THE_DOOR"].keys()
