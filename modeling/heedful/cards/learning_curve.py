"""Learning curves: losses and scores over the updates."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from heedful.evaluation.error_rates import ERROR_RATES
from heedful.figures import Panel, lines, save_figure
from heedful.files import check_writable
from heedful.messages_heed import wrong
from heedful.training.loop.monitoring import LOG_FILE, Curve, read_curves

logger = logging.getLogger(__name__)

CURVE_FILE = "learning_curve.png"
LOSSES = ("train/loss", "validation/loss")
RATES = tuple(f"validation/{name}" for name in ERROR_RATES)  # far above 100 at first, so in a separate panel
NO_SCORES = ("validation/loss", "validation/perplexity", *RATES)


def draw_learning_curves(runs: Sequence[Path], path: Path, metrics: Sequence[str] = ()) -> Path:
    """Draw one or several runs' losses and scores into one picture, .png or .svg, and return it.

    `metrics` selects others by their names in the logs, such as "validation/bleu", or by the last part, which may
    match several. A name that no run has logged is a `ValueError`.
    """
    check_writable(path, (".png", ".svg"), "--output")
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = list(map(str, runs))
    curves = {name: _curves_of(run) for name, run in zip(names, runs, strict=True)}
    known = list(dict.fromkeys(metric for found in curves.values() for metric in found))
    scores = [name for name in known if name.startswith("validation/") and name not in NO_SCORES]
    losses, rates = ([name for name in group if name in known] for group in (LOSSES, RATES))
    groups = [[name] for name in _chosen(metrics, known)] if metrics else [losses, scores, rates]
    if len(curves) > 1:  # a panel for each metric distinguishes the runs
        groups = [[name] for group in groups for name in group]
    save_figure([_panel(curves, group) for group in groups if group], path)
    return path


def leave_learning_curve(run: Path, folder: Path) -> str:
    """Draw a finished run's curve into a folder and return the file's name; after a failure warn, and return ""."""
    try:
        return draw_learning_curves([run], folder / CURVE_FILE).name
    except Exception as error:  # any error: a picture must not end a finished training
        logger.warning("no learning curve is drawn: %s", error)
        return ""


def _curves_of(run: Path) -> dict[str, Curve]:
    if not (run / LOG_FILE).is_file() and not (run / "checkpoints").is_dir():
        raise FileNotFoundError(f"`RUN` must be a run's folder, but {run} has no {LOG_FILE}.")
    if not (curves := read_curves(run)):
        raise ValueError(f"`RUN` must have logged something (`logging.every_updates`), but {run} has not.")
    return curves


def _chosen(metrics: Sequence[str], known: Sequence[str]) -> list[str]:
    chosen = []
    for metric in metrics:
        found = [name for name in known if metric in (name, name.rpartition("/")[2])]
        if not found:
            raise wrong("--metric", f"be one that was logged ({', '.join(known)})", metric)
        chosen += found
    return list(dict.fromkeys(chosen))


def _panel(curves: dict[str, dict[str, Curve]], group: Sequence[str]) -> Panel:
    missing = [(math.nan, math.nan)]  # keeps the run's colour and legend
    drawn = {
        run if len(group) == 1 else metric: found.get(metric, missing)
        for run, found in curves.items()
        for metric in group
    }
    title = "train/loss: as trained, with any\ndropout and label smoothing" if "train/loss" in group else ""
    kind = "loss" if group[0] in LOSSES else "error rate in %" if group[0] in RATES else "score"
    (label,) = group if len(group) == 1 else [kind]
    families = None
    if not "".join(drawn).isascii():
        from heedful.attention import drawing  # slow to import

        (names,), style = drawing.writable(list(drawn))
        drawn, families = dict(zip(names, drawn.values(), strict=True)), style["family"]
    return lines(drawn, "update", label, title, families=families)
