"""A trained model from a folder or the Hub onto a device, with the user's mistakes told in one sentence each."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What is fetched of a repository: no code, for the installed Heed has its own, and no training state.
FETCHED_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.spm", "*.txt", "*.jinja"]
IGNORED_FILES = ["checkpoints/*", "training_state/*", "runs/*", "onnx/*"]


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


def model_folder(model: str | Path, revision: str | None = None) -> Path:
    """Find the folder of a model, after fetching it where it lies on the Hub.

    Args:
        model: A local folder, or an id on the Hub such as `name/model`; a folder of that name wins.
        revision: Branch, tag or commit on the Hub; by default the newest of the main branch. A commit that was
            fetched before needs no network.

    Raises:
        FileNotFoundError: When there is neither such a folder nor such a model or revision on the Hub, or the Hub
            cannot be reached and the model was not fetched before.
        ValueError: When a revision is given for a local folder.

    """
    folder = Path(model)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"`revision` must be None for a local folder ({folder}), but is {revision!r} instead.")
        return folder
    if not HUB_ID.fullmatch(str(model)):
        raise FileNotFoundError(
            f"{folder} must be a folder with a model, or the id of a model on the Hub, but does not exist."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        fetched = snapshot_download(
            str(model), revision=revision, allow_patterns=FETCHED_FILES, ignore_patterns=IGNORED_FILES
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        place = f"{model} at revision {revision}" if revision else str(model)
        raise FileNotFoundError(
            f"{place} must be a folder here or a model on the Hub, but is neither: {first_line(error)}"
        ) from error
    return Path(fetched)


def load_model(folder: str | Path, revision: str | None = None) -> "PreTrainedModel":
    """Load an encoder-decoder from a local folder or the Hub, on the CPU and in evaluation mode.

    Unlike `AutoModelForSeq2SeqLM.from_pretrained` alone, it refuses a folder whose weights do not match the
    model: there, missing weights become random numbers and unknown ones are dropped.

    Args:
        folder: A local folder with config.json and weights, or an id on the Hub.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: When the folder or repository, its config.json or its weights are missing.
        ValueError: When the config or the weights cannot be used; the message has the folder and the reason.

    """
    folder = model_folder(folder, revision)
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
