"""Feed-forward networks, residual connections, dropout and initial weights (sections 3.1, 3.3 and 5.4)."""

import re

import pytest
import torch
import torch.nn.functional as F

from heedful import HeedForConditionalGeneration
from heedful.modeling_heed import HeedFeedForward, HeedResidual
from helpers import assert_near, shake, tiny_config, tiny_model

STATES = torch.linspace(-2, 2, 3 * 32).sin().view(1, 3, 32)
SOURCE, TARGET = torch.tensor([[15, 16, 17]]), torch.tensor([[1, 18, 19]])


def test_the_network_is_equation_2_which_is_two_convolutions_of_kernel_size_1():
    network = HeedFeedForward(tiny_config(), 64)
    shake(network)
    inner = (STATES @ network.fc1.weight.T + network.fc1.bias).clamp(min=0)
    assert_near(network(STATES), inner @ network.fc2.weight.T + network.fc2.bias)
    convolved = F.conv1d(STATES.transpose(1, 2), network.fc1.weight[..., None], network.fc1.bias).relu()
    convolved = F.conv1d(convolved, network.fc2.weight[..., None], network.fc2.bias)
    assert_near(network(STATES), convolved.transpose(1, 2))


def test_a_gated_network_multiplies_the_inner_layer_by_its_activated_gate():
    for name, activation in (("swiglu", F.silu), ("geglu", F.gelu), ("reglu", F.relu)):
        network = HeedFeedForward(tiny_config(activation_function=name, feed_forward_bias=False), 64)
        shake(network)
        gate, inner = activation(STATES @ network.fc_gate.weight.T), STATES @ network.fc1.weight.T
        assert_near(network(STATES), (gate * inner) @ network.fc2.weight.T)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_residual_connection_norms_after_or_before(norm_type, placement):
    residual = HeedResidual(tiny_config(norm_type=norm_type, norm_placement=placement, layer_norm_eps=0.25))
    shake(residual)
    weight = residual.norm.weight

    def norm(x):
        if norm_type == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + 0.25).sqrt() * weight
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) / (variance + 0.25).sqrt() * weight + residual.norm.bias

    expected = norm(STATES + STATES.exp()) if placement == "post" else STATES + norm(STATES).exp()
    assert_near(residual(STATES, torch.exp), expected)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_dropout_acts_in_training_and_not_in_evaluation(attention):
    given, plain = {"input_ids": SOURCE, "decoder_input_ids": TARGET}, tiny_model(attention=attention)
    for field in ("dropout", "attention_dropout", "activation_dropout"):
        model = tiny_model(attention=attention, **{field: 0.5})
        assert torch.equal(model(**given).logits, plain(**given).logits)
        first, second = (model.train()(**given).logits for _ in range(2))
        assert (first - second).abs().max() > 1e-2


@torch.no_grad()
def test_dropout_is_on_the_embeddings_and_on_every_sublayer():
    model = HeedForConditionalGeneration(tiny_config(dropout=0.25))
    probabilities = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert probabilities.count(0.25) == 2 + 2 * 2 + 2 * 3
    added = model.model.encoder.add_positions(torch.full((1, 400, 32), 50.0), torch.arange(400)[None])
    assert abs((added == 0).float().mean() - 0.25) < 0.03


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"tie_output_embeddings": False}])
def test_fresh_weights_have_the_documented_spread(changes):
    model = HeedForConditionalGeneration(tiny_config(vocab_size=999, d_model=64, **changes))
    for embedding in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head):
        assert abs(embedding.weight.std() * 64**0.5 - 1) < 0.02
    fc1 = model.model.encoder.layers[0].feed_forward.fc1
    assert abs(fc1.weight.std() / (2 / (64 + 64)) ** 0.5 - 1) < 0.05
    assert not fc1.bias.any()


def test_every_parameter_is_trained():
    changes = {"attention_bias": True, "norm_placement": "pre", "activation_function": "swiglu"}
    model = tiny_model(position_encoding="learned", **changes)
    model(SOURCE, labels=TARGET).loss.backward()
    unseen = {name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()}
    # A key's bias moves all scores of a query alike, which softmax does not see.
    assert all(name.endswith("k_proj.bias") for name in unseen)


@pytest.mark.parametrize(("activation", "encoding"), [("relu", "rotary"), ("swiglu", "shaw"), ("relu", "t5")])
def test_every_rule_of_the_plans_of_parallelism_names_modules_of_the_model(activation, encoding):
    model = HeedForConditionalGeneration(tiny_config(activation_function=activation, position_encoding=encoding))
    modules = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in model.named_modules()}
    plan = model._tp_plan
    cross = {f"model.decoder.layers.*.cross_attn.{name}_proj" for name in ("q", "k", "v", "out")}
    assert {"lm_head", *cross} <= {*plan} <= modules
    # Attention that shares something among its heads is not split by heads.
    assert any("self_attn" in rule for rule in plan) == (encoding == "rotary")
    rows = {rule for rule, style in plan.items() if style == "rowwise"}
    assert all(rule.endswith(("out_proj", "fc2")) for rule in rows)
    assert {"model.encoder.layers.*", "model.decoder.layers.*"} <= {*model._fsdp_plan}
