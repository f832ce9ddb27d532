"""The folder of weight versions."""

import pytest

from jaxmem.base import locks
from jaxmem.train.jobs.rollout.engines import EngineError, WeightFolder, weight_folder


def names(folder):
    return sorted(p.name for p in folder.path.iterdir() if p.name != "lock")


def test_keep_leaves_two_versions(tmp_path):
    folder = WeightFolder(tmp_path, "runs/sums 1")
    assert folder.path == tmp_path / "runs-sums-1"
    for version in (5, 6, 7):
        folder.keep(version)
        folder.directory(version).mkdir()
    assert names(folder) == ["v000006", "v000007"]
    assert folder.directory(1_234_567).name == "v1234567"


def test_a_folder_removes_what_a_killed_run_left(tmp_path):
    left = tmp_path / "sums"
    (left / "v000003").mkdir(parents=True)
    (left / "v000003" / "w").touch()
    (left / "notes").touch()
    assert names(WeightFolder(tmp_path, "sums")) == ["notes"]


def test_clear_removes_all_that_is_its_own(tmp_path):
    folder = WeightFolder(tmp_path, "sums")
    folder.directory(1).mkdir()
    folder.clear()
    assert not [*tmp_path.iterdir()]


def test_two_runs_do_not_share_a_folder(tmp_path):
    first = WeightFolder(tmp_path, "sums")
    with pytest.raises(locks.Busy, match=r"rollouts.weights: .*sums is in use"):
        WeightFolder(tmp_path, "sums")
    first.clear()


def test_the_default_is_shared_memory_of_this_host(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_folder, "_SHARED_MEMORY", tmp_path)
    folder = WeightFolder(None, "sums", ["http://localhost:1", "http://127.0.0.1:2"])
    assert folder.path == tmp_path / "jaxmem-sums"
    with pytest.raises(EngineError, match="http://gpu7:1 is not on this host; set"):
        WeightFolder(None, "sums", ["http://localhost:1", "http://gpu7:1"])
    monkeypatch.setattr(weight_folder, "_SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(EngineError, match=r"there is no .*none; set rollouts.weights"):
        WeightFolder(None, "sums")
