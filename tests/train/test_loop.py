"""Runs whose steps cost nothing: what they leave, whatever stops or damages them."""

import contextlib
import functools
import io
import json
import os
import pathlib
import shutil
import signal
import threading

import numpy as np
import pytest
from rich.console import Console

from jaxmem.base import checksums
from jaxmem.train import loop
from jaxmem.train.evaluation import EvalConfig, Evaluated
from jaxmem.train.output.history import read_history
from jaxmem.train.settings import RunConfig, Settings
from jaxmem.train.state import checkpoint, resuming
from jaxmem.train.state.checkpoint import RunCheckpointError
from tests.helpers.adding import FIXED, FREE, Adding, run_in
from tests.helpers.cases import full, slow
from tests.helpers.damages import DAMAGES, flip, largest
from tests.helpers.files import no_file_above


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_in, tmp_path / "run")


def at(step, action, *arguments):
    return Adding(lambda number: action(*arguments) if number == step else None)


# ------------------------------------------------------------- the user's code


@pytest.mark.parametrize("steps", [2, 4])
def test_changed_code_is_noted(steps, run):
    def digests(one):
        return {**FREE, resuming.CODE: {"own.py:f": one * 64, "m:g": "0" * 64}}

    run(steps=2, free=digests("a"))
    ran = run(steps=steps, free=digests("b"))
    changed = "own.py has changed (SHA-256 aaaaaaaaaaaa…, is bbbbbbbbbbbb…)"
    assert ran.error is None and changed in ran.said.replace("\n", "")
    again = run(steps=6, free=digests("b" if steps == 4 else "a"))  # as saved
    assert "has changed" not in again.said


# ------------------------------------------------------------------ backend


def test_other_backend_than_saved_must_be_named(run):
    run(steps=2, backend=("xla", None))
    ran = run(steps=4, backend=("hopper", None))
    assert str(ran.error) == (
        f"head.implementation was 'xla' in run.out_dir={str(ran.out_dir)!r}, but "
        "'hopper', which rounds differently, is the fastest here: set "
        "head.implementation='xla' to go on as before, or 'hopper' to change it"
    )
    ran = run(steps=4, backend=("hopper", "hopper"))
    assert (
        ran.error is None and "head.implementation was 'xla', is 'hopper'" in ran.said
    )
    ran = run(steps=4, backend=("xla", None))  # nothing is left to do
    assert ran.error is None and "head.implementation" not in ran.said
    ran = run(steps=6, backend=("xla", None))
    assert "head.implementation was 'hopper' in" in str(ran.error)
    ran = run(steps=6, backend=("hopper", None))
    assert ran.error is None and "head.implementation" not in ran.said


def test_run_from_before_backends_were_saved_resumes(run):
    run(steps=2)
    assert run(steps=4, backend=("hopper", None)).error is None
    assert "head.implementation was 'hopper'" in str(run(backend=("xla", None)).error)


# ------------------------------------------------------------------ signals


def test_signal_during_agreement_is_kept(run, monkeypatch):
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
def test_signal_costs_no_step(number, run):
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
    assert f"resuming {ran.out_dir} at step 3 of 6 {RESTORED}\n" in again.said
    assert again.error is None and again.checkpoints == ["4", "6"]


def test_signal_in_saved_step_saves_once(run):
    ran = run(job=at(4, signal.raise_signal, signal.SIGTERM))
    assert ran.checkpoints == ["2", "4"] and "after step 4 of 6, which" in ran.said


def test_stop_without_checkpoints_says_nothing_saved(run):
    ran = run(job=at(3, signal.raise_signal, signal.SIGTERM), checkpoint_every=None)
    assert ran.error.code == 143 and ran.checkpoints == [] and ran.steps == [1, 2, 3]
    assert ran.said.endswith(
        "stopped by SIGTERM after step 3 of 6, which is not saved because of "
        "run.checkpoint_every=None; the same command starts from the beginning\n"
    )


