"""One training run from recipe to published folder: data, loop, published weights, test scores."""

import json
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed

from heedful.data.epochs.corpus import Corpus, StoredRows
from heedful.files import write_text
from heedful.training.loop.loop import TrainingLoop
from heedful.training.loop.monitoring import read_curves
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import float32_products, hardware_in_words, make_accelerator
from heedful.training.processes.heartbeat import lost_processes_reported, make_watch
from heedful.training.publication import MODEL_FOLDER, numbers, publish_weights, score_published
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import to_yaml
from heedful.training.run_folder.folder import check_output_folder, folder_of_run
from heedful.training.run_folder.progress import Progress, early_end, unfinished
from heedful.training.start_checks import check_installed

logger = logging.getLogger(__name__)

SECONDS_TO_PREPARE = 60.0  # without a heartbeat, until a process counts as lost before the first update


@dataclass
class RunResult:
    """A run's result."""

    folder: Path  # the published model's folder
    recipe: Recipe
    corpus: Corpus
    progress: Progress
    metrics: dict[str, Any]  # validation loss and perplexity of the published weights, and scores by test set
    parameters: int  # number in the model, tied ones once
    hardware: str  # in words
    processes: int
    ended: tuple[str, ...]  # warnings about an early end, or a run that could learn more


def train(recipe: Recipe) -> RunResult:
    """Run a recipe: prepare the data, train, publish the weights, test them. Every rank returns the result.

    The main process writes `recipe.yaml`, `log.jsonl`, `tokenizer/`, `checkpoints/` and `model/` into its folder.

    Args:
        recipe: A recipe from `read_recipe` or `make_recipe`.

    Raises:
        ValueError: If the recipe, the data or the run's folder cannot be used; the message names the key.
        FileNotFoundError: If a file in the recipe does not exist.
        TrainingInterrupted: After Ctrl-C or SIGTERM; the run can be resumed.
    """
    check_output_folder(recipe)
    check_installed(recipe.optimization, recipe.decoding.bleu_tokenizer, recipe.logging.trackers)
    accelerator = make_accelerator(recipe.optimization, recipe.logging.trackers, recipe.folder / "trackers")
    is_main = accelerator.is_main_process
    with float32_products(recipe.optimization.mixed_precision), lost_processes_reported(accelerator):
        accelerator.wait_for_everyone()  # all ranks check before one writes
        with folder_of_run(recipe.folder, recipe.overwrite) if is_main else nullcontext():
            set_seed(recipe.seed)
            # A process may be silent while it loads a huge file.
            with make_watch(accelerator, patience=SECONDS_TO_PREPARE):
                with accelerator.main_process_first():
                    corpus = prepare_corpus(recipe, recipe.folder / "tokenizer", accelerator)
                if isinstance(rows := corpus.training, StoredRows):
                    logger.info("%s training pairs, %s too long\n%s", rows.pairs, rows.rows.left_out, corpus.report)
                loop = TrainingLoop(recipe, corpus, accelerator)
                accelerator.wait_for_everyone()  # the first to leave would seem silent
            if is_main:
                write_text(recipe.folder / "recipe.yaml", to_yaml(recipe))
            loop.log.start_trackers(recipe.name, loop.progress)
            progress = loop.run()
            ended = early_end(loop.ended_by, recipe.optimization, recipe.validation.patience, progress)
            losses = read_curves(recipe.folder).get("validation/loss", []) if is_main else []
            told = ([ended["message"]] if ended else []) + unfinished(losses, loop.ended_by, recipe.optimization)
            for message in told:
                logger.warning(message)
            model = publish_weights(recipe, corpus, progress, accelerator)
            folder, budget = recipe.folder / MODEL_FOLDER, recipe.optimization.micro_batch_tokens
            asked = recipe.validation.sentences
            metrics = score_published(folder, recipe.data, recipe.decoding, corpus, accelerator, budget, asked)
            if is_main:
                written = metrics | ({"ended": ended} if ended else {})
                (folder / "metrics.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
            loop.log.track(numbers(metrics), progress.update, is_last=True)
            hardware, processes = hardware_in_words(accelerator), accelerator.num_processes
    PartialState().destroy_process_group()
    size = model.num_parameters()
    return RunResult(folder, recipe, corpus, progress, metrics, size, hardware, processes, tuple(told))
