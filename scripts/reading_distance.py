"""Count what must be read to understand how a recipe becomes a gradient.

    python scripts/reading_distance.py

The way from `heedful train` to `loss.backward()` is read in whole files: those up to the model's door, where the loop
calls the model, and those behind it. Files whose name says enough are side doors: they are listed, and not counted.
A test holds both sums below their limits, and compares the lists with the call stack of a real training.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "modeling" / "heedful"

# Why each file has to be read.
TO_THE_DOOR = {
    "__main__.py": "`python -m heedful` calls the command",
    "cli/main.py": "the command, and `heedful train`, which reads a recipe and runs it",
    "training/recipe.py": "what can be asked for, key by key",
    "training/run.py": "the whole run: data, loop, publication, test",
    "training/preparation.py": "how pairs become rows, and rows become updates",
    "training/model_of_recipe.py": "how the recipe's model and its engine are made",
    "data/encoding.py": "what a row is",
    "data/batching.py": "which rows are together in an update",
    "data/micro_batches.py": "how an update is divided among ranks and made into tensors",
    "training/loop/loop.py": "what happens in an update, and after it",
    "training/loop/engine.py": "forward, `loss.backward()`, all-reduce, step",
    "training/loop/schedule.py": "the optimizer and its learning rate",
}
BEHIND_THE_DOOR = {
    "modeling_heed.py": "the model, from embeddings to its output",
    "positions_heed.py": "sinusoids and rotations",
    "attention_heed.py": "attention",
    "encoder_decoder_heed.py": "the stacks as one model, and its output layer",
    "loss_heed.py": "the loss, in both forms",
    "configuration_heed.py": "what each size and option means",
}
# What the name says is all that the way needs.
SIDE_DOORS = {
    "cli/options.py": "arguments that several commands share",
    "files.py": "files that appear whole or not at all",
    "data/sources.py": "reads pairs, wherever they are",
    "data/epochs/": "which rows an epoch has, and how their texts and words are changed",
    "data/cleaning.py": "drops pairs",
    "data/tokenization.py": "text to token ids and back",
    "data/tokenizer_training.py": "trains a tokenizer",
    "training/recipe_file.py": "YAML to a recipe",
    "training/run_folder/folder.py": "who may write into the run's folder",
    "training/start_checks.py": "what would end or ruin a run, found before it begins",
    "training/publication.py": "writes the published model, and tests it",
    "training/processes/signals.py": "Ctrl-C",
    "training/loop/monitoring.py": "the log",
    "training/loop/validation.py": "loss and scores on the validation pairs",
    "training/loop/averaging.py": "averages of weights",
    "training/loop/objective.py": "what R-Drop and distillation minimise beside the cross-entropy",
    "training/run_folder/": "what is saved, and kept",
    "training/processes/": "devices, launchers, collectives",
    "configuration_base_heed.py": "what the configurations of both model families share",
    "pretrained_heed.py": "loading and saving",
    "versions_heed.py": "what the versions of transformers name or do differently",
    "masks_heed.py": "which keys a query sees",
    "kernels_heed.py": "which function computes attention",
    "generation_heed.py": "`generate()`",
    "fast_paths_heed.py": "what only makes the CPU faster",
}
LIMITS = {"to the model's door": 1900, "behind it": 1400}
WAY = {"to the model's door": TO_THE_DOOR, "behind it": BEHIND_THE_DOOR}


def lines_of(name: str) -> int:
    """Return the lines of a file of the package, or of all Python files of a folder; 0 where there is none."""
    path = PACKAGE / name
    files = path.rglob("*.py") if path.is_dir() else [path] * path.is_file()
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def distance(part: str) -> int:
    """Return the lines of one part of the way."""
    return sum(map(lines_of, WAY[part]))


def main() -> None:
    """Print both parts of the way with their sums, and the side doors."""
    for part, files in WAY.items():
        print(f"{part} (at most {LIMITS[part]:,} lines)")
        for name, reason in files.items():
            print(f"{lines_of(name):>7,}  {name:<32} {reason}")
        print(f"{distance(part):>7,}  together\n")
    print("side doors, not counted")
    for name, reason in SIDE_DOORS.items():
        print(f"{lines_of(name):>7,}  {name:<32} {reason}")


if __name__ == "__main__":
    main()
