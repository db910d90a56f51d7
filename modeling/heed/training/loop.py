"""The training loop: the same code on one CPU, one GPU, or many processes through `accelerate launch`.

An update's pairs, its loss and its gradient are the same however it is split: the summed loss of every micro-batch
is divided by the number of target tokens of the whole update, over all micro-batches and processes.
"""

import json
import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from heed.data.batching import collate, split_update
from heed.training.checkpoints import (
    STATE_FOLDER,
    Progress,
    checkpoint_path,
    delete_unfinished,
    find_damage,
    list_checkpoints,
    load_progress,
    load_random_state,
    newest_whole_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    save_random_state,
)
from heed.training.preparation import Corpus, Row, make_model
from heed.training.recipe import Recipe
from heed.training.schedule import learning_rate, make_optimizer
from heed.training.validation import score_pairs, validation_loss

logger = logging.getLogger(__name__)


class TrainingInterrupted(Exception):
    """Raised after a signal asked the run to stop and its state was saved."""


class TrainingLoop:
    """One run: model, optimizer, data and how far they are.

    Args:
        recipe: What to do.
        corpus: Its data.
        accelerator: The processes and devices it runs on.

    Attributes:
        progress: How far the run is.
        model: The model as Accelerate wraps it.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, accelerator: Accelerator):
        self.recipe = recipe
        self.corpus = corpus
        self.accelerator = accelerator
        self.checkpoints = recipe.folder / "checkpoints"
        self.progress = Progress()
        set_seed(recipe.seed)
        model = make_model(recipe, corpus.tokenizers)
        self._resumed_from = newest_whole_checkpoint(self.checkpoints) if recipe.resume else None
        if self._resumed_from is not None:
            model = type(model).from_pretrained(self._resumed_from, config=model.config)
        if recipe.model.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        optimizer = make_optimizer(model, recipe.optimization)
        self.d_model = model.config.d_model
        self.pad_token_id = corpus.tokenizers.source.pad_token_id
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        # Every process has drawn the same weights; from here on each draws its own dropout.
        set_seed(recipe.seed, device_specific=True)
        if self._resumed_from is not None:
            self._load_state(self._resumed_from)
        if accelerator.is_main_process:
            # What a killed run left half-written would otherwise pass for this run's.
            delete_unfinished(self.checkpoints, self.progress.update)
        accelerator.wait_for_everyone()
        self._stop_signal: int | None = None
        self._window = {"loss": 0.0, "tokens": 0, "seconds": 0.0}

    def _load_state(self, path):
        self.progress = load_progress(path)
        state = torch.load(path / STATE_FOLDER / "optimizer.pt", weights_only=True, map_location="cpu")
        self.optimizer.load_state_dict(state)
        load_random_state(path, self.accelerator.process_index)
        logger.info("resuming after update %s", self.progress.update)

    def run(self) -> Progress:
        """Train until the recipe's end, early stopping, or a signal.

        Returns:
            How far the run came.

        Raises:
            TrainingInterrupted: After Ctrl-C or SIGTERM; everything is saved.
            FloatingPointError: If the loss or a weight is no longer finite; nothing is saved.
        """
        handlers = {number: signal.signal(number, self._note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        bar = tqdm(
            total=self.recipe.optimization.max_updates,
            initial=self.progress.update,
            unit="update",
            disable=not self.accelerator.is_main_process,
            mininterval=1.0,
        )
        started = time.perf_counter() - self.progress.seconds
        try:
            self.model.train()
            for update in () if self._is_finished() else self._updates():
                begun = time.perf_counter()
                self._train_on(update)
                self.progress.seconds = time.perf_counter() - started
                self._window["seconds"] += time.perf_counter() - begun
                bar.update()
                self._after_update(bar)
                if self._is_finished():
                    break
        finally:
            bar.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._save()
        return self.progress

    def _updates(self) -> Iterator[list[list[Row]]]:
        """Yield updates from where the run stands, epoch after epoch."""
        last = self.recipe.optimization.max_epochs
        while last is None or self.progress.epoch < last:
            for number, update in enumerate(self.corpus.updates(self.progress.epoch)):
                if number >= self.progress.update_in_epoch:
                    self.progress.update_in_epoch = number + 1
                    yield update
            if self.progress.update_in_epoch == 0:
                raise ValueError("The training data hold no pair.")
            self.progress.epoch += 1
            self.progress.update_in_epoch = 0

    def _train_on(self, update: list[list[Row]]) -> None:
        """Take one optimizer step on the rows of an update."""
        batches, tokens = self._micro_batches(update)
        for number, rows in enumerate(batches):
            is_last = number == len(batches) - 1
            # Gradients are exchanged once per update, with the last micro-batch.
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                batch = collate(rows or [update[0][0]], self.pad_token_id)
                batch = {name: values.to(self.accelerator.device) for name, values in batch.items()}
                loss = self.model(**batch, num_items_in_batch=tokens).loss
                if not rows:
                    loss = loss * 0  # a process without rows takes part in the exchange all the same
                self._window["loss"] += loss.detach() * tokens
                # Processes average their gradients, and this is a sum.
                self.accelerator.backward(loss * self.accelerator.num_processes)
        rate = learning_rate(self.progress.update + 1, self.recipe.optimization, self.d_model)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.recipe.optimization.max_grad_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.optimization.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress.update += 1
        self.progress.target_tokens += tokens
        self._window["tokens"] += tokens

    def _micro_batches(self, update: list[list[Row]]) -> tuple[list[list[Row]], int]:
        """Return this process's micro-batches of an update, and the target tokens of the whole update."""
        rows = [row for bucket in update for row in bucket]
        numbers = iter(range(len(rows)))
        buckets = [[next(numbers) for _ in bucket] for bucket in update]
        parts = split_update(
            buckets,
            [len(row["input_ids"]) for row in rows],
            [len(row["labels"]) for row in rows],
            self.recipe.token_budget,
            self.accelerator.num_processes,
        )
        mine = parts[self.accelerator.process_index]
        return [[rows[number] for number in part] for part in mine], sum(len(row["labels"]) for row in rows)

    def _after_update(self, bar) -> None:
        """Log, validate and save where the recipe says so, and obey a signal."""
        update, recipe = self.progress.update, self.recipe
        if update % recipe.logging.every_updates == 0:
            self._log_training(bar)
        improved = update % recipe.validation.every_updates == 0 and self._validate()
        stopped = self._agreed(self._stop_signal is not None)
        if improved or stopped or update % recipe.checkpoints.every_updates == 0:
            self._save()
        if stopped:
            raise TrainingInterrupted(f"stopped after update {update}; continue with resume=true")

    def _log_training(self, bar) -> None:
        window = self._window
        loss = torch.as_tensor(window["loss"], device=self.accelerator.device, dtype=torch.float32)
        loss_per_token = self.accelerator.reduce(loss, reduction="sum").item() / max(1, window["tokens"])
        if not math.isfinite(loss_per_token):
            raise FloatingPointError(self._diverged(f"the training loss is {loss_per_token}"))
        speed = window["tokens"] / max(window["seconds"], 1e-9)
        rate = learning_rate(self.progress.update, self.recipe.optimization, self.d_model)
        self._record({"train/loss": loss_per_token, "train/learning_rate": rate, "train/target_tokens_per_s": speed})
        bar.set_postfix_str(f"loss {loss_per_token:.3f}, {speed:,.0f} target tokens/s")
        self._window = {"loss": 0.0, "tokens": 0, "seconds": 0.0}

    def _diverged(self, what: str) -> str:
        return (
            f"Training has diverged near update {self.progress.update} ({what}): the learning rate may be too high, "
            "or the warm-up too short. The last checkpoint is unharmed."
        )

    def _validate(self) -> bool:
        """Measure loss and scores on the validation pairs; return whether the selected one is the best so far."""
        from heed.inference.translation import Translator

        settings, corpus = self.recipe.validation, self.corpus
        budget = self.recipe.token_budget
        loss = validation_loss(self.model, corpus.validation, budget, self.pad_token_id, self.accelerator)
        values: dict[str, Any] = {"loss": loss, "perplexity": math.exp(min(loss, 100))}
        pairs = corpus.validation_pairs[: settings.sentences]
        if pairs:
            translator = Translator(self.accelerator.unwrap_model(self.model), corpus.tokenizers)
            scoring = {"metrics": ("bleu", "chrf", "exact_match"), "tokenize": self.recipe.decoding.bleu_tokenizer}
            language = corpus.languages[0] if corpus.languages else None
            search = {"num_beams": settings.num_beams, "max_new_tokens": settings.max_new_tokens}
            scores = score_pairs(
                translator, pairs, self.accelerator, scoring, target_language=language, token_budget=budget, **search
            )
            values |= {name: scores[name] for name in scoring["metrics"]}
            self.model.train()
        self._record({f"validation/{name}": value for name, value in values.items()})
        told = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        logger.info("update %s (epoch %s): %s", self.progress.update, self.progress.epoch + 1, told)
        return self._note_validation(values[settings.select])

    def _note_validation(self, value: float) -> bool:
        progress = self.progress
        lower_is_better = self.recipe.validation.select == "loss"
        improved = progress.best is None or (value < progress.best if lower_is_better else value > progress.best)
        if improved:
            progress.best, progress.best_update = value, progress.update
        progress.validations_without_improvement = 0 if improved else progress.validations_without_improvement + 1
        return improved

    def _is_finished(self) -> bool:
        settings, progress = self.recipe.optimization, self.progress
        patience = self.recipe.validation.patience
        if patience is not None and progress.validations_without_improvement >= patience:
            logger.info("no improvement in %s validations: stopping early", patience)
            return True
        if settings.max_updates is not None and progress.update >= settings.max_updates:
            return True
        return settings.max_minutes is not None and self._agreed(progress.seconds >= settings.max_minutes * 60)

    def _agreed(self, mine: bool) -> bool:
        """Return whether any process says yes, so that all do the same."""
        if self.accelerator.num_processes == 1:
            return mine
        votes = torch.tensor(int(mine), device=self.accelerator.device)
        return self.accelerator.reduce(votes, reduction="sum").item() > 0

    def _save(self) -> None:
        """Write a checkpoint, unless this update has one, and delete what the recipe does not keep."""
        if checkpoint_path(self.checkpoints, self.progress.update).exists():
            return
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise FloatingPointError(self._diverged("a weight is not finite"))
        save_random_state(self.checkpoints, self.progress.update, self.accelerator.process_index)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            save_checkpoint(
                self.checkpoints,
                self.accelerator.unwrap_model(self.model),
                self.optimizer,
                self.corpus.tokenizers,
                self.progress,
                self.recipe.to_yaml(),
            )
            prune_checkpoints(self.checkpoints, self._kept_updates())
        self.accelerator.wait_for_everyone()

    def _record(self, values: dict[str, Any]) -> None:
        """Give values to the trackers, and to the run's own log."""
        self.accelerator.log(values, step=self.progress.update)
        if self.accelerator.is_main_process:
            line = {"update": self.progress.update, "seconds": round(self.progress.seconds, 2), **values}
            with (self.recipe.folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")

    def _note_signal(self, number, frame) -> None:
        if self._stop_signal is not None:
            raise KeyboardInterrupt
        self._stop_signal = number
        logger.warning("stopping after this update and saving; once more to stop at once")

    def _regular_updates(self) -> list[int]:
        """List the newest checkpoints that the recipe's interval made, and the one of this update."""
        every, now = self.recipe.checkpoints.every_updates, self.progress.update
        saved = [update for update, _ in list_checkpoints(self.checkpoints)]
        return [update for update in saved if update % every == 0 or update == now][
            -self.recipe.checkpoints.keep_last :
        ]

    def _kept_updates(self) -> set[int]:
        best = self.progress.best_update
        return {*self._regular_updates(), self.progress.update} | ({best} if best is not None else set())

    def publishable(self) -> list[Path]:
        """Return the checkpoints whose averaged weights the recipe publishes; damaged ones are left out."""
        publish, best = self.recipe.checkpoints.publish, self.progress.best_update
        updates = self._regular_updates()
        if publish == "last":
            updates = updates[-1:]
        elif publish == "best" and best is not None:
            updates = [best]
        paths = [checkpoint_path(self.checkpoints, update) for update in updates]
        damages = {path: find_damage(path) for path in paths}
        for path, damage in damages.items():
            if damage is not None:
                logger.warning("the checkpoint %s is left out of what is published: %s", path, damage)
        whole = [path for path in paths if damages[path] is None]
        # The last one was written a moment ago.
        return whole or [checkpoint_path(self.checkpoints, self.progress.update)]
