"""Masking: −∞ before the softmax or zeros after it, a decoder without a mask, and training in one pass."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, median
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from heedful.attending_heed import Call
from heedful.attention.recording import record_weights, recorded_heads
from heedful.data.epochs.encoding import EncodedPairs
from heedful.figures import lines
from heedful.modeling_heed import HeedDecoderLayer
from heedful_lab.studies import measures
from heedful_lab.studies.pairs import held_out_pairs
from heedful_lab.studies.report import Cell, Outcome
from heedful_lab.studies.study import Lab

SCORES = ((2.0, 1.0, 3.0), (1.0, 3.0, 2.0), (0.0, 2.0, 1.0))  # of three tokens in the example
CHANGE = 2.0  # added to the last token's scores
PAIRS = 50  # test pairs with measured scores
POSITIONS = 10  # rows of the table
EXAMPLES = 3
LENGTHS = (4, 8, 16, 32, 64, 128)
REPEATS = 5  # of each timing


def later(scores: torch.Tensor) -> torch.Tensor:
    """Return which of `(…, length, length)` scores belong to later positions."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


# Attention weights with later positions at −∞ before the softmax, or at 0 after it.
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "−∞ before": lambda scores: scores.masked_fill(later(scores), -torch.inf).softmax(-1),
    "0 after": lambda scores: scores.softmax(-1).masked_fill(later(scores), 0),
}


def seeing_all() -> RemovableHandle:
    """Let each decoder see all target tokens, later ones too, inside a `with`; padding stays hidden."""
    return register_module_forward_pre_hook(_show_all)  # type: ignore[arg-type]  # may return arguments


