"""The files with a run's steps, on disks that are full and after losses of power."""

import json
import struct

import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from jaxmem.train.metrics import PolicyMetrics, StepMetrics
from jaxmem.train.output import history
from jaxmem.train.output.history import MetricsWriter, read_history
from tests.helpers.adding import step_metrics
from tests.helpers.files import no_file_above


def write(out_dir, done, steps):
    with MetricsWriter(out_dir, done) as writer:
        for step in steps:
            writer.write(step_metrics(step, loss=step + done / 10))
    return writer.path


def test_history_keeps_every_bit_of_the_loss(tmp_path):
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
        **dict.fromkeys(("mfu", "backend", "gradient_samples", "routers")),
        **dict.fromkeys(("held_out_loss", "held_out_perplexity", "forward_error")),
    }
    assert read_history(writer.path) == [step_metrics(1, loss)]


def test_resume_drops_later_steps(tmp_path):
    write(tmp_path, 0, range(1, 8))
    path = write(tmp_path, 4, range(5, 7))
    history = read_history(path)
    assert [s.step for s in history] == [1, 2, 3, 4, 5, 6]
    assert history[4].loss == 5.4  # the second process's


def test_new_run_moves_history_and_ignores_cut_line(tmp_path, capsys):
    path = write(tmp_path, 0, range(1, 4))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [s.step for s in read_history(write(tmp_path, 3, []))] == [1, 2, 3]
    assert read_history(write(tmp_path, 0, [])) == []
    (old,) = tmp_path.glob("metrics.jsonl.*")
    assert [s.step for s in read_history(old)] == [1, 2, 3]
    write(tmp_path, 0, [1])
    capsys.readouterr()
    write(tmp_path, 0, [1])
    moved = tmp_path / "metrics.jsonl.2"
    messages = capsys.readouterr().out
    assert messages == f"steps of a run without checkpoints are now in {moved}\n"
    assert [s.step for s in read_history(moved)] == [1]


def test_tensorboard_gets_every_step(tmp_path):
    write(tmp_path, 0, [1, 2])
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    for name in (b"loss", b"tokens_per_second", b"grad_norm", b"learning_rate"):
        assert content.count(name) >= 2


# -------------------------------------------------------- disks and power


def test_steps_wait_for_full_disk(tmp_path):
    messages = []
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(tmp_path, 0, messages.append, retry_every=4) as writer:
        writer.write(step_metrics(1))
        size = path.stat().st_size
        with no_file_above(2 * size + 9):
            for step in range(2, 7):
                writer.write(step_metrics(step))
            assert [s.step for s in read_history(path)] == [1, 2]
            unwritten = writer.unwritten
            history = read_history(path, StepMetrics, unwritten)
            assert [s.step for s in history] == [1, 2, 3, 4, 5, 6]
        assert (
            len(messages) == 1 and "cannot be written: File too large (" in messages[0]
        )
        writer.write(step_metrics(7))
        assert len(read_history(path)) == 2  # not before the eighth
        writer.write(step_metrics(8))
        assert [s.step for s in read_history(path)] == list(range(1, 9))
    assert messages[1:] == [
        "metrics can be written again; the metrics kept in memory are written"
    ]
    assert steps_on_the_board(tmp_path) == list(range(1, 9))


def test_unwritten_steps_are_counted_at_the_end(tmp_path):
    messages = []
    (tmp_path / "tensorboard").touch()  # no folder
    with no_file_above(9), MetricsWriter(tmp_path, 0, messages.append) as writer:
        for step in (1, 2):
            writer.write(step_metrics(step))
    assert "metrics.jsonl: cannot be written: File too large (" in messages[0]
    assert messages[1:] == [
        f"{tmp_path}/metrics.jsonl: 2 records could not be written",
        f"{writer._events.path}: 2 records could not be written",
    ]
    path = tmp_path / "metrics.jsonl"
    assert len(read_history(path, StepMetrics, writer.unwritten)) == 2


