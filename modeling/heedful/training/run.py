"""One training run from its recipe to a folder that anybody can load: data, loop, published weights, test scores."""

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import set_seed
from safetensors.torch import load_file

from heedful.data.sources import read_pairs
from heedful.evaluation.metrics import score_translations
from heedful.inference.loading import load_model
from heedful.inference.strategies.steps import SEARCH_SETTINGS
from heedful.inference.translation import Translator
from heedful.training.averaging import average_weights
from heedful.training.checkpoints import (
    MOVING_AVERAGE,
    STATE_FOLDER,
    Progress,
    published_checkpoints,
    written_beside,
)
from heedful.training.devices import hardware_in_words, make_accelerator
from heedful.training.folder import check_output_folder, folder_of_run, set_aside, write_recipe
from heedful.training.loop import TrainingLoop
from heedful.training.preparation import Corpus, prepare_corpus
from heedful.training.processes import lost_processes_told
from heedful.training.recipe import DecodingRecipe, Recipe
from heedful.training.validation import score_pairs, validation_loss

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"


@dataclass
class RunResult:
    """What a run made.

    Attributes:
        folder: The published model's folder.
        recipe: The run's recipe.
        corpus: Its data, with the account of what was dropped.
        progress: How far it came.
        metrics: Validation loss and perplexity of the published weights, and scores by test set.
        parameters: Number of the model's parameters, tied ones once.
        hardware: What it ran on.
        processes: Number of processes.
    """

    folder: Path
    recipe: Recipe
    corpus: Corpus
    progress: Progress
    metrics: dict[str, Any]
    parameters: int
    hardware: str
    processes: int


def train(recipe: Recipe) -> RunResult:
    """Run a recipe: prepare the data, train, publish the weights, test them.

    Args:
        recipe: The run. Its folder then holds `recipe.yaml`, `log.jsonl`, `tokenizer/`, `checkpoints/` and `model/`.

    Returns:
        What was made; in every process of a multi-process run, though only the main one writes.

    Raises:
        FileNotFoundError: If a file of the recipe does not exist.
        ValueError: If the recipe, the data or the output folder cannot be used.
        TrainingInterrupted: After Ctrl-C or SIGTERM; the run can be resumed.
    """
    check_output_folder(recipe)
    # A tokenizer that BLEU does not know, or that is not installed, must not come out after hours of training.
    score_translations([""], [""], tokenize=recipe.decoding.bleu_tokenizer, metrics=("bleu",))
    check_trackers(recipe.logging.trackers)
    accelerator = make_accelerator(recipe)
    with lost_processes_told(accelerator):
        accelerator.wait_for_everyone()  # nobody writes before everybody has looked
        with folder_of_run(recipe) if accelerator.is_main_process else contextlib.nullcontext():
            return _train(recipe, accelerator)


def _train(recipe: Recipe, accelerator: Accelerator) -> RunResult:
    set_seed(recipe.seed)
    is_overwriting = recipe.overwrite and accelerator.is_main_process
    with set_aside(recipe.folder) if is_overwriting else contextlib.nullcontext():
        with accelerator.main_process_first():
            corpus = prepare_corpus(recipe, recipe.folder / "tokenizer", accelerator)
        if corpus.pairs is not None:
            logger.info("%s training pairs, %s too long\n%s", corpus.pairs, corpus.encoder.too_long, corpus.report)
        loop = TrainingLoop(recipe, corpus, accelerator)
        if accelerator.is_main_process:
            write_recipe(recipe)
    if recipe.logging.trackers:
        accelerator.init_trackers(recipe.name)
    progress = loop.run()
    model = publish_weights(recipe, loop)
    metrics = test_published(recipe, corpus, accelerator)
    accelerator.log({f"test/{name}": value for name, value in _numbers(metrics).items()}, step=progress.update)
    accelerator.end_training()
    return RunResult(
        folder=recipe.folder / MODEL_FOLDER,
        recipe=recipe,
        corpus=corpus,
        progress=progress,
        metrics=metrics,
        parameters=model.num_parameters(),
        hardware=hardware_in_words(accelerator),
        processes=accelerator.num_processes,
    )


