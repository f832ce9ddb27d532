"""The script of faults counts lost steps, arrays and files; without its processes."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.faults.jobs import Directory, Lines, Training, arrays_of


@pytest.fixture
def training(tmp_path):
    """A job, whose undisturbed run is there."""
    job = Training("sft", (), tmp_path, "run.out_dir={}", "{}/metrics.jsonl", lines=3)
    write(tmp_path / "whole")
    vars(job)["_whole"] = job.results("whole")
    return job


def write(run, losses=(3.0, 2.0, 1.0), weights=None):
    (run / "model").mkdir(parents=True)
    lines = [{"loss": x, "seconds": np.random.rand()} for x in losses]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    weights = np.arange(6, dtype=np.float32) if weights is None else weights
    arrays = {"a": weights, "b": np.zeros((2, 2), np.float16)}
    save_file(arrays, run / "model" / "model.safetensors")


def test_steps_and_arrays_that_differ_are_lost(training, tmp_path):
    write(tmp_path / "same")
    assert training.lost("same") == 0 and not training.is_half("same")
    write(tmp_path / "step", losses=(3.0, 2.5, 1.0))
    write(tmp_path / "fewer", losses=(3.0, 2.0))
    assert training.lost("step") == training.lost("fewer") == 1
    bits = np.nextafter(np.arange(6, dtype=np.float32), 9, dtype=np.float32)
    write(tmp_path / "array", weights=bits)
    assert training.lost("array") == 1 and training.is_half("array")
    (tmp_path / "none").mkdir()
    assert training.lost("none") == 5 and not training.is_half("none")


def test_arrays_of_file_differ_by_type_and_shape(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(4, np.float32), "b": np.zeros((2, 2), np.float32)}, path)
    arrays = arrays_of(path)
    assert arrays["a"][:2] == ("F32", 4) and arrays["b"][:3] == ("F32", 2, 2)
    assert arrays["a"][-1] == arrays["b"][-1]


def test_incomplete_output_is_half(tmp_path):
    lines = Lines("score", (), tmp_path, "--out {}.jsonl", "{}.jsonl.unfinished")
    directory = Directory("export", (), tmp_path, "--out {}", "{}")
    (tmp_path / "whole.jsonl").write_text("1\n2\n")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text("{}")
    for job in (lines, directory):
        vars(job)["_whole"] = job.results("whole")
        assert not job.is_half("cut")
    (tmp_path / "cut.jsonl").write_text("1\n")
    (tmp_path / "cut").mkdir()
    assert lines.is_half("cut") and directory.is_half("cut")
    assert lines.lost("cut") == directory.lost("cut") == 1
    (tmp_path / "cut" / "config.json").write_text("{}")
    assert directory.lost("cut") == 0
