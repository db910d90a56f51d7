"""Dilution: one score's share of the attention among n, on paper and in a trained model's entropy."""

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, islice
from statistics import fmean, linear_regression

import torch

from heedful.attention.recording import Kind
from heedful.figures import Panel, lines
from heedful_lab.korean_english.pairs import korean_english_pairs
from heedful_lab.studies.measures import Head, attention_by_head
from heedful_lab.studies.pairs import Pair, joined_pairs
from heedful_lab.studies.report import Outcome
from heedful_lab.studies.study import Lab
from heedful_lab.studies.training import Training

SCORE = 3.0  # of one token
OTHERS = (0.0, 1.0)  # of the other tokens
LENGTHS = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
JOINED_IN_TRAINING = (1, 2)  # sentences joined in a text
JOINED_IN_MEASURE = (1, 2, 3, 4, 6, 8)
PAIRS = {"train": 24_000, "validation": 200, "test": 200}
MEASURED = 25  # texts for each number of sentences
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")  # in the order of the paper

Entropies = list[tuple[int, float]]  # visible tokens, entropy in nats
EntropiesByHead = dict[Head, Entropies]


def kept_weight(score: float, others: float, count: int) -> float:
    """Return a score's softmax weight among `count - 1` equal other scores."""
    return 1 / (1 + (count - 1) * math.exp(others - score))


def texts(split: str, sentences: Sequence[int], count: int, seed: int) -> list[Pair]:
    """Return texts and translations from the built-in corpus, with the numbers of `sentences` in turn."""
    sizes = list(islice(cycle(sentences), count))
    return joined_pairs([(row["ko"], row["en"]) for row in korean_english_pairs(split, sum(sizes), seed)], sizes)


def attention_rows(training: Training, pairs: Sequence[Pair]) -> EntropiesByHead:
    """Return the entropy of each attention row, with the given translations as input."""
    rows: EntropiesByHead = defaultdict(list)
    for weights_by_head in attention_by_head(training.translator(), pairs):
        for head, weights in weights_by_head.items():
            values = torch.special.entr(weights).sum(-1).tolist()
            seen = range(1, len(values) + 1) if head.kind == "decoder" else [weights.shape[-1]] * len(values)
            rows[head] += zip(seen, values, strict=True)
    return rows


def by_length(points: Entropies) -> list[tuple[float, float]]:
    """Return mean (visible tokens, entropy) of rows of similar length, in two groups for each doubling."""
    bins = defaultdict(list)
    for seen, entropy in points:
        bins[round(2 * math.log2(seen))].append((seen, entropy))
    return sorted((fmean(seen for seen, _ in rows), fmean(entropy for _, entropy in rows)) for rows in bins.values())


def growth(points: Entropies) -> float:
    """Return the slope of entropy over ln n: 1 for equal scores, 0 for constant entropy."""
    return linear_regression([math.log(seen) for seen, _ in points], [entropy for _, entropy in points]).slope


def train_on_texts(lab: Lab) -> Training:
    """Train a translator on texts of one and two sentences."""
    data = {split: texts(split, JOINED_IN_TRAINING, count, lab.seed) for split, count in PAIRS.items()}
    return lab.train("translator", lab.write_data(**data))


def run(lab: Lab) -> Outcome:
    """Compute the weights, train a model on texts of one and two sentences, and measure its attention."""
    training = train_on_texts(lab)
    pairs = [pair for number in JOINED_IN_MEASURE for pair in texts("test", (number,), MEASURED, lab.seed + number)]
    rows = attention_rows(training, pairs)
    slopes = {key: growth(rows[key]) for key in sorted(rows)}
    extremes = {"least": min(slopes, key=slopes.__getitem__), "most": max(slopes, key=slopes.__getitem__)}
    values = {f"growth_{kind}": fmean(slope for key, slope in slopes.items() if key.kind == kind) for kind in KINDS}
    values |= {name: slopes[key] for name, key in extremes.items()}
    heads = {f"{name}_head": "{}, layer {}, head {}".format(*key) for name, key in extremes.items()}
    entropies = [  # the last relative to equal scores
        (kind, seen, entropy, math.exp(entropy), entropy / math.log(seen))
        for kind in KINDS
        for seen, entropy in by_length([point for key, some in rows.items() if key.kind == kind for point in some])
        if seen >= 4
    ]
    return Outcome(
        {
            "weights": [(n, *(kept_weight(SCORE, others, n) for others in OTHERS)) for n in LENGTHS],
            "entropy": entropies,
            "heads": [(*key, slope) for key, slope in slopes.items()],
        },
        _panels(rows),
        {**values, **heads, "bleu": training.bleu()},
        {"score": SCORE},
    )


def _panels(rows: EntropiesByHead) -> dict[str, list[Panel]]:
    numbers = range(2, LENGTHS[-1] + 1)
    weights = {f"{SCORE:g} among {one:g}": [(n, kept_weight(SCORE, one, n)) for n in numbers] for one in OTHERS}
    entropies = []
    for kind in KINDS:
        own = {key: points for key, points in rows.items() if key.kind == kind}
        heads = {f"layer {key.layer}, head {key.number}": by_length(points) for key, points in own.items()}
        longest = max(seen for points in heads.values() for seen, _ in points)
        equal = {"equal scores": [(n, math.log(n)) for n in (1, longest)]}
        entropies.append(lines(heads | equal, "tokens to look at", "entropy in nats", kind, log="x"))
    kept = lines(weights, "number of scores n", "weight of the one", log="x")
    return {"weights": [kept], "entropy": entropies}
