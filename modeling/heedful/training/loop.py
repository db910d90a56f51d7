"""The training loop: the same code on one CPU, one GPU, or many processes through `accelerate launch`.

An update's pairs, its loss and its gradient are the same however it is split: the summed loss of every micro-batch
is divided by the number of target tokens of the whole update, over all micro-batches and processes. What is random
follows from the seed, the update and the process, so that a resumed run goes on as if it had never stopped.
"""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.memory import should_reduce_batch_size
from tqdm.auto import tqdm

from heedful.data.batching import collate, split_update
from heedful.training.averaging import MovingAverage
from heedful.training.checkpoints import (
    Progress,
    TrainingState,
    clear_remains,
    kept_updates,
    load_state,
    newest_whole_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from heedful.training.monitoring import RunLog, new_window, training_values
from heedful.training.preparation import Corpus, Row, make_model
from heedful.training.processes import (
    any_of,
    in_total,
    is_sharded,
    lost_processes_told,
    told_by_main,
    whole_weights,
)
from heedful.training.recipe import Recipe
from heedful.training.schedule import learning_rate, make_optimizer
from heedful.training.validation import score_pairs, validation_loss
from heedful.training.watch import Watch
from heedful.training.zero import make_engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# fp16 begins with a scale that is too large and halves it until gradients fit: no sign of divergence.
FP16_SKIPS = 30


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
        engine: The model and its optimizer.

    Raises:
        ValueError: If the recipe asks for what these processes cannot do, or resumes what cannot be resumed.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, accelerator: Accelerator):
        self.recipe = recipe
        self.corpus = corpus
        self.accelerator = accelerator
        self.checkpoints = recipe.folder / "checkpoints"
        self.progress = Progress(processes=accelerator.num_processes, window=new_window(), data=corpus.fingerprint)
        self.log = RunLog(recipe.folder / "log.jsonl")
        newest = newest_whole_checkpoint(self.checkpoints) if recipe.resume and accelerator.is_main_process else None
        resumed_from: Path | None = told_by_main(accelerator, newest)
        set_seed(recipe.seed)
        model = make_model(recipe, corpus.tokenizers)
        if resumed_from is not None:
            model = _with_weights_of(resumed_from, model)
        if recipe.model.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self._kind, self._config, self._generation_config = type(model), model.config, model.generation_config
        self.d_model = model.config.d_model
        self.pad_token_id = corpus.tokenizers.source.pad_token_id
        optimizer = make_optimizer(model, recipe.optimization)
        self.engine = make_engine(accelerator, model, optimizer, recipe.optimization)
        self._check_sharding()
        self._saved_update: int | None = None
        decay = recipe.optimization.ema_decay
        self.moving_average = None if decay is None else MovingAverage(self.engine.network, decay)
        if resumed_from is not None:
            self._load(resumed_from)
        if accelerator.is_main_process:
            # What a killed run left half-written, or wrote after its last checkpoint, is not this run's.
            clear_remains(self.checkpoints, self.progress.update)
            self.log.rewind(self.progress.update, self.progress.validated_update)
            if resumed_from is not None:
                self._prune()  # a recipe that keeps fewer than before makes room
        accelerator.wait_for_everyone()
        limit = recipe.optimization.max_minutes
        self._time_is_up = limit is not None and self.progress.seconds >= limit * 60
        self._watch = Watch(accelerator)
        self._stop_signal: int | None = None
        self._is_stopping = False
        self._may_stop_anywhere = False

    def _check_sharding(self) -> None:
        if self.recipe.optimization.shrink_token_budget and self.engine.shards_weights():
            raise ValueError(
                "`optimization.shrink_token_budget` must be false where weights are sharded and no process can go "
                "without the others, but is true instead: set `optimization.token_budget` lower."
            )

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint, whatever the number of processes that wrote it."""
        state = load_state(path)
        if state.progress.data != self.progress.data and not self.recipe.allow_changes:
            raise ValueError(
                f"The data must be those of the run that is resumed ({path}), but their rows have changed; "
                "allow_changes=true resumes all the same."
            )
        self.engine.load(state.weights, state.optimizer)
        if self.moving_average is not None and state.moving_average is not None:
            self.moving_average.load(state.moving_average)
        if self.accelerator.scaler is not None and state.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.scaler)
        now, then = self.progress.processes, state.progress.processes
        if now != then:
            logger.info("%s processes go on with a run of %s: the same updates, other dropout", now, then)
        state.progress.processes, state.progress.data = now, self.progress.data
        self.progress = state.progress
        del self.progress.best[self.recipe.checkpoints.keep_best :]
        # A moving average that a changed recipe asks for begins here, and is still to be saved.
        lacks_average = self.moving_average is not None and state.moving_average is None
        self._saved_update = None if lacks_average else self.progress.update
        logger.info("resuming after update %s", self.progress.update)

    @property
    def model(self) -> torch.nn.Module:
        """The model as Accelerate wraps it."""
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer, likewise."""
        return self.engine.optimizer

    def run(self) -> Progress:
        """Train until the recipe's end, early stopping, or a signal.

        Returns:
            How far the run came.

        Raises:
            TrainingInterrupted: After Ctrl-C or SIGTERM; everything is saved.
            FloatingPointError: If too many updates in a row had no finite gradient; nothing is saved.
            MemoryError: If a micro-batch does not fit in memory.
            ProcessLostError: If another process of the run has ended.
            OSError: If the last checkpoint could not be written; earlier ones are tried again.
        """
        handlers = {number: signal.signal(number, self._note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        bar = tqdm(
            total=self.recipe.optimization.max_updates,
            initial=self.progress.update,
            unit="update",
            disable=not self.accelerator.is_main_process,
            mininterval=1.0,
        )
        try:
            with lost_processes_told(self.accelerator), self._watch:
                self._train(bar)
                self._save(must=True)
                self._prune()  # the last validation may have found a better one than those kept
                # Also, every process may count on what the main one has written.
                if any_of(self.accelerator, self._stop_signal is not None):
                    raise self._interruption()
        finally:
            bar.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.progress

    def _train(self, bar: tqdm) -> None:
        self._started = time.perf_counter() - self.progress.seconds
        self.model.train()
        if self.progress.awaits_validation:
            self._validate()  # the run was stopped between saving and validating
        if self._is_finished():
            logger.info(
                "nothing is left to train: the run has come to its end, after %s updates", self.progress.update
            )
        self.engine.settle(self._tensors([self.corpus.validation[0]]))
        updates = self._updates()
        while not self._is_finished():
            begun = time.perf_counter()
            update = next(updates, None)
            if update is None:
                break
            self.progress.window["waiting_seconds"] += time.perf_counter() - begun
            self._train_on(update)
            self.progress.seconds = time.perf_counter() - self._started
            self.progress.window["seconds"] += time.perf_counter() - begun
            bar.update()
            self._after_update(bar)

    def _updates(self) -> Iterator[list[list[Row]]]:
        """Yield updates from where the run stands, epoch after epoch."""
        last = self.recipe.optimization.max_epochs
        while last is None or self.progress.epoch < last:
            for number, update in enumerate(self.corpus.updates(self.progress.epoch)):
                if number >= self.progress.update_in_epoch:
                    self.progress.update_in_epoch = number + 1
                    yield update
            self.progress.epoch += 1
            self.progress.update_in_epoch = 0

    def _train_on(self, update: list[list[Row]]) -> None:
        """Take one optimizer step on the rows of an update, or skip it if its gradient is not finite."""
        tokens = sum(len(row["labels"]) for bucket in update for row in bucket)
        losses = None
        while losses is None:
            self._seed()
            losses = self._make_gradients(self._micro_batches(update), tokens)
        norm = self.engine.gradient_norm(self.recipe.optimization.max_grad_norm)
        is_finite = math.isfinite(norm)
        if is_finite:
            self._step()
        else:
            self._skip(norm)
        self.progress.update += 1
        self.progress.target_tokens += tokens
        loss, padded = self._agree(losses)
        if is_finite:
            all_tokens = tokens + sum(len(row["input_ids"]) for bucket in update for row in bucket)
            self._count(loss=loss, gradient_norm=norm, target_tokens=tokens, tokens=all_tokens)
            self._count(padded_tokens=padded, updates=1)

    def _agree(self, losses: torch.Tensor) -> tuple[float, float]:
        """Return loss and padded tokens of all processes; whether to stop is decided here too, once for all."""
        limit = self.recipe.optimization.max_minutes
        is_late = limit is not None and time.perf_counter() - self._started >= limit * 60
        is_told = self._stop_signal is not None
        loss, padded, told, late = in_total(self.accelerator, losses.item(), self._padded_tokens, is_told, is_late)
        self._is_stopping, self._time_is_up = told > 0, late > 0
        return loss, padded

    def _count(self, **values: float) -> None:
        for name, value in values.items():
            self.progress.window[name] += value

    def _seed(self) -> None:
        """Make dropout a matter of the seed, the update and the process alone."""
        set_seed(seed_of_update(self.recipe.seed, self.progress.update, self.accelerator.process_index))

    def _micro_batches(self, update: list[list[Row]]) -> list[list[list[Row]]]:
        """Return the micro-batches of an update: for every process, equally many lists of rows."""
        rows = [row for bucket in update for row in bucket]
        numbers = iter(range(len(rows)))
        processes = split_update(
            [[next(numbers) for _ in bucket] for bucket in update],
            [len(row["input_ids"]) for row in rows],
            [len(row["labels"]) for row in rows],
            self.token_budget,
            self.accelerator.num_processes,
        )
        return [[[rows[number] for number in part] for part in parts] for parts in processes]

    @property
    def token_budget(self) -> int:
        """Padded tokens of a micro-batch: the recipe's, or fewer where it allows that and memory ran out."""
        asked, shrunk = self.recipe.token_budget, self.progress.token_budget
        return min(asked, shrunk) if shrunk and self.recipe.optimization.shrink_token_budget else asked

    def _make_gradients(self, processes: list[list[list[Row]]], tokens: int) -> torch.Tensor | None:
        """Add up the gradients of this process's micro-batches, and exchange them.

        Returns:
            The summed loss of this process in nats, or `None` if memory ran out in some process and the token budget
            has been halved in all.
        """
        batches = processes[self.accelerator.process_index]
        filler = next(row for parts in processes for part in parts for row in part)
        shrinks = self.recipe.optimization.shrink_token_budget
        total = torch.zeros((), device=self.accelerator.device)
        self._padded_tokens, is_full = 0, False
        try:
            for number, rows in enumerate(batches):
                # Where memory may run out, no process may wait for another's gradients before all have theirs.
                with self.engine.micro_batch(exchanges=number == len(batches) - 1 and not shrinks):
                    total += self._backward(rows, tokens, filler)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            if not shrinks:
                raise self._memory_error() from error
            is_full = True
        if not shrinks:
            return total
        if any_of(self.accelerator, is_full):
            self._shrink_token_budget(processes)
            return None
        self.engine.exchange()
        return total

    def _backward(self, rows: list[Row], tokens: int, filler: Row) -> torch.Tensor:
        begun = time.perf_counter()
        batch = self._tensors(rows or [filler])
        self._count(waiting_seconds=time.perf_counter() - begun)
        loss = self.model(**batch, num_items_in_batch=tokens).loss
        if rows:
            self._padded_tokens += batch["input_ids"].numel() + batch["labels"].numel()
        else:
            loss = loss * 0  # a process without rows takes part in the exchange all the same
        self.engine.backward(loss)
        return loss.detach() * tokens

    def _tensors(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        batch = collate(rows, self.pad_token_id)
        return {name: values.to(self.accelerator.device) for name, values in batch.items()}

    def _shrink_token_budget(self, processes: list[list[list[Row]]]) -> None:
        self.engine.discard()
        torch.cuda.empty_cache()
        if all(len(part) <= 1 for parts in processes for part in parts):
            raise self._memory_error()
        self.progress.token_budget = self.token_budget // 2
        logger.warning(
            "update %s does not fit in memory: the token budget is halved to %s, and the update stays the same",
            self.progress.update + 1,
            self.progress.token_budget,
        )

    def _memory_error(self) -> MemoryError:
        return MemoryError(
            f"Update {self.progress.update + 1} does not fit in memory in micro-batches of {self.token_budget} padded "
            "tokens: set `optimization.token_budget` lower (the updates stay the same), or "
            "`optimization.shrink_token_budget` to true, or drop longer pairs with `data.max_source_tokens`."
        )

    def _step(self) -> None:
        number = self.progress.update + 1
        self.engine.step(learning_rate(number, self.recipe.optimization, self.d_model))
        if self.moving_average is not None:
            self.moving_average.update(number)
        self.progress.skipped_in_a_row = 0

    def _skip(self, norm: float) -> None:
        """Leave the weights as they are, or stop if that was done too often; the same in all processes."""
        self.engine.discard()
        self.engine.lower_scale()
        allowed = self.recipe.optimization.skip_nonfinite_updates
        if self.accelerator.scaler is not None:
            allowed = max(allowed, FP16_SKIPS)
        if self.progress.skipped_in_a_row >= allowed:
            raise FloatingPointError(
                f"Training has diverged at update {self.progress.update + 1} (the norm of its gradient is {norm}): "
                "the learning rate may be too high, or the warm-up too short. The last checkpoint is unharmed; "
                "`optimization.skip_nonfinite_updates` skips single updates."
            )
        self.progress.skipped_in_a_row += 1
        self.progress.skipped_updates += 1
        logger.warning("update %s is skipped: the norm of its gradient is %s", self.progress.update + 1, norm)

    def _after_update(self, bar: tqdm) -> None:
        """Log, save and validate where the recipe says so, and obey a signal."""
        if self._is_due("logging"):
            self._log_training(bar)
        self.progress.awaits_validation = self._is_due("validation")
        # Saved first, so that nothing is lost by a signal while the model translates.
        if self._is_stopping or self._is_due("validation") or self._is_due("checkpoints"):
            self._save(must=self._is_stopping)
        if self._is_stopping:
            raise self._interruption()
        if self._is_due("validation"):
            self._validate()

    def _is_due(self, section: str) -> bool:
        return self.progress.update % getattr(self.recipe, section).every_updates == 0

    def _log_training(self, bar: tqdm) -> None:
        values = training_values(self.progress.window)
        values["train/learning_rate"] = learning_rate(self.progress.update, self.recipe.optimization, self.d_model)
        values["train/skipped_updates"] = self.progress.skipped_updates
        self.progress.window = new_window()
        self._record(values)
        loss = f"loss {values['train/loss']:.3f}, " if "train/loss" in values else ""
        bar.set_postfix_str(f"{loss}{values['train/target_tokens_per_s']:,.0f} target tokens/s")

    def _validate(self) -> None:
        """Measure loss and scores on the validation pairs, and note how good they are."""
        from heedful.inference.translation import Translator

        settings, corpus, budget = self.recipe.validation, self.corpus, self.recipe.token_budget
        pairs = corpus.validation_pairs[: settings.sentences]
        self._may_stop_anywhere = self._saved_update == self.progress.update
        with self._measured_model() as model:
            loss = validation_loss(model, corpus.validation, budget, self.pad_token_id, self.accelerator)
            values: dict[str, Any] = {"loss": loss, "perplexity": math.exp(min(loss, 100))}
            if pairs:
                scoring = {"metrics": ("bleu", "chrf", "exact_match"), "tokenize": self.recipe.decoding.bleu_tokenizer}
                scores = score_pairs(
                    Translator(model, corpus.tokenizers),
                    pairs,
                    self.accelerator,
                    scoring,
                    target_language=corpus.languages[0] if corpus.languages else None,
                    token_budget=budget,
                    num_beams=settings.num_beams,
                    max_new_tokens=settings.max_new_tokens,
                )
                values |= {name: scores[name] for name in scoring["metrics"]}
        self._may_stop_anywhere = False
        self.model.train()
        values = told_by_main(self.accelerator, values)  # so that all stop early, or none
        self._record({f"validation/{name}": value for name, value in values.items()})
        told = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        logger.info("update %s (epoch %s): %s", self.progress.update, self.progress.epoch + 1, told)
        self._note_validation(values[settings.select])

    @contextmanager
    def _measured_model(self) -> Iterator["PreTrainedModel"]:
        """Yield an ordinary model with the weights that validation measures: the run's, or their moving average.

        Sharded weights are gathered into a model of each process, so that the processes need not wait for each other
        at every token they generate.
        """
        if self.moving_average is None and not is_sharded(self.model):
            yield self.engine.network
            return
        plain = self._kind(self._config).to(self.accelerator.device)
        plain.generation_config = self._generation_config
        average = self.moving_average
        weights = self.engine.weights(keep=True) if average is None else whole_weights(average.weights, keep=True)
        plain.load_state_dict(weights, strict=False)
        with self.accelerator.autocast():
            yield plain

    def _note_validation(self, value: float) -> None:
        progress = self.progress
        sign = 1 if self.recipe.validation.select == "loss" else -1
        improved = not progress.best or sign * value < sign * progress.best[0][0]
        progress.validations_without_improvement = 0 if improved else progress.validations_without_improvement + 1
        progress.validated_update, progress.awaits_validation = progress.update, False
        if self._saved_update == progress.update and math.isfinite(value):
            # Sorting is stable: of equals the first one counts as better.
            ranked = sorted([*progress.best, (value, progress.update)], key=lambda entry: sign * entry[0])
            progress.best = ranked[: self.recipe.checkpoints.keep_best]

    def _is_finished(self) -> bool:
        settings, progress, patience = self.recipe.optimization, self.progress, self.recipe.validation.patience
        if patience is not None and progress.validations_without_improvement >= patience:
            logger.info("no improvement in %s validations: stopping early", patience)
            return True
        return self._time_is_up or (settings.max_updates is not None and progress.update >= settings.max_updates)

    def _save(self, must: bool) -> None:
        """Write a checkpoint, unless this update has one, and delete what the recipe does not keep.

        Args:
            must: Whether to stop where it cannot be written; otherwise the run goes on, to try again later.
        """
        if self._saved_update == self.progress.update:
            return
        if any_of(self.accelerator, not self.engine.weights_are_finite()):
            raise FloatingPointError(
                f"Training has diverged near update {self.progress.update}: a weight is not finite. "
                "The last checkpoint is unharmed."
            )
        state, failure = self._state(), None
        if self.accelerator.is_main_process:
            with torch.device("meta"):
                blank = self._kind(self._config)
            blank.generation_config = self._generation_config
            try:
                with self._watch.busy():
                    save_checkpoint(self.checkpoints, blank, state, self.corpus.tokenizers, self.recipe.to_yaml())
            except OSError as error:
                failure = str(error)
        failure = told_by_main(self.accelerator, failure)
        if failure is None:
            self._saved_update = self.progress.update
            self._prune()
        elif must:
            raise OSError(failure)
        else:
            logger.warning("%s. Earlier checkpoints are unharmed, and training goes on.", failure)

    def _prune(self) -> None:
        if self.accelerator.is_main_process:
            kept = kept_updates(self.checkpoints, self.recipe.checkpoints, self.progress)
            prune_checkpoints(self.checkpoints, kept)

    def _state(self) -> TrainingState:
        """Collect what a checkpoint holds; every process takes part, and the main one gets it."""
        keep = self.accelerator.is_main_process
        average, scaler = self.moving_average, self.accelerator.scaler
        return TrainingState(
            progress=self.progress,
            weights=self.engine.weights(keep),
            optimizer=self.engine.optimizer_state(keep),
            moving_average=None if average is None else whole_weights(average.weights, keep),
            scaler=None if scaler is None else scaler.state_dict(),
        )

    def _record(self, values: dict[str, Any]) -> None:
        """Give values to the trackers, and to the run's own log."""
        self.accelerator.log(values, step=self.progress.update)
        if self.accelerator.is_main_process:
            self.log.write(self.progress.update, self.progress.seconds, values)

    def _note_signal(self, number, frame) -> None:
        if self._may_stop_anywhere:
            raise self._interruption()
        if number == signal.SIGINT and self._stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        # Clusters may send SIGTERM several times; only an impatient user means it.
        self._stop_signal = number
        logger.warning("stopping after this update and saving; Ctrl-C twice stops at once")

    def _interruption(self) -> TrainingInterrupted:
        return TrainingInterrupted(f"stopped after update {self.progress.update}; continue with resume=true")


def seed_of_update(seed: int, update: int, process: int) -> int:
    """Return where the random numbers of a process begin in the update after so many finished ones."""
    return int(np.random.SeedSequence([seed, update, process]).generate_state(1)[0])


def _with_weights_of(path: Path, model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a model of the same config with the weights of a checkpoint.

    Raises:
        ValueError: If they do not fit.
    """
    try:
        return type(model).from_pretrained(path, config=model.config)
    except RuntimeError as error:  # what transformers raises for weights of other sizes
        raise ValueError(
            f"`model` must have the sizes of the run that is resumed ({path}), with allow_changes=true too, "
            "but has others instead."
        ) from error
