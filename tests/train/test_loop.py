"""Runs whose steps cost nothing: what they leave, whatever stops or damages them."""

import functools
import io
import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxmem.train import checksums, loop, metrics
from jaxmem.train.checkpoint import CheckpointError
from jaxmem.train.history import read_history
from jaxmem.train.locks import Busy
from jaxmem.train.loop import RunConfig, Settings
from jaxmem.train.program import TrainState
from tests.cases import slow
from tests.train.test_files import no_file_above
from tests.train.test_metrics import step_metrics

FIXED = {"data": {"source": "a.txt"}}
FREE = {"optimizer": {"learning_rate": 0.1}}


class Adding:
    """A step adds its number; the data counts the steps."""

    def __init__(self, before=lambda number: None):
        self._before, self.position = before, 0

    def initial_state(self):
        return TrainState({"w": jnp.zeros((50, 40))}, jnp.int32(0))

    def restored_state(self, checkpoints, step):
        return checkpoints.restore(step, jax.eval_shape(self.initial_state))

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]

    def step(self, number, state):
        self._before(number)
        self.position += 1
        params = jax.tree.map(lambda x: x + number, state.params)
        return TrainState(params, state.optimizer + 1), step_metrics(number)


class Ran:
    """What became of a run."""

    def __init__(self, out_dir, console):
        self.out_dir, self._console = out_dir, console
        self.state = self.error = None

    @property
    def said(self):
        return self._console.file.getvalue()

    @property
    def checkpoints(self):
        folder = self.out_dir / "checkpoints"
        return sorted(p.name for p in folder.iterdir()) if folder.exists() else []

    @property
    def steps(self):
        return [s.step for s in read_history(self.out_dir / "metrics.jsonl")]


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_in, tmp_path / "run")


def run_in(out_dir, steps=6, job=None, fixed=FIXED, free=FREE, backend=None, **fields):
    console = Console(file=io.StringIO(), width=200)
    config = RunConfig(
        steps=steps,
        out_dir=str(out_dir),
        **dict(checkpoint_every=2, log_every=2) | fields,
    )
    ran = Ran(out_dir, console)
    free = {**free, "run": {"steps": steps}}
    try:
        with loop.open_run(config, Settings(fixed, free), console) as opened:
            if backend is not None:
                opened.use_backend(*backend)
            ran.state = opened.take_steps(job or Adding(), {"text.txt": "hello"})
            ran.history = opened.history(metrics.StepMetrics)
    except (ValueError, OSError, KeyboardInterrupt, SystemExit) as error:
        ran.error = error
    if ran.state is not None:
        expected = steps * (steps + 1) / 2
        np.testing.assert_array_equal(ran.state.params["w"], expected)
        assert ran.steps == list(range(1, steps + 1)) == [s.step for s in ran.history]
    assert isinstance(ran.error, Busy) or not (out_dir / "lock").exists()
    return ran


def at(step, action, *arguments):
    return Adding(lambda number: action(*arguments) if number == step else None)


# ------------------------------------------------------------------ backend


def test_another_backend_than_the_saved_one_must_be_named(run):
    run(steps=2, backend=("xla", None))
    ran = run(steps=4, backend=("hopper", None))
    assert str(ran.error) == (
        f"head.backend was 'xla' in run.out_dir={str(ran.out_dir)!r}, and 'hopper', "
        "which rounds otherwise, is the fastest here: set head.backend='xla' to go on "
        "as before, or 'hopper' to change it"
    )
    ran = run(steps=4, backend=("hopper", "hopper"))
    assert ran.error is None and "head.backend was 'xla', is 'hopper'" in ran.said
    ran = run(steps=4, backend=("xla", None))  # nothing is left to do
    assert ran.error is None and "head.backend" not in ran.said
    ran = run(steps=6, backend=("xla", None))
    assert "head.backend was 'hopper' in" in str(ran.error)
    ran = run(steps=6, backend=("hopper", None))
    assert ran.error is None and "head.backend" not in ran.said


def test_a_run_from_before_backends_were_saved_resumes(run):
    run(steps=2)
    assert run(steps=4, backend=("hopper", None)).error is None
    assert "head.backend was 'hopper'" in str(run(backend=("xla", None)).error)


# ------------------------------------------------------------------ signals