def check_trackers(names: list[str]) -> None:
    """Check that trackers are installed, for Accelerate goes on without those that are not.

    Raises:
        ValueError: If one is not.
    """
    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in installed:
            raise ValueError(
                f"`logging.trackers` must name installed ones ({', '.join(installed) or 'there is none'}), "
                f"but names {name}."
            )


def publish_weights(recipe: Recipe, loop: TrainingLoop) -> "PreTrainedModel":
    """Write the final folder: averaged weights, tokenizer, generation config and recipe.

    Returns:
        The model with the published weights, in every process.
    """
    checkpoints = published_checkpoints(loop.checkpoints, recipe.checkpoints, loop.progress)
    model = load_model(checkpoints[-1])
    if recipe.checkpoints.publish == "ema":
        logger.info("publishing the moving average of %s", checkpoints[-1].name)
        weights = load_file(checkpoints[-1] / STATE_FOLDER / MOVING_AVERAGE)
    else:
        logger.info("publishing the average of %s", ", ".join(path.name for path in checkpoints))
        weights = average_weights(checkpoints)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    assert not unexpected, unexpected
    set_decoding(model.generation_config, recipe.decoding)
    if loop.accelerator.is_main_process:
        with written_beside(recipe.folder / MODEL_FOLDER) as partial:
            model.save_pretrained(partial)
            loop.corpus.tokenizers.save_pretrained(partial)
            (partial / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    loop.accelerator.wait_for_everyone()
    return model


def set_decoding(config: "GenerationConfig", decoding: DecodingRecipe) -> None:
    """Write how the published model generates into its generation config, in place of what stood there.

    Args:
        config: The model's. `Translator` and `BeamSearch` read all of it, transformers' own search leaves out
            `length_penalty_form` and `tokens_beyond_source`, which stand there only where they change something.
        decoding: The recipe's section.
    """
    config.update(
        num_beams=decoding.num_beams,
        length_penalty=decoding.length_penalty,
        max_length=decoding.max_length,
        early_stopping=False,
    )
    # Of a config that counts as made from the model's, transformers reads its own settings alone.
    config._from_model_config = False
    for name, idle in SEARCH_SETTINGS.items():
        value = getattr(decoding, name)
        if value not in idle:
            setattr(config, name, value)
        elif hasattr(config, name):  # of the model that the run went on from
            delattr(config, name)


def test_published(recipe: Recipe, corpus: Corpus, accelerator: Accelerator) -> dict[str, Any]:
    """Load the published folder as a stranger would, and measure it on validation and test pairs.

    Returns:
        `validation` with loss and perplexity, and the scores of each test set, or of validation where there is none;
        also written to `metrics.json`.
    """
    folder = recipe.folder / MODEL_FOLDER
    translator = Translator.from_pretrained(folder, device=accelerator.device)
    pad, budget = translator.model.config.pad_token_id, recipe.token_budget
    loss = validation_loss(translator.model, corpus.validation, budget, pad, accelerator)
    metrics: dict[str, Any] = {"validation": {"loss": loss, "perplexity": float(torch.tensor(loss).exp())}}
    scoring = {"bootstrap": recipe.decoding.bootstrap, "tokenize": recipe.decoding.bleu_tokenizer}
    settings = {"target_language": corpus.languages[0] if corpus.languages else None, "token_budget": budget}
    for name, where in recipe.data.test.items():
        location = recipe.data.location(where)
        pairs = list(read_pairs(location, source=recipe.data.source, target=recipe.data.target, split=name))
        metrics[name] = score_pairs(translator, pairs, accelerator, scoring, **settings)
    if not recipe.data.test:  # better than no score at all, which no card may have
        pairs = corpus.validation_pairs[: recipe.validation.sentences or None]
        metrics["validation"] |= score_pairs(translator, pairs, accelerator, scoring, **settings)
    if accelerator.is_main_process:
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2), encoding="utf-8")
    return metrics


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        f"{name}/{key}": value
        for name, values in metrics.items()
        for key, value in values.items()
        if isinstance(value, int | float)
    }
