"""Dilution: what one score can keep of the attention among n, on paper and in a trained model.

Attention weights are a softmax (equation 1) and add up to 1. One score that stands a given distance above all others
keeps less and less of them the more others there are: its odds are e^distance / (n - 1). To look at one token as
sharply in a sentence twice as long, a model has to make the distance larger by ln 2. Whether a trained one does so
shows in the entropy of its attention.
"""

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from heedful.studies.figures import draw_lines, new_figure
from heedful.studies.study import Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

SCORE = 3.0  # of the one
OTHERS = (0.0, 1.0)  # of all others
LENGTHS = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
JOINED_IN_TRAINING = (1, 2)  # sentences that are read as one
JOINED_IN_MEASURE = (1, 2, 3, 4, 6, 8)
PAIRS = {"train": 24_000, "validation": 200, "test": 200}
MEASURED = 25  # texts of each number of sentences
KINDS = ("encoder", "decoder", "cross")

Rows = dict[tuple[str, int, int], list[tuple[int, float]]]  # (kind, layer, head): tokens to look at, entropy


def kept_weight(score: float, others: float, count: int) -> float:
    """Return the softmax weight of one score among `count - 1` others that are all equal."""
    return 1 / (1 + (count - 1) * math.exp(others - score))


def joined_pairs(split: str, sentences: tuple[int, ...], count: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of texts from sentences of the built-in corpus one after the other, and their translations.

    Args:
        split: Of the corpus.
        sentences: Numbers of sentences in a text, in turn.
        count: Number of texts.
        seed: Of the corpus.
    """
    from heedful.data.korean_english.pairs import korean_english_pairs

    sizes = [sentences[number % len(sentences)] for number in range(count)]
    pairs = iter(list(korean_english_pairs(split, sum(sizes), seed)))
    groups = [[next(pairs) for _ in range(size)] for size in sizes]
    return [(" ".join(pair["ko"] for pair in group), " ".join(pair["en"] for pair in group)) for group in groups]


def attention_rows(training: Training, pairs: list[tuple[str, str]]) -> Rows:
    """Measure the entropy in nats of every row of attention weights of a model, along the given translations.

    Args:
        training: The model's.
        pairs: Source and target texts.

    Returns:
        By kind of attention, layer and head: for every row, how many tokens it could look at, and its entropy.
    """
    import torch

    translator = training.translator()
    model, tokenizers = translator.model, translator.tokenizers
    rows: Rows = defaultdict(list)
    for source, target in pairs:
        source_ids, target_ids = tokenizers.encode_source([source])[0], tokenizers.encode_target([target])[0]
        fed_ids = [model.config.decoder_start_token_id, *target_ids[:-1]]
        with torch.inference_mode():
            outputs = model(
                input_ids=torch.tensor([source_ids]),
                decoder_input_ids=torch.tensor([fed_ids]),
                output_attentions=True,
                use_cache=False,
            )
        for kind in KINDS:
            for layer, weights in enumerate(outputs[f"{kind}_attentions"]):  # (1, heads, rows, columns)
                entropies = torch.special.entr(weights[0]).sum(-1)
                for head, values in enumerate(entropies.tolist()):
                    seen = range(1, len(values) + 1) if kind == "decoder" else [weights.shape[-1]] * len(values)
                    rows[kind, layer, head] += list(zip(seen, values, strict=True))
    return rows


def by_length(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return the mean entropy over rows with about as many tokens to look at: of each half of a doubling one."""
    bins = defaultdict(list)
    for seen, entropy in points:
        bins[round(2 * math.log2(seen))].append((seen, entropy))
    means = [(_mean([seen for seen, _ in rows]), _mean([entropy for _, entropy in rows])) for rows in bins.values()]
    return sorted(means)


def growth(points: list[tuple[int, float]]) -> float:
    """Return the slope of entropy over ln n: 1 where attention is spread as over equal scores, 0 where it stays."""
    xs, ys = [math.log(seen) for seen, _ in points], [entropy for _, entropy in points]
    x_mean, y_mean = _mean(xs), _mean(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / sum((x - x_mean) ** 2 for x in xs)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def run(lab: Lab) -> Outcome:
    """Compute the weights, train a model on texts of one and two sentences, and measure its attention."""
    weights = Table(
        "weights",
        f"What one score of {SCORE:g} among n scores keeps",
        ("n", *(f"others are {others:g}" for others in OTHERS)),
        [(n, *(kept_weight(SCORE, others, n) for others in OTHERS)) for n in LENGTHS],
        {f"others are {others:g}": ".1%" for others in OTHERS},
    )
    training = lab.train("translator", _data(lab))
    pairs = [
        pair
        for sentences in JOINED_IN_MEASURE
        for pair in joined_pairs("test", (sentences,), MEASURED, lab.seed + sentences)
    ]
    rows = attention_rows(training, pairs)
    values = {f"kept_{others:g}_{n}": kept_weight(SCORE, others, n) for others in OTHERS for n in (10, 100)}
    values |= {"bleu": training.metrics["test"]["bleu"], "sentences": max(JOINED_IN_MEASURE)}
    return Outcome(
        [weights, _entropy_table(rows), _head_table(rows)],
        [
            Figure("weights", "The weight that one score keeps, by the number of scores.", _draw_weights()),
            Figure("entropy", "Entropy of attention by the number of tokens, mean of each head.", _draw_entropy(rows)),
        ],
        values | _values(rows),
        [
            "One score of 3 among scores of 0 keeps a weight of {kept_0_10:.1%} at n = 10 and {kept_0_100:.1%} at "
            "n = 100; among scores of 1, {kept_1_10:.1%} and {kept_1_100:.1%}.",
            "A model trained on texts of one and two sentences gets {bleu:.1f} BLEU on others of that length. On "
            "texts of up to {sentences} its entropy grows with ln n by {growth_encoder:.2f} in the encoder, by "
            "{growth_decoder:.2f} in the decoder and by {growth_cross:.2f} in cross-attention (means over heads; over "
            "equal scores it grows by 1).",
            "The head that is diluted least ({least_head}) has {least:.2f}, the one diluted most ({most_head}) "
            "{most:.2f}.",
        ],
    )


def _data(lab: Lab) -> dict[str, object]:
    files = {
        split: lab.write_pairs(joined_pairs(split, JOINED_IN_TRAINING, count, lab.seed))
        for split, count in PAIRS.items()
    }
    return {"data.train": files["train"], "data.validation": files["validation"], "data.test": {"test": files["test"]}}


def _values(rows: Rows) -> dict[str, float | str]:
    slopes = {key: growth(points) for key, points in rows.items()}
    least, most = min(slopes, key=slopes.__getitem__), max(slopes, key=slopes.__getitem__)
    means = {f"growth_{kind}": _mean([slopes[key] for key in slopes if key[0] == kind]) for kind in KINDS}
    return {
        **means,
        "least": slopes[least],
        "least_head": _told_head(least),
        "most": slopes[most],
        "most_head": _told_head(most),
    }


def _told_head(key: tuple[str, int, int]) -> str:
    kind, layer, head = key
    return f"{kind}, layer {layer}, head {head}"


def _entropy_table(rows: Rows) -> Table:
    """Make the table of mean entropies by kind and length, as a part of what equal scores would give."""
    cells = []
    for kind in KINDS:
        points = [point for key, some in rows.items() if key[0] == kind for point in some]
        for seen, entropy in by_length(points):
            if seen >= 4:
                cells.append((kind, seen, entropy, math.exp(entropy), entropy / math.log(seen)))
    columns = ("attention", "tokens to look at", "entropy", "effective tokens", "of the entropy over equal scores")
    formats = dict(zip(columns[1:], (".0f", ".2f", ".1f", ".0%"), strict=True))
    return Table("entropy", "Entropy of attention in nats, mean over layers, heads and rows", columns, cells, formats)


def _head_table(rows: Rows) -> Table:
    cells = [(kind, layer, head, growth(rows[kind, layer, head])) for kind, layer, head in sorted(rows)]
    columns = ("attention", "layer", "head", "growth with ln n")
    return Table("heads", "Growth of the entropy by head", columns, cells, {"growth with ln n": ".2f"})


def _draw_weights() -> "Picture":
    figure = new_figure()
    lines = {
        f"{SCORE:g} among {others:g}": [(n, kept_weight(SCORE, others, n)) for n in range(2, 1001)]
        for others in OTHERS
    }
    draw_lines(figure.axes[0], lines, "number of scores n", "weight of the one", log="x")
    return figure


def _draw_entropy(rows: Rows) -> "Picture":
    figure = new_figure(1, len(KINDS))
    for axes, kind in zip(figure.axes, KINDS, strict=True):
        heads = {key: by_length(points) for key, points in rows.items() if key[0] == kind}
        lines = {f"layer {layer}, head {head}": points for (_, layer, head), points in heads.items()}
        longest = max(seen for points in lines.values() for seen, _ in points)
        lines["equal scores"] = [(n, math.log(n)) for n in (1, longest)]
        draw_lines(axes, lines, "tokens to look at", "entropy in nats", log="x")
        axes.legend(fontsize=6)
        axes.set_title(kind)
    return figure


STUDY = Study(
    "dilution",
    "What does one token keep of the attention, the more others there are?",
    run,
    {
        "data.source": "source",
        "data.target": "target",
        "decoding.max_length": 128,
        "model.options.position_encoding": "rotary",  # learns the fastest, see the study of positions
    },
    data="none",
)
