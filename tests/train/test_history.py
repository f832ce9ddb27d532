"""The files with a run's steps, on disks that are full and after losses of power."""

import json

import jax.numpy as jnp
import pytest

from jaxmem.train.history import MetricsWriter, read_history
from tests.train.test_metrics import step_metrics


def write(out_dir, done, steps):
    with MetricsWriter(out_dir, done) as writer:
        for step in steps:
            writer.write(step_metrics(step, loss=step + done / 10))
    return writer.path


def test_one_json_object_a_step_and_every_bit_of_the_loss(tmp_path):
    loss = float(jnp.float32(1) / 3)
    with MetricsWriter(tmp_path, 0) as writer:
        writer.write(step_metrics(1, loss))
    (line,) = writer.path.read_text().splitlines()
    assert json.loads(line) == {
        "step": 1,
        "loss": loss,
        "tokens": 64,
        "tokens_per_second": 100.0,
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "seconds": 0.64,
    }
    assert read_history(writer.path) == [step_metrics(1, loss)]


def test_resuming_drops_what_comes_after_the_restored_step(tmp_path):
    write(tmp_path, 0, range(1, 8))
    path = write(tmp_path, 4, range(5, 7))
    history = read_history(path)
    assert [s.step for s in history] == [1, 2, 3, 4, 5, 6]
    assert history[4].loss == 5.4  # the second process's


def test_a_new_run_moves_what_was_there_and_a_line_cut_short_is_no_step(
    tmp_path, capsys
):
    path = write(tmp_path, 0, range(1, 4))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [s.step for s in read_history(write(tmp_path, 3, []))] == [1, 2, 3]
    with pytest.raises(ValueError, match="metrics.jsonl holds no step"):
        read_history(write(tmp_path, 0, []))
    (old,) = tmp_path.glob("metrics.jsonl.*")
    assert [s.step for s in read_history(old)] == [1, 2, 3]
    write(tmp_path, 0, [1])
    capsys.readouterr()
    write(tmp_path, 0, [1])
    moved = tmp_path / "metrics.jsonl.2"
    said = capsys.readouterr().out
    assert said == f"steps of a run without checkpoints are now in {moved}\n"
    assert [s.step for s in read_history(moved)] == [1]


def test_tensorboard_gets_every_step(tmp_path):
    write(tmp_path, 0, [1, 2])
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    for name in (b"loss", b"tokens_per_second", b"grad_norm", b"learning_rate"):
        assert content.count(name) >= 2
