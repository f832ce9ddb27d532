"""A job in one file of its own is trained, resumed, planned, shown and reported."""

import dataclasses
import functools
import importlib
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxmem.commands import cli
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.job import JOBS
from jaxmem.train.output.history import read_history
from tests.helpers import runs
from tests.helpers.fake_devices import fake as fake, numbered as numbered
from tests.helpers.kills import kill_before

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
LIMIT = 80  # lines of the job's file
GIN = """
run.job = "ema"
run.steps = 6
run.checkpoint_every = 2
run.out_dir = "run"
data.source = "data.jsonl"
data.vocab_size = 280
data.sequence_length = 16
data.batch_size = 2
data.cache_dir = "."
ema.rate = 0.25
model.layers = 1
model.hidden = 16
model.ff = 16
model.heads = 1
model.kv_heads = 1
model.head_dim = 16
optimizer.learning_rate = 1e-2
"""


@pytest.fixture(scope="module", autouse=True)
def own_job():
    """The file, whose job other tests do not know."""
    module = importlib.import_module("tests.helpers.own_job")
    JOBS["ema"] = module.Ema
    yield module
    del JOBS["ema"]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.write("data.jsonl", [{"text": f"{i} and {i * i}"} for i in range(40)])
    pathlib.Path("own.gin").write_text(GIN)


train = functools.partial(runs.train, "own.gin")


def test_it_is_one_short_file_and_no_other_job(own_job):
    lines = pathlib.Path(own_job.__file__).read_text().splitlines()
    assert len(lines) < LIMIT
    assert own_job.Ema.__bases__ == (jobs.Job,) and JOBS["ema"] is own_job.Ema


def test_it_trains_resumes_and_reports(own_job, monkeypatch):
    result, said = train()
    losses = [step.loss for step in result.history]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in 6 steps" in said
    summary = json.loads(pathlib.Path("run/summary.json").read_text())
    assert summary == result.summary and summary["last_loss"] == losses[-1]
    assert "Loss" in pathlib.Path("run/report.html").read_text()
    assert pathlib.Path("run/model/model.safetensors").exists()
    kill_before(6, own_job.Ema, monkeypatch, lambda: train("run.out_dir=cut"))
    again, said = train("run.out_dir=cut")
    assert "resuming cut after step 4" in said
    assert [step.loss for step in again.history] == losses
    for name in ("run", "cut"):
        assert len(read_history(pathlib.Path(name) / "metrics.jsonl")) == 6
    with pytest.raises(ValueError, match="model.hidden"):
        train("model.hidden=32")
    meshed, _ = train("run.out_dir=mesh", "mesh.fsdp=2", "mesh.tensor=2")
    np.testing.assert_allclose([x.loss for x in meshed.history], losses, rtol=1e-5)


def test_it_trains_an_own_model_on_a_mesh():
    # Some of this model's weights have partition specs, and the others have none.
    sizes = "data.batch_size=4", "run.steps=3", "model.hidden=16", "model.heads=2"
    sizes += ("model.factory=tests.helpers.own_models:Sharded",)
    alone, _ = train("run.out_dir=alone", *sizes)
    mesh = "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    meshed, _ = train("run.out_dir=mesh", *sizes, *mesh)
    losses = ([step.loss for step in result.history] for result in (meshed, alone))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_the_teacher_is_the_average_of_the_weights():
    job = jobs.job_of(configuration.load("own.gin")[0])
    job.build()
    job.open()
    job.compile(None)
    state = job.initial_state()
    average = jax.tree.map(np.asarray, state.params)
    for number in (1, 2):
        state, read = job.step(number, state)
        average = jax.tree.map(lambda a, b: a + 0.25 * (b - a), average, state.params)
    assert read().step == 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        state.optimizer[1],
        average,
    )


def test_it_is_planned(fake, numbered, capsys):
    assert cli.main(["plan", "own.gin", "--device", "h200", "--json"]) == 0
    teacher, step = json.loads(capsys.readouterr().out)["phases"]
    assert (teacher["name"], step["name"]) == ("teacher", "train step")
    assert teacher["resident"]["teacher"] == step["resident"]["trained weights"] > 0


def test_its_data_and_keys_are_shown(capsys):
    assert cli.main(["data", "own.gin", "--show", "1"]) == 0
    said = capsys.readouterr().out
    assert "data.jsonl:1: " in said and "40 documents, " in said
    assert cli.main(["train", "--keys", "ema"]) == 0
    said = capsys.readouterr().out
    assert "ema.rate = 0.1  # float; of the newest weights in the average" in said
    assert cli.main(["train", "own.gin", "run.job=sft"]) == 2
    assert (
        "ema.rate is of the job 'ema', but run.job is 'sft'" in capsys.readouterr().err
    )


def test_names_are_taken_once_and_sections_are_the_jobs_own(own_job):
    with pytest.raises(ValueError, match="run.job='ema' is already Ema"):

        class Other(own_job.Ema, name="ema"):
            pass

    config, _ = configuration.load("own.gin")
    run = dataclasses.replace(config.run, job="sft")
    with pytest.raises(ValueError, match="run.job='sft' takes a Config, got a Ema"):
        jobs.job_of(dataclasses.replace(config, run=run))
    run = dataclasses.replace(config.run, job="mea")
    with pytest.raises(ValueError, match="run.job must be one of 'sft', .*'ema', got"):
        jobs.job_of(dataclasses.replace(config, run=run))
