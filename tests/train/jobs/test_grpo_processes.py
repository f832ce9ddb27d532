"""GRPO in two processes: one calls rewards and environments, and both learn the same.

The processes are real ones, of one device each. Each leaves a line per step with what
it has learned from, and the functions of the user a line per call.
"""

import json
import pathlib
import subprocess
import sys

import pytest

from jaxmem.serve import command
from tests.helpers import processes, runs, served, texts
from tests.helpers.grpo_processes import ENVIRONMENT, GIN, OWN, PROGRAM, ROLLOUT
from tests.helpers.processes import ROOT, end, environment, free_port

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = texts.checkpoint("llama", tmp_path)
    named = {"eos_token": "</s>", "bos_token": "<s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    runs.write("prompts.jsonl", [{"prompt": a + b} for a in "ab" for b in "xyz"])
    pathlib.Path("own.py").write_text(OWN)
    pathlib.Path("grpo.gin").write_text(GIN)
    pathlib.Path("program.py").write_text(PROGRAM)
    return tmp_path


def two(*overrides, status=0):
    """The output of each of two processes."""
    command = [sys.executable, "program.py", "train", "grpo.gin", *overrides]
    command += [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    pair = [
        subprocess.Popen(
            [*command, f"--process-id={i}"], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=environment(1) | {"PYTHONPATH": str(ROOT)},
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=240)[0] for process in pair]
    finally:
        end(pair)
    assert [process.returncode for process in pair] == [status] * 2, said
    return said


def lines(name):
    return [json.loads(line) for line in pathlib.Path(name).read_text().splitlines()]


def one_process_told(name):
    """Values that functions have noted, which were called in one process."""
    told = lines(name)
    assert len({process for process, _ in told}) == 1
    return [value for _, value in told]


def steps_of(run):
    """The lines of both steps of a run."""
    steps = [json.loads(line) for line in processes.steps_of(run)]
    assert [step["step"] for step in steps] == [1, 2]
    return steps


@pytest.mark.full
def test_random_rewards_are_shared_by_processes():
    two("task.reward=own.py:chance", "run.save_rollouts=True")
    rewards = one_process_told("rewards.jsonl")
    assert len(rewards) == 2 * 8
    saved = [x for i in (1, 2) for x in lines(f"two/rollouts/step-00000{i}.jsonl")]
    assert [x["reward"] for x in saved] == pytest.approx(rewards, rel=1e-6)
    assert lines("learned-0.jsonl") == lines("learned-1.jsonl")
    for i, step in enumerate(steps_of("two")):
        mean = sum(rewards[8 * i : 8 * i + 8]) / 8
        assert step["reward"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_both_sample_again_as_often():
    two("task.reward=own.py:rarely", "grpo.resample=5", "run.steps=3")
    first, second = (lines(f"learned-{i}.jsonl") for i in range(2))
    assert first == second and len(first) == 3
    rollouts = sum(1 + resampled for _, resampled in first)
    assert len(one_process_told("rewards.jsonl")) == 8 * rollouts > 3 * 8


@pytest.mark.slow
def test_environment_answers_once_and_both_hear_it():
    two(*ENVIRONMENT)
    assert lines("learned-0.jsonl") == lines("learned-1.jsonl")
    for step in steps_of("two"):
        assert step["mismatch_max"] < 1e-4
    assert len(one_process_told("resets.jsonl")) == 6 + 2 * 8
    turns = sum(8 * step["turns"] for step in steps_of("two"))
    assert len(one_process_told("steps.jsonl")) == turns


@pytest.mark.slow
def test_function_holds_conversations_once_and_both_learn():
    two("task.rollout=own.py:wander", "run.save_rollouts=True", *ROLLOUT)
    assert lines("learned-0.jsonl") == lines("learned-1.jsonl")
    steps = steps_of("two")
    assert {step["turns"] for step in steps} - {1, 2}
    for step in steps:
        assert step["mismatch_max"] < 1e-4
    assert len(one_process_told("calls.jsonl")) == 2 * 8


@pytest.mark.full
def test_one_process_asks_an_engine_and_both_learn():
    folder = pathlib.Path("weights").absolute()
    folder.mkdir()
    options = served.options("llama", slots=8, max_len=16, weights=(str(folder),))
    with command.served(options) as server:
        two(
            "task.reward=own.py:chance", "rollouts.engine=vllm",
            f"rollouts.urls={server.url}", f"rollouts.weights={folder}",
            "rollouts.max_staleness=1", "grpo.correction=tis",
        )  # fmt: skip
    assert lines("learned-0.jsonl") == lines("learned-1.jsonl")
    assert len(one_process_told("rewards.jsonl")) == 2 * 8
    first, second = steps_of("two")
    assert first["mismatch_max"] < 1e-4 and first["staleness_max"] == 0
    assert second["staleness_max"] <= 1
    assert not [*folder.glob("*/v*")]


@pytest.mark.slow
def test_failing_function_ends_both_processes():
    said = two("task.rollout=own.py:falls", *ROLLOUT, status=2)
    ends = [words.splitlines()[-1] for words in said]
    assert ends[0] == ends[1]
    assert ends[0].startswith("jaxmem: error: rollout own.py:falls (prompts.jsonl:")


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path):
    overrides = "task.reward=own.py:length", "task.held_out=0.3", "eval.every=1"
    two(*overrides)
    told = one_process_told("rewards.jsonl")
    pathlib.Path("rewards.jsonl").unlink()
    runs.train("grpo.gin", *overrides, "run.out_dir=one")
    assert told == one_process_told("rewards.jsonl")
    for got, want in zip(steps_of("two"), steps_of("one"), strict=True):
        for name in ("reward", "held_out_reward", "tokens"):
            assert got[name] == want[name]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4, abs=1e-6)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_patience_ends_both_processes_after_the_same_step():
    patience = "eval.every=1", "eval.patience=1", "eval.min_delta=1e3"
    said = two(
        "task.reward=own.py:length", "task.held_out=0.3", "run.steps=4", *patience
    )
    assert len(steps_of("two")) == 2
    assert "by eval.patience=1: the last evaluation did not imp" in "".join(said)


@pytest.mark.slow
def test_failing_reward_ends_both_processes():
    said = two("task.reward=own.py:fails", status=2)
    ends = [words.splitlines()[-1] for words in said]
    assert ends[0] == ends[1]
    assert ends[0].startswith("jaxmem: error: reward own.py:fails, prompt ")
