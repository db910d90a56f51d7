"""What the doctor says of slow choices for a GPU."""

import pytest
import torch

from heedful import HeedConfig
from heedful.diagnosis.doctor import check_speed
from tiny_runs import tiny_recipe

ON_GPU = {"optimization.device": "cuda", "optimization.mixed_precision": "bf16"}
CONFIG = HeedConfig(d_model=64, encoder_attention_heads=4, decoder_attention_heads=4)


@pytest.mark.parametrize(
    ("changes", "options", "found"),
    [
        ({}, {}, []),
        ({"model.attn_implementation": "eager"}, {}, [("warning", "model.attn_implementation")]),
        ({}, {"attention_dropout": 0.1}, [("note", "model.options")]),
        ({"optimization.mixed_precision": "no"}, {}, [("warning", "optimization.mixed_precision")]),
        ({"optimization.device": "cpu", "model.attn_implementation": "eager"}, {}, []),
    ],
)
def test_slow_choices_on_a_gpu_are_named_by_their_key(tmp_path, monkeypatch, changes, options, found):
    recipe = tiny_recipe(tmp_path / "run", ON_GPU | changes)
    config = HeedConfig(**CONFIG.to_diff_dict() | options)
    assert list(check_speed(recipe, config)) == []  # there is no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [(each.level, each.where) for each in check_speed(recipe, config)] == found
