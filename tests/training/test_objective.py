"""R-Drop and distillation are what their papers define, keep the promises of the contract, and teach a student."""

import shutil
from contextlib import nullcontext
from itertools import chain, product, repeat
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heedful.checking.doctor import diagnose
from heedful.checking.estimate import dry_run
from heedful.data.epochs.micro_batches import MicroBatch, collate, laid_end_to_end
from heedful.data.epochs.teacher import TeacherTokens, teacher_tensors
from heedful.data.sources import read_pairs
from heedful.data.tokenizer_training import train_tokenizers
from heedful.loss_heed import OutputLoss
from heedful.training.model_of_recipe import check_model
from heedful.training.preparation import prepare_corpus
from heedful.training.recipe_file import read_recipe, to_yaml
from heedful.training.updates.objective import Objective
from helpers import assert_error, assert_refused, tiny_model
from process_checks import with_stand_in_for_dropout, write_teacher
from tiny_runs import around, logged, tiny_recipe

R_DROP = {"optimization.r_drop": 5.0}
BATCH = {"input_ids": torch.tensor([[5, 6, 7], [7, 9, 4]]), "labels": torch.tensor([[9, 10, -100], [11, 5, 6]])}


def of_the_paper(logits, labels, alpha):
    """Return half of equation 4 of the paper, summed over target tokens one by one."""
    total = 0.0
    halves = (part.flatten(0, 1) for part in logits.softmax(-1).chunk(2))
    for p, q, label in zip(*halves, labels.flatten(), strict=True):
        if label != -100:
            cross_entropies = -p[label].log() - q[label].log()
            divergences = (p * (p / q).log()).sum() + (q * (q / p).log()).sum()
            total += (cross_entropies + alpha / 2 * divergences) / 2
    return total


def test_the_loss_is_half_of_the_papers():
    torch.manual_seed(1)
    logits, labels = torch.randn(4, 3, 7, dtype=torch.float64), torch.tensor([[1, 2, -100], [0, 6, 3]])
    found, added, _ = Objective(5.0)(logits, torch.cat([labels, labels]), 0.0)
    assert found == pytest.approx(of_the_paper(logits, labels, 5.0).item(), rel=1e-6)
    assert added == pytest.approx((found - Objective(1e-9)(logits, torch.cat([labels, labels]), 0.0)[0]).item())


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


@settings(max_examples=30, deadline=None)
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
        patch.setattr("heedful.training.updates.objective.LOGITS_AT_ONCE", 3 * vocabulary)
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
def test_both_families_train_by_it(family):
    model, added = tiny_model(family=family, label_smoothing=0.1, dropout=0.3).train(), []
    batch = {name: torch.cat([values] * 2) for name, values in BATCH.items()}
    for is_hooked, alpha in product((False, True), (5.0, 1e-9)):
        torch.manual_seed(1)
        hook = model.lm_head.register_forward_hook(lambda *_: None) if is_hooked else nullcontext()
        with hook:
            added.append(model.loss_of(batch, 5, Objective(alpha)))
        added[-1][0].backward()
    for with_it, without in (added[:2], added[2:]):
        ours, theirs, _ = (with_it - without).tolist()
        assert ours > 0.01
        assert theirs == pytest.approx(ours, rel=1e-4)


def change_of_one_update(make_loop, folder, token_budget, **more):
    """Return what one update has logged, and how it has changed the weights, nearly in proportion to the gradient."""
    changes = {"optimization.max_updates": 1, "optimization.epsilon": 1e3, "optimization.warmup_updates": 0}
    changes |= {"optimization.learning_rate": 1e3, "optimization.token_budget": token_budget, **more}
    loop = make_loop(changes, folder)
    network = loop.engine.network
    if "optimization.r_drop" in more:
        with_stand_in_for_dropout(loop)
    before = torch.cat([weight.detach().flatten() for weight in network.parameters()])
    loop.run()
    change = torch.cat([weight.detach().flatten() for weight in network.parameters()]) - before
    values = [logged(folder, f"train/{name}") for name in ("loss", "r_drop", "distillation")]
    return [value[0] for value in values if value], change.double()


