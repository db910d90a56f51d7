"""Options and arguments that commands share, their checks, output files, and quiet output."""

import gc
import gzip
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import wraps
from inspect import signature
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from typer import Argument, Option
from typer.core import TyperCommand
from typer.models import OptionInfo

from heedful.files import check_can_be_made, check_writable, json_line, written_whole

Device = Annotated[str | None, Option(help="Device: cpu, cuda, cuda:1 or mps. Default: a GPU if there is one.")]
Data = Annotated[list[str], Option("--data", help="Pairs: a file (or two), Hub dataset or builtin:SPLIT:COUNT.")]
Source = Annotated[str, Option(help="Source language or column; a,b joins two columns.")]
Target = Annotated[str, Option(help="Target language or column.")]
OwnSource = Annotated[str | None, Option("--source", help="Source language or column. Default: the model's.")]
OwnTarget = Annotated[str | None, Option("--target", help="Target language or column. Default: the model's.")]
BleuTokenizer = Annotated[str | None, Option(help="BLEU tokenizer. Default: the recipe's, else by language.")]
Lowercase = Annotated[bool, Option("--lowercase", help="Ignore case in all scores.")]
Ter = Annotated[bool | None, Option("--ter/--no-ter", help="Compute TER. Default: if it takes under two minutes.")]
References = Annotated[str | None, Option("--references", help="Column of --data with lists of correct targets.")]
Ignore = Annotated[str | None, Option("--ignore", help="Text not to score, as a regular expression: [0-9].")]
Beams = Annotated[int | None, Option("--num-beams", help="Beam width; 1 is greedy search. Default: the model's.")]
MaxNewTokens = Annotated[int | None, Option(help="Longest output in tokens. Default: the model's limit.")]
TargetLanguage = Annotated[str | None, Option("--to", help="Target language, for a multilingual model.")]
GlossaryFile = Annotated[Path | None, Option(help="Terms to use: term, tab, translation in each line.")]
TokenBudget = Annotated[int, Option(help="Batch size: padded source tokens times beams.")]
Decoders = Literal["auto", "native", "generate"]
Engine = Annotated[Decoders, Option(help="`native` is a fast decoder for CPUs; `auto` uses it if possible.")]
WeightType = Literal[
    "float32", "bfloat16", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16"
]
Precision = Annotated[Literal["float32", "int8"], Option(help="Weight type of the native decoder.")]
Model = Annotated[Path, Argument(metavar="MODEL", help="Folder of a saved model.")]
AnyModel = Annotated[str, Argument(metavar="MODEL", help="Folder of a saved model, or its id on the Hub.")]
Revision = Annotated[str | None, Option(help="Branch, tag or commit of a model on the Hub.")]
RecipeFile = Annotated[Path, Argument(metavar="RECIPE", help="A YAML file, or a name that `heedful recipes` lists.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]…", help="Recipe keys to set, such as seed=2.")]
AsJson = Annotated[bool, Option("--json", help="Print the results as JSON.")]
PairsFile = Annotated[Path, Option("-o", "--output", help="File for the pairs: .jsonl or .jsonl.gz.")]
TextFile = Annotated[Path | None, Option("-o", "--output", help="Output file. Default: standard output.")]
NewFolder = Annotated[Path, Argument(metavar="OUT", help="Folder to write; it must not exist.")]


TAKE_SENTENCES = ("translate", "attention", "align", "attention-numbers", "embeddings")


class Command(TyperCommand):
    """A command whose errors name all missing arguments, and explain -- before a sentence with a leading -."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, [*args])
        except Exception as error:
            # typer does not export the classes.
            if type(error).__name__ == "NoSuchOption" and self.name in TAKE_SENTENCES:
                error.message += ". Put a sentence that begins with - last, after --."  # type: ignore[attr-defined]
            if type(error).__name__ == "MissingParameter":
                given = self.make_parser(ctx).parse_args(args=[*args])[0]
                missing = [each for each in self.get_params(ctx) if each.required and not given.get(str(each.name))]
                names = [max(each.opts, key=len) if "-" in each.opts[0] else str(each.metavar) for each in missing]
                error.message = f"Missing: {', '.join(names)}." * (len(names) > 1)  # type: ignore[attr-defined]
            raise


@contextmanager
def quick_start(model: str | Path) -> Iterator[None]:
    """Pause garbage collection, and skip torchao unless weights are quantized. This saves a second."""
    config = Path(model) / "config.json"
    is_plain = config.is_file() and b"quantization_config" not in config.read_bytes()
    is_first = "transformers" not in sys.modules
    if is_plain and is_first and "torchao" not in sys.modules:
        sys.modules["torchao"] = None  # type: ignore[assignment]  # Python's mark for: not installed
    gc.disable()
    try:
        yield
    finally:
        if is_first:  # later collections skip these objects
            gc.freeze()
        gc.enable()


def load_translator(model: str | Path, device: str | None = None, revision: str | None = None, **settings: Any) -> Any:
    """Load a `Translator` quickly and quietly."""
    with quick_start(model):
        from heedful.decoding.translation import Translator

        quieten()
        return Translator.from_pretrained(model, device, revision, **settings)


def check_reverse(translator: Any, language: str | None, option: str) -> None:
    """Check the value of `option`, the target language of a command's model of the reverse direction."""
    try:
        translator.tokenizers.head(language)
    except ValueError as error:
        raise ValueError(str(error).replace("target_language", option)) from None


CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # except tabs and line ends


def visible(text: str) -> str:
    """Escape control characters, as JSON does, because a terminal would obey them."""
    return CONTROL_CHARACTER.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TerminalOutput:
    """Standard output at a terminal, with visible control characters."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        self.stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# Loggers with warnings about internals, such as a font cache.
TALKATIVE = ("torchao", "torch.utils._pytree", "matplotlib")
# Parameters in functions' errors, with their names in commands.
OTHER_NAMES = {
    "location": ("source", "texts", "data", "pairs"),
    "num_return_sequences": ("n_best",),
    "path": ("output",),
    "target_language": ("to",),
}


def typed_names(command: Callable[..., Any]) -> dict[str, str]:
    """Return the option or argument for each parameter that an error may name."""
    typed = {}
    for name, parameter in signature(command).parameters.items():
        for info in getattr(parameter.annotation, "__metadata__", ()):
            argument = (getattr(info, "metavar", None) or name.upper()).strip("[]…")
            given = [each for each in (info.default, *(info.param_decls or ())) if str(each)[:2] == "--"]
            option = given[0].partition("/")[0] if given else "--" + name.replace("_", "-")
            typed[name] = option if isinstance(info, OptionInfo) else argument
    others = {other: typed[name] for other, names in OTHER_NAMES.items() for name in names if name in typed}
    return others | typed


def safe_at_terminals(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that writes through `TerminalOutput` and whose errors name options."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        output = redirect_stdout(TerminalOutput(sys.stdout)) if sys.stdout.isatty() else nullcontext()
        try:
            with output:
                command(*args, **kwargs)
        except (ImportError, ValueError, OSError) as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                typed = typed_names(command)
                error.args = (re.sub(r"`(\w+)`", lambda found: f"`{typed.get(found[1], found[1])}`", error.args[0]),)
            raise

    return run


STANDARD_OUTPUT = (None, Path("-"), Path("/dev/stdout"))


def is_stream(path: Path | None) -> bool:
    """Return whether the output is a stream: standard output, a pipe or a device."""
    return path is None or path in STANDARD_OUTPUT or (path.exists() and not (path.is_file() or path.is_dir()))


def check_input(path: Path | None, option: str) -> None:
    """Raise an error for the option unless its path is a file, a pipe, or - for standard input."""
    if path is not None and path != Path("-") and (path.is_dir() or not path.exists()):
        raise FileNotFoundError(f"`{option}` must be a text file, but {path} is not a file.")


def check_output(path: Path | None, option: str, inputs: Iterable[str | Path] = ()) -> None:
    """Raise an error for the option unless its file can be written and is not an input."""
    if path is not None and not is_stream(path):
        check_writable(path, name=option)
        if path.resolve() in {Path(given).resolve() for given in inputs}:
            raise ValueError(f"`{option}` must not be an input file, but {path} is one.")


def check_pairs_file(output: Path, inputs: Iterable[str | Path] = ()) -> None:
    """Raise an error unless pairs can be written to the file `--output`."""
    if is_stream(output):
        return
    check_can_be_made(output, "--output")
    if output.parent.exists():
        check_output(output, "--output", inputs)
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"`--output` must end in .jsonl or .jsonl.gz, but is {output} instead.")


def check_apart(**given: Any) -> None:
    """Raise a `ValueError` if more than one of these options is given."""
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, False)]
    if len(names) > 1:
        raise ValueError(f"`{names[0]}` must not come with {names[1]}.")


def read_pairs(data: list[str], source: str, target: str, **settings: Any) -> Any:
    """Read the command line's pairs, from one place or two text files."""
    from heedful.data.sources import read_pairs as read

    if len(data) == 1 and source.isdigit() and target.isdigit():
        from heedful.proposals.first_recipe import find_text_column

        one, other = (find_text_column(data[0], number, "--source") for number in (source, target))
        if (one, other) != (source, target):
            report(f"{data[0]}: columns {source} and {target} are {one!r} and {other!r} in the first line")
        source, target = one, other
    return read(data[0] if len(data) == 1 else data, source, target, **settings)


