"""Training in several processes: ports, environments, and the run of one process."""

import io
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxmem.train import jobs
from jaxmem.train.configuration import load

ROOT = Path(__file__).parents[2]


def environment(devices):
    return os.environ | {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def steps_of(out_dir):
    path = Path(out_dir) / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def end(pair):
    for process in pair:
        process.kill()
        process.communicate()


def as_of_one(arguments, out_dir, steps, tmp_path):
    path, *overrides = arguments
    overrides += [f"run.out_dir={tmp_path}/one", f"run.steps={steps}"]
    config, _ = load(path, overrides)
    alone = jobs.train(config, "", Console(file=io.StringIO()))
    told = [json.loads(line) for line in steps_of(out_dir)]
    assert [step["step"] for step in told] == list(range(1, steps + 1))
    for got, want in zip(told, alone.history, strict=True):
        assert got["tokens"] == want.tokens
        assert got["loss"] == pytest.approx(want.loss, rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want.grad_norm, rel=1e-4)
    left = [load_file(run / "model" / "model.safetensors")
            for run in (out_dir, tmp_path / "one")]  # fmt: skip
    assert left[0].keys() == left[1].keys()
    for name, weight in left[0].items():
        np.testing.assert_allclose(weight, left[1][name], rtol=1e-2, atol=1e-4)
