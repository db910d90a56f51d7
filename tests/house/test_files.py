"""Files and folders appear whole or not at all, and their folder otherwise stays as it was."""

import errno
import gzip
import json
import os
import stat
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from heedful.data.sources import read_pairs
from heedful.files import check_is_new, check_writable, leftovers, new_folder, read_lines, write_text, written_whole
from helpers import assert_error


def test_two_that_write_one_file_leave_the_whole_text_of_the_last(tmp_path):
    path = tmp_path / "out.txt"
    with written_whole(path) as partial, partial.open("w") as file:
        file.write("first half")
        file.flush()
        write_text(path, "of another process")
        assert path.read_text() == "of another process"
        file.write(", second half")
    assert path.read_text() == "first half, second half"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_keeps_its_mode_and_new_ones_have_those_that_the_process_gives(tmp_path):
    path = tmp_path / "secret.txt"
    path.touch()
    for mode in (0o600, 0o640, 0o755):
        path.chmod(mode)
        write_text(path, "text")
        assert stat.S_IMODE(path.stat().st_mode) == mode
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new.txt", "text")
        with new_folder(tmp_path / "new"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "real.txt", tmp_path / "link.txt"
    link.symlink_to(target)
    for text in ("new", "in place of another"):
        write_text(check_writable(link), text)
        assert link.is_symlink()
        assert target.read_text() == text
    (tmp_path / "lost.txt").symlink_to(tmp_path / "nowhere" / "real.txt")
    with pytest.raises(FileNotFoundError, match=r"`-o` must lie in an existing folder, but .*nowhere does not exist"):
        check_writable(tmp_path / "lost.txt", name="-o")


def test_an_error_leaves_what_was_there_even_the_old_name_of_a_partial_file_and_nothing_else(tmp_path):
    path, thesis = tmp_path / "out.txt", tmp_path / "out.txt.partial" / "thesis"
    thesis.parent.mkdir()
    thesis.write_text("precious")
    write_text(path, "before")
    with suppress(KeyboardInterrupt), written_whole(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert (path.read_text(), thesis.read_text()) == ("before", "precious")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_whose_place_nothing_can_take_gets_the_bytes_and_errors_name_it(tmp_path, monkeypatch):
    path, make = tmp_path / ("😀" * 60), tempfile.mkdtemp

    def refuse(number, *_, **__):
        raise OSError(number, os.strerror(number))

    write_text(path, "old")
    busy, closed = {"replace": partial(refuse, errno.EBUSY)}, {"access": lambda place, _: place != tmp_path}
    closed["mkdtemp"] = lambda end, begin, place: refuse(errno.EROFS) if place == tmp_path else make(end, begin)
    for target, changes in ((Path, busy), (tempfile, closed)):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(os if name == "access" else target, name, value)
            check_writable(path)
            write_text(path, f"new of {target}")
            if target is tempfile:
                must = "must be writable, but .*new is not: Read-only file system"
                for check in (check_writable, check_is_new):
                    assert_error(must, check, tmp_path / "new")
        assert path.read_text() == f"new of {target}"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", partial(refuse, errno.ENOSPC))
        assert_error(f"No space left on device: '{path}'", write_text, path, "newer", error=OSError)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), written_whole(path):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    (tmp_path / "ring").symlink_to("ring")
    assert_error("ring is none", check_writable, tmp_path / "ring")
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "ring"}


def test_what_a_killed_writer_leaves_is_known_by_its_name(tmp_path):
    child = os.fork()
    if not child:
        with written_whole(tmp_path / "out.txt") as partial:
            partial.write_text("half")
            os._exit(1)
    os.waitpid(child, 0)
    (tmp_path / ".out.txt.abcdefgh.partial").write_text("a file of somebody else's")
    ((left, name),) = leftovers(tmp_path).items()
    assert name == "out.txt"
    assert (left / name).read_text() == "half"
    assert leftovers(Path(tmp_path / "nowhere")) == {}


def test_the_encodings_of_korean_spreadsheets_are_named_with_a_way_out(tmp_path):
    for encoding in ("UTF-16", "CP949"):
        (tmp_path / "table.csv").write_bytes("질문,답변\n언제 와요?,내일 와요.\n".encode(encoding))
        message = f"it looks like {encoding}; `iconv -f {encoding} -t UTF-8 OLD > NEW`"
        assert_error(message, read_lines, tmp_path / "table.csv", "texts")
        with pytest.raises(ValueError, match=f"table.csv must be UTF-8 text, but line 1 is not: {message}"):
            list(read_pairs(str(tmp_path / "table.csv"), "질문", "답변"))
    (tmp_path / "pairs.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"but is .*pairs\.xlsx instead: save the table as CSV UTF-8\."):
        read_pairs(str(tmp_path / "pairs.xlsx"), "1", "2")
    (tmp_path / "text.txt").write_bytes("한국어".encode() + b"\xc7\xd1\n")  # broken UTF-8, and nothing else
    assert_error("invalid continuation byte", read_lines, tmp_path / "text.txt", "texts")


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("heedful.data.tables.numbered_lines.__defaults__", (1000,))
    with gzip.open(tmp_path / "pairs.tsv.gz", "wb") as file:
        file.write(b"a\tb\n" + b"x" * 10_000)
    with pytest.raises(ValueError, match=r"lines of at most 1,000 bytes, but line 2 has more"):
        list(read_pairs(str(tmp_path / "pairs.tsv.gz"), "1", "2"))
    (tmp_path / "rows.json").write_text(json.dumps([{"a": "x" * 600, "b": "y"}] * 3))
    assert len(read_pairs(str(tmp_path / "rows.json"), "a", "b")) == 3
