"""The recurrent models under transformers' common tests."""

import unittest

import torch
from tests.models.adapters import HeedRNNContinuesATarget, HeedRNNDecodesItsInputs
from tests.models.common import SIZES, EncoderDecoderTests

from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration, HeedRNNModel

SHARED = ("vocab_size", "encoder_layers", "decoder_layers")
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


class HeedRNNTest(EncoderDecoderTests, unittest.TestCase):
    """A tiny default model: a GRU with additive attention."""

    all_model_classes = (HeedRNNModel, HeedRNNForConditionalGeneration)
    config_class = HeedRNNConfig
    settings = {
        **{name: SIZES[name] for name in (*SHARED, *SPECIAL)},
        **{"embedding_size": 16, "hidden_size": 16, "label_smoothing": 0.0, "dropout": 0.0},
    }
    # There are no heads, and only cross-attention.
    common_properties = ("hidden_size", "num_hidden_layers")
    has_attentions = False
    exports_any_length = False
    # After the others' 1,000 steps the gradient has fallen by 88 % instead of 90.
    training_overfit_steps = 1500
    decodes_its_inputs = HeedRNNDecodesItsInputs
    continues_a_target = HeedRNNContinuesATarget

    def _get_tiny_config(self):
        """Return the FSDP tests' config, without the four heads that they always set."""
        config = self.model_tester.get_config()
        config.update({"vocab_size": 256, "hidden_size": 64})
        return type(config), config.to_diff_dict()

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """Check a recurrent cache: a state of each layer for any target length."""
        assert past_key_values.get_seq_length() == seq_length
        assert len(past_key_values) == config.decoder_layers
        for part in (part for state in past_key_values.layers[0].states for part in state):
            assert tuple(part.shape) == (batch_size, config.hidden_size)

    def _check_caches_are_equal(self, cache1, cache2):
        """Compare all kept states."""
        assert cache1.get_seq_length() == cache2.get_seq_length()
        for kept in ("states", "fed", "keys"):
            torch.testing.assert_close(getattr(cache1.layers[0], kept), getattr(cache2.layers[0], kept))