OPENING = {
    "claiming": (loop.ownership.RunDirectory, "claimed"),
    "setting aside": (loop, "set_aside_damaged"),
    "storage": (loop.Checkpoints, "check_storage"),
}


@pytest.mark.parametrize("when", [*OPENING, "first state"])
def test_signal_before_the_first_step_ends_the_run(when, run, monkeypatch):
    job, ended = Adding(), []

    def stop(*_):
        signal.raise_signal(signal.SIGTERM)
        ended.append(when)

    if when in OPENING:
        monkeypatch.setattr(*OPENING[when], stop)
    else:
        job.initial_state = stop
    ran = run(job=job)
    assert ended == (["storage"] if when == "storage" else [])  # orbax is not cut short
    assert ran.error.code == 143
    lines = [f"new run in {ran.out_dir}"] if when == "first state" else []
    assert ran.said.splitlines() == [*lines, "stopped by SIGTERM before the first step"]
    assert not ran.out_dir.exists()


def test_run_in_another_thread(run):
    ran = []
    thread = threading.Thread(target=lambda: ran.append(run()))
    thread.start()
    thread.join()
    assert ran[0].error is None and ran[0].checkpoints == ["4", "6"]


# ------------------------------------------------------------- full disks


def test_failed_save_is_named_and_last_one_resumes(run, capfd):
    limit = no_file_above(300)

    def fill():
        limit.__enter__()

    try:
        ran = run(job=at(3, fill))
    finally:
        limit.__exit__(None, None, None)
    path = ran.out_dir / "checkpoints" / "4"
    assert isinstance(ran.error, RunCheckpointError)
    said = str(ran.error)
    assert said.startswith(f"{path}: cannot be written: File too large (")
    assert said.endswith(
        " bytes free); the checkpoint needs about 8,004; free some space; the same "
        "command resumes the run after step 2"
    )
    assert ran.checkpoints == ["2"]
    again = run()
    assert again.error is None and "at step 2 of" in again.said
    assert capfd.readouterr().err == ""  # of threads and tasks of orbax


