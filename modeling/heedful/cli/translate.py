"""`heedful translate`: translate a file, standard input, or texts on the command line."""

import gzip
import os
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice, tee
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from heedful.cli import options
from heedful.cli.evaluate import documents_of, recipe_in
from heedful.files import bounded_lines, is_pipe, json_line, one_line, other_encoding, ready_lines

FORMATS = {"score": ".4f", "confidence": ".1f"}
CHUNK = 1024  # lines per step of the progress bar
MOST = 4096  # lines translated together


def translate(
    model: options.AnyModel,
    text: Annotated[list[str] | None, Argument(metavar="[TEXT]…", help="Texts; put -- before a leading -.")] = None,
    source: Annotated[Path | None, Option("--input", help="Text file or table. Default: standard input.")] = None,
    column: Annotated[str | None, Option("--source", help="Column or language, if --input is a table.")] = None,
    output: options.TextFile = None,
    split: Annotated[bool, Option("--split", help="Split lines that are longer than those in training.")] = False,
    markup: Annotated[str | None, Option(help="Markup to keep: html, xml, placeholders, or two with a comma.")] = None,
    paragraphs: Annotated[bool, Option("--paragraphs", help="Split lines into sentences; keep markup.")] = False,
    document: Annotated[bool, Option("--document", help="Give the model the lines before each.")] = False,
    num_beams: options.Beams = None,
    n_best: Annotated[int, Option("--n-best", help="Number of outputs per text, best first.")] = 1,
    scores: Annotated[bool, Option("--scores", help="Print each score before its output.")] = False,
    confidence: Annotated[bool, Option("--confidence", help="Print the expected quality in percent.")] = False,
    check: Annotated[bool, Option("--check", help="Report repeated, cut-off, short and incomplete outputs.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON lines with text, score and confidence.")] = False,
    max_new_tokens: options.MaxNewTokens = None,
    to: options.TargetLanguage = None,
    glossary: options.GlossaryFile = None,
    token_budget: options.TokenBudget = 8192,
    engine: options.Engine = "auto",
    precision: options.Precision = "float32",
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Translate texts, a file, or standard input line by line. The order is kept."""
    if text and source is not None:
        raise ValueError(f"`--input` must be left out if TEXT is given, but is {source} instead.")
    options.check_input(source, "--input")
    if column is not None and source is None:
        raise ValueError(f"`--source` must come with a table as `--input`, but is {column!r} without one.")
    for name in filter(os.path.isfile, text or ()):
        warnings.warn(f"{name} is translated as a text. To translate the file, use `--input {name}`.", stacklevel=2)
    options.check_output(output, "--output", filter(None, [source]))
    table = options.texts_of(source, column, "--source")
    options.check_apart(json=as_json, scores=scores)
    options.check_apart(confidence=confidence, n_best=n_best > 1)
    options.check_apart(confidence=confidence, glossary=glossary)
    options.check_apart(check=check, n_best=n_best > 1)
    options.check_apart(document=document, confidence=confidence)
    own: dict[str, Any] = {"engine": engine, "precision": precision, "glossary": glossary}
    translator = options.load_translator(model, device, revision, **own)
    from heedful.decoding.confidence import Confidence  # only now: the quick start imports little
    from heedful.evaluation.faults import described, find_faults

    context = documents_of(recipe_in(model, revision)).sentences - 1 if document else 0
    config = translator.model.generation_config
    of_table: Any = table and iter(lambda: [*islice(table, MOST)], [])
    lines: Any = iter([text]) if text else of_table or lines_of(source)
    lines, sources = tee(lines)
    if confidence:
        likely = Confidence.from_pretrained(model, revision)
        likely.check(config, to, num_beams=num_beams)
    counts = Counter[str]()
    settings: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": n_best, "target_language": to}
    settings |= {"max_new_tokens": max_new_tokens, "token_budget": token_budget}
    keeps_ends = paragraphs or markup is not None
    settings |= {"split": split or None, "paragraphs": paragraphs, "markup": markup}
    settings |= {"context": context, "keep_going": not text}
    is_dialogue = not text and source is None and sys.stdin.isatty()
    is_shown = not (text or is_dialogue) and (output is not None or not sys.stdout.isatty())
    with options.progress_bar(source, is_shown=is_shown) as bar, options.writing(output) as stream:
        if is_dialogue:
            print("Type sentences, one per line. Ctrl-D ends.", file=sys.stderr)
        found = translator.translate_lines(lines, chunk_size=None, progress=bar.update, **settings)
        texts = (str(each).removeprefix("\ufeff") for each in chain.from_iterable(sources))
        pairs = ((given, each) for row, given in zip(found, texts, strict=True) for each in row)
        for number, (given, translation) in enumerate(pairs, start=1):
            values = {"score": translation.score} if scores or as_json else {}
            if check:
                faults = find_faults(given, translation.text, config, translation.finished, translator.glossary)
                counts.update([*faults])
                if faults:
                    options.report(f"line {number}: {described(faults)}")
                values |= {"faults": faults} if as_json else {}
            if confidence:  # a text without translation has none
                (ids,) = translator.tokenizers.encode_source([given], to)
                rated = likely.of_translation(translation, ids) if translation.token_ids else None
                values["confidence"] = None if rated is None else round(rated, 1)
            plain = translation.text.rstrip("\r\n") if keeps_ends else translation.text
            end = translation.text[len(plain) :] if keeps_ends and not (text or as_json) and n_best == 1 else "\n"
            if as_json:
                line = json_line({"text": plain, **values}, ensure_ascii=not (output or options.writes_unicode()))
            else:
                none = "not calibrated" if translation.token_ids else ""
                columns = (none if value is None else format(value, FORMATS[name]) for name, value in values.items())
                line = "\t".join([*columns, plain])
            print(one_line(line), file=stream, flush=options.is_stream(output), end=end)
    if check:
        options.report(f"faults: {described(counts)}")


def lines_of(path: Path | None, left_out: Literal["byte", "line"] = "byte") -> Iterator[list[str]]:
    """Yield the lines of a file or standard input in lists, as soon as they arrive, without broken UTF-8."""
    if path is None or str(path) in ("-", "/dev/stdin"):
        return _lists_of(nullcontext(sys.stdin.buffer), "Standard input", left_out)
    return _lists_of(gzip.open(path) if path.suffix == ".gz" else path.open("rb"), path, left_out)


def _lists_of(opened: Any, path: str | Path, left_out: str) -> Iterator[list[str]]:
    broken = number = 0
    lines: list[str] = []
    try:
        with opened as file:
            is_live = not isinstance(file, gzip.GzipFile) and is_pipe(file)
            of_file = ((line, not file.isatty()) for line in bounded_lines(file, path))
            given = ready_lines(file, path) if is_live else of_file
            for number, (line, has_more) in enumerate(given, start=1):
                try:
                    lines.append(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    if found := other_encoding(line):
                        raise ValueError(f"{path} must be UTF-8, but line {number} is not: {found}.") from None
                    broken += 1
                    if broken <= 3:
                        found = f"byte {line[error.start]:#04x} at position {error.start}: the {left_out} is left out"
                        warnings.warn(f"Line {number} must be UTF-8, but has {found}.", stacklevel=2)
                    lines.append(line.decode("utf-8", errors="ignore") if left_out == "byte" else "\n")
                if len(lines) == MOST or not has_more:
                    yield lines
                    lines = []
            yield lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be a complete gzip file, but breaks after line {number}: {error}.") from error
    if broken > 3:
        warnings.warn(f"{broken - 3} more lines are not UTF-8.", stacklevel=2)
