"""Load trained models from a folder or the Hub to a device."""

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from heedful.checksums_heed import CHECKSUMS_FILE, changed_files
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.search_settings import SEARCH_SETTINGS, check_ids
from heedful.files import ENDLESS, check_inside, first_line, import_extra, listed, read_object
from heedful.generation_heed import check_weights
from heedful.messages_heed import shortened
from heedful.protocols import Seq2SeqModel

WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")
WEIGHT_FILES = tuple(f"{name}{suffix}" for name in WHOLE_FILES for suffix in ("", ".index.json"))
ADAPTER_FILE = "adapter_config.json"
NO_SIZES = re.compile("trainable_token_indices|alora_invocation_tokens|.*seed|.*key")
ELSEWHERE = ("megatron_config", "adapters")  # settings that name Python modules and folders
MOST_PARTS = 10_000  # most layers or labels in a config
STOCK = ("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5")
CODE_REFERENCE = re.compile(r"\w+\.\w+")  # file and class in `auto_map`, in the same folder
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# No code, because Heedful is installed, and no training state.
FETCHED_FILES = ["recipe.yaml", "*.json", "*.safetensors", "*.bin", "*.model", "*.spm", "*.txt", "*.jinja"]
IGNORED_FILES = ["checkpoints/*", "training_state/*", "runs/*", "onnx/*"]


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return an existing device: "cpu", "cuda", "cuda:1", "mps", or for None CUDA if available, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # `device_count`, because "cuda:1" needs two GPUs.
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    try:
        resolved = torch.device(device)
        count = counts[resolved.type]
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"`device` must be cpu, cuda, cuda:N or mps, but is {device!r} instead.") from error
    if (resolved.index or 0) >= count:
        found = f"there are {count} {resolved.type} devices here"
        raise ValueError(f"`device` must be one that this machine has, but is {str(device)!r} instead ({found}).")
    return resolved


def model_folder(model: str | Path, revision: str | None = None) -> Path:
    """Return a model's folder, downloaded from the Hub if needed; a missing model is a `FileNotFoundError`."""
    folder = Path(model)
    if folder.is_file():
        raise FileNotFoundError(f"{folder} must be a folder with a model, but is a file.")
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"`revision` must be None for a local folder ({folder}), but is {revision!r} instead.")
        return folder
    if not HUB_ID.fullmatch(str(model)):
        must = f"{folder} must be a folder with a model, or a model's id on the Hub"
        raise FileNotFoundError(f"{must}, but does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    wanted: dict[str, Any] = {"allow_patterns": FETCHED_FILES, "ignore_patterns": IGNORED_FILES}
    try:
        return Path(snapshot_download(str(model), revision=revision, **wanted))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError) as error:
        must = f"{model}{f' at revision {revision}' if revision else ''} must be a folder here or a model on the Hub"
        raise FileNotFoundError(f"{must}, but is neither: {first_line(error)}") from error


def load_model(folder: str | Path, revision: str | None = None) -> Seq2SeqModel:
    """Load an encoder-decoder from a local folder or the Hub, on the CPU and in evaluation mode.

    Unlike `AutoModelForSeq2SeqLM.from_pretrained`, it refuses missing and unknown weights (transformers draws missing
    ones at random and drops unknown ones). It also refuses changed weights, not-a-number, and a broken
    generation_config.json. A `ValueError` gives folder and reason; a `FileNotFoundError` names a missing file.
    """
    folder = model_folder(folder, revision)
    if is_adapter(folder):
        return merged_adapter(folder)
    check_files(folder)
    # In parallel with loading, which takes as long.
    changed = ThreadPoolExecutor(1).submit(changed_files, folder, "weights")
    from transformers import AutoModelForSeq2SeqLM

    model: Seq2SeqModel = load_weights(folder, AutoModelForSeq2SeqLM, local_files_only=True)
    if names := changed.result():  # last: the errors above say more
        must = f"The model in {folder} must be unchanged since it was saved, but {listed(names)} changed"
        raise ValueError(f"{must}. If you changed it on purpose, delete {CHECKSUMS_FILE}.")
    saved = read_object(folder / "generation_config.json")
    if saved.keys() & SEARCH_SETTINGS:  # transformers drops them from a config made from config.json
        known = {name: value for name, value in saved.items() if name[0] != "_"}
        model.generation_config = type(model.generation_config).from_dict(known)
    if model.config.model_type.startswith("heed"):
        check_ids(model.generation_config, model.config.target_vocab_size)
    return model.eval()


