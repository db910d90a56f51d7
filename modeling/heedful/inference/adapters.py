"""Adapters of peft: the model that one was trained on, and the adapter merged into its weights."""

import re
import warnings
from pathlib import Path
from typing import Any

from heedful.files import ENDLESS, check_inside, import_extra, read_object, shortened
from heedful.generation_heed import check_weights
from heedful.inference import loading
from heedful.inference.loading import ADAPTER_FILE, MOST_PARTS, is_adapter, load_model

NO_SIZES = re.compile("trainable_token_indices|alora_invocation_tokens|.*seed|.*key")
ELSEWHERE = ("megatron_config", "adapters")  # settings that name modules of Python and folders


def adapted_model(folder: Path) -> Path:
    """Return the folder of the model that the adapter in a folder was trained on, if it is here or on the Hub."""
    path = folder / ADAPTER_FILE
    settings = read_object(path)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    try:
        if not isinstance(name, str) or not isinstance(revision, str | None):
            raise FileNotFoundError
        return loading.model_folder(name, revision if name and not Path(name).is_dir() else None)
    except OSError as error:
        must = f"`base_model_name_or_path` of {path} must be the model that the adapter was trained on"
        found = shortened(name) + (f" at {shortened(revision)}" if revision else "")
        raise FileNotFoundError(f"{must}, but {found} is neither a folder here nor a model on the Hub.") from error


def check_settings(path: Path) -> None:
    """Raise a `ValueError` for settings of an adapter that would take for ever or all memory, or name code."""
    values = list(read_object(path).items())
    for number, (key, value) in enumerate(values):
        if isinstance(value, dict | list):
            values += ((key, each) for each in [*value, *(value.values() if isinstance(value, dict) else ())])
        elif (
            (number > MOST_PARTS or (key in ELSEWHERE and value))
            or (isinstance(value, str) and key != "base_model_name_or_path" and ENDLESS.search(value))
            or (isinstance(value, int) and value > MOST_PARTS and not NO_SIZES.fullmatch(key))
        ):
            must = f"names, simple patterns and numbers up to {MOST_PARTS:,}, and no more of them"
            raise ValueError(f"`{key}` of {path} must be {must}, but is {shortened(value)} instead.")


def merged(folder: Path) -> Any:
    """Load the model that an adapter was trained on, with the adapter merged into its weights."""
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
    check_settings(folder / ADAPTER_FILE)
    model = load_model(base)
    # Without memory for more than the file holds, whatever rank is named; methods of their own look at the weights.
    is_small = isinstance(read_object(folder / ADAPTER_FILE).get("init_lora_weights", True), bool)
    with loading.reading(folder, "adapter"):
        settings = peft.PeftConfig.from_pretrained(str(folder))
        adapted: Any = None
        if not settings.is_prompt_learning:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
                adapted = peft.PeftModel.from_pretrained(model, str(folder), low_cpu_mem_usage=is_small)
            wanted = peft.get_peft_model_state_dict(adapted).keys()
            saved = peft.load_peft_weights(str(folder), device="cpu").keys()
    if adapted is None:
        must = f"The adapter in {folder} must be one that can be merged into the weights, as LoRA's"
        cure = "load it with `PeftModel.from_pretrained` and call its `generate()`"
        raise ValueError(f"{must}, but is {settings.peft_type.value} instead: {cure}.")
    known = {f"base_model.model.{name}" for name in model.state_dict()}  # peft may save embeddings beside its weights
    loading.check_report(folder, {"missing_keys": wanted - saved, "unexpected_keys": saved - wanted - known})
    whole = adapted.merge_and_unload().eval()
    check_weights(whole, f" in {folder}")
    return whole
