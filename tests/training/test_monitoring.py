"""What a run tells of itself is what happened."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from heedful import HeedConfig, HeedForConditionalGeneration
from heedful.data.micro_batches import split_update
from heedful.training.loop import feed
from heedful.training.loop import loop as loop_module
from heedful.training.loop.monitoring import RunLog, training_values
from heedful.training.run_folder.progress import Progress, new_window
from heedful.training.speed import throughput
from heedful.training.speed.throughput import operations_of_pairs
from row_lengths import padding_share
from tiny_runs import logged


def test_values_are_ratios_of_the_sums():
    window = new_window() | {"loss": 30.0, "target_tokens": 20.0, "tokens": 36.0, "padded_tokens": 40.0}
    window |= {"gradient_norm": 5.0, "updates": 2.0, "seconds": 4.0, "waiting_seconds": 1.0}
    assert training_values(window) == {
        "train/loss": 1.5,
        "train/perplexity": pytest.approx(math.exp(1.5)),
        "train/gradient_norm": 2.5,
        "train/target_tokens_per_s": 5.0,
        "train/padding_share": pytest.approx(0.1),
        "train/waiting_share": 0.25,
    }
    values = training_values(new_window())  # no update at all
    assert "train/target_tokens_per_s" in values
    assert not {"train/loss", "train/perplexity", "train/gradient_norm"} & values.keys()
    assert all(math.isfinite(value) for value in values.values())


def test_every_value_is_logged_and_the_gradients_norm_is_that_before_clipping(make_loop, monkeypatch, tmp_path):
    norms = {}
    for limit in (None, 0.01):
        loop = make_loop(
            {"optimization.token_budget": 500, "optimization.max_grad_norm": limit}, tmp_path / str(limit)
        )
        step, found = loop.engine.optimizer.step, norms.setdefault(limit, [])

        def look_and_step(step=step, loop=loop, found=found):
            found.append(torch.cat([weight.grad.flatten() for weight in loop.engine.model.parameters()]).norm().item())
            step()

        monkeypatch.setattr(loop.engine.optimizer, "step", look_and_step)
        loop.run()
    assert norms[0.01] == pytest.approx([0.01] * 6, rel=1e-3)
    free, clipped = (logged(tmp_path / name, "train/gradient_norm") for name in ("None", "0.01"))
    assert free == pytest.approx(norms[None], rel=1e-5)
    assert clipped[0] == pytest.approx(free[0], rel=1e-6)
    (tmp_path / "None").rename(tmp_path / "run")
    names = "perplexity", "learning_rate", "target_tokens_per_s", "padding_share", "waiting_share", "skipped_updates"
    assert [len(logged(tmp_path / "run", f"train/{name}")) for name in names] == [6] * len(names)
    assert logged(tmp_path / "run", "train/perplexity") == pytest.approx(
        [math.exp(loss) for loss in logged(tmp_path / "run", "train/loss")]
    )


def test_the_padding_share_is_that_of_the_batches(make_loop, tmp_path):
    loop = make_loop({"optimization.token_budget": 500, "logging.every_updates": 6})
    updates = [update for epoch in (0, 1) for update in loop.corpus.updates(epoch)][:6]
    rows, batches = [], []
    for update in updates:
        for part in split_update(update, loop.token_budget, loop.accelerator.num_processes)[0]:
            batches.append(range(len(rows), len(rows) + len(part)))
            rows += part
    expected = padding_share(batches, [len(row["input_ids"]) for row in rows], [len(row["labels"]) for row in rows])
    loop.run()
    assert expected > 0.01
    assert logged(tmp_path / "run", "train/padding_share") == [pytest.approx(expected)]


def test_a_mean_over_updates_is_weighted_by_tokens(make_loop, tmp_path):
    make_loop({}, tmp_path / "single").run()
    make_loop({"logging.every_updates": 3}, tmp_path / "several").run()
    loop = make_loop({}, tmp_path / "counted")
    counts = [sum(len(row["labels"]) for bucket in update for row in bucket) for update in loop.corpus.updates(0)][:3]
    losses = logged(tmp_path / "single", "train/loss")[:3]
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert len(set(counts)) > 1
    assert logged(tmp_path / "several", "train/loss")[0] == pytest.approx(mean, rel=1e-9)


def test_waiting_for_data_is_told(make_loop, monkeypatch, tmp_path):
    clock, collate = SimpleNamespace(now=0.0), feed.collate

    def collate_for_three_seconds(*arguments):
        clock.now += 3
        return collate(*arguments)

    monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(feed, "collate", collate_for_three_seconds)
    loop = make_loop({"optimization.max_updates": 2})
    step = loop.engine.step

    def step_for_a_second(*arguments):
        clock.now += 1
        return step(*arguments)

    monkeypatch.setattr(loop.engine, "step", step_for_a_second)
    loop.run()
    shares = logged(tmp_path / "run", "train/waiting_share")
    assert len(shares) == 2
    assert all(0.7 < share < 1 for share in shares)  # 3 seconds of 4 with one micro-batch, more with several


def test_a_log_is_rewound_to_an_update(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", Accelerator(cpu=True), model=None)
    log.rewind(Progress(update=3))
    for update in (1, 2, 3):
        log.write(Progress(update=update), {"train/loss": 1.0})
        log.write(Progress(update=update), {"validation/loss": 1.0})
    log.file.write_text(log.file.read_text() + '{"update": 2, "tra')
    log.rewind(Progress(update=2, validated_update=1))
    lines = [json.loads(line) for line in log.file.read_text().splitlines()]
    assert [(line["update"], *[name for name in line if "/" in name]) for line in lines] == [
        (1, "train/loss"),
        (1, "validation/loss"),
        (2, "train/loss"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_step_s_operations_are_counted_by_the_matrices_that_its_tokens_are_multiplied_with():
    layers, width, inner, vocabulary = 2, 16, 24, 50
    stack = {"layers": layers, "ffn_dim": inner, "attention_heads": 2}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in stack.items()}
    for options in ({}, {"tie_output_embeddings": False}, {"position_encoding": "learned"}):
        model = HeedForConditionalGeneration(HeedConfig(vocab_size=vocabulary, d_model=width, **sizes, **options))
        of_source = layers * (4 * width**2 + 2 * width * inner) + 2 * layers * width**2
        of_target = layers * (6 * width**2 + 2 * width * inner) + width * vocabulary
        assert operations_of_pairs(model, 30, 20) == 6 * (30 * of_source + 20 * of_target)


def test_a_gpu_s_share_of_its_peak_and_its_memory_are_in_the_log_and_the_bar(make_loop, monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "peak_operations", lambda device: 1e12)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1.25 * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    loop = make_loop()
    of_log = SimpleNamespace(device=torch.device("cuda"), num_processes=1, is_main_process=True)
    of_log.log = loop.accelerator.log
    loop.log.accelerator = of_log
    write, told = loop.log.write_training, []
    monkeypatch.setattr(loop.log, "write_training", lambda *given: told.append(write(*given)) or told[-1])
    loop.run()
    shares = logged(tmp_path / "run", "train/model_flops_utilization")
    assert len(shares) == 6
    speeds = logged(tmp_path / "run", "train/target_tokens_per_s")
    per_token = operations_of_pairs(loop.engine.network, 0, 1)
    assert all(share > speed * per_token / 1e12 for share, speed in zip(shares, speeds, strict=True))
    assert logged(tmp_path / "run", "train/peak_memory_gib") == [1.25] * 6
    assert re.fullmatch(r"loss \d.\d+, [\d,]+ target tokens/s, \d+% of the card's peak, 1.2 GiB, waits \d+%", told[-1])
