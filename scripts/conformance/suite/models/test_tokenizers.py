"""Heed's tokenizer and a plain one under transformers' tests of their class."""

import tempfile
import unittest

from tests.test_tokenizers_backend_mixin import TokenizersBackendTesterMixin
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from heedful.data.tokenizer_training import train_tokenizers

TEXTS = ["Wonderful no inspiration example with subtoken", "This is the first sentence, number 12 3."]


class TrainedTokenizer(TokenizersBackendTesterMixin):
    """Saves a tokenizer in the mixin's folder."""

    tokenizer_class = rust_tokenizer_class = PreTrainedTokenizerFast

    @classmethod
    def setUpClass(cls):
        """Train and save."""
        cls.folder = tempfile.TemporaryDirectory()
        cls.train().save_pretrained(cls.folder.name)
        cls.from_pretrained_id = cls.folder.name
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        """Remove the folders."""
        super().tearDownClass()
        cls.folder.cleanup()


class HeedTokenizerTest(TrainedTokenizer, unittest.TestCase):
    """Heed's byte-level tokenizer."""

    @staticmethod
    def train() -> PreTrainedTokenizerFast:
        """Return the tokenizer of source and target."""
        return train_tokenizers(TEXTS, TEXTS, vocab_size=300).source


class PlainTokenizerTest(TrainedTokenizer, unittest.TestCase):
    """The tokenizers library's byte-level tokenizer in transformers' class, for comparison."""

    @staticmethod
    def train() -> PreTrainedTokenizerFast:
        """Return a plain tokenizer."""
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<s>", "</s>"])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
        )
