"""transformers' Seq2SeqTrainer with exact losses, updates and evaluation, however the work is split."""

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorForSeq2Seq, GenerationConfig, Seq2SeqTrainer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, unwrap_peft_model
from transformers.utils import logging

from heedful.checksums_heed import TARGET_FOLDER, check_no_target
from heedful.configuration_base_heed import IGNORED_LABEL, HeedBaseConfig, special_token
from heedful.data.epochs.micro_batches import Tensors
from heedful.data.tokenization import TokenizerPair, warn_of_split_tokens
from heedful.encoder_decoder_heed import OutputLayer
from heedful.fast_paths_heed import has_own
from heedful.loss_heed import smoothed_cross_entropy
from heedful.training.trainer.batches import is_list, with_a_column, without_padding
from heedful.training.trainer.saving import WholeCheckpoints
from heedful.training.trainer.settings import check_settings
from heedful.training.trainer.streams import Count

logger = logging.get_logger(__name__)

OWN_LOSS = ("forward", "loss", "_score", "_smoothing")  # methods that a user's model may override
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


class HeedSeq2SeqTrainer(WholeCheckpoints):
    """A Seq2SeqTrainer whose results do not depend on how the work is split, for any encoder-decoder model.

    It overrides only the steps in which Seq2SeqTrainer is wrong:

    - Loss and gradient: the summed cross-entropy is divided by the whole update's labels, over all micro-batches and
      processes. `label_smoothing_factor`, unless it is 0, replaces a Heed model's `config.label_smoothing`.
    - Updates: every pair comes once per epoch. Seed and epoch decide the order, so a resumed run has the same updates
      on any number of processes, if an update still has as many pairs (or tokens). A stream keeps its order; every
      process reads it and takes its share.
    - Checkpoints: written whole, with checksums; the newest whole one is resumed. A push includes the model's code.
    - `eval_loss`: the mean over all labels of the plain cross-entropy, or of your own loss, if the model's class
      overrides `loss`, or `forward` with `num_items_in_batch`. The pairs of one batch then share their mean.
    - Predictions: one for each pair, in the dataset's order, the same in every process, padded with -100 only.
      `include_for_metrics=["loss"]` gives `compute_metrics` the loss of every pair.
    - A loss or weight that is not finite stops all processes with an error before weights change or are saved.
    - Special ids and lengths that `generation_config` lacks come from the model.

    Args:
        args: Arguments of Seq2SeqTrainer.
        tokens_per_update: The padded tokens per update; replaces `per_device_train_batch_size`. They are divided
            among `gradient_accumulation_steps × processes` micro-batches.
        buckets_per_update: The number of groups of similarly long pairs in an update; see `UpdateBatches`.
        kwargs: Arguments of Seq2SeqTrainer by name. `processing_class` may be a `TokenizerPair`; with it, or with a
            tokenizer, `data_collator` is a `DataCollatorForSeq2Seq` by default.

    Raises:
        ValueError: If a setting would be ignored, or would break these promises.
    """

    def __init__(
        self, *args: Any, tokens_per_update: int | None = None, buckets_per_update: int | None = None, **kwargs: Any
    ):
        given: dict[str, Any] = dict(inspect.signature(Seq2SeqTrainer).bind_partial(*args, **kwargs).arguments)
        check_settings(given, tokens_per_update, buckets_per_update)  # before a folder or a repository is made
        tokenizer, model = given.get("processing_class"), given.get("model")
        if isinstance(tokenizer, TokenizerPair):
            if isinstance(config := getattr(model, "config", None), HeedBaseConfig):
                tokenizer.check_config(config)
            tokenizer = tokenizer.source
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            warn_of_split_tokens(tokenizer)
            given["data_collator"] = given.get("data_collator") or DataCollatorForSeq2Seq(tokenizer)
        if given.get("model_init") is not None:
            given["model_init"] = self._completing(given["model_init"])
        own_generation = deepcopy(getattr(model, "generation_config", None))
        super().__init__(**given)
        if self.args.device.type == "cpu":
            # It may be "cpu:1", where transformers 5.17 loads no optimizer; only the property's cache can be set.
            self.args._setup_devices = torch.device("cpu")
        self.tokens_per_update, self.buckets_per_update = tokens_per_update, buckets_per_update or 1
        self._computes_own_loss = _counts_labels(self._plain_model)
        self._complete(self.model, own_generation)
        self._check_tokenizer()
        self.model_accepts_loss_kwargs = True  # makes Trainer count every update's labels
        self._own_loss_is_checked = False
        self._settled_model: Any = None
        self._update_loss: torch.Tensor | float = 0.0
        self._row_losses: list[torch.Tensor] = []

    @property
    def _plain_model(self) -> Any:
        return unwrap_peft_model(self.accelerator.unwrap_model(self.model))

    def _completing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)  # transformers counts its parameters
        def make_and_complete(*trial: Any) -> Any:
            model = make(*trial)
            self._complete(model, model.generation_config)
            return model

        return make_and_complete

    def _complete(self, model: Any, own: GenerationConfig | None) -> None:
        """Give a model the arguments' smoothing and `generation_config`, completed by the model's own."""
        plain = unwrap_peft_model(model)
        if _counts_labels(plain) and self.args.label_smoothing_factor:
            plain.config.label_smoothing = self.args.label_smoothing_factor
        if own is None or self.args.generation_config is None:
            return
        settings = self.load_generation_config(self.args.generation_config)
        # Without an end token, generation continues to its limit; without a length, it stops after 20 tokens.
        has_length = settings.max_length is not None or settings.max_new_tokens is not None
        for name in SPECIAL_IDS if has_length else (*SPECIAL_IDS, "max_length", "max_new_tokens"):
            if getattr(settings, name) is None:
                setattr(settings, name, getattr(own, name))
        model.generation_config = settings

    def _check_tokenizer(self) -> None:
        """Warn if one of two tokenizers would not be saved; raise if the folder has another model's target one."""
        config = unwrap_peft_model(self.model).config
        has_two = getattr(config, "decoder_vocab_size", None) not in (None, config.vocab_size)
        has_two |= (Path(config.name_or_path or "") / TARGET_FOLDER).is_dir()
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        source = tokenizer.source if isinstance(tokenizer, TokenizerPair) and tokenizer.is_joint else tokenizer
        if isinstance(source, PreTrainedTokenizerBase) and TARGET_FOLDER not in source.init_kwargs:
            check_no_target(self.args.output_dir)
        if has_two and tokenizer and not isinstance(tokenizer, TokenizerPair):
            advice = "give the trainer `processing_class=TokenizerPair(source, target)`"
            logger.warning(f"The model has a tokenizer for each side, and only one would be saved with it: {advice}.")

    # Loss

    def compute_loss(
        self, model: Any, inputs: Tensors, return_outputs: bool = False, num_items_in_batch: Count = None
    ) -> Any:
        """Return the whole update's cross-entropy in nats per label, and maybe the outputs."""
        inputs = with_a_column(inputs, self._plain_model.config)
        if "labels" not in inputs:
            raise ValueError(f"A batch must hold `labels`, but holds {', '.join(inputs)} instead.")
        labels = inputs["labels"]
        if num_items_in_batch is None or not model.training:
            num_items_in_batch = (labels != IGNORED_LABEL).sum().clamp(min=1)
        if self._computes_own_loss and (model.training or has_own(self._plain_model, *OWN_LOSS)):
            # If the caller wants outputs, or `forward` is a user's, the logits may be used.
            is_read = return_outputs or has_own(self._plain_model, "forward")
            if not is_read and isinstance(self._plain_model, OutputLayer):
                inputs = inputs | {"logits_to_keep": torch.arange(0)}
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            loss = outputs["loss"]
            if not model.training:
                counts = (labels != IGNORED_LABEL).sum(1)
                self._keep_row_losses(loss * counts, counts)
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
                self._keep_row_losses(losses, (labels != IGNORED_LABEL).sum(1))
                total = losses.sum()
            loss = total / num_items_in_batch
        if model.training:
            # DDP averages the processes' gradients, but the update's loss is their sum.
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def _keep_row_losses(self, losses: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep all processes' summed losses `(B)` per pair, and their numbers of labels."""
        rows = torch.stack([losses.detach().float(), counts.float()], dim=1)  # (B, 2)
        self._row_losses.append(self.accelerator.gather_for_metrics(rows))

    def training_step(self, model: Any, inputs: Tensors, num_items_in_batch: Count = None) -> torch.Tensor:
        """Add a micro-batch's gradient; after an update's last micro-batch, check that the loss is finite."""
        if isinstance(model, DistributedDataParallel) and model is not self._settled_model:
            self._settle_buckets(model, inputs, num_items_in_batch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._update_loss = self._update_loss + loss
        if self.accelerator.sync_gradients:
            total, self._update_loss = float(self._update_loss), 0.0
            if not math.isfinite(total) and num_items_in_batch is not None and not float(num_items_in_batch):
                found = f"update {self.state.global_step + 1} has none"
                raise ValueError(f"`labels` must hold at least one label other than -100, but {found}.")
            self._stop_if(not math.isfinite(total), "the training loss is not finite")
        return loss

    def _settle_buckets(self, model: DistributedDataParallel, inputs: Tensors, count: Count) -> None:
        """Let DDP build its buckets before the first update, so that a resumed run adds in the same order."""
        self._settled_model = model
        if model.find_unused_parameters:  # it never builds other buckets
            return
        is_last, device = model.require_backward_grad_sync, self.args.device
        model.require_backward_grad_sync = True  # it is False in the first micro-batches
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            super().training_step(model, dict(inputs), count)
        model.require_backward_grad_sync = is_last
        model.zero_grad()

    def _without_labels(self, inputs: Tensors) -> Tensors:
        """Replace the labels by `decoder_input_ids`, so that no loss is computed twice."""
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        if not {"decoder_input_ids", "decoder_inputs_embeds"} & rest.keys():
            model = self._plain_model
            shift = getattr(model, "prepare_decoder_input_ids_from_labels", partial(_shifted, model))
            rest["decoder_input_ids"] = shift(labels=inputs["labels"])
        return rest

    @torch.no_grad()
    def _check_own_loss(self, outputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> None:
        """Refuse a model whose own loss has more terms, such as a router's: they would be left out."""
        if not (count := (labels != IGNORED_LABEL).sum()):
            return
        logits, own = outputs["logits"], outputs["loss"].float()
        ours = smoothed_cross_entropy(logits, labels, 0.0) / count
        if own.isfinite() and not torch.allclose(ours, own, rtol=1e-5 if logits.dtype == torch.float32 else 1e-2):
            found = f"{type(self.model).__name__} has the loss {own:.6f} instead of {ours:.6f}"
            must = "be trained only with its labels' cross-entropy"
            way = "let its `forward` divide by `num_items_in_batch`, or use transformers' Seq2SeqTrainer"
            raise ValueError(f"`model` must {must}, but {found}: {way}.")
        self._own_loss_is_checked = True

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """Return the batches of an evaluation dataset; a given dataset gets its own, even if workers persist."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            return self.get_test_dataloader(eval_dataset)
        self.eval_dataset = _listed(self.eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the given dataset's batches."""
        return super().get_test_dataloader(_listed(test_dataset))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate each pair once, with a loss over all labels."""
        self.gather_function, self._row_losses = self.accelerator.gather_for_metrics, []
        compute_metrics = self.compute_metrics
        if compute_metrics is not None and "loss" in self.args.include_for_metrics:
            self.compute_metrics = partial(self._compute_with_losses, compute_metrics)
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.compute_metrics = compute_metrics
        if not output.num_samples:
            raise ValueError("`eval_dataset` or `test_dataset` must hold at least one pair, but is empty instead.")
        if self._row_losses:
            loss, labels = torch.cat(self._row_losses).cpu().double().sum(0).tolist()
            if not labels:
                raise ValueError("`labels` must hold at least one label other than -100, but all are -100.")
            given = inspect.signature(super().evaluation_loop).bind(*args, **kwargs).arguments
            output.metrics[f"{given.get('metric_key_prefix', 'eval')}_loss"] = loss / labels  # type: ignore[index]
        return output

    def _compute_with_losses(
        self, compute_metrics: Callable[..., dict[str, Any]], results: EvalPrediction, **kwargs: Any
    ) -> dict[str, Any]:
        """Compute metrics with the loss of every pair; Trainer would repeat each batch's mean."""
        by_batch = self.args.batch_eval_metrics
        losses, labels = torch.cat(self._row_losses[-1:] if by_batch else self._row_losses).T
        means: Any = losses / labels.clamp(min=1)
        given = (results.predictions, results.label_ids, results.inputs, means if by_batch else means.cpu().numpy())
        return compute_metrics(EvalPrediction(*given), **kwargs)

    def prediction_step(
        self, model: Any, inputs: Tensors, prediction_loss_only: bool, ignore_keys: Any = None, **gen_kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Return one batch's loss, predictions and labels, padded with -100."""
        inputs = with_a_column(inputs, self._plain_model.config)
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        labels, loss = inputs.get("labels"), None
        if labels is not None:
            loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
            given, dropped = inputs.get("decoder_input_ids"), {"labels"}
            if given is not None and given.shape == labels.shape:  # a collator made them from the labels
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
    """Return whether a model divides its loss by a given number of labels."""
    return "num_items_in_batch" in inspect.signature(model.forward).parameters


def _listed(rows: Any) -> Any:
    """Return rows as lists: only known numbers are divided evenly, and all predictions fill memory anyway."""
    if isinstance(rows, dict):
        return {name: _listed(each) for name, each in rows.items()}
    return rows if rows is None or is_list(rows) else list(rows)


def _shifted(model: Any, labels: torch.Tensor) -> torch.Tensor:
    shifted = labels.new_full(labels.shape, special_token(model, "decoder_start_token_id"))
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORED_LABEL, special_token(model, "pad_token_id"))
