"""The rows of Table 3 as config files, and the training of sections 5 and 6.1 as recipes."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.training.recipe_file import read_recipe

CONFIGURATION = Path(__file__).parents[2] / "configuration"
MODELS = CONFIGURATION / "models"
RECIPES = CONFIGURATION / "recipes"
# The columns of Table 3, as in its first line: N, d_model, d_ff, h, d_k, d_v, P_drop, ε_ls.
BASE = (6, 512, 2048, 8, 64, 64, 0.1, 0.1)
# The line of Table 3, the number of parameters that it gives in millions, and the exact one with 37,000 tokens.
ROWS = {
    "paper-base": (BASE, 65, 63_045_632),
    "paper-A-h1": ((6, 512, 2048, 1, 512, 512, 0.1, 0.1), None, 63_045_632),
    "paper-A-h4": ((6, 512, 2048, 4, 128, 128, 0.1, 0.1), None, 63_045_632),
    "paper-A-h16": ((6, 512, 2048, 16, 32, 32, 0.1, 0.1), None, 63_045_632),
    "paper-A-h32": ((6, 512, 2048, 32, 16, 16, 0.1, 0.1), None, 63_045_632),
    "paper-B-dk16": ((6, 512, 2048, 8, 16, 64, 0.1, 0.1), 58, 55_967_744),
    "paper-B-dk32": ((6, 512, 2048, 8, 32, 64, 0.1, 0.1), 60, 58_327_040),
    "paper-C-N2": ((2, 512, 2048, 8, 64, 64, 0.1, 0.1), 36, 33_644_544),
    "paper-C-N4": ((4, 512, 2048, 8, 64, 64, 0.1, 0.1), 50, 48_345_088),
    "paper-C-N8": ((8, 512, 2048, 8, 64, 64, 0.1, 0.1), 80, 77_746_176),
    "paper-C-d256": ((6, 256, 2048, 8, 32, 32, 0.1, 0.1), 28, 26_816_512),
    "paper-C-d1024": ((6, 1024, 2048, 8, 128, 128, 0.1, 0.1), 168, 163_815_424),
    "paper-C-ff1024": ((6, 512, 1024, 8, 64, 64, 0.1, 0.1), 53, 50_450_432),
    "paper-C-ff4096": ((6, 512, 4096, 8, 64, 64, 0.1, 0.1), 90, 88_236_032),
    "paper-D-dropout0.0": ((6, 512, 2048, 8, 64, 64, 0.0, 0.1), None, 63_045_632),
    "paper-D-dropout0.2": ((6, 512, 2048, 8, 64, 64, 0.2, 0.1), None, 63_045_632),
    "paper-D-smoothing0.0": ((6, 512, 2048, 8, 64, 64, 0.1, 0.0), None, 63_045_632),
    "paper-D-smoothing0.2": ((6, 512, 2048, 8, 64, 64, 0.1, 0.2), None, 63_045_632),
    "paper-E-learned": (BASE, None, 63_569_920),
    "paper-big": ((6, 1024, 4096, 16, 64, 64, 0.3, 0.1), 213, 214_171_648),
}
PUBLISHED = {name: published for name, (_, published, _) in ROWS.items() if published is not None}
# The rows whose figures one vocabulary gives to the digit, and those vocabularies. No vocabulary gives big's too.
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 41_004, 41_208
BIGS_VOCABULARIES = (35_368, 36_344)
DECODING = {"num_beams": 4, "length_penalty": 0.6, "length_penalty_form": "gnmt", "tokens_beyond_source": 50}


def config_of(name: str, **changes) -> HeedConfig:
    return AutoConfig.from_pretrained(MODELS / name, **changes)


def count(name: str, **changes) -> int:
    with torch.device("meta"):
        return HeedForConditionalGeneration(config_of(name, **changes)).num_parameters()


def count_with(name: str, vocab_size: int) -> int:
    """Count a row with another vocabulary: one matrix is all that depends on it."""
    return ROWS[name][2] + (vocab_size - 37_000) * ROWS[name][0][1]


def test_every_preset_is_a_row_of_table_3_in_both_stacks_and_says_what_differs_from_the_base_model_alone():
    assert {path.name for path in MODELS.glob("paper-*")} == set(ROWS)
    for name in ROWS:
        config = config_of(name)
        for stack in ("encoder", "decoder"):
            heads = getattr(config, f"{stack}_attention_heads")
            row = (
                *(getattr(config, f"{stack}_layers"), config.d_model, getattr(config, f"{stack}_ffn_dim"), heads),
                *(config.d_k or config.d_model // heads, config.d_v or config.d_model // heads),
                *(config.dropout, config.label_smoothing),
            )
            assert row == ROWS[name][0], name
        assert config.position_encoding == ("learned" if name == "paper-E-learned" else "sinusoidal")
        said = json.loads((MODELS / name / "config.json").read_text())
        assert said.pop("model_type") == "heed"
        # Beside d_k stands d_v, which without it would follow the number of heads all the same.
        assert not [field for field, value in said.items() if getattr(HeedConfig(), field) == value], name


def test_base_and_big_are_the_same_models_under_their_short_names():
    for named in ("base", "big"):
        ours, theirs = (config_of(name).to_dict() for name in (f"paper-{named}", named))
        unlike = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        assert unlike <= {"transformers_version", "_name_or_path"}  # nothing about the model


def parameters_of_the_paper(layers, d_model, d_ff, heads, d_k, d_v) -> int:
    """Count what sections 3.1 to 3.4 describe: one embedding matrix, projections without and networks with bias."""
    attention = 2 * d_model * heads * d_k + 2 * d_model * heads * d_v
    network, norm = 2 * d_model * d_ff + d_ff + d_model, 2 * d_model
    return 37_000 * d_model + layers * (3 * attention + 2 * network + 5 * norm)


def test_a_preset_has_exactly_so_many_parameters():
    for name, (row, _, exact) in ROWS.items():
        assert config_of(name).vocab_size == 37_000
        learned = 2 * config_of(name).max_position_embeddings * row[1] if name == "paper-E-learned" else 0
        assert count(name) == exact == parameters_of_the_paper(*row[:6]) + learned, name
    for name in ("paper-base", "paper-C-d256", "paper-B-dk16", "paper-big"):
        assert count(name, vocab_size=41_100, decoder_vocab_size=41_100) == count_with(name, 41_100)
    # No bias that the paper might have had explains the difference to what it publishes.
    assert 0 < count("paper-base", attention_bias=True, output_bias=True) - ROWS["paper-base"][2] < 0.1e6


def test_one_vocabulary_gives_every_published_number_but_bigs_to_the_digit_and_differences_agree_with_any():
    for name, published in PUBLISHED.items():
        (_, width, *_), _, exact = ROWS[name]
        # Both published numbers are rounded to a million, so their difference is exact to one.
        ours = (exact - ROWS["paper-base"][2]) / 1e6
        assert width != 512 or abs(ours - (published - PUBLISHED["paper-base"])) < 1, name
    for vocab_size in range(30_000, 50_000):
        fits = {name: round(count_with(name, vocab_size) / 1e6) == number for name, number in PUBLISHED.items()}
        assert fits.pop("paper-big") == (BIGS_VOCABULARIES[0] <= vocab_size <= BIGS_VOCABULARIES[1])
        assert all(fits.values()) == (SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY), vocab_size


def recipe_of(size: str, overrides: list[str] | None = None):
    return read_recipe(RECIPES / f"paper-{size}.yaml", overrides)


@pytest.mark.parametrize(("size", "updates", "kept", "seconds"), [("base", 100_000, 5, 0.4), ("big", 300_000, 20, 1)])
def test_a_recipe_says_what_sections_5_and_6_1_say(size, updates, kept, seconds):
    said = {
        "model": {"config": f"paper-{size}", "options": {}},
        "optimization": {
            **{"optimizer": "adam", "weight_decay": 0.0, "max_grad_norm": None, "beta1": 0.9, "beta2": 0.98},
            **{"epsilon": 1e-9, "schedule": "paper", "learning_rate": 1.0, "warmup_updates": 4000},
            **{"max_updates": updates, "tokens_per_update": 50_000, "max_epochs": None, "max_minutes": None},
        },
        "tokenizer": {"algorithm": "bpe", "vocab_size": 37_000, "joint": True},
        # Ten minutes apart at the paper's speed.
        "checkpoints": {"publish": "average", "keep_last": kept, "every_updates": 600 / seconds},
        "decoding": DECODING,
    }
    recipe = recipe_of(size)
    for section, fields in said.items():
        assert {name: getattr(getattr(recipe, section), name) for name in fields} == fields
    assert recipe.decoding.max_length > recipe.data.max_source_tokens + 50
    base, other = (asdict(each) for each in (recipe_of("base"), recipe))
    sections = [section for section, keys in base.items() if isinstance(keys, dict)]
    unlike = {f"{name}.{key}" for name in sections for key in base[name] if base[name][key] != other[name][key]}
    apart = {"model.config", "optimization.max_updates", "checkpoints.every_updates", "checkpoints.keep_last"}
    assert unlike == (apart if size == "big" else set())  # what the paper tells apart
