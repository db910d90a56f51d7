"""From a folder or the Hub to a trained model on a device; each mistake of a user is an error of one sentence."""

import pickle
import re
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

from heedful.checksums_heed import CHECKSUMS_FILE, changed_files
from heedful.files import check_inside, first_line, import_extra, listed, read_object
from heedful.inference.search_settings import SEARCH_SETTINGS

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ADAPTER_FILE = "adapter_config.json"
MOST_PARTS = 10_000  # layers or labels that a config may ask for
# Models of transformers that `heedful convert` makes Heed models of.
STOCK = ("bart", "m2m_100", "marian", "mbart", "pegasus")
CODE_REFERENCE = re.compile(r"\w+\.\w+")  # file and class in `auto_map`, of the same folder
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What is fetched from a repository: no code, because the installed Heedful has its own, and no training state.
FETCHED_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.spm", "*.txt", "*.jinja"]
IGNORED_FILES = ["checkpoints/*", "training_state/*", "runs/*", "onnx/*"]


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device "cpu", "cuda", "cuda:1", "mps"; for None CUDA where there is one, else the CPU.

    Another name, or a device that this machine lacks, is a `ValueError`.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # `device_count`, not `is_available`: "cuda:1" on a machine with one GPU does not exist either.
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    try:
        resolved = torch.device(device)
        count = counts[resolved.type]
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"`device` must be cpu, cuda, cuda:N or mps, but is {device!r} instead.") from error
    if (resolved.index or 0) >= count:
        raise ValueError(
            f"`device` must be one that this machine has, but is {str(device)!r} instead"
            f" (there are {count} {resolved.type} devices here)."
        )
    return resolved


def model_folder(model: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model, and fetch it first if it is an id on the Hub; a local folder of that name wins.

    `revision` is a branch, tag or commit on the Hub, by default the newest of the main branch. A commit that was
    fetched before needs no network. What cannot be found or fetched is a `FileNotFoundError`.
    """
    folder = Path(model)
    if folder.is_file():
        raise FileNotFoundError(f"{folder} must be a folder with a model, but is a file.")
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

    Unlike `AutoModelForSeq2SeqLM.from_pretrained` alone, it refuses weights that do not match the model (there,
    missing ones become random numbers and unknown ones are dropped), weights that are not numbers, and a broken
    generation_config.json, which transformers ignores.

    Args:
        folder: A local folder with config.json and weights, or an id on the Hub.
        revision: Branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: If the folder or repository, its config.json or its weights are missing.
        ValueError: If the config or the weights cannot be used, are not those that were saved, or lie elsewhere; the
            message has the folder and the reason.
    """
    folder = model_folder(folder, revision)
    if is_adapter(folder):
        return _merged(folder)
    _check_files(folder)
    # Beside the loading, which takes as long.
    changed = ThreadPoolExecutor(1).submit(changed_files, folder, "weights")
    # The classes of heedful must be known to transformers' Auto classes.
    from transformers import AutoModelForSeq2SeqLM

    import heedful  # noqa: F401

    try:
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # They are named below; the error of transformers does not name them.
            ignore_mismatched_sizes=True,
        )
    # The libraries raise all kinds of errors for a broken file, also SafetensorError, which is just an Exception.
    except Exception as error:
        raise ValueError(f"The model in {folder} cannot be loaded: {why_not_loaded(error)}") from error
    check_report(folder, report)
    _check_numbers(folder, model)
    check_unchanged(folder, changed.result())  # last, because the errors above say more
    saved = read_object(folder / "generation_config.json")
    if saved.keys() & SEARCH_SETTINGS:  # which transformers drops where the config began as one made of config.json
        known = {name: value for name, value in saved.items() if name[0] != "_"}
        model.generation_config = type(model.generation_config).from_dict(known)
    return model.eval()


def check_report(folder: str | Path, report: Mapping[str, Any], may_lack: str = "") -> None:
    """Raise a `ValueError` that names weights which are missing, unknown or of other shapes by a loading report."""
    for kind, meaning in (("missing_keys", "lack"), ("unexpected_keys", "have, unknown to the model,")):
        names = sorted(name for name in report[kind] if name != may_lack)
        if names:
            raise ValueError(f"The weights in {folder} {meaning} {listed(names)}.")
    shapes = [
        f"{name} {tuple(found)} instead of {tuple(wanted)}"
        for name, found, wanted in report.get("mismatched_keys", ())
    ]
    if shapes:
        raise ValueError(f"The weights in {folder} must have the shapes of its config, but are {listed(shapes)}.")


