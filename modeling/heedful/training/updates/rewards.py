"""Rewards for a model's own outputs, and rows that train on them, by policy gradient."""

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from heedful.configuration_base_heed import position_limit
from heedful.data.epochs.batching import Row
from heedful.data.epochs.teacher import key_of
from heedful.decoding.engines import GenerateEngine
from heedful.decoding.native.engine import NativeEngine, may_replace
from heedful.decoding.strategies.sampling import SeededSampling
from heedful.evaluation.error_rates import ERROR_RATES
from heedful.evaluation.metrics import Measure
from heedful.files import first_line
from heedful.messages_heed import shortened, wrong
from heedful.protocols import Seq2SeqModel
from heedful.training.recipe import RewardRecipe

logger = logging.getLogger(__name__)

Texts = Sequence[str]
Outputs = list[tuple[int, ...]]
RewardFunction = Callable[[Texts, Texts, Texts], Sequence[float]]  # of sources, outputs and references

METRICS = ("chrf", "bleu", "exact_match", *ERROR_RATES)


def reward_function(name: str, tokenize: str = "13a") -> RewardFunction:
    """Return the reward with a recipe's name: from 0 to 1 for a metric, below 0 for an error rate.

    MODULE:FUNCTION runs a user's code, with a warning. Raises a `ValueError` if there is no such function.
    """
    if name in METRICS:
        return partial(_scores, name, tokenize)
    module, _, attribute = name.partition(":")
    try:
        sys.path += {str(Path.cwd())} - {*sys.path}
        logger.warning("warning: the reward runs code of yours: %s", name)
        if not callable(function := getattr(import_module(module), attribute)):
            raise TypeError(f"It is a {type(function).__name__}.")
    except Exception as error:  # a user's module may raise anything
        must = f"be one of {', '.join(METRICS)}, or MODULE:FUNCTION for a function that can be imported"
        raise wrong("optimization.reward.name", must, name, advice=first_line(error)) from error
    return function  # type: ignore[no-any-return]


def _scores(name: str, tokenize: str, _: Texts, outputs: Texts, references: Texts) -> list[float]:
    measure = Measure(name, [[reference] for reference in references], tokenize, lowercase=False)
    if measure.metric is not None:
        measure.metric.effective_order = True  # for BLEU, as sacrebleu advises for sentences
    return [measure.score(counts) / (-100 if name in ERROR_RATES else 100) for counts in measure.counts(outputs)]


