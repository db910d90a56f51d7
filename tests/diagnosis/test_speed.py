"""What the doctor says of slow choices for a GPU."""

import torch

from heedful import HeedConfig
from heedful.diagnosis.doctor import check_speed
from tiny_runs import tiny_recipe

ON_GPU = {"optimization.device": "cuda", "optimization.mixed_precision": "bf16"}
CONFIG = HeedConfig(d_model=64, encoder_attention_heads=4, decoder_attention_heads=4)


def test_slow_choices_on_a_gpu_are_named_by_their_key(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for changes, options, found in (
        ({}, {}, []),
        ({"model.attn_implementation": "eager"}, {}, [("warning", "model.attn_implementation")]),
        ({}, {"attention_dropout": 0.1}, [("note", "model.options")]),
        ({"optimization.mixed_precision": "no"}, {}, [("warning", "optimization.mixed_precision")]),
        ({"optimization.device": "cpu", "model.attn_implementation": "eager"}, {}, []),
    ):
        recipe = tiny_recipe(tmp_path / "run", ON_GPU | changes)
        config = HeedConfig(**CONFIG.to_diff_dict() | options)
        assert [(each.level, each.where) for each in check_speed(recipe, config)] == found
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    eager = tiny_recipe(tmp_path / "run", ON_GPU | {"model.attn_implementation": "eager"})
    assert list(check_speed(eager, CONFIG)) == []
