"""The guides to adapters, kernels, recurrent models and your own models run as written, and print what they say."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from heedful import HeedRNNConfig
from helpers import tiny_model
from memorised import saved_model

ROOT = Path(__file__).parents[2]
GUIDES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "guides").glob("*.md")}
# A block of Python and, right behind it, what it prints.
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
# How many blocks a guide has at least, and how many of them print nothing that it shows.
COUNTS = {"lora": (7, 1), "kernels": (6, 0), "recurrent": (5, 0), "own_model": (4, 0)}


@pytest.mark.parametrize("name", ["lora", pytest.param("kernels", marks=pytest.mark.slow), "recurrent", "own_model"])
def test_a_guide_prints_what_it_says_it_prints(name, tmp_path, monkeypatch, capsys):
    least, silent = COUNTS[name]
    blocks = BLOCK.findall(GUIDES[name])
    assert len(blocks) >= least
    assert sum(not expected for _, expected in blocks) <= silent
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    if name == "lora":
        pytest.importorskip("peft")
        # The guide names every linear layer but the output.
        modules = tiny_model(activation_function="swiglu").named_modules()
        linear = {name.split(".")[-1] for name, module in modules if isinstance(module, nn.Linear)} - {"lm_head"}
        assert linear
        assert all(f"`{name}`" in GUIDES["lora"] for name in linear)
        saved_model(tmp_path / "me" / "model", vocab_size=272)
        capsys.readouterr()
    names: dict = {"__name__": "__main__"}
    for code, expected in blocks:
        exec(code, names)
        lines = capsys.readouterr().out.splitlines(keepends=True)
        printed = "".join(line for line in lines if not line.startswith("{"))  # of a trainer's log
        if "trainer.train()" not in code:  # it prints its own figures
            assert printed == expected, code


def test_the_guide_to_recurrent_models_names_fields_and_configs_that_exist():
    guide = GUIDES["recurrent"]
    options = re.findall(r"^\| `(\w+)` \|", guide, flags=re.MULTILINE)
    assert len(options) == 8
    assert set(options) <= set(HeedRNNConfig.__dataclass_fields__)
    names = re.findall(r"`(rnn-[\w-]+)`", guide)
    assert {path.name for path in (ROOT / "configuration" / "models").glob("rnn-*")} == set(names)