def test_a_signal_that_arrives_while_processes_agree_is_kept(run, monkeypatch):
    calls = []

    def largest(value):  # a collective, whose operand has been read
        calls.append(value)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    monkeypatch.setattr(loop.processes, "largest", largest)
    ran = run()
    assert isinstance(ran.error, SystemExit) and ran.error.code == 143
    assert ran.steps == [1, 2, 3] and calls == [0, 0, 0, signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_costs_no_step(number, run):
    ran = run(job=at(3, signal.raise_signal, number))
    if number == signal.SIGTERM:
        assert isinstance(ran.error, SystemExit) and ran.error.code == 143
    else:
        assert isinstance(ran.error, KeyboardInterrupt)
    assert ran.checkpoints == ["2", "3"] and ran.steps == [1, 2, 3]
    assert ran.said.splitlines()[-1] == (
        f"stopped by {signal.Signals(number).name} after step 3 of 6, which is saved: "
        f"the same command resumes {ran.out_dir}"
    )
    again = run()
    assert f"resuming {ran.out_dir} after step 3\n" in again.said
    assert again.error is None and again.checkpoints == ["4", "6"]


def test_a_signal_in_a_step_that_is_saved_anyway_saves_it_once(run):
    ran = run(job=at(4, signal.raise_signal, signal.SIGTERM))
    assert ran.checkpoints == ["2", "4"] and "after step 4 of 6, which" in ran.said


def test_without_checkpoints_it_is_said_that_nothing_could_be_saved(run):
    ran = run(job=at(3, signal.raise_signal, signal.SIGTERM), checkpoint_every=None)
    assert ran.error.code == 143 and ran.checkpoints == [] and ran.steps == [1, 2, 3]
    assert ran.said.endswith(
        "stopped by SIGTERM after step 3 of 6, which run.checkpoint_every=None does "
        "not let us save; the same command starts from the beginning\n"
    )


@pytest.mark.parametrize("when", ["opening", "first state"])
def test_a_signal_before_the_first_step_ends_the_run(when, run, monkeypatch):
    job = Adding()
    if when == "opening":
        stop = functools.partial(signal.raise_signal, signal.SIGTERM)
        monkeypatch.setattr(loop, "set_aside_damaged", lambda _: stop())
    else:
        job.initial_state = lambda: signal.raise_signal(signal.SIGTERM)
    ran = run(job=job)
    assert ran.error.code == 143
    assert ran.said == "stopped by SIGTERM before the first step\n"
    assert not ran.out_dir.exists()


def test_a_run_in_another_thread_is_a_run(run):
    ran = []
    thread = threading.Thread(target=lambda: ran.append(run()))
    thread.start()
    thread.join()
    assert ran[0].error is None and ran[0].checkpoints == ["4", "6"]


# ------------------------------------------------------------- full disks


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_last_one_resumes(run):
    limit = no_file_above(300)

    def fill():
        limit.__enter__()

    try:
        ran = run(job=at(3, fill))
    finally:
        limit.__exit__(None, None, None)
    path = ran.out_dir / "checkpoints" / "4"
    assert isinstance(ran.error, CheckpointError)
    said = str(ran.error)
    assert said.startswith(f"{path}: cannot be written: File too large (")
    assert said.endswith(
        " bytes free); the checkpoint needs about 8,004; free some space; the same "
        "command resumes the run after step 2"
    )
    assert ran.checkpoints == ["2"]
    again = run()
    assert again.error is None and "after step 2" in again.said


def test_steps_are_taken_where_no_metrics_can_be_written(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("nowhere/metrics.jsonl")

    def repair():
        (tmp_path / "run" / "nowhere").mkdir()

    ran = run(job=at(5, repair), checkpoint_every=None)
    assert ran.error is None
    assert ran.said.count("cannot be written") == 1
    assert "metrics can be written again" in ran.said


def test_a_console_that_takes_nothing_stops_no_run(tmp_path):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    config = RunConfig(steps=2, out_dir=str(tmp_path), checkpoint_every=None)
    console = Console(file=Full())
    with loop.open_run(config, Settings({}, {}), console) as opened:
        opened.take_steps(Adding(), {})
    assert len(read_history(tmp_path / "metrics.jsonl")) == 2


# ------------------------------------------------------- one run at a time


def test_a_second_run_in_the_directory_touches_nothing(run):
    others = []

    def second():
        files = sorted(path.rglob("*"))
        others.append(run(checkpoint_every=1))
        assert sorted(path.rglob("*")) == files

    path = run.args[0]
    ran = run(job=at(3, second))
    assert ran.error is None
    assert f"is in use by another process (host {os.uname().nodename}, pid" in str(
        others[0].error
    )


def test_a_run_that_fails_before_its_first_step_leaves_no_folder(run):
    job = Adding()
    job.initial_state = lambda: {}["absent"]
    with pytest.raises(KeyError):
        run(job=job)
    assert not run.args[0].exists()


# ---------------------------------------------------- damaged directories


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(step):
    return max(
        (p for p in (step / "state").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )


def remove(path):
    for child in path.iterdir() if path.is_dir() else ():
        remove(child)
    path.rmdir() if path.is_dir() else path.unlink()


def emptied(step):
    for child in step.iterdir():
        remove(child)


DAMAGES = {
    "an empty folder": (emptied, "config and data and state missing"),
    "no data": (lambda step: remove(step / "data"), "data missing"),
    "no state": (lambda step: remove(step / "state"), "state missing"),
    "no array": (lambda step: largest(step).unlink(), "is missing"),
    "a flipped byte": (lambda step: flip(largest(step)), "differs from its checksum"),
    "cut short": (lambda step: os.truncate(largest(step), 9), "differs from its check"),
    "bad JSON": (
        lambda step: (step / "data" / "metadata").write_text("{"),
        "data/metadata differs from its checksum",
    ),
    "zeros": (
        lambda step: (step / "config" / "metadata").write_bytes(bytes(30)),
        "config/metadata differs from its checksum",
    ),
    "bad checksums": (
        lambda step: os.truncate(step / checksums.NAME, 70),
        "SHA256SUMS cannot be read",
    ),
}


# A later test damages every byte of every file.
QUICK = "an empty folder", "no array", "a flipped byte", "bad checksums"


@pytest.mark.parametrize("damage", [x if x in QUICK else slow(x) for x in DAMAGES])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(damage, run):
    run(steps=4)
    action, fault = DAMAGES[damage]
    path = run.args[0] / "checkpoints" / "4"
    action(path)
    left = sorted(p.name for p in path.iterdir())
    again = run()
    assert again.error is None
    first, second = again.said.splitlines()[:2]
    assert first.startswith(f"checkpoint {path} cannot be read (") and fault in first
    assert first.endswith("); it is renamed to 4.damaged")
    assert second.startswith(f"resuming {run.args[0]} after step 2;")
    assert again.checkpoints == ["4", "4.damaged", "6"]
    assert sorted(p.name for p in path.with_name("4.damaged").iterdir()) == left


def test_every_byte_of_a_checkpoint_is_verified(run):
    run(steps=2)
    step = run.args[0] / "checkpoints" / "2"
    for path in [p for p in step.rglob("*") if p.is_file()]:
        flip(path)
        assert checksums.find_fault(step), path
        flip(path)
    assert checksums.find_fault(step) is None


def test_without_one_good_checkpoint_nothing_is_touched(run):
    run(steps=4)
    for step in "24":
        flip(largest(run.args[0] / "checkpoints" / step))
    for _ in range(2):
        again = run()
        assert isinstance(again.error, CheckpointError)
        said = str(again.error)
        assert said.startswith(
            f"{run.args[0]}/checkpoints: none of the checkpoints can be read: 4 (state/"
        )
        assert said.endswith("restore one from a copy, or name another run.out_dir to "
                             "start anew")  # fmt: skip
        assert "\n" not in said and again.checkpoints == ["2", "4"]


def test_a_checkpoint_without_checksums_is_read_and_named(run):
    run(steps=4)
    path = run.args[0] / "checkpoints" / "4"
    (path / checksums.NAME).unlink()
    again = run()
    assert again.error is None and again.said.startswith(
        f"checkpoint {path} has no checksums and is not verified\n"
    )
    path = run.args[0] / "checkpoints" / "6"
    (path / checksums.NAME).unlink()
    (path / "state" / "_METADATA").write_text("{")
    again = run(steps=8)
    assert isinstance(again.error, CheckpointError)
    said = str(again.error)
    assert said.startswith(f"checkpoint {path} cannot be read (") and "\n" not in said
    assert "move it to another directory to resume from an older one" in said


def test_lost_metrics_are_named(run):
    ran = run(steps=4)
    (ran.out_dir / "metrics.jsonl").unlink()
    console = Console(file=io.StringIO(), width=200)
    config = RunConfig(steps=6, out_dir=str(ran.out_dir), checkpoint_every=2)
    with loop.open_run(config, Settings(FIXED, FREE), console) as opened:
        opened.take_steps(Adding(), {})
    assert (
        "metrics.jsonl: the metrics of 4 of 4 steps are missing (the first is step 1)"
    ) in console.file.getvalue()
    assert ran.steps == [5, 6]


# -------------------------------------------------------- other settings


def test_a_resumed_run_says_what_is_another_setting(run):
    run(steps=4)
    free = {"optimizer": {"learning_rate": 0.2, "new": 1}}
    again = run(free=free)
    assert again.error is None and again.said.startswith(
        f"resuming {run.args[0]} after step 4; optimizer.learning_rate was 0.1, is "
        "0.2; run.steps was 4, is 6\n"
    )


def test_a_finished_run_refuses_what_has_no_effect(run):
    ran = run(steps=4)
    before = (ran.out_dir / "metrics.jsonl").read_bytes()
    fewer = run(steps=3)
    assert str(fewer.error) == (
        f"run.steps=3 is below the 4 steps that run.out_dir='{ran.out_dir}' has done; "
        "raise it, or name another run.out_dir"
    )
    other = run(steps=4, free={"optimizer": {"learning_rate": 0.2}})
    assert str(other.error) == (
        f"run.out_dir='{ran.out_dir}' has done its 4 steps, so other settings have no "
        "effect: optimizer.learning_rate was 0.1, is 0.2. Restore the old values, "
        "raise run.steps, or name another run.out_dir"
    )
    assert run(steps=4).error is None
    assert (ran.out_dir / "metrics.jsonl").read_bytes() == before
    assert len(list((ran.out_dir / "tensorboard").iterdir())) == 1
    assert json.loads(before.splitlines()[-1])["step"] == 4


# --------------------------------------------------------- numbers read late


class Dispatching(Adding):
    """The same steps, whose numbers are read when they are asked for."""

    step = None  # the loop must not need it

    def __init__(self, *before, broken=None):
        super().__init__(*before)
        self._broken, self.log = broken, []

    def evaluate(self, state, taken):
        return None

    def dispatch(self, number, state):
        state, taken = Adding.step(self, number, state)
        self.log.append(f"start {number}")

        def read():
            self.log.append(f"read {number}")
            return taken._replace(loss=np.nan) if number == self._broken else taken

        return state, read


def test_a_step_starts_before_the_numbers_of_the_last_one_are_read(run):
    job = Dispatching()
    assert run(steps=5, job=job, checkpoint_every=4).error is None
    assert job.log == [
        "start 1", "start 2", "read 1", "start 3", "read 2", "start 4", "read 3",
        "read 4",  # before its checkpoint
        "start 5", "read 5",
    ]  # fmt: skip


def test_without_checkpoints_the_last_numbers_are_read_too(run):
    job = Dispatching()
    assert run(steps=3, job=job, checkpoint_every=None).steps == [1, 2, 3]
    assert job.log[-1] == "read 3"


def test_a_signal_while_numbers_are_unread_loses_none(run):
    def before(number):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)

    ran = run(steps=6, job=Dispatching(before), checkpoint_every=5)
    assert isinstance(ran.error, SystemExit) and ran.steps == [1, 2, 3]
    assert ran.checkpoints == ["3"]
    assert run(steps=6, job=Dispatching(), checkpoint_every=5).error is None


def test_a_step_that_cannot_start_loses_no_numbers_of_the_last(run):
    def before(number):
        if number == 4:
            raise OSError("no more data")

    ran = run(steps=6, job=Dispatching(before), checkpoint_every=5)
    assert "no more data" in str(ran.error) and ran.steps == [1, 2, 3]


@pytest.mark.parametrize("broken", [3, 4])
def test_a_loss_that_is_read_late_and_is_not_finite_saves_nothing_more(broken, run):
    with pytest.raises(FloatingPointError, match=f"loss of step {broken} is nan"):
        run(steps=6, job=Dispatching(broken=broken))
    ran = run(steps=6, job=Dispatching())
    assert ran.error is None and "resuming" in ran.said and "after step 2" in ran.said
