"""A trained model from a folder onto a device, with the user's mistakes told in one sentence each."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Find the device to run on.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps"; None takes CUDA where there is one, else the CPU.

    Raises:
        ValueError: When the name is none of these, or this machine has no such device.

    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"`device` must be cpu, cuda, cuda:N or mps, but is {device!r} instead.") from error
    # `device_count`, not `is_available`: "cuda:1" on a machine with one GPU does not exist either.
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if resolved.type not in counts:
        raise ValueError(f"`device` must be cpu, cuda, cuda:N or mps, but is {device!r} instead.")
    if (resolved.index or 0) >= counts[resolved.type]:
        raise ValueError(
            f"`device` must be one that this machine has, but is {str(device)!r} instead"
            f" (there are {counts[resolved.type]} {resolved.type} devices here)."
        )
    return resolved


def load_model(folder: str | Path) -> "PreTrainedModel":
    """Load an encoder-decoder from a local folder, on the CPU and in evaluation mode.

    Unlike `AutoModelForSeq2SeqLM.from_pretrained` alone, it refuses a folder whose weights do not match the
    model: there, missing weights become random numbers and unknown ones are dropped.

    Args:
        folder: A local folder with config.json and weights.

    Raises:
        FileNotFoundError: When the folder, its config.json or its weights are missing.
        ValueError: When the config or the weights cannot be used; the message has the folder and the reason.

    """
    folder = Path(folder)
    _check_files(folder)
    # The classes of heed must be known to transformers' Auto classes.
    from transformers import AutoModelForSeq2SeqLM

    import heed  # noqa: F401

    try:
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    # The libraries below raise whatever they like for a broken file, SafetensorError (an Exception) among
    # them.
    except Exception as error:
        raise ValueError(f"The model in {folder} cannot be loaded: {first_line(error)}") from error
    for kind, meaning in (("missing_keys", "lack"), ("unexpected_keys", "have, unknown to the model,")):
        names = sorted(report[kind])
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"The weights in {folder} {meaning} {', '.join(names[:3])}{more}.")
    return model.eval()


def first_line(error: BaseException) -> str:
    """Shorten an error of a library to the name of its class and its first line of text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} must be a folder with a model, but does not exist. (A model on the Hub must be downloaded"
            " first: huggingface_hub.snapshot_download.)"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must hold a model, but has no config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, but is not: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} must be the config of a model, but has no `model_type`.")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        names = ", ".join(WEIGHT_FILES)
        raise FileNotFoundError(f"{folder} must hold the weights of a model, but has none of {names}.")