def test_steps_go_on_without_writable_metrics(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("")

    def repair():
        (tmp_path / "run" / "tensorboard").unlink()

    ran = run(job=at(5, repair), checkpoint_every=None)
    assert ran.error is None
    assert ran.said.count("cannot be written") == 1
    assert "metrics can be written again" in ran.said


def test_console_that_takes_nothing_stops_no_run(tmp_path):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    config = RunConfig(steps=2, out_dir=str(tmp_path), checkpoint_every=None)
    console = Console(file=Full())
    with loop.open_run(config, Settings({}, {}), console) as opened:
        opened.take_steps(Adding(), {})
    assert len(read_history(tmp_path / "metrics.jsonl")) == 2


# ------------------------------------------------------- one run at a time


def test_second_run_in_the_directory_touches_nothing(run):
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


def test_failure_before_first_step_leaves_no_folder(run):
    job = Adding()
    job.initial_state = lambda: {}["absent"]
    with pytest.raises(KeyError):
        run(job=job)
    assert not run.args[0].exists()


# ---------------------------------------------------- damaged directories


# A later test damages every byte of every file.
RESTORED = "(data position and optimizer restored)"
QUICK = "an empty folder", "bad checksums"


@pytest.mark.parametrize("damage", [x if x in QUICK else slow(x) for x in DAMAGES])
def test_damaged_checkpoint_falls_back_to_previous(damage, run):
    run(steps=4)
    action, fault = DAMAGES[damage]
    path = run.args[0] / "checkpoints" / "4"
    action(path)
    left = sorted(p.name for p in path.iterdir())
    again = run()
    assert again.error is None
    first, second = again.said.splitlines()[:2]
    assert first.startswith(f"checkpoint {path} cannot be used (") and fault in first
    assert first.endswith("); it is renamed to 4.damaged")
    assert second.startswith(f"resuming {run.args[0]} at step 2 of 6 {RESTORED};")
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


def test_no_good_checkpoint_touches_nothing(run):
    run(steps=4)
    for step in "24":
        flip(largest(run.args[0] / "checkpoints" / step))
    for _ in range(2):
        again = run()
        assert isinstance(again.error, RunCheckpointError)
        said = str(again.error)
        assert said.startswith(
            f"{run.args[0]}/checkpoints: none of the checkpoints can be used: 4 (state/"
        )
        assert said.endswith("restore one from a copy, or name another run.out_dir to "
                             "start anew")  # fmt: skip
        assert "\n" not in said and again.checkpoints == ["2", "4"]


def test_checkpoint_without_checksums_is_read(run):
    run(steps=4)
    path = run.args[0] / "checkpoints" / "4"
    (path / checksums.NAME).unlink()
    again = run()
    assert again.error is None and again.said.startswith(
        f"checkpoint {path} has no SHA256SUMS: its arrays can be read and are finite, "
        f"but other changes cannot be detected\nresuming {run.args[0]} at "
        "step 4 of 6"
    )


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


# ------------------------------------------- states that look healthy


def test_unusable_path_is_refused_before_first_step(tmp_path):
    steps = []
    ran = run_in(tmp_path / "lr[1e-3]", job=Adding(steps.append))
    assert isinstance(ran.error, RunCheckpointError) and not steps
    said = str(ran.error)
    assert "lr[1e-3]/checkpoints/0: cannot be written: no array is found in it" in said
    assert said.endswith("there (its path has '['): free some space, or name another "
                         "run.out_dir")  # fmt: skip
    assert not ran.out_dir.exists()
    assert run_in(tmp_path / "lr[1e-3]", checkpoint_every=None).error is None


class Poisoned(Adding):
    """A step ruins the weights, after its loss was taken."""

    def __init__(self, broken, evaluated=None):
        super().__init__()
        self._broken, self._evaluated = broken, evaluated or {}

    def step(self, number, state):
        state, taken = super().step(number, state)
        if number == self._broken:
            state = state._replace(params={"w": state.params["w"] * np.nan})
        return state, taken

    def evaluate(self, state, step_metrics):
        number = step_metrics.step
        return Evaluated(step_metrics, self._evaluated.get(number, 1.0 / number))


def test_poisoned_step_is_not_saved(run):
    with pytest.raises(FloatingPointError) as caught:
        run(job=Poisoned(4), checkpoint_every=1, keep=1)
    assert str(caught.value) == (
        "after step 4 params/w is not finite, so jaxmem does not save this step; the "
        "same command resumes the run after step 3: add a lower "
        "optimizer.learning_rate"
    )
    again = run(free={"optimizer": {"learning_rate": 0.05}}, checkpoint_every=1, keep=1)
    assert again.error is None
    assert f"at step 3 of 6 {RESTORED}; optimizer.learning_" in again.said


class Diverged(Poisoned):
    """A step gives finite weights from which no loss is finite."""

    def step(self, number, state):
        loss = np.nan if np.max(np.asarray(state.params["w"])) > 1e29 else 2.5
        state, taken = Adding.step(self, number, state)
        if number == self._broken:
            state = state._replace(params={"w": state.params["w"] + 1e30})
        return state, taken._replace(loss=loss)


@pytest.mark.parametrize("every", [slow(1), 3])
@pytest.mark.parametrize("keep", [slow(1), 2])
def test_checkpoint_without_finite_loss_is_set_aside(keep, every, run):
    lower = {"optimizer": {"learning_rate": 0.05}}
    options = dict(checkpoint_every=every, keep=keep)
    for _ in range(2):  # the same command again does not fill the disk
        with pytest.raises(FloatingPointError) as caught:
            run(job=Diverged(3), **options)
        last = {1: "resumes the run after step 2", 3: "starts anew"}[every]
        assert str(caught.value) == (
            "the loss of step 4 is nan, so checkpoint 3 is renamed to 3.damaged; "
            f"the same command {last}: add a lower optimizer.learning_rate"
        )
        good = {1: ["1", "2"][-keep:], 3: []}[every]
        names = os.listdir(run.args[0] / "checkpoints")
        assert sorted(names) == [*good, "3.damaged"]
    again = run(job=Diverged(9), free=lower, **options)
    assert again.error is None and ("at step 2 of" in again.said) == (every == 1)


@pytest.mark.parametrize("value", ["loss", "grad_norm"])
def test_nan_in_first_step_is_named_and_not_saved(value, run):
    with pytest.raises(FloatingPointError) as caught:
        run(job=Dispatching(broken=1, value=value), checkpoint_every=1)
    named = {"loss": "loss", "grad_norm": "gradient's norm"}[value]
    assert str(caught.value) == (
        f"the {named} of step 1 is nan, from the initial weights and the first batch"
    )
    assert not (run.args[0] / "checkpoints" / "1").exists()


def test_first_step_that_is_poisoned_starts_anew(run):
    with pytest.raises(FloatingPointError, match="the same command starts anew: add"):
        run(job=Poisoned(1), checkpoint_every=1)
    assert run(free={"optimizer": {"learning_rate": 0.05}}).error is None


def poison(run, monkeypatch, **fields):
    """Save a state that is not finite, as a version without the check did."""
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.finite, "not_finite", lambda _: [])
        patched.setattr(checkpoint, "FINITE", "other")
        with contextlib.suppress(AssertionError):  # the sum is NaN
            run(steps=4, job=Poisoned(4), **fields)


