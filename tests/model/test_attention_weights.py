"""Attention: its equations, masks, kernels and recorded weights (section 3.2); stacks are those of torch."""

import math

import pytest
import torch
from torch import nn

from heedful import HeedModel
from heedful.attention_heed import HeedAttention
from heedful.modeling_heed import HeedDecoderLayer
from heedful.versions_heed import cache_of
from helpers import VARIANTS, assert_near, attend, padded, sentences, shake, tiny_config, tiny_model


def attention_by_loops(attention, queries, states, scoring, visible):
    """Equation 1 one query, one key and one head at a time, in float64."""
    heads = attention.q_proj.out_features // attention.d_k
    groups = attention.num_key_value_groups
    split = {"q": attention.d_k, "k": attention.d_k, "v": attention.d_v}
    q, k, v = (
        (getattr(attention, f"{name}_proj")(read)).double().unflatten(-1, (-1, width))
        for (name, width), read in zip(split.items(), (queries, states, states), strict=True)
    )
    output = torch.zeros(len(queries), heads, attention.d_v, dtype=torch.float64)
    for head in range(heads):
        shared = head // groups
        for i in range(len(queries)):
            seen = [j for j in range(len(states)) if visible(i, j)]
            if scoring == "additive":
                weight = attention.additive_score.weight[head].double()
                scores = [(weight * torch.tanh(q[i, head] + k[j, shared])).sum().item() for j in seen]
            else:
                scale = 1 / math.sqrt(attention.d_k) if scoring == "scaled_dot" else 1.0
                scores = [(q[i, head] * k[j, shared]).sum().item() * scale for j in seen]
            exponentials = [math.exp(score) for score in scores]
            for j, exponential in zip(seen, exponentials, strict=True):
                output[i, head] += exponential / sum(exponentials) * v[j, shared]
    return attention.out_proj(output.flatten(1).float())


@torch.no_grad()
@pytest.mark.parametrize(
    ("scoring", "kernel"),
    [("scaled_dot", "eager"), ("scaled_dot", "sdpa"), ("dot", "eager"), ("dot", "sdpa"), ("additive", "eager")],
)
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_attention_is_equation_1_head_by_head(scoring, kernel, key_value_heads):
    config = tiny_config(attention_scoring=scoring, d_k=6, d_v=10, encoder_key_value_heads=key_value_heads)
    attention = HeedAttention(config, "encoder", is_cross=True).eval()
    shake(attention)
    queries, states = 0.5 * torch.randn(3, 32), 0.5 * torch.randn(5, 32)
    visible = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    mask = torch.zeros(3, 5).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    output, _ = attend(attention, queries[None], kernel, source=states[None], source_mask=mask)
    assert_near(output[0], attention_by_loops(attention, queries, states, scoring, lambda i, j: visible[i, j]), 2e-5)


