"""The guide to adapters, small weights and new tokens runs as it is written, and prints what it says."""

import re
from pathlib import Path

from torch import nn
from transformers.utils import logging as transformers_logging

from heedful.data.tokenizer_training import train_tokenizers
from memorised import PAIRS, memorised_model

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = (GUIDES / "lora.md").read_text(encoding="utf-8")
# A block of Python and, right behind it, what it prints.
BLOCKS = re.findall(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", GUIDE, re.DOTALL)


def test_the_guide_prints_what_it_says_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    transformers_logging.disable_progress_bar()
    tokenizers = train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=272)
    memorised_model(tokenizers, PAIRS).save_pretrained("me/model")
    tokenizers.save_pretrained("me/model")
    assert len(BLOCKS) >= 7
    assert sum(bool(expected) for _, expected in BLOCKS) >= 6
    names: dict = {}
    for code, expected in BLOCKS:
        exec(code, names)
        printed = capsys.readouterr().out
        if "trainer.train()" not in code:  # it prints its own figures
            assert printed == expected, code


def test_the_guide_names_every_linear_layer_but_the_output():
    from helpers import tiny_model

    modules = tiny_model(activation_function="swiglu").named_modules()
    linear = {name.split(".")[-1] for name, module in modules if isinstance(module, nn.Linear)} - {"lm_head"}
    assert linear
    assert all(f"`{name}`" in GUIDE for name in linear)