@pytest.mark.parametrize(("count", "tolerance"), [(1, 1e-6), (2, 1e-5), (3, 1e-5)])
def test_loss_and_gradient_do_not_depend_on_the_split(make_loop, tmp_path, distillation, count, tolerance):
    """Of the plain loss, with R-Drop, and with a teacher too."""
    kind = ({"model.options.dropout": 0.0}, R_DROP, R_DROP | distillation)[count - 1]
    losses, change = change_of_one_update(make_loop, tmp_path / "whole", None, **kind)
    assert len(losses) == count
    assert min(map(abs, losses)) > 0.01
    assert change.norm() > 0.01
    # Recomputed layers, whose packing steps aside for nothing, give the same too.
    for budget, recomputes in ((300, True), (1, False)):
        more = {"model.activation_checkpointing": recomputes}
        other_losses, other = change_of_one_update(make_loop, tmp_path / str(budget), budget, **kind, **more)
        assert other_losses == pytest.approx(losses, rel=tolerance), budget
        assert (other - change).norm() / change.norm() < 2e-5, budget


def test_a_micro_batch_has_half_of_the_tokens_since_it_passes_twice(make_loop):
    loop = make_loop({**R_DROP, "optimization.token_budget": 700, "optimization.max_updates": 2})
    assert loop.token_budget == 350
    tokens, loss_of = [], loop.engine.network.loss_of
    loop.engine.network.loss_of = lambda batch, *others: (
        tokens.append(batch["input_ids"].numel() + batch["labels"].numel()) or loss_of(batch, *others)
    )
    loop.run()
    assert 350 < max(tokens) <= 700


def test_a_micro_batch_that_did_not_fit_in_memory_is_not_logged(make_loop, tmp_path):
    changes = {**R_DROP, "optimization.max_updates": 1, "optimization.shrink_token_budget": True}
    for name, errors in (("whole", []), ("shrunk", [torch.OutOfMemoryError("CUDA out of memory.")])):
        loop = with_stand_in_for_dropout(make_loop(changes, tmp_path / name))
        around(loop.engine, "backward", before=Mock(side_effect=chain(errors, repeat(None))))
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


def test_a_model_without_dropout_is_refused_before_anything_is_read(tmp_path):
    recurrent = {"model_type": "heed_rnn", "hidden_size": 32, "dropout": 0.0, "attention_dropout": 0.3}  # unread by it
    none = "`optimization.r_drop` must be empty for a model without `dropout`"
    cases = [({**R_DROP, "model.options": options}, none) for options in ({"dropout": 0.0}, recurrent)]
    cases += [
        ({"optimization.r_drop": weight}, f"`optimization.r_drop` must be above 0, but is {weight}")
        for weight in (0, float("inf"))
    ]
    assert_refused(cases, lambda changes: check_model(tiny_recipe(tmp_path, changes), None))
    check_model(tiny_recipe(tmp_path, {**R_DROP, "model.options": {"dropout": 0.0, "source_word_dropout": 0.1}}), None)


def test_what_the_teacher_says_lies_at_its_label_however_rows_are_laid(corpus, distillation):
    teacher = TeacherTokens(distillation["optimization.distillation"])
    rows = [teacher.with_tokens(corpus.training.rows[number]) for number in range(20)]
    for batch in (collate(rows, 0), laid_end_to_end(rows, 700, 0, 1)):
        found = teacher_tensors(rows, batch["labels"])
        is_label = batch["labels"] != -100
        for name, values in found.items():
            expected = torch.cat([torch.from_numpy(row[name].astype("float32")) for row in rows])
            expected = expected / expected.sum(-1, keepdim=True) if "prob" in name else expected
            assert torch.allclose(values[is_label].float(), expected, atol=1e-3)
        assert found["teacher_probabilities"][is_label].sum(-1) == pytest.approx(1, abs=1e-6)
        assert not found["teacher_probabilities"][~is_label].any()
    row = corpus.training.rows[0]  # as the row by which DDP builds its buckets
    assert teacher_tensors([row], batch["labels"]) == {}


