"""With copied weights, Heed computes and generates what `MarianMTModel` does."""

import pytest
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from heedful import HeedForConditionalGeneration
from helpers import ENDS, PAD, assert_near, padded, sentences, shake, tiny_config

# Marian's names on the left, in the order in which they are replaced.
RENAMINGS = {
    "self_attn_layer_norm": "self_attn_residual.norm",
    "encoder_attn_layer_norm": "cross_attn_residual.norm",
    "final_layer_norm": "feed_forward_residual.norm",
    "encoder_attn": "cross_attn",
    ".fc1.": ".feed_forward.fc1.",
    ".fc2.": ".feed_forward.fc2.",
}


def renamed(name: str) -> str:
    for theirs, ours in RENAMINGS.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    sizes = {
        **{"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
        **{"activation_function": "swish", "scale_embedding": True},
        **{"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": PAD},
    }
    theirs = MarianMTModel(MarianConfig(**sizes, dropout=0.0)).eval()
    sinusoids = {name: value.clone() for name, value in theirs.state_dict().items() if "embed_positions" in name}
    shake(theirs)
    theirs.load_state_dict(sinusoids, strict=False)
    torch.nn.init.normal_(theirs.model.shared.weight, std=32**-0.5)
    ours = HeedForConditionalGeneration(tiny_config(**sizes, attention_bias=True, sinusoid_layout="concatenated"))
    unused = ("final_logits_bias", "embed_positions", "model.shared")
    weights = {renamed(name): value for name, value in theirs.state_dict().items() if not name.startswith(unused)}
    weights = {name: value for name, value in weights.items() if "embed_positions" not in name}
    assert not theirs.final_logits_bias.any()
    missing = ours.load_state_dict(weights, strict=True)
    assert not missing.missing_keys
    return ours.eval(), theirs


@pytest.fixture
def batch():
    ids, mask = padded(sentences(9, 4, 6))
    return {"input_ids": ids, "attention_mask": mask}


def test_logits_and_loss_equal_marian(models, batch):
    ours, theirs = models
    labels, tokens = padded(sentences(5, 7, 2))
    labels = labels.masked_fill(tokens == 0, -100)
    our_outputs, their_outputs = (model(**batch, labels=labels) for model in (ours, theirs))
    assert their_outputs.logits.std() > 0.5
    assert_near(our_outputs.logits, their_outputs.logits)
    assert_near(our_outputs.loss, their_outputs.loss)


@pytest.mark.parametrize("beams", [1, 4])
def test_generated_tokens_equal_marian(models, batch, beams):
    settings = GenerationConfig(
        **{"num_beams": beams, "max_length": 16, "do_sample": False, "no_repeat_ngram_size": 1},
        **{"pad_token_id": PAD, "eos_token_id": ENDS, "decoder_start_token_id": PAD},
    )
    our_tokens, their_tokens = (model.generate(**batch, generation_config=settings) for model in models)
    assert len(set(their_tokens.flatten().tolist())) > 15
    assert our_tokens.tolist() == their_tokens.tolist()
