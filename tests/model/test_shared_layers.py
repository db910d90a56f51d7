"""Layers that share their weights: one layer, applied as often as there are layers."""

import pytest
import torch
from safetensors.torch import load_file

from heedful import HeedForConditionalGeneration
from heedful.versions_heed import cache_of
from helpers import assert_near, masked_batch, tiny_config, tiny_model

DEPTHS = {"encoder_layers": 3, "decoder_layers": 2}
BATCH = masked_batch((6, 3), (5, 5))


def written_out(shared):
    """Return a model with a layer of its own, a copy, for each time that a layer is applied."""
    config = tiny_config(**DEPTHS)
    config._attn_implementation = shared.config._attn_implementation
    model = HeedForConditionalGeneration(config)
    weights = shared.state_dict()
    for side, depth in (("encoder", 3), ("decoder", 2)):
        for name, value in list(weights.items()):
            for number in range(1, depth if f".{side}.layers.0." in name else 1):
                weights[name.replace(".layers.0.", f".layers.{number}.")] = value.clone()
    model.load_state_dict(weights)
    return model


def test_the_gradient_is_the_sum_over_the_applications():
    shared = tiny_model(share_layers=True, **DEPTHS).train()
    apart = written_out(shared).train()
    losses = [model(**BATCH).loss for model in (shared, apart)]
    assert_near(*losses)
    for loss in losses:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in apart.named_parameters()}
    for name, parameter in shared.named_parameters():
        parts = [gradients[name]]
        for number in range(1, 3):
            other = name.replace(".layers.0.", f".layers.{number}.")
            parts += [gradients[other]] if other != name and other in gradients else []
        assert len(parts) == (1 if ".layers." not in name else 3 if ".encoder." in name else 2)
        assert_near(parameter.grad, torch.stack(parts).sum(0))


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_what_copies_of_the_layer_generate_with_cache_states_and_weights_of_each(beams):
    shared = tiny_model(share_layers=True, **DEPTHS)
    apart = written_out(shared).eval()
    apart.generation_config = shared.generation_config
    given = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    given |= {"num_beams": beams, "max_new_tokens": 8, "return_dict_in_generate": True}
    counts = {"encoder_hidden_states": 4, "decoder_hidden_states": 3, "encoder_attentions": 3}
    counts |= {"decoder_attentions": 2, "cross_attentions": 2}
    given |= {"output_hidden_states": True, "output_attentions": True}
    ours, theirs = (model.generate(**given) for model in (shared, apart))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(cache_of(ours).self_attention_cache.layers) == 2
    for name, count in counts.items():
        found, expected = (each[name] if "encoder" in name else each[name][3] for each in (ours, theirs))
        assert len(found) == count
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)


def test_the_saved_file_holds_the_layer_once(tmp_path):
    model = tiny_model(share_layers=True, **DEPTHS)
    model.save_pretrained(tmp_path)
    layers = {name.split(".layers.")[1][0] for name in load_file(tmp_path / "model.safetensors") if ".layers." in name}
    assert layers == {"0"}
    loaded = HeedForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.num_parameters() == model.num_parameters() < 0.6 * written_out(model).num_parameters()
    assert torch.equal(loaded(**BATCH).logits, model(**BATCH).logits)
