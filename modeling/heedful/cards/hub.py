"""Push of a model's folder to the Hub in one commit: weights, code, tokenizers and card."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_imports

from heedful.cards.learning_curve import CURVE_FILE
from heedful.cards.model_card import CARD_FILE, with_repository
from heedful.checksums_heed import CHECKSUMS_FILE, TARGET_FOLDER
from heedful.data.tokenization import TokenizerPair
from heedful.decoding.confidence import CONFIDENCE_FILE
from heedful.decoding.loading import ADAPTER_FILE, CODE_REFERENCE, WEIGHT_FILES, load_model
from heedful.files import check_inside, first_line, is_plain_file, quoted, read_object, write_text

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt", "source.spm", "target.spm"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model"),
)
# Pushed together with the code that config.json names. A Trainer also leaves Hub tokens, states and logs.
MODEL_FILES = (
    *("config.json", "generation_config.json", ADAPTER_FILE, "adapter_model.safetensors", *WEIGHT_FILES),
    *("model-?????-of-?????.safetensors", "pytorch_model-?????-of-?????.bin", "*.onnx", "*.onnx_data"),
    *(f"{place}{name}" for place in ("", f"{TARGET_FOLDER}/") for name in TOKENIZER_FILES),
    *("recipe.yaml", "metrics.json", CONFIDENCE_FILE, CHECKSUMS_FILE, CARD_FILE, CURVE_FILE, ".eval_results/*.yaml"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", ".gitattributes"),
)
PLAIN_NAME = re.compile(r"\w[\w.-]*|\.gitattributes|\.eval_results")  # files and folders that may be sent
# Files from earlier commits, which may have other shards and tokenizers.
REPLACED_FILES = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.py"]
REPLACED_FILES += [f"{TARGET_FOLDER}/*", "tokenizer*", "special_tokens_map.json", "added_tokens.json", CHECKSUMS_FILE]


@dataclass(frozen=True)
class Pushed:
    """A pushed model's address."""

    repository: str  # its id, `name/model`
    commit: str  # its id, for `from_pretrained(revision=…)`
    url: str  # the commit's


def push(
    folder: str | Path,
    repository: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> Pushed:
    """Push a model's folder to the Hub in one commit, if it can be loaded from there.

    The repository's id is put into the card's code, in the folder too.

    Args:
        folder: A folder with model, code, tokenizers and card, as after `heedful train`.
        repository: Its Hub id, `name/model`; created if missing.
        private: Whether a new repository is private; None takes the owner's default.
        revision: Branch, created if missing; None is the main branch.
        message: Commit message.
        token: Hub token; by default from `hf auth login`, or the variable HF_TOKEN.

    Raises:
        FileNotFoundError: If the folder lacks a file; the message names it.
        ValueError: If weights, tokenizers, config or card cannot be used.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    client_error: Any = HfHubHTTPError.__bases__[0]  # from the client's library, which differs by version
    folder = Path(folder)
    files = checked_files(folder, repository)
    api = HfApi(token=token)
    try:
        name = api.create_repo(repository, private=private, exist_ok=True).repo_id
        card = (folder / CARD_FILE).read_text(encoding="utf-8")
        write_text(folder / CARD_FILE, with_repository(card, name))
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            revision=revision,
            commit_message=message or "Upload model, tokenizers and card with Heedful",
            allow_patterns=files,
            delete_patterns=REPLACED_FILES,
        )
    except (client_error, ConnectionError) as error:
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # the Hub's answer
            raise
        found = f"{first_line(error)} ({folder} has passed its checks, and `--dry-run` lists the files)"
        raise ConnectionError(f"The Hub cannot be reached to push {repository}: {found}.") from error
    return Pushed(name, commit.oid, commit.commit_url)


def checked_files(folder: Path, repository: str) -> list[str]:
    """Check a folder and its Hub name, and return the files to push; a warning names the others."""
    validate_repo_id(repository)
    check_folder(folder)
    files = files_to_push(folder)
    if left := sorted({path.name for path in folder.iterdir()} - {name.partition("/")[0] for name in files}):
        advice = "to publish other files, use `hf upload`"
        warnings.warn(f"{quoted(left)} in {folder} belongs to no model and is not pushed: {advice}.", stacklevel=2)
    return files


def files_to_push(folder: Path) -> list[str]:
    """Return the folder's files that belong to its model: plain files, or links into the Hub's cache."""
    names = [*MODEL_FILES, *_code_files(folder, read_object(folder / "config.json"))]
    found = {path for name in names for path in folder.glob(name) if is_plain_file(path, folder)}
    parts = (path.relative_to(folder).parts for path in sorted(found))
    return ["/".join(each) for each in parts if all(map(PLAIN_NAME.fullmatch, each))]


def check_folder(folder: Path) -> None:
    """Check, by loading it, that the model can be loaded from the folder on other machines."""
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else "does not exist"
        raise FileNotFoundError(f"{folder} must be a folder with a model, but {what}.")
    for name in ("config.json", CARD_FILE):
        if not (folder / name).is_file():
            hint = " (`heedful card` writes one)" if name == CARD_FILE else ""
            raise FileNotFoundError(f"{folder} must hold {name}, but does not{hint}.")
    check_inside(folder)  # or link targets would be uploaded
    config = read_object(folder / "config.json")
    for file, reader in _code_files(folder, config).items():
        if not (folder / file).is_file():
            again = "save the model again with `save_pretrained` after `import heedful`"
            raise FileNotFoundError(f"{folder} must hold {file}, which its {reader} names, but does not: {again}.")
    TokenizerPair.from_pretrained(folder).check_config(load_model(folder).config)
    read_card(folder / CARD_FILE)


def read_card(path: Path) -> ModelCard:
    """Load a model card; metadata that the Hub would refuse, or without license or language, are a `ValueError`."""
    try:
        card = ModelCard.load(path, ignore_metadata_errors=False)
        # The metadata must not change when written for the Hub.
        again = type(card)(f"---\n{card.data.to_yaml()}\n---\n").data
    except Exception as error:  # from YAML, jinja or huggingface_hub
        raise ValueError(f"{path} must begin with a model card's metadata: {first_line(error)}") from error
    if again.to_dict() != card.data.to_dict():
        raise ValueError(f"The metadata of {path} must stay the same when written and loaded, but changes.")
    for name in ("license", "language", "library_name"):
        if not card.data.get(name):
            raise ValueError(f"The metadata of {path} must have `{name}`, but does not.")
    return card


def _code_files(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return a folder's code files, each with the name of the file that needs it."""
    references = [*(config.get("auto_map") or {}).values()]
    references += [task["impl"] for task in (config.get("custom_pipelines") or {}).values()]
    references = [each for each in references if "--" not in str(each)]  # in another repository
    for reference in references:
        if not CODE_REFERENCE.fullmatch(str(reference)):
            must = "a file in the folder and a class in it, such as modeling_heed.HeedModel"
            where = f"`auto_map` and `custom_pipelines` of {folder / 'config.json'}"
            raise ValueError(f"{where} must name {must}, but name {reference!r} instead.")
    found = {f"{reference.split('.')[0]}.py": "config.json" for reference in references}
    unread = sorted(found)
    while unread:
        reader = unread.pop()
        if (folder / reader).is_file():
            names = {f"{name}.py" for name in get_relative_imports(folder / reader)} - found.keys()
            found |= dict.fromkeys(sorted(names), reader)
            unread += sorted(names)
    return found
