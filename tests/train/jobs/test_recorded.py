"""Rollouts of another engine, from JSON Lines: the same step, corrected, or refused."""

import json
import pathlib

import jax
import numpy as np
import pytest

from jaxmem.data.records import DataError
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.grpo import job as grpo
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.grpo import job_with
from tests.helpers.runs import refused

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
GIN = """
model.checkpoint = "llama"
task.source = "prompts.jsonl"
task.max_prompt_tokens = 6
sampling.max_new_tokens = 4
grpo.prompts = 4
grpo.group_size = 4
grpo.minibatches = 2
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
grpo.loss = "dapo"
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
run.job = "grpo"
run.steps = 2
run.compare_heads = False
run.out_dir = "run"
"""
OWN = ["task.reward=rewards.py:score"]
RECORDED = ["task.source=rollouts.jsonl", "task.recorded=True"]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    runs.write("prompts.jsonl", [{"prompt": a} for a in "abcdefgh"])
    pathlib.Path("rewards.py").write_text(
        "def score(completion_ids, **_):\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    pathlib.Path("grpo.gin").write_text(GIN)
    return tmp_path


def new_job(*overrides):
    config = configuration.load("grpo.gin", overrides)[0]
    job = jobs.job_of(config)
    program = grpo.PolicyProgram(job.config)
    return job_with(program, program.compile())


def write(made, noise=0.0):
    """The rollout as another engine would leave it."""
    rng, rows = np.random.default_rng(0), []
    supports = made.supports
    for i, length in enumerate(made.completions.lengths):
        prompt = made.prompts.ids[i, : made.prompts.lengths[i]]
        logprobs = np.asarray(made.samples.logprobs)[i, :length].astype(float)
        logprobs = np.minimum(logprobs + noise * rng.normal(size=length), 0)
        record = {
            "prompt_ids": prompt.tolist(),
            "completion_ids": made.completions.sampled[i, :length].tolist(),
            "logprobs": logprobs.tolist(),
            "reward": float(made.graded.rewards[i]),
        }
        if supports is not None:
            starts = supports.csr.offsets[supports.numbers[i, :length]]
            ends = supports.csr.offsets[supports.numbers[i, :length] + 1]
            record["supports"] = [
                supports.csr.ids[a:b].tolist()
                for a, b in zip(starts, ends, strict=True)
            ]
        rows.append(record)
    runs.write("rollouts.jsonl", rows)


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides", [["grpo.minibatches=1"], slow(["sampling.top_k=5"])], ids=str
)
def test_recorded_step_equals_samplers_own(overrides):
    job = new_job(*OWN, *overrides)
    state = job.initial_state()
    write(job._roll_out(1, state.params))
    job.open()
    state, told = job.step(1, state)
    other = new_job(*RECORDED, *overrides)
    assert other._compiled.sample is None
    got, found = other.step(1, other.initial_state())
    jax.tree.map(np.testing.assert_array_equal, got.params, state.params)
    assert found.grad_norm == told.grad_norm > 0 and found.reward == told.reward
    assert found.mismatch_max == told.mismatch_max < 1e-5
    assert found.support_mean == told.support_mean
    assert other.get_state()["next_problem"] == 4
    assert other.task.shown(other.last.prompts, other.last.completions, 0)


@pytest.mark.full
def test_old_pass_records_entries_of_other_samplers():
    """The trainer measures all tokens, and its mismatch to what sampled them."""
    job = new_job(*OWN)
    write(job._roll_out(1, job.initial_state().params), noise=0.1)
    other = new_job(*RECORDED, 'head.gradient=("recorded", 8)')
    assert other.config.passes.entries == "old pass" and other._compiled.logprobs
    _, told = other.step(1, other.initial_state())
    assert told.head_checked >= 2 and 0.05 < told.mismatch_mean < 0.15
    rollout = other._roll_out(2, other.initial_state().params)
    old, entries = other._measure_old(2, other.initial_state().params, rollout)
    within = np.arange(4) < rollout.completions.lengths[:, None]
    np.testing.assert_array_equal(old.known, within)
    np.testing.assert_array_equal(entries.logprobs[within], old.drawn_from[within])


@pytest.mark.slow
def test_corrections_are_for_such_rollouts(tmp_path):
    job = new_job(*OWN)
    write(job._roll_out(1, job.initial_state().params), noise=0.4)
    rewards = []
    for correction in ("icepop", "sequence_mask"):
        result, _ = runs.train(
            "grpo.gin", *RECORDED, f"grpo.correction={correction}",
            f"run.out_dir={correction}", "grpo.correction_low=0.9",
            "grpo.correction_high=1.1",
        )  # fmt: skip
        assert all(0 < step.dropped < 1 for step in result.history)
        assert result.history[0].mismatch_mean > 0.1
        rewards.append([step.reward for step in result.history])
        summary = json.loads((result.out_dir / "summary.json").read_text())
        assert set(summary["phases"]) == {"old", "update"}
    assert rewards[0] == rewards[1] and rewards[0][0] == rewards[0][1]  # once again


