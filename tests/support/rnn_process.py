"""What every process of test_rnn_training.py does: python rnn_process.py FOLDER; the main one writes losses.json."""

import json
import sys
from pathlib import Path

import torch

from heedful.training.loop.loop import TrainingLoop
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import make_accelerator
from tiny_runs import logged, tiny_recipe

OPTIONS = {"model_type": "heed_rnn", "embedding_size": 8, "hidden_size": 12, "dropout": 0.0}
CHANGES = {"model.options": OPTIONS, "optimization.tokens_per_update": 500}
CHANGES |= {"validation.every_updates": 3, "validation.sentences": 3, "validation.max_new_tokens": 12}


def losses(folder: Path, token_budget: int) -> list[float]:
    """Train six updates and return training and validation losses, and the validation's chrF."""
    recipe = tiny_recipe(folder, {**CHANGES, "optimization.token_budget": token_budget})
    folder.mkdir(parents=True, exist_ok=True)
    accelerator = make_accelerator(recipe.optimization)
    with accelerator.main_process_first():
        corpus = prepare_corpus(recipe, folder / "tokenizer", accelerator)
    TrainingLoop(recipe, corpus, accelerator).run()
    return [value for name in ("train/loss", "validation/loss", "validation/chrf") for value in logged(folder, name)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    measured = losses(where / "run", 150)
    (where / "losses.json").write_text(json.dumps(measured))
