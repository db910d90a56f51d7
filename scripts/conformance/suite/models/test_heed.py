"""Heed under transformers' common tests."""

import unittest

from tests.models.adapters import HeedContinuesATarget, HeedDecodesItsInputs
from tests.models.common import SIZES, EncoderDecoderTests

from heedful import HeedConfig, HeedForConditionalGeneration, HeedModel


class HeedTest(EncoderDecoderTests, unittest.TestCase):
    """The paper's layout without label smoothing, which would keep the training test's loss above zero."""

    all_model_classes = (HeedModel, HeedForConditionalGeneration)
    config_class = HeedConfig
    settings = {**SIZES, "label_smoothing": 0.0, "dropout": 0.0}
    decodes_its_inputs = HeedDecodesItsInputs
    continues_a_target = HeedContinuesATarget
