"""Read sentence pairs from files, the Hub or a built-in corpus, as rows {"source": …, "target": …}."""

import glob
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from itertools import chain, islice, pairwise, zip_longest
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from heedful.data import tables
from heedful.data.data_recipe import DocumentRules, MixturePart
from heedful.data.tables import ANY_COLUMNS, Columns, advice_on_tables, kind_of_file, numbered_lines, parts_of
from heedful.files import quoted
from heedful.messages_heed import shortened, wrong

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Record = tuple[str, int, Mapping[str, Any]]  # file, row number from 1, and columns
Reader = partial[Iterator[Record]]
Item = TypeVar("Item")

ROWS_PER_CHUNK = 10_000
LARGEST_JSON = 2**31  # bytes; an array may be one line
BUILTIN_LOCATION = re.compile(r"builtin:(?P<split>\w+):(?P<count>[1-9][0-9]*)")
KINDS = "(.jsonl, .json, .csv, .tsv or .txt, each also with .gz, or .parquet)"
# Words in file names that name a split, as in `datasets`.
SPLITS = {"train": "train training", "validation": "validation valid dev val", "test": "test testing eval evaluation"}
# Formats other than plain text: their marks in the first line or one line in five, and a converter.
MARKUP = {
    "WMT's SGML": (r"<(srcset|refset|tstset|set|doc|seg)\b", r"`sed -n 's/.*<seg[^>]*> *\(.*\)<\/seg>.*/\1/p'`"),
    "XLIFF": (r"<(xliff|trans-unit|unit|segment)\b", "`xliff2po` and `po2csv` of translate-toolkit"),
    "TMX": (r"<(tmx|tuv?)\b", "`tmx2po` and `po2csv` of translate-toolkit"),
    "one with IWSLT's tags": ("<(url|talkid|keywords|speaker|title|description)>", "`grep -v '^<'`"),
    "XML, HTML or LaTeX": (
        r"<[?!][\w-]|</?(?!(?:a|b|i|u|s|em|strong|span|font|br)\b)([\w:.-]+)( [^<>]*=[^<>]*)?/?>($|.*</\1>$)"
        r"|\\(begin|documentclass|usepackage)\b",
        "the package beautifulsoup4, or pandoc",
    ),
    "subtitles": (r"[\d:]+[.,]\d+( --> |,\d+:)|WEBVTT|Dialogue: \d|\{\d+\}\{\d+\}|\[\d+:\d+", "the package pysubs2"),
    "gettext's PO": (r"msg(id|str)\b", "`po2csv` of translate-toolkit"),
    "M2": (r"A -?\d+ -?\d+\|\|\|", "`sed -n 's/^S //p'`, which takes the sources"),
}
# A key in .properties, .strings, YAML, PHP or JSON, or an id before a tab.
KEY = re.compile(r"""[^\t]+\t|\s*["'$A-Za-z][^=]*=|\s+[\w.-]+:\s|\w+[._-][\w.-]+:\s|[\s{]*"[^"]*"\s*:""")
HUB_LOCATION = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[^:]*)(:(?P<split>[^:]+))?)?")


def read_pairs(
    location: str | Sequence[str],
    source: str,
    target: str,
    *,
    split: str = "train",
    streaming: bool = False,
    references: str | None = None,
    documents: DocumentRules | None = None,
) -> "Dataset | IterableDataset":
    """Read a parallel corpus as rows with the columns `source` and `target`, in NFC.

    `location` is "builtin:train:100000", a file, a pattern such as "data/part-*.jsonl", [source file, target file], a
    folder with a file for each split, or a Hub dataset: "name", "name:config" or "name:config:split". Quotation marks
    in .tsv and .txt are plain text, unless pandas, Excel or csv wrote the file. `source` and `target` are languages in
    a `translation` column, or columns by name, or by number if the file has no header. "lemma,features" joins the
    texts of two columns with a space, and `group` is the source's first text. `references` is a column with the list
    of all right texts, the target first. With `documents`, each pair has a `place`, consecutive in a document; blank
    pairs are left out, and separate documents. A stream is read and checked during iteration.
    """
    import pyarrow as pa
    from datasets import Dataset, Features, IterableDataset, List, Value

    features = Features({"source": Value("string"), "target": Value("string")})
    if references is not None:
        features["references"] = List(Value("string"))
    columns: Columns = (source, target) if isinstance(location, str) else ("source", "target")
    if "," in columns[0]:
        features["group"] = Value("string")
    if documents:
        features["place"], columns = Value("int64"), (*columns, *filter(None, [documents.column]))
    read = partial(_checked_pairs, row_reader(location, columns, split, streaming), columns, references, streaming)
    if streaming:
        return cast("IterableDataset", IterableDataset.from_generator(read, features=features))
    pairs = (pair for pair in read() if not documents or f"{pair['source']}{pair['target']}".strip())
    tables = [features.arrow_schema.empty_table()]
    while chunk := list(islice(pairs, ROWS_PER_CHUNK)):
        tables.append(pa.Table.from_pylist(chunk, schema=features.arrow_schema))
    return Dataset(pa.concat_tables(tables))


