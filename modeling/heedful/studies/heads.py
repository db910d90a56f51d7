"""Heads: one against four against eight of the same cost, what single ones look at, and which can be left out.

h heads of width d_model / h have as many weights and cost as many operations as one of width d_model (section 3.2.2);
they give that many distributions over the tokens instead of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import torch

from heedful.data.encoding import EncodedPairs
from heedful.data.sources import read_pairs
from heedful.evaluation.metrics import score_translations
from heedful.inference.attention.labels import token_labels
from heedful.inference.attention.recording import KINDS, Kind, record_attention
from heedful.inference.translation import Translator
from heedful.studies.comparison import (
    LEARNING,
    encoded,
    held_out_pairs,
    loss_per_token,
    mean,
    spread,
    train_with_seeds,
)
from heedful.studies.figures import draw_lines, new_figure
from heedful.studies.head_pruning import Head, head_importance, heads_of, without_heads
from heedful.studies.study import Cell, Figure, Lab, Outcome, Study, Table
from heedful.studies.training import Training

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

COUNTS = (1, 4, 8)
LOOKED_AT = 4  # the model whose single heads are looked at
PRUNED = (4, 8)
SEEDS = 2
SHARES = tuple(number / 6 for number in range(7))  # of the heads that are left out
RANDOM_ORDERS = 3
PAIRS = 200  # test pairs of the maps and of pruning
IMPORTANCE_PAIRS = 100  # validation pairs, for what is left out must not be chosen on test pairs
PLACES = ("previous", "same", "next", "first", "</s>")
NOT_THERE = {"encoder": (), "decoder": ("next", "</s>"), "cross": ("previous", "same", "next")}


@dataclass
class Look:
    """What a head looks at, summed over the tokens that look.

    Attributes:
        weight: By place of `PLACES`, the weight that it gets.
        rows: Likewise, the number of tokens that have such a place to look at.
        largest: The largest weight of every token.
        entropy: In nats.
        looking: Number of tokens that look.
    """

    weight: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PLACES, 0.0))
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    largest: float = 0.0
    entropy: float = 0.0
    looking: int = 0

    def add(self, weights: torch.Tensor) -> None:
        """Add the weights of a sentence, `(tokens that look, tokens that are looked at)`."""
        looks, seen = weights.shape
        for place, offset in (("previous", -1), ("same", 0), ("next", 1)):
            diagonal = weights.diagonal(offset)
            self._add(place, diagonal.sum().item(), len(diagonal))
        self._add("first", weights[:, 0].sum().item(), looks)
        self._add("</s>", weights[:, seen - 1].sum().item(), looks)
        self.largest += weights.amax(dim=1).sum().item()
        self.entropy += torch.special.entr(weights).sum().item()
        self.looking += looks

    def _add(self, place: str, weight: float, rows: int) -> None:
        self.weight[place] += weight
        self.rows[place] += rows

    def share(self, place: str) -> float:
        """Return the mean weight on a place, over the tokens that have it."""
        return self.weight[place] / max(self.rows[place], 1)


def looks_of_heads(translator: Translator, rows: EncodedPairs) -> dict[Head, Look]:
    """Measure what every head of a model looks at, along the given translations.

    In the decoder "same" is the token that was read last and "first" is <s>; the last source token is </s>.

    Args:
        translator: The model's.
        rows: Sentences and their translations.
    """
    looks = {head: Look() for head in heads_of(translator.model)}
    for index in range(len(rows)):
        weights = _weights(translator, rows[index], KINDS)
        for head, look in looks.items():
            look.add(weights[head.kind][head.layer][head.number])
    return looks


def _weights(
    translator: Translator, row: dict[str, list[int]], kinds: Sequence[Kind]
) -> dict[Kind, list[torch.Tensor]]:
    fed_ids = [translator.model.config.decoder_start_token_id, *row["labels"][:-1]]
    return record_attention(translator.model, row["input_ids"], fed_ids, kinds)


def run(lab: Lab) -> Outcome:
    """Compare numbers of heads, look at single heads, and leave heads out."""
    trainings = {
        count: train_with_seeds(
            lab,
            f"{count} head" + "s" * (count > 1),
            {"model.options.encoder_attention_heads": count, "model.options.decoder_attention_heads": count},
            SEEDS,
        )
        for count in COUNTS
    }
    pairs = held_out_pairs()[:PAIRS]
    translators = {count: trainings[count][0].translator() for count in {LOOKED_AT, *PRUNED}}
    rows = encoded(pairs, translators[LOOKED_AT].tokenizers)  # the tokenizer is the same for all
    importance = {count: _importance(translators[count]) for count in translators}
    looks = looks_of_heads(translators[LOOKED_AT], rows)
    pruning = {count: prune(translators[count], importance[count], pairs, lab.seed) for count in PRUNED}
    tables = [
        _quality_table(trainings),
        _look_table(looks, importance[LOOKED_AT]),
        _alignment_table(translators[LOOKED_AT], rows, looks),
        _pruning_table(pruning),
    ]
    figures = [
        Figure("looks", f"What the single heads of the model with {LOOKED_AT} look at.", _draw_looks(looks)),
        Figure("pruning", "Test loss when heads are left out, without further training.", _draw_pruning(pruning)),
    ]
    values = _quality_values(trainings) | _look_values(looks) | _pruning_values(pruning)
    return Outcome(tables, figures, values, _findings())


def _importance(translator: Translator) -> dict[Head, float]:
    pairs = list(read_pairs(f"builtin:validation:{IMPORTANCE_PAIRS}", "ko", "en", split="validation"))
    return head_importance(translator.model, encoded(pairs, translator.tokenizers))


@dataclass
class Pruned:
    """A model after some heads were left out.

    Attributes:
        kept: Number of heads that are left.
        loss: Test loss in nats per token, with the least important heads left out.
        bleu: Test BLEU, likewise.
        random_losses: Test loss with as many heads left out in random orders.
        random_bleu: Test BLEU in the first random order.
    """

    kept: int
    loss: float
    bleu: float
    random_losses: list[float]
    random_bleu: float


def prune(
    translator: Translator, importance: dict[Head, float], pairs: list[dict[str, str]], seed: int
) -> list[Pruned]:
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
    rows = encoded(pairs, translator.tokenizers)
    steps = []
    for share in SHARES:
        count = round(share * len(ascending))
        pruned = [without_heads(translator.model, order[:count]) for order in orders]
        losses = [loss_per_token(model, rows) for model in pruned]
        bleu, random_bleu = (_bleu(Translator(model, translator.tokenizers), pairs) for model in pruned[:2])
        steps.append(Pruned(len(ascending) - count, losses[0], bleu, losses[1:], random_bleu))
    return steps


def _bleu(translator: Translator, pairs: list[dict[str, str]]) -> float:
    predictions = [best.text for best, *_ in translator.translate([pair["source"] for pair in pairs])]
    return score_translations(predictions, [pair["target"] for pair in pairs], metrics=("bleu",))["bleu"]


def _losses(trainings: list[Training]) -> list[float]:
    return [training.metrics["validation"]["loss"] for training in trainings]


def _scores(trainings: list[Training], name: str = "bleu") -> list[float]:
    return [training.metrics["test"][name] for training in trainings]


def _quality_table(trainings: dict[int, list[Training]]) -> Table:
    columns = ("heads", "d_k", "parameters", "validation loss", "between seeds", "BLEU", "BLEU between seeds")
    rows = []
    for count, runs in trainings.items():
        width = runs[0].translator().model.config.d_model // count
        losses, scores = _losses(runs), _scores(runs)
        rows.append(
            (count, width, runs[0].parameters, mean(losses), spread(losses), mean(scores), spread(scores)),
        )
    formats = {"parameters": ",", "validation loss": ".3f", "between seeds": ".3f"}
    formats |= {"BLEU": ".1f", "BLEU between seeds": ".1f"}
    return Table("quality", f"Quality by number of heads (means of {SEEDS} seeds)", columns, rows, formats)


def _look_table(looks: dict[Head, Look], importance: dict[Head, float]) -> Table:
    columns = ("head", *PLACES, "largest weight", "entropy", "importance")
    rows = []
    for head, look in looks.items():
        shares: list[Cell] = [f"{look.share(place):.0%}" if _has(head, place) else "–" for place in PLACES]
        rows.append((str(head), *shares, look.largest / look.looking, look.entropy / look.looking, importance[head]))
    formats = {"largest weight": ".2f", "entropy": ".2f", "importance": ".2f"}
    title = f"What the heads of the model with {LOOKED_AT} look at: mean weights, entropy in nats (kind layer.head)"
    return Table("looks", title, columns, rows, formats)


def _has(head: Head, place: str) -> bool:
    return place not in NOT_THERE[head.kind]


def _sharpest(looks: dict[Head, Look], kind: str) -> Head:
    heads = [head for head in looks if head.kind == kind]
    return max(heads, key=lambda head: looks[head].largest / looks[head].looking)


def _alignment_table(translator: Translator, rows: EncodedPairs, looks: dict[Head, Look]) -> Table:
    """Tell which source token the sharpest head of cross-attention looks at most, for every token of one sentence."""
    head = _sharpest(looks, "cross")
    row = rows[0]
    weights, places = _weights(translator, row, ["cross"])["cross"][head.layer][head.number].max(dim=1)
    sources = token_labels(translator.tokenizers.source, row["input_ids"])
    targets = token_labels(translator.tokenizers.target, row["labels"])
    cells = [
        (target, sources[place], weight)
        for target, place, weight in zip(targets, places.tolist(), weights.tolist(), strict=True)
    ]
    title = f"Where {head} looks most in the first test sentence, while it predicts each token"
    return Table("alignment", title, ("predicts", "looks at", "weight"), cells, {"weight": ".2f"})


def _pruning_table(pruning: dict[int, list[Pruned]]) -> Table:
    columns = ("heads a layer", "kept", "loss", "loss, random", "BLEU", "BLEU, random")
    rows = [
        (count, step.kept, step.loss, mean(step.random_losses), step.bleu, step.random_bleu)
        for count, steps in pruning.items()
        for step in steps
    ]
    formats = {"loss": ".3f", "loss, random": ".3f", "BLEU": ".1f", "BLEU, random": ".1f"}
    title = (
        "Test loss and BLEU of the heads that are kept: the most important ones, or random ones "
        f"(loss: mean of {RANDOM_ORDERS} orders; BLEU: the first)"
    )
    return Table("pruning", title, columns, rows, formats)


def _quality_values(trainings: dict[int, list[Training]]) -> dict[str, Cell]:
    values: dict[str, Cell] = {"parameters": trainings[COUNTS[0]][0].parameters}
    for count, runs in trainings.items():
        values |= {f"loss_{count}": mean(_losses(runs)), f"bleu_{count}": mean(_scores(runs))}
    return values | {"spread": max(spread(_losses(runs)) for runs in trainings.values())}


def _look_values(looks: dict[Head, Look]) -> dict[str, Cell]:
    values: dict[str, Cell] = {}
    for kind in ("encoder", "decoder"):
        places = [
            (look.share(place), place, head)
            for head, look in looks.items()
            for place in PLACES[:3]
            if head.kind == kind and _has(head, place)
        ]
        share, place, head = max(places)
        values |= {f"{kind}_share": share, f"{kind}_place": place, f"{kind}_head": str(head)}
    head = _sharpest(looks, "cross")
    return values | {"cross_head": str(head), "cross_largest": looks[head].largest / looks[head].looking}


def _pruning_values(pruning: dict[int, list[Pruned]]) -> dict[str, Cell]:
    values: dict[str, Cell] = {}
    for count, steps in pruning.items():
        half = steps[len(SHARES) // 2]
        values |= {f"all_{count}": steps[0].kept, f"kept_{count}": half.kept, f"none_{count}": steps[-1].bleu}
        values |= {
            f"full_{count}": steps[0].bleu,
            f"half_{count}": half.bleu,
            f"half_random_{count}": half.random_bleu,
        }
    return values


def _findings() -> list[str]:
    losses = ", ".join(f"{{loss_{count}:.3f}} with {count}" for count in COUNTS)
    scores = ", ".join(f"{{bleu_{count}:.1f}} with {count}" for count in COUNTS)
    findings = [
        f"All have {{parameters:,}} parameters. Validation loss per token by heads: {losses}; "
        "two seeds of one model differ by up to {spread:.3f}.",
        f"BLEU by heads: {scores}.",
        "The most positional head of the encoder is {encoder_head}: {encoder_share:.0%} of its weight is on the "
        "{encoder_place} token; in the decoder {decoder_head}: {decoder_share:.0%} on the {decoder_place} one.",
        "The sharpest head of cross-attention is {cross_head}: its largest weight is {cross_largest:.2f} on average.",
    ]
    for count in PRUNED:
        findings.append(
            f"With the {{kept_{count}}} most important of {{all_{count}}} heads ({count} a layer) BLEU is "
            f"{{half_{count}:.1f}} instead of {{full_{count}:.1f}}; with as many random ones "
            f"{{half_random_{count}:.1f}}, without any {{none_{count}:.1f}}."
        )
    return findings


def _draw_looks(looks: dict[Head, Look]) -> "Picture":
    figure = new_figure()
    figure.set_figheight(5.5)
    axes = figure.axes[0]
    shares = [
        [look.share(place) if _has(head, place) else float("nan") for place in PLACES] for head, look in looks.items()
    ]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(PLACES)), PLACES)
    axes.set_yticks(range(len(looks)), [str(head) for head in looks], fontsize=7)
    axes.set_xlabel("token that is looked at")
    figure.colorbar(image, ax=axes, label="mean attention weight")
    return figure


def _draw_pruning(pruning: dict[int, list[Pruned]]) -> "Picture":
    lines = {}
    for count, steps in pruning.items():
        total = steps[0].kept
        lines[f"{count} heads a layer, least important first"] = [(step.kept / total, step.loss) for step in steps]
        lines[f"{count} heads a layer, random"] = [(step.kept / total, mean(step.random_losses)) for step in steps]
    figure = new_figure()
    draw_lines(figure.axes[0], lines, "share of heads that are kept", "test loss (nats per token)")
    return figure


STUDY = Study("heads", "What do several heads buy at the cost of one?", run, LEARNING)