GOOD = {"prompt_ids": [1, 4], "completion_ids": [5, 2], "logprobs": [-1, -2.5],
        "reward": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"reward": "1"}, [], "rollouts.jsonl:2: reward must be a finite number or "),
        ({"reward": -2e18}, [],
         "rollouts.jsonl:2: reward is -2e+18; advantages are computed in float32, for"),
        ({"logprobs": [-1]}, [], "rollouts.jsonl:2: logprobs must be 2 log-probabilit"),
        ({"logprobs": [-1, 0.5]}, [], "logprobs must be 2 log-probabilities"),
        ({"completion_ids": [5, 400]}, [], "completion_ids must be ids in [0, 40), g"),
        ({"completion_ids": []}, [], "completion_ids has 0 ids; at least 1 is needed"),
        ({"prompt_ids": [1] * 7}, [],
         "prompt_ids has 7 ids; at most 6 are possible: task.max_prompt_tokens"),
        ({"prompt_ids": [1, 5]}, [],
         "rollouts.jsonl:2: prompt_ids differ from those of rollouts.jsonl:1; grpo."),
        ({"supports": [[5], [2]]}, [], "supports need sampling.top_k, top_p or min_p"),
        ({}, ["sampling.top_k=3"], "supports must be 2 lists of ids, one per token of"),
        ({"supports": [[4], [2]]}, ["sampling.top_k=3"],
         "the support of token 5 must contain the token, each id once"),
        ({"loss_mask": [1, 0]}, [], "rollouts.jsonl:2: rollouts do not use 'loss_"),
        ({"env_mask": [1, 1]}, [],
         "rollouts do not use 'env_mask'; name the column mask if it is 1 for sampled"),
        ({"mask": [1, 0]}, [], "2: logprobs must be 0 where mask is 0, got -2.5"),
        ({"completion_ids": [5] * 5, "logprobs": [0] * 5}, [],
         "completion_ids has 5 ids; at most 4 are possible: sampling.max_new_tokens; "
         "task.max_turns allows conversations"),
        ({"completion_ids": [5] * 15, "logprobs": [0] * 15},
         ["task.max_turns=2", "task.max_reply_tokens=6", "grpo.max_tokens_train=96",
          "grpo.max_tokens_forward=96"],
         "completion_ids has 15 ids; at most 14 are possible: task.max_turns=2 of "
         "sampling.max_new_tokens, with task.max_reply_tokens between them"),
        ({"turns": [0, 1]}, [], "2: 2 turns; at most task.max_turns=1 are possible"),
        ({}, ["grpo.turn_rewards=True"],
         'rollouts.jsonl:1: no "turn_rewards", which grpo.turn_rewards=True compares'),
        ({}, ["grpo.group_size=3"], "4 rollouts are not a multiple of grpo.group"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_used(change, overrides, message):
    rows = [dict(GOOD) for _ in range(4)]
    if "sampling.top_k=3" in overrides and "supports" in change:
        for row in rows:
            row["supports"] = [[5, 4], [2]]
    rows[1] |= change
    runs.write("rollouts.jsonl", rows)
    with pytest.raises(DataError) as raised:
        _ = jobs.job_of(
            configuration.load("grpo.gin", [*RECORDED, *overrides])[0]
        ).reads.task
    assert message in str(raised.value)


def test_columns_that_are_not_read_are_said_once():
    extra = {"advantage": 0.5, "supports": None}
    runs.write("rollouts.jsonl", [GOOD, GOOD | extra, GOOD | extra, GOOD])
    config = configuration.load("grpo.gin", RECORDED)[0]
    reads = jobs.job_of(config).reads
    said = "the column 'advantage' is not used: 2 (first rollouts.jsonl:2)"
    assert reads.lines() == [said]
    assert said in list(reads.records(1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.held_out=0.1"],
         "task.held_out must be left out, or 0.0, if rollouts are"),
        (["task.reward=number"], "reward must be left out, or 'exact', if rollouts"),
        (["task.environment_errors=mask"],
         "environment_errors must be left out, or 'raise', without an environment"),
        (["task.source=arithmetic"], "recorded must be False for task.source='arithme"),
        (["run.save_rollouts=True"],
         "run.save_rollouts=True must stay False for task.recorded=True: task.sou"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(overrides, message):
    refused("grpo.gin", ["task.recorded=True", *overrides], message)
