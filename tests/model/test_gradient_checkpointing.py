"""Gradient checkpointing changes memory and time, and nothing that is computed."""

import pytest
import torch
from transformers import Seq2SeqTrainer, default_data_collator

from heedful.versions_heed import cache_of
from helpers import VARIANTS, assert_near, loss_and_gradients, masked_batch, pairwise, tiny_model
from trainer_runs import make_trainer

BATCH = masked_batch((9, 4, 1), (5, 7, 2), "left")


def dropping(kernel="sdpa", **changes):
    return tiny_model(attention=kernel, dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, **changes).train()


EAGER_ALONE = [("additive", "eager", False), ("additive", "eager", True), ("shaw", "eager", True)]
VARIANTS_TO_TRY = ["default", "modern", "rotary", "t5", "shared_layers", "neighbourhoods", "grouped"]


@pytest.mark.parametrize(
    ("variant", "kernel", "use_reentrant"),
    [*pairwise(VARIANTS_TO_TRY, ["eager", "sdpa"], [False, True]), *EAGER_ALONE],
)
def test_checkpointing_gives_the_same_loss_and_gradients_with_dropout(variant, kernel, use_reentrant):
    recorded = {"output_hidden_states": True, "output_attentions": True} if kernel == "eager" else {}
    model, found = dropping(kernel, **VARIANTS[variant]), []
    for _ in range(2):
        torch.manual_seed(7)
        found.append(loss_and_gradients(model, BATCH, **recorded))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_near(found[1], found[0])
    assert found[0].abs().max() > 0.1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_every_layer_twice_in_training_and_makes_no_cache_beside_labels(use_reentrant):
    model, calls = tiny_model(), []
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))

    def count(is_training):
        calls.clear()
        outputs = model.train(is_training)(**BATCH, use_cache=True)
        assert cache_of(outputs) is None
        outputs.loss.backward()
        return len(calls) / len(layers)

    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert [count(True), count(False)] == [2, 1]
    model.gradient_checkpointing_disable()
    assert count(True) == 1


def test_without_labels_a_cache_beside_checkpointing_does_not_change_the_logits():
    inputs = {name: value for name, value in BATCH.items() if name != "labels"}
    target = torch.tensor([[1, 20, 21], [1, 22, 23], [1, 24, 25]])
    expected = tiny_model()(**inputs, decoder_input_ids=target).logits
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = model(**inputs, decoder_input_ids=target, use_cache=True).logits
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert model.model.encoder.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_the_trainer_checkpoints_where_its_arguments_say_so(tmp_path):
    rows = [{name: value[row] for name, value in BATCH.items()} for row in range(3)]
    given, losses = {"train_dataset": rows, "data_collator": default_data_collator}, []
    for checkpointing in (False, True):
        model, settings = dropping(), {"gradient_checkpointing": checkpointing, "learning_rate": 5e-5}
        losses.append(make_trainer(Seq2SeqTrainer, tmp_path, model, given, **settings).train().training_loss)
        assert model.is_gradient_checkpointing == checkpointing
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