def test_poisoned_older_checkpoint_is_set_aside(run, monkeypatch):
    poison(run, monkeypatch)
    again = run()
    path = run.args[0] / "checkpoints" / "4"
    assert again.error is None
    assert again.said.startswith(
        f"checkpoint {path} cannot be used (params/w is not finite); it is renamed to "
        f"4.damaged\nresuming {run.args[0]} at step 2"
    )


def test_good_checkpoint_of_an_older_version_is_used(run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "FINITE", "other")
        run(steps=4)
    again = run()
    assert again.error is None and again.said.startswith("resuming")


EVERY = EvalConfig(every=2)


@pytest.mark.parametrize(
    "damage", [slow("a flipped byte"), slow("no state"), "bad checksums"]
)
def test_damaged_best_is_set_aside(damage, run):
    best = run.args[0] / "best"
    run(steps=4, job=Poisoned(9), evaluation=EVERY)
    DAMAGES[damage][0](best / "4")
    again = run(job=Poisoned(9), evaluation=EVERY)
    assert again.error is None
    assert again.said.startswith(f"checkpoint {best / '4'} cannot be used (")
    assert "it is renamed to 4.damaged\nresuming" in again.said
    assert sorted(p.name for p in best.iterdir()) == ["4.damaged", "6"]


def test_nan_best_is_not_kept(run):
    job = Poisoned(9, {4: np.nan, 6: 0.1})
    ran = run(job=job, evaluation=EVERY)
    assert "step 4: jaxmem does not keep an evaluation of nan as the best\n" in ran.said
    assert [p.name for p in (run.args[0] / "best").iterdir()] == ["6"]


UNVERIFIED = {
    "state/_METADATA": ("5", '{"x": 1}', "{"),
    "data/metadata": ("5", "{"),
    "config/metadata": ('{"x": 1}', ""),
}


@pytest.mark.parametrize(
    "part, text",
    [
        full(part, text) if number else (part, text)
        for part, texts in UNVERIFIED.items()
        for number, text in enumerate(texts)
    ],
)
def test_unreadable_state_without_checksums_set_aside(part, text, run):
    """Power was lost between a checkpoint and its checksums."""
    run(steps=4)
    path = run.args[0] / "checkpoints" / "4"
    (path / checksums.NAME).unlink()
    (path / part).write_text(text)
    again = run()
    assert again.error is None and again.said.count("\n") < 12
    assert again.said.startswith(f"checkpoint {path} cannot be used (")
    assert "it is renamed to 4.damaged\nresuming" in again.said


