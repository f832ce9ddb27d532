"""Runs of a job that adds numbers, and metrics of steps."""

import io

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxmem.base.locks import Busy
from jaxmem.train import loop, metrics
from jaxmem.train.metrics import StepMetrics
from jaxmem.train.output.history import read_history
from jaxmem.train.program import TrainState
from jaxmem.train.settings import RunConfig, Settings

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

    def samples(self, count=8):
        return []

    def warnings(self, state):
        return []

    def step(self, number, state):
        self._before(number)
        self.position += 1
        params = jax.tree.map(lambda x: x + number, state.params)
        return TrainState(params, state.optimizer + 1), step_metrics(number)


class Ran:
    """Outcome of a run."""

    def __init__(self, out_dir, console):
        self.out_dir, self._console = out_dir, console
        self.state = self.error = self.ending = None

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


def run_in(
    out_dir, steps=6, job=None, fixed=FIXED, free=FREE, backend=None, evaluation=None,
    checked=True, on_step=None, **fields,
):  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    config = RunConfig(
        steps=steps,
        out_dir=str(out_dir),
        **dict(checkpoint_every=2, log_every=2) | fields,
    )
    out_dir = out_dir.absolute()
    ran = Ran(out_dir, console)
    free = {**free, "run": {"steps": steps}}
    try:
        settings = Settings(fixed, free, length_key="run.epochs")
        with loop.open_run(config, settings, console, evaluation) as opened:
            if backend is not None:
                opened.use_backend(*backend)
            ran.is_complete = opened.is_complete
            ran.completion = opened.completion()
            texts = {"text.txt": "hello"}
            ran.state = opened.take_steps(job or Adding(), texts, on_step)
            ran.history, ran.ending = opened.history(metrics.StepMetrics), opened.ending
    except (ValueError, OSError, KeyboardInterrupt, SystemExit) as error:
        ran.error = error
    if ran.state is not None and ran.ending == "run.steps":
        expected = steps * (steps + 1) / 2
        np.testing.assert_array_equal(ran.state.params["w"], expected)
    if ran.state is not None and checked:
        assert ran.steps == list(range(1, steps + 1)) == [s.step for s in ran.history]
    assert isinstance(ran.error, Busy) or not (out_dir / "lock").exists()
    return ran


def step_metrics(step, loss=2.5, rate=100.0):
    return StepMetrics(
        step=step,
        loss=loss,
        tokens=64,
        tokens_per_second=rate,
        grad_norm=1.25,
        learning_rate=1e-3,
        seconds=64 / rate,
    )
