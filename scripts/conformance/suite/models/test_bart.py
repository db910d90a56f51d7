"""Bart under transformers' common tests."""

import unittest

from tests.models.adapters import BartContinuesATarget, BartDecodesItsInputs
from tests.models.common import SIZES, EncoderDecoderTests
from transformers import BartConfig, BartForConditionalGeneration, BartModel


class BartTest(EncoderDecoderTests, unittest.TestCase):
    """BART of Heed's sizes."""

    all_model_classes = (BartModel, BartForConditionalGeneration)
    config_class = BartConfig
    settings = {**SIZES, "dropout": 0.0, "forced_eos_token_id": None}
    decodes_its_inputs = BartDecodesItsInputs
    continues_a_target = BartContinuesATarget