def test_flipped_arrays_without_checksums_are_errors(run, capfd):
    run(steps=4)
    path = run.args[0] / "checkpoints" / "4"
    (path / checksums.NAME).unlink()
    for file in path.rglob("*"):
        if file.parent.name == "d":
            file.write_bytes(bytes(len(file.read_bytes())))
    again = run()
    assert again.error is None
    assert again.said.startswith(f"checkpoint {path} cannot be used (")
    assert capfd.readouterr().err == ""


def test_named_pipe_in_a_checkpoint_is_a_fault(run):
    run(steps=4)
    path = run.args[0] / "checkpoints" / "4"
    (path / "data" / "metadata").unlink()
    os.mkfifo(path / "data" / "metadata")
    again = run()
    assert again.error is None
    assert (
        "(data/metadata cannot be read (it is not a file)); it is renamed" in again.said
    )


# ---------------------------------------------------- removed in mid-run


def test_metrics_removed_in_run_are_made_anew(run):
    path = run.args[0] / "metrics.jsonl"
    ran = run(job=at(4, path.unlink), checked=False)
    assert ran.error is None and [s.step for s in ran.history] == [4, 5, 6]
    assert (
        f"{path} was removed; jaxmem creates it again, from this step on\n"
    ) in ran.said
    assert run(checked=False).error is None  # a requeued command ends, too


def test_directory_removed_in_run_is_made_anew(run):
    path = run.args[0]
    ran = run(job=at(4, shutil.rmtree, path), checked=False)
    assert ran.error is None and [s.step for s in ran.history] == [4, 5, 6]
    assert f"{path / 'lock'} was removed, possibly with the rest of its di" in ran.said
    assert (path / "text.txt").read_text() == "hello"
    assert ran.checkpoints == ["4", "6"] and not (path / "lock").exists()
    again = run(steps=8, checked=False)
    assert again.error is None and f"resuming {path} at step 6" in again.said


def test_directory_removed_during_save_is_made_anew(run, monkeypatch):
    path, found = run.args[0], checkpoint._check_arrays

    def removed(*given):
        monkeypatch.setattr(checkpoint, "_check_arrays", found)
        shutil.rmtree(path)
        found(*given)

    def now():
        monkeypatch.setattr(checkpoint, "_check_arrays", removed)

    ran = run(job=at(4, now), checked=False)
    assert ran.error is None and ran.checkpoints == ["4", "6"]
    assert f"{path / 'lock'} was removed, possibly with the rest of its di" in ran.said
    assert (path / "text.txt").read_text() == "hello"


def test_run_paths_independent_of_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    ran = run_in(pathlib.Path("run"), job=at(3, os.chdir, tmp_path / "elsewhere"))
    assert ran.error is None
    assert not list((tmp_path / "elsewhere").iterdir())


# -------------------------------------------------------- other settings


def test_resumed_run_says_what_is_another_setting(run):
    run(steps=4)
    free = {"optimizer": {"learning_rate": 0.2, "new": 1}}
    again = run(free=free)
    assert again.error is None and again.said.startswith(
        f"resuming {run.args[0]} at step 4 of 6 {RESTORED}; optimizer.learning_rate "
        "was 0.1, is 0.2; run.steps was 4, is 6\n"
    )


def test_finished_run_refuses_what_has_no_effect(run):
    ran = run(steps=4)
    before = (ran.out_dir / "metrics.jsonl").read_bytes()
    fewer = run(steps=3)
    assert str(fewer.error) == (
        f"run.steps=3 is below the 4 steps that run.out_dir='{ran.out_dir}' has done; "
        "raise run.epochs, or name another run.out_dir"
    )
    other = run(steps=4, free={"optimizer": {"learning_rate": 0.2}})
    assert str(other.error) == (
        f"run.out_dir='{ran.out_dir}' has done its 4 steps, so other settings have no "
        "effect: optimizer.learning_rate was 0.1, is 0.2. Restore the old values, "
        "raise run.epochs to train on with the new ones, or name another run.out_dir"
    )
    assert run(steps=4).error is None
    assert (ran.out_dir / "metrics.jsonl").read_bytes() == before
    assert len(list((ran.out_dir / "tensorboard").iterdir())) == 1
    assert json.loads(before.splitlines()[-1])["step"] == 4


