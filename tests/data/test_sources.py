import gzip
import json
import re
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heedful.data.data_recipe import MixturePart
from heedful.data.sources import first_rows, read_pairs, read_parts, references_of

ROWS = [
    {"source": "NA", "target": 'a "quoted" \'word'},
    {"source": '"open quote', "target": "null"},
    {"source": "line\u2028separator\x0bhere\x85", "target": "  spaces kept  "},
    {"source": "", "target": "-1e5"},
]


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def rows_in_both_ways(location, source="source", target="target", **options):
    """Read a corpus at once and as a stream, which must give the same."""
    from datasets import Dataset, IterableDataset

    at_once = read_pairs(location, source, target, **options)
    stream = read_pairs(location, source, target, streaming=True, **options)
    assert isinstance(at_once, Dataset)
    assert isinstance(stream, IterableDataset)
    columns = ["source", "target", *["references"][: "references" in options]]
    assert at_once.column_names == stream.column_names == columns
    rows = list(at_once)
    assert list(stream) == list(stream) == rows
    return rows


def check_refused(location, message, source="source", target="target", error=ValueError, **options):
    for streaming in (False, True):
        with pytest.raises(error, match=message):
            list(read_pairs(location, source, target, streaming=streaming, **options))


def test_rows_are_taken_as_they_stand_in_every_kind_of_file(tmp_path):
    from datasets import Dataset

    nested = [{"id": 1, "translation": {"source": row["source"], "target": row["target"], "de": "x"}} for row in ROWS]
    lines = ["source\tnote\ttarget", *(f"{row['source']}\t-\t{row['target']}" for row in ROWS)]
    texts = {
        "flat.jsonl": json_lines(ROWS),
        "nested.jsonl": "\n" + json_lines(nested).replace("\n", "\r\n\n"),
        "array.json": "\ufeff\n" + json.dumps(ROWS, ensure_ascii=False),
        "indented.json": json.dumps(nested, ensure_ascii=False, indent=1),
        "lines.json": "\n" + json_lines(ROWS),
        "literal.tsv": "\ufeff" + "\n".join(lines),
        "windows.txt": "\r\n".join(lines),
    }
    for name, text in texts.items():
        for suffix in ("", ".gz"):
            assert rows_in_both_ways(write(tmp_path / f"{name}{suffix}", text)) == ROWS, name
    for rows in (ROWS, nested):
        Dataset.from_list(rows).to_parquet(str(tmp_path / "c.parquet"))
        assert rows_in_both_ways(str(tmp_path / "c.parquet")) == ROWS
    for suffixes in (("", ""), (".gz", ".en"), (".txt", ".txt.gz")):
        files = [
            write(tmp_path / f"{side}{suffix}", "".join(row[side] + "\r\n" for row in ROWS))
            for side, suffix in zip(("source", "target"), suffixes, strict=True)
        ]
        assert rows_in_both_ways(files, "en", "ko") == ROWS


