"""The guide to decoding says what the package does."""

import pytest
import torch
from transformers.utils import logging as transformers_logging

from guides import python_of, text_of
from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.tokenizer_training import train_tokenizers
from heedful_lab.korean_english.pairs import korean_english_pairs
from memorised import saved_in

GUIDE = text_of("decoding")
BLOCKS = python_of(GUIDE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders like the ones that two runs leave, untrained."""
    pairs = list(korean_english_pairs("train", 300))
    tokenizers = train_tokenizers([p["ko"] for p in pairs], [p["en"] for p in pairs], vocab_size=400)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 80}
    found = {}
    for seed, name in enumerate(("runs/quickstart/model", "runs/other/model")):
        torch.manual_seed(seed)
        model = HeedForConditionalGeneration(HeedConfig(vocab_size=400, **sizes))
        model.generation_config.max_length = 60
        found[name] = saved_in(tmp_path_factory.mktemp("run"), model, tokenizers)
    return found


def test_the_python_of_the_guide_runs_and_keeps_its_promises(folders, capsys):
    transformers_logging.disable_progress_bar()
    names = {}
    assert len(BLOCKS) >= 8
    for block in BLOCKS:
        for name, folder in folders.items():
            block = block.replace(name, str(folder))
        exec(block, names)
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 10
    tokenizer, translate = names["tokenizer"], names["translate"]
    for text in translate(names["forced"], num_beams=4, max_new_tokens=16):
        assert " woman" in text or " lady" in text
    assert " woman" in translate(names["own"], num_beams=4, max_new_tokens=16)[0]
    assert names["prepared"].kernel in printed
    woman = names["woman"]
    assert tokenizer.decode(woman) == " woman"
    for row in names["found"].sequences.tolist():
        assert any(row[start : start + len(woman)] == woman for start in range(len(row)))