# ----------------------------------------------------- evaluations and patience

EVERY_STEP = {"evaluation": EvalConfig(every=1), "log_every": 3}


class Scored(Adding):
    """`Adding` with the held-out cost of each step."""

    def __init__(self, costs, is_reward=False, before=lambda number: None):
        super().__init__(before)
        self._costs, self._is_reward = costs, is_reward

    def evaluate(self, state, step_metrics):
        cost = self._costs[step_metrics.step - 1]
        metrics = step_metrics._replace(held_out_loss=cost)
        return Evaluated(metrics, cost, self._is_reward)


def evaluated(ran):
    return [line for line in ran.said.splitlines() if " held out " in line]


def test_every_evaluated_step_is_printed(run):
    costs = [3.0, 2.0, 2.5, np.nan, 1.0, 4.0]
    ran = run(job=Scored(costs), **EVERY_STEP)
    assert evaluated(ran) == [
        "step 1 held out 3.0000 (best, step 1)",
        "step 2 held out 2.0000 (best, step 2)",
        "step 3 held out 2.5000 (best 2.0000, step 2)",
        "step 4 held out nan (best 2.0000, step 2)",
        "step 5 held out 1.0000 (best, step 5)",
        "step 6 held out 4.0000 (best 1.0000, step 5)",
    ]


def test_rewards_are_printed_with_their_sign(run):
    ran = run(steps=2, job=Scored([-0.25, -0.125], is_reward=True), **EVERY_STEP)
    assert evaluated(ran) == [
        "step 1 held out reward 0.250 (best, step 1)",
        "step 2 held out reward 0.125 (best reward 0.250, step 1)",
    ]


def with_patience(run, costs, patience=2, min_delta=0.0, before=None, **fields):
    config = EvalConfig(every=1, patience=patience, min_delta=min_delta)
    job = Scored(costs, before=before or (lambda number: None))
    return run(steps=len(costs), job=job, evaluation=config, checked=False, **fields)


@pytest.mark.parametrize(
    "costs, min_delta, last",
    [
        ([3.0, 2.0, 2.5, 2.0, 1.0, 1.0], 0.0, 4),
        ([3.0, 2.0, 2.5, 1.9, 2.1, 2.2], 0.0, 6),
        ([3.0, 2.9, 2.8, 2.7, 2.6, 2.5], 0.15, 6),  # improvements add up
        ([3.0, 2.9, 2.8, 2.7, 2.6, 2.5], 0.25, 3),
        ([np.nan, np.inf, 1.0, 1.0, 1.0, 1.0], 0.0, 2),
        ([3.0, np.nan, 2.0, np.nan, np.nan, 1.0], 0.0, 5),
    ],
)
def test_run_stops_after_evaluations_without_improvement(costs, min_delta, last, run):
    ran = with_patience(run, costs, min_delta=min_delta)
    assert ran.error is None and ran.steps == list(range(1, last + 1))
    assert ran.checkpoints[-1] == str(last)
    assert ("stopped after step" in ran.said) == (last < 6)


def test_best_evaluation_may_be_no_improvement(run):
    ran = with_patience(run, [3.0, 2.9, 2.8, 1.0, 1.0, 1.0], min_delta=0.5)
    assert evaluated(ran)[1:3] == [
        "step 2 held out 2.9000 (best, step 2, but by no more than eval.min_delta=0.5; "
        "1 of 2)",
        "step 3 held out 2.8000 (best, step 3, but by no more than eval.min_delta=0.5; "
        "2 of 2)",
    ]


