"""Cells: plain, LSTM and GRU with equal parameters and recipes, and the gates along a sentence."""

from statistics import fmean
from typing import Any

import torch

from heedful.attention.drawing import writable
from heedful.data.labels import token_labels
from heedful.decoding.translation import Translator
from heedful.figures import Panel
from heedful_lab.course.gates import record_gates
from heedful_lab.figures import bars, matrix
from heedful_lab.studies.measures import seed_cells, train_with_seeds
from heedful_lab.studies.pairs import held_out_pairs
from heedful_lab.studies.recurrent.equal_models import recurrent_models
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab

GATED = ("LSTM", "GRU", "LSTM + attention", "GRU + attention")
ENCODER = "encoder.layers.0.first_cell"
FEW, SEEDS = 3000, 3  # pairs to learn by heart, and trainings of each model
MEASURED = 200  # test sources with recorded gates
CLOSED, OPEN = 0.1, 0.9


def encoder_gates(translator: Translator, source: str) -> dict[str, torch.Tensor]:
    """Return the gates of the encoder's cell along a source, `(tokens, hidden_size)`, without the candidate."""
    (ids,) = translator.tokenizers.encode_source([source])
    gates = record_gates(translator.model, ids)[ENCODER]
    return {name: values for name, values in gates.items() if name != "candidate"}


def run(lab: Lab) -> Outcome:
    """Train each cell with and without attention, record gates, and train on few pairs."""
    models = recurrent_models()
    trainings = {name: lab.train(name, changes) for name, changes in models.items()}
    sources = [source for source, _ in held_out_pairs()[:MEASURED]]
    rows, few, drawn = list[tuple[Any, ...]](), list[tuple[Any, ...]](), {}
    for name in GATED:
        translator = trainings[name].translator()
        recorded = [encoder_gates(translator, source) for source in sources]
        for gate in recorded[0]:
            opened = torch.cat([one[gate] for one in recorded])
            shares = [share.double().mean().item() for share in (opened, opened < CLOSED, opened > OPEN)]
            rows.append((name, gate, *shares))
        if "attention" in name:
            drawn[name.split()[0].lower()] = _panels(translator, sources[0], recorded[0])
    options = {name: one.changes["model.options"] for name, one in trainings.items()}
    quality: list[tuple[Any, ...]] = [
        (name, options[name]["hidden_size"], one.parameters, one.loss, one.bleu()) for name, one in trainings.items()
    ]
    for name, width in (("LSTM", 123), ("GRU", 141), ("GRU", 123)):  # GRUs of the LSTM's size and width
        changes = models[f"{name} + attention"] | {"data.train": f"builtin:train:{FEW}"}
        changes["model.options"] = changes["model.options"] | {"hidden_size": width, "label_smoothing": 0.0}
        runs = train_with_seeds(lab, f"{name} {width}, {FEW:,} pairs", changes, SEEDS)
        few.append((name, width, *seed_cells(runs), fmean(one.curve("train/loss")[-1][1] for one in runs)))
    counts = [row[2] for row in quality]
    return Outcome(
        {"quality": quality, "few": few, "gates": rows},
        {"bleu": [bars({name: row[-1] for name, *row in quality}, "BLEU")], **drawn},
        {"fewest": min(counts), "most": max(counts)},
        {"sources": MEASURED, "closed": CLOSED, "open": OPEN, "sentence": sources[0], "few": FEW, "seeds": SEEDS},
    )


def _panels(translator: Translator, source: str, gates: dict[str, torch.Tensor]) -> list[Panel]:
    """Draw each gate: a column for each token, a row for each unit, the most open one at the top."""
    (ids,) = translator.tokenizers.encode_source([source])
    (labels,), style = writable(token_labels(translator.tokenizers.source, ids))
    image = {"cmap": "viridis", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}

    def panel_of(name: str, values: torch.Tensor) -> Panel:
        units = values.mean(0).argsort(descending=True)
        draw_matrix = matrix(values[:, units].T.numpy(), image=image, title=f"{name} gate", ylabel="unit")

        def draw(axes: Any) -> None:
            draw_matrix(axes)
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8, **style)

        return draw

    return [panel_of(name, values) for name, values in gates.items()]
