"""Cells: a plain one, LSTM and GRU with equal parameters and an equal recipe, and what gates do over a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from heedful.figures import Panel, bars, matrix
from heedful.inference.attention.drawing import writable
from heedful.inference.attention.labels import token_labels
from heedful.inference.attention.recording import record_gates
from heedful.inference.translation import Translator
from heedful.studies.pairs import held_out_pairs
from heedful.studies.recurrent.equal_models import TRAINING, key_of, recurrent_models
from heedful.studies.report import Outcome
from heedful.studies.study import Lab, Study, description_of

GATED = ("LSTM", "GRU", "LSTM + attention", "GRU + attention")
ENCODER = "encoder.layers.0.first_cell"
FEW, SEEDS = 1000, 3  # pairs that a model can learn by heart, and trainings on them
MEASURED = 200  # test sources whose gates are recorded
SENTENCE = 0  # the test source that is drawn
CLOSED, OPEN = 0.1, 0.9

Gates = dict[str, torch.Tensor]  # (tokens, hidden_size) of each, by name


def encoder_gates(translator: Translator, source: str) -> Gates:
    """Return the gates of the encoder's cell along a source, without the candidate, which is no gate."""
    (ids,) = translator.tokenizers.encode_source([source])
    gates = record_gates(translator.model, ids)[ENCODER]
    return {name: values for name, values in gates.items() if name != "candidate"}


def on_few_pairs(lab: Lab) -> list[tuple[Any, ...]]:
    """Train LSTM and GRU with attention on few pairs, GRUs as large as the LSTM and as wide, and score them on both."""
    models, rows = recurrent_models(), []
    data = {"data.train": f"builtin:train:{FEW}"}
    data["data.test"] = {"test": "builtin:test:500", "train": "builtin:train:500"}
    for name, size in (("LSTM", 123), ("GRU", 141), ("GRU", 123)):
        changes = models[f"{name} + attention"] | data
        changes["model.options"] = changes["model.options"] | {"hidden_size": size}
        for seed in range(lab.seed, lab.seed + SEEDS):
            one = replace(lab, seed=seed).train(f"{name}, {size} wide, {FEW} pairs, seed {seed}", changes)
            rows.append((f"{name}, {size} wide", one.parameters, seed, one.loss, one.bleu(), one.bleu("train")))
    return rows


def run(lab: Lab) -> Outcome:
    """Train each cell with and without attention, and record the gates of those that have some."""
    trainings = {name: lab.train(name, changes) for name, changes in recurrent_models().items()}
    sources = [source for source, _ in held_out_pairs()[:MEASURED]]
    rows, drawn = [], {}
    for name in GATED:
        translator = trainings[name].translator()
        recorded = [encoder_gates(translator, source) for source in sources]
        for gate in recorded[0]:
            values = torch.cat([one[gate] for one in recorded])
            shares = [share.double().mean().item() for share in (values, values < CLOSED, values > OPEN)]
            rows.append((name, gate, *shares))
        if "attention" in name:
            drawn[name.split()[0].lower()] = _panels(translator, sources[SENTENCE], recorded[SENTENCE])
    options = {name: one.changes["model.options"] for name, one in trainings.items()}
    quality = [
        (name, options[name]["hidden_size"], one.parameters, one.loss, one.bleu()) for name, one in trainings.items()
    ]
    return Outcome(
        {"quality": quality, "gates": rows},
        {"bleu": [bars({name: row[-1] for name, *row in quality}, "BLEU")], **drawn},
        _values(quality, rows),
        {"sources": len(sources), "closed": CLOSED, "open": OPEN, "sentence": sources[SENTENCE]},
    )


def _values(quality: Sequence[Sequence[Any]], gates: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
    counts = [row[2] for row in quality]
    values = {"fewest": min(counts), "most": max(counts)}
    values |= {f"bleu_{key_of(name)}": row[-1] for name, *row in quality}
    return values | {f"{gate}_{key_of(name)}": mean for name, gate, mean, *_ in gates}


def _panels(translator: Translator, source: str, gates: Gates) -> list[Panel]:
    """Draw each gate as a picture: a column for each token, a row for each unit, the most open one at the top."""
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


STUDY = Study.described(run, description_of(__file__), TRAINING)
