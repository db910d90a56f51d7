"""A recipe of several stages: runs one behind the other, each from the model of the one before, in one folder.

Each stage is a whole run in a folder of its own, `stages/1-NAME`, with checkpoints, so that what is killed goes on
where it was. All have one tokenizer, which knows the tags of all of them.
"""

import json
import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heedful.data.mixture import mark_ids, source_prefixes
from heedful.data.tokenization import TokenizerPair
from heedful.files import read_object, write_text
from heedful.training import preparation
from heedful.training.loop.monitoring import LOG_FILE, lines_of
from heedful.training.model_of_recipe import check_model
from heedful.training.processes.collectives import lost_processes_reported
from heedful.training.processes.devices import make_accelerator
from heedful.training.processes.launcher import world_size
from heedful.training.publication import MODEL_FOLDER, copy_foreign_files
from heedful.training.recipe import DataRecipe, Recipe, mistake
from heedful.training.recipe_file import make_recipe, read_recipe, recipe_of, to_yaml
from heedful.training.run import RunResult, train_one
from heedful.training.run_folder.checkpoints import CHECKPOINTS, load_progress, newest_whole_checkpoint, written_folder
from heedful.training.run_folder.folder import check_output_folder, folder_of_run
from heedful.training.run_folder.progress import Progress
from heedful.training.start_checks import check_installed

logger = logging.getLogger(__name__)

STAGES = "stages"  # the folder, and the key of a recipe
NAME = re.compile(r"[A-Za-z0-9_-]+")
# What a stage may change: not what makes it another model, or what is said of the whole run.
CHANGED = ("data", "optimization", "validation", "checkpoints", "decoding", "logging", "seed")
OF_MODEL = ("attn_implementation", "activation_checkpointing")


@dataclass(frozen=True)
class StageFacts:
    """What a stage came to, for the card of the whole run."""

    name: str
    progress: Progress
    scores: Mapping[str, Mapping[str, Any]]  # by the name of the split, as in `metrics.json`
    data: DataRecipe  # that it learned from
    ended: str  # why it ended before its last update; empty where it did not


def stages_of(recipe: Recipe) -> dict[str, Recipe]:
    """Return the recipe of each stage by its name, in their order; each has the model that the first begins with."""
    found: dict[str, Recipe] = {}
    base = {key: value for key, value in asdict(recipe).items() if key != STAGES}
    for number, changes in enumerate(recipe.stages, start=1):
        name = changes.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in found:
            must = "another one for each stage, of letters, digits, '-' and '_'"
            raise mistake(f"{STAGES}.{number}.name", must, repr(name))
        model = changes.get("model")
        parts = [f"model.{part}" for part in model if part not in OF_MODEL] if isinstance(model, dict) else []
        if wrong := [key for key in changes if key not in ("name", "model", *CHANGED)] + parts:
            reason = "all stages train one model with one tokenizer, into one folder"
            raise mistake(f"{STAGES}.{name}.{wrong[0]}", "left out", "given", reason)
        own = {key: value for key, value in changes.items() if key != "name"}
        place: dict[str, Any] = dict.fromkeys(("resume", "overwrite", "allow_changes"), False)
        place |= {"name": f"{recipe.name}, {name}", "output": str(recipe.folder / STAGES / f"{number}-{name}")}
        with _named(name):
            found[name] = make_recipe(_merged(base, own | place))
    return _apart(found)