def _check_numbers(folder: Path, model: "PreTrainedModel") -> None:
    from heedful.generation_heed import weights_that_are_no_numbers

    broken = list(weights_that_are_no_numbers(model))
    if broken:
        raise ValueError(f"The weights in {folder} must be finite numbers, but are not in {listed(broken)}.")


def check_unchanged(folder: Path, changed: list[str] | None) -> None:
    """Raise a `ValueError` that names the files of a folder's weights which are not those that were saved."""
    if changed:
        raise ValueError(
            f"The model in {folder} must be the one that was saved there, but {listed(changed)} changed since, by a "
            f"fault or by somebody. If it is meant, delete {CHECKSUMS_FILE}, which remembers them."
        )


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of peft and no model."""
    return (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").is_file()


def adapted_model(folder: Path) -> Path:
    """Return the folder of the model that the adapter in a folder was trained on.

    If it names none, or one that is neither here nor on the Hub, that is a `FileNotFoundError`.
    """
    path = folder / ADAPTER_FILE
    settings = read_object(path)
    name = settings.get("base_model_name_or_path")
    try:
        return model_folder(name or "", settings.get("revision") if name and not Path(name).is_dir() else None)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`base_model_name_or_path` of {path} must be the model that the adapter was trained on, but {name!r} is "
            "neither a folder here nor a model on the Hub."
        ) from error


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder with the tokenizers of a model: of an adapter without its own, that of the model below it."""
    return adapted_model(folder) if is_adapter(folder) and not (folder / "tokenizer.json").is_file() else folder


def _merged(folder: Path) -> "PreTrainedModel":
    """Load the model that an adapter was trained on, with the adapter merged into its weights."""
    peft = import_extra("peft", "adapters")
    check_inside(folder)
    base = below = adapted_model(folder)
    seen = {folder.resolve()}
    while is_adapter(below):  # trained on an adapter
        if below.resolve() in seen:
            raise ValueError(
                f"`base_model_name_or_path` of {folder / ADAPTER_FILE} must lead to a model, but leads to an adapter "
                f"that leads back to itself: {below}."
            )
        seen.add(below.resolve())
        below = adapted_model(below)
    model = load_model(base)
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
        adapted: Any = None
        if not settings.is_prompt_learning:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
                adapted = peft.PeftModel.from_pretrained(model, str(folder))
            wanted = peft.get_peft_model_state_dict(adapted).keys()
            saved = peft.load_peft_weights(str(folder), device="cpu").keys()
    # As in `load_model`, broken files raise all kinds of errors.
    except Exception as error:
        raise ValueError(f"The adapter in {folder} cannot be loaded: {why_not_loaded(error)}") from error
    if adapted is None:
        raise ValueError(
            f"The adapter in {folder} must be one that can be merged into the weights, as LoRA's, but is "
            f"{settings.peft_type.value} instead: load it with `PeftModel.from_pretrained` and call its `generate()`."
        )
    known = {f"base_model.model.{name}" for name in model.state_dict()}  # peft may save embeddings beside its weights
    check_report(folder, {"missing_keys": wanted - saved, "unexpected_keys": saved - wanted - known})
    merged = adapted.merge_and_unload().eval()
    _check_numbers(folder, merged)
    return merged


def why_not_loaded(error: Exception) -> str:
    """Say why transformers could not load a model, in our words where its own would mislead."""
    text = str(error)
    if "custom code" in text:
        return (
            "it needs code of its own, which Heedful does not run unasked. Who trusts it loads it with "
            "`AutoModelForSeq2SeqLM.from_pretrained(…, trust_remote_code=True)` and gives it to `Translator(model, "
            "tokenizers)`, or checks it with `heedful verify --trust-remote-code`; Heed's own models need no code."
        )
    if "weights_only" in text or isinstance(error, pickle.UnpicklingError | EOFError):
        return (
            "its weights (.bin) are broken, or hold more than tensors, which could run code and is never loaded: get "
            "them as .safetensors."
        )
    return first_line(error)


def _check_files(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must hold a model, but has no config.json.")
    check_inside(folder)
    config = read_object(path)
    if "model_type" not in config:
        raise ValueError(f"{path} must be the config of a model, but has no `model_type`.")
    for name, value in config.items():  # what transformers makes a list or modules of, before it reads a weight
        is_size = name == "num_labels" or name.endswith("layers")
        if is_size and isinstance(value, int | float) and value > MOST_PARTS:
            raise ValueError(f"`{name}` of {path} must be at most {MOST_PARTS:,}, but is {value:,} instead.")
    read_object(folder / "generation_config.json")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        names = ", ".join(WEIGHT_FILES)
        raise FileNotFoundError(f"{folder} must hold the weights of a model, but has none of {names}.")
