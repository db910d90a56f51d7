"""A pytest plugin: a tiny Heed model that has learned a few pairs by heart, so its translations end and differ."""

import pytest
import torch

from heedful.data.tokenization import TokenizerPair
from heedful.data.tokenizer_training import train_tokenizers
from heedful.modeling_heed import HeedForConditionalGeneration
from memorised import memorised_model, saved_in

PAIRS = {
    "고양이가 잔다.": "The cat sleeps.",
    "개가 공원에서 달린다.": "The dog runs in the park.",
    "나는 사과를 먹는다.": "I eat an apple.",
    "그녀는 책을 읽는다.": "She reads a book.",
    "네.": "Yes.",
    "우리는 내일 학교에 가지 않는다.": "We do not go to school tomorrow.",
    "café à Paris": "a café in Paris",
    "비가 온다.": "It rains.",
}


@pytest.fixture(scope="session")
def tokenizers() -> TokenizerPair:
    return train_tokenizers(list(PAIRS), list(PAIRS.values()), vocab_size=290)


@pytest.fixture(scope="session")
def model(tokenizers) -> HeedForConditionalGeneration:
    return memorised_model(tokenizers, PAIRS, norm_placement="pre")


@pytest.fixture
def training_model(model, monkeypatch):
    """The same model in training mode, with dropout strong enough to be seen."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            monkeypatch.setattr(module, "p", 0.5)
    yield model.train()
    model.eval()


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn; nothing is written."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr("heedful.attention.drawing._save", lambda figure, path: found.append(figure) or path)
    return found


@pytest.fixture
def pairs() -> dict[str, str]:
    return PAIRS


@pytest.fixture(scope="module")
def folder(model, tokenizers, tmp_path_factory):
    return saved_in(tmp_path_factory.mktemp("model"), model, tokenizers)
