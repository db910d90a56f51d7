"""The training loop: the same code on one CPU, one GPU, or many processes through `accelerate launch`.

An update's pairs, its loss and its gradient are the same however it is split: the summed loss of every micro-batch
is divided by the number of target tokens of the whole update, over all micro-batches and ranks. Random numbers follow
from the seed, the update and the rank, so that a resumed run goes on as if it had never stopped.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from accelerate.utils.memory import should_reduce_batch_size
from tqdm.auto import tqdm

from heedful.data.micro_batches import MicroBatch, collate, micro_batches_of_rank, split_update
from heedful.training.checkpoints.progress import Progress
from heedful.training.checkpoints.store import CheckpointStore, checkpoint_to_resume
from heedful.training.loop.averaging import MovingAverage
from heedful.training.loop.monitoring import RunLog
from heedful.training.loop.schedule import learning_rate
from heedful.training.loop.signals import StopSignals, TrainingInterrupted
from heedful.training.loop.validation import LOWER_IS_BETTER, validate
from heedful.training.model_of_recipe import make_engine, make_model
from heedful.training.preparation import Corpus, Update
from heedful.training.processes.collectives import all_reduce, any_rank, broadcast, lost_processes_reported
from heedful.training.processes.heartbeat import Heartbeat
from heedful.training.recipe import Recipe
from heedful.training.start_checks import check_start

logger = logging.getLogger(__name__)

CHOOSING = ("best", "average_best")  # what is published by its validation
# fp16 begins with a scale that is too large and halves it until gradients fit: no sign of divergence.
FP16_SKIPS = 30


class TrainingLoop:
    """One run: model, optimizer, data and how far they are.

    A recipe that asks for what these processes cannot do, or resumes what cannot be resumed, is a `ValueError`.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, accelerator: Accelerator):
        self.recipe, self.settings = recipe, recipe.optimization
        self.corpus, self.accelerator = corpus, accelerator
        resumed_from = checkpoint_to_resume(recipe, accelerator)
        set_seed(recipe.seed)
        model = make_model(recipe.model, corpus.tokenizers, resumed_from)
        check_start(recipe, corpus, model.config)
        self.d_model, self.pad_token_id = model.config.d_model, corpus.tokenizers.source.pad_token_id
        self.engine = make_engine(accelerator, model, self.settings)
        decay = self.settings.ema_decay
        self.moving_average = None if decay is None else MovingAverage(self.engine.network, decay)
        self.signals, self.heartbeat = StopSignals(), Heartbeat(accelerator)
        self.checkpoints = CheckpointStore(recipe, corpus.tokenizers, self.engine, self.moving_average, self.heartbeat)
        self.progress = Progress(processes=accelerator.num_processes, data=corpus.fingerprint)
        if resumed_from is not None:
            self.progress = self.checkpoints.load(resumed_from, self.progress)
        self.checkpoints.clear(self.progress)
        self.log = RunLog(recipe.folder / "log.jsonl", accelerator)
        self.log.rewind(self.progress)
        accelerator.wait_for_everyone()
        self._started = time.perf_counter() - self.progress.seconds
        self._is_stopping, self._time_is_up = False, self._is_late()

    def run(self) -> Progress:
        """Train until the recipe's end, early stopping, or a signal, and return how far the run came.

        A signal ends it with `TrainingInterrupted`, when everything is saved; too many updates in a row without a
        finite gradient with `FloatingPointError`, when nothing is; a micro-batch that does not fit with `MemoryError`;
        and a last checkpoint that cannot be written with `OSError` (earlier ones are tried again).
        """
        is_hidden = not self.accelerator.is_main_process
        total, done = self.settings.max_updates, self.progress.update
        bar = tqdm(total=total, initial=done, unit="update", disable=is_hidden, mininterval=1.0)
        with bar, self.signals, lost_processes_reported(self.accelerator), self.heartbeat:
            self._train(bar)
            self.checkpoints.save(self.progress, must=True)
            # This also makes every rank wait until the main one has written.
            if any_rank(self.accelerator, self.signals.received is not None):
                raise self._interruption()
            if self.recipe.checkpoints.publish in CHOOSING and not self._is_due("validation"):
                # The last weights may be the best, wherever the run ends. The saved progress does not know of it: a
                # resumed run that goes further is the same as one that was never stopped.
                self._validate()
            self.checkpoints.prune(self.progress)  # the last validation may have found a better one than those kept
        return self.progress

    def _train(self, bar: tqdm) -> None:
        self._started = time.perf_counter() - self.progress.seconds
        self.engine.model.train()
        if self.progress.awaits_validation:
            self._validate()  # the run was stopped between saving and validating
        if self._is_finished():
            logger.info("nothing is left to train: the run has ended, after %s updates", self.progress.update)
        self.engine.build_buckets(MicroBatch(collate([self.corpus.validation[0]], self.pad_token_id)))
        updates = self._updates()
        while not self._is_finished():
            begun = time.perf_counter()
            update = next(updates, None)
            if update is None:
                break
            self.progress.count(waiting_seconds=time.perf_counter() - begun)
            self._train_on(update)
            self.progress.seconds = time.perf_counter() - self._started
            self.progress.count(seconds=time.perf_counter() - begun)
            bar.update()
            self._after_update(bar)

    def _updates(self) -> Iterator[Update]:
        """Yield updates from the run's progress on, epoch after epoch."""
        last = self.settings.max_epochs
        while last is None or self.progress.epoch < last:
            for number, update in enumerate(self.corpus.updates(self.progress.epoch)):
                if number >= self.progress.update_in_epoch:
                    self.progress.update_in_epoch = number + 1
                    yield update
            self.progress.epoch += 1
            self.progress.update_in_epoch = 0

    def _train_on(self, update: Update) -> None:
        """Take one optimizer step on the rows of an update, or skip it if its gradient is not finite."""
        tokens = sum(len(row["labels"]) for bucket in update for row in bucket)
        gradients = None
        while gradients is None:
            self._seed()
            gradients = self._make_gradients(update, tokens)
        norm = self.engine.gradient_norm(self.settings.max_grad_norm)
        is_finite = math.isfinite(norm)
        if is_finite:
            self._step()
        else:
            self._skip(norm)
        self.progress.update += 1
        self.progress.target_tokens += tokens
        # One all-reduce also decides, for all ranks alike, whether to stop.
        sums = all_reduce(self.accelerator, *gradients, self.signals.received is not None, self._is_late())
        loss, r_drop, distillation, padded_tokens, stopping_ranks, late_ranks = sums
        self._is_stopping, self._time_is_up = stopping_ranks > 0, late_ranks > 0
        if is_finite:
            all_tokens = tokens + sum(len(row["input_ids"]) for bucket in update for row in bucket)
            self.progress.count(loss=loss, r_drop=r_drop, distillation=distillation, gradient_norm=norm, updates=1)
            self.progress.count(target_tokens=tokens, tokens=all_tokens, padded_tokens=padded_tokens)

    def _is_late(self) -> bool:
        limit = self.settings.max_minutes
        return limit is not None and time.perf_counter() - self._started >= limit * 60

    def _seed(self) -> None:
        """Let dropout depend on the seed, the update and the rank alone."""
        set_seed(seed_of_update(self.recipe.seed, self.progress.update, self.accelerator.process_index))

    @property
    def token_budget(self) -> int:
        """Padded tokens of a micro-batch: the recipe's, or fewer where it allows that and memory ran out."""
        asked, shrunk = self.settings.micro_batch_tokens, self.progress.token_budget
        return min(asked, shrunk) if shrunk and self.settings.shrink_token_budget else asked

    def _make_gradients(self, update: Update, tokens: int) -> tuple[float, ...] | None:
        """Add up the gradients of this rank's micro-batches, all-reduce them, and return its loss and padded tokens.

        The loss is summed, in nats: the cross-entropy, what R-Drop adds to it, and what distillation does. `None` says
        that memory ran out on some rank, and the token budget was halved on all.
        """
        begun = time.perf_counter()
        parts = split_update(update, self.token_budget, self.accelerator.num_processes)
        micro_batches = micro_batches_of_rank(parts, self.accelerator.process_index, self.pad_token_id)
        self.progress.count(waiting_seconds=time.perf_counter() - begun)
        shrinks, sums = self.settings.shrink_token_budget, None
        try:
            # Where memory may run out, no rank may wait for another's gradients before all have theirs.
            sums = self.engine.accumulate(micro_batches, tokens, all_reduce=not shrinks)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            if not shrinks:
                raise self._memory_error() from error
        if shrinks:
            if any_rank(self.accelerator, sums is None):
                self._shrink_token_budget(all(len(rows) <= 1 for part in parts for rows in part))
                return None
            self.engine.all_reduce()
        assert sums is not None
        loss, *added = sums.tolist()
        return loss - sum(added), *added, sum(micro_batch.padded_tokens for micro_batch in micro_batches)

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

    def _step(self) -> None:
        number = self.progress.update + 1
        self.engine.step(learning_rate(number, self.settings, self.d_model))
        if self.moving_average is not None:
            self.moving_average.update(number)
        self.progress.skipped_in_a_row = 0

    def _skip(self, norm: float) -> None:
        """Leave the weights as they are, or stop if that was done too often; the same on all ranks."""
        self.engine.discard()
        self.engine.lower_scale()
        allowed = self.settings.skip_nonfinite_updates
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
            rate = learning_rate(self.progress.update, self.settings, self.d_model)
            bar.set_postfix_str(self.log.write_training(self.progress, rate))
        validates = self.progress.awaits_validation = self._is_due("validation")
        # Saved first, so that nothing is lost by a signal while the model translates.
        if self._is_stopping or validates or self._is_due("checkpoints"):
            self.checkpoints.save(self.progress, must=self._is_stopping)
        if self._is_stopping:
            raise self._interruption()
        if validates:
            self._validate()

    def _is_due(self, section: str) -> bool:
        return self.progress.update % getattr(self.recipe, section).every_updates == 0

    def _is_finished(self) -> bool:
        progress, patience = self.progress, self.recipe.validation.patience
        if patience is not None and progress.validations_without_improvement >= patience:
            logger.info("no improvement in %s validations: stopping early", patience)
            return True
        last = self.settings.max_updates
        return self._time_is_up or (last is not None and progress.update >= last)

    def _validate(self) -> None:
        """Measure loss and scores on the validation pairs, and note how good they are."""
        is_saved = self.checkpoints.saved_update == self.progress.update
        with self.signals.interrupting(self._interruption()) if is_saved else nullcontext():
            values = validate(self.recipe, self.corpus, self.engine, self.moving_average)
        self.engine.model.train()
        values = broadcast(self.accelerator, values)  # so that all ranks stop early, or none
        self.log.write_validation(self.progress, values)
        select, keep_best = self.recipe.validation.select, self.recipe.checkpoints.keep_best
        self.progress.note_validation(values[select], select not in LOWER_IS_BETTER, keep_best, is_saved)

    def _interruption(self) -> TrainingInterrupted:
        return TrainingInterrupted(f"stopped after update {self.progress.update}; continue with resume=true")


def seed_of_update(seed: int, update: int, rank: int) -> int:
    """Return the seed of a rank's random numbers in the update after `update` finished ones."""
    return int(np.random.SeedSequence([seed, update, rank]).generate_state(1)[0])
