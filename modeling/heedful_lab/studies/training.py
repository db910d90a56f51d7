"""One call that trains a model for a study, or loads it from an earlier run."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.files import write_text
from heedful.training.loop.monitoring import read_curves
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe

if TYPE_CHECKING:
    from heedful.decoding.translation import Translator

logger = logging.getLogger(__name__)

SHARED_RECIPE = Path(__file__).with_name("recipe.yaml")
SUMMARY = "training.json"  # written last, when the training has ended
WHERE_AND_HOW = ("output", "resume", "overwrite", "allow_changes")


@dataclass
class Training:
    """A finished training."""

    name: str  # unique in the study
    changes: dict[str, Any]  # to the shared recipe, by dotted key
    folder: Path  # with `log.jsonl` and `model/`
    updates: int  # optimizer steps
    target_tokens: int  # number seen in training
    parameters: int  # number, tied ones counted once
    seconds: float  # time for the updates, on the run's machine
    metrics: dict[str, Any]  # loss and perplexity on `validation`, scores by test set

    @property
    def loss(self) -> float:
        """Validation loss of the published weights, in nats per target token."""
        return self.metrics["validation"]["loss"]

    def bleu(self, test: str = "test") -> float:
        """Return BLEU on a test set."""
        return self.metrics[test]["bleu"]

    def curve(self, name: str = "validation/loss") -> list[tuple[float, float]]:
        """Return a logged value by update; `validation/loss` ends with the published model's."""
        points = dict(read_curves(self.folder).get(name, ()))
        if name == "validation/loss":
            points[self.updates] = self.loss
        if not points:
            raise ValueError(f"`name` must be a value that the log of {self.folder} has, but is {name!r} instead.")
        return sorted(points.items())

    def translator(self) -> "Translator":
        """Load model and tokenizers on the CPU."""
        from heedful.decoding.translation import Translator

        return Translator.from_pretrained(self.folder / "model", device="cpu")


def model_changes(options: Mapping[str, Any], learning_rate: float | None = None) -> dict[str, Any]:
    """Return the changes for a model with these options, its attention kernel, and the learning rate."""
    kernel = None if "model_type" in options else "eager"
    rate = {} if learning_rate is None else {"optimization.learning_rate": learning_rate}
    return {"model.options": dict(options), "model.attn_implementation": kernel, **rate}


def study_recipe(changes: dict[str, Any]) -> Recipe:
    """Return the shared recipe with changes: `{"model.options.dropout": 0.1, "optimization.max_updates": 100}`."""
    return read_recipe(SHARED_RECIPE, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def train_model(name: str, changes: dict[str, Any], folder: Path) -> Training:
    """Train a model by the shared recipe with changes, resume it, or find it in `folder` by its checksum."""
    recipe = study_recipe(changes)
    target = folder / checksum_of(recipe)
    summary = target / SUMMARY
    if summary.is_file():
        logger.info("already trained: %s (%s)", name, target)
    else:
        logger.info("training %s: %s", name, ", ".join(f"{key}={value}" for key, value in changes.items()))
        from heedful.training.run import train

        result = train(replace(recipe, output=str(target), resume=(target / "recipe.yaml").is_file()))
        done = result.progress
        values: dict[str, Any] = {
            "updates": done.update,
            "target_tokens": done.target_tokens,
            "parameters": result.parameters,
        }
        values |= {"seconds": done.seconds, "metrics": result.metrics}
        write_text(summary, json.dumps(values, indent=2))
    return Training(name, changes, target, **json.loads(summary.read_text(encoding="utf-8")))


def checksum_of(recipe: Recipe) -> str:
    """Return a training's name: a checksum of recipe and data files."""
    tree = {key: value for key, value in asdict(recipe).items() if key not in WHERE_AND_HOW}
    digest = hashlib.sha256(json.dumps([version("heedful"), tree], sort_keys=True).encode())
    where = recipe.data.located
    for location in (where.train, where.validation, *where.test.values()):
        for file in map(Path, [location] if isinstance(location, str) else location or []):
            if file.is_file():
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
