"""R-Drop and distillation are what their papers define, in both forms, and keep the promises of the contract."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heedful.data.micro_batches import MicroBatch
from heedful.loss_heed import OutputLoss
from heedful.training.model_of_recipe import check_model
from heedful.training.objectives.objective import Objective
from helpers import tiny_model
from process_checks import with_stand_in_for_dropout
from tiny_runs import logged, tiny_recipe

R_DROP = {"optimization.r_drop": 5.0}
BATCH = {"input_ids": torch.tensor([[5, 6, 7], [7, 9, 4]]), "labels": torch.tensor([[9, 10, -100], [11, 5, 6]])}


def of_the_paper(logits, labels, alpha):
    """Return half of equation 4 of the paper, summed over target tokens one by one."""
    total = 0.0
    for p, q, label in zip(
        *(part.flatten(0, 1) for part in logits.softmax(-1).chunk(2)), labels.flatten(), strict=True
    ):
        if label != -100:
            cross_entropies = -p[label].log() - q[label].log()
            divergences = (p * (p / q).log()).sum() + (q * (q / p).log()).sum()
            total += (cross_entropies + alpha / 2 * divergences) / 2
    return total


def test_the_loss_is_half_of_the_papers():
    torch.manual_seed(1)
    logits, labels = torch.randn(4, 3, 7, dtype=torch.float64), torch.tensor([[1, 2, -100], [0, 6, 3]])
    labels = torch.cat([labels, labels])
    found, added, _ = Objective(5.0)(logits, labels, 0.0)
    assert found == pytest.approx(of_the_paper(logits, labels[:2], 5.0).item(), rel=1e-6)
    assert added == pytest.approx((found - Objective(1e-9)(logits, labels, 0.0)[0]).item())


def random_teacher(labels, vocabulary, k):
    """Return k of the vocabulary's tokens at each label, with random probabilities."""
    tokens = torch.rand(*labels.shape, vocabulary).argsort(-1)[..., :k]
    return tokens, torch.rand(*labels.shape, k).softmax(-1)


