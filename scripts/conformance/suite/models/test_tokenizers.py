"""The tokenizer that Heed trains under transformers' tests of the class that it is of, and a yardstick."""

import tempfile
import unittest

from tests.test_tokenizers_backend_mixin import TokenizersBackendTesterMixin
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from heedful.data.tokenizer_training import train_tokenizers

TEXTS = ["Wonderful no inspiration example with subtoken", "This is the first sentence, number 12 3."]


class TrainedTokenizer(TokenizersBackendTesterMixin):
    """Saves a tokenizer where the mixin looks for it."""

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
        """Return the source's tokenizer, which is the target's too."""
        return train_tokenizers(TEXTS, TEXTS, vocab_size=300).source


class PlainTokenizerTest(TrainedTokenizer, unittest.TestCase):
    """The yardstick: the tokenizers library's own byte-level tokenizer in transformers' own class."""

    @staticmethod
    def train() -> PreTrainedTokenizerFast:
        """Return a tokenizer that is as the libraries make it."""
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<s>", "</s>"])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
        )
