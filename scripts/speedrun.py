"""Race: train a translation model from raw pairs, and print its validation scores and what it cost.

    python scripts/speedrun.py multi30k path/to/multi30k
    python scripts/speedrun.py multi30k path/to/multi30k seed=2 optimization.max_updates=500

The whole run is below, from pairs to scores. Change a line, or a recipe's key on the command line, and race against
docs/studies/speedrun.md. `--test` also scores the test sets. Set OMP_NUM_THREADS=1 to use one core.
"""

import json
import time
from itertools import count, islice
from typing import Annotated, Any, NamedTuple

import typer
from accelerate.utils import set_seed

from heedful.data.epochs.micro_batches import split_update
from heedful.data.sources import read_pairs
from heedful.decoding.translation import Translator
from heedful.training.loop.loop import seed_of_update
from heedful.training.loop.validation import score_pairs, validation_loss
from heedful.training.model_of_recipe import make_engine, make_model
from heedful.training.preparation import corpus_of
from heedful.training.processes.devices import make_accelerator
from heedful.training.recipe import Recipe
from heedful.training.recipe_file import read_recipe
from heedful.training.updates.model_size import operations_of_pairs
from heedful.training.updates.schedule import learning_rate


class Race(NamedTuple):
    """A race: the validation score to reach, and the best run so far."""

    metric: str
    goal: float
    recipe: str
    keys: dict[str, Any]  # changes to the recipe


def narrow_model(layers: int, updates: int, weight_decay: float) -> dict[str, Any]:
    """Return the keys of a short run with d_model 128; weight decay is best near 4 / (rate × updates)."""
    sizes = {"layers": layers, "attention_heads": 4, "ffn_dim": 512}
    return {
        "model.options.norm_placement": "pre",
        "model.options.d_model": 128,
        **{f"model.options.{side}_{name}": size for name, size in sizes.items() for side in ("encoder", "decoder")},
        "model.options.dropout": 0.0,
        "optimization.optimizer": "muon",
        "optimization.learning_rate": 0.006,
        "optimization.embedding_learning_rate": 0.012,
        "optimization.weight_decay": weight_decay,
        "optimization.max_updates": updates,
        "optimization.warmup_updates": updates // 10,
        "optimization.tokens_per_update": 4096,
    }


RACES = {
    "multi30k": Race("bleu", 38.8, "multi30k-de-en", narrow_model(2, 1000, 0.5)),
    "tatoeba": Race("bleu", 44.0, "tatoeba-en-de", {}),
    "ko_en": Race("chrf", 52.0, "ko-en", narrow_model(3, 3500, 0.4)),
}


def race(recipe: Recipe, tests: bool) -> dict[str, Any]:
    """Train and score, and return the scores and the cost."""
    begun, settings = time.process_time(), recipe.optimization
    accelerator = make_accelerator(settings)

    # Data: pairs, their tokenizer, and their tokens.
    corpus = corpus_of(recipe, None, accelerator)

    # Model, optimizer, and steps whose gradient does not depend on the division into micro-batches.
    set_seed(recipe.seed)
    model = make_model(recipe.model, corpus.tokenizers)
    engine = make_engine(accelerator, model, settings)
    model.train()

    # Training.
    sources = targets = 0
    updates = (update for epoch in count() for update in corpus.training.updates(epoch))
    for number, update in enumerate(islice(updates, settings.max_updates), start=1):
        set_seed(seed_of_update(recipe.seed, number - 1, accelerator.process_index))  # of dropout
        rows = [row for bucket in update for row in bucket]
        tokens = sum(len(row["labels"]) for row in rows)
        sources, targets = sources + sum(len(row["input_ids"]) for row in rows), targets + tokens
        parts = split_update(update, settings.micro_batch_tokens, 1)
        engine.accumulate(engine.feed.micro_batches(parts), tokens)
        rate = learning_rate(number, settings, model.config.d_model)
        engine.step(rate, engine.gradient_norm(settings.max_grad_norm))
    minutes = (time.process_time() - begun) / 60

    # Scores.
    loss = validation_loss(model, corpus.validation, engine.feed.token_budget, accelerator)
    cost = {"core_minutes": round(minutes, 2), "updates": settings.max_updates, "target_tokens": targets}
    cost["operations"] = float(f"{operations_of_pairs(model, sources, targets):.3g}")
    translator, scoring = Translator(model, corpus.tokenizers), {"metrics": ("bleu", "chrf")}
    sets = {"validation": corpus.validation_pairs}
    if tests:
        located, sides = recipe.data.located.test, (recipe.data.source, recipe.data.target)
        sets |= {name: list(read_pairs(location, *sides, split=name)) for name, location in located.items()}
    search = {"num_beams": recipe.decoding.num_beams, "max_new_tokens": recipe.decoding.max_length - 1}
    scores = {name: score_pairs(translator, pairs, accelerator, scoring, **search) for name, pairs in sets.items()}
    rounded = {name: {key: round(found[key], 2) for key in ("bleu", "chrf")} for name, found in scores.items()}
    return cost | {"loss": round(loss, 3)} | rounded


def main(
    name: Annotated[str, typer.Argument(help=f"The race: {', '.join(RACES)}.")],
    folder: Annotated[str, typer.Argument(help="The corpus.")],
    changes: Annotated[list[str] | None, typer.Argument(help="Changed recipe keys, as key=value.")] = None,
    test: Annotated[bool, typer.Option(help="Score the test sets too.")] = False,
):
    """Run a race and print a line of JSON."""
    metric, goal, recipe_name, keys = RACES[name]
    own = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    found = race(read_recipe(recipe_name, [f"data.folder={folder}", *own, *(changes or [])]), test)
    print(json.dumps({"race": name, "changes": changes or [], **found, "won": found["validation"][metric] >= goal}))


if __name__ == "__main__":
    typer.run(main)