@dataclass(frozen=True)
class Rewards:
    """Draws outputs of a model, and weights them by their rewards.

    Seed, sentence and update decide the draws. The weights give the gradient of REINFORCE, with the mean reward of a
    source's other outputs as baseline (Kool et al., 2019).
    """

    settings: RewardRecipe
    function: RewardFunction
    tokenizer: Any  # a `TokenizerPair`, or a tokenizer of transformers
    seed: int
    max_new_tokens: int

    def samples(self, model: Seq2SeqModel, rows: Sequence[Row], update: int, token_budget: int) -> list[list[Row]]:
        """Return each row's different outputs as rows with a `weight`, a `reward` and their number, `count`.

        Raises a `ValueError` for rewards that are not numbers, one for each output.
        """
        if not rows:
            return []
        k, found = self.settings.samples, list[list[Row]]()
        repeated = [row for row in rows for _ in range(k)]
        outputs = self._outputs(model, repeated, update, token_budget)
        rewards = self._rewards(repeated, outputs)  # (rows, k)
        weights = np.round((rewards - rewards.mean(1, keepdims=True)) / (k - 1), 12)  # equal rewards have none
        for n, row in enumerate(rows):
            merged: dict[tuple[int, ...], Row] = {}
            for ids, reward, weight in zip(outputs[n * k : (n + 1) * k], rewards[n], weights[n], strict=True):
                same = merged.setdefault(ids, {**row, "labels": [*ids], "weight": 0, "count": 0})
                same |= {"weight": same["weight"] + float(weight), "reward": float(reward), "count": same["count"] + 1}
            found.append([*merged.values()])
        return found

    def on_ranks(self, model: Seq2SeqModel, rows: list[Row], *given: int, accelerator: Accelerator) -> list[list[Row]]:
        """Return `samples`, found by all ranks together, on every rank."""
        with accelerator.split_between_processes(rows) as own:
            return list(gather_object(self.samples(model, own, *given)))

    def weighted(self, buckets: list[list[Row]], samples: list[list[Row]]) -> list[list[Row]]:
        """Return an update's buckets: its pairs with their weight, and outputs that teach something with theirs."""
        weight = self.settings.weight
        outputs = [{**row, "weight": weight * row["weight"]} for own in samples for row in own if row["weight"]]
        kept = buckets if weight < 1 or not outputs else []
        pairs = [[{**row, "weight": 1 - weight} for row in bucket] for bucket in kept]
        return [*pairs, *filter(None, [outputs])]

    def _outputs(self, model: Seq2SeqModel, rows: Sequence[Row], update: int, token_budget: int) -> Outputs:
        config, sampling = copy.deepcopy(model.generation_config), SeededSampling(self.seed, self.settings.temperature)
        most = min(self.max_new_tokens, position_limit(model.config) or self.max_new_tokens)
        config.max_new_tokens, config.max_length, config.length_penalty = most, None, 1.0
        config.num_beams = config.num_return_sequences = 1
        sampling.prepare(config, split=False)
        engine = NativeEngine(model) if may_replace(model, config) else GenerateEngine(model)
        engine.is_scored = False
        keys = (key_of(row["input_ids"], row["labels"]) % 2**64 for row in rows)
        numbers = [(key << 64) + (update << 32) + place % self.settings.samples for place, key in enumerate(keys)]
        sources, draws = [row["input_ids"] for row in rows], sampling.processors
        found = engine.search(sources, config, token_budget, lambda batch: draws([numbers[index] for index in batch]))
        return [one.token_ids for (one,) in found]

    def _rewards(self, rows: Sequence[Row], outputs: Outputs) -> np.ndarray:
        source = getattr(self.tokenizer, "source", self.tokenizer)
        decode = getattr(self.tokenizer, "decode_target", partial(source.batch_decode, skip_special_tokens=True))
        sources = source.batch_decode([row["input_ids"] for row in rows], skip_special_tokens=True)
        texts, references = (decode(ids) for ids in (outputs, [row["labels"] for row in rows]))
        found = list(map(float, self.function(sources, texts, references)))
        must = f"`optimization.reward.name` ({self.settings.name}) must return"
        if len(found) != len(texts):
            raise ValueError(f"{must} a number for each of {len(texts)} outputs, but returned {len(found)}.")
        for reward, text in zip(found, texts, strict=True):
            if not np.isfinite(reward):
                raise ValueError(f"{must} finite numbers, but returned {reward} for {shortened(text)!r}.")
        return np.array(found, dtype=np.float64).reshape(-1, self.settings.samples)


def sums_of(samples: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Return the sums over all outputs (see `progress.py`)."""
    outputs = [row for own in samples for row in own]
    sums = {"reward": sum(row["count"] * row["reward"] for row in outputs)}
    sums |= {"output_tokens": sum(row["count"] * len(row["labels"]) for row in outputs)}
    equal = sum(len({row["reward"] for row in own}) == 1 for own in samples)
    return sums | {"outputs": sum(row["count"] for row in outputs), "sources": len(samples), "equal_rewards": equal}


def weakness_of(samples: Sequence[Sequence[Row]], rows: Sequence[Row]) -> str | None:
    """Return why an update's samples teach nothing, or the wrong thing, if they do."""
    if not any(row["weight"] for own in samples for row in own):
        return "all outputs of a source have the same reward, so that there is nothing to learn"
    lengths, wanted = ({len(row["labels"]) for row in given} for given in (chain(*samples), rows))
    return f"all outputs have {lengths.pop()} tokens" if len(lengths) == 1 < len(wanted) else None
