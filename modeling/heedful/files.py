"""Files and folders that are written whole or not at all, and texts for messages."""

import errno
import json
import os
import re
import select
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path, PureWindowsPath
from stat import S_IMODE, S_ISREG
from typing import Any

from heedful.checksums_heed import read_object as read_object
from heedful.messages_heed import listed as listed
from heedful.messages_heed import shortened, wrong

LONGEST_LINE = 2**26  # bytes
# All line ends of `str.splitlines`; the files that we load have only \n and \r\n.
LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# This machine's paths, and addresses with user, password and query, which nobody else may see.
LOCAL_PATH = re.compile(
    r"(?:(?i:file:)|~[^\\/]*[\\/]|(?=/)|(?:.*[\\/])?\.\.[\\/]|[A-Za-z]:[\\/]|\\\\[\w?.]).*?([^\\/]+)[\\/]*", re.DOTALL
)
ADDRESS = re.compile(r"(\w[\w+.-]*://)(?:[^/@]*@)?([^?#]*).*", re.DOTALL)
# Foreign patterns that may take forever: a repeated group, more than three repetitions, many rounds of peft.
ENDLESS = re.compile(r"^\s*[*+{]|\)\s*[*+{]|([*+{].*){4}|\(\?\w*x|niter_\d{4}", re.DOTALL)
# A private folder: the beginning of its file's name, and random letters.
PARTIAL = re.compile(r"\.(.+)\.\w{8}\.partial")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write a file or a folder to, which replaces `path` when it is complete.

    It is in a private folder next to `path`, so that two processes can write one file. Only a killed process leaves
    that folder (`leftovers`). If writing fails, `path` stays as it was. A file keeps its mode; if it cannot be
    replaced, as on a mount point, its content is. A full disk's error names `path`.
    """
    path = path.resolve() if path.is_symlink() else path
    prefix = f".{path.name[:40]}."  # the whole name has at most 255 bytes
    is_closed = path.is_file() and not os.access(path.parent, os.W_OK)
    folder = Path(tempfile.mkdtemp(".partial", prefix, None if is_closed else path.parent))
    try:
        partial = folder / path.name
        yield partial
        if partial.is_dir():
            remove(path)
        elif path.exists():
            partial.chmod(S_IMODE(path.stat().st_mode))
        try:
            partial.replace(path)
        except OSError:
            if not path.is_file() or partial.is_dir():
                raise
            shutil.copyfile(partial, path)
        flush(path.parent)
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            error.filename = error.filename or str(path)
        elif "os error 28" in str(error):  # safetensors' words
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        remove(folder)


@contextmanager
def written_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that becomes `path` when all is written, and is deleted after an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            yield partial
    except Exception as error:  # on a full disk the libraries raise different types, tokenizers a bare Exception
        raise OSError(f"{path} could not be written: {error}") from error


def leftovers(folder: Path) -> dict[Path, str]:
    """Return a folder's private folders of `written_whole`, each with the beginning of its file's name."""
    marks = {path: PARTIAL.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    return {path: mark[1] for path, mark in marks.items() if mark and path.is_dir() and not path.is_symlink()}


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes `target` when it is complete, and is deleted after an error."""
    target = Path(target)
    check_is_new(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as partial:
        partial.mkdir()
        yield partial


def check_is_new(target: Path, name: str = "target", kind: str = "folder", advice: str = "") -> None:
    """Raise a `ValueError` that names the argument if something is at `target`."""
    if target.exists() or target.is_symlink():
        raise ValueError(f"`{name}` must be a {kind} that does not exist yet, but {target} does{advice}.")
    check_can_be_made(target, name)


def check_can_be_made(path: Path, name: str) -> None:
    """Try whether `written_whole` can write a path; if not, raise a `ValueError` that names the argument."""
    try:
        if path.is_file():
            path.open("ab").close()
        else:
            nearest = next(folder for folder in path.absolute().parents if folder.exists())
            Path(tempfile.mkdtemp(".partial", f".{path.name[:40]}.", nearest)).rmdir()
    except OSError as error:
        raise ValueError(f"`{name}` must be writable, but {path} is not: {error.strerror}.") from error


def check_writable(path: str | Path, suffixes: Sequence[str] | None = None, name: str = "path") -> Path:
    """Return an output file's path; an error names the argument if suffix or folder is wrong."""
    path = Path(path)
    if suffixes is not None and path.suffix.lower() not in suffixes:
        raise wrong(name, f"end in one of {', '.join(suffixes)}", path)
    real = Path(os.path.realpath(path)) if path.is_symlink() else path  # a link to itself stays a link
    if real.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"`{name}` must be a file to write, but {path} is {'a folder' if path.is_dir() else 'none'}.")
    if not real.parent.is_dir():
        raise FileNotFoundError(f"`{name}` must lie in an existing folder, but {real.parent} does not exist.")
    check_can_be_made(real, name)
    return path


def read_lines(path: str | Path, name: str) -> list[str]:
    """Return a UTF-8 text file's lines, without Unicode's other line ends; errors call the file `name`."""
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "does not exist"
        raise FileNotFoundError(f"`{name}` must be a text file, but {path} {what}.")
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    except UnicodeDecodeError as error:
        reason = other_encoding(Path(path).read_bytes()) or error
        raise ValueError(f"`{name}` must be a text file in UTF-8, but {path} is not: {reason}.") from error


