"""Paths: the number of cells between a word and its translation in whole models, found by gradient.

If the word's gradient does not arrive when the memory is cut before a step, that step is on each path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from heedful import HeedConfig, HeedForConditionalGeneration, HeedRNNConfig, HeedRNNForConditionalGeneration
from heedful.cells_heed import Cell
from heedful.figures import lines
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab, description_of

LENGTHS = (3, 6, 12, 24)  # words; "I love you" has three in Korean
DESCRIPTION = description_of(__file__)
MODELS: dict[str, dict[str, Any]] = DESCRIPTION["models"]
VOCABULARY = 64


def make_model(name: str) -> Any:
    """Return a model with random weights in float64, in evaluation mode."""
    if name == "Transformer":
        return HeedForConditionalGeneration(HeedConfig(vocab_size=VOCABULARY, **MODELS[name])).double().eval()
    options = {**DESCRIPTION["recurrent"], **MODELS[name]}
    return HeedRNNForConditionalGeneration(HeedRNNConfig(vocab_size=VOCABULARY, **options)).double().eval()


@contextmanager
def cut_before(model: Any, number: int | None) -> Iterator[list[Cell]]:
    """Yield the cells of all steps in order; step `number` gets a state without gradient."""
    steps: list[Cell] = []
    cells = [module for module in model.modules() if isinstance(module, Cell)]

    def cutting(cell: Cell) -> Any:
        step = cell.step

        def run(read: torch.Tensor, state: Any) -> Any:
            steps.append(cell)
            return step(read, tuple(part.detach() for part in state) if len(steps) - 1 == number else state)

        return run

    for cell in cells:
        cell.step = cutting(cell)
    try:
        yield steps
    finally:
        for cell in cells:
            del cell.step


def arrives(model: Any, length: int, place: int) -> bool:
    """Return True if the first source word has a gradient from the target word at a place, from 0."""
    ids = torch.arange(4, 4 + length)[None]
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, decoder_input_ids=ids).logits  # (1, length, V)
    outcome = logits[0, place] @ torch.randn_like(logits[0, place])
    (gradient,) = torch.autograd.grad(outcome, embedded, allow_unused=True)  # None if all paths are cut
    return gradient is not None and bool((gradient[0, 0] != 0).any())


def cells_between(model: Any, length: int, place: int) -> int:
    """Return the number of cells on all paths from the first source word to a target place; without cells, 1."""
    with cut_before(model, None) as steps:
        assert arrives(model, length, place)
    severing = 0
    for number in range(len(steps)):
        with cut_before(model, number):
            severing += not arrives(model, length, place)
    return 1 + severing


def run(lab: Lab) -> Outcome:
    """Find the paths of first and last target words, in each model and length."""
    torch.manual_seed(lab.seed)
    rows: list[tuple[Any, ...]] = []
    curves = {}
    for name in MODELS:
        model = make_model(name)
        found = {n: [cells_between(model, n, place) for place in (0, n - 1)] for n in LENGTHS}
        rows += [(name, n, *both) for n, both in found.items()]
        curves[name] = [(n, last) for n, (_, last) in found.items()]
    return Outcome({"paths": rows}, {"paths": [lines(curves, "words of source and target", "cells")]})
