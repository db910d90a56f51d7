"""With copied weights, Heed computes what `torch.nn.Transformer` computes."""

import pytest
import torch
from torch import nn

from heedful import HeedModel
from heedful.attention_heed import HeedAttention
from heedful.modeling_heed import HeedDecoderLayer
from helpers import assert_near, padded, shake, tiny_config

KERNELS = ["eager", "sdpa"]
SETTINGS = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
TOKENS = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
HIDDEN_SOURCE = TOKENS == 0
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


def config_like_torch(**changes):
    return tiny_config(attention_bias=True, position_encoding="none", scale_embedding=False, **changes)


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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("crosses", [False, True])
def test_attention_equals_torch_multihead_attention(kernel, crosses):
    theirs = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    shake(theirs)
    ours = HeedAttention(config_like_torch(), "encoder").eval()
    copy_attention(ours, theirs)
    source = torch.randn(2, 6, 32)
    queries = torch.randn(2, 5, 32) if crosses else source
    expected, expected_weights = theirs(
        queries, source, source, key_padding_mask=HIDDEN_SOURCE, average_attn_weights=False
    )
    added = HIDDEN_SOURCE[:, None, None].float() * torch.finfo(torch.float32).min
    read = source if crosses else None
    output, weights = ours(queries, added, read, positions=None, attn_implementation=kernel)
    assert_near(output, expected)
    if kernel == "eager":
        assert_near(weights, expected_weights)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_whole_stacks_equal_torch_transformer_with_padding_on_both_sides(kernel, placement):
    settings = {**SETTINGS, "norm_first": placement == "pre"}
    # Torch ends each stack in a norm; the paper's post-norm stacks have none, which torch allows by hand.
    ends = [nn.LayerNorm(32) if placement == "pre" else None for _ in range(2)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**settings), 2, ends[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**settings), 2, ends[1])
    theirs = nn.Transformer(32, 4, custom_encoder=encoder, custom_decoder=decoder, batch_first=True).eval()
    shake(theirs)
    ours = HeedModel._from_config(config_like_torch(norm_placement=placement), attn_implementation=kernel).eval()
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
