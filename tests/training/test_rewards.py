"""Rewards: their values, the gradient that they give, exactness under any split, and what is said of weak ones."""

import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import forked
import process_checks
from guides import commands_of, python_of, text_of
from heedful import HeedConfig, HeedForConditionalGeneration, HeedSeq2SeqTrainer
from heedful.checking.doctor import diagnose
from heedful.checking.estimate import dry_run
from heedful.loss_heed import OutputLoss
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe import RewardRecipe
from heedful.training.updates.objective import Objective
from heedful.training.updates.rewards import Rewards, reward_function, weakness_of
from helpers import assert_error, tiny_model
from memorised import saved_in
from pretrained_checkpoints import bart, marian, t5
from tiny_runs import SIZES, logged, tiny_recipe, tiny_tree
from trainer_runs import SOURCES, TARGETS, fresh_model, joint_tokenizers, trained

REWARD = "optimization.reward"
NEW_MODULE = """
import math
def letters(sources, outputs, references):
    assert len(sources) == len(outputs) == len(references)
    return [output.count("e") / max(1, len(output)) for output in outputs]
def nothing(sources, outputs, references): return [1.0 for _ in outputs]
def infinite(sources, outputs, references): return [math.inf for _ in outputs]
def short(sources, outputs, references): return [1.0]
number = 3
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory, corpus):
    """Keys of a recipe that rewards the outputs of an untrained model, by chrF."""
    tokenizers = corpus.tokenizers
    torch.manual_seed(2)
    sizes = {**SIZES, "dropout": 0.0, "vocab_size": len(tokenizers.source), **tokenizers.special_ids()}
    folder = saved_in(tmp_path_factory.mktemp("start"), HeedForConditionalGeneration(HeedConfig(**sizes)), tokenizers)
    keys = {"model": {"start_from": str(folder)}, f"{REWARD}.name": "chrf", f"{REWARD}.samples": 3}
    return {**keys, "decoding.max_length": 9, "optimization.tokens_per_update": 400}


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "own_reward", raising=False)
    (tmp_path / "own_reward.py").write_text(NEW_MODULE)


def rewards_of(model, function=lambda sources, outputs, references: [len(set(text)) for text in outputs], **settings):
    tokenizer = Mock(spec=["batch_decode"])
    tokenizer.batch_decode = lambda rows, skip_special_tokens: [" ".join(map(str, row)) for row in rows]
    return Rewards(RewardRecipe(**{"name": "chrf", "samples": 3, **settings}), function, tokenizer, 1, 6)


def test_an_output_weighs_what_its_reward_is_beyond_the_others():
    rewards = rewards_of(tiny_model(), samples=4)
    object.__setattr__(rewards, "_outputs", lambda *given: [(7, 2), (8, 2), (7, 2), (9, 2)])
    object.__setattr__(rewards, "function", lambda *given: [1.0, 2.0, 1.0, 6.0])
    (found,) = rewards.samples(tiny_model(), [{"input_ids": [5, 2], "labels": [7, 2]}], 0, 100)
    expected = {(7, 2): 2 * (1 - 9 / 3), (8, 2): 2 - 8 / 3, (9, 2): 6 - 4 / 3}
    assert {tuple(row["labels"]): 4 * row["weight"] for row in found} == pytest.approx(expected)
    assert [row["count"] for row in found] == [2, 1, 1]


def test_metrics_are_scaled_to_one_and_errors_count_below_zero(module):
    texts = (["x"] * 2, ["the cat", "a dog"], ["the cat", "the cat"])
    for name in ("chrf", "bleu", "exact_match"):
        best, other = reward_function(name)(*texts)
        assert best == pytest.approx(1), name
        assert 0 <= other < 0.5, name
    assert reward_function("token_error_rate")(*texts) == [0, -1]
    assert reward_function("own_reward:letters")(*texts) == [1 / 7, 0]


def test_the_code_of_a_users_reward_is_said_aloud(module, caplog):
    reward_function("own_reward:letters")
    assert "the reward runs code of yours: own_reward:letters" in caplog.text


def test_a_wrong_reward_is_refused_by_name(module):
    for name in ("chrff", "own_reward:", "own_reward:missing", "no_such_module:f", "own_reward:number", ":f"):
        assert_error(r"`optimization\.reward\.name` must .*but is", reward_function, name)
    model, row = tiny_model(), {"input_ids": [5, 6, 2], "labels": [7, 2]}
    for name, message in {
        "infinite": "finite numbers, but returned inf for",
        "short": "for each of 3 outputs",
    }.items():
        rewards = rewards_of(model, reward_function(f"own_reward:{name}"))
        assert_error(message, rewards.samples, model, [row], 0, 100)


def test_keys_that_contradict_rewards_are_refused(tmp_path):
    given = {f"{REWARD}.name": "chrf", "model": {"start_from": "somewhere"}}
    cases = {
        "`model.start_from` must be given with": {f"{REWARD}.name": "chrf"},
        "`optimization.reward.samples` must be left out": {f"{REWARD}.samples": 4},
        "`optimization.r_drop` must be empty with rewards": {**given, "optimization.r_drop": 1.0},
        "`optimization.optimizer` must be another": {**given, "optimization.optimizer": "schedule_free"},
        "`optimization.reward.weight` must be above 0": {**given, f"{REWARD}.weight": 0.0},
    }
    for message, changes in cases.items():
        assert_error(message, tiny_recipe, tmp_path, {"optimization.schedule": None, **changes})


def test_the_loss_of_weighted_rows_is_the_weighted_cross_entropy():
    torch.manual_seed(1)
    states, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    bias, labels = torch.randn(9, requires_grad=True), torch.tensor([[1, 2, -100], [0, 6, 3]])
    of_labels = torch.tensor([[0.5, 0.5, 0.0], [-2.0, -2.0, -2.0]])
    logits = states @ weight.T + bias
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=0.1)
    expected = (of_labels.flatten() * losses).sum()
    objective, places = Objective(weights=of_labels), (labels.flatten() != -100).nonzero()[:, 0]
    flat = OutputLoss.apply(states.flatten(0, 1), weight, bias, labels.flatten(), places, 0.1, objective)
    assert flat[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert objective(logits, labels, 0.1)[0].item() == pytest.approx(expected.item(), rel=1e-5)
    ours, theirs = (torch.autograd.grad(loss, (states, weight, bias)) for loss in (flat[0], expected))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_samples_depend_on_seed_sentence_and_update_alone():
    model = tiny_model()
    rows = [{"input_ids": [5 + number, 6, 2][: 2 + number % 2], "labels": [7, 2]} for number in range(6)]
    rewards = rewards_of(model)
    whole = rewards.samples(model, rows, 4, 1000)
    assert rewards.samples(model, rows[::-1], 4, 3)[::-1] == whole
    assert rewards.samples(model, rows, 5, 1000) != whole
    assert sum(row["weight"] for own in whole for row in own) == pytest.approx(0, abs=1e-6)


def test_an_update_is_the_same_in_any_micro_batches_and_after_a_resume(make_loop, start, tmp_path):
    keys = {**start, "optimization.max_updates": 4}
    loops = {}
    for name, ends, budget in (("whole", [4], None), ("small", [4], 90), ("stopped", [2, 4], None)):
        for end in ends:
            more = {"optimization.max_updates": end, "optimization.token_budget": budget, "resume": end != ends[0]}
            loops[name] = make_loop({**keys, **more}, tmp_path / name)
            loops[name].run()
    weights = {name: loop.engine.network.state_dict() for name, loop in loops.items()}
    for name, value in weights["whole"].items():
        assert torch.equal(weights["stopped"][name], value), name
        assert torch.allclose(weights["small"][name], value, atol=1e-5), name
    ours, theirs = (logged(tmp_path / name, "train/reward") for name in ("small", "whole"))
    assert ours == pytest.approx(theirs, rel=1e-4)


def run_alone_or_with_others(folder, keys, corpus):
    process_checks.make_loop(folder, keys, corpus, make_accelerator(tiny_recipe(folder, keys).optimization)).run()


@pytest.mark.multiprocess
def test_two_processes_take_the_same_updates(corpus, start, tmp_path):
    keys = {**start, "validation.every_updates": 2, "checkpoints.every_updates": 5}
    run_alone_or_with_others(tmp_path / "one", keys, corpus)
    AcceleratorState._reset_state(reset_partial_state=True)
    forked.run(2, tmp_path, run_alone_or_with_others, tmp_path / "two", keys, corpus)
    one, two = (process_checks.weights_of(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(one[name], value, atol=1e-5) for name, value in two.items())
    ours, theirs = (logged(tmp_path / name, "train/reward") for name in ("two", "one"))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_rewards_alone_teach(make_loop, start, module, tmp_path):
    keys = {f"{REWARD}.name": "own_reward:letters", f"{REWARD}.weight": 1.0, f"{REWARD}.samples": 8}
    make_loop({**start, **keys, "optimization.max_updates": 25, "optimization.learning_rate": 0.01}).run()
    found = logged(tmp_path / "run", "train/reward")
    assert np.mean(found[-5:]) > 1.5 * np.mean(found[:5])


def test_the_start_is_validated_and_may_remain_the_best(make_loop, start, tmp_path):
    keys = {"optimization.learning_rate": 5.0, "checkpoints.publish": "best", "optimization.max_updates": 2}
    loop = make_loop({**start, **keys})
    assert loop.run().best[1] == 0
    assert logged(tmp_path / "run", "validation/loss")[0] == pytest.approx(loop.progress.best[0])


def test_weak_samples_are_named_once(make_loop, start, module, caplog):
    make_loop({**start, f"{REWARD}.name": "own_reward:nothing", "optimization.max_updates": 2}).run()
    assert caplog.text.count("all outputs of a source have the same reward, so that there is nothing to learn") == 1
    rows = [{"input_ids": [1], "labels": [1] * count} for count in (2, 3)]
    assert weakness_of([[{"labels": [1, 2, 3, 4], "weight": 0.5}]] * 2, rows) == "all outputs have 4 tokens"


def test_doctor_and_dry_run_judge_the_samples(start, module, tmp_path):
    recipe = tiny_recipe(tmp_path / "run", start)
    assert "reward" not in {finding.check for finding in diagnose(recipe).findings}
    coarse = diagnose(tiny_recipe(tmp_path / "run", {**start, f"{REWARD}.name": "exact_match"}))
    (found,) = (finding for finding in coarse.findings if finding.check == "reward")
    assert found.where == f"{REWARD}.name"
    assert "Train the start longer" in found.advice
    plain = tiny_recipe(tmp_path / "run", {"model": start["model"], "optimization.tokens_per_update": 400})
    assert dry_run(recipe).seconds_per_update > 1.5 * dry_run(plain).seconds_per_update


def trainers(folder, model=None, **changes):
    given = {"reward": RewardRecipe(name="chrf", samples=3), "processing_class": joint_tokenizers(), **changes}
    return lambda **settings: trained(HeedSeq2SeqTrainer, folder, model, given, generation_max_length=8, **settings)


def test_the_trainer_is_the_same_in_any_micro_batches(tmp_path):
    whole, parts = (
        trainers(tmp_path, fresh_model(dropout=0.0))(per_device_train_batch_size=6 // n, gradient_accumulation_steps=n)
        for n in (1, 3)
    )
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(parts.model.state_dict()[name], value, atol=1e-5), name
    assert [entry["reward"] for entry in whole.state.log_history if "reward" in entry]
    assert_error("`processing_class` must be given", trainers(tmp_path, processing_class=None))


@pytest.mark.parametrize("make", [marian, bart, t5])
def test_the_trainer_rewards_other_families(tmp_path, make):
    folder = make(tmp_path / "start")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    rows = Dataset.from_dict(dict(tokenizer(SOURCES, text_target=TARGETS)))
    given = {"reward": RewardRecipe(name="token_error_rate", samples=2), "processing_class": tokenizer}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given |= {"train_dataset": rows, "data_collator": None}
    run = trained(HeedSeq2SeqTrainer, tmp_path / "run", model, given, generation_max_length=8, max_steps=1)
    (entry,) = [entry for entry in run.state.log_history if "reward" in entry]
    assert entry["reward"] < 0
    assert any(not torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_the_guides_command_and_reward_run(start, corpus, tmp_path, monkeypatch, printed):
    monkeypatch.chdir(tmp_path)
    text = text_of("rewards")
    Path("wishes.py").write_text("".join(python_of(text)), encoding="utf-8")
    assert reward_function("wishes:as_long")(["abc"], ["a"], ["b"]) == [-2]
    tree = tiny_tree(Path("runs/pairs"), {"decoding.max_length": 9, "validation.sentences": 5})
    Path("pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    shutil.copytree(start["model"]["start_from"], "runs/pairs/model")
    (command,) = commands_of(text, "train")
    name = "optimization.reward.name"
    more = ["optimization.max_updates=1", "validation.max_new_tokens=9", f"{name}=wishes:as_long"]
    assert "runs/rewarded/model" in printed(*shlex.split(command), *more)
    assert len(logged(Path("runs/rewarded"), "validation/chrf")) == 2
