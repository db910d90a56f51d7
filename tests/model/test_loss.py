"""The loss of both families (section 5.4): it and its gradient do not depend on how an update is split."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Seq2SeqTrainingArguments, Trainer

from heedful import HeedSeq2SeqTrainer
from heedful.versions_heed import cache_of
from helpers import PAD, RECURRENT_VARIANTS, assert_near, assert_refused, collated, each_once, rows, tiny_model

KINDS = {"transformer": {}} | {
    name: {"family": "recurrent", **options} for name, options in RECURRENT_VARIANTS.items()
}
FAMILIES = ("transformer", "default")
of_both_families = pytest.mark.parametrize("kind", FAMILIES, ids=("transformer", "recurrent"))

LABELS = 38  # of all rows


def training_model(kind="transformer"):
    return tiny_model(label_smoothing=0.1, **KINDS[kind]).train()


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
    kind=st.sampled_from(["transformer", *KINDS]),
)
@settings(max_examples=16, deadline=None)
def test_loss_and_gradient_do_not_depend_on_order_or_split(order, cuts, as_tensor, kind):
    model, pairs = training_model(kind), rows()
    whole = loss_and_gradient(model, [collated(pairs)])
    shuffled, edges = [pairs[index] for index in order], [0, *sorted(cuts), 8]
    pieces = [collated(shuffled[start:stop]) for start, stop in pairwise(edges)]
    count = torch.tensor(LABELS) if as_tensor else LABELS
    assert_same(loss_and_gradient(model, pieces, num_items_in_batch=count), whole)


@pytest.mark.parametrize(
    ("kind", "padding"), each_once(KINDS, [("left", 0), ("right", 5), ("left", 3)], FAMILIES), ids=str
)
def test_loss_and_gradient_do_not_depend_on_padding(kind, padding):
    model, pairs = training_model(kind), rows()
    padded_more = loss_and_gradient(model, [collated(pairs, *padding)])
    assert_same(padded_more, loss_and_gradient(model, [collated(pairs)]))


@of_both_families
def test_num_items_in_batch_is_the_divisor(kind):
    model, batch = training_model(kind), collated(rows())
    assert_near(model(**batch, num_items_in_batch=2 * LABELS).loss * 2, model(**batch).loss)


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


@of_both_families
def test_the_trainer_makes_the_same_step_with_and_without_accumulation(kind, tmp_path):
    def weights(model):
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "use_cpu": True}
    settings |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    pairs, changes = rows(), []
    for size, parts in ((8, 1), (2, 4)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
        arguments = Seq2SeqTrainingArguments(output_dir=str(tmp_path), **split, **settings)
        before = weights(model := training_model(kind))
        trainer = {"transformer": Trainer, "default": HeedSeq2SeqTrainer}[kind]
        trainer(model, arguments, train_dataset=pairs, data_collator=collated).train()
        changes.append(weights(model) - before)
    assert changes[0].abs().max() > 1e-3
    assert_near(changes[1], changes[0], 2e-5)


UNLEARNABLE = [
    ([-100, 5], "must be padded on the right"),
    ([-100, -100], "at least one label other than -100"),
    ([99, 5], "below 99, but one is 99"),
]


def test_labels_that_a_recurrent_model_cannot_learn_from_are_errors():
    model = tiny_model(family="recurrent")
    assert_refused(UNLEARNABLE, lambda labels: model(torch.tensor([[5, 6]]), labels=torch.tensor([labels])))


def test_what_a_recurrent_model_misses_is_named():
    model, source = tiny_model(family="recurrent"), torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match="`decoder_input_ids` or, for a loss, `labels` must be given"):
        model(source)
    with pytest.raises(ValueError, match=r"Exactly one of `input_ids` and `inputs_embeds`.*neither"):
        model(decoder_input_ids=source)
    with pytest.raises(ValueError, match="`labels` must have the shape of the logits"):
        model(source, decoder_input_ids=source, labels=torch.tensor([[5, 6, 7]]))
    with pytest.raises(ValueError, match="`encoder_hidden_states` must be given"):
        model.model.decoder(source)