def _apart(stages: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return the stages' recipes, each without the validation and test texts of the others in what it trains on."""
    precisions = {stage.optimization.mixed_precision for stage in stages.values()}
    if len(precisions) > 1 and world_size() > 1:
        must = "the same in all stages where there are several processes"
        raise mistake("optimization.mixed_precision", must, " and ".join(sorted(precisions)))
    trained = [replace(stage.data, test={}) for stage in stages.values()]
    if any(data.validation is None and data != trained[0] for data in trained):
        raise mistake("data.validation", "given where stages have different `data`", "empty")
    kept = {name: {"validation": s.data.located.validation, **s.data.located.test} for name, s in stages.items()}
    others = {f"{name}.{split}": place for name, places in kept.items() for split, place in places.items() if place}
    apart = {}
    for name, stage in stages.items():
        held_out = dict(stage.data.held_out)
        for key, place in others.items():
            if place not in (*kept[name].values(), *held_out.values()):
                held_out[key] = place
        apart[name] = replace(stage, data=replace(stage.data, held_out=held_out))
    return apart


def runs_of(recipe: Recipe) -> list[Recipe]:
    """Return the recipes of a recipe's stages, or itself where it has none."""
    return [*stages_of(recipe).values()] or [recipe]


def directions_of(folder: Path) -> set[tuple[Any, Any]]:
    """Return the sources and targets of all that the recipe in a model's folder trains on, in any stage."""
    return {(part.source, part.target) for run in runs_of(recipe_of(folder)) for part in run.data.parts.values()}


def train_stages(recipe: Recipe) -> RunResult:
    """Train all stages of a recipe, or go on with them, and publish what the last one made.

    The folder has `recipe.yaml`, `stages/` with a run for each stage, a `log.jsonl` of all, in which updates count on,
    and `model/`, which is the last stage's. It returns the last stage's result, with that folder and `stages`.
    Errors are those of `train`, and of `stages_of`.
    """
    stages = stages_of(recipe)
    row = _in_a_row(stages)
    check_output_folder(recipe)
    given = preparation.given_tokenizers(recipe, None, is_main=False)
    for (name, stage), behind in zip(stages.items(), row, strict=True):
        with _named(name):
            check_installed(stage)
            check_model(stage, given)
            if recipe.resume:
                _check_resumed(behind, recipe.allow_changes, is_last=behind is row[-1])
    accelerator = make_accelerator(recipe.optimization)
    accelerator.wait_for_everyone()  # all look before one writes
    is_main = accelerator.is_main_process
    with (
        lost_processes_reported(accelerator),
        folder_of_run(recipe.folder, recipe.overwrite) if is_main else nullcontext(),
    ):
        if is_main and not _is_begun(recipe, stages):
            _begin(recipe, stages)
        accelerator.wait_for_everyone()  # an earlier run may have been moved aside
        for name, stage in zip(stages, row, strict=True):
            if stage is row[-1] or not _is_done(stage):  # the last one gives the result
                logger.info("stage %s", stage.name)
                is_begun = (stage.folder / "recipe.yaml").is_file()
                changes: Any = {"resume": is_begun, "allow_changes": is_begun and recipe.allow_changes}
                result = train_one(replace(stage, **changes), f"{STAGES}.{name}.", stage is row[-1])
            if is_main:
                _join_logs(recipe.folder, stages)
        folder = recipe.folder / MODEL_FOLDER
        if is_main:
            with written_folder(folder) as partial:
                shutil.copytree(result.folder, partial, dirs_exist_ok=True)
                copy_foreign_files(folder, partial)
                (partial / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
        facts = tuple(_facts(name, stage) for name, stage in stages.items()) if is_main else ()
    whole: Any = {name: getattr(recipe, name) for name in ("name", "output", "tokenizer", "stages")}
    ended = tuple(stage.ended for stage in facts if stage.ended)
    return replace(result, folder=folder, recipe=replace(result.recipe, **whole), stages=facts, ended=ended)


@contextmanager
def rehearsed(recipe: Recipe) -> Iterator[dict[str, Recipe]]:
    """Yield the recipe of each stage by its name, with the tokenizers that all have, as long as the context lasts.

    A recipe without stages is one without a name.
    """
    if not recipe.stages:
        yield {"": recipe}
        return
    stages = stages_of(recipe)
    try:
        check_output_folder(recipe)
    except ValueError as error:
        warnings.warn(f"Training would refuse the recipe: {error}", stacklevel=3)
    with tempfile.TemporaryDirectory() as work:
        if preparation.given_tokenizers(recipe, None, is_main=False) is None:
            _tokenizers(recipe, stages, None).save_pretrained(work)
            settings = replace(recipe.tokenizer, path=work)
            stages = {name: replace(stage, tokenizer=settings) for name, stage in stages.items()}
        yield stages


def _merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with changes, section by section; an empty section takes the place of the earlier one."""
    merged = {}
    for key, value in changes.items():
        is_changed = value and isinstance(value, dict) and isinstance(tree.get(key), dict)
        merged[key] = _merged(tree[key], value) if is_changed else value
    return {**tree, **merged}


def _in_a_row(stages: Mapping[str, Recipe]) -> list[Recipe]:
    """Return the stages' recipes, each but the first with the model of the one before."""
    row: list[Recipe] = []
    for stage in stages.values():
        if row:
            model = replace(stage.model, config=None, options={}, start_from=str(row[-1].folder / MODEL_FOLDER))
            stage = replace(stage, model=model, tokenizer=replace(stage.tokenizer, path=None))
        row.append(stage)
    return row


def _begin(recipe: Recipe, stages: Mapping[str, Recipe]) -> None:
    """Give the first stage a folder with the tokenizers of all, as a run that ends before its first update does."""
    first = next(iter(stages.values()))
    given = preparation.given_tokenizers(first, None, is_main=True)
    tokenizers = _tokenizers(recipe, stages, given)
    write_text(recipe.folder / "recipe.yaml", to_yaml(recipe))
    if given is None:
        preparation.save_tokenizers(tokenizers, first.folder / "tokenizer", first)
        write_text(first.folder / "recipe.yaml", to_yaml(first))


def _is_begun(recipe: Recipe, stages: Mapping[str, Recipe]) -> bool:
    """Return whether a run has written its recipe and, unless they are given, the tokenizers of all stages."""
    first = next(iter(stages.values()))
    has_tokenizers = bool(first.tokenizer.path or first.model.start_from) or (first.folder / "recipe.yaml").is_file()
    return has_tokenizers and (recipe.folder / "recipe.yaml").is_file()


def _is_done(stage: Recipe) -> bool:
    return (stage.folder / MODEL_FOLDER / "metrics.json").is_file()  # what is written last


@contextmanager
def _named(stage: str) -> Iterator[None]:
    """Name the stage in a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Stage {stage} of the recipe: {error}") from error


def _check_resumed(stage: Recipe, allow_changes: bool, is_last: bool) -> None:
    """Check that a stage can go on, or that nothing changes of one that others have gone on from."""
    if not (stage.folder / "recipe.yaml").is_file():
        return
    is_over = _is_done(stage) and not is_last
    check_output_folder(replace(stage, resume=True, allow_changes=allow_changes and not is_over))
    if is_over and newest_whole_checkpoint(stage.folder / CHECKPOINTS) is None:
        raise ValueError(f"`output` must hold a checkpoint of each stage, but {stage.folder / CHECKPOINTS} has none.")
    earlier = asdict(read_recipe(stage.folder / "recipe.yaml").optimization)
    for name in ("max_updates", "max_epochs", "max_minutes") if is_over else ():
        if earlier[name] != (now := getattr(stage.optimization, name)):
            reason = "the stage is over, and another has gone on from it"
            raise mistake(f"optimization.{name}", f"as it was ({earlier[name]})", now, reason)


def _tokenizers(recipe: Recipe, stages: Mapping[str, Recipe], given: TokenizerPair | None) -> TokenizerPair:
    """Train tokenizers on what all stages learn from, unless they are given; faults of data are errors now."""
    kept = []
    for stage in stages.values():
        splits = preparation.read_splits(stage.data)
        preparation.check_references(splits, stage.decoding)
        kept.append((stage, preparation.clean(splits, stage.data)))
    alike = {str(asdict(stage.data)): (stage.data, splits) for stage, splits in kept}.values()  # each pair counts once
    held_out = [splits.validation for _, splits in alike if splits.is_held_out]
    pairs = [splits.train for _, splits in alike]
    tokenizers = given or preparation.tokenizers_of(recipe, pairs, held_out, [data for data, _ in alike])
    for stage, splits in kept:
        check_model(stage, tokenizers)
        source_prefixes(stage.data.parts, tokenizers)
        mark_ids(stage.data.denoise, tokenizers)
        preparation.check_symbols(tokenizers, splits, stage.decoding.ignore)
    return tokenizers


def _join_logs(folder: Path, stages: Mapping[str, Recipe]) -> None:
    """Write one log of all stages, in which updates and seconds count on."""
    lines, before = [], {"update": 0, "seconds": 0.0}
    for name, stage in stages.items():
        done = dict(before)
        for _, line in lines_of(stage.folder / LOG_FILE):
            if line:
                done = {key: round(before[key] + line[key], 2) for key in before}
                lines.append(json.dumps({"stage": name, **line, **done}) + "\n")
        before = done
    write_text(folder / LOG_FILE, "".join(lines))


def _facts(name: str, stage: Recipe) -> StageFacts:
    checkpoint = newest_whole_checkpoint(stage.folder / CHECKPOINTS)
    assert checkpoint is not None  # as `_check_resumed` saw
    scores = read_object(stage.folder / MODEL_FOLDER / "metrics.json")
    ended = scores.pop("ended", {}).get("message", "")
    return StageFacts(name, load_progress(checkpoint), scores, stage.data, ended)
