"""Text files and their tables: lines, delimiters, quotation marks, and column names."""

import csv
import gzip
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice, pairwise, tee
from pathlib import Path

from heedful.files import LONGEST_LINE, bounded_lines, other_encoding, quoted

Columns = tuple[str, ...]  # of source and target, perhaps of documents
DELIMITERS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars", "\n": "line ends"}
# Punctuation in prose: before a space, in a number, or at the end of an HTML entity.
PROSE = {",": re.compile(r"\0\s|\d\0[\d–-]"), ";": re.compile(r"\0\s|&#?\w+\0")}
SEPARATOR_LINE = re.compile(r'\Asep=([^"\r\n])(\r\n?|\n)')  # for Excel
TABLES = ("csv", "tsv", "txt")
ANY_COLUMNS = ("", "")  # before column names are known
LOOKED_AT = 200  # lines that decide the delimiter
# Cells in quotation marks as written by pandas and csv, polars, Excel, QUOTE_ALL, and QUOTE_NONNUMERIC and R.
WRAPPED = [r'["\t\r\n]', r'["\t\r\n]|^$', r'["\t\r\n,]', "", r"^(?!(-?[\d.]+(e[+-]?\d+)?|NA)$)"]
csv.field_size_limit(2**24)  # characters in a cell; an open quotation mark turns a whole file into one cell


def kind_of_file(path: str | Path) -> str | None:
    """Return the file kind from its name, or None."""
    match = re.search(r"\.(parquet(?!\.gz)|jsonl|json|csv|tsv|txt)(\.gz)?$", Path(path).name.lower())
    return match[1] if match else None