def bounded_lines(stream: Any, name: object, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yield the lines of a byte stream; a `ValueError` names a line before it fills the memory."""
    for number, line in enumerate(iter(lambda: stream.readline(longest + 1), b""), start=1):
        if len(line) > longest:  # a small compressed file may hold it
            raise ValueError(f"{name} must have lines of at most {longest:,} bytes, but line {number} has more.")
        yield line


def is_pipe(stream: Any) -> bool:
    """Return whether a byte stream may be slow: a pipe, a terminal or a device."""
    with suppress(OSError):  # the stream is no system file
        return os.name != "nt" and not S_ISREG(os.fstat(stream.fileno()).st_mode)
    return False


def ready_lines(stream: Any, name: object) -> Iterator[tuple[bytes, bool]]:
    """Yield a pipe's lines, each with whether more are available without waiting."""
    descriptor, rest, is_open = stream.fileno(), b"", True
    while is_open:
        is_open = bool(part := os.read(descriptor, 2**16))
        *whole, rest = (rest + part).split(b"\n")
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"{name} must have lines of at most {LONGEST_LINE:,} bytes, but one has more.")
        lines = [line + b"\n" for line in whole] + [rest] * (bool(rest) and not is_open)
        has_more = is_open and bool(select.select([descriptor], [], [], 0)[0])
        yield from ((line, has_more or place < len(lines)) for place, line in enumerate(lines, start=1))


def other_encoding(content: bytes) -> str | None:
    """Return a Korean spreadsheet's likely encoding, and how to convert it to UTF-8."""
    found = "UTF-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else None
    with suppress(UnicodeDecodeError):
        korean = len(re.findall("[가-힣]", content.decode("cp949")))
        if korean > 2 * len(re.findall("[^\0-\x7f]", content.decode("utf-8", "ignore"))) and korean > 1:
            found = "CP949"
    makes = f'`iconv -f {found} -t UTF-8 OLD > NEW`, or a spreadsheet\'s "CSV UTF-8", makes UTF-8'
    return None if found is None else f"it looks like {found}; {makes}"


def one_line(text: str) -> str:
    """Return a text with each line break replaced by a space."""
    return LINE_END.sub(" ", text)


def json_in_html(data: Any) -> str:
    """Write JSON for a script element that no text in it can end."""
    text = json_line(data, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)


def json_line(data: Any, **options: Any) -> str:
    """Write JSON on one line, also for `str.splitlines`."""
    text = json.dumps(data, **{"ensure_ascii": False} | options)
    return LINE_END.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def check_inside(folder: Path) -> None:
    """Raise a `ValueError` if a link, or a name in JSON, leads out of the model's folder and the Hub's cache."""
    roots = [folder.resolve(), *_blobs_of(folder)]
    for path in filter(Path.is_symlink, folder.rglob("*")):
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in roots):
            raise ValueError(f"{path} must be a file in the model's folder, but is a link to {target}: copy it.")
    for path in (folder / "config.json", *folder.glob("*.index.json")):
        try:
            read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            named = [("weight_map", name) for name in (read.get("weight_map") or {}).values()]
            named += [("transformers_weights", read.get("transformers_weights") or "")]
        except (ValueError, RecursionError, AttributeError):
            continue  # the code that loads the file names the fault
        for key, name in named:
            check_name_inside(name, f"`{key}` of {path}")


def is_plain_file(path: Path, folder: Path) -> bool:
    """Return whether a path in a model's folder is a file; the only valid links are into the Hub's cache."""
    real = Path(os.path.realpath(path))
    is_there = real == Path(os.path.realpath(folder)) / path.relative_to(folder)
    return real.is_file() and (is_there or real.parent in _blobs_of(folder))


def _blobs_of(folder: Path) -> list[Path]:
    """Return the folder with the files of a snapshot in the Hub's cache; none for another folder."""
    caches = [place.parent for place in folder.resolve().parents if place.name == "snapshots"]
    return [cache / "blobs" for cache in caches if cache.name.startswith("models--")]


def check_name_inside(name: Any, what: str) -> None:
    """Raise a `ValueError` that begins with `what` if a file's name leads out of its folder."""
    parts = PureWindowsPath(str(name))  # splits at all systems' separators
    if not isinstance(name, str) or parts.drive or parts.root or ".." in parts.parts:
        raise ValueError(f"{what} must name files in the model's folder, but names {name!r} instead.")


def flush(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a folder (not on Windows)."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def quoted(names: Iterable[Any], most: int = 8) -> str:
    """Quote the first names in their order, and append the number of others."""
    shown = [*map(shortened, names)]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def private(value: Any) -> Any:
    """Return a value fit for publication: a path outside the working directory keeps only its last part."""
    if isinstance(value, Mapping):
        return {name: private(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(private, value)]
    if not isinstance(value, str | Path):
        return value
    local, address = LOCAL_PATH.fullmatch(str(value)), ADDRESS.fullmatch(str(value))
    return local[1] if local else "".join(address.groups()) if address else value


def duration(seconds: float) -> str:
    """Write a time in hours and minutes, or in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def check_at_least(minimum: int, **numbers: float | None) -> None:
    """Raise a `ValueError` that names the first number below a minimum; `None` passes."""
    for name, number in numbers.items():
        if number is not None and not number >= minimum:
            raise wrong(name, f"be at least {minimum}", number)


def import_extra(name: str, extra: str) -> Any:
    """Import a package that one of our extras installs, or raise an `ImportError` that names the extra."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} must be installed: pip install 'heedful[{extra}]'") from error


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def first_line(error: BaseException) -> str:
    """Return an error's class (except `ValueError`) and first line, or two lines if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return text if text and type(error) is ValueError else f"{type(error).__name__}: {text}".removesuffix(": ")