def test_stopped_run_says_why(run):
    ran = with_patience(run, [3.0, 2.0, 2.5, 2.5, 1.0, 1.0], min_delta=0.5)
    assert ran.ending == "eval.patience"
    assert evaluated(ran)[2:] == [
        "step 3 held out 2.5000 (best 2.0000, step 2; 1 of 2 without improvement)",
        "step 4 held out 2.5000 (best 2.0000, step 2; 2 of 2 without improvement)",
    ]
    why = (
        "the last 2 evaluations did not improve by more than 0.5 (best 2.0000, step 2)"
    )
    assert ran.said.endswith(f"stopped after step 4 of 6 by eval.patience=2: {why}\n")


@pytest.mark.parametrize("killed", [3, 4, 5])
def test_killed_run_stops_at_the_same_step(killed, run):
    class Killed(Exception):
        pass

    def kill(number):
        if number == killed:
            raise Killed

    costs = [3.0, 1.0, 2.5, 2.0, 2.0, 0.0, 0.0]
    with pytest.raises(Killed):  # at most the step after the checkpoint is taken
        with_patience(run, costs, patience=3, before=kill, checkpoint_every=2)
    ran = with_patience(run, costs, patience=3, checkpoint_every=2)
    assert ran.error is None and ran.steps == [1, 2, 3, 4, 5]
    assert ran.ending == "eval.patience"
    assert "optimizer and best 1.0000, step 2 restored)" in ran.said


def test_signal_in_stopping_step_is_no_other_end(run):
    costs = [1.0, 2.0, 3.0, 4.0]

    def stop(number):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)

    ran = with_patience(run, costs, before=stop)
    assert isinstance(ran.error, SystemExit) and ran.steps == [1, 2, 3]
    again = with_patience(run, costs)
    assert again.error is None and again.steps == [1, 2, 3]


def test_more_patience_resumes_a_stopped_run(run):
    costs = [1.0, 2.0, 3.0, 0.5, 2.0, 2.0]
    assert with_patience(run, costs).steps == [1, 2, 3]
    assert with_patience(run, costs).steps == [1, 2, 3]
    ran = with_patience(run, costs, patience=3)
    assert ran.steps == [1, 2, 3, 4, 5, 6] and ran.ending == "run.steps"
    assert "at step 3 of 6 (data position, optimizer and best 1.0000, st" in ran.said


def test_evaluations_of_an_older_version_start_from_the_best_one(run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(loop.Evaluations, "settings", lambda _: {})
        run(steps=2, job=Scored([1.0, 2.0]), evaluation=EvalConfig(every=1))
    ran = run(steps=3, job=Scored([1.0, 2.0, 3.0]), evaluation=EvalConfig(every=1))
    assert f"resuming {ran.out_dir} at step 2 of 3 {RESTORED};" in ran.said
    assert evaluated(ran) == ["step 3 held out 3.0000 (best 1.0000, step 1)"]


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"patience": 3},
            "EvalConfig.patience=3 is for evaluations during training, and ",
        ),
        ({"samples": 4}, "EvalConfig.samples=4 is for evaluations during training"),
        (
            {"min_delta": 0.1},
            "EvalConfig.min_delta=0.1 has no effect without eval.patience",
        ),
        ({"every": 5, "patience": 0}, "EvalConfig.patience must be at least 1, or No"),
        ({"every": 5, "patience": 1, "min_delta": -1.0}, "min_delta must be at least"),
    ],
)
def test_patience_without_evaluations_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**fields)


# ------------------------------------------------------------------ on_step


def test_on_step_gets_every_step(run):
    seen = []
    ran = run(on_step=lambda metrics: seen.append((metrics.step, metrics.loss)))
    assert ran.error is None and ran.ending == "run.steps"
    assert seen == [(step, 2.5) for step in range(1, 7)]


@pytest.mark.parametrize("answer", [False, np.False_])
def test_on_step_stops_and_saves(answer, run):
    def on_step(metrics):
        return answer if metrics.step == 3 else None

    ran = run(on_step=on_step, checked=False, checkpoint_every=4)
    assert ran.error is None and ran.steps == [1, 2, 3] and ran.checkpoints == ["3"]
    assert ran.ending == "on_step"
    assert ran.said.endswith("stopped after step 3 of 6: on_step returned False\n")
    again = run()
    assert again.error is None and again.steps == [1, 2, 3, 4, 5, 6]


