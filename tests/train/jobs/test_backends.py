"""Backends of the head's loss, and errors where a named one cannot run."""

import io
import json
import pathlib

import pytest
from rich.console import Console

from jaxmem.train import configuration, jobs
from tests.helpers import runs, texts

pytestmark = pytest.mark.usefixtures("quick_compilation")
GIN = """
data.source = "data.jsonl"
data.sequence_length = 16
data.batch_size = 2
model.checkpoint = "llama"
optimizer.learning_rate = 1e-3
run.steps = 1
run.compare_heads = False
run.out_dir = "run"
"""
MORE = {
    "sft": "",
    "dpo": "",
    "distill": 'distill.teacher = "llama"\n',
}


@pytest.fixture(params=MORE)
def train(request, tmp_path, monkeypatch):
    """A function that trains by one of the jobs."""
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    rows = [{"prompt": "ab", "response": x} for x in "cdefgh"]
    if request.param == "dpo":
        rows = [{"prompt": "ab", "chosen": x, "rejected": "z"} for x in "cdefgh"]
    lines = [json.dumps(row) + "\n" for row in rows]
    pathlib.Path("data.jsonl").write_text("".join(lines))
    gin = f'{GIN}run.job = "{request.param}"\n{MORE[request.param]}'
    pathlib.Path("run.gin").write_text(gin)

    def run(*overrides):
        config, text = configuration.load("run.gin", overrides)
        return jobs.train(config, text, Console(file=io.StringIO()))

    return run


def test_backend_that_cannot_run_here_is_named(train):
    message = "^head.implementation: implementation='hopper' cannot run this call"
    with pytest.raises(ValueError, match=message):
        train("head.implementation=hopper")


def test_backend_without_a_gpu_needs_no_tracing(train, monkeypatch):
    monkeypatch.setattr("jaxmem.devices.backend", lambda: "cpu")
    program = runs.job_with("run.gin").program
    monkeypatch.setattr(type(program), "trace_loss", None)
    assert program.backend == "xla"
