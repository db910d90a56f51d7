"""The config: the paper's defaults and its checks."""

import copy

import pytest
from huggingface_hub.errors import StrictDataclassError

from heedful import HeedConfig
from helpers import FAMILIES, assert_refused, tiny_config


def test_the_defaults_are_the_base_model_of_the_paper():
    paper = {
        **{"encoder_layers": 6, "decoder_layers": 6, "d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048},
        **{"encoder_attention_heads": 8, "decoder_attention_heads": 8, "d_k": None, "d_v": None},
        **{"encoder_key_value_heads": None, "decoder_key_value_heads": None, "attention_scoring": "scaled_dot"},
        **{"activation_function": "relu", "attention_bias": False, "feed_forward_bias": True},
        **{"encoder_neighbourhood": None, "decoder_neighbourhood": None, "position_encoding": "sinusoidal"},
        **{"sinusoid_layout": "interleaved", "scale_embedding": True, "norm_placement": "post"},
        **{"norm_type": "layernorm", "dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0},
        **{"position_offset": 0, "embedding_norm": False, "output_bias": False},
        **{"label_smoothing": 0.1, "vocab_size": 37_000, "decoder_vocab_size": 37_000},
        **{"tie_word_embeddings": True, "share_encoder_decoder_embeddings": True, "tie_output_embeddings": True},
    }
    config = HeedConfig()
    assert {name: getattr(config, name) for name in paper} == paper


OF_EACH_STACK = ("layers", "attention_heads", "ffn_dim", "neighbourhood")
WRONG = [
    *[({f"{stack}_{name}": 0}, f"{stack}_{name}") for stack in ("encoder", "decoder") for name in OF_EACH_STACK],
    *[({name: 0}, name) for name in ("vocab_size", "d_model", "d_k", "d_v", "max_position_embeddings")],
    *[({name: -1}, name) for name in ("encoder_key_value_heads", "decoder_key_value_heads", "decoder_vocab_size")],
    *[({name: 1.0}, name) for name in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing")],
    ({"dropout": -0.1}, "dropout"),
    ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
    ({"d_model": 33, "d_k": 8, "d_v": 8}, "d_model"),
    ({"sinusoid_layout": "tensor2tensor", "d_model": 2, "d_k": 2, "d_v": 2}, "d_model.*at least 4.*is 2"),
    ({"position_offset": -1}, "position_offset.*at least 0"),
    ({"position_offset": 2, "position_encoding": "learned"}, "position_offset.*sinusoidal, but is 2 with learned"),
    ({"activation_function": "rellu"}, "activation_function.*relu"),
    ({"encoder_attention_heads": 5}, "d_model.*encoder_attention_heads.*32 and 5"),
    ({"decoder_attention_heads": 5, "d_k": 8}, "d_model.*decoder_attention_heads.*d_v"),
    ({"encoder_key_value_heads": 3}, "encoder_attention_heads.*encoder_key_value_heads.*4 and 3"),
    ({"decoder_key_value_heads": 8}, "decoder_attention_heads.*decoder_key_value_heads"),
    ({"position_encoding": "rotary", "d_k": 7}, "d_k"),
    ({"relative_attention_max_distance": 8}, "relative_attention_max_distance.* 1 with shaw .* is 8 with sinusoidal"),
    ({"position_encoding": "shaw", "relative_attention_max_distance": 0}, "relative_attention_max_distance.* is 0"),
    ({"position_encoding": "t5", "relative_attention_max_distance": 16}, "relative_.* is 16 with t5"),
    ({"position_encoding": "shaw", "attention_scoring": "additive"}, "attention_scoring.*with shaw"),
    ({"share_layers": True, "depth_scaled_init": True}, "depth_scaled_init.*share_layers"),
    ({"decoder_vocab_size": 98}, "share_encoder_decoder_embeddings.*98 and 99"),
    ({"pad_token_id": 99}, "pad_token_id.*below 99, but is 99"),
    ({"bos_token_id": -1}, "bos_token_id"),
    ({"eos_token_id": [2, 99]}, "eos_token_id"),
    ({"decoder_start_token_id": 99}, "decoder_start_token_id"),
    ({"decoder_start_token_id": 71, "decoder_vocab_size": 71, "tie_word_embeddings": False}, "decoder_start_token_id"),
    ({"pad_token_id": 71, "decoder_vocab_size": 71, "tie_word_embeddings": False}, "pad_token_id"),
]

WRONG_TYPES = {"d_model": "512", "dropout": "0.1", "attention_bias": 1, "attention_scoring": "cosine"}
WRONG_TYPES |= {"position_encoding": "relative", "sinusoid_layout": "halves"}
WRONG_TYPES |= {"norm_placement": "sandwich", "norm_type": "batchnorm"}
# Fields of other models are not taken for misspelt ones.
MISSPELT = {"droput": "dropout", "decoder_neighborhood": "decoder_neighbourhood"}
MISSPELT |= {"share_embeddings": "share_encoder_decoder_embeddings", "static_position_embeddings": "position_encoding"}


def test_a_wrong_value_type_or_name_is_refused_with_the_name_of_its_field():
    misspelt = [({key: 1}, f"`{key}` is not a field of HeedConfig.*`{field}`") for key, field in MISSPELT.items()]
    wrong = [(changes, f"`{message}") for changes, message in WRONG]
    assert_refused(wrong + misspelt, lambda changes: tiny_config(**changes))
    types = [({field: value}, f"'{field}'") for field, value in WRONG_TYPES.items()]
    assert_refused(types, lambda changes: tiny_config(**changes), StrictDataclassError)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vocabulary_that_is_assigned_is_both_sides_where_they_are_one_also_when_it_was_saved(family, tmp_path):
    for changes, is_one in (
        ({}, True),
        ({"tie_word_embeddings": False}, True),
        ({"share_encoder_decoder_embeddings": False}, False),
        ({"tie_word_embeddings": False, "decoder_vocab_size": 71}, False),
    ):
        config = tiny_config(family, eos_token_id=[2, 5], dropout=0.25, **changes)
        config.save_pretrained(tmp_path)
        loaded = type(config).from_pretrained(tmp_path)
        assert loaded.to_dict() == config.to_dict()
        for found in (config, loaded, copy.deepcopy(config)):
            assert found.has_one_vocabulary == is_one
            target = found.decoder_vocab_size
            found.vocab_size = 120
            assert found.decoder_vocab_size == (120 if is_one else target)


def test_a_field_by_its_other_name_is_understood_and_checked_as_well_and_those_of_other_libraries_are_kept(tmp_path):
    others = {"quantization_config": {"bits": 8}, "torch_dtype": "float32", "_commit_hash": "x", "num_beams": None}
    for family in FAMILIES:
        assert tiny_config(family, tie_encoder_decoder=False).tie_encoder_decoder is False
    config = tiny_config(layer_norm_epsilon=0.5, **others)
    assert (config.layer_norm_eps, config.quantization_config) == (0.5, {"bits": 8})
    config.layer_norm_epsilon = 0.25
    assert config.layer_norm_eps == 0.25
    assert "layer_norm_epsilon" not in config.to_dict()
    assert HeedConfig(hidden_size=256).d_model == HeedConfig(hidden_size=256, d_model=256).d_model == 256
    cases = [
        ({"num_hidden_layers": 0}, "`encoder_layers` must be at least 1, but is 0"),
        ({"d_model": 128, "hidden_size": 256}, "`hidden_size` must be left out if `d_model`"),
    ]
    assert_refused(cases, lambda changes: HeedConfig(**changes), (ValueError, StrictDataclassError))
    config.decoder_attention_heads = 5
    cases = [(tmp_path, "decoder_attention_heads")]  # what was assigned is checked before it is saved
    assert_refused(cases, config.save_pretrained, (ValueError, StrictDataclassError))


def test_the_names_of_other_models_set_both_stacks_or_the_one_that_they_name():
    sizes = {"num_heads": 4, "d_ff": 256, "num_layers": 2, "d_kv": 16, "dropout_rate": 0.2}
    config = HeedConfig(**sizes, num_decoder_layers=1)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (4, 4)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim, config.d_k, config.d_v) == (256, 256, 16, 16)
    assert (config.encoder_layers, config.decoder_layers, config.dropout) == (2, 1, 0.2)
    config = HeedConfig(num_attention_heads=4, num_hidden_layers=3, decoder_layers=2)
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (4, 4)
    assert (config.encoder_layers, config.decoder_layers) == (3, 2)
    config.num_heads = 2
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 2)
    assert HeedConfig(**config.to_dict()).to_dict() == config.to_dict()
    cases = [({"num_heds": 3}, "did you mean `num_heads`"), ({"feed_forward_proj": "relu"}, "`activation_function`")]
    cases += [({"dropout_rate": 0.3, "dropout": 0.2}, "`dropout_rate` must be left out if `dropout`")]
    assert_refused(cases, lambda options: HeedConfig(**options))
