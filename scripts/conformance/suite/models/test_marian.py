"""Marian under transformers' common tests."""

import unittest

from tests.models.adapters import MarianContinuesATarget, MarianDecodesItsInputs
from tests.models.common import SIZES, EncoderDecoderTests
from transformers import MarianConfig, MarianModel, MarianMTModel


class MarianTest(EncoderDecoderTests, unittest.TestCase):
    """Marian of Heed's sizes, for comparison."""

    all_model_classes = (MarianModel, MarianMTModel)
    config_class = MarianConfig
    settings = {**SIZES, "dropout": 0.0, "forced_eos_token_id": None}
    decodes_its_inputs = MarianDecodesItsInputs
    continues_a_target = MarianContinuesATarget