def test_on_step_stops_after_the_step_that_has_started(run):
    ran = run(
        job=Dispatching(), on_step=lambda metrics: metrics.step < 3, checked=False,
        checkpoint_every=5,
    )  # fmt: skip
    assert ran.steps == [1, 2, 3, 4] and ran.checkpoints == ["4"]


def test_other_answers_of_on_step_stop_nothing(run):
    answers = iter([None, 0, "", True, [], 1])
    assert run(on_step=lambda _: next(answers)).ending == "run.steps"


# ---------------------------------------------------------- complete runs


def test_complete_run_says_how_to_go_on(run):
    ran = run(steps=4)
    assert ran.said.startswith(f"new run in {ran.out_dir}\n") and not ran.is_complete
    again = run(steps=4)
    assert again.is_complete and again.said == ""
    assert again.completion == (
        f"{ran.out_dir} is complete (4 of 4 steps); raise run.epochs, or name another "
        "run.out_dir"
    )
    assert not run(steps=6).is_complete


def test_run_that_patience_stopped_is_complete(run):
    costs = [1.0, 2.0, 3.0, 0.5]
    with_patience(run, costs)
    again = with_patience(run, costs)
    assert again.is_complete and again.completion == (
        f"{again.out_dir} is complete (step 3 of 4): eval.patience=2: the last 2 "
        "evaluations did not improve (best 1.0000, step 1); raise eval.patience, or "
        "name another run.out_dir"
    )


# --------------------------------------------------------- numbers read late


class Dispatching(Adding):
    """`Adding`, whose numbers are read when they are asked for."""

    def __init__(self, *before, broken=None, value="loss"):
        super().__init__(*before)
        self._broken, self._value, self.log = broken, value, []

    def evaluate(self, state, step_metrics):
        return None

    def step(self, number, state):
        state, taken = Adding.step(self, number, state)
        self.log.append(f"start {number}")

        def read():
            self.log.append(f"read {number}")
            broken = {self._value: np.nan} if number == self._broken else {}
            return taken._replace(**broken)

        return state, read


def test_step_starts_before_last_metrics_are_read(run):
    job = Dispatching()
    assert run(steps=5, job=job, checkpoint_every=4).error is None
    assert job.log == [
        "start 1", "start 2", "read 1", "start 3", "read 2", "start 4", "read 3",
        "read 4",  # before its checkpoint
        "start 5", "read 5",
    ]  # fmt: skip


def test_last_metrics_are_read_without_checkpoints(run):
    job = Dispatching()
    assert run(steps=3, job=job, checkpoint_every=None).steps == [1, 2, 3]
    assert job.log[-1] == "read 3"


def test_signal_while_numbers_are_unread_loses_none(run):
    def before(number):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)

    ran = run(steps=6, job=Dispatching(before), checkpoint_every=5)
    assert isinstance(ran.error, SystemExit) and ran.steps == [1, 2, 3]
    assert ran.checkpoints == ["3"]
    assert run(steps=6, job=Dispatching(), checkpoint_every=5).error is None


def test_failed_start_keeps_metrics_of_last_step(run):
    def before(number):
        if number == 4:
            raise OSError("no more data")

    ran = run(steps=6, job=Dispatching(before), checkpoint_every=5)
    assert "no more data" in str(ran.error) and ran.steps == [1, 2, 3]


@pytest.mark.parametrize("broken", [3, 4])
def test_late_infinite_loss_saves_nothing_more(broken, run):
    with pytest.raises(FloatingPointError, match=f"loss of step {broken} is nan"):
        run(steps=6, job=Dispatching(broken=broken))
    ran = run(steps=6, job=Dispatching())
    # What step 3 gives comes from the weights of step 2, so that they are set aside.
    assert ran.error is None and ("at step 2 of" in ran.said) == (broken == 4)
