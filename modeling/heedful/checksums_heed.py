"""SHA-256 checksums for saved weights and tokenizers, to detect changed or foreign files.

Each part is saved with its checksums. A Heed model's config repeats those of its weights: if you copy both, as
transformers' Trainer does to push a checkpoint, the target folder's checksum file may belong to an earlier model.
"""

import hashlib
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

CHECKSUMS_FILE = "heed_checksums.json"
CONFIG_KEY = "_weights_checksums"
TARGET_FOLDER = "target_tokenizer"
Part = Literal["weights", "tokenizer"]
# The tokenizer's settings are left out: every library that saves them changes them.
FILES: dict[Part, tuple[str, ...]] = {
    "weights": ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin*", "model.bin"),
    "tokenizer": ("tokenizer.json", "*.model", "*.spm", "vocab.*", "merges.txt", "added_tokens.json"),
}


def write_checksums(folder: str | Path, part: Part) -> None:
    """Write a part's checksums, and keep the other part's."""
    folder = Path(folder)
    try:
        known = _known(folder)
    except ValueError:  # a broken file is replaced
        known = {}
    known[part] = _found(folder, part)
    _write(folder / CHECKSUMS_FILE, known)
    config = read_object(folder / "config.json")
    if part == "weights" and str(config.get("model_type")).startswith("heed"):
        _write(folder / "config.json", config | {CONFIG_KEY: known[part]})


def changed_files(folder: str | Path, part: Part) -> list[str] | None:
    """Return a part's changed, missing and new files, or `None` without checksums."""
    folder = Path(folder)
    known = _known(folder).get(part)
    if known is None:
        return None
    found = _found(folder, part)
    changed = sorted(name for name in known | found if known.get(name) != found.get(name))
    is_copied = part == "weights" and read_object(folder / "config.json").get(CONFIG_KEY) == found
    return [] if is_copied else changed


def check_no_target(folder: str | Path, is_there: bool = False) -> None:
    """Raise a `ValueError` for an earlier pair's target tokenizer, which would decode other ids."""
    if is_there or has_tokenizer(Path(folder) / TARGET_FOLDER):
        must = f"must not hold a `{TARGET_FOLDER}` if its tokenizer is for both sides"
        raise ValueError(f"{folder} {must}, but does: remove it or choose another folder.")


def settle_target(folder: str | Path, is_joint: bool) -> None:
    """Name the target's tokenizer in the source's settings, or for a joint tokenizer remove an earlier pair's."""
    folder = Path(folder)
    settings, target = folder / "tokenizer_config.json", folder / TARGET_FOLDER
    if not is_joint:
        _write(settings, read_object(settings) | {TARGET_FOLDER: TARGET_FOLDER})
    elif has_tokenizer(target):
        for path in (target / settings.name, *_files(target, "tokenizer")):
            path.unlink(missing_ok=True)


def load_tokenizer(loader: Any, name: str | Path, way: str, **options: Any) -> Any:
    """Load a tokenizer; if it needs untrusted code, the `ValueError` names the way to load it."""
    try:
        return loader.from_pretrained(name, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        fault = f"The tokenizer in {name} contains custom code (`auto_map` in tokenizer_config.json)"
        raise ValueError(f"{fault}, which is not run automatically. If you trust it, load it {way}.") from error


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a folder holds tokenizer files."""
    return (Path(folder) / "tokenizer_config.json").is_file() or bool(_files(Path(folder), "tokenizer"))


def checksum(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _found(folder: Path, part: Part) -> dict[str, str]:
    found = {path.name: checksum(path) for path in _files(folder, part)}
    if part == "tokenizer":
        found |= {f"{TARGET_FOLDER}/{path.name}": checksum(path) for path in _files(folder / TARGET_FOLDER, part)}
    return found


def _files(folder: Path, part: Part) -> list[Path]:
    matching = (path for path in sorted(folder.glob("*")) if any(fnmatch(path.name, each) for each in FILES[part]))
    return [path for path in matching if path.is_file()]


def _known(folder: Path) -> dict[str, Any]:
    known = read_object(folder / CHECKSUMS_FILE)
    if not all(isinstance(value, dict) for value in known.values()):
        raise ValueError(f"{folder / CHECKSUMS_FILE} must hold the checksums of files, but does not.")
    return known


def read_object(path: Path) -> dict[str, Any]:
    """Load a JSON object, empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, but is not: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} must be a JSON object, but is {type(read).__name__} instead.")
    return read
