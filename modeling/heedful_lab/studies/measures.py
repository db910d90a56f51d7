"""Measures that several studies share: losses, BLEU, attention weights, and trainings with several seeds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from heedful.attention.recording import KINDS, Kind, record_weights
from heedful.data.epochs.encoding import EncodedPairs, PairEncoder
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.translation import Translator
from heedful.evaluation.metrics import score_translations
from heedful.training.loop.validation import validation_loss
from heedful.training.processes.devices import make_accelerator
from heedful_lab.studies.pairs import Pair, corpus_pairs
from heedful_lab.studies.study import Lab
from heedful_lab.studies.training import Training, study_recipe

TOKEN_BUDGET = 4096  # in a batch; it does not change the results


def training_pairs(lab: Lab) -> list[Pair]:
    """Return the study's training pairs of the built-in corpus."""
    return corpus_pairs(lab.data or study_recipe(dict(lab.study.changes)).data.parts["data.train"].train)


def train_with_seeds(lab: Lab, name: str, changes: Mapping[str, Any], count: int) -> list[Training]:
    """Train a model with `count` seeds, from the study's seed on, to separate differences from chance."""
    return [
        replace(lab, seed=seed).train(name if count == 1 else f"{name}, seed {seed}", changes)
        for seed in range(lab.seed, lab.seed + count)
    ]


def seed_cells(runs: Sequence[Training]) -> tuple[float, ...]:
    """Return parameters, mean and range of the validation loss, and mean and range of BLEU over seeds."""
    measured = [one.loss for one in runs], [one.bleu() for one in runs]
    return runs[0].parameters, *(number for each in measured for number in (fmean(each), max(each) - min(each)))


def encoded(pairs: Sequence[Pair], tokenizers: TokenizerPair) -> EncodedPairs:
    """Return all pairs as token ids."""
    return EncodedPairs(PairEncoder(tokenizers).rows({"source": source, "target": target} for source, target in pairs))


def loss_per_token(model: Any, rows: EncodedPairs) -> float:
    """Return the negative log-likelihood in nats per target token, with </s>, without label smoothing."""
    accelerator = make_accelerator(study_recipe({}).optimization)
    return validation_loss(model, rows, TOKEN_BUDGET, accelerator)


def score(translator: Translator, pairs: Sequence[Pair], metric: str = "bleu") -> float:
    """Return a metric of `score_translations` for the translated sources of pairs."""
    texts = [best.text for best, *_ in translator.translate([source for source, _ in pairs])]
    return score_translations(texts, [target for _, target in pairs], metrics=[metric])[metric]


class Head(NamedTuple):
    """An attention head."""

    kind: Kind  # "encoder" or "decoder" self-attention, or "cross"
    layer: int  # in its stack, from 0
    number: int  # in its layer, from 0

    def __str__(self) -> str:
        return f"{self.kind} {self.layer}.{self.number}"


def attention_by_head(
    translator: Translator, pairs: Sequence[Pair], kinds: Sequence[Kind] = KINDS
) -> Iterator[dict[Head, torch.Tensor]]:
    """Yield each pair's attention weights `(rows, columns)` by head, with the given target as input."""
    model, tokenizers = translator.model, translator.tokenizers
    for source, target in pairs:
        source_ids, target_ids = tokenizers.encode_source([source])[0], tokenizers.encode_target([target])[0]
        found = record_weights(model, source_ids, [model.config.decoder_start_token_id, *target_ids[:-1]], kinds)
        yield {
            Head(kind, layer, number): weights
            for kind, layers in found.items()
            for layer, heads in enumerate(layers)
            for number, weights in enumerate(heads)
        }
