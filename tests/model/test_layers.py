"""Feed-forward networks, residual connections, dropout and initial weights (sections 3.1, 3.3 and 5.4).

And layers that are dropped no more, computed twice to save memory, or applied several times.
"""

import re

import pytest
import torch
import torch.nn.functional as F

import helpers
from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.attending_heed import AS_WRITTEN
from heedful.configuration_heed import GATED_ACTIVATIONS
from heedful.modeling_heed import HeedFeedForward, HeedResidual
from heedful.versions_heed import CHECKPOINTING, cache_of
from helpers import FAMILIES, VARIANTS, assert_near, masked_batch, pairwise, shake, tiny_config, tiny_model

STATES = torch.linspace(-2, 2, 3 * 32).sin().view(1, 3, 32)
SOURCE, TARGET = torch.tensor([[15, 16, 17]]), torch.tensor([[1, 18, 19]])
BATCH = masked_batch((9, 4, 1), (5, 7, 2), "left")


def test_the_network_is_equation_2():
    network = HeedFeedForward(tiny_config(), 64)
    shake(network)
    inner = (STATES @ network.fc1.weight.T + network.fc1.bias).clamp(min=0)
    assert_near(network(STATES), inner @ network.fc2.weight.T + network.fc2.bias)


GATES = {"swiglu": F.silu, "geglu": F.gelu, "geglu_new": torch.nn.GELU("tanh"), "reglu": F.relu}


def test_a_gated_network_multiplies_the_inner_layer_by_its_activated_gate():
    assert GATES.keys() == GATED_ACTIVATIONS.keys() <= {*re.findall(r"`(\w+)`", HeedConfig.__doc__)}
    for name, activation in GATES.items():
        network = HeedFeedForward(tiny_config(activation_function=name, feed_forward_bias=False), 64)
        shake(network)
        gate, inner = activation(STATES @ network.fc_gate.weight.T), STATES @ network.fc1.weight.T
        assert_near(network(STATES), (gate * inner) @ network.fc2.weight.T)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_residual_connection_norms_after_or_before(norm_type, placement):
    residual = HeedResidual(tiny_config(norm_type=norm_type, norm_placement=placement, layer_norm_eps=0.25), "decoder")
    shake(residual)
    weight = residual.norm.weight

    def norm(x):
        if norm_type == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + 0.25).sqrt() * weight
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) / (variance + 0.25).sqrt() * weight + residual.norm.bias

    expected = norm(STATES + STATES.exp()) if placement == "post" else STATES + norm(STATES).exp()
    assert_near(residual.after(STATES, residual.before(STATES, AS_WRITTEN).exp(), AS_WRITTEN), expected)


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


@pytest.mark.parametrize("encoding", ["learned", "shaw", "t5"])
def test_every_parameter_is_trained(encoding):
    changes = {"attention_bias": True, "norm_placement": "pre", "activation_function": "swiglu"}
    model = tiny_model(position_encoding=encoding, **changes)
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


# Words

WORD_DROPOUT = ("source_word_dropout", "target_word_dropout")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["source", "target"])
def test_word_dropout_drops_whole_embeddings_and_scales_the_others_in_training_alone(family, side):
    model = tiny_model(family=family, label_smoothing=0.0, **{f"{side}_word_dropout": 0.25}).train()
    ids = torch.full((40, 50), 7)
    stacks = {"source": model.model.encoder, "target": model.model.decoder}
    for name, stack in stacks.items():
        embeddings, given = stack.embed_tokens(ids), stack.look_up(ids, None)
        if name != side:
            assert torch.equal(given, embeddings)
            continue
        kept = given.abs().sum(-1) > 0  # (40, 50)
        assert 0.68 < kept.float().mean() < 0.82
        assert torch.allclose(given, kept[..., None] * embeddings / 0.75)
        assert stack.look_up(None, embeddings).eq(0).all(-1).any()
    without = tiny_model(family=family, label_smoothing=0.0).eval()(**BATCH).loss
    assert not torch.equal(model(**BATCH).loss, without)
    assert torch.equal(model.eval()(**BATCH).loss, without)


def test_words_of_which_all_are_dropped_are_refused_by_name():
    cases = [(name, f"`{name}` must be at least 0 and below 1, but is 1.0") for name in WORD_DROPOUT]
    for family in FAMILIES:
        helpers.assert_refused(cases, lambda name, family=family: tiny_config(family, **{name: 1.0}))


# Layers that are computed twice


EAGER_ALONE = [("additive", "eager", False), ("additive", "eager", True), ("shaw", "eager", True)]
VARIANTS_TO_TRY = ["default", "modern", "rotary", "t5", "shared_layers", "neighbourhoods", "grouped"]


@pytest.mark.parametrize(
    ("variant", "kernel", "use_reentrant"),
    [*pairwise(VARIANTS_TO_TRY, ["eager", "sdpa"], [False, True]), *EAGER_ALONE],
)
def test_checkpointing_gives_the_same_loss_and_gradients_with_dropout(variant, kernel, use_reentrant):
    recorded = {"output_hidden_states": True, "output_attentions": True} if kernel == "eager" else {}
    dropping = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}
    model, found = tiny_model(attention=kernel, **dropping, **VARIANTS[variant]).train(), []
    for _ in range(2):
        torch.manual_seed(7)
        found.append(helpers.loss_and_gradients(model, BATCH, **recorded))
        helpers.checkpoint_activations(model, use_reentrant=use_reentrant)
    assert_near(found[1], found[0], helpers.rounding(model, BATCH["labels"].numel()))
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

    helpers.checkpoint_activations(model, use_reentrant=use_reentrant)
    assert [count(True), count(False)] == [2, 1]
    getattr(model, f"{CHECKPOINTING}_disable")()
    assert count(True) == 1


def test_without_labels_a_cache_beside_checkpointing_does_not_change_the_logits():
    inputs = {name: value for name, value in BATCH.items() if name != "labels"}
    target = torch.tensor([[1, 20, 21], [1, 22, 23], [1, 24, 25]])
    expected = tiny_model()(**inputs, decoder_input_ids=target).logits
    model = tiny_model().train()
    helpers.checkpoint_activations(model, use_reentrant=False)
    logits = model(**inputs, decoder_input_ids=target, use_cache=True).logits
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert model.model.encoder.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


# Layers that share their weights: one layer, applied as often as there are layers

DEPTHS = {"encoder_layers": 3, "decoder_layers": 2}


def written_out(shared):
    """Return a model with a layer of its own, a copy, for each time that a layer is applied."""
    config = tiny_config(**DEPTHS)
    config._attn_implementation = shared.config._attn_implementation
    model = HeedForConditionalGeneration(config)
    weights = shared.state_dict()
    for name in (name for name in shared.state_dict() if ".layers.0." in name):
        for number in range(1, DEPTHS["encoder_layers" if ".encoder." in name else "decoder_layers"]):
            weights[name.replace(".layers.0.", f".layers.{number}.")] = weights[name].clone()
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
        depth = DEPTHS["encoder_layers" if ".encoder." in name else "decoder_layers"]
        copies = {name.replace(".layers.0.", f".layers.{number}.") for number in range(depth)}
        assert_near(parameter.grad, sum(gradients[copy] for copy in copies))


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
