"""The recurrent models' loss and its gradient do not depend on how an update is split."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.versions_heed import cache_of
from helpers import PAD, assert_near, assert_refused, each_once, padded, sentences, tiny_rnn
from helpers import RECURRENT_VARIANTS as VARIANTS

SOURCE_LENGTHS = (3, 9, 5, 2, 7, 4, 6, 8)
TARGET_LENGTHS = (6, 1, 9, 3, 2, 8, 4, 5)
LABELS = sum(TARGET_LENGTHS)


def rows():
    torch.manual_seed(0)
    return list(zip(sentences(*SOURCE_LENGTHS), sentences(*TARGET_LENGTHS), strict=True))


def collated(pairs, side="right", extra=0):
    """Return model inputs; `extra` adds that much padding behind the longest row."""
    source, mask = padded([source for source, _ in pairs], side)
    target, tokens = padded([target for _, target in pairs])
    extend = torch.nn.functional.pad
    return {
        "input_ids": extend(source, (0, extra), value=PAD),
        "attention_mask": extend(mask, (0, extra)),
        "labels": extend(target.masked_fill(tokens == 0, -100), (0, extra), value=-100),
    }


def training_model(variant="default"):
    return tiny_rnn(label_smoothing=0.1, **VARIANTS[variant]).train()


def loss_and_gradient(model, batches, **kwargs):
    model.zero_grad()
    total = sum(model(**batch, **kwargs).loss for batch in batches)
    total.backward()
    return total.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def assert_same(ours, theirs):
    assert_near(ours[0], theirs[0])
    assert_near(ours[1], theirs[1], 2e-5)


@given(
    order=st.permutations(range(8)),
    cuts=st.sets(st.integers(1, 7)),
    as_tensor=st.booleans(),
    variant=st.sampled_from(sorted(VARIANTS)),
)
@settings(max_examples=15, deadline=None)
def test_loss_and_gradient_do_not_depend_on_order_or_split(order, cuts, as_tensor, variant):
    model, pairs = training_model(variant), rows()
    whole = loss_and_gradient(model, [collated(pairs)])
    shuffled, edges = [pairs[index] for index in order], [0, *sorted(cuts), 8]
    pieces = [collated(shuffled[start:stop]) for start, stop in pairwise(edges)]
    count = torch.tensor(LABELS) if as_tensor else LABELS
    assert_same(loss_and_gradient(model, pieces, num_items_in_batch=count), whole)


@pytest.mark.parametrize(
    ("variant", "padding"), each_once(VARIANTS, [("left", 0), ("right", 5), ("left", 3)], ["default"]), ids=str
)
def test_loss_and_gradient_do_not_depend_on_padding(variant, padding):
    side, extra = padding
    model, pairs = training_model(variant), rows()
    assert_same(loss_and_gradient(model, [collated(pairs, side, extra)]), loss_and_gradient(model, [collated(pairs)]))


def test_num_items_in_batch_is_the_divisor():
    model, batch = training_model(), collated(rows())
    assert_near(model(**batch, num_items_in_batch=2 * LABELS).loss * 2, model(**batch).loss)


@torch.no_grad()
def test_the_training_loss_is_smoothed_and_the_evaluation_loss_is_the_likelihood():
    model, batch = training_model(), collated(rows())
    outputs = model(**batch)
    log_probabilities = outputs.logits.double().log_softmax(-1)
    real = batch["labels"] != -100
    chosen = log_probabilities.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    likelihood = -chosen[real].mean()
    uniform = -log_probabilities.mean(-1)[real].mean()
    assert_near(outputs.loss.double(), 0.9 * likelihood + 0.1 * uniform)
    assert_near(model.eval()(**batch).loss.double(), likelihood)


def test_the_decoder_reads_start_and_the_labels_before():
    model = tiny_rnn()
    labels = torch.tensor([[7, 2, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[1, 7, 2, PAD]]
    source = torch.tensor([[8, 9]])
    given = model(source, decoder_input_ids=torch.tensor([[1, 7, 2, PAD]]), labels=labels)
    assert torch.equal(model(source, labels=labels).loss, given.loss)
    assert cache_of(given) is None


UNLEARNABLE = [
    ([-100, 5], "must be padded on the right"),
    ([-100, -100], "at least one label other than -100"),
    ([99, 5], "below 99, but one is 99"),
]


def test_labels_that_cannot_be_learned_from_are_errors():
    model = tiny_rnn()
    assert_refused(UNLEARNABLE, lambda labels: model(torch.tensor([[5, 6]]), labels=torch.tensor([labels])))


def test_what_is_missing_is_named():
    model, source = tiny_rnn(), torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="`decoder_input_ids` or, for a loss, `labels` must be given"):
        model(source)
    with pytest.raises(ValueError, match=r"Exactly one of `input_ids` and `inputs_embeds`.*neither"):
        model(decoder_input_ids=source)
    with pytest.raises(ValueError, match="`labels` must have the shape of the logits"):
        model(source, decoder_input_ids=source, labels=torch.tensor([[5, 6, 7]]))
    with pytest.raises(ValueError, match="`encoder_hidden_states` must be given"):
        model.model.decoder(source)
