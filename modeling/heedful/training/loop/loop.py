"""The training loop: the same code on one CPU, one GPU, or many processes through `accelerate launch`.

An update's loss and gradient do not depend on its split: every summed loss is divided by the update's target tokens.
Seed, update and rank decide random numbers, so a resumed run continues as if it had never stopped.
"""

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.memory import should_reduce_batch_size
from tqdm.auto import tqdm

from heedful.data.epochs.corpus import Corpus, StoredRows, Update
from heedful.data.epochs.micro_batches import split_update
from heedful.training.loop.feed import MadeUpdate, made_ahead
from heedful.training.loop.monitoring import LOG_FILE, RunLog
from heedful.training.loop.validation import LOWER_IS_BETTER, validate
from heedful.training.model_of_recipe import make_engine, make_model
from heedful.training.processes.collectives import any_rank, broadcast
from heedful.training.processes.devices import kind_of_machine
from heedful.training.processes.heartbeat import lost_processes_reported, make_watch
from heedful.training.processes.signals import StopSignals, TrainingInterrupted
from heedful.training.recipe import Recipe
from heedful.training.run_folder.checkpoints import CheckpointStore, checkpoint_to_resume
from heedful.training.run_folder.progress import Progress, place_in_run
from heedful.training.start_checks import check_start, faults
from heedful.training.updates.engine import Result, Results
from heedful.training.updates.schedule import learning_rate

logger = logging.getLogger(__name__)

# fp16 begins with too large a scale and halves it until gradients fit.
FP16_SKIPS = 30