READ = [  # the name of a file, what is in it, the columns, and the pairs
    ("c.csv", 'x,y\nNA,"a ""b"""\n"d\ne",\u2028\n"f,g",\n', "xy", [("NA", 'a "b"'), ("d\ne", "\u2028"), ("f,g", "")]),
    ("c.tsv", "\u1112\u1161\u11ab\te\u0301\n", ("1", "2"), [("한", "é")]),  # composed
    ("c.jsonl", '{"a": "\\ud83d\\ude00", "b": "b"}', ("a", "b"), [("😀", "b")]),  # a whole surrogate pair
    # A delimiter of another kind inside the cells separates nothing; the first lines say which one does.
    ("c.tsv", "a; b | c, d\te; f | g, h\n", ("1", "2"), [("a; b | c, d", "e; f | g, h")]),
    ("c.csv", 'ko,en;x\n"a;b","c;d"\n', ("ko", "en;x"), [("a;b", "c;d")]),
    ("c.csv", "O, P;o, p\nI;i\nJ, d;j, d\n", ("1", "2"), [("O, P", "o, p"), ("I", "i"), ("J, d", "j, d")]),
    ("c.tsv", "2\t1\nb\ta\n", ("1", "2"), [("a", "b")]),  # names that are numbers
    ("c.tsv", "2\t1\n3\t2\n", ("1", "2"), [("2", "1"), ("3", "2")]),  # numbers that are no names
    # Where several delimiters make as many cells everywhere, those that prose has separate nothing.
    ("c.csv", "Es kostet 7,82.;It costs 7.82.\n", ("1", "2"), [("Es kostet 7,82.", "It costs 7.82.")]),
    ("c.csv", "5,- Euro\tfive euros\n", ("1", "2"), [("5,- Euro", "five euros")]),
    ("c.csv", "Hallo, A;Hello, A\nJa, klar;Yes\n", ("1", "2"), [("Hallo, A", "Hello, A"), ("Ja, klar", "Yes")]),
    ("c.csv", "Hallo, A; Hello, A\nJa, B; Yes, B\n", ("1", "2"), [("Hallo, A", " Hello, A"), ("Ja, B", " Yes, B")]),
    ("c.csv", "x &amp; y,z\nQ&amp;A,b\n", ("1", "2"), [("x &amp; y", "z"), ("Q&amp;A", "b")]),
    ("c.csv", '"Hallo, A";"Hello, A"\n', ("1", "2"), [("Hallo, A", "Hello, A")]),
    ("c.csv", "laufen,lief,V;PST\n", ("1", "2"), [("laufen", "lief")]),
    ("c.txt", "O, a\nJa, b\ta\nNun, c\n", ("1", "1"), [(text, text) for text in ("O, a", "Ja, b\ta", "Nun, c")]),
    ("c.tsv", "a\nb\n", ("1", "1"), [("a", "a"), ("b", "b")]),
    # Marks wrap the cells of a .tsv where a writer of CSV would write all of it so: pandas, Excel, QUOTE_ALL.
    ("c.tsv", 'a\tb\n"""Ja"", sagt er\nlaut"\tc\n', ("a", "b"), [('"Ja", sagt er\nlaut', "c")]),
    ("c.tsv", 'a\tb\nc\t"d, e"\n"f ""g"""\th\n', ("a", "b"), [("c", "d, e"), ('f "g"', "h")]),
    ("c.txt", '"a"\t"b"\n"c"\t"d ""e"" f"\n', ("a", "b"), [("c", 'd "e" f')]),
    ("c.tsv", 'a\tb\n"f ""g"""\th\n"i ""j"""\t""\n', ("a", "b"), [('f "g"', "h"), ('i "j"', "")]),
    ("c.tsv", 'a\tb\n"Ja, c"\td, e\n', ("a", "b"), [('"Ja, c"', "d, e")]),
    ("c.tsv", 'a\tb\n"f ""g"""\t"h" i\n', ("a", "b"), [('"f ""g"""', '"h" i')]),
    ("c.csv", 'en,ko\ra,"b\rc"\rd,e\r', ("en", "ko"), [("a", "b\rc"), ("d", "e")]),  # lines of old Macs
    ("A.TSV", "en\tko\na\tb\n", ("en", "ko"), [("a", "b")]),
    ("a.Jsonl", '{"en": "a", "ko": "b"}\n', ("en", "ko"), [("a", "b")]),
    ("c.csv", f'a,b\n"{"c " * 80_000}",d\ne,f\n', ("a", "b"), [("c " * 80_000, "d"), ("e", "f")]),
]


def test_what_is_in_a_file_is_read(tmp_path):
    for name, text, columns, pairs in READ:
        rows = [{"source": source, "target": target} for source, target in pairs]
        assert rows_in_both_ways(write(tmp_path / name, text), *columns) == rows, text[:99]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])), min_size=1))
def test_any_line_stays_one_row(tmp_path, lines):
    from unicodedata import normalize

    files = [write(tmp_path / name, "".join(line + "\n" for line in lines)) for name in ("a", "b")]
    if not lines[0].startswith("\ufeff"):
        assert list(read_pairs(files, "en", "ko")["source"]) == [normalize("NFC", line) for line in lines]


def test_many_rows_and_the_files_of_a_pattern_are_read_in_order(tmp_path, monkeypatch):
    rows = [{"source": str(number), "target": "x"} for number in range(12_000)]
    assert list(read_pairs(write(tmp_path / "c.jsonl", json_lines(rows)), "source", "target")) == rows
    for name in ("b", "a", "c"):
        write(tmp_path / f"part-{name}.jsonl", json_lines([{"source": name, "target": name}]))
    assert [row["source"] for row in rows_in_both_ways(str(tmp_path / "part-*.jsonl"))] == ["a", "b", "c"]
    monkeypatch.chdir(tmp_path)
    assert [row["source"] for row in rows_in_both_ways("part-[bc].jsonl")] == ["b", "c"]
    assert rows_in_both_ways(write(tmp_path / "part[1].jsonl", json_lines(ROWS))) == ROWS  # a file of this name


