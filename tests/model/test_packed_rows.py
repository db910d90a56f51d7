"""A model whose rows lie end to end: the same loss and gradient as with padding."""

import random
from contextlib import nullcontext

import pytest
import torch

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig
from heedful.data.micro_batches import collate
from heedful.packed_rows_heed import UNRESTRICTED, why_padded
from heedful.training.loop.feed import on_device
from heedful.training.objectives.objective import Objective
from heedful.training.speed.end_to_end import laid_end_to_end
from rows_attention import varlen_attn

IDS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "d_k": 8, "d_v": 8, "dropout": 0.0}


def make_rows(count: int) -> list[dict[str, list[int]]]:
    draw = random.Random(count)

    def tokens(most):
        return [draw.randrange(3, 100) for _ in range(draw.randint(1, most))]

    return [{"input_ids": tokens(30), "labels": tokens(20)} for _ in range(count)]


def make_model(**options):
    torch.manual_seed(0)
    model = HeedForConditionalGeneration(HeedConfig(**IDS, **SIZES, **options)).train()
    model.set_attn_implementation("sdpa")
    return model


def loss_and_gradient(model, batch, **settings):
    model.zero_grad()
    loss = model(**batch, **settings, num_items_in_batch=400, skip_logits=True).loss
    loss.backward()
    return loss.item(), torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.fixture
def varlen(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"position_encoding": "rotary"}, {"position_encoding": "none", "norm_placement": "pre"}),
        *({"share_layers": True}, {"attention_scoring": "dot"}),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_padded_rows(varlen, options):
    model = make_model(**options, label_smoothing=0.1)
    assert why_padded(model.config, "sdpa") is None
    for rows in (make_rows(1), make_rows(40)):
        loss, gradient = loss_and_gradient(model, collate(rows, 0))
        packed_loss, packed_gradient = loss_and_gradient(model, laid_end_to_end(rows, 2000, 0, 1))
        assert packed_loss == pytest.approx(loss, rel=1e-6)
        assert (packed_gradient - gradient).norm() < 1e-5 * gradient.norm()


def test_in_bfloat16_they_differ_by_its_rounding(varlen):
    model, rows = make_model(), make_rows(40)
    with torch.autocast("cpu", torch.bfloat16):
        found = [loss_and_gradient(model, batch) for batch in (collate(rows, 0), laid_end_to_end(rows, 2000, 0, 1))]
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    assert torch.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.99


def test_what_fills_up_changes_nothing(varlen):
    model, rows, found = make_model(), make_rows(10), []
    for pad in (0, 57):
        batch = laid_end_to_end(rows, 20_000, pad, 1)
        batch["decoder_input_ids"] = batch["decoder_input_ids"].where(batch["labels"] != -100, torch.tensor(pad))
        found.append(loss_and_gradient(model, batch))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_places_of_labels_that_are_known_change_nothing():
    model, batch = make_model(), collate(make_rows(10), 0)
    places = (batch["labels"].flatten() != -100).nonzero()[:, 0]
    (loss, gradient), (again, same) = (loss_and_gradient(model, batch, target_places=each) for each in (None, places))
    assert loss == again
    assert torch.equal(gradient, same)
    assert loss_and_gradient(model, batch, target_places=places[:1])[0] < loss


def test_what_flash_attention_cannot_compute_is_padded():
    for options, reason in (
        *(({"position_encoding": name}, name) for name in ("learned", "t5", "shaw")),
        ({"encoder_neighbourhood": 3}, "neighbourhood"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attention_scoring": "additive"}, "attn_implementation"),
        ({"decoder_key_value_heads": 2}, "share keys"),
        ({"d_v": 16}, "one width"),
        ({"d_k": 6, "d_v": 6}, "multiple of 8"),
    ):
        assert reason in why_padded(HeedConfig(**IDS, **SIZES | options), "sdpa")
    assert "eager" in why_padded(HeedConfig(**IDS, **SIZES), "eager")
    assert "recurrent" in why_padded(HeedRNNConfig(**IDS), "sdpa")


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("r_drop", [True, False])
def test_a_step_asks_the_device_for_no_number(varlen, monkeypatch, packs, r_drop):
    # A tensor without numbers raises an error where one is asked for, as a GPU would be waited for.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows of no such device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with torch.device("meta"):
        model = make_model()
    rows = make_rows(9) * (2 if r_drop else 1)
    batch = laid_end_to_end(rows, 2000, 0, 1) if packs else collate(rows, 0)
    batch["target_places"] = (batch["labels"].flatten() != -100).nonzero()[:, 0]
    batch = on_device(batch, torch.device("meta"))
    objective = Objective(3.0) if r_drop else None
    model(**batch, num_items_in_batch=9, skip_logits=True, objective=objective).loss.flatten()[0].backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_meta


def test_nothing_is_asked_for_that_torch_may_leave_to_cudnn(monkeypatch):
    windows = []

    def seen(*arguments, window_size, **settings):
        windows.append(window_size)
        return varlen_attn(*arguments, window_size=window_size, **settings)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", seen)
    batch = laid_end_to_end(make_rows(5), 512, 0, 1)
    loss_and_gradient(make_model(), batch)
    assert set(windows) == {(-1, 0), (UNRESTRICTED, UNRESTRICTED)}
    assert batch["packing"].source.longest < UNRESTRICTED
