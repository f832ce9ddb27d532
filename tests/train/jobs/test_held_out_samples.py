"""avg@k and pass@k of held-out prompts: the estimator, and a run that resumes."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import rollout_metrics
from jaxmem.train.jobs.rollout.prompts import Graded
from jaxmem.train.jobs.rollout_metrics import pass_at
from jaxmem.train.metrics import PolicyMetrics
from tests.helpers import runs, texts
from tests.helpers.runs import refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
SFT = pathlib.Path(__file__).parents[3] / "configs" / "sft_stdlib.gin"
GIN = """
model.checkpoint = "llama"
task.source = "prompts.jsonl"
task.reward = "rewards.py:score"
task.max_prompt_tokens = 6
task.held_out = 0.3
sampling.max_new_tokens = 3
grpo.prompts = 2
grpo.group_size = 4
grpo.minibatches = 1
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.schedule = "constant"
optimizer.warmup_steps = 0
eval.every = 1
eval.samples = 3
run.job = "grpo"
run.steps = 2
run.checkpoint_every = 1
run.compare_heads = False
run.out_dir = "run"
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    runs.write("prompts.jsonl", [{"prompt": a} for a in "abcdefghij"])
    pathlib.Path("rewards.py").write_text(
        "def score(completion_ids, **_):\n"
        "    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    )
    pathlib.Path("grpo.gin").write_text(GIN)
    return tmp_path


@pytest.mark.parametrize("right", ["0000", "1000", "1100", "1111", "01010"])
def test_pass_at_k_is_the_mean_over_all_subsets(right):
    values = np.array([*right], float)
    for k in range(1, len(values) + 1):
        subsets = list(itertools.combinations(values, k))
        mean = np.mean([max(subset) for subset in subsets])
        assert pass_at(k, values) == pytest.approx(mean, abs=1e-12)


def test_completions_without_reward_are_none():
    nan = np.nan
    assert pass_at(2, np.array([1, nan, 0])) == 1.0
    assert np.isnan(pass_at(3, np.array([1, nan, 0])))
    rewards = np.array([0.5, nan, 2, 0, 0, 0], np.float32)
    right = np.where(np.isnan(rewards), nan, rewards >= 1).astype(np.float32)
    assert rollout_metrics.of_held_out_samples([Graded(rewards, right)], 3) == {
        "held_out_avg@3": 0.5, "held_out_pass@1": 0.25, "held_out_pass@2": 0.5,
        "held_out_pass@3": 0.0,
    }  # fmt: skip


@pytest.mark.usefixtures("one_program")
def test_samples_of_held_out_prompts_are_recorded_and_resume(directory):
    _, said = runs.train("grpo.gin")
    lines = pathlib.Path("run/metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        names = [name for name in line if "@" in name]
        assert names == ["held_out_avg@3", *(f"held_out_pass@{k}" for k in (1, 2, 3))]
        assert line["held_out_pass@1"] == pytest.approx(line["held_out_avg@3"])
        assert line["held_out_pass@1"] <= line["held_out_pass@2"]
        assert line["held_out_reward"] is not None and "held_out_at_k" not in line
        assert f"avg@3 {line['held_out_avg@3']:.3f}  pass@3 " in said
    gains = [
        x["held_out_pass@3"] - x["held_out_pass@1"] for x in map(json.loads, lines)
    ]
    assert max(gains) > 0  # completions of a prompt differ
    wanted = runs.steps("run", kind=PolicyMetrics)
    assert wanted[0]["held_out_at_k"] is not None
    # As if killed after the first step.
    for steps in (1, 2):
        runs.train("grpo.gin", "run.out_dir=cut", f"run.steps={steps}")
    assert runs.steps("cut", kind=PolicyMetrics) == wanted


def test_settings_that_need_samples_or_rollouts(directory):
    refused("grpo.gin", ["eval.samples=None", "eval.temperature=0.5"],
            "eval.temperature=0.5 has no effect without eval.samples; set")  # fmt: skip
    refused("grpo.gin", ["eval.temperature=0"], "eval.temperature must be")
    with pytest.raises(ValueError, match="eval.samples=8 must stay None for run.job='"):
        jobs.job_of(configuration.load(SFT, ["eval.samples=8", "eval.every=1"])[0])