def sample(rows: Sequence[Item], most: int | None, is_drawn: bool = True) -> list[Item]:
    """Return at most `most` rows in order, drawn with a fixed seed because a file may be sorted, or the first ones."""
    if most is None or len(rows) <= most or not is_drawn:
        return list(islice(rows, most))
    return [rows[number] for number in sorted(Random(0).sample(range(len(rows)), most))]


def read_parts(parts: Mapping[str, MixturePart], **options: Any) -> "Dataset | IterableDataset":
    """Read all parts in order; if there are several, each pair gets its part number as `part`.

    In a stream the parts take turns, pair by pair.
    """
    import pyarrow as pa
    from datasets import Dataset, Features, IterableDataset, Value

    read: list[Any] = []
    for key, part in parts.items():
        with reading(key):
            read.append(read_pairs(part.train, str(part.source), str(part.target), **options))
    if len(read) == 1:
        return cast("Dataset | IterableDataset", read[0])
    if isinstance(read[0], IterableDataset):
        features = Features({"source": Value("string"), "target": Value("string"), "part": Value("int32")})
        return cast("IterableDataset", IterableDataset.from_generator(partial(_in_turns, read), features=features))
    columns = [name for name in ("source", "target", "place") if name in read[0].column_names]
    tables = [pairs.data.table.select(columns) for pairs in read]
    numbers = [pa.array([number] * len(table), pa.int32()) for number, table in enumerate(tables)]
    numbered = (table.append_column("part", part) for table, part in zip(tables, numbers, strict=True))
    return Dataset(pa.concat_tables(numbered))


def _in_turns(streams: Iterable[Iterable[Mapping[str, str]]]) -> Iterator[dict[str, Any]]:
    for turn in zip_longest(*streams):
        for number, pair in enumerate(turn):
            if pair is not None:
                yield {"source": pair["source"], "target": pair["target"], "part": number}


def numbers_of_parts(pairs: "Dataset") -> np.ndarray:
    """Return each pair's part, `(pairs,)`."""
    return np.array(pairs["part"][:], np.int64) if "part" in pairs.column_names else np.zeros(len(pairs), np.int64)


