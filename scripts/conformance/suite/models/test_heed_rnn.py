"""The recurrent models under transformers' common tests."""

import unittest

from tests.models.adapters import HeedRNNContinuesATarget, HeedRNNDecodesItsInputs
from tests.models.common import SIZES, EncoderDecoderTests

from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration, HeedRNNModel

SHARED = ("vocab_size", "encoder_layers", "decoder_layers")
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


class HeedRNNTest(EncoderDecoderTests, unittest.TestCase):
    """The default model, a GRU with additive attention, tiny."""

    all_model_classes = (HeedRNNModel, HeedRNNForConditionalGeneration)
    config_class = HeedRNNConfig
    settings = {
        **{name: SIZES[name] for name in (*SHARED, *SPECIAL)},
        **{"embedding_size": 16, "hidden_size": 16, "label_smoothing": 0.0, "dropout": 0.0},
    }
    # There are no heads, and no attention but the decoder's to the source.
    common_properties = ("hidden_size", "num_hidden_layers")
    has_attentions = False
    # After 1,000 steps, the others' number, the gradient has fallen by 88 % instead of 90.
    training_overfit_steps = 1500
    decodes_its_inputs = HeedRNNDecodesItsInputs
    continues_a_target = HeedRNNContinuesATarget
