"""Gradient checkpointing changes memory and time, and nothing that is computed."""

import pytest
import torch

from heedful.versions_heed import cache_of
from helpers import VARIANTS, assert_near, padded, pairwise, sentences, tiny_config, tiny_model


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


@pytest.mark.parametrize(
    ("variant", "kernel", "use_reentrant"),
    pairwise(
        ["default", "modern", "rotary", "t5", "shared_layers", "neighbourhoods", "grouped"],
        ["eager", "sdpa"],
        [False, True],
    ),
)
def test_checkpointing_gives_the_same_loss_and_gradients_with_dropout(variant, kernel, use_reentrant):
    expected = loss_and_gradients(dropping(kernel, **VARIANTS[variant]))
    model = dropping(kernel, **VARIANTS[variant])
    found = loss_and_gradients(model, {"use_reentrant": use_reentrant})
    assert_near(found, expected)
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize(("variant", "use_reentrant"), [("additive", False), ("additive", True), ("shaw", True)])
def test_checkpointing_a_model_of_eager_attention_alone_gives_the_same_loss_and_gradients(variant, use_reentrant):
    expected = loss_and_gradients(dropping("eager", **VARIANTS[variant]))
    found = loss_and_gradients(dropping("eager", **VARIANTS[variant]), {"use_reentrant": use_reentrant})
    assert_near(found, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_every_layer_twice_in_training_and_once_in_evaluation(use_reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    calls = []
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    model.train()(**batch()).loss.backward()
    assert len(calls) == 2 * len(layers)
    calls.clear()
    model.eval()(**batch()).loss.backward()
    assert len(calls) == len(layers)
    model.gradient_checkpointing_disable()
    calls.clear()
    model.train()(**batch()).loss.backward()
    assert len(calls) == len(layers)


def test_checkpointing_of_frozen_embeddings_gives_gradients_as_adapters_need_them():
    gradients = []
    for checkpointing in (False, True):
        model = dropping()
        model.model.encoder.embed_tokens.weight.requires_grad_(False)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        torch.manual_seed(7)
        model.train()(**batch()).loss.backward()
        gradients.append(model.model.encoder.layers[0].self_attn.q_proj.weight.grad)
    assert_near(*gradients)
    assert gradients[0].abs().max() > 0


def test_recorded_states_do_not_change_what_checkpointing_computes():
    recorded = {"output_hidden_states": True, "output_attentions": True}
    expected = loss_and_gradients(dropping("eager"), **recorded)
    found = loss_and_gradients(dropping("eager"), {"use_reentrant": True}, **recorded)
    assert_near(found, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_cache_asked_for_beside_labels_is_not_made(use_reentrant):
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    outputs = model.train()(**batch(), use_cache=True)
    assert cache_of(outputs) is None
    outputs.loss.backward()


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


def test_the_trainer_checkpoints_where_its_arguments_say_so(tmp_path):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    rows = [{name: value[row] for name, value in batch().items()} for row in range(3)]
    losses = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = tiny_model(tiny_config(dropout=0.1))
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            gradient_checkpointing=checkpointing,
            max_steps=2,
            per_device_train_batch_size=3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        losses.append(Seq2SeqTrainer(model, arguments, train_dataset=rows).train().training_loss)
        assert model.is_gradient_checkpointing == checkpointing
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