@contextmanager
def reading(place: str | Path, part: str = "model") -> Iterator[None]:
    """Turn errors for broken files (from safetensors, pickle, torch and transformers) into a `ValueError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and not Path(place).is_dir():  # not on the Hub
            raise
        raise ValueError(f"The {part} in {place} cannot be loaded: {why_not_loaded(error)}") from error


def load_weights(place: str | Path, kind: Any, read: str = "", may_lack: str = "", **options: Any) -> Any:
    """Load a model by an Auto class; missing weights, and unknown ones that match `read`, are errors."""
    # transformers' error does not name wrong shapes; `check_report` does.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
    with reading(place):
        model, report = kind.from_pretrained(place, **options)
    unknown = [name for name in report["unexpected_keys"] if re.search(read, name)]
    check_report(place, report | {"unexpected_keys": unknown}, may_lack)
    check_weights(model, f" in {place}")
    return model


def check_report(folder: str | Path, report: Mapping[str, Any], may_lack: str = "") -> None:
    """Raise a `ValueError` for weights that a loading report calls missing, unknown or mismatched."""
    for kind, meaning in (("missing_keys", "lack"), ("unexpected_keys", "have, unknown to the model,")):
        names = sorted(name for name in report[kind] if name != may_lack)
        if names:
            raise ValueError(f"The weights in {folder} {meaning} {listed(names)}.")
    wrong = report.get("mismatched_keys", ())
    shapes = [f"{name} {tuple(found)} instead of {tuple(wanted)}" for name, found, wanted in wrong]
    if shapes:
        raise ValueError(f"The weights in {folder} must have the shapes of its config, but are {listed(shapes)}.")


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a peft adapter and no model."""
    return (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").is_file()


def load_tokenizers(folder: Path, model: Seq2SeqModel, given: str | Path) -> TokenizerPair:
    """Load a model's tokenizers from its folder; messages name the `given` path or id."""
    folder = tokenizer_folder(folder)
    try:
        tokenizers = TokenizerPair.from_pretrained(folder)
        tokenizers.check_config(model.config, model.generation_config)
    except FileNotFoundError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        kind = getattr(model.config, "model_type", None)
        if kind not in STOCK:
            raise ValueError(f"The tokenizers in {folder} cannot be used: {first_line(error)}") from error
        languages = " --source-language … --target-language …" if kind in ("m2m_100", "mbart") else ""
        raise ValueError(
            f"The model in {folder} must be a Heed model, but is a {kind} model: "
            f"`heedful convert {given} NEW_FOLDER{languages}` makes a Heed model that computes the same."
        ) from error
    return tokenizers


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a model's tokenizers: the base model's for an adapter without any."""
    has_none = is_adapter(folder) and not (folder / "tokenizer.json").is_file()
    return adapted_model(folder) if has_none else folder


def why_not_loaded(error: Exception) -> str:
    """Return why transformers could not load a model, reworded if its message would mislead."""
    text = str(error)
    if "custom code" in text:
        return (
            "it contains custom code, which is not run automatically. If you trust it, load it with "
            "`AutoModelForSeq2SeqLM.from_pretrained(…, trust_remote_code=True)` and pass it to `Translator(model, "
            "tokenizers)`, or check it with `heedful verify --trust-remote-code`. Heed models need no custom code."
        )
    if "weights_only" in text or isinstance(error, pickle.UnpicklingError | EOFError):
        what = "its weights (.bin) are broken, or contain Python objects, which could run code and are never loaded"
        return f"{what}: get them as .safetensors."
    return first_line(error)


def check_files(folder: Path) -> None:
    """Raise an error for a model folder's faults that need no library to find."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must hold a model, but has no config.json.")
    check_inside(folder)
    config = read_object(path)
    if "model_type" not in config and (folder / "model.bin").is_file():
        raise ValueError(f"{folder} must hold a transformers model, but holds one for CTranslate2: run it there.")
    if "model_type" not in config:
        raise ValueError(f"{path} must be the config of a model, but has no `model_type`.")
    for name, value in config.items():  # sizes of lists and modules that transformers makes before it loads a weight
        is_size = name == "num_labels" or name.endswith("layers")
        if is_size and isinstance(value, int | float) and value > MOST_PARTS:
            raise ValueError(f"`{name}` of {path} must be at most {MOST_PARTS:,}, but is {value:,} instead.")
    read_object(folder / "generation_config.json")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        found = f"has none of {', '.join(WEIGHT_FILES)}"
        raise FileNotFoundError(f"{folder} must hold the weights of a model, but {found}.")


def adapted_model(folder: Path) -> Path:
    """Return an adapter's model folder, if it is here or on the Hub."""
    path = folder / ADAPTER_FILE
    settings = read_object(path)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    try:
        if not isinstance(name, str) or not isinstance(revision, str | None):
            raise FileNotFoundError
        return model_folder(name, revision if name and not Path(name).is_dir() else None)
    except OSError as error:
        must = f"`base_model_name_or_path` of {path} must be the model that the adapter was trained on"
        found = shortened(name) + (f" at {shortened(revision)}" if revision else "")
        raise FileNotFoundError(f"{must}, but {found} is neither a folder here nor a model on the Hub.") from error


def _check_adapter(path: Path) -> None:
    """Raise a `ValueError` for adapter settings that would need endless time or memory, or name code."""
    values = list(read_object(path).items())
    for number, (key, value) in enumerate(values):
        if isinstance(value, dict | list):
            values += ((key, each) for each in [*value, *(value.values() if isinstance(value, dict) else ())])
        elif (
            (number > MOST_PARTS or (key in ELSEWHERE and value))
            or (isinstance(value, str) and key != "base_model_name_or_path" and ENDLESS.search(value))
            or (isinstance(value, int) and value > MOST_PARTS and not NO_SIZES.fullmatch(key))
        ):
            must = f"names, simple patterns and numbers, each number and their count at most {MOST_PARTS:,}"
            raise ValueError(f"`{key}` of {path} must be {must}, but is {shortened(value)} instead.")


def merged_adapter(folder: Path) -> Seq2SeqModel:
    """Load an adapter's model and merge the adapter into its weights."""
    peft = import_extra("peft", "adapters")
    check_inside(folder)
    base = below = adapted_model(folder)
    seen = {folder.resolve()}
    while is_adapter(below):  # trained on an adapter
        if below.resolve() in seen:
            must = f"`base_model_name_or_path` of {folder / ADAPTER_FILE} must lead to a model"
            raise ValueError(f"{must}, but leads to an adapter that leads back to itself: {below}.")
        seen.add(below.resolve())
        below = adapted_model(below)
    _check_adapter(folder / ADAPTER_FILE)
    model = load_model(base)
    # With a rank far above the file's, memory must not grow. Custom initializations need the weights.
    is_small = isinstance(read_object(folder / ADAPTER_FILE).get("init_lora_weights", True), bool)
    with reading(folder, "adapter"):
        settings = peft.PeftConfig.from_pretrained(str(folder))
        adapted = None
        if not settings.is_prompt_learning:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
                adapted = peft.PeftModel.from_pretrained(model, str(folder), low_cpu_mem_usage=is_small)
            wanted = peft.get_peft_model_state_dict(adapted).keys()
            saved = peft.load_peft_weights(str(folder), device="cpu").keys()
    if adapted is None:
        must = f"The adapter in {folder} must be one that can be merged into weights, such as LoRA"
        cure = "load it with `PeftModel.from_pretrained` and call its `generate()`"
        raise ValueError(f"{must}, but is {settings.peft_type.value} instead: {cure}.")
    known = {f"base_model.model.{name}" for name in model.state_dict()}  # peft may save embeddings too
    check_report(folder, {"missing_keys": wanted - saved, "unexpected_keys": saved - wanted - known})
    whole: Seq2SeqModel = adapted.merge_and_unload().eval()
    check_weights(whole, f" in {folder}")
    return whole
