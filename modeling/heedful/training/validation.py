"""What a model is worth: loss per token and translation scores, the same on any number of processes."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from heedful.data.batching import UpdateBatches, collate
from heedful.data.encoding import EncodedPairs
from heedful.evaluation.metrics import score_translations
from heedful.inference.translation import Translator
from heedful.training.processes import in_total


@torch.no_grad()
def validation_loss(
    model, rows: EncodedPairs, token_budget: int, pad_token_id: int, accelerator: Accelerator
) -> float:
    """Return the cross-entropy in nats per target token: one mean over all tokens, not a mean of batch means.

    Args:
        model: The model, in any wrapping; it is put into evaluation mode and back.
        rows: Validation pairs.
        token_budget: Padded tokens of one batch; it does not change the result.
        pad_token_id: Fills up sources.
        accelerator: Spreads the batches over the processes.
    """
    batches = UpdateBatches(rows.source_lengths, rows.target_lengths, tokens_per_update=token_budget).epoch(0)
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    was_training = model.training
    model.eval()
    total = 0.0
    for (bucket,) in mine:
        batch = collate([rows[index] for index in bucket], pad_token_id)
        batch = {name: values.to(accelerator.device) for name, values in batch.items()}
        total += accelerator.unwrap_model(model)(**batch, num_items_in_batch=1).loss.item()
    model.train(was_training)
    return in_total(accelerator, total)[0] / int(rows.target_lengths.sum())


def translate_spread(translator: Translator, texts: list[str], accelerator: Accelerator, **settings: Any) -> list[str]:
    """Translate sentences, each on one process, and return all translations in order on every process."""
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = [best.text for best, *_ in translator.translate(texts[rank::world], **settings)]
    if world == 1:
        return mine
    gathered = gather_object([(rank + world * number, text) for number, text in enumerate(mine)])
    return [text for _, text in sorted(gathered)]


def score_pairs(
    translator: Translator, pairs: list[dict[str, str]], accelerator: Accelerator, scoring: dict[str, Any], **settings
) -> dict[str, Any]:
    """Translate the sources of pairs and score the result against their targets.

    Args:
        translator: The model and its tokenizers.
        pairs: `source` and `target` texts.
        accelerator: Spreads the sentences over the processes.
        scoring: Settings of `score_translations`.
        settings: Settings of `Translator.translate`.
    """
    predictions = translate_spread(translator, [pair["source"] for pair in pairs], accelerator, **settings)
    return score_translations(predictions, [pair["target"] for pair in pairs], **scoring)
