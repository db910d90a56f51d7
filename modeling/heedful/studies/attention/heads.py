"""Heads: one against four against eight of the same cost, what single ones look at, and which can be left out.

h heads of width d_model / h have as many weights and cost as many operations as one of width d_model (section 3.2.2);
they give that many distributions over the tokens instead of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from heedful.data.encoding import EncodedPairs
from heedful.inference.attention.labels import token_labels
from heedful.inference.translation import Translator
from heedful.studies.attention.looks import PLACES, Look, has_place, looks_of_heads, most_positional, sharpest
from heedful.studies.attention.pruning import Head, head_importance, without_heads
from heedful.studies.figures import Figure, lines, matrix
from heedful.studies.measures import (
    SEED_COLUMNS,
    attention_along,
    bleu,
    encoded,
    loss_per_token,
    mean,
    seed_cells,
    seed_values,
    train_with_seeds,
)
from heedful.studies.pairs import Pair, corpus_pairs, held_out_pairs
from heedful.studies.report import Outcome, Table
from heedful.studies.study import Lab, Study
from heedful.studies.training import LEARNING

COUNTS = (1, 4, 8)
LOOKED_AT = 4  # the model whose single heads are looked at
PRUNED = (4, 8)
SEEDS = 2
SHARES = tuple(number / 6 for number in range(7))  # of the heads that are left out
RANDOM_ORDERS = 3
PAIRS = 200  # test pairs of the maps and of pruning
IMPORTANCE_PAIRS = "builtin:validation:100"  # what is left out must not be chosen on test pairs
FINDINGS = [
    "All have {parameters:,} parameters. Validation loss per token by heads: "
    f"{', '.join(f'{{loss_{count}:.3f}} with {count}' for count in COUNTS)}; "
    "two seeds of one model differ by up to {spread:.3f}.",
    f"BLEU by heads: {', '.join(f'{{bleu_{count}:.1f}} with {count}' for count in COUNTS)}.",
    "The most positional head of the encoder is {encoder_head}: {encoder_share:.0%} of its weight is on the "
    "{encoder_place} token; in the decoder {decoder_head}: {decoder_share:.0%} on the {decoder_place} one.",
    "The sharpest head of cross-attention is {cross_head}: its largest weight is {cross_largest:.2f} on average.",
    *(
        f"With the {{kept_{count}}} most important of {{all_{count}}} heads ({count} a layer) BLEU is "
        f"{{half_{count}:.1f}} instead of {{full_{count}:.1f}}; with as many random ones "
        f"{{half_random_{count}:.1f}}, without any {{none_{count}:.1f}}."
        for count in PRUNED
    ),
]


@dataclass
class Pruned:
    """A model after some heads were left out.

    Attributes:
        kept: Number of heads that are left.
        loss: Test loss in nats per token, with the least important heads left out.
        random_loss: The mean test loss with as many heads left out in random orders.
        bleu: Test BLEU, with the least important heads left out.
        random_bleu: Test BLEU in the first random order.
    """

    kept: int
    loss: float
    random_loss: float
    bleu: float
    random_bleu: float


def prune(translator: Translator, importance: dict[Head, float], pairs: Sequence[Pair], seed: int) -> list[Pruned]:
    """Leave out more and more heads of a model, the least important first, and at random.

    Args:
        translator: The model's; it stays as it is.
        importance: Of every head.
        pairs: Test pairs.
        seed: Of the random orders.
    """
    ascending = sorted(importance, key=lambda head: importance[head])
    orders = [ascending]
    for number in range(RANDOM_ORDERS):
        orders.append(Random(f"{seed} {number}").sample(ascending, len(ascending)))
    rows, steps = encoded(pairs, translator.tokenizers), []
    for share in SHARES:
        count = round(share * len(ascending))
        pruned = [without_heads(translator.model, order[:count]) for order in orders]
        loss, *random_losses = (loss_per_token(model, rows) for model in pruned)
        scores = (bleu(Translator(model, translator.tokenizers), pairs) for model in pruned[:2])
        steps.append(Pruned(len(ascending) - count, loss, mean(random_losses), *scores))
    return steps


def run(lab: Lab) -> Outcome:
    """Compare numbers of heads, look at single heads, and leave heads out."""
    trainings = {}
    for count in COUNTS:
        changes = {f"model.options.{side}_attention_heads": count for side in ("encoder", "decoder")}
        trainings[count] = train_with_seeds(lab, f"{count} head{'s' * (count > 1)}", changes, SEEDS)
    translators = {count: trainings[count][0].translator() for count in {LOOKED_AT, *PRUNED}}
    tokenizers, width = translators[LOOKED_AT].tokenizers, translators[LOOKED_AT].model.config.d_model  # same for all
    pairs, held_back = held_out_pairs()[:PAIRS], encoded(corpus_pairs(IMPORTANCE_PAIRS), tokenizers)
    rows = encoded(pairs, tokenizers)
    importance = {count: head_importance(translator.model, held_back) for count, translator in translators.items()}
    looks = looks_of_heads(translators[LOOKED_AT], rows)
    pruning = {count: prune(translators[count], importance[count], pairs, lab.seed) for count in PRUNED}
    title, header = f"Quality by number of heads (means of {SEEDS} seeds)", f"heads | d_k | {SEED_COLUMNS}"
    cells = [(count, width // count, *seed_cells(runs)) for count, runs in trainings.items()]
    return Outcome(
        [
            Table.of("quality", title, header, cells),
            _look_table(looks, importance[LOOKED_AT]),
            _alignment_table(translators[LOOKED_AT], rows, sharpest(looks, "cross")),
            _pruning_table(pruning),
        ],
        [_look_figure(looks), _pruning_figure(pruning)],
        {"parameters": trainings[COUNTS[0]][0].parameters}
        | seed_values(trainings)
        | _look_values(looks)
        | _pruning_values(pruning),
        FINDINGS,
    )


def _look_table(looks: dict[Head, Look], importance: dict[Head, float]) -> Table:
    rows = []
    for head, look in looks.items():
        shares = [f"{look.mean(place):.0%}" if has_place(head, place) else "–" for place in PLACES]
        rows.append((str(head), *shares, look.mean("largest weight"), look.mean("entropy"), importance[head]))
    header = f"head | {' | '.join(PLACES)} | largest weight :.2f | entropy :.2f | importance :.2f"
    title = f"What the heads of the model with {LOOKED_AT} look at: mean weights, entropy in nats (kind layer.head)"
    return Table.of("looks", title, header, rows)


def _alignment_table(translator: Translator, rows: EncodedPairs, head: Head) -> Table:
    """Say which source token a head of cross-attention looks at most, for every token of the first sentence."""
    weights = attention_along(translator, rows[0], ["cross"])["cross"][head.layer][head.number]
    largest, places = weights.max(dim=1)
    sources = token_labels(translator.tokenizers.source, rows[0]["input_ids"])
    targets = token_labels(translator.tokenizers.target, rows[0]["labels"])
    looked_at = [sources[place] for place in places.tolist()]
    title = f"Where {head} looks most in the first test sentence, while it predicts each token"
    cells = zip(targets, looked_at, largest.tolist(), strict=True)
    return Table.of("alignment", title, "predicts | looks at | weight :.2f", cells)


def _pruning_table(pruning: dict[int, list[Pruned]]) -> Table:
    rows = [
        (count, step.kept, step.loss, step.random_loss, step.bleu, step.random_bleu)
        for count, steps in pruning.items()
        for step in steps
    ]
    title = (
        "Test loss and BLEU of the heads that are kept: the most important ones, or random ones "
        f"(loss: mean of {RANDOM_ORDERS} orders; BLEU: the first)"
    )
    header = "heads a layer | kept | loss :.3f | loss, random :.3f | BLEU :.1f | BLEU, random :.1f"
    return Table.of("pruning", title, header, rows)


def _look_values(looks: dict[Head, Look]) -> dict[str, str | float]:
    values: dict[str, str | float] = {}
    for kind in ("encoder", "decoder"):
        share, place, head = most_positional(looks, kind)
        values |= {f"{kind}_share": share, f"{kind}_place": place, f"{kind}_head": str(head)}
    cross = sharpest(looks, "cross")
    return values | {"cross_head": str(cross), "cross_largest": looks[cross].mean("largest weight")}


def _pruning_values(pruning: dict[int, list[Pruned]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for count, steps in pruning.items():
        full, half, none = steps[0], steps[len(SHARES) // 2], steps[-1]
        values |= {f"all_{count}": full.kept, f"kept_{count}": half.kept, f"half_random_{count}": half.random_bleu}
        values |= {f"full_{count}": full.bleu, f"half_{count}": half.bleu, f"none_{count}": none.bleu}
    return values


def _look_figure(looks: dict[Head, Look]) -> Figure:
    shares = [
        [look.mean(place) if has_place(head, place) else float("nan") for place in PLACES]
        for head, look in looks.items()
    ]
    image = {"cmap": "Blues", "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest"}
    draw_matrix = matrix(shares, "mean attention weight", image=image, xlabel="token that is looked at")

    def draw(axes: Any) -> None:
        draw_matrix(axes)
        axes.set_xticks(range(len(PLACES)), PLACES)
        axes.set_yticks(range(len(looks)), [str(head) for head in looks], fontsize=7)

    return Figure("looks", f"What the single heads of the model with {LOOKED_AT} look at.", [draw], 5.5)


def _pruning_figure(pruning: dict[int, list[Pruned]]) -> Figure:
    losses = {}
    for count, steps in pruning.items():
        shares = [step.kept / steps[0].kept for step in steps]
        for order, name in (("least important first", "loss"), ("random", "random_loss")):
            points = [(share, getattr(step, name)) for share, step in zip(shares, steps, strict=True)]
            losses[f"{count} heads a layer, {order}"] = points
    panel = lines(losses, "share of heads that are kept", "test loss (nats per token)")
    return Figure("pruning", "Test loss when heads are left out, without further training.", [panel])


STUDY = Study("heads", "What do several heads buy at the cost of one?", run, LEARNING)