def test_a_changed_file_is_seen_and_nothing_is_left_behind_nor_shown(tmp_path, capfd):
    for rows in (ROWS, ROWS[:1]):
        location = write(tmp_path / "c.jsonl", json_lines(rows))
        assert rows_in_both_ways(location) == rows
    assert read_pairs(location, "source", "target").cache_files == []
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
    assert capfd.readouterr() == ("", "")


def test_missing_files_are_named_and_a_url_is_refused_as_one(tmp_path):
    path = str(tmp_path / "no.jsonl")
    for location, message in (
        (path, r"no\.jsonl does not"),
        ("no.tsv.gz", r"no\.tsv\.gz does not"),
        ("./corpus", r"\./corpus does not"),
        ([path, path], r"two text files that exist, but .*no\.jsonl does not"),
        (str(tmp_path / "*.jsonl"), r"\*\.jsonl matches none"),
        (str(tmp_path / "none"), "does not|can't be"),
    ):
        check_refused(location, message, error=FileNotFoundError)
    for location in ("https://example.org/pairs.tsv", "s3://bucket/train.jsonl"):
        for where in (location, [write(tmp_path / "a.txt", "a"), location]):
            check_refused(where, rf"but is the URL {location} instead: download it first")


def test_a_missing_column_is_named_with_those_that_are_there_and_what_it_nearly_is(tmp_path):
    nested = write(tmp_path / "nested.jsonl", json_lines([{"translation": {"en": "a", "de": "b"}}] * 2))
    check_refused(nested, "must have the language or column 'ko', but has 'en', 'de' instead", "en", "ko")
    table = write(tmp_path / "table.tsv", "english\traw date \na\tb\n")
    check_refused(table, r"table\.tsv must have .* 'en', but has 'english', 'raw date ' instead", "en", "de")
    message = r"'raw date', but has 'english', 'raw date ' instead \(did you mean 'raw date '\?\)\."
    check_refused(table, message, "raw date", "english")


def test_a_language_that_is_none_in_some_rows_is_counted(tmp_path):
    rows = [{"translation": {"en": "a", "cs": cs}} for cs in ("x", None, "y", None)] + [{"translation": {"en": "a"}}]
    location = write(tmp_path / "c.jsonl", json_lines(rows))
    for streaming, more in ((False, ", and in 2 more"), (True, "")):
        message = rf"'cs' must be text .* None in row 2 of .*c\.jsonl instead{more}\."
        with pytest.raises(ValueError, match=message):
            list(read_pairs(location, "en", "cs", streaming=streaming))


def test_the_references_of_a_row_are_its_target_and_all_others_of_the_column_once(tmp_path):
    from datasets import Dataset

    decomposed = "e\u0301"  # as in NFD
    columns = {"a": ["b", "a"], decomposed: ["é", decomposed, "c"], "a ": ["a "]}
    rows = [{"translation": {"x": "s", "y": target}, "right": texts} for target, texts in columns.items()]
    expected = [["a", "b"], ["é", "c"], ["a "]]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "c.parquet"))
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    write(tmp_path / "c.jsonl", json_lines(rows))
    for name in ("c.jsonl", "c.parquet", "saved"):
        found = rows_in_both_ways(str(tmp_path / name), "x", "y", references="right")
        assert [row["references"] for row in found] == references_of(found) == expected
        assert references_of(rows_in_both_ways(str(tmp_path / name), "x", "y")) == [["a"], ["é"], ["a "]]


def test_references_that_are_no_list_of_texts_are_named_with_their_row(tmp_path):
    must = "`right` must be a list of texts, but is "
    for value in ([], "a", None, ["a", 5], {"a": "b"}):
        rows = [{"source": "s", "target": "a", "right": right} for right in (["a"], value)]
        message = re.escape(f"{must}{value!r} instead in row 2 of ") + r".*c\.jsonl"
        check_refused(write(tmp_path / "c.jsonl", json_lines(rows)), message, references="right")
    for name, text in (("c.jsonl", json_lines(ROWS)), ("c.tsv", "source\ttarget\na\tb\n")):
        message = rf"{must}missing instead in row 1 of .*{name}"
        check_refused(write(tmp_path / name, text), message, references="right")
    check_refused("builtin:test:2", "`right` must be a list .* but is missing", "ko", "en", references="right")