class TrainingLoop:
    """One run: model, optimizer, data and progress.

    `after_validation` gets the progress and the loss per target token; its error ends the run. Raises a `ValueError`
    if these processes cannot train or resume the recipe.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        accelerator: Accelerator,
        after_validation: Callable[[Progress, float], None] | None = None,
    ):
        self.recipe, self.settings, self.after_validation = recipe, recipe.optimization, after_validation
        self.corpus, self.accelerator = corpus, accelerator
        resumed_from = checkpoint_to_resume(recipe.folder if recipe.resume else None, accelerator)
        set_seed(recipe.seed)
        model = make_model(recipe.model, corpus.tokenizers, resumed_from)
        check_start(faults(recipe, corpus, model.config))
        self.d_model = model.config.d_model
        self.engine = make_engine(accelerator, model, self.settings)
        self.signals, self.watch = StopSignals(), make_watch(accelerator)
        self.checkpoints = CheckpointStore(recipe, corpus.tokenizers, self.engine, self.watch)
        machine = kind_of_machine(accelerator)
        self.progress = Progress(processes=accelerator.num_processes, data=corpus.fingerprint, machine=machine)
        if resumed_from is not None:
            self.progress = self.checkpoints.load(resumed_from, self.progress)
        self.checkpoints.clear(self.progress)
        self.log = RunLog(recipe.folder / LOG_FILE, accelerator, self.engine.network)
        self.log.rewind(self.progress)
        self.results = Results(accelerator)
        accelerator.wait_for_everyone()
        self._started = time.perf_counter() - self.progress.seconds
        # Judged by the saved seconds, because the clocks of ranks differ.
        self._is_stopping, self.time_is_up = False, self._is_late(self.progress.seconds)
        self.ended_by: str | None = None  # the key that ended training early

    def run(self) -> Progress:
        """Train until the recipe's end, early stopping, or a signal, and return the progress.

        Raises `TrainingInterrupted` after a signal, with everything saved; `FloatingPointError` after too many updates
        in a row without a finite gradient; `MemoryError` if a micro-batch does not fit; and `OSError` if the last
        checkpoint cannot be written.
        """
        is_hidden = not self.accelerator.is_main_process
        total, done = self.settings.max_updates, self.progress.update
        bar = tqdm(total=total, initial=done, unit="update", disable=is_hidden, mininterval=1.0)
        with bar, self.signals, lost_processes_reported(self.accelerator), self.watch:
            self._train(bar)
            self.checkpoints.save(self.progress, must=True)
            # Every rank waits here until the main rank has written.
            if any_rank(self.accelerator, self.signals.received is not None):
                raise self._interruption()
            if self.recipe.checkpoints.publish == "best" and not self._is_due("validation"):
                # The last weights may be the best. This validation is not in the saved progress, so a resumed run
                # equals one that never stopped.
                self._validate()
            self.checkpoints.prune(self.progress)  # the last checkpoint may now be the best
        return self.progress

    def _train(self, bar: tqdm) -> None:
        self._started = time.perf_counter() - self.progress.seconds
        self.engine.model.train()
        if self.progress.awaits_validation:
            self._validate()  # the run stopped between saving and validating
        if self._is_finished():
            logger.info("nothing is left to train: the run ended after %s updates", self.progress.update)
            return
        self.engine.warm_up(self.corpus.validation[int(self.corpus.validation.source_lengths.argmax())])
        updates = self._updates()
        # Not for ranks that read a stream: two threads in each rank would exchange data at once.
        is_safe = self.accelerator.num_processes == 1 or isinstance(self.corpus.training, StoredRows)
        if self.engine.feed.is_ahead and is_safe:
            updates = made_ahead(updates)
        with closing(updates):
            while not self._is_finished():
                begun = time.perf_counter()
                update = next(updates, None)
                if update is None:
                    if self.progress.epoch < (last := self.settings.max_epochs or 0):
                        self.progress.epoch, self.progress.update_in_epoch = last, 0
                    break
                self.progress.epoch, self.progress.update_in_epoch = update.epoch, update.number
                self.progress.count(waiting_seconds=time.perf_counter() - begun)
                self._train_on(update)
                self.progress.seconds = time.perf_counter() - self._started
                self.progress.count(seconds=time.perf_counter() - begun)
                bar.update()
                self._after_update(bar)
        self._read_results()

    def _updates(self) -> Generator[MadeUpdate, None, None]:
        epoch, last, done = self.progress.epoch, self.settings.max_epochs, self.progress.update_in_epoch
        while last is None or epoch < last:
            for number, update in enumerate(self.corpus.training.updates(epoch), start=1):
                if number > done:
                    yield self._made(epoch, number, update)
            epoch, done = epoch + 1, 0

    def _made(self, epoch: int, number: int, update: Update) -> MadeUpdate:
        budget = self.token_budget  # taken once: another thread may halve it
        parts = split_update(update, budget, self.accelerator.num_processes)
        return MadeUpdate(epoch, number, update, budget, parts, self.engine.feed.micro_batches(parts))

    def _train_on(self, update: MadeUpdate) -> None:
        rows = [row for bucket in update.rows for row in bucket]
        tokens = sum(len(row["labels"]) for row in rows)
        gradients = None
        while gradients is None:
            # Dropout depends only on seed, update and rank.
            set_seed(seed_of_update(self.recipe.seed, self.progress.update, self.accelerator.process_index))
            gradients = self._make_gradients(update, tokens)
        sums, padded_tokens = gradients
        number, norm = self.progress.update + 1, self.engine.gradient_norm(self.settings.max_grad_norm)
        self.engine.step(learning_rate(number, self.settings, self.d_model), norm)
        self.progress.update = number
        self.progress.target_tokens += tokens
        stops = self.signals.received is not None, self._is_late(time.perf_counter() - self._started)
        known = number, tokens, tokens + sum(len(row["input_ids"]) for row in rows)
        # One all-reduce also decides for all ranks whether to stop.
        self.results.add(known, sums, (padded_tokens, *stops), norm)
        is_alone = self.accelerator.num_processes == 1
        is_due = any(map(self._is_due, ("logging", "validation", "checkpoints"))) or (is_alone and any(stops))
        # With several ranks, a stop is noticed one update later, so the device need not wait.
        later = math.inf if is_alone else 1
        self._read_results(0 if is_due or not self.engine.decides_on_device else later)

    def _read_results(self, keep: float = 0) -> None:
        for result in self.results.read(keep):
            self._is_stopping, self.time_is_up = result.stopping_ranks > 0, result.late_ranks > 0
            if not math.isfinite(result.gradient_norm):
                self._note_skipped(result)
                continue
            self.progress.skipped_in_a_row = 0
            names = "loss", "r_drop", "distillation", "gradient_norm", "target_tokens", "tokens", "padded_tokens"
            self.progress.count(updates=1, **{name: getattr(result, name) for name in names})

    def _is_late(self, seconds: float) -> bool:
        limit = self.settings.max_minutes
        return limit is not None and seconds >= limit * 60

    @property
    def token_budget(self) -> int:
        """Padded tokens per micro-batch: the recipe's, or fewer after memory ran out."""
        asked, shrunk = self.settings.micro_batch_tokens, self.progress.token_budget
        return min(asked, shrunk) if shrunk and self.settings.shrink_token_budget else asked

    def _make_gradients(self, update: MadeUpdate, tokens: int) -> tuple[torch.Tensor, int] | None:
        """Make all ranks' gradients; return this rank's sums and padded tokens, or `None` if memory ran out."""
        if update.token_budget != self.token_budget:
            update = self._made(update.epoch, update.number, update.rows)
        shrinks, sums = self.settings.shrink_token_budget, None
        try:
            # If memory may run out, no rank waits for others before all have gradients.
            sums = self.engine.accumulate(update.micro_batches, tokens, all_reduce=not shrinks)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            if not shrinks:
                raise self._memory_error() from error
        if shrinks:
            if any_rank(self.accelerator, sums is None):
                self._shrink_token_budget(all(len(rows) <= 1 for part in update.parts for rows in part))
                return None
            self.engine.all_reduce()
        assert sums is not None
        padded_tokens = sum(micro_batch.padded_tokens for micro_batch in update.micro_batches)
        return sums, padded_tokens // self.engine.feed.passes

    def _shrink_token_budget(self, is_smallest: bool) -> None:
        self.engine.discard()
        torch.cuda.empty_cache()
        if is_smallest:
            raise self._memory_error()
        self.progress.token_budget = self.token_budget // 2
        warning = "update %s does not fit in memory: the token budget is halved to %s, and the update stays the same"
        logger.warning(warning, self.progress.update + 1, self.progress.token_budget)

    def _memory_error(self) -> MemoryError:
        return MemoryError(
            f"Update {self.progress.update + 1} does not fit in memory in micro-batches of {self.token_budget} padded "
            "tokens: set `optimization.token_budget` lower (the updates stay the same), or "
            "`optimization.shrink_token_budget` to true, or drop longer pairs with `data.max_source_tokens`."
        )

    def _note_skipped(self, result: Result) -> None:
        allowed, norm = self.settings.skip_nonfinite_updates, result.gradient_norm
        if self.accelerator.scaler is not None:
            allowed = max(allowed, FP16_SKIPS)
        if self.progress.skipped_in_a_row >= allowed:
            raise FloatingPointError(
                f"Training has diverged at update {result.update} (gradient norm {norm}): "
                "the learning rate may be too high, or the warm-up too short. The last checkpoint is unharmed. "
                "To skip single updates, set `optimization.skip_nonfinite_updates`."
            )
        self.progress.skipped_in_a_row += 1
        self.progress.skipped_updates += 1
        logger.warning("update %s is skipped: its gradient norm is %s", result.update, norm)

    def _after_update(self, bar: tqdm) -> None:
        if self._is_due("logging"):
            rate = learning_rate(self.progress.update, self.settings, self.d_model)
            bar.total, ends = self._expected_end()
            bar.set_postfix_str(self.log.write_training(self.progress, rate) + ends)
        validates = self.progress.awaits_validation = self._is_due("validation")
        if self._is_stopping:
            self._read_results()  # with several ranks the last result is still missing
        # Save first, so that a signal during translation loses nothing.
        if self._is_stopping or validates or self._is_due("checkpoints"):
            self.checkpoints.save(self.progress, must=self._is_stopping)
        if self._is_stopping:
            raise self._interruption()
        if validates:
            self._validate()

    def _expected_end(self) -> tuple[int | None, str]:
        """Return the run's last update, estimated if its time ends first, and a note about the end."""
        done, last, minutes = self.progress, self.settings.max_updates, self.settings.max_minutes
        by_clock = math.inf if minutes is None else done.update * minutes * 60 / max(done.seconds, 1e-9)
        if by_clock < (last or math.inf):
            return max(done.update, int(by_clock)), f", ends after {minutes:g} minutes"
        return last, f", ends after {last:,} updates" if last else ""

    def _is_due(self, section: str) -> bool:
        return self.progress.update % int(getattr(self.recipe, section).every_updates) == 0

    def _is_finished(self) -> bool:
        progress, patience = self.progress, self.recipe.validation.patience
        ends = (progress.update, self.settings.max_updates), (progress.epoch, self.settings.max_epochs)
        if any(last is not None and done >= last for done, last in ends):
            return True
        if patience is not None and progress.validations_without_improvement >= patience:
            self.ended_by = "validation.patience"
        elif self.time_is_up:
            self.ended_by = "optimization.max_minutes"
        return self.ended_by is not None

    def _validate(self) -> None:
        is_saved = self.checkpoints.saved_update == self.progress.update
        with self.signals.interrupting(self._interruption()) if is_saved else nullcontext():
            values = validate(self.recipe.validation, self.recipe.decoding, self.corpus, self.engine)
        self.engine.model.train()
        values = broadcast(self.accelerator, values)  # so that all ranks stop early, or none
        self.log.write_validation(self.progress, values)
        select = self.recipe.validation.select
        self.progress.note_validation(values[select], select not in LOWER_IS_BETTER, is_saved)
        if self.after_validation is not None:
            self.after_validation(self.progress, values["loss"])

    def _interruption(self) -> TrainingInterrupted:
        return TrainingInterrupted(f"stopped {place_in_run(self.progress, self.settings)}; continue with resume=true")


def seed_of_update(seed: int, update: int, rank: int) -> int:
    """Return a rank's seed for the next update, after `update` finished ones."""
    return int(np.random.SeedSequence([seed, update, rank]).generate_state(1)[0])
