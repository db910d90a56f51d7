"""The guides to loading, adapters, kernels, recurrent models and your own run as written, and print what they say."""

import pytest
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from guides import blocks_of, text_of
from helpers import slow_but, tiny_model
from memorised import SHOWN, saved_model

# How many blocks a guide has at least, and how many of them print nothing that it shows.
COUNTS = {"lora": (7, 1), "kernels": (6, 0), "recurrent": (5, 0), "own_model": (4, 0), "load_and_generate": (4, 3)}


@pytest.mark.parametrize("name", slow_but([name for name in COUNTS if name != "kernels"], COUNTS))
def test_a_guide_prints_what_it_says_it_prints(name, tmp_path, monkeypatch, capsys):
    least, silent = COUNTS[name]
    blocks = blocks_of(text_of(name))
    assert len(blocks) >= least
    assert sum(not expected for _, expected in blocks) <= silent
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    if name == "load_and_generate":
        saved_model(tmp_path / "runs" / "quickstart" / "model", SHOWN, vocab_size=272, norm_placement="post")
    if name == "lora":
        pytest.importorskip("peft")
        # The guide names every linear layer but the output.
        modules = tiny_model(activation_function="swiglu").named_modules()
        linear = {name.split(".")[-1] for name, module in modules if isinstance(module, nn.Linear)} - {"lm_head"}
        assert linear
        assert all(f"`{name}`" in text_of("lora") for name in linear)
        saved_model(tmp_path / "me" / "model", vocab_size=272)
        capsys.readouterr()
    names: dict = {"__name__": "__main__"}
    for code, expected in blocks:
        exec(code, names)
        lines = capsys.readouterr().out.splitlines(keepends=True)
        printed = "".join(line for line in lines if not line.startswith("{"))  # of a trainer's log
        if "trainer.train()" not in code:  # it prints its own figures
            assert printed == expected, code