def scalars_on_the_board(out_dir):
    """Summaries in all event files, whose checksums are right, with their steps."""
    for path in sorted((out_dir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            parts = content[:8], content[12 : 12 + length]
            crcs = content[8:12], content[12 + length : 16 + length]
            for part, crc in zip(parts, crcs, strict=True):
                assert struct.unpack("<I", crc) == (masked_crc32c(part),)
            event = Event.FromString(parts[1])
            if event.summary.value:
                yield event.step, event.summary.value
            content = content[16 + length :]


def steps_on_the_board(out_dir):
    return [step for step, _ in scalars_on_the_board(out_dir)]


def test_tensorboard_drops_steps_taken_again(tmp_path):
    write(tmp_path, 0, [1, 2, 3])
    write(tmp_path, 2, [])  # nothing to do: no file
    write(tmp_path, 2, [3, 4])
    assert steps_on_the_board(tmp_path) == [1, 2, 3, 3, 4]
    _, second = sorted((tmp_path / "tensorboard").iterdir())
    starts = Event(step=3, session_log=SessionLog(status=SessionLog.START))
    assert starts.session_log.SerializeToString() in second.read_bytes()


def test_group_may_lack_a_number(tmp_path):
    """As the mean of a reward function that gave no reward in a step."""
    step = step_metrics(1)._replace(routers={"load": 2.0, "load_worst": None})
    with MetricsWriter(tmp_path, 0, lambda _: None) as writer:
        writer.write(step)
    ((number, scalars),) = scalars_on_the_board(tmp_path)
    named = {scalar.tag: scalar.simple_value for scalar in scalars}
    assert number == 1 and named["routers/load"] == 2
    assert "routers/load_worst" not in named  # which a board would show as 0
    assert read_history(tmp_path / "metrics.jsonl", StepMetrics) == [step]


LINES = [b'{"step": %d}\n' % i for i in range(1, 6)]


@pytest.mark.parametrize(
    "damage, kept, messages",
    [
        (lambda x: x, 4, []),
        (lambda x: x[:-5], 4, ["removed 1 damaged line(s)"]),
        (lambda x: x[:40] + bytes(30), 3,
         ["removed 1 damaged", "1 of 4 steps are missing (the first is step 4)"]),
        (lambda x: x[:24] + bytes(9) + x[24:], 4, []),  # zeros before a line
        (lambda x: x.replace(b'{"step": 2}', b'{"st\xff\xfe'), 3,
         ["removed 1 ", "missing (the first is step 2)"]),
        (lambda x: x.replace(b'{"step": 2}', b"[[2]]"), 3,
         ["removed 1 ", "missing (the first is step 2)"]),
        (lambda x: b"", 0, ["4 of 4 steps are missing (the first is step 1)"]),
    ],
)  # fmt: skip
def test_damaged_lines_cut_and_missing_steps_named(damage, kept, messages, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(damage(b"".join(LINES)))
    lines = history.repair(path, 4)
    assert len(path.read_bytes().splitlines()) == kept
    assert set(path.read_bytes().splitlines(True)) <= set(LINES[:4])
    assert len(lines) == len(messages)
    for line, part in zip(lines, messages, strict=True):
        assert line.startswith(str(path)) and part in line


def test_line_of_another_job_is_named(tmp_path):
    path = write(tmp_path, 0, [1, 2])
    with pytest.raises(ValueError, match="metrics.jsonl:1: not a line of this version"):
        read_history(path, PolicyMetrics)


def test_lines_of_a_run_from_before_a_field(tmp_path):
    old = {k: v for k, v in step_metrics(1)._asdict().items() if k != "mfu"}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(old) + "\n")
    assert read_history(path) == [step_metrics(1)]


@pytest.mark.parametrize("wrong", [None, "x", [], {}, True])
def test_value_of_another_type_is_no_step(wrong, tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(step_metrics(1)._asdict() | {"loss": wrong}) + "\n"
    path.write_text(line)
    with pytest.raises(ValueError, match="metrics.jsonl:1: not a line of this version"):
        read_history(path)
