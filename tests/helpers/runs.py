"""Runs of jobs, and what is reproducible of them."""

import io
import json
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.rollout.turns import SamplePrograms
from jaxmem.train.metrics import StepMetrics
from jaxmem.train.output.history import read_history
from jaxmem.train.output.progress import ProgressReport


def changed(config, **sections):
    """The config with some fields of some sections replaced, all at once."""
    values = {
        f"{section}.{path}": value
        for section, settings in sections.items()
        for path, value in settings.items()
    }
    return config.replaced(values)


def run(config, text=""):
    """A run's result, and the text that it prints."""
    stream = io.StringIO()
    return jobs.train(config, text, Console(file=stream, width=160)), stream.getvalue()


def train(gin, *overrides):
    return run(*configuration.load(gin, overrides))


def job_with(gin, *overrides):
    """The job of a configuration, with its program."""
    job = jobs.job_of(configuration.load(gin, overrides)[0])
    job.program = job.make_program(job.vocabulary())
    return job


def rolled_out(gin, *overrides):
    """A GRPO job that compiles what samples alone, and its first rollout."""
    job = job_with(gin, *overrides)
    sampling = SimpleNamespace(sample=SamplePrograms.of(job.program))
    job.program.compile = lambda: sampling
    job.open()
    job.compile(ProgressReport(Console(quiet=True), 1, 0, 1))
    return job, job._roll_out(1, job.program.initial_state().params)


def refused(gin, overrides, message):
    """The file with such settings, in one line."""
    with pytest.raises(ValueError) as raised:
        configuration.load(gin, overrides)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def reproducible(history):
    return [
        {k: v for k, v in step._asdict().items() if "second" not in k}
        for step in history
    ]


def steps(path="run", kind=StepMetrics):
    """The reproducible metrics of each step."""
    return reproducible(read_history(pathlib.Path(path) / "metrics.jsonl", kind))


def write(path, rows):
    """JSON Lines."""
    pathlib.Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def drawn(make):
    """Graph and weights of a module: matrices of normal numbers, scales of 1."""
    definition, shapes = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if "scale" in jax.tree_util.keystr(path):
            return np.ones(leaf.shape, leaf.dtype)
        return (rng.normal(size=leaf.shape) / leaf.shape[-2] ** 0.5).astype(leaf.dtype)

    return definition, jax.tree.map_with_path(draw, nnx.to_pure_dict(shapes))
