"""transformers' Seq2SeqTrainer with exact losses, updates and evaluation, however the work is split."""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import DataCollatorForSeq2Seq, GenerationConfig, PreTrainedConfig, Seq2SeqTrainer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    HubStrategy,
    RemoveColumnsCollator,
    rotate_checkpoints,
    seed_worker,
    unwrap_peft_model,
)
from transformers.utils import logging

from heedful.configuration_base_heed import IGNORED_LABEL, HeedBaseConfig
from heedful.data.tokenization import TARGET_FOLDER, TokenizerPair, warn_of_split_tokens
from heedful.files import remove
from heedful.loss_heed import smoothed_cross_entropy
from heedful.training.processes.collectives import any_rank, broadcast, local_shard
from heedful.training.trainer.batches import (
    Epoch,
    MicroBatches,
    collate_micro_batch,
    is_list,
    micro_batches,
    with_a_column,
    without_padding,
)
from heedful.training.trainer.checkpoints import (
    PREFIX,
    UNFINISHED,
    check_checkpoint,
    check_is_complete,
    checkpoint_to_resume,
    finish_checkpoint,
)
from heedful.training.trainer.settings import check_settings
from heedful.training.trainer.streams import StreamedBatches

logger = logging.get_logger(__name__)

SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
Inputs = dict[str, torch.Tensor | Any]
Count = torch.Tensor | int | None  # of the labels of an update


