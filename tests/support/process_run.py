"""What every process of test_multiprocess.py does; each writes result-RANK.json."""

import json
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed
from accelerate import Accelerator

from heedful.inference.translation import Translator
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.validation import translate_on_ranks, validation_loss
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from heedful.training.run import train
from process_checks import END, NO_DROPOUT, all_checks, make_loop
from tiny_runs import logged, tiny_recipe

# With this budget an update is several micro-batches.
PLAIN = {"optimization.token_budget": 700, "model.options.dropout": 0.0, "decoding.bootstrap": 40}
PLAIN |= {
    "optimization.max_updates": END,
    "data.test": {"small": "builtin:test:7"},
    "validation.every_updates": 3,
    "validation.sentences": 5,
}


def losses_of_single_rows(folder: Path, accelerator) -> list[float]:
    """Train on updates of one pair each, which leave every process but one without rows."""
    # Adam does not mind a gradient half as long; with this epsilon its step is nearly proportional to the gradient.
    changes = {"optimization.epsilon": 1e3, "optimization.learning_rate": 300.0, "optimization.tokens_per_update": 1}
    recipe = tiny_recipe(folder / "lonely", {**PLAIN, **changes})
    recipe.folder.mkdir(exist_ok=True)
    corpus = prepare_corpus(recipe, folder / "plain" / "tokenizer")
    assert [len(bucket) for bucket in next(iter(corpus.updates(0)))] == [1]
    TrainingLoop(recipe, corpus, accelerator).run()
    return logged(recipe.folder, "train/loss")


def losses_without_dropout(folder: Path, corpus, accelerator) -> list[float]:
    make_loop(folder / "no_dropout", NO_DROPOUT, corpus, accelerator).run()
    return logged(folder / "no_dropout", "train/loss")


def measure(folder: Path) -> dict:
    """Train, validate and translate; return all that must not depend on the number of processes."""
    recipe = tiny_recipe(folder / "plain", PLAIN)
    # A finished run dissolves its processes' group, and these have more to do.
    with patch.object(Accelerator, "end_training"):
        result = train(recipe)
    accelerator = make_accelerator(recipe.optimization)
    translator = Translator.from_pretrained(result.folder, "cpu")
    sources = [pair["source"] for pair in result.corpus.validation_pairs[:9]]
    translations = translate_on_ranks(translator, sources, accelerator, max_new_tokens=12)
    loss = validation_loss(translator.model, result.corpus.validation, 300, accelerator)
    return {
        "processes": accelerator.num_processes,
        "processes_of_the_run": result.processes,
        "processes_of_torch": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "training_losses": logged(folder / "plain", "train/loss"),
        "validation_losses": [
            *logged(folder / "plain", "validation/loss"),
            result.metrics["validation"]["loss"],
            loss,
        ],
        "scores": [*logged(folder / "plain", "validation/chrf"), result.metrics["small"]["chrf"]],
        "count": result.metrics["small"]["count"],
        "translations": translations,
        "target_tokens": result.progress.target_tokens,
        "losses_of_single_rows": losses_of_single_rows(folder, accelerator),
        "no_dropout_losses": losses_without_dropout(folder, result.corpus, accelerator),
    }


def main(folder: Path) -> None:
    measured = measure(folder)
    recipe = tiny_recipe(folder / "plain", PLAIN)
    accelerator = make_accelerator(recipe.optimization)
    corpus = prepare_corpus(recipe, folder / "plain" / "tokenizer", accelerator)
    measured["checks"] = all_checks(folder, corpus, accelerator)
    (folder / f"result-{torch.distributed.get_rank()}.json").write_text(json.dumps(measured))