def texts_of(path: Path | None, column: str | None, option: str) -> Iterator[str] | None:
    """Return the texts in a table's column, or `None` for plain text."""
    from heedful.data.sources import read_pairs as read
    from heedful.data.tables import delimiters_of, kind_of_file

    is_plain = path is None or (column is None and kind_of_file(path) in (None, "txt"))
    with suppress(ValueError):  # bytes that are not UTF-8 are removed later
        is_text = is_plain and path is not None and kind_of_file(path) and path.is_file()
        is_plain = delimiters_of(str(path), ("1", "1"))[0] != "\t" if is_text else is_plain
    if path is None or is_plain:
        return None
    from heedful.proposals.first_recipe import find_text_column

    column = find_text_column(str(path), column, option)
    return (f"{pair['source']}\n" for pair in read(str(path), column, column, streaming=True))


def report(message: str) -> None:
    """Write a message to standard error, above its progress bars."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    write = print if bars is None else bars.write
    write(visible(message), file=sys.stderr)


class VisibleHandler(logging.Handler):
    """Logs messages with visible control characters."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record's text."""
        report(self.format(record))


def set_up_output(level: str) -> None:
    """Show this package's log from a level on."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an encoding error must not lose hours of results
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(handlers=[VisibleHandler()], format="%(message)s")
    logging.getLogger("heedful").setLevel(level)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings without their source line."""

    def report_warning(message: Warning | str, *_: Any, **__: Any) -> str:
        report(f"warning: {message}")
        return ""  # already written

    written, warnings.formatwarning = warnings.formatwarning, report_warning
    try:
        yield
    finally:
        warnings.formatwarning = written


def quieten() -> None:
    """Silence transformers' progress bars and warnings about internals."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def writing(path: Path | None) -> Iterator[TextIO]:
    """Yield standard output, or a file that appears only when complete (.gz is compressed)."""
    if path in STANDARD_OUTPUT:
        if not writes_unicode():
            found = f"Standard output is {sys.stdout.encoding}, so missing characters are written as numbers"
            warnings.warn(f"{found}. For UTF-8, pass `-o FILE` or set PYTHONIOENCODING=utf-8.", stacklevel=2)
        yield sys.stdout
        return
    new = [folder for folder in path.absolute().parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with nullcontext(path) if is_stream(path) else written_whole(path) as place, place.open("ab") as file:
            # Without name and time, the same text gives the same file.
            packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else file
            with packed, TextIOWrapper(packed, encoding="utf-8", newline="\n") as stream:
                yield stream
    except BaseException:
        for folder in new:
            with suppress(OSError):  # another file may be there now
                folder.rmdir()
        raise


def progress_bar(source: Path | None = None, total: int | None = None, is_shown: bool = True) -> Any:
    """Return a progress bar for a file's lines or `total`, shown if standard error is a terminal."""
    from tqdm import tqdm

    if source is not None and source.is_file() and source.suffix != ".gz" and sys.stderr.isatty():
        with source.open("rb") as stream:
            total = sum(1 for _ in stream)
    return tqdm(total=total, unit=" lines", leave=False, disable=None if is_shown else True)


def print_result(values: dict[str, Any], text: object, as_json: bool) -> None:
    """Print a result as JSON or as text."""
    print(json.dumps(values, indent=2, ensure_ascii=not writes_unicode(), default=str) if as_json else text)


def writes_unicode() -> bool:
    """Return whether standard output can write all characters."""
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def write_pairs(output: Path, pairs: Iterable[dict[str, Any]], making: Any = None, given: str = "") -> None:
    """Write pairs (from `making`, if given), and print their number and the number left out."""
    count = 0
    with progress_bar() as bar, writing(output) as stream:
        for pair in pairs:
            bar.update()
            count += 1
            print(json_line(pair), file=stream)
        if not count and making is not None:
            raise ValueError(f"{given} must hold sentences to translate, but all {making.left_out} were left out.")
    left_out = f"; {making.left_out:,} lines left out: empty, cut off, or repetitive" if making else ""
    print(f"{count:,} pairs in {output}{left_out}", file=sys.stderr)
