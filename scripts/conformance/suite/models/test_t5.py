"""T5 under transformers' common tests."""

import unittest

from tests.models.adapters import T5ContinuesATarget, T5DecodesItsInputs
from tests.models.common import EncoderDecoderTests
from transformers import T5Config, T5ForConditionalGeneration, T5Model


class T5Test(EncoderDecoderTests, unittest.TestCase):
    """T5 of Heed's sizes."""

    all_model_classes = (T5Model, T5ForConditionalGeneration)
    config_class = T5Config
    settings = {
        **{"vocab_size": 99, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2},
        **{"num_heads": 4, "relative_attention_num_buckets": 8, "dropout_rate": 0.0},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    }
    decodes_its_inputs = T5DecodesItsInputs
    continues_a_target = T5ContinuesATarget
