"""A job in one file of its own is trained, resumed, planned, shown and reported."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxmem.commands import cli
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.job import JOBS, job_named
from jaxmem.train.output.history import read_history
from tests.helpers import own_job, runs
from tests.helpers.fake_devices import fake as fake, numbered as numbered
from tests.helpers.kills import kill_before

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
LIMIT = 81  # lines of the job's file
GIN = """
run.job = "own_job.py:Ema"
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


OWN_JOB = pathlib.Path(own_job.__file__)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.write("data.jsonl", [{"text": f"{i} and {i * i}"} for i in range(40)])
    pathlib.Path("own.gin").write_text(GIN)
    shutil.copy(OWN_JOB, ".")


train = functools.partial(runs.train, "own.gin")


def test_it_is_one_short_file_and_no_other_job():
    assert len(OWN_JOB.read_text().splitlines()) < LIMIT
    kind = job_named("own_job.py:Ema")
    assert kind.__bases__ == (jobs.Job,) and kind.name == "Ema"
    assert kind not in JOBS.values()


@pytest.mark.full
def test_it_trains_resumes_and_reports(monkeypatch):
    result, said = train()
    losses = [step.loss for step in result.history]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in 6 steps" in said
    summary = json.loads(pathlib.Path("run/summary.json").read_text())
    assert summary == result.summary and summary["last_loss"] == losses[-1]
    assert "Loss" in pathlib.Path("run/report.html").read_text()
    assert pathlib.Path("run/model/model.safetensors").exists()
    job = job_named("own_job.py:Ema")
    kill_before(6, job, monkeypatch, lambda: train("run.out_dir=cut"))
    with open("own_job.py", "a") as file:
        file.write("# edited\n")
    again, said = train("run.out_dir=cut")
    assert "resuming cut at step 4 of 6 (" in said
    assert "restored); own_job.py has changed (SHA-256 " in said
    assert [step.loss for step in again.history] == losses
    for name in ("run", "cut"):
        assert len(read_history(pathlib.Path(name) / "metrics.jsonl")) == 6
    with pytest.raises(ValueError, match="model.hidden"):
        train("model.hidden=32")
    meshed, _ = train("run.out_dir=mesh", "mesh.fsdp=2", "mesh.tensor=2")
    np.testing.assert_allclose([x.loss for x in meshed.history], losses, rtol=1e-5)


# Others kill it within a process, which compiles less.
@pytest.mark.full
def test_the_command_trains_and_resumes_it_after_sigkill():
    command = [sys.executable, "-m", "jaxmem", "train", "own.gin", "run.steps=4"]
    script = pathlib.Path("own_job.py").read_text()
    deadly = script.replace(
        "        state, *numbers = ",
        "        if number == 4 and not os.environ.get('STAY'):\n"
        "            os.kill(os.getpid(), 9)\n        state, *numbers = ",
    )
    pathlib.Path("own_job.py").write_text(
        deadly.replace("import time", "import os, time")
    )
    run = functools.partial(subprocess.run, command, capture_output=True, text=True)
    assert run().returncode == -signal.SIGKILL
    again = run(env={**os.environ, "STAY": "1"})
    assert again.returncode == 0, again.stderr
    assert "resuming run at step 2" in again.stdout
    assert [step["step"] for step in runs.steps("run")] == [1, 2, 3, 4]


@pytest.mark.full
def test_a_run_that_has_not_ended_is_read_with_trust_alone(monkeypatch, capsys):
    job = job_named("own_job.py:Ema")
    kill_before(3, job, monkeypatch, lambda: train("run.out_dir=cut"))
    commands = {
        "generate": ("generate", "cut", "1", "--max-new-tokens", "2"),
        "score": ("score", "cut", "data.jsonl", "--out", "scores.jsonl"),
        "export": ("export", "cut", "--out", "exported"),
    }
    for command in commands.values():
        assert cli.main([*command]) == 2
        said = capsys.readouterr().err
        assert "cut/operative.gin: run.job='own_job.py:Ema' would run " in said
        assert f"{pathlib.Path('own_job.py').absolute()}: allow the code of" in said
    for command in commands.values():
        assert cli.main([*command, "--trust-code"]) == 0, capsys.readouterr().err
    assert pathlib.Path("exported/model.safetensors").exists()
    resume = "train", "own.gin", "run.out_dir=cut", "run.steps=3"
    assert cli.main([*resume]) == 0
    assert "resuming cut at step 2" in capsys.readouterr().out


@pytest.mark.full
def test_it_trains_an_own_model_on_a_mesh():
    # Some of this model's weights have partition specs, and the others have none.
    sizes = "data.batch_size=4", "run.steps=3", "model.hidden=16", "model.heads=2"
    sizes += ("model.factory=tests.helpers.own_models:Sharded",)
    alone, _ = train("run.out_dir=alone", *sizes)
    mesh = "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    meshed, _ = train("run.out_dir=mesh", *sizes, *mesh)
    losses = ([step.loss for step in result.history] for result in (meshed, alone))
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.full
def test_teacher_is_the_average_of_the_weights():
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


