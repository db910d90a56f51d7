"""The loss of both families (section 5.4) does not depend on how an update is split, and its two forms are one."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from heedful.loss_heed import OutputLoss, smoothed_cross_entropy
from heedful.versions_heed import cache_of
from helpers import PAD, assert_near, assert_refused, collated, each_once, loss_and_gradients, rows, tiny_model

KINDS = {"transformer": {}} | {
    name: {"family": "recurrent", **options} for name, options in helpers.RECURRENT_VARIANTS.items()
}
FAMILIES = ("transformer", "default")
of_both_families = pytest.mark.parametrize("kind", FAMILIES, ids=("transformer", "recurrent"))

LABELS = 38  # of all rows


def training_model(kind="transformer"):
    return tiny_model(label_smoothing=0.1, **KINDS[kind]).train()


@given(
    order=st.permutations(range(8)),
    cuts=st.sets(st.integers(1, 7)),
    as_tensor=st.booleans(),
    kind=st.sampled_from(["transformer", *KINDS]),
)
@settings(max_examples=16, deadline=None)
def test_loss_and_gradient_do_not_depend_on_order_or_split(order, cuts, as_tensor, kind):
    model, pairs = training_model(kind), rows()
    whole = loss_and_gradients(model, collated(pairs))
    shuffled, edges = [pairs[index] for index in order], [0, *sorted(cuts), 8]
    pieces = [collated(shuffled[start:stop]) for start, stop in pairwise(edges)]
    count = torch.tensor(LABELS) if as_tensor else LABELS
    assert_near(sum(loss_and_gradients(model, piece, num_items_in_batch=count) for piece in pieces), whole)


@pytest.mark.parametrize(
    ("kind", "padding"), each_once(KINDS, [("left", 0), ("right", 5), ("left", 3)], FAMILIES), ids=str
)
def test_loss_and_gradient_do_not_depend_on_padding(kind, padding):
    model, pairs = training_model(kind), rows()
    assert_near(*(loss_and_gradients(model, collated(pairs, *more)) for more in (padding, ())))


@of_both_families
@torch.no_grad()
def test_the_training_loss_is_smoothed_and_the_evaluation_loss_is_the_likelihood(kind):
    model, batch = training_model(kind), collated(rows())
    outputs = model(**batch)
    log_probabilities = outputs.logits.double().log_softmax(-1)
    real = batch["labels"] != -100
    chosen = log_probabilities.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    likelihood = -chosen[real].mean()
    uniform = -log_probabilities.mean(-1)[real].mean()
    assert_near(outputs.loss.double(), 0.9 * likelihood + 0.1 * uniform)
    assert_near(model.eval()(**batch).loss.double(), likelihood)


@of_both_families
def test_the_decoder_reads_start_and_the_labels_before(kind):
    labels = torch.tensor([[5, 6, 2], [7, 2, -100]])
    model = tiny_model(**KINDS[kind])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[1, 5, 6], [1, 7, 2]]
    labels = torch.tensor([[7, 2, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[1, 7, 2, PAD]]
    source = torch.tensor([[8, 9]])
    given = model(source, decoder_input_ids=torch.tensor([[1, 7, 2, PAD]]), labels=labels)
    assert torch.equal(model(source, labels=labels).loss, given.loss)
    assert cache_of(given) is None


def test_labels_of_a_recurrent_model_are_padded_on_the_right_and_its_decoder_wants_the_encoder():
    model, source = tiny_model(family="recurrent"), torch.tensor([[5, 6]])
    cases = [(torch.tensor([[-100, 5]]), "must be padded on the right")]
    assert_refused(cases, lambda labels: model(source, labels=labels))
    assert_refused([(source, "`decoder_input_ids` or, for a loss, `labels` must be given")], model)
    assert_refused([(source, "`encoder_hidden_states` must be given")], model.model.decoder)


def run(loss, *leaves, upstream=3.0):
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