PAIR = '{"source": "a", "target": "b"}'
EMPTY = "must hold at least one row, but is empty instead"
WRONG = [  # the name of a file, what is in it, and the message
    ("c.jsonl", PAIR + '\n{"source": "a", \n', r"c\.jsonl must hold JSON, but line 2 is broken"),
    ("c.jsonl", PAIR + "\n" + "[" * 100_000, "must hold JSON, but line 2 is broken"),
    ("c.jsonl", PAIR + '\n["a", "b"]\n', "must hold JSON objects, but line 2 is another value"),
    ("c.jsonl", PAIR + '\n{"source": "\\ud83d", "target": "b"}', "line 2 is broken: .*surrogates"),
    ("c.jsonl", PAIR.encode() + b'\n{"source": "\xff"}\n', r"must be UTF-8 text, but line 2 is not"),
    ("c.jsonl", PAIR + '\n{"source": "a", "target": 5}', r"'target' must be text, but is 5 instead in row 2 of .*c"),
    ("c.json", '[{"source": "a",\n "target"}]', r"c\.json must hold a JSON array, but line 2 is broken"),
    ("c.json", f'[{PAIR}, "c"]', "array of JSON objects, but entry 2 is another value"),
    ("c.json", f'[{PAIR}, {{"source": "a"}}]', r"'target' must be text .* row 2 of .*c\.json"),
    ("c.json", "[]", EMPTY),
    ("c.json", '[{"source": "\\ud83d", "target": "a"}]', "must hold a JSON array, but is broken: .*surrogates"),
    ("c.json", "[" * 100_000, "must hold a JSON array, but is broken: it is nested too deeply"),
    ("c.tsv", "source\ttarget\na\tb\nc\n", r"c\.tsv must have 2 cells in every line, .* has 1 in line 3"),
    ("c.csv", "source,target\na,b,c\n", r"c\.csv must have 2 cells .* has 3 in line 2"),
    ("c.tsv", "source\ttarget\na\tb\nc\n", "2 cells in every line, .* has 1 in line 3", ("1", "1")),
    ("c.csv", "source;target\na;b\nc,d\n", "2 cells .* has 1 in line 3 instead, where semicolons separate them"),
    ("c.csv", "réf.;EN\n1;a\n2;b\n", r"must have the language or column 'source', but has 'réf\.', 'EN' instead"),
    ("c.csv", 'source,target\na,b\n"a,b\n', r"c\.csv must be well-formed CSV, but line 3 is not"),
    ("c.tsv", "source\tsource\na\tb\n", "must have different column names, but has 'source', 'source'"),
    ("c.parquet", "nothing", r"c\.parquet must be a whole Parquet file"),
    ("c.xlsx", "a\n", r"must be a file of a known kind .*, but is .*c\.xlsx"),
    *((f"c.{kind}", "", EMPTY) for kind in ("jsonl", "csv", "tsv", "jsonl.gz")),
    ("c.tsv", "source\ttarget\n", EMPTY),
    ("c.tsv", "a\tx\tb\nc\ty\td\n", r"'source', but has 'a', 'x', 'b' instead\. If a table has no header, .* numbers"),
    ("c.tsv", "a\tx\tb\nc\ty\td\n", "must have .* '4', but has '1', '2', '3' instead", ("1", "4")),
    ("c.jsonl.gz", gzip.compress(json_lines(ROWS * 1000).encode())[:-20], "a whole gzip file, but breaks after line"),
    ("c.jsonl.gz", json_lines(ROWS).encode(), "must be a whole gzip file, but breaks after line 0"),
]


def test_what_is_wrong_with_a_file_is_named_with_its_line(tmp_path):
    for name, text, message, *columns in WRONG:
        path = tmp_path / name
        path.write_bytes(text) if name.endswith(".gz") and text else write(path, text)
        check_refused(str(path), message, *(columns[0] if columns else ()))