def moved_by(encode, length, changed):
    """Return the positions whose states another token at one position changes."""
    ids = torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(length))
    other = ids.clone()
    other[0, changed] = 3 + (ids[0, changed] - 2) % 96
    return ((encode(other) - encode(ids)).abs().amax(-1)[0] > 1e-6).tolist()


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("radius", [1, 3])
def test_an_encoder_neighbourhood_reaches_exactly_its_radius_and_a_decoders_backwards_alone(kernel, radius):
    changes = {"encoder_layers": 1, "decoder_layers": 1}
    changes |= {"encoder_neighbourhood": radius, "decoder_neighbourhood": radius}
    model = tiny_model(attention=kernel, **changes).model

    def decode(ids, cache=None):
        given = {"encoder_hidden_states": torch.ones(1, 4, 32), "past_key_values": cache}
        return model.decoder(ids, **given, use_cache=True)

    def step_by_step(ids):
        states, cache = [], None
        for token in ids.split(1, 1):
            outputs = decode(token, cache)
            cache = cache_of(outputs)
            states.append(outputs.last_hidden_state)
        return torch.cat(states, 1)

    for changed in range(8):
        moved = moved_by(lambda ids: model.encoder(ids).last_hidden_state, 8, changed)
        assert moved == [abs(i - changed) <= radius for i in range(8)]
        for way in (lambda ids: decode(ids).last_hidden_state, step_by_step):
            assert moved_by(way, 8, changed) == [0 <= i - changed <= radius for i in range(8)]


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_decoder_sees_no_later_token_and_no_padding(variant):
    model = tiny_model(**VARIANTS[variant])
    source, source_mask = padded(sentences(6, 3))
    target, target_mask = padded(sentences(6, 4), "left")
    masks = {"attention_mask": source_mask, "decoder_attention_mask": target_mask}
    before = model(source, decoder_input_ids=target, **masks).logits
    disturbed = model(
        source.masked_fill(source_mask == 0, 50),
        decoder_input_ids=torch.cat([target.masked_fill(target_mask == 0, 50)[:, :-1], torch.tensor([[50], [51]])], 1),
        **masks,
    ).logits
    seen = target_mask[:, :-1] == 1
    assert_near(disturbed[:, :-1][seen], before[:, :-1][seen])
    assert (disturbed[:, -1] - before[:, -1]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_output_attentions_gives_real_weights_under_every_kernel(kernel):
    model = tiny_model(attention=kernel)
    source, mask = padded(sentences(7, 4))
    target = torch.randint(3, 99, (2, 5))
    outputs = model(source, attention_mask=mask, decoder_input_ids=target, output_attentions=True)
    for name, queries, keys in (("encoder", 7, mask), ("cross", 5, mask), ("decoder", 5, torch.ones(2, 5))):
        weights = outputs[f"{name}_attentions"]
        assert [tuple(layer.shape) for layer in weights] == [(2, 4, queries, keys.shape[1])] * 2
        visible = keys[:, None, None].bool().expand_as(weights[0])
        visible = visible.tril() if name == "decoder" else visible
        for layer in weights:
            # A padded query may look anywhere; it has no meaning.
            assert torch.equal(layer > 0, visible)
            assert_near(layer.sum(-1), torch.ones(2, 4, queries))
            assert layer.std() > 1e-3
    assert model.config._attn_implementation == kernel
    if kernel != "flex_attention":
        silent = model(source, attention_mask=mask, decoder_input_ids=target)
        assert silent.encoder_attentions is None
        assert_near(silent.logits, outputs.logits)
    # Only eager attention returns weights, so a call that asks for them runs under it; it may be chosen at any time.
    model.set_attn_implementation("eager")
    again = model(source, attention_mask=mask, decoder_input_ids=target, output_attentions=True)
    assert torch.equal(again.cross_attentions[0], outputs.cross_attentions[0])


# With copied weights, Heed computes what `torch.nn.Transformer` computes

SETTINGS = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
TOKENS = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
HIDDEN_SOURCE = TOKENS == 0
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


@torch.no_grad()
def copy_attention(ours, theirs):
    for name, weight, bias in zip("qkv", theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        getattr(ours, f"{name}_proj").weight.copy_(weight)
        getattr(ours, f"{name}_proj").bias.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


def copy_layer(ours, theirs):
    copy_attention(ours.self_attn, theirs.self_attn)
    norms = [ours.self_attn_residual.norm, ours.feed_forward_residual.norm]
    if isinstance(ours, HeedDecoderLayer):
        copy_attention(ours.cross_attn, theirs.multihead_attn)
        norms.insert(1, ours.cross_attn_residual.norm)
    for number, norm in enumerate(norms, start=1):
        norm.load_state_dict(getattr(theirs, f"norm{number}").state_dict())
    ours.feed_forward.fc1.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.fc2.load_state_dict(theirs.linear2.state_dict())


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_whole_stacks_equal_torch_transformer_with_padding_on_both_sides(kernel, placement):
    settings = {**SETTINGS, "norm_first": placement == "pre"}
    # Torch ends each stack in a norm; the paper's post-norm stacks have none, which torch allows by hand.
    ends = [nn.LayerNorm(32) if placement == "pre" else None for _ in range(2)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**settings), 2, ends[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**settings), 2, ends[1])
    theirs = nn.Transformer(32, 4, custom_encoder=encoder, custom_decoder=decoder, batch_first=True).eval()
    shake(theirs)
    config = tiny_config(
        attention_bias=True, position_encoding="none", scale_embedding=False, norm_placement=placement
    )
    ours = HeedModel._from_config(config, attn_implementation=kernel).eval()
    for our_stack, their_stack in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        for our_layer, their_layer in zip(our_stack.layers, their_stack.layers, strict=True):
            copy_layer(our_layer, their_layer)
        if their_stack.norm is not None:
            our_stack.norm.load_state_dict(their_stack.norm.state_dict())
    source, target = torch.randn(2, 6, 32), torch.randn(2, 5, 32)
    _, tokens = padded([torch.ones(3), torch.ones(5)])
    masks = {"attention_mask": TOKENS, "decoder_attention_mask": tokens}
    found = ours(inputs_embeds=source, decoder_inputs_embeds=target, **masks).last_hidden_state
    hidden = {f"{name}_key_padding_mask": HIDDEN_SOURCE for name in ("src", "memory")}
    hidden["tgt_key_padding_mask"] = torch.zeros(2, 5).masked_fill(tokens == 0, float("-inf"))
    expected = theirs(source, target, tgt_mask=CAUSAL, **hidden)
    assert_near(found[tokens == 1], expected[tokens == 1])