def test_dry_run_and_doctor_know_the_teacher(tmp_path, distillation, corpus):
    corpus.tokenizers.save_pretrained(tmp_path / "tokenizer")
    changes = {**distillation, "tokenizer": {"path": str(tmp_path / "tokenizer")}, "optimization.max_minutes": 1.0}
    assert "distillation_weight: 0.5" in str(dry_run(tiny_recipe(tmp_path / "run", changes)))
    assert not diagnose(tiny_recipe(tmp_path / "run", changes)).has_errors
    (finding, *_) = diagnose(tiny_recipe(tmp_path / "run", {**changes, "data.train": "builtin:train:301"})).findings
    assert (finding.level, finding.check, finding.where) == ("error", "distillation", "optimization.distillation")


def test_what_does_not_fit_the_teacher_is_refused_before_training(tmp_path, distillation, corpus):
    folder = shutil.copytree(distillation["optimization.distillation"], tmp_path / "teacher")
    changes = {"optimization.distillation": str(folder)}
    corpus.tokenizers.save_pretrained(tmp_path / "tokenizer")

    def prepare(tokenizer="tokenizer", **more):
        return prepare_corpus(tiny_recipe(tmp_path / "run", {**changes, **more}), tmp_path / tokenizer)

    expected = prepare().fingerprint
    assert expected.startswith(corpus.fingerprint)
    with pytest.raises(ValueError, match=r"must be made from all training pairs, but lacks '.+' with '.+'"):
        prepare(**{"data.train": "builtin:train:301"})
    pairs = read_pairs("builtin:train:200", "ko", "en")
    other = train_tokenizers(pairs["source"], pairs["target"], vocab_size=400)
    other.save_pretrained(tmp_path / "other")
    assert_error(r"must be made with this tokenizer, but is not: set `tokenizer.path`", prepare, "other")
    # Before the corpus is read.
    assert_error("must be made with this tokenizer", check_model, tiny_recipe(tmp_path / "run", changes), other)
    # Another teacher of the same pairs makes it another run.
    write_teacher(tmp_path / "second", corpus.tokenizers, "builtin:train:310")
    assert prepare(**{"optimization.distillation": str(tmp_path / "second")}).fingerprint != expected
    whole, unreadable = (folder / "tokens.npy").read_bytes(), "a folder of `heedful distill-tokens`, but is not"
    for damaged, message in (
        (whole[:-2] + b"\x00\x01", "unchanged, but is damaged or changed"),
        (whole[:-9], unreadable),
        (None, f"{unreadable}: FileNotFoundError"),
    ):
        (folder / "tokens.npy").unlink()
        if damaged is not None:
            (folder / "tokens.npy").write_bytes(damaged)
        assert_error(rf"`optimization.distillation` \(.+teacher\) must be {message}", prepare)
        (folder / "tokens.npy").touch()


def test_settings_that_a_teacher_excludes_are_named_and_it_is_found_beside_the_recipe(tmp_path):
    teacher, weight = {"optimization.distillation": "tokens"}, "optimization.distillation_weight"
    noisy = {"data.augmentation": {"typos": 0.1}}
    tagged = {"data.mixture": {"x": {"train": "builtin:train:9", "tag": "bt"}}}
    cases = [
        ({weight: 0.3}, f"`{weight}` must be 0.5 if"),
        ({**teacher, weight: 0.0}, "must be above 0 and at most 1, but is 0.0"),
        ({**teacher, weight: 1.1}, "must be above 0 and at most 1, but is 1.1"),
        ({**teacher, **noisy}, "`data.augmentation` must be empty with .+ {'typos': 0.1}"),
        ({**teacher, **tagged}, "`data.mixture.x.tag` must be empty with .+, but is bt"),
        ({**teacher, "data.streaming": True}, "`data.streaming` must be false with .+, but is true instead"),
    ]
    assert_refused(cases, lambda changes: tiny_recipe(tmp_path, changes))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny_recipe(tmp_path, {**teacher, weight: 0.7})))
    assert read_recipe(tmp_path / "recipe.yaml").optimization.distillation == str(tmp_path / "tokens")
    assert read_recipe(tmp_path / "recipe.yaml", ["optimization.distillation=x"]).optimization.distillation == "x"