def test_two_files_must_be_two_files_of_text_of_the_same_length(tmp_path):
    for source, target, shorter in ((3, 5, "a.txt"), (4, 2, "b.txt"), (0, 1, "a.txt")):
        files = [write(tmp_path / "a.txt", "x\n" * source), write(tmp_path / "b.txt", "y\n" * target)]
        end = min(source, target)
        check_refused(files, rf"but have {source} and {target} instead: .*{shorter} ends at line {end}\.")
    empty = write(tmp_path / "a", "")
    check_refused([empty, empty], "must hold at least one line, but is empty instead")
    check_refused([empty], r"two text files \[source, target\]")
    for kind in ("jsonl", "json"):
        check_refused([empty, write(tmp_path / f"c.{kind}", "")], rf"plain text, but has .*c\.{kind}")


MARKUP = [  # what two files look like, with a text of each line
    ("WMT's SGML. Convert .* `sed -n 's/", "<doc docid='1'>", "<seg id='1'>{}</seg>"),
    ("XLIFF. Convert .* `xliff2po`", "<?xml version='1.0'?>", "<trans-unit id='1'>\n<source>{}</source>"),
    ("TMX", "<?xml version='1.0'?>", "<tu>\n<tuv xml:lang='en'><seg>{}</seg></tuv>"),
    ("one with IWSLT's tags. Convert .* `grep", "<url>http://example.org</url>\n<talkid>1</talkid>", "{}"),
    ("XML, HTML or LaTeX. Convert .* beautifulsoup4", "<!DOCTYPE html>", "<p>{}</p>"),
    ("subtitles. Convert .* pysubs2", "1", "00:00:01,000 --> 00:00:02,900\n{}\n"),
    ("subtitles", "0:00:01.100,0:00:02.900", "{}\n\n0:00:03.100,0:00:04.900"),
    ("gettext's PO. Convert .* `po2csv`", "#: main.c", 'msgid "a"\nmsgstr "{}"'),
    ("M2. Convert .* `sed -n 's/", "S a b", "A 0 1|||R:OTHER|||{}|||REQUIRED|||-NONE-|||0"),
    ("", "# German", "key.one={}"),
    ("", "de:", "  greeting: {}"),
    ("", "", "12\t{}"),
    ("", "", '{{"text": "{}"}}'),
    ("", "/* German */", '"Hello" = "{}";'),
]


def test_two_files_of_markup_are_named_with_what_makes_text_of_them(tmp_path):
    for what, first, line in MARKUP:
        texts = [f"{word} {number}" for word in ("a", "b") for number in range(60)]
        files = [
            write(tmp_path / name, "\n".join([first, *map(line.format, texts[60 * side :][:60])]))
            for side, name in enumerate(("film.ko", "film.en"))
        ]
        expected = rf"film\.ko looks like {what}" if what else "each has the keys .*prop2po"
        check_refused(files, "`location` must be files of plain text, but .*" + expected)
    memory = write(tmp_path / "memory.tmx", "<tmx>\n" + "<tu>\n<tuv xml:lang='en'><seg>a</seg></tuv>\n</tu>\n" * 9)
    expected = r"known kind .*, but is .*memory\.tmx instead: .* looks like TMX\. Convert it to text with `tmx2po`"
    check_refused(memory, expected)
    table = write(tmp_path / "base.tsv", "a\tb\n")
    with pytest.raises(ValueError, match=r"`data.mixture.a` must be files of plain text, .* `cut -f2` writes one"):
        read_parts({"data.mixture.a": MixturePart([table, table], "1", "1")})
    inline = ["<b>Ja</b>", "1 = 1", "Note: x", "<2de> a", "1:2 Im Anfang", "Anna: Ja"]
    files = [write(tmp_path / name, "".join(f"{line}{name}\n" for line in inline)) for name in "ab"]
    assert len(read_pairs(files, "en", "ko")) == len(inline)


def test_hidden_files_and_folders_and_those_of_runs_are_left_out(tmp_path):
    for name in ("data", "data/.ipynb_checkpoints", "data/__MACOSX"):
        (tmp_path / name).mkdir()
    rows = [
        write(tmp_path / "data" / name, json_lines(ROWS))
        for name in ("train.jsonl", ".ipynb_checkpoints/train-checkpoint.jsonl")
    ]
    write(tmp_path / "data" / "__MACOSX" / "train.jsonl", json_lines(ROWS))
    for location in (str(tmp_path / "data"), str(tmp_path / "data" / "**" / "*.jsonl"), *rows):
        assert len(read_pairs(location, "source", "target")) == len(ROWS), location
    (run := tmp_path / "data" / "runs" / "data" / "checkpoints" / "training_state").mkdir(parents=True)
    for path in (run / "progress.json", run.parents[1] / "log.jsonl", run.parents[1] / "recipe.yaml"):
        write(path, "{}")
    for folder in ("data", "data/.ipynb_checkpoints"):
        assert len(read_pairs(str(tmp_path / folder), "source", "target")) == len(ROWS)


