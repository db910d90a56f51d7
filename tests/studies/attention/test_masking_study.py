"""The study of masking: both ways to hide later positions, a decoder that sees all, and one pass against many."""

import pytest
import torch

from heedful.inference.attention.recording import record_attention
from heedful.studies.attention import masking
from helpers import tiny_model

SOURCE, TARGET, OTHER_TOKEN = [12, 40, 7, 33, 21, 2], [50, 8, 19, 64, 31, 11, 2], 77


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    torch.manual_seed(0)
    model = tiny_model(decoder_layers=2).eval()
    model.set_attn_implementation(request.param)
    return model


def logits(model, target):
    with torch.no_grad():
        return model(input_ids=torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([target])).logits[0]


def test_minus_infinity_before_the_softmax_keeps_the_sum_and_zeros_after_it_do_not():
    scores = torch.tensor(masking.SCORES)
    hidden, zeroed = (weigh(scores) for weigh in masking.WAYS.values())
    torch.testing.assert_close(hidden.sum(-1), torch.ones(3))
    assert (zeroed.sum(-1)[:2] < 0.8).all()
    assert zeroed.sum(-1)[2] == pytest.approx(1)  # the last row hides nothing
    assert hidden.triu(1).abs().max() == zeroed.triu(1).abs().max() == 0
    torch.testing.assert_close(hidden, zeroed / zeroed.sum(-1, keepdim=True))


def test_the_scores_masked_by_minus_infinity_give_the_models_own_weights(model):
    fed = [model.config.decoder_start_token_id, *TARGET[:-1]]
    own = torch.stack(record_attention(model, SOURCE, fed, ["decoder"])["decoder"])
    found = masking.scores_of(model, SOURCE, fed)
    torch.testing.assert_close(masking.WAYS["−∞ before"](found), own, atol=1e-6, rtol=1e-5)
    sums = masking.WAYS["0 after"](found).sum(-1)
    assert sums.max() < 1 + 1e-5
    assert sums[..., :-1].mean() < 0.9


def test_without_the_mask_a_prediction_depends_on_later_tokens_and_only_meanwhile(model):
    changed = [*TARGET[:-1], OTHER_TOKEN]
    before = logits(model, TARGET)
    torch.testing.assert_close(logits(model, changed)[:-1], before[:-1])
    with masking.seeing_all():
        seen = logits(model, TARGET)
        assert (logits(model, changed)[:-1] - seen[:-1]).abs().amax(-1).min() > 1e-4
    torch.testing.assert_close(logits(model, TARGET), before)


def test_without_the_causal_mask_padding_is_still_hidden(model):
    pad = torch.tensor([[*TARGET, 0, 0]])
    mask = torch.tensor([[1] * len(TARGET) + [0, 0]])
    with torch.no_grad(), masking.seeing_all():
        padded = model(
            input_ids=torch.tensor([SOURCE]), decoder_input_ids=pad, decoder_attention_mask=mask, use_cache=False
        ).logits[0]
        torch.testing.assert_close(padded[: len(TARGET)], logits(model, TARGET), atol=1e-5, rtol=1e-5)


def test_one_pass_gives_the_loss_and_gradient_of_one_by_one_with_the_mask_alone(model):
    gradients = []
    for is_one_pass in (True, False):
        model.zero_grad()
        loss = masking.next_token_loss(model, SOURCE, TARGET, is_one_pass)
        loss.backward()
        gradients.append((loss.detach(), torch.cat([one.grad.flatten() for one in model.parameters()])))
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    with torch.no_grad(), masking.seeing_all():
        once, by_one = (masking.next_token_loss(model, SOURCE, TARGET, way).item() for way in (True, False))
    assert once != pytest.approx(by_one, abs=1e-4)