def test_the_loss_of_distillation_is_the_papers():
    torch.manual_seed(1)
    logits, labels = torch.randn(2, 3, 7), torch.tensor([[1, 2, -100], [0, 6, 3]])
    (tokens, probabilities), expected, cross_entropies = random_teacher(labels, 7, 3), 0.0, 0.0
    for row, place in (labels != -100).nonzero().tolist():
        log_p, label = logits[row, place].log_softmax(-1), labels[row, place]
        of_label = -0.9 * log_p[label] - 0.1 * log_p.mean()
        for token, probability in zip(tokens[row, place], probabilities[row, place], strict=True):
            expected -= 0.3 * probability * log_p[token]
        expected += 0.7 * of_label
        cross_entropies += of_label
    found, r_drop, added = Objective(weight=0.3, teacher=(tokens, probabilities))(logits, labels, 0.1)
    assert found == pytest.approx(expected.item(), rel=1e-6)
    assert (r_drop, added) == (0, pytest.approx((expected - cross_entropies).item(), rel=1e-5))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(2, 40)),  # tokens, width, vocabulary
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    alpha=st.sampled_from([None, 0.5, 5.0]),
    share=st.sampled_from([None, 0.3, 1.0]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_form_that_trains_is_the_readable_one(sizes, smoothing, ignored, alpha, share, has_bias, seed):
    assume(alpha or share)
    tokens, width, vocabulary = sizes
    torch.manual_seed(seed)
    passes = 2 if alpha else 1
    leaves = [torch.randn(passes * tokens, width), torch.randn(vocabulary, width)]
    leaves += [torch.randn(vocabulary)] if has_bias else []
    once = torch.randint(vocabulary, (tokens,)).masked_fill(torch.rand(tokens) < ignored, -100)
    labels, found = torch.cat([once] * passes), []
    places = (labels != -100).nonzero()[:, 0]
    teacher = tuple(values.repeat(passes, 1) for values in random_teacher(once, vocabulary, min(8, vocabulary)))
    objective = Objective(alpha, share, teacher if share else ())
    with pytest.MonkeyPatch.context() as patch:  # so that there are parts
        patch.setattr("heedful.training.objectives.objective.LOGITS_AT_ONCE", 3 * vocabulary)
        for form in ("readable", "training"):
            states, weight, *bias = (leaf.clone().requires_grad_() for leaf in leaves)
            bias = bias[0] if has_bias else None
            if form == "readable":
                logits = F.linear(states, weight, bias)
                sums = objective(logits, labels, smoothing)
            else:
                sums = OutputLoss.apply(states, weight, bias, labels, places, smoothing, objective).expand(3)
            (3 * sums[0]).backward()
            grads = [states.grad, weight.grad, *([bias.grad] if has_bias else [])]
            found.append([sums.detach(), *grads])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 2e-4 * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("family", ["transformer", "recurrent"])
@pytest.mark.parametrize("skips", [False, True])
def test_both_families_train_by_it(family, skips):
    model, losses = tiny_model(family=family, label_smoothing=0.1, dropout=0.3), []
    batch = {name: torch.cat([values] * 2) for name, values in BATCH.items()}
    for alpha in (5.0, 1e-9):
        torch.manual_seed(1)
        settings = {"objective": Objective(alpha), "num_items_in_batch": 5, "skip_logits": skips}
        losses.append(model.train()(**batch, **settings).loss)
        losses[-1][0].backward()
    added = (losses[0] - losses[1]).tolist()
    assert added[0] > 0.01
    assert added[1] == pytest.approx(added[0], rel=1e-4)


def change_of_one_update(make_loop, folder, token_budget, **more):
    """Return what one update has logged, and how it has changed the weights, nearly in proportion to the gradient."""
    changes = {"optimization.max_updates": 1, "optimization.epsilon": 1e3, "optimization.warmup_updates": 0}
    changes |= {"optimization.learning_rate": 1e3, "optimization.token_budget": token_budget, **more}
    loop = make_loop(changes, folder)
    network = with_stand_in_for_dropout(loop).engine.network
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    loop.run()
    change = torch.cat([(weight - before[name]).flatten() for name, weight in network.named_parameters()])
    values = [logged(folder, f"train/{name}") for name in ("loss", "r_drop", "distillation")]
    return [value[0] for value in values if value], change.detach().double()


@pytest.mark.parametrize("has_teacher", [False, True])
def test_loss_and_gradient_do_not_depend_on_the_split(make_loop, tmp_path, has_teacher, distillation):
    kind = R_DROP | (distillation if has_teacher else {})
    losses, change = change_of_one_update(make_loop, tmp_path / "whole", None, **kind)
    assert len(losses) == 2 + has_teacher
    assert min(map(abs, losses)) > 0.01
    assert change.norm() > 0.01
    for budget in (1000, 300, 1):
        other_losses, other = change_of_one_update(make_loop, tmp_path / str(budget), budget, **kind)
        assert other_losses == pytest.approx(losses, rel=1e-5)
        assert (other - change).norm() / change.norm() < 2e-5
    # Recomputed layers, whose packing steps aside for nothing, give the same too.
    kind["model.gradient_checkpointing"] = True
    recomputed = change_of_one_update(make_loop, tmp_path / "again", 300, **kind)
    assert (recomputed[1] - change).norm() / change.norm() < 2e-5


def test_a_micro_batch_has_half_of_the_tokens_since_it_passes_twice(make_loop):
    loop = make_loop({**R_DROP, "optimization.token_budget": 700})
    assert loop.token_budget == 350
    tokens, forward = [], loop.engine.network.forward
    loop.engine.network.forward = lambda **batch: (
        tokens.append(batch["input_ids"].numel() + batch["labels"].numel()) or forward(**batch)
    )
    loop.run()
    assert 350 < max(tokens) <= 700


def test_a_micro_batch_that_did_not_fit_in_memory_is_not_logged(make_loop, tmp_path):
    for name in ("whole", "shrunk"):
        changes = {**R_DROP, "optimization.max_updates": 1, "optimization.shrink_token_budget": True}
        loop = with_stand_in_for_dropout(make_loop(changes, tmp_path / name))
        backward, failures = loop.engine.backward, iter([name == "shrunk"])

        def fail_once(loss, backward=backward, failures=failures):
            if next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            backward(loss)

        loop.engine.backward = fail_once
        loop.run()
    ours, theirs = (logged(tmp_path / name, "train/r_drop") for name in ("shrunk", "whole"))
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_rows_that_only_fill_in_count_for_nothing(make_loop):
    loop = make_loop(R_DROP)
    loop.engine.model.train()
    rows = [{"input_ids": [5, 6, 7], "labels": [9, 10]}, {"input_ids": [7], "labels": [11, 5, 6]}]
    sums = loop.engine.accumulate([MicroBatch(loop.engine.feed.tensors(rows), counts=False)], tokens=5)
    assert sums.tolist() == [0.0, 0.0, 0.0]
    assert not any(weight.grad.any() for weight in loop.engine.parameters)


def test_a_model_without_dropout_is_refused_before_anything_is_read(make_loop, tmp_path):
    recurrent = {"model_type": "heed_rnn", "hidden_size": 32, "dropout": 0.0, "attention_dropout": 0.3}  # unread by it
    for options in ({"dropout": 0.0}, recurrent):
        recipe = tiny_recipe(tmp_path, {**R_DROP, "model.options": options})
        with pytest.raises(ValueError, match=r"`optimization.r_drop` must be empty for a model without `dropout`"):
            check_model(recipe, None)
    with pytest.raises(ValueError, match="must be empty for a model without `dropout`"):
        make_loop({**R_DROP, "model.options.dropout": 0.0})
    check_model(tiny_recipe(tmp_path, {**R_DROP, "model.options": {"dropout": 0.0, "source_word_dropout": 0.1}}), None)


@pytest.mark.parametrize("weight", [0, float("inf")])
def test_a_weight_must_be_above_0_and_finite(tmp_path, weight):
    with pytest.raises(ValueError, match=f"`optimization.r_drop` must be above 0 and finite, but is {weight}"):
        tiny_recipe(tmp_path, {"optimization.r_drop": weight})
