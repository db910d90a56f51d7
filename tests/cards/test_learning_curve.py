"""Learning curves: what a log holds is drawn, of one run or of several; what cannot be drawn is named."""

import json
import sys

import pytest

from heedful.cards.learning_curve import draw_learning_curves, leave_learning_curve, read_curves
from helpers import assert_refused

LINES = [
    {"update": 50, "seconds": 1.0, "train/loss": 5.0, "train/learning_rate": 0.1},
    {"update": 100, "seconds": 2.0, "train/loss": 3.0, "train/learning_rate": 0.2},
    {"update": 100, "seconds": 2.0, "validation/loss": 2.5, "validation/perplexity": 12.2, "validation/bleu": 20.0},
]
FIRST, SECOND = "#1f77b4", "#ff7f0e"  # matplotlib's colours


def run_of(folder, lines=LINES):
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path / "run")


def drawn(runs, path, metrics=()):
    return draw_learning_curves(runs, path.with_suffix(".svg"), metrics).read_text(encoding="utf-8")


def test_a_run_is_drawn_with_its_losses_and_scores_to_the_same_bytes_and_metrics_found_by_name(run, tmp_path):
    pytest.importorskip("matplotlib")
    text = drawn([run], tmp_path / "a")
    for name in ("train/loss", "validation/loss", "validation/bleu", ">update<", ">loss<"):
        assert name in text
    assert "perplexity" not in text
    assert "learning_rate" not in text
    first = draw_learning_curves([run], tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert draw_learning_curves([run], tmp_path / "a.png").read_bytes() == first
    text = drawn([run], tmp_path / "a", ["loss", "train/learning_rate", "train/loss"])
    shown = [name for name in read_curves(run) if f">{name}<" in text]
    assert shown == ["train/loss", "train/learning_rate", "validation/loss"]
    short = run_of(tmp_path / "short", LINES[:1])
    text = drawn([short, run], tmp_path / "a", ["validation/loss"])
    assert "validation/loss" in text
    assert SECOND in text
    assert FIRST in text  # in the legend


def test_runs_are_named_in_one_picture_and_many_metrics_fill_rows_error_rates_one_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [run_of(tmp_path / name) for name in ("한국어", "_b", "$x$")]
    text = drawn(runs, tmp_path / "a")
    for name in ("한국어", "_b", "$x$"):
        assert text.count(f">{name}<") == 1  # in the first of the panels of both losses and of the score
    (tmp_path / "other").mkdir()
    twins = [tmp_path / "_b", run_of(tmp_path / "other" / "_b")]
    assert all(f">{path}<" in drawn(twins, tmp_path / "a") for path in twins)
    more = {f"validation/metric_{number}": float(number) for number in range(5)}
    runs = [run_of(tmp_path / name, [*LINES[:2], {"update": 100, **more}]) for name in "ab"]
    text = drawn(runs, tmp_path / "c")
    assert text.count("label smoothing") == 1
    assert "label smoothing" not in drawn(runs, tmp_path / "d", ["metric_1"])
    rates = {"update": 100, "seconds": 2.0, "validation/token_error_rate": 400.0, "validation/character_error_rate": 9}
    text = drawn([run_of(tmp_path / "run", [*LINES, rates])], tmp_path / "a")
    for name in (">error rate in %<", ">validation/character_error_rate<", ">validation/bleu<", ">loss<"):
        assert text.count(name) == 1, name
    assert ">400<" in text


def test_half_a_line_of_a_log_is_left_out(run):
    with (run / "log.jsonl").open("a") as log:
        log.write('{"update": 150, "train/loss": 2\n[3]\n{"train/loss": 1}\n{"update": 200, "train/loss": NaN}\n')
        log.write('{"update": 250, "train/loss": 1.5}\n')
    assert read_curves(run)["train/loss"] == [(50, 5.0), (100, 3.0), (250, 1.5)]
    assert "seconds" not in read_curves(run)


def test_what_cannot_be_drawn_is_named_and_fails_no_run(run, tmp_path, monkeypatch, caplog):
    empty = run_of(tmp_path / "empty", [])
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    nothing, a = r"`RUN` must have logged something \(`logging.every_updates`\), but", tmp_path / "a.png"
    metric = r"`--metric` must be one that was logged \(train/loss, .*, validation/bleu\), but is ter instead"
    cases = [
        (([run, tmp_path], a), r"`RUN` must be a run's folder, but .* has no log\.jsonl"),
        *((([other], a), nothing) for other in (empty, tmp_path / "begun")),
        (([run], a, ["ter"]), metric),
        (([run], tmp_path / "a.gif"), r"`--output` must end in one of \.png, \.svg, but is .*a\.gif instead"),
    ]
    assert_refused(cases, lambda given: draw_learning_curves(*given), (ValueError, FileNotFoundError))
    assert not list(tmp_path.glob("a.*"))
    assert leave_learning_curve(tmp_path / "none", tmp_path) == ""
    assert "no learning curve is drawn: `RUN` must be" in caplog.text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert leave_learning_curve(run, tmp_path) == ""
    assert "no learning curve is drawn: matplotlib must be installed: pip install 'heedful[plots]'" in caplog.text
    assert not (tmp_path / "learning_curve.png").exists()
