"""Word dropout does what its papers say, and nothing outside of training; layer dropout is gone."""

import pytest
import torch

from heedful.training.model_of_recipe import check_model
from helpers import FAMILIES, assert_refused, tiny_config, tiny_model
from tiny_runs import tiny_recipe

SOURCE, LABELS = torch.tensor([[5, 6, 7, 8], [9, 10, 4, 0]]), torch.tensor([[11, 12, 5, 2], [6, 7, 2, -100]])
BATCH = {"input_ids": SOURCE, "attention_mask": (SOURCE != 0).long(), "labels": LABELS}
WORD_DROPOUT = ("source_word_dropout", "target_word_dropout")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["source", "target"])
def test_word_dropout_drops_whole_embeddings_and_scales_the_others(family, side):
    model = tiny_model(family=family, dropout=0.0, **{f"{side}_word_dropout": 0.25}).train()
    ids = torch.full((40, 50), 7)
    stacks = {"source": model.model.encoder, "target": model.model.decoder}
    for name, stack in stacks.items():
        embeddings, given = stack.embed_tokens(ids), stack.look_up(ids, None)
        if name != side:
            assert torch.equal(given, embeddings)
            continue
        kept = given.abs().sum(-1) > 0  # (40, 50)
        assert 0.68 < kept.float().mean() < 0.82
        assert torch.allclose(given, kept[..., None] * embeddings / 0.75)
        assert stack.look_up(None, embeddings).eq(0).all(-1).any()
    model.eval()
    assert all(torch.equal(stack.look_up(ids, None), stack.embed_tokens(ids)) for stack in stacks.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", WORD_DROPOUT)
def test_word_dropout_reaches_the_loss_of_training_alone(family, name):
    model = tiny_model(family=family, dropout=0.0, label_smoothing=0.0)
    plain = model.eval()(**BATCH).loss
    setattr(model.config, name, 0.5)
    assert torch.equal(model(**BATCH).loss, plain)
    torch.manual_seed(2)
    assert not torch.equal(model.train()(**BATCH).loss, plain)


def test_configs_of_removed_layer_dropout_load_and_say_once_that_it_does_nothing(caplog):
    for value in (0.0, 0.1):
        for family in FAMILIES:
            given = tiny_config(family).to_dict()
            assert tiny_config(family, encoder_layerdrop=0, decoder_layerdrop=value).to_dict() == given
        assert [each.message for each in caplog.records] == [
            "`encoder_layerdrop` and `decoder_layerdrop` were removed: no layer is dropped."
        ] * (value > 0)


def test_recipes_that_ask_for_layer_dropout_and_words_of_which_all_are_dropped_are_refused_by_name(tmp_path):
    check_model(tiny_recipe(tmp_path, {"model.options.encoder_layerdrop": 0}), None)
    with pytest.raises(ValueError, match=r"`model.options.decoder_layerdrop` must be left out, for it was removed"):
        check_model(tiny_recipe(tmp_path, {"model.options.decoder_layerdrop": 0.1}), None)
    cases = [(name, f"`{name}` must be at least 0 and below 1, but is 1.0") for name in WORD_DROPOUT]
    for family in FAMILIES:
        assert_refused(cases, lambda name, family=family: tiny_config(family, **{name: 1.0}))