def test_own_job_data_and_keys_are_shown(capsys):
    assert cli.main(["data", "own.gin", "--show", "1"]) == 0
    said = capsys.readouterr().out
    assert "data.jsonl:1: " in said and "40 documents, " in said
    assert cli.main(["train", "own.gin", "--keys", "ema"]) == 0
    said = capsys.readouterr().out
    assert (
        "ema.rate = 0.1  # float; weight of the newest weights in the average" in said
    )
    assert cli.main(["train", "--keys", "ema"]) == 2
    assert "--keys: no section 'ema'; the sections are" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override, message",
    [
        ("ema.rat=1", "unknown key 'ema.rat'; did you mean ema.rate?"),
        ("ema.rate=fast", "ema.rate must be float, got 'fast'"),
        ("run.job=own_job.py:Emma", "run.job: own_job.py has no 'Emma' ("),
        ("run.job=absent.py:Ema", "run.job: cannot import absent.py: no such file"),
        ("run.job=own_job.py:Program", "own_job.py:Program must be a subclass of jaxm"),
        ("run.job=own_job.py:jax", "own_job.py:jax must be a subclass of jaxmem.train"),
        ("run.job=mea", "run.job must be one of 'sft', 'grpo', 'dpo', 'distill', or "),
        ("run.job=sft", "own.gin:11: unknown key 'ema.rate'"),
        ("run.job=3", "run.job must be str, got 3 (int)"),
    ],
)
def test_a_wrong_job_or_key_is_named(override, message):
    runs.refused("own.gin", [override], message)


def test_macros_name_a_job():
    text = (
        GIN.replace('"own_job.py:Ema"', "%JOB") + 'JOB = %FILE\nFILE = "own_job.py:Ema"'
    )
    pathlib.Path("own.gin").write_text(text)
    config, operative = configuration.load("own.gin")
    assert config.ema.rate == 0.25 and type(jobs.job_of(config)).__name__ == "Ema"
    pathlib.Path("again.gin").write_text(operative)
    assert configuration.load("again.gin")[0] == config


def edited(old, new):
    """Replace the example's lines."""
    text = pathlib.Path("own_job.py").read_text()
    assert old in text
    pathlib.Path("own_job.py").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("def phases", "def fases", "Ema has no phases: see docs/own_job.md"),
        ("def step(", "def stop(", "Ema has no step: see docs/own_job.md"),
        ("Config, changeable = EmaJobConfig,", "changeable =",
         "Ema has the wrong sections: Config must be a subclass of jaxmem.train."),
        ("data: DataConfig", "data: 'DatConfig'",
         "annotations of EmaJobConfig: NameError: name 'DatConfig' is not defined"),
        ("@dataclasses.dataclass(frozen=True)", "", "EmaJobConfig.ema must be a datac"),
        ("@dataclasses.dataclass(frozen=True, kw_only=True)", "",
         "EmaJobConfig must be decorated by @dataclasses.dataclass(frozen=True, kw_on"),
        ("import optax", "import optaxx", "own_job.py (line 9): ModuleNotFoundError"),
    ],
)  # fmt: skip
def test_a_job_without_what_it_must_have_is_refused(old, new, message):
    edited(old, new)
    runs.refused("own.gin", [], message)
    runs.refused("own.gin", [], "own.gin:2: run.job: ")
    runs.refused("own.gin", [], "own_job.py")


def test_a_program_without_its_hook_is_refused():
    edited("def trace_backward", "def trace_backwards")
    path = pathlib.Path("own_job.py").absolute()
    message = f"Program ({path}) has no trace_backward: see docs/own_job.md"
    with pytest.raises(ValueError, match=re.escape(message)):
        train()


def test_a_file_that_has_changed_since_the_configuration_is_named():
    config, _ = configuration.load("own.gin")
    edited('average"] = 0.1', 'average"] = 0.2')
    with pytest.raises(ValueError, match="takes a EmaJobConfig, .* load the configur"):
        jobs.job_of(config)
    config, _ = configuration.load("own.gin", ["ema.rate=None"])
    assert config.ema.rate == 0.2 and jobs.job_of(config)


def test_job_names_unique_and_sections_own():
    kind = job_named("own_job.py:Ema")
    try:

        class Mine(kind, name="mine"):
            pass

        assert job_named("mine") is Mine and Mine.name == "mine"
        with pytest.raises(ValueError, match="run.job='mine' is already .*Mine"):
            type("Other", (kind,), {}, name="mine")
        type(Mine)(
            Mine.__name__, (kind,), {"__qualname__": Mine.__qualname__}, name="mine"
        )
        assert job_named("mine") is not Mine
    finally:
        del JOBS["mine"]
    config, _ = configuration.load("own.gin")
    run = dataclasses.replace(config.run, job="sft")
    with pytest.raises(ValueError, match="run.job='sft' takes a SftJobConfig, got a E"):
        jobs.job_of(dataclasses.replace(config, run=run))


def test_a_subclass_of_a_shipped_job_is_another_job():
    pathlib.Path("mine.py").write_text(
        "from jaxmem.train.jobs import sft\nclass Mine(sft.Sft):\n    pass\n"
    )
    lines = [line for line in GIN.splitlines() if not line.startswith("ema.")]
    pathlib.Path("own.gin").write_text("\n".join(lines))
    mine, shipped = (
        jobs.job_of(configuration.load("own.gin", [f"run.job={name}"])[0]).fixed()
        for name in ("mine.py:Mine", "sft")
    )
    assert "run" not in shipped and mine["run"] == {"job": "Mine", "seed": 0}
