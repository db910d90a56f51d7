"""Robustness: translations of sources with words swapped, left out, or inserted."""

from collections.abc import Sequence
from random import Random

from heedful.figures import lines
from heedful_lab.studies.measures import score
from heedful_lab.studies.pairs import Pair, corpus_pairs, held_out_pairs
from heedful_lab.studies.recurrent.equal_models import recurrent_models
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab

KINDS = {"swapped": "swapped with the next", "left_out": "left out", "inserted": "inserted"}
SHARES = (0.0, 0.1, 0.2, 0.4)
PAIRS = 200
OTHERS = "builtin:validation:300"  # sources of inserted words


def changed_source(source: str, kind: str, share: float, random: Random, others: Sequence[str]) -> str:
    """Return a source with a share of its words swapped with the next, left out, or preceded by one of `others`."""
    words, changed = source.split(), list[str]()
    while words:
        word, is_changed = words.pop(0), random.random() < share
        if is_changed and kind == "swapped" and words:
            changed += [words.pop(0), word]
        elif is_changed and kind == "inserted":
            changed += [random.choice(others), word]
        elif not (is_changed and kind == "left_out" and (words or changed)):
            changed.append(word)
    return " ".join(changed)


def changed_pairs(pairs: Sequence[Pair], kind: str, share: float, seed: int) -> list[Pair]:
    """Return pairs with changed sources and the same targets; the seed determines the changes."""
    random = Random(seed)
    others = [word for source, _ in corpus_pairs(OTHERS) for word in source.split()]
    return [(changed_source(source, kind, share, random, others), target) for source, target in pairs]


def run(lab: Lab) -> Outcome:
    """Train all models alike, and translate changed sources."""
    trainings = {name: lab.train(name, changes) for name, changes in recurrent_models().items()}
    trainings["Transformer"] = lab.train("Transformer")
    pairs = held_out_pairs()[:PAIRS]
    changed = {(kind, share): changed_pairs(pairs, kind, share, lab.seed) for kind in KINDS for share in SHARES}
    scores: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for name, training in trainings.items():
        translator = training.translator()
        whole = score(translator, pairs)
        for kind, found in scores.items():
            found[name] = [whole, *(score(translator, changed[kind, share]) for share in SHARES[1:])]
    rows, panels = dict[str, list[tuple[Cell, ...]]](), []
    for kind, found in scores.items():
        rows[kind] = [(name, *one, one[-1] / max(one[0], 1e-9)) for name, one in found.items()]
        curves = {name: list(zip(SHARES, one, strict=True)) for name, one in found.items()}
        panels.append(lines(curves, f"share of words {KINDS[kind]}", "BLEU"))
    return Outcome(rows, {"bleu": panels}, settings={"pairs": len(pairs)})
