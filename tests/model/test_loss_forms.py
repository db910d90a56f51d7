"""The readable loss and the one that trains are one loss: whoever changes one of them alone is told here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.loss_heed import OutputLoss, smoothed_cross_entropy
from helpers import tiny_model


def run(loss, *leaves, upstream=3.0):
    """Return a loss and its gradients, scaled by what comes from above."""
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in leaves]
    total = loss(*leaves)
    (total * upstream).backward()
    return [total.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(2, 40)),  # tokens, width, vocabulary
    smoothing=st.sampled_from([0.0, 0.1, 0.5, 0.99]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_the_loss_that_trains_is_the_readable_one(sizes, smoothing, ignored, has_bias, seed, dtype):
    tokens, width, vocabulary = sizes
    torch.manual_seed(seed)
    states, weight = torch.randn(tokens, width, dtype=dtype), torch.randn(vocabulary, width, dtype=dtype)
    bias = torch.randn(vocabulary, dtype=dtype) if has_bias else None
    labels = torch.randint(vocabulary, (tokens,)).masked_fill(torch.rand(tokens) < ignored, -100)

    def readable(states, weight, bias):
        return smoothed_cross_entropy(torch.nn.functional.linear(states, weight, bias), labels, smoothing)

    places = (labels != -100).nonzero()[:, 0]
    found = run(lambda *leaves: OutputLoss.apply(*leaves, labels, places, smoothing), states, weight, bias)
    wanted = run(readable, states, weight, bias)
    # bfloat16 has 8 bits; a gradient is a sum over all tokens of numbers of the size of a state.
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        largest = max(1.0, other.abs().max().item())
        assert (one.float() - other.float()).abs().max() <= tolerance * largest


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
def test_both_families_train_by_either_and_by_the_short_one_where_a_switch_says_so(family):
    model = tiny_model(family=family, label_smoothing=0.1).train()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[9, 10, 11, -100]])}
    results = []
    for skip_logits in (False, True):
        model.zero_grad()
        outputs = model(**batch, skip_logits=skip_logits)
        assert (outputs.logits is None) == skip_logits
        outputs.loss.backward()
        results.append([outputs.loss, *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    torch.testing.assert_close(*(found[0] for found in results), rtol=1e-6, atol=0)
    torch.testing.assert_close(*(found[1:] for found in results), rtol=1e-4, atol=1e-5)
    model.skips_logits_in_training = True
    assert model(**batch).logits is None