def references_of(pairs: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return each pair's `references`, or only its target."""
    return [pair.get("references") or [pair["target"]] for pair in pairs]


def sources_of(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sources, those that begin a document after a line break."""
    places = pairwise([0, *(pair.get("place", 0) for pair in pairs)])
    return ["\n" * (place > last + 1) + pair["source"] for (last, place), pair in zip(places, pairs, strict=True)]


def first_rows(location: str | Sequence[str], count: int, split: str = "train") -> list[Mapping[str, Any]]:
    """Return a split's first rows by language or column; all lines of a table, by column number."""
    rows = row_reader(location, ANY_COLUMNS, split, streaming=True)()
    first = next(rows)
    read = chain([first], (row for row in rows if row[1:] != first[1:]))  # each file may repeat the header
    found = [(cells.get("translation"), cells) for _, _, cells in islice(read, count)]
    return [translation if isinstance(translation, Mapping) else cells for translation, cells in found]


def table_files(location: object, split: str = "train") -> list[str]:
    """Return the tables in a corpus, which is one file or a folder."""
    if not isinstance(location, str) or not Path(location).expanduser().exists():
        return []
    reader = row_reader(location, ANY_COLUMNS, split, streaming=True)
    files = map(str, reader.args[0]) if reader.func is _file_rows else ()
    return [file for file in files if kind_of_file(file) in tables.TABLES]


def texts_of(location: str | Sequence[str], split: str = "train") -> Iterator[str]:
    """Yield all texts in a split's rows."""
    for row in first_rows(location, sys.maxsize, split):
        yield from (text for text in row.values() if isinstance(text, str))


@contextmanager
def reading(parameter: str) -> Iterator[None]:
    """Name another parameter instead of `location` in errors."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise type(error)(str(error).replace("`location`", f"`{parameter}`")) from error


def row_reader(location: str | Sequence[str], columns: Columns, split: str, streaming: bool) -> Reader:
    """Return a reader for a location's rows; raise all errors that need no row, also for streams."""
    if isinstance(location, str) and location.startswith("builtin:"):
        return _builtin(location, columns)
    for name in [location] if isinstance(location, str) else location:
        if re.match(r"[A-Za-z][A-Za-z0-9+]*://", name):
            must = "be a file on this machine or a dataset's name on the Hub"
            raise wrong("location", must, f"the URL {name}", advice="download it first")
    if not isinstance(location, str):
        if len(location) != 2:
            raise wrong("location", "be one string or two text files [source, target]", repr(location))
        texts = [*map(_text_file, location)]
        _check_are_plain(texts)
        return partial(_aligned_lines, *texts)
    folder = Path(location).expanduser()
    if folder.is_dir():
        return _folder(folder, columns, split)
    if files := _local_files(location):
        return partial(_file_rows, files, columns)
    return partial(_numbered, location, iter, _hub_dataset(location, columns, split, streaming))


def _checked_pairs(rows: Reader, names: Columns, references: str | None, streaming: bool) -> Iterator[dict[str, Any]]:
    """Yield pairs. A missing text is an error: at once in a stream, else after the last row, with a count."""
    found: set[str] = set()
    columns: dict[str, None] = {}  # in rows that lack a name
    empty: dict[str, list[tuple[str, int]]] = {}
    position, last = 0, list[list[str]]()
    for file, number, cells in rows():
        sides: list[list[str]] = [[] for _ in names]
        parts = [(side, part) for side, name in zip(sides, names, strict=True) for part in parts_of(name, cells)]
        for side, part in parts:
            translation = cells.get("translation")
            column = translation if isinstance(translation, Mapping) and part not in cells else cells
            text = column.get(part)
            if part in column:
                found.add(part)
            if isinstance(text, str) or (text is not None and part in names[2:]):
                side.append(unicodedata.normalize("NFC", str(text)))
            elif text is None:
                empty.setdefault(part, []).append((file, number))
                columns.update(dict.fromkeys(column))
            else:
                raise ValueError(f"{part!r} must be text, but is {shortened(text)} instead in row {number} of {file}.")
        if sum(map(len, sides)) == len(parts):
            pair: dict[str, Any] = dict(zip(("source", "target"), map(" ".join, sides), strict=False))
            if references is not None:
                pair["references"] = _accepted(references, pair["target"], file, number, cells)
            if not streaming:  # left out without `documents`
                position, last = position + 1 + (sides[2:] != last), sides[2:]
                pair["place"] = position
            yield pair | ({"group": sides[0][0]} if "," in names[0] else {})
        elif streaming:
            break
    for name, places in empty.items():
        (file, number), *others = places
        if name in found:
            place = f"row {number} of {file} instead" + (f", and in {len(others)} more" if others else "")
            raise ValueError(f"{name!r} must be text in every row, but is None in {place}.")
        near = get_close_matches(name, map(str, columns), n=1)
        has = f"{quoted(columns)} instead" + (f" (did you mean {near[0]!r}?)." if near else ".")
        raise ValueError(f"{file} must have the language or column {name!r}, but has {has}{advice_on_tables(file)}")


def _accepted(name: str, target: str, file: str, number: int, cells: Mapping[str, Any]) -> list[str]:
    """Return all right texts in a row: the target, then the others in the column `name`."""
    texts = cells.get(name)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        found = f"{shortened(texts) if name in cells else 'missing'} instead in row {number} of {file}"
        raise ValueError(f"`{name}` must be a list of texts, but is {found}.")
    return list(dict.fromkeys([target, *(unicodedata.normalize("NFC", text) for text in texts)]))


@dataclass(frozen=True)
class Corpus:
    """A generated corpus, named by an entry point of `heedful.corpora`."""

    draw: Callable[[str, int], Iterable[Mapping[str, str]]]  # a split's first pairs, distinct and always the same
    splits: Sequence[str]
    languages: tuple[str, str]  # column names


def builtin_corpus() -> Corpus:
    """Return the laboratory's built-in corpus."""
    for corpus in entry_points(group="heedful.corpora", name="builtin"):
        return cast("Corpus", corpus.load())
    raise ImportError("The built-in corpus must be named by an entry point of heedful.corpora: install heedful again.")


def _builtin(location: str, columns: Columns) -> Reader:
    corpus, match = builtin_corpus(), BUILTIN_LOCATION.fullmatch(location)
    if match is None or match["split"] not in corpus.splits:
        must = f"be builtin:SPLIT:COUNT with a split of {', '.join(corpus.splits)} and a count of at least 1"
        raise wrong("location", must, repr(location))
    for field, language in zip(("source", "target"), columns, strict=False):
        if language not in corpus.languages and columns != ANY_COLUMNS:
            raise wrong(field, f"be {' or '.join(corpus.languages)} for the built-in corpus", repr(language))
    return partial(_numbered, location, corpus.draw, match["split"], int(match["count"]))


def _numbered(location: str, read: Callable[..., Iterable[Mapping[str, Any]]], *arguments: object) -> Iterator[Record]:
    number = 0
    for number, row in enumerate(read(*arguments), start=1):
        yield location, number, row
    if not number:
        raise ValueError(f"{location} must hold at least one row, but is empty instead.")


def _local_files(location: str) -> list[Path]:
    """Return a location's files in order, or none for a name on the Hub."""
    path = Path(location).expanduser()
    if path.is_file():
        files = [path]
    elif glob.has_magic(location):
        root = Path(path.anchor)
        found = root.glob(str(path.relative_to(root)))
        files = sorted(file for file in found if file.is_file() and not _is_hidden(file, path))
        if not files:
            raise FileNotFoundError(f"`location` must match at least one file, but {location} matches none.")
    elif kind_of_file(path) or location.startswith(("/", ".", "~")) or not HUB_LOCATION.fullmatch(location):
        raise FileNotFoundError(f"`location` must be a file that exists, but {location} does not.")
    else:
        return []
    for file in files:
        if not kind_of_file(file):
            advice = "save the table as CSV UTF-8" if file.suffix.lower() in (".xlsx", ".xls", ".ods") else ""
            with suppress(ValueError):  # for binary files
                advice = advice or _markup_of(file)
            raise wrong("location", f"be a file of a known kind {KINDS}", file, advice=advice)
    return files


def _is_hidden(file: Path, given: Path) -> bool:
    """Return whether `datasets` would ignore a file, such as a notebook checkpoint."""
    return any(part.startswith((".", "__", "~$")) for part in {*file.parts} - {*given.parts})


def _folder(folder: Path, columns: Columns, split: str) -> Reader:
    """Return a reader for a split in a folder, which `datasets` saved or which has a file for each split."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict) and split not in saved:
            raise ValueError(f"{folder} must have the split {split}, but has {', '.join(saved)} instead.")
        rows = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        return partial(_numbered, str(folder), iter, rows)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and kind_of_file(path))
    files = [path for path in files if not path.name.startswith("dataset_info") and not _is_hidden(path, folder)]
    # If the recipe is in its data's folder, so are its runs.
    runs = {path.parent for path in folder.rglob("log.jsonl") if path.with_name("recipe.yaml").is_file()} - {folder}
    files = [path for path in files if not runs & {*path.parents}]
    words = {path: {*re.findall(r"[a-z]+", path.relative_to(folder).as_posix().lower())} for path in files}
    splits = {path: next((name for name in SPLITS if {*SPLITS[name].split()} & words[path]), None) for path in files}
    chosen = [path for path in files if splits[path] == split or (split not in SPLITS and path.name.startswith(split))]
    if not chosen and split == "train" and not any(splits.values()):
        chosen = files  # like `datasets`
    if not chosen:
        found = ", ".join(path.relative_to(folder).as_posix() for path in files[:5]) or "none"
        must = f"be a folder with a file {KINDS} whose name contains {split}"
        raise wrong("location", must, found, verb=f"{folder} has")
    return partial(_file_rows, chosen, columns)


def _text_file(location: str) -> str:
    path = Path(location).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"`location` must be two text files that exist, but {location} does not.")
    if kind_of_file(path) not in (None, "txt"):
        advice = "`cut -f2` writes one column as plain text"
        raise wrong("location", "be files of plain text", location, verb="has", advice=advice)
    return str(path)


def _markup_of(file: str | Path) -> str:
    """Return a file's format, found in its first lines, and a way to convert it; "" for plain text."""
    head = [line.strip() for _, line in islice(numbered_lines(str(file)), 100) if line.strip()]
    for what, (mark, way) in MARKUP.items():
        marked = [bool(re.match(mark, line)) for line in head]
        if sum(marked) > (1 if any(marked[:1]) else max(1, 0.2 * len(marked))):
            return f"{file} looks like {what}. Convert it to text with {way}"
    return ""


def _check_are_plain(files: Sequence[str]) -> None:
    """Raise a `ValueError` if the first lines of two files are not plain text."""
    if found := _markup_of(files[0]) or _markup_of(files[1]):
        raise ValueError(f"`location` must be files of plain text, but {found}.")
    heads = [[line for _, line in islice(numbered_lines(file), 100)] for file in files]
    keys = ((KEY.match(line), KEY.match(other)) for line, other in zip(*heads, strict=False) if line != other)
    alike = [key[0] for key, other in keys if key and other and key[0] == other[0]]
    if len(alike) > 0.5 * max(map(len, heads)):
        found = f"each has the keys {quoted(alike, 3)}. Make one table: use `prop2po` or `json2po` and `po2csv`"
        raise ValueError(f"`location` must be files of plain text, but {found} of translate-toolkit.")


def _aligned_lines(source_file: str, target_file: str) -> Iterator[Record]:
    counts = [0, 0]
    for lines in zip_longest(numbered_lines(source_file), numbered_lines(target_file)):
        for side, line in enumerate(lines):
            counts[side] += line is not None
        if counts[0] == counts[1]:
            source, target = (tables.without_end(line[1]) for line in lines if line)
            yield source_file, counts[0], {"source": source, "target": target}
    if not any(counts):
        raise ValueError(f"{source_file} must hold at least one line, but is empty instead.")
    if counts[0] != counts[1]:
        shorter = (source_file, target_file)[counts[0] > counts[1]]
        found = f"{counts[0]} and {counts[1]} instead: {shorter} ends at line {min(counts)}"
        raise ValueError(f"{source_file} and {target_file} must have the same number of lines, but have {found}.")


def _file_rows(files: Sequence[Path], columns: Columns) -> Iterator[Record]:
    readers = {"jsonl": _json_rows, "json": _json_rows, "parquet": _parquet_rows}
    for file in map(str, files):
        read = readers.get(str(kind_of_file(file)))
        try:
            rows = read(file) if read else (cells for _, cells in tables.table_rows(file, columns))
            yield from _numbered(file, iter, rows)
        except MemoryError as error:
            raise MemoryError(f"{file} has a line, a cell or a block that does not fit in memory. {error}") from error


def _json_rows(file: str) -> Iterator[Mapping[str, Any]]:
    """Yield rows from JSON Lines, or from an array in a .json file, like `datasets`."""
    what, place, lines = "JSON objects", "line", ((number, line.strip()) for number, line in numbered_lines(file))
    rows: Iterable[Any] = ((number, _parsed_json(file, "JSON", number, line)) for number, line in lines if line)
    is_json = kind_of_file(file) == "json"
    texts = (line for _, line in numbered_lines(file, LARGEST_JSON) if line.strip())
    if is_json and next(texts, "").lstrip().startswith("["):
        what, place = "an array of JSON objects", "entry"
        text = "".join(line for _, line in numbered_lines(file, LARGEST_JSON))
        rows = enumerate(_parsed_json(file, "a JSON array", None, text), start=1)
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{file} must hold {what}, but {place} {number} is another value.")
        yield row


def _parsed_json(file: str, what: str, line: int | None, text: str) -> Any:
    """Parse a line or a file; errors give the line if it is known."""
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # raises for half a surrogate pair
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
        line = line or getattr(error, "lineno", None)
        place = "is broken" if line is None else f"line {line} is broken"
        raise ValueError(f"{file} must hold {what}, but {place}: {reason}.") from error
    return value


def _parquet_rows(file: str) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=ROWS_PER_CHUNK):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
            raise
        raise ValueError(f"{file} must be a whole Parquet file, but cannot be read: {error}.") from error


def _hub_dataset(location: str, columns: Columns, split: str, streaming: bool) -> Iterable[Mapping[str, Any]]:
    import datasets

    match = HUB_LOCATION.fullmatch(location)
    assert match, "other names were refused as missing files"
    name, config, chosen = match["name"], match["config"] or None, match["split"] or split
    bars_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(name, config, split=chosen, streaming=streaming)
    except (ValueError, FileNotFoundError) as error:
        found = f"{name!r} with config {config!r} and split {chosen!r} cannot be loaded: {error}"
        raise ValueError(f"`location` must be a dataset on the Hub with its config and split, but {found}") from error
    finally:
        if bars_shown:
            datasets.enable_progress_bars()
    # Other columns may hold audio or images, which are slow to decode.
    names = dataset.column_names or []
    parts = {"translation", *(part for name in columns for part in parts_of(name, names))}
    wanted = [column for column in names if column in parts]
    return cast("Iterable[Mapping[str, Any]]", dataset.select_columns(wanted) if wanted else dataset)