def test_a_table_may_be_separated_by_another_delimiter_than_its_name_says(tmp_path):
    rows = [{"source": "가", "target": "b. c"}, {"source": "나", "target": "d"}]
    for name, delimiter in product(("c.csv", "c.tsv", "c.txt"), (",", "\t", ";", "|")):
        location = write(tmp_path / name, "n,ko,en\n1,가,b. c\n2,나,d\n".replace(",", delimiter))
        assert rows_in_both_ways(location, "ko", "en") == rows, (name, delimiter)
        assert rows_in_both_ways(location, "2", "3")[1:] == rows  # the names are a row where columns are numbers


def test_a_folder_has_a_file_for_each_split(tmp_path):
    words = {"train": "train", "dev": "validation", "test": "test"}
    for layout in ("{}.jsonl", "{}-00000-of-00002.jsonl", "data/my-{}.jsonl", "{}/part.jsonl"):
        folder = tmp_path / layout.replace("/", "-")
        for number, word in enumerate(words):
            path = folder / layout.format(word)
            path.parent.mkdir(exist_ok=True, parents=True)
            write(path, json_lines(ROWS[number : number + 1]))
        (folder / "dataset_infos.json").write_text("{}")
        for number, split in enumerate(words.values()):
            assert rows_in_both_ways(str(folder), split=split) == ROWS[number : number + 1], layout


def test_what_a_folder_lacks_is_told(tmp_path):
    check_refused(str(tmp_path), "a folder with a file .* whose name contains train, but .* has none instead")
    write(tmp_path / "pairs.jsonl", json_lines(ROWS))
    assert rows_in_both_ways(str(tmp_path)) == ROWS  # all of it is for training, as `datasets` takes it
    check_refused(str(tmp_path), r"name contains validation, but .* has pairs\.jsonl instead", split="validation")
    write(tmp_path / "test_2016.jsonl", json_lines(ROWS[:1]))
    assert rows_in_both_ways(str(tmp_path), split="test_2016") == ROWS[:1]


