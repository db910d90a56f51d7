"""What both processes of test_zero.py do under DeepSpeed; each writes what it measured to result-RANK.json.

python zero_process.py FOLDER
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, set_seed

sys.path.insert(0, str(Path(__file__).parents[1]))
from process_checks import END, NO_DROPOUT, make_loop, resumes, skips_together, weights_of

from heedful.data.micro_batches import split_update
from heedful.training.model_of_recipe import make_model
from heedful.training.preparation import prepare_corpus
from heedful.training.processes.devices import complete_deepspeed
from heedful.training.run import train
from tiny_runs import logged, tiny_recipe

BF16 = {"optimization.mixed_precision": "bf16"}
VALIDATED = {"validation.every_updates": 3, "validation.sentences": 5}
# Adam does not mind a gradient half as long; with this epsilon its step is nearly proportional to the gradient.
PROPORTIONAL = {"optimization.epsilon": 1e3, "optimization.learning_rate": 300.0}
AVERAGED = {"optimization.ema_decay": 0.5, "checkpoints.publish": "ema"}
# What is compared with one process without DeepSpeed: several micro-batches to an update, of which one may be empty.
COMPARED = {
    "several": {**NO_DROPOUT, **VALIDATED, **AVERAGED, "optimization.token_budget": 250},
    "decayed": {
        **{**NO_DROPOUT, "model.gradient_checkpointing": True},
        **{"optimization.optimizer": "adamw", "optimization.weight_decay": 0.5},
    },
    "clipped": {**NO_DROPOUT, **PROPORTIONAL, "optimization.max_grad_norm": 0.3},
    "free": {**NO_DROPOUT, **PROPORTIONAL},
    "lonely": {**NO_DROPOUT, **PROPORTIONAL, "optimization.tokens_per_update": 1},
}
NAMES = ("train/loss", "train/gradient_norm", "validation/loss", "validation/chrf")


def zero_accelerator(changes: dict) -> Accelerator:
    """Set up what `make_accelerator` would, which refuses DeepSpeed without GPUs."""
    settings = tiny_recipe(Path("any"), changes).optimization
    AcceleratorState._reset_state()
    backend = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(mixed_precision=settings.mixed_precision, kwargs_handlers=[backend])
    complete_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, settings)
    return accelerator


def compared(folder: Path, tokenizer: Path) -> dict:
    measured = {}
    for name, changes in COMPARED.items():
        accelerator = zero_accelerator(changes)
        corpus = prepare_corpus(tiny_recipe(folder / name, changes), tokenizer, accelerator)
        loop = make_loop(folder / name, changes, corpus, accelerator)
        update = next(iter(corpus.updates(0)))
        parts = split_update(update, loop.token_budget, loop.accelerator.num_processes)[accelerator.process_index]
        loop.run()
        measured[name] = {value: logged(folder / name, value) for value in NAMES}
        measured[name]["rows"] = [len(rows) for rows in parts]
    return measured


def many_micro_batches(folder: Path, tokenizer: Path) -> dict:
    """Return how many micro-batches an update is, and the norm of its gradient in float32 and in bf16."""
    changes = {**NO_DROPOUT, "optimization.tokens_per_update": 8000, "optimization.token_budget": 60}
    measured = {}
    for precision in ("no", "bf16"):
        changes |= {"optimization.max_updates": 1, "optimization.mixed_precision": precision}
        accelerator = zero_accelerator(changes)
        corpus = prepare_corpus(tiny_recipe(folder / precision, changes), tokenizer, accelerator)
        loop = make_loop(folder / precision, changes, corpus, accelerator)
        measured["micro_batches"] = len(
            split_update(next(iter(corpus.updates(0))), loop.token_budget, loop.accelerator.num_processes)[0]
        )
        loop.run()
        measured[precision] = logged(folder / precision, "train/gradient_norm")[0]
    return measured


def resumed(folder: Path, corpus) -> dict:
    """Stop and go on: with a moving average in float32, and without it in bf16, where there can be none."""
    averaged = {**AVERAGED, "validation.every_updates": 3}
    return {
        "float32": resumes(folder / "resumed", averaged, corpus, zero_accelerator(averaged), (1, 3, 5)),
        "bf16": resumes(folder / "resumed-bf16", BF16, corpus, zero_accelerator(BF16), (1, 4)),
    }


def mixed(folder: Path, corpus) -> dict:
    """Go on with what one process without DeepSpeed began, and begin what one will go on with."""
    changes = {**NO_DROPOUT, "resume": True}
    loop = make_loop(folder / "begun-alone", changes, corpus, zero_accelerator(changes))
    before = loop.progress.update
    loop.run()
    make_loop(
        folder / "begun-zero",
        {**NO_DROPOUT, "optimization.max_updates": 3},
        corpus,
        zero_accelerator(NO_DROPOUT),
    ).run()
    return {"before": before, "losses": logged(folder / "begun-alone", "train/loss")}


def masters(folder: Path, corpus) -> dict:
    """Look at the weights of a run in bf16: those it begins with, those it saves, those it computes with."""
    loop = make_loop(folder / "bf16", BF16, corpus, zero_accelerator(BF16))
    set_seed(loop.recipe.seed)
    original = dict(make_model(loop.recipe.model, corpus.tokenizers).named_parameters())
    begun = loop.engine.weights(keep=True)
    same = all(torch.equal(begun[name], weight) for name, weight in original.items())
    loop.run()
    saved = weights_of(folder / "bf16", END)
    network = dict(loop.engine.network.named_parameters())
    return {
        "begun_with_float32": same and len(original) > 20,
        "kind_of_network": sorted({str(weight.dtype) for weight in network.values()}),
        "kind_of_saved": sorted({str(weight.dtype) for weight in saved.values()}),
        "copies_are_rounded": all(torch.equal(network[name], saved[name].bfloat16()) for name in network),
        "saved_are_not": any(not torch.equal(weight, weight.bfloat16().float()) for weight in saved.values()),
        "losses": logged(folder / "bf16", "train/loss"),
    }


def refused(folder: Path, corpus) -> str:
    try:
        make_loop(folder / "refused", {"optimization.shrink_token_budget": True}, corpus, zero_accelerator({}))
    except ValueError as error:
        return str(error)
    return "nothing"


@contextmanager
def without_end():
    """A finished run dissolves its processes' group, and these may have more to do."""
    with patch.object(Accelerator, "end_training"):
        yield


def whole_run(folder: Path) -> dict:
    """Everything `heedful train` does, from the corpus to the test and the published folder."""
    changes = {**BF16, **VALIDATED, "data.test": {"small": "builtin:test:7"}, "decoding.bootstrap": 40}
    with patch("heedful.training.run.make_accelerator", lambda *_: zero_accelerator(changes)), without_end():
        result = train(tiny_recipe(folder / "run", {"optimization.token_budget": 700, **changes}))
    return {"folder": str(result.folder), "count": result.metrics["small"]["count"], "processes": result.processes}


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    tokenizer = where / "tokenizer"
    plain = prepare_corpus(tiny_recipe(where / "plain"), tokenizer, zero_accelerator({}))
    found = {
        "processes": torch.distributed.get_world_size(),
        "compared": compared(where / "zero", tokenizer),
        "many": many_micro_batches(where / "zero", tokenizer),
        "resumed": resumed(where, plain),
        "mixed": mixed(where, plain),
        "masters": masters(where, plain),
        "skipped": [
            skips_together(where / f"skipped-{number}", plain, zero_accelerator(changes))
            for number, changes in enumerate(({}, BF16))
        ],
        "refused": refused(where, plain),
        "run": whole_run(where),
    }
    (where / f"result-{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
