"""Word dropout and LayerDrop do what their papers say, and nothing at all outside of training."""

import pytest
import torch

from helpers import tiny_config, tiny_model

SOURCE, LABELS = torch.tensor([[5, 6, 7, 8], [9, 10, 4, 0]]), torch.tensor([[11, 12, 5, 2], [6, 7, 2, -100]])
BATCH = {"input_ids": SOURCE, "attention_mask": (SOURCE != 0).long(), "labels": LABELS}
FAMILIES = ("transformer", "recurrent")


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
@pytest.mark.parametrize("name", ["source_word_dropout", "target_word_dropout"])
def test_word_dropout_reaches_the_loss_of_training_alone(family, name):
    model = tiny_model(family=family, dropout=0.0, label_smoothing=0.0)
    plain = model.eval()(**BATCH).loss
    setattr(model.config, name, 0.5)
    assert torch.equal(model(**BATCH).loss, plain)
    torch.manual_seed(2)
    assert not torch.equal(model.train()(**BATCH).loss, plain)


class Draws:
    """Stands in for `torch.rand`, and says for each layer whether it is dropped."""

    def __init__(self, *dropped: bool):
        self.values = iter([0.0 if each else 0.9 for each in dropped])

    def __call__(self, *_, **options):
        return torch.tensor(next(self.values))


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("way", ["plain", "without logits", "checkpointed", "bf16"])
def test_a_dropped_layer_is_as_if_it_were_not_there_and_has_gradients_of_zero(monkeypatch, norm_placement, way):
    options = {"encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, "norm_placement": norm_placement}
    model = tiny_model(**options, encoder_layerdrop=0.2, decoder_layerdrop=0.4).train()
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    monkeypatch.setattr(torch, "rand", Draws(False, True, True, False))
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
        loss = model(**BATCH, skip_logits=way == "without logits").loss
    loss.backward()
    model.gradient_checkpointing_disable()
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    is_zero = [all(not weight.grad.any() for weight in layer.parameters()) for layer in layers]
    assert is_zero == [False, True, True, False]
    del model.model.encoder.layers[1], model.model.decoder.layers[0]
    model.config.encoder_layerdrop = model.config.decoder_layerdrop = 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
        wanted = model(**BATCH).loss
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_layers_are_dropped_as_often_as_asked_and_never_outside_of_training():
    stack = tiny_model(encoder_layerdrop=0.3).model.encoder.train()
    before, after = torch.zeros(()), torch.ones(())
    torch.manual_seed(1)
    kept = sum(stack.drop_layer(before, after).item() for _ in range(2000)) / 2000
    assert 0.66 < kept < 0.74
    stack.eval()
    state = torch.get_rng_state()
    assert stack.drop_layer(before, after) is after
    assert torch.equal(torch.get_rng_state(), state)


def test_values_out_of_range_and_misspelt_names_are_refused():
    for family in FAMILIES:
        for name in ("source_word_dropout", "target_word_dropout"):
            with pytest.raises(ValueError, match=f"`{name}` must be at least 0 and below 1, but is 1.0"):
                tiny_config(family, **{name: 1.0})
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 0 and below 1, but is -0.1"):
            tiny_config(**{name: -0.1})
    with pytest.raises(ValueError, match="did you mean `encoder_layerdrop`"):
        tiny_config(encoder_layer_drop=0.1)