def _show_all(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(module, HeedDecoderLayer):
        return arguments
    states, *parts = arguments
    mask = Call(*parts).mask  # (batch, 1, length, length), hides later positions and padding
    if mask is None:  # `sdpa` without a mask hides later positions
        mask = states.new_zeros(1, 1, states.shape[1], states.shape[1])
    mask = mask[:, :, -1:].expand_as(mask)  # the last position sees all tokens, no padding
    return states, *Call(*parts)._replace(mask=mask)


def scores_of(model: Any, source_ids: Sequence[int], fed_ids: Sequence[int]) -> torch.Tensor:
    """Return a decoder's scaled scores before the mask, `(layers, heads, length, length)`."""
    with recorded_heads(model, ["decoder"]) as heads:
        record_weights(model, source_ids, fed_ids, ["decoder"])
    return torch.stack([one.query @ one.key.transpose(1, 2) * one.scaling for one in heads["decoder"]])


def look_at_sums(model: Any, rows: EncodedPairs) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Measure a trained model's scores, before and after the second half of each translation is exchanged.

    For each way of masking, return the sums of weights in each row, by position, and the mean sum of changes in rows
    of the first half, which sees no changed token.
    """
    sums: dict[str, list[list[float]]] = {way: [[] for _ in range(POSITIONS)] for way in WAYS}
    changes: dict[str, list[float]] = {way: [] for way in WAYS}
    for index in range(len(rows)):
        source_ids, labels = rows[index]["input_ids"], rows[index]["labels"]
        fed_ids, half = [model.config.decoder_start_token_id, *labels[:-1]], len(labels) // 2
        others = rows[(index + 1) % len(rows)]["labels"] * len(labels)
        scores = scores_of(model, source_ids, fed_ids)
        exchanged = scores_of(model, source_ids, [*fed_ids[:half], *others[: len(fed_ids) - half]])
        for way, weigh in WAYS.items():
            for own, found in zip(sums[way], weigh(scores).sum(-1).flatten(0, 1).T.tolist(), strict=False):
                own += found
            differences = (weigh(scores) - weigh(exchanged))[..., :half, :half].abs().sum(-1)
            changes[way] += differences.flatten().tolist()
    return sums, {way: fmean(found) for way, found in changes.items()}


def next_token_loss(model: Any, source_ids: Sequence[int], labels: Sequence[int], is_one_pass: bool) -> torch.Tensor:
    """Return a target's mean loss of next tokens, in one pass of the decoder or one by one."""
    encoded = model.get_encoder()(input_ids=torch.tensor([source_ids]), return_dict=True)
    fed = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
    ends = [len(labels)] if is_one_pass else range(1, len(labels) + 1)
    passes = (model(encoder_outputs=encoded, decoder_input_ids=fed[:, :end], use_cache=False).logits for end in ends)
    logits = torch.cat([one[0] if is_one_pass else one[0, -1:] for one in passes])  # (length, V)
    return torch.nn.functional.cross_entropy(logits, torch.tensor(labels))


def timed_step(model: Any, *arguments: Any) -> tuple[float, float]:
    """Return the loss, and the median milliseconds of loss and gradient."""
    seconds, loss = [], torch.zeros(())
    for _ in range(REPEATS):
        model.zero_grad()
        start = time.perf_counter()
        loss = next_token_loss(model, *arguments)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return loss.item(), 1000 * median(seconds)


def passes_by_length(model: Any, rows: EncodedPairs) -> list[tuple[float, ...]]:
    """Return for each length both losses (one pass, one by one), both times in milliseconds, and their ratio."""
    sources, targets = ([id_ for index in range(len(rows)) for id_ in rows[index][key]] for key in rows[0])
    found: list[tuple[float, ...]] = []
    for length in LENGTHS:
        texts = sources[:length], targets[:length]
        (loss, fast), (same_loss, slow) = (timed_step(model, *texts, is_one_pass) for is_one_pass in (True, False))
        found.append((length, loss, same_loss, fast, slow, slow / fast))
    return found


def run(lab: Lab) -> Outcome:
    """Mask example and trained scores in both ways, train without a mask, and predict one by one."""
    trainings = [lab.train("with the mask")]
    with seeing_all():  # another folder, because the recipe is the same
        trainings.append(replace(lab, folder=lab.folder / "without_mask").train("without the mask"))
    translators = [training.translator() for training in trainings]
    pairs = held_out_pairs()
    masked, rows = translators[0].model.eval(), measures.encoded(pairs[:PAIRS], translators[0].tokenizers)
    sums, changes = look_at_sums(masked, rows)
    hidden, zeroed = sums.values()
    passes = passes_by_length(masked, rows)
    quality = []
    for training, translator in zip(trainings, translators, strict=True):
        loss = measures.loss_per_token(translator.model, measures.encoded(pairs, translator.tokenizers))
        scores = training.bleu(), training.metrics["test"]["exact_match"]
        quality.append((training.name, training.curve("train/loss")[-1][1], training.loss, loss, *scores))
    sources = [source for source, _ in pairs[:EXAMPLES]]
    texts = [[best.text or "–" for best, *_ in translator.translate(sources)] for translator in translators]
    values: dict[str, Cell] = {"hidden_change": changes["−∞ before"], "zeroed_change": changes["0 after"]}
    values |= {"mean_sum": fmean(chain(*zeroed)), "length": LENGTHS[-1]}
    values |= {"furthest": max(abs(1 - one) for one in chain(*hidden))}
    values |= {"difference": max(abs(row[1] - row[2]) for row in passes), "faster": passes[-1][5]}
    example, change = torch.tensor(SCORES), torch.tensor([0.0, 0.0, CHANGE])
    curves = {training.name: training.curve() for training in trainings}
    times = {name: [(row[0], row[column]) for row in passes] for name, column in (("one pass", 3), ("one by one", 4))}
    means = {way: list(enumerate(map(fmean, found), start=1)) for way, found in sums.items()}
    return Outcome(
        {
            "example": [
                (way, place, *row, sum(row), later[0])
                for way, weigh in WAYS.items()
                for place, row, later in zip(
                    (1, 2, 3), weigh(example).tolist(), weigh(example + change).tolist(), strict=True
                )
            ],
            "sums": [
                (place, fmean(own), fmean(found), min(found))
                for place, (own, found) in enumerate(zip(hidden, zeroed, strict=True), start=1)
            ],
            "training": quality,
            "examples": list(zip(*zip(*pairs[:EXAMPLES], strict=True), *texts, strict=True)),
            "passes": passes,
        },
        {
            "sums": [lines(means, "position", "mean sum of a row's weights", ylim=(0, 1.05))],
            "training": [lines(curves, "update", "validation loss in nats per token", log="y")],
            "passes": [lines(times, "target tokens", "milliseconds", log="xy")],
        },
        values,
        {"pairs": PAIRS, "change": CHANGE},
    )