class HeedSeq2SeqTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer whose results do not depend on how the work is split, for any encoder-decoder model.

    It overrides the steps in which Seq2SeqTrainer is wrong, and nothing else:

    - Loss and gradient (`compute_loss`): the summed cross-entropy is divided by the number of labels of the whole
      update, over all micro-batches and processes. Marian, BART, T5 and others ignore that number, so their loss
      grows with accumulation and with the number of processes. A Heed model computes its own loss;
      `label_smoothing_factor` replaces its `config.label_smoothing`, unless it is 0.
    - Updates (`get_train_dataloader`): every pair comes once in an epoch. The order follows from the seed and the
      epoch alone, so a resumed run has the same updates, even with another number of processes, as long as an update
      has as many pairs (or tokens). With `tokens_per_update` an update is that many padded tokens of pairs, cut into
      micro-batches of about equal size. A stream keeps its own order, every process reads it and takes its share, and
      micro-batches that are left over at its end begin the first update of the next epoch.
    - Checkpoints (`train`, `_save_checkpoint`): written whole, with checksums; the newest whole one is resumed. DDP
      settles its buckets before the first update, so that three and more processes resume to the bit.
    - `eval_loss` (`evaluation_loop`): the mean over all labels, always of the plain cross-entropy.
    - Predictions (`prediction_step`, `evaluation_loop`): one for each pair, in the order of the dataset, the same in
      every process, padded with -100 only. `include_for_metrics=["loss"]` gives `compute_metrics` the loss of every
      pair.
    - A loss or a weight that is not finite stops all processes with an error before the weights change or are saved.
    - What is saved and pushed: a `TokenizerPair` as `processing_class` is saved with both tokenizers, and every push
      holds the code that config.json names. Special ids and a length that `generation_config` leaves open are the
      model's.

    Args:
        args: Arguments of Seq2SeqTrainer.
        tokens_per_update: The padded tokens of one update; replaces `per_device_train_batch_size`. A micro-batch has
            about `tokens_per_update / (gradient_accumulation_steps × processes)` of them.
        buckets_per_update: The number of groups of pairs of similar length in an update; see `UpdateBatches`.
        kwargs: Arguments of Seq2SeqTrainer by name. `processing_class` may be a `TokenizerPair`; with it, or with a
            tokenizer, `data_collator` is a `DataCollatorForSeq2Seq` unless it is given.

    Raises:
        ValueError: If a setting would be ignored, or would break these promises.
    """

    # transformers' own annotations are narrower (a model) or wider (the arguments) than what is used here.
    args: Any
    model: Any

    def __init__(
        self, *args: Any, tokens_per_update: int | None = None, buckets_per_update: int | None = None, **kwargs: Any
    ):
        given: dict[str, Any] = dict(inspect.signature(Seq2SeqTrainer).bind_partial(*args, **kwargs).arguments)
        check_settings(given, tokens_per_update, buckets_per_update)  # before a folder or a repository is made
        tokenizers, model = given.get("processing_class"), given.get("model")
        config = getattr(model, "config", None)
        if isinstance(tokenizers, TokenizerPair) and isinstance(config, HeedBaseConfig):
            tokenizers.check_config(config)
        tokenizer = tokenizers.source if isinstance(tokenizers, TokenizerPair) else tokenizers
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            warn_of_split_tokens(tokenizer)
            given["data_collator"] = given.get("data_collator") or DataCollatorForSeq2Seq(tokenizer)
        if given.get("model_init") is not None:
            given["model_init"] = self._completing(given["model_init"])
        own_generation = deepcopy(getattr(model, "generation_config", None))
        super().__init__(**given)
        if self.args.device.type == "cpu":
            # With several processes it is "cpu:1" and so on; transformers 5.17 cannot load an optimizer's state there.
            # `device` has no setter, but the cached property behind it can be assigned.
            self.args._setup_devices = torch.device("cpu")
        self.tokens_per_update = tokens_per_update
        self.buckets_per_update = buckets_per_update or 1
        self._computes_own_loss = _counts_labels(self._plain_model)
        self._complete(self.model, own_generation)
        self._warn_of_lost_tokenizer()
        self.model_accepts_loss_kwargs = True  # asks Trainer to count the labels of every update
        self._own_loss_is_checked, self._is_saving = False, False
        self._settled_model: Any = None
        self._update_loss: torch.Tensor | float = 0.0
        self._row_losses: list[torch.Tensor] = []
        self._stream: StreamedBatches | None = None  # what is trained on, unless it is a list

    @property
    def _plain_model(self) -> Any:
        """The model itself, without what Accelerate and peft wrap around it."""
        return unwrap_peft_model(self.accelerator.unwrap_model(self.model))

    def _completing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return `model_init` with the smoothing and the generation settings of the arguments."""

        @wraps(make)
        def make_and_complete(*trial: Any) -> Any:
            model = make(*trial)
            self._complete(model, model.generation_config)
            return model

        return make_and_complete

    def _complete(self, model: Any, own: GenerationConfig | None) -> None:
        """Give a model the arguments' smoothing and their `generation_config`, its gaps filled from the model's own.

        Without an end token generation would go on to its limit; without a length it would stop after 20 tokens.
        """
        plain = unwrap_peft_model(model)
        if _counts_labels(plain) and self.args.label_smoothing_factor:
            plain.config.label_smoothing = self.args.label_smoothing_factor
        if own is None or self.args.generation_config is None:
            return
        settings = self.load_generation_config(self.args.generation_config)
        names = [*SPECIAL_IDS]
        if settings.max_length is None and settings.max_new_tokens is None:
            names += ["max_length", "max_new_tokens"]
        for name in names:
            if getattr(settings, name) is None:
                setattr(settings, name, getattr(own, name))
        model.generation_config = settings

    def _warn_of_lost_tokenizer(self) -> None:
        """Warn if the model has two tokenizers and only one of them would be saved with it."""
        config = unwrap_peft_model(self.model).config
        has_two = getattr(config, "decoder_vocab_size", None) not in (None, config.vocab_size)
        has_two |= (Path(config.name_or_path or "") / TARGET_FOLDER).is_dir()
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if has_two and tokenizer and not isinstance(tokenizer, TokenizerPair):
            logger.warning(
                "The model has a tokenizer for each side, and only one would be saved with it: give the trainer "
                "`processing_class=TokenizerPair(source, target)`."
            )

    # Loss

    def compute_loss(
        self, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Count = None
    ) -> Any:
        """Return the cross-entropy in nats per label.

        Args:
            model: The model as Accelerate wraps it. In evaluation mode the losses of all rows are noted too.
            inputs: `input_ids` `(batch, source_length)`, `labels` `(batch, target_length)` and so on.
            return_outputs: Whether to return the model's outputs too.
            num_items_in_batch: The number of labels of the whole update over all processes; by default the number of
                labels of `inputs`.

        Raises:
            ValueError: If there are no labels, or if the model is trained with more than their cross-entropy.
        """
        inputs = with_a_column(inputs, self._plain_model.config)
        if "labels" not in inputs:
            raise ValueError(f"A batch must hold `labels`, but holds {', '.join(inputs)} instead.")
        labels = inputs["labels"]
        if num_items_in_batch is None or not model.training:
            num_items_in_batch = (labels != IGNORED_LABEL).sum().clamp(min=1)
        if model.training and self._computes_own_loss:
            # Whoever asks for the outputs may look at the logits.
            alone = self._plain_model.config.model_type == "heed" and not return_outputs
            given = {"skip_logits": True} if alone else {}
            outputs = model(**inputs, **given, num_items_in_batch=num_items_in_batch)
            loss = outputs["loss"]
        else:
            checks = model.training and not self._own_loss_is_checked
            outputs = model(**self._without_labels(inputs), **({"labels": labels} if checks else {}))
            logits = outputs["logits"]
            if checks:
                self._check_own_loss(outputs, labels)
            if model.training:
                total = smoothed_cross_entropy(logits, labels, self.args.label_smoothing_factor)
            else:
                losses = torch.stack([smoothed_cross_entropy(*row, 0.0) for row in zip(logits, labels, strict=True)])
                self._note_losses(losses.detach(), labels)
                total = losses.sum()
            loss = total / num_items_in_batch
        if model.training:
            # DDP averages the gradients of the processes, and the loss of the update is their sum.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Inputs, num_items_in_batch: Count = None) -> torch.Tensor:
        """Add up the gradient of a micro-batch; after the last one of an update make sure that its loss is finite.

        Raises:
            FloatingPointError: If it is not, in all processes, before the weights change.
            ValueError: If no label of the update counts.
        """
        if isinstance(model, DistributedDataParallel) and model is not self._settled_model:
            self._settle_buckets(model, inputs, num_items_in_batch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._update_loss = self._update_loss + loss
        if self.accelerator.sync_gradients:
            total, self._update_loss = float(self._update_loss), 0.0
            is_finite = bool(np.isfinite(total))
            if not is_finite and num_items_in_batch is not None and not float(num_items_in_batch):
                update = self.state.global_step + 1
                raise ValueError(
                    f"`labels` must hold at least one label other than -100, but update {update} has none."
                )
            self._stop_if(not is_finite, "the training loss is not finite")
        return loss

    def _settle_buckets(self, model: DistributedDataParallel, inputs: Inputs, count: Count) -> None:
        """Let DDP build its buckets, as the loop's `Engine.build_buckets` does, by a gradient that is thrown away.

        Otherwise sums over three and more processes would differ between the first update of a resumed run and that of
        a run which was never stopped. Where DDP looks for unused parameters, it never builds other buckets.
        """
        self._settled_model = model
        if model.find_unused_parameters:
            return
        is_last, device = model.require_backward_grad_sync, self.args.device
        model.require_backward_grad_sync = True  # it is False in the first of several micro-batches
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            super().training_step(model, dict(inputs), count)
        model.require_backward_grad_sync = is_last
        model.zero_grad()

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Seq2SeqTrainer does; with `resume_from_checkpoint=True` from the newest whole checkpoint on.

        Raises:
            ValueError: If there is no checkpoint to be resumed, or if it is damaged or lacks what training needs.
        """
        path: Any = resume_from_checkpoint or None
        if path is not None:
            path = self._checked(partial(self._checkpoint_to_resume, path))
        return super().train(path, *args, **kwargs)

    def _checkpoint_to_resume(self, given: str | bool) -> str:
        if given is True:
            path = checkpoint_to_resume(Path(self.args.output_dir))
        else:
            path = Path(str(given))
            check_checkpoint(path)
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # which write other files
            check_is_complete(path)
        return str(path)

    def _checked(self, find: Callable[[], str]) -> str:
        """Return what the main process finds, or raise its error, in all processes."""
        found, error = "", ""
        if self.accelerator.is_main_process:
            try:
                found = find()
            except ValueError as told:
                error = str(told)
        found, error = broadcast(self.accelerator, (found, error))
        if error:
            raise ValueError(error)
        return found

    def _load_best_model(self) -> None:
        self._checked(partial(_checked_path, str(self.state.best_model_checkpoint)))
        super()._load_best_model()

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / UNFINISHED) if self._is_saving else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint elsewhere, and only then let it take its place; push and delete as Trainer does."""
        finite = (bool(local_shard(parameter.detach()).isfinite().all()) for parameter in model.parameters())
        self._stop_if(not all(finite), "a weight is not finite")
        folder = Path(self._get_output_dir(trial))
        path = folder / f"{PREFIX}{self.state.global_step}"
        written = folder / UNFINISHED / path.name
        if self.args.should_save:
            remove(written.parent)
        self.accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(path)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                if self._stream is not None:
                    self._stream.save(written, self.state.global_step)
                finish_checkpoint(written, path)
        except Exception as error:  # on a full disk each library raises another type
            if self.args.should_save:
                remove(written.parent)
            raise OSError(f"{path} could not be written: {error}. Earlier checkpoints are unharmed.") from error
        finally:
            self._is_saving = False
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(path))
        if self.args.should_save:
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(folder), save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Tied weights are saved once, so Trainer takes the other names of them for missing.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push as Trainer does, which sends weights and configs, together with their code and tokenizers."""
        if self._is_saving:
            return  # it is not there yet
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            for path in Path(checkpoint_folder).glob("*.py"):
                shutil.copy(path, self.args.output_dir)
            tokenizer = getattr(self.data_collator, "tokenizer", None)
            if self.processing_class is None and tokenizer is not None:
                tokenizer.save_pretrained(self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _stop_if(self, is_bad: bool, what: str) -> None:
        if any_rank(self.accelerator, is_bad):
            raise FloatingPointError(
                f"Training has diverged near update {self.state.global_step + 1} ({what}): the learning rate may be "
                "too high, or the warm-up too short. The last checkpoint is unharmed."
            )

    def _without_labels(self, inputs: Inputs) -> Inputs:
        """Return the inputs with what the decoder reads in place of the labels, so that no loss is computed twice."""
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        if not {"decoder_input_ids", "decoder_inputs_embeds"} & rest.keys():
            model = self._plain_model
            shift = getattr(model, "prepare_decoder_input_ids_from_labels", partial(_shifted, model.config))
            rest["decoder_input_ids"] = shift(labels=inputs["labels"])
        return rest

    @torch.no_grad()
    def _check_own_loss(self, outputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> None:
        """Refuse a model whose own loss has further terms, such as that of a router, which would be left out."""
        count = (labels != IGNORED_LABEL).sum()
        if count == 0:
            return
        logits, own = outputs["logits"], outputs["loss"].float()
        ours = smoothed_cross_entropy(logits, labels, 0.0) / count
        if own.isfinite() and not torch.allclose(ours, own, rtol=1e-5 if logits.dtype == torch.float32 else 1e-2):
            raise ValueError(
                f"`model` must be trained with the cross-entropy of its labels alone, but {type(self.model).__name__} "
                f"has the loss {own:.6f} where that is {ours:.6f}; use transformers' Seq2SeqTrainer instead."
            )
        self._own_loss_is_checked = True

    # Updates

    def get_train_dataloader(self) -> DataLoader:
        """Return the micro-batches of this process; an update has the same number of them in every process.

        Raises:
            ValueError: If the dataset is empty, or if it has no length and `tokens_per_update` is given.
        """
        rows: Any = self.train_dataset
        self._stream = None
        if rows is None:
            return super().get_train_dataloader()  # which says that it is missing
        if not is_list(rows):
            return self._loader_of_stream(rows)
        if not len(rows):
            raise ValueError("`train_dataset` must hold at least one pair, but is empty instead.")
        batches = micro_batches(rows, self.args, self.tokens_per_update, self.buckets_per_update)

        epoch = Epoch(len(batches), lambda: self.state.global_step * batches.parts // len(batches))
        seed = partial(seed_worker, num_workers=self.args.dataloader_num_workers, rank=self.args.process_index)
        # Accelerate gives each process one micro-batch in turn.
        return self.accelerator.prepare(DataLoader(batches, sampler=epoch, worker_init_fn=seed, **self._loading()))

    def _loading(self) -> dict[str, Any]:
        """Return how a `DataLoader` collates the rows of a micro-batch, by how many workers and so on."""
        collate, args = self.data_collator, self.args
        if args.remove_unused_columns:
            taken = inspect.signature(unwrap_peft_model(self.model).forward).parameters
            columns = [*taken, "labels", "label", "label_ids"]
            collate = RemoveColumnsCollator(collate, columns, logger, description="training")
        names = ("num_workers", "pin_memory", "persistent_workers", "multiprocessing_context", "prefetch_factor")
        settings = {name: getattr(args, f"dataloader_{name}") for name in names}
        return {"collate_fn": partial(collate_micro_batch, collate), **settings}

    def _loader_of_stream(self, rows: Any) -> DataLoader:
        """Return a loader of this process's micro-batches of a stream, all of which every process reads."""
        if self.tokens_per_update is not None:
            raise ValueError("`train_dataset` must have a length with `tokens_per_update`, but has none.")
        if not isinstance(rows, IterableDataset):
            raise ValueError(
                f"`train_dataset` must have a length or be an IterableDataset, but is {type(rows).__name__} instead."
            )
        args, copies = self.args, self.get_tp_size()  # processes that are given the same pairs
        loading = self._loading() | {"num_workers": min(1, args.dataloader_num_workers)}
        if args.dataloader_num_workers > 1:
            logger.warning("One worker reads a stream (`dataloader_num_workers`): of several each would read it all.")
        batches = DataLoader(rows, batch_size=args.per_device_train_batch_size, **loading)
        processes, process = args.world_size // copies, args.process_index // copies
        parts = args.gradient_accumulation_steps * processes
        self._stream = StreamedBatches(batches, parts, processes, process, self._check_agreement)
        # A generator of its own leaves the random numbers of dropout as they are.
        options: dict[str, Any] = {"collate_fn": lambda batch: batch, "generator": torch.Generator()}
        return DataLoaderShard(self._stream, device=self.accelerator.device, batch_size=None, **options)

    def _check_agreement(self, mark: float) -> None:
        """Refuse a stream that is another one in another process."""
        if self.args.world_size == 1:
            return
        marks = self.accelerator.gather(torch.tensor([mark], dtype=torch.float64, device=self.args.device))
        if (marks != marks[0]).any():
            raise ValueError(
                "`train_dataset` must be a stream that gives the same pairs in every process, but gives others in "
                "one: do not split it between them (this trainer does that), and give its shuffling a seed."
            )

    def _init_training_state(self, max_steps: int, updates_per_epoch: int, epochs: int, *args: Any) -> tuple[int, int]:
        """Return the epoch that a run begins with, and the micro-batches of it that were trained on before."""
        found = super()._init_training_state(max_steps, updates_per_epoch, epochs, *args)
        checkpoint, _ = args
        if checkpoint is None or self.args.ignore_data_skip:
            return found
        if self.state.global_step >= max_steps:
            return epochs, 0  # nothing is left to train
        if self._stream is None:
            return found
        epoch, updates = self._stream.seek(Path(checkpoint), self.state.global_step, updates_per_epoch)
        return epoch, updates * self.args.gradient_accumulation_steps

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Count]:
        """Return the micro-batches of an update and the number of their labels."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._stream is not None:
            if self._stream.first_update is None and batches:
                self._stream.first_update = self.state.global_step
            self._stream.is_over = not batches
        return batches, count

    def num_examples(self, dataloader: DataLoader) -> int:
        """Return the number of pairs."""
        dataset: Any = getattr(dataloader, "dataset", None)
        is_ours = isinstance(dataset, MicroBatches | StreamedBatches)
        return len(dataset.rows) if is_ours else super().num_examples(dataloader)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Return the batches of an evaluation dataset; if one is given, its own even if workers persist."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            return self.get_test_dataloader(eval_dataset)
        self.eval_dataset = _listed(self.eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return the batches of a dataset that is given."""
        return super().get_test_dataloader(_listed(test_dataset))

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as Seq2SeqTrainer does, but without its repetitions and with a loss over all labels.

        Raises:
            ValueError: If there are labels, but all are -100.
        """
        self.gather_function = self.accelerator.gather_for_metrics
        self._row_losses = []
        compute_metrics = self.compute_metrics
        if compute_metrics is not None and "loss" in self.args.include_for_metrics:
            self.compute_metrics = partial(self._compute_with_losses, compute_metrics)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self.compute_metrics = compute_metrics
        if self._row_losses:
            loss, labels = torch.cat(self._row_losses).cpu().double().sum(0).tolist()
            if not labels:
                raise ValueError("`labels` must hold at least one label other than -100, but all are -100.")
            metrics: Any = output.metrics
            metrics[f"{metric_key_prefix}_loss"] = loss / labels
        return output

    def _compute_with_losses(
        self, compute_metrics: Callable[..., dict[str, Any]], results: EvalPrediction, **kwargs: Any
    ) -> dict[str, Any]:
        """Compute metrics with the loss of every pair; Trainer would repeat the mean of a batch."""
        by_batch = self.args.batch_eval_metrics
        losses, labels = torch.cat(self._row_losses[-1:] if by_batch else self._row_losses).T
        means = losses / labels.clamp(min=1)
        given: dict[str, Any] = {"losses": means if by_batch else means.cpu().numpy()}
        if results.inputs is not None:
            given["inputs"] = results.inputs
        return compute_metrics(EvalPrediction(results.predictions, results.label_ids, **given), **kwargs)

    def _note_losses(self, losses: torch.Tensor, labels: torch.Tensor) -> None:
        rows = torch.stack([losses, (labels != IGNORED_LABEL).sum(1).to(losses.dtype)], dim=1)  # (B, 2)
        self._row_losses.append(self.accelerator.gather_for_metrics(rows))

    def prediction_step(
        self, model: Any, inputs: Inputs, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Return loss, predictions and labels of one batch; generated tokens and labels are padded with -100."""
        inputs = with_a_column(inputs, self._plain_model.config)
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        labels, loss = inputs.get("labels"), None
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
            given = inputs.get("decoder_input_ids")
            dropped = {"labels"}
            if given is not None and given.shape == labels.shape:  # a collator has made them from the labels
                dropped |= {"decoder_input_ids", "decoder_attention_mask"}
            inputs = {name: value for name, value in inputs.items() if name not in dropped}
        _, tokens, _ = super().prediction_step(model, inputs, False, ignore_keys, **gen_kwargs)
        if tokens is not None:
            prompt = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
            settings = self.model.generation_config
            pads = [settings.pad_token_id, self.model.config.pad_token_id]
            pads.append(getattr(self.processing_class, "pad_token_id", None))
            ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
            tokens = without_padding(tokens, prompt, pads, ends)
        return loss, tokens, labels


def _counts_labels(model: Any) -> bool:
    """Return whether a model divides its loss by the number of labels that it is given, as Heed models do."""
    return "num_items_in_batch" in inspect.signature(model.forward).parameters


def _checked_path(path: str) -> str:
    check_checkpoint(Path(path))
    return path


def _listed(rows: Any) -> Any:
    """Return rows of a known number: all predictions are held in memory anyway, and only these are divided evenly."""
    if isinstance(rows, dict):
        return {name: _listed(each) for name, each in rows.items()}
    return rows if rows is None or is_list(rows) else list(rows)


def _shifted(config: PreTrainedConfig, labels: torch.Tensor) -> torch.Tensor:
    """Return what the decoder reads before each label, for models that have no method for it."""
    shifted = labels.new_full(labels.shape, config.decoder_start_token_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORED_LABEL, config.pad_token_id)
