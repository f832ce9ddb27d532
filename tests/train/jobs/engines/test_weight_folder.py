"""The folder of weight versions."""

import os

import jax
import pytest

from jaxmem.base import files, locks, processes
from jaxmem.checkpoints.directories import new_directory
from jaxmem.train.jobs.rollout.engines import EngineError, WeightFolder, weight_folder

LOCAL = ["http://localhost:1", "http://127.0.0.1:2", "http://[::1]:3"]


def names(folder):
    return sorted(p.name for p in folder.path.iterdir() if p.name != "lock")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder that stands for /dev/shm."""
    monkeypatch.setattr(weight_folder, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_keep_leaves_two_versions(tmp_path):
    folder = WeightFolder(tmp_path, "runs/sums 1")
    assert folder.path == tmp_path / "runs-sums-1"
    for version in (5, 6, 7):
        folder.keep(version)
        folder.directory(version).mkdir()
    (folder.path / ".v000008-x1y2").mkdir()  # a write that failed
    folder.keep(7)
    assert names(folder) == ["v000006", "v000007"]
    assert folder.directory(1_234_567).name == "v1234567"


def test_keep_and_clear_do_not_mind_that_the_folder_is_gone(tmp_path):
    folder = WeightFolder(tmp_path, "sums")
    (folder.path / "lock").unlink()
    folder.path.rmdir()
    folder.keep(3)
    folder.clear()


def test_a_run_cannot_name_a_folder_outside(tmp_path):
    assert WeightFolder(tmp_path / "a", "..").path == tmp_path / "a" / "run"
    assert WeightFolder(tmp_path / "b", "../../x").path.parent == tmp_path / "b"


def test_keep_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 3 * 2**29)
    folder = WeightFolder(tmp_path, "sums")
    folder.keep(7, size=3 * 2**29)
    line = r"version 7 needs 15.00 GiB in .*sums, and 1.50 GiB are free; set rollouts"
    with pytest.raises(EngineError, match=line):
        folder.keep(7, size=15 * 2**30)
    monkeypatch.setattr(weight_folder, "_SHARED_MEMORY", tmp_path)
    with pytest.raises(EngineError, match="docker: --shm-size"):
        folder.keep(7, size=15 * 2**30)


def test_keep_makes_room_before_it_counts(tmp_path, monkeypatch):
    folder = WeightFolder(tmp_path, "sums")
    folder.directory(5).mkdir()
    monkeypatch.setattr(files, "free_bytes", lambda path: 9 - len(names(folder)))
    folder.keep(7, size=9)


def test_a_folder_removes_what_a_killed_run_left(tmp_path):
    left = tmp_path / "sums"
    (left / "v000003").mkdir(parents=True)
    (left / "v000003" / "w").touch()
    (left / ".v000004-x1y2").mkdir()  # it was being written
    (left / "notes").touch()
    assert names(WeightFolder(tmp_path, "sums")) == ["notes"]


def test_a_folder_does_not_follow_links(tmp_path):
    target, left = tmp_path / "precious", tmp_path / "sums"
    target.mkdir()
    left.mkdir()
    (left / "v000003").symlink_to(target)
    (left / "v000004").touch()
    assert not names(WeightFolder(tmp_path, "sums"))
    assert target.is_dir()


def test_clear_removes_all_that_is_its_own(tmp_path):
    folder = WeightFolder(tmp_path, "sums")
    folder.directory(1).mkdir()
    folder.clear()
    assert not [*tmp_path.iterdir()]


def test_clear_removes_a_folder_that_a_killed_run_made(tmp_path):
    (tmp_path / "sums" / "v000003").mkdir(parents=True)
    WeightFolder(tmp_path, "sums").clear()
    assert not [*tmp_path.iterdir()]
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "notes").touch()
    WeightFolder(tmp_path, "sums").clear()
    assert names(WeightFolder(tmp_path, "sums")) == ["notes"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_alone_can_call_methods(tmp_path, monkeypatch, index):
    """As when one of several has failed, or within `processes.by_first`."""
    folder = WeightFolder(tmp_path, "sums")
    folder.directory(1).mkdir()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(processes, "share", lambda _: pytest.fail("it communicates"))
    folder.keep(9)
    assert folder.directory(1).exists() == bool(index)
    folder.clear()


def test_clear_does_not_hide_the_error_that_ends_a_run(tmp_path, monkeypatch):
    said = []
    folder = WeightFolder(tmp_path, "sums", say=said.append)
    folder.directory(1).mkdir()

    def fail(_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(weight_folder.shutil, "rmtree", fail)
        folder.clear()
    assert len(said) == 1 and "v000001: cannot be written: Permission" in said[0]
    WeightFolder(tmp_path, "sums").clear()  # its lock is free


def test_two_runs_do_not_share_a_folder(tmp_path):
    first = WeightFolder(tmp_path, "sums")
    with pytest.raises(locks.Busy, match=r"rollouts.weights: .*sums is in use"):
        WeightFolder(tmp_path, "sums")
    first.clear()


def test_other_users_can_read_a_version(tmp_path):
    """As an engine in a container, or of a service."""
    mask = os.umask(0o022)
    try:
        folder = WeightFolder(tmp_path / "new", "sums")
        with new_directory(folder.directory(1)) as directory:
            (directory / "model.safetensors").touch()
    finally:
        os.umask(mask)
    path = folder.directory(1)
    for directory in (folder.path.parent, folder.path, path):
        assert directory.stat().st_mode & 0o755 == 0o755
    assert (path / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_the_default_is_shared_memory_of_this_host(shared, monkeypatch):
    folder = WeightFolder(None, "sums", LOCAL)
    assert folder.path == shared / f"jaxmem-{os.getuid()}" / "sums"
    with pytest.raises(EngineError, match="http://gpu7:1 is not on this host; set"):
        WeightFolder(None, "sums", [*LOCAL, "http://gpu7:1"])
    monkeypatch.setattr(weight_folder, "_SHARED_MEMORY", shared / "none")
    with pytest.raises(EngineError, match=r"there is no .*none; set rollouts.weights"):
        WeightFolder(None, "sums")


def test_the_default_is_a_folder_of_this_user(shared, monkeypatch):
    own = shared / f"jaxmem-{os.getuid()}"
    (shared / "elsewhere").mkdir()
    own.symlink_to(shared / "elsewhere")
    with pytest.raises(EngineError, match="is not a directory of this user; set"):
        WeightFolder(None, "sums", LOCAL)
    own.unlink()
    uid = os.getuid()
    monkeypatch.setattr(weight_folder.os, "getuid", lambda: uid + 1)
    (shared / f"jaxmem-{uid + 1}").mkdir()
    with pytest.raises(EngineError, match="is not a directory of this user; set"):
        WeightFolder(None, "sums", LOCAL)


def test_the_default_removes_what_killed_runs_left(shared):
    own = shared / f"jaxmem-{os.getuid()}"
    (own / "killed" / "v000003").mkdir(parents=True)
    (own / "foreign").mkdir()
    (shared / "elsewhere" / "v000001").mkdir(parents=True)
    (own / "link").symlink_to(shared / "elsewhere")
    running = WeightFolder(own, "running")
    running.directory(1).mkdir()
    said = []
    folder = WeightFolder(None, "sums", LOCAL, said.append)
    left = sorted(path.name for path in own.iterdir())
    assert left == ["foreign", "link", "running", "sums"]
    assert (shared / "elsewhere" / "v000001").is_dir()
    assert running.directory(1).is_dir()
    assert said == [f"rollouts.weights: removed {own / 'killed'} of a killed run"]
    folder.clear()
    running.clear()
