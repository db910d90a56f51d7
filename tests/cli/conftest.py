"""One folder of a model for both files of mistakes and malice."""

import pytest

from heedful.data.tokenizer_training import train_tokenizers
from helpers import ending_model
from memorised import PAIRS


@pytest.fixture(scope="session")
def tokenizers():
    return train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=272)


@pytest.fixture(scope="session")
def whole(tokenizers, tmp_path_factory):
    """A folder with nothing wrong in it; nobody may change it."""
    folder = tmp_path_factory.mktemp("whole")
    for each in (ending_model(vocab_size=272), tokenizers):
        each.save_pretrained(folder)
    card = "---\nlicense: mit\nlanguage: [ko, en]\nlibrary_name: transformers\n---\n"
    (folder / "README.md").write_text(card)
    return folder
