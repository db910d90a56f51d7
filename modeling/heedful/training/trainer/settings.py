"""Settings that HeedSeq2SeqTrainer refuses, as a table."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from transformers import Seq2SeqTrainingArguments

from heedful.messages_heed import wrong
from heedful.training.trainer.batches import is_list

BY_LENGTH = "(`tokens_per_update` groups by length without changing the updates)"
OWN_LOSS = "(put your own loss into the model's class: override its `loss`; docs/guides/own_model.md)"
# For each rule: when it holds, the setting, its right values, and their words in the message.
RULES: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("always", "compute_loss_func", (None,), f"None {OWN_LOSS}"),
    ("always", "accelerator_config.even_batches", (True,), "True"),
    ("always", "accelerator_config.split_batches", (False,), "False"),
    ("always", "accelerator_config.dispatch_batches", (False, None), "False"),
    ("always", "auto_find_batch_size", (False,), "False, because it changes the updates"),
    ("always", "dataloader_drop_last", (False,), "False, because it drops pairs"),
    ("always", "dataloader_in_order", (True,), "True, because the updates must not depend on workers' speed"),
    ("always", "length_column_name", ("length",), "length, because no strategy uses a column of lengths"),
    ("always", "use_liger_kernel", (False,), "False, because Liger has no encoder-decoders and replaces the loss"),
    ("always", "eval_use_gather_object", (False,), "False, because predictions are tensors"),
    ("always", "label_names", (None, ["labels"]), "None"),
    ("always", "CUDA_VISIBLE_DEVICES", (0, 1), "one GPU per process (start the script with torchrun)"),
    ("always", "parallelism_config", ({"cp_size": 1, "sp_size": 1},), "one that leaves sequences whole"),
    ("on the CPU", "fp16", (False,), "False on the CPU, where Accelerate ignores it (`bf16` works there)"),
    ("processes", "average_tokens_across_devices", (True,), "True, because the labels of all processes are counted"),
    ("not a stream", "ignore_data_skip", (False,), "False, because a resumed run would repeat pairs"),
    ("of pairs", "train_sampling_strategy", ("random", "sequential"), f"random or sequential {BY_LENGTH}"),
    ("of pairs", "buckets_per_update", (None,), "None without `tokens_per_update`"),
    ("of tokens", "train_sampling_strategy", ("random",), f"random {BY_LENGTH}"),
    ("of tokens", "per_device_train_batch_size", (8,), "left out: `tokens_per_update` replaces it"),  # 8: its default
)


def check_settings(given: Mapping[str, Any], tokens_per_update: int | None, buckets_per_update: int | None) -> None:
    """Refuse settings (Seq2SeqTrainer's, and ours) that contradict each other, break promises, or do nothing."""
    args, rows = given.get("args"), given.get("train_dataset")
    if not isinstance(args, Seq2SeqTrainingArguments):
        raise wrong("args", "be Seq2SeqTrainingArguments", type(args).__name__)
    holds = {
        "always": True,
        "on the CPU": args.device.type == "cpu",
        "processes": args.world_size > 1,
        "not a stream": rows is None or is_list(rows),
        "of pairs": tokens_per_update is None,
        "of tokens": tokens_per_update is not None,
    }
    parallelism = args.parallelism_config
    not_in_args = {
        "compute_loss_func": given.get("compute_loss_func"),
        "buckets_per_update": buckets_per_update,
        "CUDA_VISIBLE_DEVICES": args.n_gpu,
        "parallelism_config": {name: getattr(parallelism, name, 1) or 1 for name in ("cp_size", "sp_size")},
    }
    for name, value in {"tokens_per_update": tokens_per_update, "buckets_per_update": buckets_per_update}.items():
        if value is not None and (type(value) is not int or value < 1):
            raise wrong(name, "be a whole number of at least 1", repr(value))
    for when, name, right, wanted in RULES:
        value = not_in_args[name] if name in not_in_args else attrgetter(name)(args)
        if holds[when] and value not in right:
            raise wrong(name, f"be {wanted}", value)
