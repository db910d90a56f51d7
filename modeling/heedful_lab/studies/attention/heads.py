"""Heads: one, four or eight of the same cost, what each attends to, and which can be left out."""

from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from heedful.data.labels import token_labels
from heedful.decoding.translation import Translator
from heedful.figures import Panel, lines
from heedful_lab.figures import matrix
from heedful_lab.studies import measures
from heedful_lab.studies.attention import single_heads
from heedful_lab.studies.attention.single_heads import PLACES, Head, Look, sharpest
from heedful_lab.studies.pairs import Pair, corpus_pairs, held_out_pairs
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab

COUNTS = (1, 4, 8)
LOOKED_AT = 4  # heads of the model with measured heads
PRUNED = (4, 8)
SEEDS = 2
SHARES = tuple(number / 6 for number in range(7))  # of heads left out
RANDOM_ORDERS = 3
PAIRS = 200  # test pairs for maps and pruning
IMPORTANCE_PAIRS = "builtin:validation:100"  # heads must not be chosen on test pairs


class Pruned(NamedTuple):
    """Test results without some heads."""

    kept: int  # number of heads
    loss: float  # in nats per token, with the least important heads left out
    random_loss: float  # mean of random orders
    bleu: float  # with the least important heads left out
    random_bleu: float  # in the first random order


def prune(translator: Translator, importance: dict[Head, float], pairs: Sequence[Pair], seed: int) -> list[Pruned]:
    """Leave out more and more heads in copies: least important first, and in random orders."""
    ascending = sorted(importance, key=lambda head: importance[head])
    draws = (Random(f"{seed} {number}") for number in range(RANDOM_ORDERS))
    orders = [ascending, *(draw.sample(ascending, len(ascending)) for draw in draws)]
    rows, steps = measures.encoded(pairs, translator.tokenizers), []
    for share in SHARES:
        count = round(share * len(ascending))
        pruned = [single_heads.without_heads(translator.model, order[:count]) for order in orders]
        loss, *random_losses = (measures.loss_per_token(model, rows) for model in pruned)
        scores = (measures.score(Translator(model, translator.tokenizers), pairs) for model in pruned[:2])
        steps.append(Pruned(len(ascending) - count, loss, fmean(random_losses), *scores))
    return steps


def run(lab: Lab) -> Outcome:
    """Compare numbers of heads, measure single heads, and leave heads out."""
    trainings = {}
    for count in COUNTS:
        changes = {f"model.options.{side}_attention_heads": count for side in ("encoder", "decoder")}
        trainings[count] = measures.train_with_seeds(lab, f"{count} head{'s' * (count > 1)}", changes, SEEDS)
    translators = {count: trainings[count][0].translator() for count in {LOOKED_AT, *PRUNED}}
    looking = translators[LOOKED_AT]  # all models share tokenizers and d_model
    pairs, held_back = held_out_pairs()[:PAIRS], measures.encoded(corpus_pairs(IMPORTANCE_PAIRS), looking.tokenizers)
    importance = {count: single_heads.head_importance(one.model, held_back) for count, one in translators.items()}
    looks = single_heads.looks_of_heads(looking, pairs)
    pruning = {count: prune(translators[count], importance[count], pairs, lab.seed) for count in PRUNED}
    quality = [
        (count, looking.model.config.d_model // count, *measures.seed_cells(runs)) for count, runs in trainings.items()
    ]
    losses = {
        f"{count} heads a layer, {order}": [(step.kept / steps[0].kept, getattr(step, name)) for step in steps]
        for count, steps in pruning.items()
        for order, name in (("least important first", "loss"), ("random", "random_loss"))
    }
    pruned = lines(losses, "share of heads that are kept", "test loss (nats per token)")

    def shares(look: Look) -> Iterator[str]:
        return (f"{look[place]:.0%}" if place in look else "–" for place in PLACES)

    return Outcome(
        {
            "quality": quality,
            "looks": [
                (str(head), *shares(look), look["largest weight"], look["entropy"], importance[LOOKED_AT][head])
                for head, look in looks.items()
            ],
            "alignment": _alignment_rows(looking, pairs[0], sharpest(looks, "cross")),
            "pruning": [(count, *step) for count, steps in pruning.items() for step in steps],
        },
        {"looks": [_look_panel(looks)], "pruning": [pruned]},
        {"spread": max(row[4] for row in quality), **_look_values(looks)},
        {"seeds": SEEDS, "looked_at": LOOKED_AT, "random_orders": RANDOM_ORDERS},
    )


def _alignment_rows(translator: Translator, pair: Pair, head: Head) -> list[tuple[str, str, float]]:
    """Return a pair's target tokens, each with the source token of largest weight in a cross-attention head."""
    (weights,) = measures.attention_by_head(translator, [pair], ["cross"])
    largest, places = weights[head].max(dim=1)
    tokenizers = translator.tokenizers
    sources = token_labels(tokenizers.source, tokenizers.encode_source(pair[:1])[0])
    targets = token_labels(tokenizers.target, tokenizers.encode_target(pair[1:])[0])
    return list(zip(targets, [sources[place] for place in places.tolist()], largest.tolist(), strict=True))


def _look_values(looks: dict[Head, Look]) -> dict[str, Cell]:
    values: dict[str, Cell] = {}
    for kind in ("encoder", "decoder"):
        share, place, head = single_heads.most_positional(looks, kind)
        values |= {f"{kind}_share": share, f"{kind}_place": place, f"{kind}_head": str(head)}
    cross = sharpest(looks, "cross")
    return values | {"cross_head": str(cross), "cross_largest": looks[cross]["largest weight"]}


def _look_panel(looks: dict[Head, Look]) -> Panel:
    shares = [[look.get(place, float("nan")) for place in PLACES] for look in looks.values()]
    image = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    draw_matrix = matrix(shares, "mean attention weight", image=image, xlabel="token that is looked at")

    def draw(axes: Any) -> None:
        axes.figure.set_figheight(5.5)
        draw_matrix(axes)
        axes.set_xticks(range(len(PLACES)), PLACES)
        axes.set_yticks(range(len(looks)), [str(head) for head in looks], fontsize=7)

    return draw
