"""The guide to recurrent models runs as it is written, and prints what it shows."""

import re
from pathlib import Path

import torch

from heedful.training.recipe_file import read_recipe

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "recurrent.md").read_text(encoding="utf-8")
# A block of Python and, right behind it, what it prints.
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_guide_prints_what_it_says_it_prints(capsys):
    torch.manual_seed(0)
    names = {}
    assert len(BLOCKS) == GUIDE.count("```python") == 5
    for code, expected in BLOCKS:
        exec(code, names)
        assert capsys.readouterr().out == expected, code


def test_the_options_of_the_guide_are_fields_and_its_configs_exist():
    from heedful import HeedRNNConfig

    options = re.findall(r"^\| `(\w+)` \|", GUIDE, flags=re.MULTILINE)
    assert len(options) == 8
    assert set(options) <= set(HeedRNNConfig.__dataclass_fields__)
    names = re.findall(r"`(rnn-[\w-]+)`", GUIDE)
    assert {path.name for path in (ROOT / "configuration" / "models").glob("rnn-*")} == set(names)


def test_the_command_of_the_guide_makes_a_recurrent_model():
    import shlex

    from heedful.training.recipe_file import read_config

    (command,) = re.findall(r"^heedful train (.*)$", GUIDE, flags=re.MULTILINE)
    path, *changes = shlex.split(command)
    recipe = read_recipe(path, changes)
    assert recipe.model.options == {}
    assert recipe.model.attn_implementation is None
    assert read_config(recipe.model.config)["model_type"] == "heed_rnn"