def test_a_folder_that_datasets_saved(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"translation": {"en": row["source"], "ko": row["target"]}} for row in ROWS])
    for name, saved in (("split", DatasetDict({"train": rows})), ("whole", rows)):
        saved.save_to_disk(str(tmp_path / name))
        assert rows_in_both_ways(str(tmp_path / name), "en", "ko") == ROWS
    with pytest.raises(ValueError, match="must have the split test, but has train instead"):
        read_pairs(str(tmp_path / "split"), "en", "ko", split="test")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hub: the dataset me/corpus with the config en-ko and the splits train and test."""
    import datasets

    load = datasets.load_dataset
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        pairs = [{"translation": {"en": row["source"], "ko": row["target"]}, "n": 1} for row in rows]
        write(folder / f"{split}.jsonl", json_lines(pairs))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: en-ko\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )

    def load_from_folder(name, *arguments, **options):
        assert name == "me/corpus"
        return load(str(folder), *arguments, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_from_folder)


def test_a_dataset_on_the_hub(hub, capfd):
    for location, split, rows in (
        ("me/corpus", {}, ROWS),
        ("me/corpus:en-ko", {}, ROWS),
        ("me/corpus:en-ko:test", {}, ROWS[:1]),
        ("me/corpus::test", {}, ROWS[:1]),
        ("me/corpus", {"split": "test"}, ROWS[:1]),
    ):
        assert rows_in_both_ways(location, "en", "ko", **split) == rows
    assert capfd.readouterr().err == ""
    check_refused("me/corpus:en-ko:dev", "'me/corpus' with config 'en-ko' and split 'dev' cannot be loaded: .*dev")
    check_refused("me/corpus:en-de", "config 'en-de' and split 'train' cannot be loaded: .*en-de")
    check_refused("me/corpus", "must have the language or column 'fr', but has .*en.* instead", "en", "fr")


def test_the_built_in_corpus_has_splits_a_count_and_two_languages():
    pairs = rows_in_both_ways("builtin:train:20", "ko", "en")
    assert len({row["source"] for row in pairs}) > 10
    turned = rows_in_both_ways("builtin:train:20", "en", "ko")
    assert [(row["target"], row["source"]) for row in turned] == [(row["source"], row["target"]) for row in pairs]
    assert rows_in_both_ways("builtin:test:20", "ko", "en") != pairs
    for location in ("builtin:", "builtin:dev:5", "builtin:train", "builtin:train:0", "builtin:train:5:5"):
        check_refused(location, "must be builtin:SPLIT:COUNT with a split of train, .*, but is 'builtin:", "ko", "en")
    check_refused("builtin:train:5", "`target` must be ko or en for the built-in corpus, but is 'de'", "ko", "de")


def test_the_line_in_which_excel_says_what_separates_the_cells_is_no_row(tmp_path):
    table = [{"source": "가, 나", "target": "b; c"}, {"source": "다", "target": "d|e"}]
    for delimiter, end in product((",", ";", "|", "\t", ":"), ("\n", "\r\n", "\r")):
        lines = [f"sep={delimiter}", *(f'"{row["source"]}"{delimiter}"{row["target"]}"' for row in table)]
        location = write(tmp_path / "c.csv", "\ufeff" + end.join(lines) + end)
        assert rows_in_both_ways(location, "1", "2") == table, (delimiter, end)
    for line in ("sep=", 'sep="', "sep=;;"):  # no separator: a line as any other
        location = write(tmp_path / "c.csv", f"{line}\r\na,b\r\n")
        check_refused(location, r"c\.csv must (have|be well-formed)", "1", "2")


def test_messages_are_short_whatever_the_data_hold(tmp_path):
    rows = [{"version": "1", "data": [{"ko": "가", "en": "b"}] * 10_000, **{f"column {n}": "x" for n in range(5000)}}]
    location = write(tmp_path / "c.json", json.dumps(rows))
    for source, more in (("data", {}), ("nothing", {}), ("version", {"references": "data"})):
        with pytest.raises(ValueError, match="must") as error:
            read_pairs(location, source, "version", **more)
        assert len(str(error.value)) < 500 + len(str(tmp_path))


def test_the_first_rows_of_a_table_are_all_lines_by_number(tmp_path):
    location = write(tmp_path / "c.csv", "en,ko\na,b\nc,d\n")
    assert first_rows(location, 2) == [{"1": "en", "2": "ko"}, {"1": "a", "2": "b"}]
    write(tmp_path / "d.csv", "en,ko\ne,f\n")  # which has the line of names again
    assert [row["1"] for row in first_rows(str(tmp_path), 9)] == ["en", "a", "c", "e"]
    nested = write(tmp_path / "c.jsonl", json_lines([{"id": 3, "translation": {"en": "a", "ko": "b"}}] * 3))
    assert first_rows(nested, 2) == [{"en": "a", "ko": "b"}] * 2


def test_a_name_with_commas_joins_columns_unless_one_is_called_so(tmp_path):
    rows = [("lemma", "form", "tags"), ("gehen", "ging", "V;PST"), ("auf gehen", "geht auf", "V PRS")]
    joined = [("gehen V;PST", "ging", "gehen"), ("auf gehen V PRS", "geht auf", "auf gehen")]
    dicts = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    for name, text, source in [
        ("a.tsv", "\n".join("\t".join(row) for row in rows), "lemma,tags"),
        ("a.csv", "\n".join(";".join(f'"{cell}"' for cell in row) for row in rows), "lemma, tags"),
        ("b.tsv", "\n".join("\t".join(row) for row in rows[1:]), "1,3"),
        ("a.jsonl", json_lines(dicts), "lemma,tags"),
        ("b.jsonl", json_lines({"translation": row} for row in dicts), "lemma,tags"),
    ]:
        location = write(tmp_path / name, text)
        target = "2" if name == "b.tsv" else "form"
        at_once, stream = (read_pairs(location, source, target, streaming=each) for each in (False, True))
        for pairs in (at_once, stream):
            assert [(pair["source"], pair["target"], pair["group"]) for pair in pairs] == joined, name
    location = write(tmp_path / "c.csv", 'a,"b,c","b"\nx,y,z\n')
    assert [row["source"] for row in read_pairs(location, "b,c", "a")] == ["y"]
    assert [row["source"] for row in read_pairs(location, 'b,"b,c"', "a")] == ["z y"]
    check_refused(location, r"c\.csv must have the language or column 'd', but has 'a', 'b,c', 'b'", "b,d", "a")
