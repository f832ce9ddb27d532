"""One process at a time, whatever became of the one before."""

import errno
import fcntl
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxmem.base import locks

# Holds the lock until it is killed, as another machine's process would.
HOLDER = """
import fcntl, json, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write('{"host": "node7", "pid": 4242, "since": "2026-01-02 03:04:05+00:00"}')
file.flush()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "run" / "lock"


def no_message(line):
    raise AssertionError(line)


def held(path, log=no_message):
    return locks.exclusive(path, "run.out_dir='run'", log)


def test_lock_names_holder_and_survives_a_kill(path):
    path.parent.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE
    )
    with holder.stdout as output:
        assert output.readline() == b"held\n"
        before = path.read_bytes()
        with pytest.raises(ValueError) as caught, held(path):
            pass
    assert str(caught.value) == (
        "run.out_dir='run' is in use by another process (host node7, pid 4242, since "
        "2026-01-02 03:04:05+00:00); wait until it ends, end it, or name another"
    )
    assert path.read_bytes() == before
    holder.kill()
    holder.wait()
    with held(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_it_leaves_nothing_behind_but_what_was_there(path, tmp_path):
    with pytest.raises(ZeroDivisionError), held(path):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with held(path):
        (path.parent / "kept").touch()
    assert [p.name for p in path.parent.iterdir()] == ["kept"]


def test_removed_file_is_not_the_lock(path, monkeypatch):
    """One opens it, the holder removes it, another makes it anew: two files."""
    flock = fcntl.flock

    def late(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        path.touch()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with held(path):
        with pytest.raises(locks.Busy), held(path):
            pass


def test_file_system_without_locks_is_named_once(path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    output = []
    with held(path, output.append), held(path, lambda _: None):
        assert not list(path.parent.iterdir())
    assert output == [
        f"{path.parent}: the file system has no locks (No locks available); do not "
        "start a second process with run.out_dir='run'"
    ]


def test_unwritable_path_is_named():
    with pytest.raises(OSError, match="/proc/self/lock: cannot be written: "):
        with held(pathlib.Path("/proc/self/lock")):
            pass


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/nowhere/run"])
def test_lock_names_setting_of_bad_directory(place, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    path = tmp_path / place / "lock"
    wanted = rf"run.out_dir='run': the directory {path.parent} cannot be created: \w"
    with pytest.raises(OSError, match=wanted), held(path):
        pass
    assert (tmp_path / "file").read_text() == "not a directory"


# -------------------------------------------------------- forks and links

FORKING = """
import os, sys, time
from jaxmem.base import locks
with locks.exclusive(__import__("pathlib").Path(sys.argv[1]), "it", print):
    if not os.fork():
        os.setsid()
        print(os.getpid(), flush=True)  # its own start has let go of the lock
    time.sleep(600)
"""


@pytest.mark.full
def test_forked_child_does_not_keep_the_lock(path):
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(path)], stdout=subprocess.PIPE
    )
    with parent.stdout as output:
        child = int(output.readline())
        parent.kill()
        parent.wait()
    try:
        os.kill(child, 0)  # it is alive
        with held(path):
            pass
    finally:
        os.kill(child, 9)


def test_symbolic_link_is_not_followed(path, tmp_path):
    path.parent.mkdir(parents=True)
    (tmp_path / "thesis").write_text("years of work")
    path.symlink_to(tmp_path / "thesis")
    wanted = "lock: cannot be written: it is a symbolic link, which is not followed; re"
    with pytest.raises(OSError, match=wanted), held(path):
        pass
    assert (tmp_path / "thesis").read_text() == "years of work"


@pytest.mark.parametrize("which", ["file", "directory"])
def test_lock_that_was_removed_is_taken_again(which, path):
    with held(path) as lock:
        assert lock.renew() == ""
        path.unlink()
        if which == "directory":
            path.parent.rmdir()
        said = (
            f"run.out_dir='run': {path} was removed, possibly with the rest of its "
            "directory; jaxmem creates it again"
        )
        assert lock.renew() == said
        with pytest.raises(locks.Busy), held(path):
            pass
    assert not path.exists()


def test_lock_taken_by_another_is_not_removed(path):
    with held(path) as lock:
        path.unlink()
        with held(path):
            with pytest.raises(locks.Busy):
                lock.renew()
            lock.release()
            with pytest.raises(locks.Busy), held(path):
                pass