def numbered_lines(file: str, longest: int = LONGEST_LINE) -> Iterator[tuple[int, str]]:
    r"""Yield number and text of each line. Only \n ends a line: \u2028 and others occur inside sentences."""
    number, line = 0, b""
    try:
        with gzip.open(file, "rb") if file.lower().endswith(".gz") else Path(file).open("rb") as stream:
            for number, line in enumerate(bounded_lines(stream, file, longest), start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        reason = other_encoding(line) or error
        raise ValueError(f"{file} must be UTF-8 text, but line {number} is not: {reason}.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} must be a whole gzip file, but breaks after line {number}: {error}.") from error


def without_end(line: str) -> str:
    """Return a line without its end."""
    return line.removesuffix("\n").removesuffix("\r")


def parts_of(name: str, columns: Collection[str]) -> list[str]:
    """Return a name's columns: the column with this name, or the columns between its commas."""
    return [name] if name in columns or "," not in name else next(csv.reader([name], skipinitialspace=True))


def name_of(columns: Sequence[str]) -> str:
    """Return one name for columns, which `parts_of` splits."""
    return columns[0] if len(columns) == 1 else ",".join(f'"{name}"' if "," in name else name for name in columns)


def table_rows(file: str, columns: Columns) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield each row's line and cells by header name, or by number if the header lacks the names."""
    delimiter, _ = delimiters_of(file, columns)
    is_csv = kind_of_file(file) == "csv"
    rows = _csv_rows(file, delimiter, _csv_lines(file)) if is_csv else _plain_rows(file, delimiter)
    first, names = next(rows, (1, []))
    wanted = {part for name in columns for part in parts_of(name, names)}
    is_named = wanted <= {*names}
    if is_named and _are_numbers(wanted):  # a header is not above numbers
        rows = chain(ahead := list(islice(rows, LOOKED_AT)), rows)
        places = [names.index(name) for name in wanted]
        below = "".join(cells[place] for _, cells in ahead for place in places if place < len(cells))
        is_named = not below or any(map(str.isalpha, below))
        if is_named and any(int(names[place]) != place + 1 for place in places):
            found = f"{quoted(sorted(wanted))} are names in the first line of {file}, not column numbers."
            warnings.warn(found, stacklevel=2)
    if columns == ANY_COLUMNS or (_are_numbers(wanted) and names and not is_named):
        rows, names = chain([(first, names)], rows), [str(number) for number in range(1, len(names) + 1)]
    if len(set(names)) < len(names):
        found = f"{quoted(names)} instead.{advice_on_tables(file)}"
        raise ValueError(f"{file} must have different column names, but has {found}")
    for number, cells in rows:
        if len(cells) != len(names):
            must = f"{len(names)} cells in every line, as the first has"
            found = f"{len(cells)} in line {number} instead, where {DELIMITERS.get(delimiter, repr(delimiter))}"
            raise ValueError(f"{file} must have {must}, but has {found} separate them.")
        yield number, dict(zip(names, cells, strict=True))


def _plain_rows(file: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each line's number and cells in a .tsv or .txt, perhaps as CSV from the first quotation mark on."""
    lines, may_wrap, tab = numbered_lines(file), True, delimiter.replace("\n", "\t")
    for number, line in lines:
        if may_wrap and '"' in line and (may_wrap := are_wrapped(file, tab)):
            yield from _csv_rows(file, tab, chain([line], (text for _, text in lines)), number - 1)
            return
        if text := without_end(line):
            yield number, text.split(delimiter)


def _csv_rows(file: str, delimiter: str, lines: Iterable[str], before: int = 0) -> Iterator[tuple[int, list[str]]]:
    reader, number = csv.reader(lines, delimiter=delimiter, strict=True), before + 1
    try:
        for cells in reader:
            if cells:
                yield number, cells
            number = before + reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{file} must be well-formed CSV, but line {reader.line_num} is not: {error}.") from error


def _csv_lines(file: str) -> Iterator[str]:
    r"""Yield a CSV file's lines without Excel's `sep=;`; a lone \r, as on old Macs, ends a line."""
    for number, line in numbered_lines(file):
        text = SEPARATOR_LINE.sub("", line) if number == 1 else line
        yield from re.split(r"(?<=\r)(?!\n)", text) if "\r" in text[:-2] else [text]


def are_wrapped(file: str, delimiter: str) -> bool:
    """Return whether quotation marks wrap cells in a .tsv or .txt exactly as CSV writers do."""
    if not any('"' in line for _, line in numbered_lines(file)):
        return False
    ways, done, joined = WRAPPED, 0, delimiter.join
    lines, copies = tee(line for _, line in numbered_lines(file))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            text, done = without_end("".join(islice(copies, reader.line_num - done))), reader.line_num
            pairs = [(cell, '"' + cell.replace('"', '""') + '"') for cell in cells]
            ways = [way for way in ways if text == joined(pair[bool(re.search(way, pair[0]))] for pair in pairs)]
            if not ways:
                return False
    except csv.Error:
        return False
    return True


def delimiters_of(file: str, columns: Columns) -> tuple[str, list[str]]:
    """Return a table's delimiter, and the others that fit too.

    An unusual delimiter for the file kind must give columns with the wanted names, or equally many cells in nearly all
    first lines. Prose punctuation comes last. Plain text has one cell per line.
    """
    is_csv = kind_of_file(file) == "csv"
    own, fits, has_cells = ",\t"[not is_csv], dict[str, tuple[bool, bool, int]](), is_csv
    if is_csv and (stated := SEPARATOR_LINE.match(next((line for _, line in numbered_lines(file)), ""))):
        return stated[1], []
    for delimiter in dict.fromkeys(("\t", own, ",", ";", "|")):  # a tab first: prose has none
        rows: Iterable[list[str]] = (without_end(line).split(delimiter) for _, line in numbered_lines(file))
        if is_csv:
            rows = csv.reader(islice(_csv_lines(file), 5 * LOOKED_AT), delimiter=delimiter, strict=True)
        table: list[list[str]] = []
        with suppress(csv.Error):  # reading with the right delimiter names the line
            table.extend(islice((cells for cells in rows if any(cells)), LOOKED_AT))
        size, count = Counter(map(len, table)).most_common(1)[0] if table else (0, 0)
        wanted = {part for name in columns for part in parts_of(name, table[0] if table else ())}
        needed = 2 if columns == ANY_COLUMNS else max(map(int, wanted)) if _are_numbers(wanted) else size + 1
        joints = [f"{cell[-8:]}\0{after[:1]}" for row in table for cell, after in pairwise(row)]
        is_prose = delimiter in PROSE and 2 * sum(map(bool, map(PROSE[delimiter].search, joints))) > len(joints)
        is_text = is_prose and not is_csv and (columns == ANY_COLUMNS or needed == 1)
        has_cells |= delimiter == own and size > 1
        are_names = columns != ANY_COLUMNS and bool(table) and wanted <= {*table[0]}
        if delimiter == own or are_names or (size > 1 and not is_text):
            is_even, rank = size > 1 and count > 0.9 * len(table), (delimiter == ";") if is_prose else 2
            fits[delimiter] = are_names or size >= needed, is_even, rank
    if needed == 1 and not has_cells and not any(is_even for _, is_even, _ in fits.values()):
        return "\n", []
    chosen, *others = (delimiter for delimiter, fit in fits.items() if fit == max(fits.values()))
    return chosen, others


def layouts_of(files: Iterable[str]) -> list[str]:
    """Describe tables with unusual delimiters or quotation marks, or with several possible ones."""
    said: dict[str, None] = {}
    for file in files:
        is_csv, (delimiter, others) = kind_of_file(file) == "csv", delimiters_of(file, ANY_COLUMNS)
        rivals = f" ({DELIMITERS[others[0]]} would fit too)" if others else ""
        if others or delimiter != ",\t"[not is_csv]:
            said[f"{DELIMITERS.get(delimiter, repr(delimiter))} separate the cells{rivals}"] = None
        if not is_csv and are_wrapped(file, delimiter):
            said["quotation marks around cells are removed, and doubled ones become one"] = None
    return list(said)


def _are_numbers(columns: Collection[str]) -> bool:
    return all(re.fullmatch("[1-9][0-9]*", column) for column in columns)


def advice_on_tables(file: str) -> str:
    """Return advice for errors about table columns."""
    if kind_of_file(file) not in TABLES:
        return ""
    return " If a table has no header, give its column numbers, such as source 1 and target 2."
