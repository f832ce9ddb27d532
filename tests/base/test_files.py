"""Files on disks that take no more, and files that a kill finds half written."""

import errno
import os
import pathlib

import pytest

from jaxmem.base import files
from jaxmem.base.files import Appender
from tests.helpers.files import no_file_above

FULL = pathlib.Path("/dev/full")  # writing to it fails as on a full disk


def test_records_are_whole_or_wait(tmp_path):
    file = Appender(tmp_path / "made" / "lines")
    with no_file_above(10):
        for record in (b"one\n", b"two\n", b"three\n"):
            file.add(record)
        with pytest.raises(OSError) as caught:
            file.flush()
        assert caught.value.errno == errno.EFBIG
        assert file.path.read_bytes() == b"one\ntwo\n"  # no half of a line
        assert list(file.pending) == [b"three\n"]
    file.add(b"four\n")
    file.flush()
    assert file.path.read_bytes() == b"one\ntwo\nthree\nfour\n" and not file.pending
    file.close()
    again = Appender(file.path)
    again.add(b"five\n")
    again.flush()
    again.close()
    assert file.path.read_bytes().endswith(b"four\nfive\n")


def test_append_cuts_half_a_record_later(tmp_path, monkeypatch):
    file = Appender(tmp_path / "lines")
    file.add(b"a" * 6 + b"\n")
    with no_file_above(4), monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", lambda *_: os.write(-1, b""))
        with pytest.raises(OSError):
            file.flush()
    assert file.path.read_bytes() == b"aaaa"
    file.flush()
    file.close()
    assert file.path.read_bytes() == b"aaaaaa\n"


def test_waiting_records_bounded_and_lost_ones_counted(monkeypatch):
    monkeypatch.setattr(files, "_MAX_PENDING", 3)
    file = Appender(FULL)
    for i in range(5):
        file.add(b"%d" % i)
        with pytest.raises(OSError, match="No space left"):
            file.flush()
    file.close()
    assert list(file.pending) == [b"2", b"3", b"4"] and file.dropped == 2


def test_replace_is_whole_or_nothing(tmp_path):
    path = tmp_path / "summary.json"
    files.write_whole(path, "old")
    with no_file_above(3):
        with pytest.raises(files.WriteError) as caught:
            files.write_whole(path, "newer")
        files.write_whole(path, "old")  # nothing to write
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == [
        path.name
    ]
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be written: File too large (")
    assert message.endswith(" bytes free)")
    files.write_whole(path, "newer")
    assert path.read_text() == "newer"


# -------------------------------------------------------- links and removal


def test_write_follows_no_symbolic_link(tmp_path):
    target, link = tmp_path / "thesis", tmp_path / "lines"
    target.write_text("years of work")
    link.symlink_to(target)
    (tmp_path / "text.unfinished").symlink_to(target)
    file = Appender(link)
    file.add(b"one\n")
    actions = (
        file.flush,
        lambda: files.truncate(link, 3),
        lambda: files.write_whole(tmp_path / "text", "hello"),
    )
    for action in actions:
        with pytest.raises(OSError, match="it is a symbolic link, which is not foll"):
            action()
    assert target.read_text() == "years of work"
    link.unlink()
    file.flush()
    file.close()
    assert link.read_text() == "one\n"


@pytest.mark.parametrize("moved", [False, True])
def test_appender_makes_removed_file_anew(moved, tmp_path):
    file = Appender(tmp_path / "made" / "lines")
    file.add(b"one\n")
    file.flush()
    file.path.rename(tmp_path / "old") if moved else file.path.unlink()
    if not moved:
        file.path.parent.rmdir()
    assert file.was_removed
    file.add(b"two\n")
    file.flush()
    assert not file.was_removed and file.path.read_bytes() == b"two\n"
    file.close()


def test_unfinished_file_is_removed(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with pytest.raises(ZeroDivisionError), files.unfinished(path) as made:
        made.write_text("half")
        raise ZeroDivisionError
    assert list(path.parent.iterdir()) == []
    with files.unfinished(path) as made:
        made.write_text("whole")
    assert [*path.parent.iterdir()] == [path] and path.read_text() == "whole"
