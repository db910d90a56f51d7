"""Tiny recurrent models that the tests of this folder use."""

import torch

from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration
from helpers import ENDS, shake

CELLS = ("rnn", "lstm", "gru")
ATTENTIONS = ("dot", "scaled_dot", "general", "additive")
# The encoder's last state is all that the decoder gets.
SUTSKEVER = {"cell": "lstm", "attention": "none", "input_feeding": False, "bidirectional": False}
SUTSKEVER |= {"bridge": "copy", "reverse_source": True}
SEPARATE = {"decoder_vocab_size": 71, "share_encoder_decoder_embeddings": False}
# Each changes what states, masks or caches have to do.
VARIANTS = {
    "default": {},
    "rnn": {"cell": "rnn", "attention": "dot"},
    "lstm": {"cell": "lstm", "attention": "general"},
    "sutskever": SUTSKEVER,
    "cho": {"attention": "none"},  # which the decoder reads at every step
    "no_feeding": {"cell": "lstm", "attention": "scaled_dot", "input_feeding": False},
    "no_bridge": {"bridge": "none", "bidirectional": False},
    "equations": {"use_fused_cells": False},
    "unequal": {"encoder_layers": 3, "decoder_layers": 1},
    "more_decoder": {"encoder_layers": 1, "decoder_layers": 3, "input_feeding": False},
    "separate_vocabularies": SEPARATE,
}


def tiny_rnn_config(**changes) -> HeedRNNConfig:
    """Return a config of two layers without dropout, so that training mode is deterministic too."""
    sizes = {"vocab_size": 99, "embedding_size": 12, "hidden_size": 16, "encoder_layers": 2, "decoder_layers": 2}
    return HeedRNNConfig(**{**sizes, "dropout": 0.0, **changes})


def tiny_rnn(seed: int = 0, **changes) -> HeedRNNForConditionalGeneration:
    """Return a tiny model in evaluation mode whose outputs depend on everything it reads."""
    torch.manual_seed(seed)
    model = HeedRNNForConditionalGeneration(tiny_rnn_config(**changes))
    shake(model)
    model.generation_config.eos_token_id = ENDS
    # Untrained models like one token best; its successors depend on all that is read.
    model.generation_config.no_repeat_ngram_size = 1
    return model.eval()
