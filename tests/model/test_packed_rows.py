"""A model whose rows lie end to end: the same loss and gradient as with padding."""

import random
from contextlib import nullcontext

import pytest
import torch

from heedful import HeedForConditionalGeneration
from heedful.data.epochs.micro_batches import collate, laid_end_to_end
from heedful.packed_rows_heed import UNRESTRICTED, why_padded
from heedful.training.loop.feed import on_device
from heedful.training.updates.objective import Objective
from helpers import loss_and_gradients, tiny_config
from rows_attention import varlen_attn

ASKED = {"num_items_in_batch": 400, "logits_to_keep": torch.arange(0)}


def make_rows(count: int) -> list[dict[str, list[int]]]:
    draw = random.Random(count)

    def tokens(most):
        return [draw.randrange(3, 99) for _ in range(draw.randint(1, most))]

    return [{"input_ids": tokens(30), "labels": tokens(20)} for _ in range(count)]


def make_model(**options):
    torch.manual_seed(0)
    return HeedForConditionalGeneration._from_config(tiny_config(**options), attn_implementation="sdpa").train()


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
def test_loss_and_gradient_are_those_of_padded_rows_and_in_bfloat16_near_them(varlen, options):
    model = make_model(**options, label_smoothing=0.1)
    assert why_padded(model.config, "sdpa") is None
    for count, in_half, loss, gradient in ((1, False, 1e-6, 1e-5), (40, False, 1e-6, 1e-5), (40, True, 1e-2, 0.14)):
        rows = make_rows(count)
        batches = collate(rows, 0), laid_end_to_end(rows, 2000, 0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=in_half):
            padded, packed = (loss_and_gradients(model, batch, **ASKED) for batch in batches)
        assert packed[0].item() == pytest.approx(padded[0].item(), rel=loss)
        assert (packed - padded)[1:].norm() < gradient * padded[1:].norm()


def test_what_fills_up_changes_nothing(varlen):
    model, rows, found = make_model(), make_rows(10), []
    for pad in (0, 57):
        batch = laid_end_to_end(rows, 2000, pad, 1)
        batch["decoder_input_ids"] = batch["decoder_input_ids"].where(batch["labels"] != -100, torch.tensor(pad))
        found.append(loss_and_gradients(model, batch, **ASKED))
    assert torch.equal(*found)


def test_places_of_labels_that_are_known_change_nothing():
    model, batch = make_model(), collate(make_rows(10), 0)
    places = (batch["labels"].flatten() != -100).nonzero()[:, 0]
    every, same, one = (model.loss_of(batch | {"target_places": each}, 400) for each in (None, places, places[:1]))
    assert every == same
    assert one < every


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
        assert reason in why_padded(tiny_config(**options), "sdpa")
    assert "eager" in why_padded(tiny_config(), "eager")
    assert "recurrent" in why_padded(tiny_config("recurrent"), "sdpa")


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
    model.loss_of(batch, 9, objective).flatten()[0].backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_meta


def test_nothing_is_asked_for_that_torch_may_leave_to_cudnn(monkeypatch):
    windows = []

    def seen(*arguments, window_size, **settings):
        windows.append(window_size)
        return varlen_attn(*arguments, window_size=window_size, **settings)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", seen)
    batch = laid_end_to_end(make_rows(5), 512, 0, 1)
    loss_and_gradients(make_model(), batch, **ASKED)
    assert set(windows) == {(-1, 0), (UNRESTRICTED, UNRESTRICTED)}
    assert batch["packing"].source.longest < UNRESTRICTED
