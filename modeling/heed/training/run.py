"""One training run from its recipe to a folder that anybody can load: data, loop, published weights, test scores."""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file

from heed.data.sources import read_pairs
from heed.evaluation.metrics import score_translations
from heed.inference.loading import load_model
from heed.inference.translation import Translator
from heed.training.averaging import average_weights
from heed.training.checkpoints import (
    MOVING_AVERAGE,
    STATE_FOLDER,
    Progress,
    newest_whole_checkpoint,
    published_checkpoints,
    written_beside,
)
from heed.training.devices import hardware_in_words, make_accelerator
from heed.training.loop import TrainingLoop
from heed.training.preparation import Corpus, prepare_corpus
from heed.training.recipe import Recipe, read_recipe
from heed.training.validation import score_pairs, validation_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"
# What a run writes into its folder; `overwrite` deletes these and nothing else.
RUN_FILES = (
    "recipe.yaml",
    "log.jsonl",
    "checkpoints",
    "tokenizer",
    "tokenizer.partial",
    "trackers",
    "model.partial",
    "model",
)
# What may change when a run is resumed, and leaves it the same run: where things lie, how long it goes on, how it is
# split, looked at, kept and published.
HARMLESS = (
    "output",
    "resume",
    "overwrite",
    "allow_changes",
    "data.folder",
    "data.test",
    "optimization.max_updates",
    "optimization.max_epochs",
    "optimization.max_minutes",
    "optimization.token_budget",
    "optimization.shrink_token_budget",
    "optimization.skip_nonfinite_updates",
    "optimization.device",
    "validation",
    "checkpoints",
    "decoding",
    "logging",
    "card",
)


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
    accelerator = make_accelerator(recipe)
    accelerator.wait_for_everyone()  # nobody writes before everybody has looked
    folder = recipe.folder
    set_seed(recipe.seed)
    with _set_aside(recipe) if recipe.overwrite and accelerator.is_main_process else contextlib.nullcontext():
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        with accelerator.main_process_first():
            corpus = prepare_corpus(recipe, folder / "tokenizer", accelerator)
        logger.info("%s training pairs, %s too long\n%s", corpus.pairs, corpus.encoder.too_long, corpus.report)
        loop = TrainingLoop(recipe, corpus, accelerator)
    if recipe.logging.trackers:
        accelerator.init_trackers(recipe.name)
    progress = loop.run()
    model = publish_weights(recipe, loop)
    metrics = test_published(recipe, corpus, accelerator)
    accelerator.log({f"test/{name}": value for name, value in _numbers(metrics).items()}, step=progress.update)
    accelerator.end_training()
    return RunResult(
        folder=folder / MODEL_FOLDER,
        recipe=recipe,
        corpus=corpus,
        progress=progress,
        metrics=metrics,
        parameters=model.num_parameters(),
        hardware=hardware_in_words(accelerator),
        processes=accelerator.num_processes,
    )


def check_output_folder(recipe: Recipe) -> None:
    """Check that the run may write into its folder.

    Raises:
        ValueError: If the folder is not empty and the recipe says neither `resume` nor `overwrite`, or the run in it
            was another one.
    """
    folder = recipe.folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output` must be a folder, but {folder} is a file.")
    if not folder.is_dir() or not any(folder.iterdir()) or recipe.overwrite:
        return
    if not recipe.resume:
        raise ValueError(
            f"`output` must be an empty folder, but {folder} is not: continue the run in it with resume=true, "
            "delete it with overwrite=true, or choose another folder with output=…"
        )
    checkpoint = newest_whole_checkpoint(folder / "checkpoints")
    # A run that has no checkpoint yet may have its tokenizer.
    written = folder / "recipe.yaml" if checkpoint is None else checkpoint / STATE_FOLDER / "recipe.yaml"
    if not written.is_file():
        raise ValueError(f"`output` must be the folder of a run where resume=true, but {folder} holds none.")
    if recipe.allow_changes:
        return
    earlier, now = asdict(read_recipe(written)), asdict(recipe)
    for name in changed_keys(earlier, now):
        then, value = (_look_up(tree, name) for tree in (earlier, now))
        raise ValueError(
            f"`{name}` must be as in the run that is resumed ({then}), but is {value} instead: it would no longer be "
            "the same run. allow_changes=true resumes all the same."
        )


def changed_keys(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the keys, with dots, whose change makes of a recipe another run: not those of logging, say."""
    harmless = set(HARMLESS)
    if now.get("optimization", {}).get("schedule") in ("linear", "cosine"):
        harmless.discard("optimization.max_updates")  # the learning rate follows from it
    if now.get("data", {}).get("streaming"):
        harmless.discard("data.test")  # its pairs are left out of training, which no checksum of a stream can tell
    return [
        name
        for name in _leaves(now) | _leaves(earlier)
        if not any(name == key or name.startswith(key + ".") for key in harmless)
        and _look_up(earlier, name) != _look_up(now, name)
    ]


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, None]:
    """Return the dotted names of all values, in order."""
    names: dict[str, None] = {}
    for key, value in tree.items():
        names |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": None}
    return names


def _look_up(tree: dict[str, Any], name: str) -> Any:
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


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
    decoding = recipe.decoding
    model.generation_config.update(
        num_beams=decoding.num_beams,
        length_penalty=decoding.length_penalty,
        max_length=decoding.max_length,
        early_stopping=False,
    )
    if loop.accelerator.is_main_process:
        with written_beside(recipe.folder / MODEL_FOLDER) as partial:
            model.save_pretrained(partial)
            loop.corpus.tokenizers.save_pretrained(partial)
            (partial / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    loop.accelerator.wait_for_everyone()
    return model


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


@contextlib.contextmanager
def _set_aside(recipe: Recipe) -> Iterator[None]:
    """Move an earlier run's files beside its folder; delete them if what follows succeeds, else put them back."""
    folder = recipe.folder
    aside = folder.with_name(folder.name + ".replaced")
    if aside.exists():
        raise ValueError(
            f"{aside} holds a run that an interrupted overwrite=true set aside: move it away or delete it."
        )
    aside.mkdir(parents=True)
    for name in RUN_FILES:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    try:
        yield
    except BaseException:
        _delete_run(folder)
        for path in aside.iterdir():
            path.rename(folder / path.name)
        aside.rmdir()
        raise
    shutil.rmtree(aside)


def _delete_run(folder: Path) -> None:
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        f"{name}/{key}": value
        for name, values in metrics.items()
        for key, value in values.items()
        if isinstance(value, int | float)
    }
