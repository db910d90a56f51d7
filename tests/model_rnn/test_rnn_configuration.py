"""The config of a recurrent model: its defaults, its checks, and the presets."""

from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from heedful import HeedRNNConfig, HeedRNNForConditionalGeneration
from helpers import SUTSKEVER, assert_error, assert_refused, tiny_rnn_config

MODELS = Path(__file__).parents[2] / "configuration" / "models"
WRONG = [
    *[({name: 0}, f"`{name}` must be at least 1, but is 0") for name in ("vocab_size", "embedding_size")],
    *[({name: 0}, f"`{name}` must be at least 1, but is 0") for name in ("encoder_layers", "decoder_layers")],
    ({"hidden_size": -2}, "`hidden_size` must be at least 1, but is -2"),
    ({"decoder_vocab_size": 0, "tie_word_embeddings": False}, "`decoder_vocab_size` must be at least 1"),
    ({"dropout": 1}, "`dropout` must be at least 0 and below 1, but is 1"),
    ({"cell": "elman"}, "cell"),
    ({"cell": "rnn", "activation_function": "gelu"}, "activation_function"),
    ({"activation_function": "relu"}, "`activation_function` must be tanh with the cell gru"),
    *(({name: "tanh"}, name) for name in ("attention", "bridge")),
    ({"hidden_size": 15}, "`hidden_size` must be even with a bidirectional encoder.*but is 15"),
    ({"reverse_source": True}, "`reverse_source` must be False with a bidirectional encoder, but is True"),
    ({**SUTSKEVER, "bridge": "none"}, "`bridge` must be linear or copy without attention.*but is none"),
    ({"bridge": "copy", "decoder_layers": 3}, r"`bridge` must be linear or none with more decoder layers \(3\)"),
    ({"decoder_bidirectional": True}, "not a field of HeedRNNConfig; did you mean `bidirectional`"),
    ({"decoder_vocab_size": 98}, "share_encoder_decoder_embeddings.*98 and 99"),
    ({"pad_token_id": 99}, "`pad_token_id` must be at least 0 and below 99, but is 99"),
    ({"format_version": 2}, "`format_version` must be at most 1, but is 2"),
    ({"cel": "gru"}, "`cel` is not a field of HeedRNNConfig; did you mean `cell`"),
    ({"d_model": 18}, "`d_model` must be left out if `hidden_size`.* are 18 and 16"),
]


def test_what_cannot_be_built_is_an_error_that_names_the_field():
    assert_refused(WRONG, lambda changes: tiny_rnn_config(**changes), (ValueError, StrictDataclassError))


def test_a_field_by_its_other_name_and_an_assigned_one_are_checked_as_well(tmp_path):
    assert HeedRNNConfig(d_model=32, num_hidden_layers=2).hidden_size == 32
    assert HeedRNNConfig(d_model=32, hidden_size=32).hidden_size == 32
    config = tiny_rnn_config()
    config.hidden_size = 15
    error = (ValueError, StrictDataclassError)
    assert_refused([(tmp_path, "hidden_size")], config.save_pretrained, error)
    cases = [({"d_model": 15}, r"`hidden_size` must be even.*but is 15")]
    cases += [({"num_hidden_layers": 0}, "`encoder_layers` must be at least 1, but is 0")]
    assert_refused(cases, lambda changes: HeedRNNConfig(**changes), error)


def test_an_attention_function_is_refused():
    with torch.device("meta"):
        model = HeedRNNForConditionalGeneration(tiny_rnn_config())
    assert_error("`attn_implementation` must be eager for a recurrent model", model.set_attn_implementation, "sdpa")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        HeedRNNForConditionalGeneration._from_config(tiny_rnn_config(), attn_implementation="sdpa")


# What the papers say of themselves.
PRESETS = {
    "rnn-gru-additive": ({"cell": "gru", "attention": "additive", "bidirectional": True}, {620, 1000}),
    "rnn-lstm": ({"cell": "lstm", "attention": "none", "reverse_source": True, "bridge": "copy"}, {1000}),
    "rnn-lstm-general": ({"cell": "lstm", "attention": "general", "input_feeding": True}, {1000}),
}


def test_there_is_a_preset_for_each_of_the_three_papers_and_it_is_its_model():
    assert {path.name for path in MODELS.glob("rnn-*")} == set(PRESETS)
    for name, (fields, widths) in PRESETS.items():
        config = AutoConfig.from_pretrained(MODELS / name)
        assert type(config) is HeedRNNConfig
        assert {field: getattr(config, field) for field in fields} == fields
        assert {config.embedding_size, config.hidden_size} == widths
        assert config.encoder_layers == config.decoder_layers == (1 if name == "rnn-gru-additive" else 4)
