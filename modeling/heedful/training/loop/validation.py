"""Validation: loss per token and translation scores, the same on any number of processes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from heedful.data.epochs.batching import BatchingSettings, UpdateBatches
from heedful.data.epochs.corpus import Corpus
from heedful.data.epochs.encoding import EncodedPairs
from heedful.data.epochs.micro_batches import collate
from heedful.data.sources import references_of, sample, sources_of
from heedful.decoding.engines import Translation
from heedful.decoding.translation import Translator
from heedful.evaluation.error_rates import ERROR_RATES
from heedful.evaluation.faults import count_faults
from heedful.evaluation.metrics import affordable_metrics, score_translations
from heedful.protocols import Seq2SeqModel, TrainableModel
from heedful.training.processes.collectives import all_reduce, is_sharded
from heedful.training.recipe import Criterion, DecodingRecipe, ValidationRecipe
from heedful.training.updates.engine import TrainingEngine

METRICS = get_args(Criterion)[1:]  # all but TER, which is slow
LOWER_IS_BETTER = ("loss", *ERROR_RATES)
Pairs = list[dict[str, Any]]


def validate(
    settings: ValidationRecipe, decoding: DecodingRecipe, corpus: Corpus, engine: TrainingEngine
) -> dict[str, float]:
    """Return loss, perplexity and scores; the model stays in evaluation mode."""
    accelerator, budget = engine.accelerator, engine.feed.token_budget
    pairs, tokenizers = sample(corpus.validation_pairs, settings.sentences, not corpus.context), corpus.tokenizers
    scoring = {"metrics": METRICS, "tokenize": decoding.bleu_tokenizer, "ignore": decoding.ignore}
    search: dict[str, Any] = {"num_beams": 1, "max_new_tokens": settings.max_new_tokens}
    search |= {"target_language": corpus.target_language, "token_budget": budget, "context": corpus.context}
    with _measured_model(engine) as model:
        loss = validation_loss(model, corpus.validation, budget, accelerator)
        values = {"loss": loss, "perplexity": math.exp(min(loss, 100))}
        if pairs:
            scores = score_pairs(Translator(model, tokenizers), pairs, accelerator, scoring, **search)
            values |= {name: scores[name] for name in METRICS}
    return values


@contextmanager
def _measured_model(engine: TrainingEngine) -> Iterator[TrainableModel]:
    """Yield an ordinary model, so that each rank can generate without the others."""
    model = engine.network
    if engine.averages or is_sharded(engine.model):
        model = engine.plain_network(engine.accelerator.device)
        model.load_state_dict(engine.weights(keep=True), strict=False)
    with engine.accelerator.autocast():
        yield model


@torch.no_grad()
def validation_loss(model: Seq2SeqModel, rows: EncodedPairs, token_budget: int, accelerator: Accelerator) -> float:
    """Return the cross-entropy in nats per target token, from batches of at most `token_budget` padded tokens."""
    batches = UpdateBatches(rows.source_lengths, rows.target_lengths, BatchingSettings(token_budget)).epoch(0)
    own = batches[accelerator.process_index :: accelerator.num_processes]
    was_training, device = model.training, accelerator.device
    model.eval()
    total = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    for (bucket,) in own:
        batch = collate([rows[index] for index in bucket], model.config.pad_token_id)
        total += model(**{name: values.to(device) for name, values in batch.items()}, num_items_in_batch=1).loss
    model.train(was_training)
    return all_reduce(accelerator, total.item())[0] / int(rows.target_lengths.sum())


def translate_on_ranks(
    translator: Translator, texts: list[str], accelerator: Accelerator, **search: Any
) -> list[Translation]:
    """Translate sentences spread over the ranks, and return all in order on every rank."""
    share = math.ceil(len(texts) / accelerator.num_processes)
    own = share * accelerator.process_index
    first = max(0, own - search.get("context", 0))  # the texts before its own are only context
    found = translator.translate_lines(texts[first : own + share], split=False, **search)
    return list(gather_object([best for best, *_ in found][own - first :]))


def score_pairs(
    translator: Translator, pairs: Pairs, accelerator: Accelerator, scoring: dict[str, Any], **search: Any
) -> dict[str, Any]:
    """Translate pairs' sources on all ranks, and score the results against all references."""
    found = translate_on_ranks(translator, sources_of(pairs), accelerator, **search)
    predictions, accepted = [best.text for best in found], references_of(pairs)
    if "metrics" not in scoring:
        scoring = scoring | {"metrics": affordable_metrics(None, predictions, accepted)}
    faults = count_faults(pairs, found, translator.model.generation_config)
    return score_translations(predictions, accepted, **scoring) | {"faults": faults}
