"""Gradient checkpointing changes memory and time, and nothing that is computed."""

import pytest
import torch

from heedful.versions_heed import cache_of
from helpers import VARIANTS, assert_near, padded, pairwise, sentences, tiny_model


def batch():
    torch.manual_seed(1)
    source, mask = padded(sentences(9, 4, 1), "left")
    labels, target_mask = padded(sentences(5, 7, 2))
    return {"input_ids": source, "attention_mask": mask, "labels": labels.masked_fill(target_mask == 0, -100)}


def loss_and_gradients(model, checkpointing=None, **arguments):
    """Return both as one vector, of a model that drops out with one seed."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    torch.manual_seed(7)
    loss = model.train()(**batch(), **arguments).loss
    loss.backward()
    return torch.cat([loss.detach()[None], *(parameter.grad.flatten() for parameter in model.parameters())])


def dropping(kernel="sdpa", **changes):
    return tiny_model(attention=kernel, dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, **changes)


EAGER_ALONE = [("additive", "eager", False), ("additive", "eager", True), ("shaw", "eager", True)]
VARIANTS_TO_TRY = ["default", "modern", "rotary", "t5", "shared_layers", "neighbourhoods", "grouped"]


@pytest.mark.parametrize(
    ("variant", "kernel", "use_reentrant"),
    [*pairwise(VARIANTS_TO_TRY, ["eager", "sdpa"], [False, True]), *EAGER_ALONE],
)
def test_checkpointing_gives_the_same_loss_and_gradients_with_dropout(variant, kernel, use_reentrant):
    recorded = {"output_hidden_states": True, "output_attentions": True} if kernel == "eager" else {}
    expected = loss_and_gradients(dropping(kernel, **VARIANTS[variant]), **recorded)
    model = dropping(kernel, **VARIANTS[variant])
    assert_near(loss_and_gradients(model, {"use_reentrant": use_reentrant}, **recorded), expected)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_every_layer_twice_in_training_and_makes_no_cache_beside_labels(use_reentrant):
    model, calls = tiny_model(), []
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))

    def count(is_training):
        calls.clear()
        outputs = model.train(is_training)(**batch(), use_cache=True)
        assert cache_of(outputs) is None
        outputs.loss.backward()
        return len(calls) / len(layers)

    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert [count(True), count(False)] == [2, 1]
    model.gradient_checkpointing_disable()
    assert count(True) == 1


def test_without_labels_a_cache_beside_checkpointing_does_not_change_the_logits():
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    target = torch.tensor([[1, 20, 21], [1, 22, 23], [1, 24, 25]])
    expected = tiny_model()(**inputs, decoder_input_ids=target).logits
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = model(**inputs, decoder_input_ids=target, use_cache=True).logits
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert model.model.encoder.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0
