"""transformers' Seq2SeqTrainer with exact losses, updates and evaluation, whatever the split of the work."""

import inspect
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from transformers import DataCollatorForSeq2Seq, GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import EvalPrediction, HubStrategy, has_length, unwrap_peft_model
from transformers.utils import logging

from heedful.configuration_heed import HeedConfig
from heedful.configuration_heed_rnn import HeedRNNConfig
from heedful.data.batching import BatchingSettings, UpdateBatches
from heedful.data.micro_batches import LABEL_PADDING, divide_update
from heedful.data.tokenization import TARGET_FOLDER, TokenizerPair
from heedful.training.processes.collectives import any_rank, local_shard

logger = logging.get_logger(__name__)

DEFAULT_BATCH_SIZE = 8  # of TrainingArguments, per device
LENGTHS = " (`tokens_per_update` groups by length without changing the updates)"
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


class HeedSeq2SeqTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer whose results do not depend on how the work is split, for any encoder-decoder model.

    It overrides the steps where Seq2SeqTrainer is at fault, and nothing else:

    - Loss and gradient (`compute_loss`): Marian, BART, T5 and others ignore the number of labels in the update, so
      that their loss grows with accumulation and with the number of processes. Here the summed cross-entropy is
      divided by the labels of the whole update, over all micro-batches and processes, with label smoothing or
      without. `label_smoothing_factor` works for M2M100 too. A Heed model computes its own loss;
      `label_smoothing_factor` replaces its `config.label_smoothing`, unless it is 0.
    - Updates (`get_train_dataloader`): an epoch's last update neither repeats pairs to fill up all processes nor drops
      any. The order follows from the seed and the epoch alone, so that a resumed run has the same updates, also on
      another number of processes with as many pairs (or tokens) per update. With `tokens_per_update` an update is so
      many padded tokens of pairs, cut into micro-batches of about equal size.
    - `eval_loss` (`evaluation_loop`): one mean over all labels instead of a mean of batch means, always the plain
      cross-entropy.
    - Predictions (`prediction_step`, `evaluation_loop`): as many as there are pairs, in the order of the dataset, the
      same on every process, filled up with -100 only, also for a dataset without a length.
      `include_for_metrics=["loss"]` gives `compute_metrics` the loss of every pair.
    - A loss or a weight that is not finite stops the training with an error before the weights change or are saved,
      in all processes.
    - What is saved and pushed: a `TokenizerPair` as `processing_class` is saved whole, and every push holds the code
      that config.json names. Special ids and a length that `generation_config` leaves open are the model's.

    The order of a training dataset without a length is its own. Its losses are mended, and micro-batches that are left
    over at its end begin the next epoch's first update (Seq2SeqTrainer adds their gradients to that update).

    Args:
        args: Arguments of Seq2SeqTrainer.
        tokens_per_update: Padded tokens of one update; replaces `per_device_train_batch_size`. A micro-batch has about
            `tokens_per_update / (gradient_accumulation_steps × processes)` of them.
        buckets_per_update: Groups of pairs of similar length that an update consists of; see `UpdateBatches`.
        kwargs: Arguments of Seq2SeqTrainer by name. `processing_class` may be a `TokenizerPair`; with it, or with a
            tokenizer, `data_collator` is a `DataCollatorForSeq2Seq` unless it is given.

    Raises:
        ValueError: If a setting would be ignored, or would break these promises.
    """

    args: Any  # Seq2SeqTrainingArguments
    model: Any

    def __init__(self, *args, tokens_per_update: int | None = None, buckets_per_update: int | None = None, **kwargs):
        given: dict[str, Any] = dict(inspect.signature(Seq2SeqTrainer).bind_partial(*args, **kwargs).arguments)
        _check_settings(given, tokens_per_update, buckets_per_update)  # before a folder or a repository is made
        tokenizers, model = given.get("processing_class"), given.get("model")
        config = getattr(model, "config", None)
        if isinstance(tokenizers, TokenizerPair) and isinstance(config, HeedConfig | HeedRNNConfig):
            tokenizers.check_config(config)
        tokenizer = tokenizers.source if isinstance(tokenizers, TokenizerPair) else tokenizers
        if given.get("data_collator") is None and isinstance(tokenizer, PreTrainedTokenizerBase):
            given["data_collator"] = DataCollatorForSeq2Seq(tokenizer)
        own_generation = deepcopy(getattr(model, "generation_config", None))
        super().__init__(**given)
        if self.args.device.type == "cpu":
            # With several processes it has a number, at which transformers 5.17 cannot load a checkpoint's optimizer.
            self.args.__dict__["_setup_devices"] = torch.device("cpu")
        self.tokens_per_update = tokens_per_update
        self.buckets_per_update = buckets_per_update or 1
        model = unwrap_peft_model(self.accelerator.unwrap_model(self.model))
        self._model_counts_labels = "num_items_in_batch" in inspect.signature(model.forward).parameters
        if own_generation is not None:
            self._set_generation(self.model, own_generation)
        self._smooth(self.model)
        self._warn_of_lost_tokenizer()
        self.model_accepts_loss_kwargs = True  # Trainer is to count the labels of every update
        self._own_loss_is_known = False
        self._update_loss: torch.Tensor | float = 0.0
        self._row_losses: list[torch.Tensor] = []
        self._left_over: list[dict[str, Any]] | None = None  # micro-batches; None where the dataset has a length

    def call_model_init(self, trial=None):
        """Make the model anew, with the smoothing and the generation settings of the arguments."""
        model: Any = super().call_model_init(trial)
        self._smooth(model)
        self._set_generation(model, model.generation_config)
        return model

    def _smooth(self, model) -> None:
        model = unwrap_peft_model(model)
        counts_labels = "num_items_in_batch" in inspect.signature(model.forward).parameters
        if counts_labels and self.args.label_smoothing_factor:
            model.config.label_smoothing = self.args.label_smoothing_factor

    def _set_generation(self, model, own: GenerationConfig) -> None:
        """Give a model the arguments' `generation_config`, its gaps filled in from the model's own.

        Without an end token a model would go on to the limit, and without a length stop after 20 tokens.
        """
        if self.args.generation_config is None:
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
        """Tell the user of a model with two tokenizers that one of them would not be saved with it."""
        config = unwrap_peft_model(self.model).config
        if isinstance(self.processing_class, TokenizerPair):
            return
        has_two = getattr(config, "decoder_vocab_size", None) not in (None, config.vocab_size)
        has_two |= (Path(config._name_or_path or "") / TARGET_FOLDER).is_dir()
        if has_two and (self.processing_class or getattr(self.data_collator, "tokenizer", None)):
            logger.warning(
                "The model has a tokenizer for each side, and only one would be saved with it: give the trainer "
                "`processing_class=TokenizerPair(source, target)`."
            )

    # Loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the cross-entropy in nats per label.

        Args:
            model: The model as Accelerate wraps it; in evaluation mode the losses of all rows are noted too.
            inputs: `input_ids` `(batch, source_length)`, `labels` `(batch, target_length)` and so on.
            return_outputs: Whether to return the model's outputs too.
            num_items_in_batch: Labels of the whole update over all processes; those of `inputs` by default.

        Raises:
            ValueError: If there are no labels, or the model is trained with more than their cross-entropy.
        """
        if "labels" not in inputs:
            raise ValueError(f"A batch must hold `labels`, but holds {', '.join(inputs)} instead.")
        labels = inputs["labels"]
        if num_items_in_batch is None or not model.training:
            num_items_in_batch = (labels != LABEL_PADDING).sum().clamp(min=1)
        if model.training and self._model_counts_labels:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs["loss"]
        else:
            is_first = model.training and not self._own_loss_is_known
            outputs = model(**self._without_labels(inputs), **({"labels": labels} if is_first else {}))
            if is_first:
                self._check_own_loss(outputs, labels)
            smoothing = self.args.label_smoothing_factor if model.training else 0.0
            losses = _loss_of_rows(outputs["logits"], labels, smoothing)
            if not model.training:
                self._note_losses(losses.detach(), labels)
            loss = losses.sum() / num_items_in_batch
        if model.training:
            # Processes average their gradients, and this is a sum.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Add up the gradient of a micro-batch; after an update's last one make sure that its loss is finite.

        Raises:
            FloatingPointError: If it is not, in all processes, before the weights change.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._update_loss = self._update_loss + loss
        if self.accelerator.sync_gradients:
            total, self._update_loss = float(self._update_loss), 0.0
            self._stop_if(not np.isfinite(total), "the training loss is not finite")
        return loss

    def _save_checkpoint(self, model, trial):
        finite = (bool(local_shard(parameter.detach()).isfinite().all()) for parameter in model.parameters())
        self._stop_if(not all(finite), "a weight is not finite")
        super()._save_checkpoint(model, trial)

    def _issue_warnings_after_load(self, load_result):
        # Tied weights are saved once, and so are never missing.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    def _push_from_checkpoint(self, checkpoint_folder):
        """Push as Trainer does, which sends weights and configs, and with them their code and tokenizers."""
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

    def _without_labels(self, inputs) -> dict[str, Any]:
        """Return the inputs with what the decoder reads in place of the labels, so that no loss is computed twice."""
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        if not {"decoder_input_ids", "decoder_inputs_embeds"} & rest.keys():
            model = unwrap_peft_model(self.accelerator.unwrap_model(self.model))
            shift = getattr(model, "prepare_decoder_input_ids_from_labels", partial(_shifted, model.config))
            rest["decoder_input_ids"] = shift(labels=inputs["labels"])
        return rest

    @torch.no_grad()
    def _check_own_loss(self, outputs, labels) -> None:
        """Refuse a model whose own loss has further terms, such as that of a router, which would be left out."""
        count = (labels != LABEL_PADDING).sum()
        if count == 0:
            return
        logits, own = outputs["logits"], outputs["loss"].float()
        ours = _loss_of_rows(logits, labels, 0.0).sum() / count
        if own.isfinite() and not torch.allclose(ours, own, rtol=1e-5 if logits.dtype == torch.float32 else 1e-2):
            raise ValueError(
                f"`model` must be trained with the cross-entropy of its labels alone, but {type(self.model).__name__} "
                f"has the loss {own:.6f} where that is {ours:.6f}; use transformers' Seq2SeqTrainer instead."
            )
        self._own_loss_is_known = True

    # Updates

    def get_train_dataloader(self) -> DataLoader:
        """Return the micro-batches of this process; an update has as many in every process.

        Raises:
            ValueError: If the dataset is empty, or has no length where updates of so many tokens are asked for.
        """
        rows: Any = self.train_dataset
        self._left_over = None
        if rows is None or not has_length(rows) or isinstance(rows, IterableDataset):
            if self.tokens_per_update is not None:
                raise ValueError("`train_dataset` must have a length with `tokens_per_update`, but has none.")
            self._left_over = []
            return super().get_train_dataloader()
        if not len(rows):
            raise ValueError("`train_dataset` must hold at least one pair, but is empty instead.")
        parts = self.args.gradient_accumulation_steps * self.args.world_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if self.tokens_per_update is None:
            shuffles = self.args.train_sampling_strategy == "random"
            plan = partial(
                _batches_of_rows, len(rows), self.args.per_device_train_batch_size, seed if shuffles else None
            )
            batches = _MicroBatches(rows, plan, parts, filler=0)
        else:
            lengths = _lengths(rows)
            updates = UpdateBatches(
                *lengths.T, BatchingSettings(self.tokens_per_update, self.buckets_per_update, seed)
            )
            plan = partial(_batches_of_tokens, updates, lengths, parts)
            batches = _MicroBatches(rows, plan, parts, filler=int(lengths.sum(1).argmin()))

        def sampler(_):
            return _Epoch(len(batches), lambda: self.state.global_step * parts // len(batches))

        # Accelerate deals the micro-batches to the processes in turns.
        return self._get_dataloader(batches, "Training", batch_size=1, sampler_fn=sampler, is_training=True)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Return the micro-batches of an update and the number of their labels.

        Raises:
            ValueError: If a dataset without a length ends before its first update is complete.
        """
        if self._left_over is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = self._left_over + list(islice(epoch_iterator, num_batches - len(self._left_over)))
        if len(batches) < num_batches:
            if batches and self.state.global_step == 0:
                raise ValueError(
                    "`train_dataset` must hold enough pairs for one update, which has `gradient_accumulation_steps` "
                    f"({num_batches}) batches, but has {len(batches)} instead."
                )
            self._left_over = batches
            return [], None
        self._left_over = []
        return super().get_batch_samples(iter(batches), num_batches, device)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Return the number of pairs."""
        dataset = getattr(dataloader, "dataset", None)
        return len(dataset.rows) if isinstance(dataset, _MicroBatches) else super().num_examples(dataloader)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """Return the batches of an evaluation dataset, of the one given even where workers persist."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            return super().get_eval_dataloader(eval_dataset)
        return self.get_test_dataloader(eval_dataset)

    def _get_dataloader(self, dataset, *args, **kwargs):
        is_training = kwargs.get("is_training", False)
        if not is_training and (isinstance(dataset, IterableDataset) or not has_length(dataset)):
            # All predictions are held in memory anyway, and only a known number of pairs can be dealt out evenly.
            dataset = list(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def _get_eval_sampler(self, eval_dataset):
        return SequentialSampler(eval_dataset)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Evaluate as Seq2SeqTrainer does, without its repetitions and with a loss over all labels.

        Raises:
            ValueError: If there are labels, but none is to be predicted.
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

    def _compute_with_losses(self, compute_metrics, results, **kwargs) -> dict[str, Any]:
        """Compute metrics with the loss of every pair where Trainer repeats the mean of a batch."""
        noted = self._row_losses[-1:] if self.args.batch_eval_metrics else self._row_losses
        losses, labels = torch.cat(noted).T
        values = losses / labels.clamp(min=1)
        inputs = {} if results.inputs is None else {"inputs": results.inputs}
        values = values if self.args.batch_eval_metrics else values.cpu().numpy()
        return compute_metrics(
            EvalPrediction(results.predictions, results.label_ids, losses=values, **inputs), **kwargs
        )

    def _note_losses(self, losses: torch.Tensor, labels: torch.Tensor) -> None:
        rows = torch.stack([losses, (labels != LABEL_PADDING).sum(1).to(losses.dtype)], dim=1)  # (B, 2)
        self._row_losses.append(self.accelerator.gather_for_metrics(rows))

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """Return loss, predictions and labels of one batch; generated tokens and labels are filled up with -100."""
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        inputs, loss = self._prepare_inputs(inputs), None
        labels = inputs.get("labels")
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
            given = inputs.get("decoder_input_ids")
            dropped = {"labels"}
            if given is not None and given.shape == labels.shape:  # a collator makes these of the labels
                dropped |= {"decoder_input_ids", "decoder_attention_mask"}
            inputs = {name: value for name, value in inputs.items() if name not in dropped}
        _, tokens, _ = super().prediction_step(model, inputs, False, ignore_keys, **gen_kwargs)
        prompt = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
        return loss, tokens if tokens is None else self._without_padding(tokens, prompt), labels

    def _without_padding(self, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
        """Put -100 behind the end of each of `(batch, length)` generated tokens, and cut them to the longest.

        Args:
            tokens: As `generate()` returns them. Behind the end it writes padding, or, with beams, the end again.
            prompt: How many tokens each began with; among them an end token means something else.
        """
        settings = self.model.generation_config
        pads = {
            settings.pad_token_id,
            self.model.config.pad_token_id,
            getattr(self.processing_class, "pad_token_id", None),
        }
        ends = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
        is_pad, is_end = (
            torch.isin(tokens, tokens.new_tensor([i for i in ids if i is not None])) for ids in (pads, ends)
        )
        is_end[:, :prompt] = False
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        lengths = (~is_pad * places).amax(1, keepdim=True)  # (B, 1)
        first_end = places.where(is_end, tokens.shape[1]).amin(1, keepdim=True)
        lengths = torch.minimum(lengths, first_end)
        return tokens.masked_fill(places > lengths, LABEL_PADDING)[:, : int(lengths.max())]


class _MicroBatches(Dataset):
    """The micro-batches of all processes, in turns, of one epoch after the other.

    An element's number tells the epoch too, so that workers that load data need to be told nothing.

    Args:
        rows: The training dataset.
        plan: Returns the micro-batches of an epoch: equally many in every epoch, each a list of rows' numbers.
        parts: Micro-batches of an update, over all processes.
        filler: The row that an empty micro-batch has in place of none, without its labels.
    """

    def __init__(self, rows, plan: Callable[[int], list[list[int]]], parts: int, filler: int):
        self.rows = rows
        self.plan = plan
        self.filler = filler
        self.epoch, self.batches = 0, plan(0)
        self.length = -(-len(self.batches) // parts) * parts

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Return the rows of one micro-batch, as `DataLoader` asks for them."""
        ((epoch, place),) = (divmod(number, self.length) for number in numbers)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self.plan(epoch)
        batch = self.batches[place] if place < len(self.batches) else []
        if batch:
            return [self.rows[number] for number in batch]
        filler = self.rows[self.filler]
        return [{**filler, "labels": [LABEL_PADDING] * len(filler["labels"])}]


class _Epoch(Sampler):
    """The numbers of an epoch's micro-batches, in order.

    Args:
        size: Micro-batches of an epoch.
        number: Returns which epoch it is.
    """

    def __init__(self, size: int, number: Callable[[], int]):
        self.size = size
        self.number = number

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        start = self.number() * self.size
        return iter(range(start, start + self.size))


def _lengths(rows) -> np.ndarray:
    """Return `(rows, 2)` tokens of source and target."""
    return np.array([(len(row["input_ids"]), len(row["labels"])) for row in rows])


def _batches_of_rows(rows: int, size: int, seed: int | None, epoch: int) -> list[list[int]]:
    """Cut the numbers of all rows, shuffled unless there is no seed, into micro-batches of `size`."""
    order = np.arange(rows)
    if seed is not None:
        draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(rows)
        order = np.argsort(draws, kind="stable")
    return [order[start : start + size].tolist() for start in range(0, rows, size)]


def _batches_of_tokens(updates: UpdateBatches, lengths: np.ndarray, parts: int, epoch: int) -> list[list[int]]:
    """Cut every update of an epoch into `parts` micro-batches of similar lengths and about equal cost."""
    source, target = lengths.T
    return [part for update in updates.epoch(epoch) for part in divide_update(update, source, target, parts)]


def _loss_of_rows(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return `(batch,)` summed cross-entropies of `(batch, length, vocabulary)` logits, in nats."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.to(logits.device).flatten(),
        ignore_index=LABEL_PADDING,
        label_smoothing=smoothing,
        reduction="none",
    )
    return losses.view(labels.shape).sum(1)


def _shifted(config, labels: torch.Tensor) -> torch.Tensor:
    """Return what the decoder reads before each label, for models that have no method for it."""
    shifted = labels.new_full(labels.shape, config.decoder_start_token_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == LABEL_PADDING, config.pad_token_id)


def _check_settings(given: dict[str, Any], tokens_per_update: int | None, buckets_per_update: int | None) -> None:
    """Refuse settings that contradict each other or what HeedSeq2SeqTrainer promises, or that it would ignore.

    Args:
        given: Arguments of Seq2SeqTrainer by name.
        tokens_per_update: As HeedSeq2SeqTrainer takes it.
        buckets_per_update: As HeedSeq2SeqTrainer takes it.
    """
    args, rows = given.get("args"), given.get("train_dataset")
    if not isinstance(args, Seq2SeqTrainingArguments):
        raise ValueError(f"`args` must be Seq2SeqTrainingArguments, but is {type(args).__name__} instead.")
    loader: Any = args.accelerator_config
    size, strategy = args.per_device_train_batch_size, args.train_sampling_strategy
    by_tokens = tokens_per_update is not None
    strategies = ("random",) if by_tokens else ("random", "sequential")
    is_stream = isinstance(rows, IterableDataset) or (rows is not None and not has_length(rows))
    # Each: is it right, what is it called, what must it be, what is it.
    for is_right, name, wanted, value in (
        *_expected(args),
        (
            given.get("compute_loss_func") is None,
            "compute_loss_func",
            "None, as the loss is what this trainer mends",
            "a function",
        ),
        (loader.even_batches, "accelerator_config.even_batches", "True", False),
        (not loader.split_batches, "accelerator_config.split_batches", "False", True),
        (not loader.dispatch_batches, "accelerator_config.dispatch_batches", "False", True),
        (strategy in strategies, "train_sampling_strategy", f"{' or '.join(strategies)}{LENGTHS}", strategy),
        (
            is_stream or not args.ignore_data_skip,
            "ignore_data_skip",
            "False, because a resumed run would repeat pairs, and skipping them takes no time",
            True,
        ),
        (
            args.average_tokens_across_devices or args.world_size == 1,
            "average_tokens_across_devices",
            "True, so that the labels of all processes count",
            False,
        ),
        (
            by_tokens or buckets_per_update is None,
            "buckets_per_update",
            "None without `tokens_per_update`",
            buckets_per_update,
        ),
        (
            not by_tokens or size == DEFAULT_BATCH_SIZE,
            "per_device_train_batch_size",
            "left out with `tokens_per_update`, which replaces it",
            size,
        ),
    ):
        if not is_right:
            raise ValueError(f"`{name}` must be {wanted}, but is {value} instead.")


def _expected(args) -> Iterator[tuple[bool, str, str, Any]]:
    """Yield the settings that have one right value: whether they have it, their name, why, and their value."""
    for name, right, reason in (
        ("auto_find_batch_size", False, "because it changes the updates"),
        ("dataloader_drop_last", False, "because it drops pairs"),
        ("dataloader_in_order", True, "because the updates must not depend on the speed of workers"),
        ("length_column_name", "length", "as no strategy that reads lengths from a column is taken"),
        ("use_liger_kernel", False, "because Liger has no encoder-decoders, and the loss is what this trainer mends"),
        ("eval_use_gather_object", False, "because predictions are tensors"),
    ):
        yield getattr(args, name) == right, name, f"{right}, {reason}", getattr(args, name)
    is_ignored = args.fp16 and args.device.type == "cpu"
    yield not is_ignored, "fp16", "False on the CPU, where Accelerate ignores it (`bf16` works there)", True
    yield args.label_names in (None, ["labels"]), "label_names", "None", args.label_names
    yield args.n_gpu <= 1, "CUDA_VISIBLE_DEVICES", "one GPU per process (start the script with torchrun)", args.n_gpu
    parallel = args.parallelism_config
    sizes = {name: getattr(parallel, name, 1) or 1 for name in ("cp_size", "sp_size")}
    is_whole = all(size == 1 for size in sizes.values())
    yield is_whole, "parallelism_config", "one that leaves sequences whole", sizes
