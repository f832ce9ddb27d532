"""Jobs that train adapters on a base in 4 or 8 bits, killed and resumed."""

import functools
import json
import math
import pathlib

import pytest

from jaxmem.train.jobs import dpo, sft
from jaxmem.train.jobs.distill import job as distill
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.metrics import (
    DistillMetrics,
    PolicyMetrics,
    PreferenceMetrics,
    StepMetrics,
)
from jaxmem.train.output.history import read_history
from tests.helpers import runs, texts
from tests.helpers.kills import kill_before

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("quick_compilation", "no_picture", "programs_of_module"),
]
RUN = """
model.lora_rank = 2
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
run.steps = 4
run.checkpoint_every = 2
run.compare_heads = False
run.log_every = 1
eval.every = None
"""
DATA = """
data.source = "words.jsonl"
data.sequence_length = 16
data.batch_size = 4
data.held_out = 0.0
"""
NEW = """
model.layers = 1
model.hidden = 64
model.ff = 64
model.heads = 2
model.kv_heads = 1
model.head_dim = 32
model.tied = False
model.base = "nf4"
"""
POLICY = """
task.digits = 1
task.answer = "sum"
task.reward = "prefix"
sampling.max_new_tokens = 3
grpo.prompts = 8
grpo.group_size = 4
grpo.max_tokens_train = 32
grpo.max_tokens_forward = 64
grpo.kl_coefficient = 0.1
run.job = "grpo"
"""
# Half of the inputs of each matrix are whole blocks.
WIDE = (
    NEW.replace("64", "128")
    .replace("= 32", "= 64")
    .replace("kv_heads = 1", "kv_heads = 2")
)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Texts and pairs of answers, and the directories of tiny checkpoints."""
    monkeypatch.chdir(tmp_path)
    words = [x + y for x in "cdefg" for y in "rstuvwxy"]
    runs.write("words.jsonl", [{"text": f"{w} and {w[::-1]}"} for w in words])
    pairs = [{"prompt": w, "chosen": w + "aa", "rejected": "bbb" + w} for w in words]
    runs.write("pairs.jsonl", pairs)


def whole_and_resumed(job, kind, text, monkeypatch, *overrides):
    """The steps of a run that is not disturbed; one that is killed has the same."""
    pathlib.Path("job.gin").write_text(RUN + text)
    train = functools.partial(runs.train, "job.gin", *overrides)
    train("run.out_dir=whole")
    kill_before(4, job, monkeypatch, lambda: train("run.out_dir=cut"))
    assert len(read_history(pathlib.Path("cut/metrics.jsonl"), kind)) == 3
    assert "at step 2 of 4" in train("run.out_dir=cut")[1]
    whole, cut = (runs.steps(path, kind) for path in ("whole", "cut"))
    assert cut == whole and len(whole) == 4
    return whole


@pytest.mark.parametrize(
    "overrides",
    [(), ("remat.policy=none",), ("remat.policy=offload_block",),
     ("optimizer.offload=True",)],
)  # fmt: skip
def test_killed_supervised_run_resumes_on_codes(overrides, monkeypatch, tmp_path):
    base = texts.coded_checkpoint("llama_double", tmp_path)
    text = DATA + f"model.checkpoint = {str(base)!r}\n"
    steps = whole_and_resumed(sft.Sft, StepMetrics, text, monkeypatch, *overrides)
    assert steps[-1]["loss"] < steps[0]["loss"]
    recorded = json.loads(pathlib.Path("cut/adapter/base.json").read_text())
    assert recorded["base"] == "nf4"


def test_killed_preference_run_resumes_on_codes(monkeypatch, tmp_path):
    base = texts.coded_checkpoint("qwen3_nf4", tmp_path)
    text = DATA.replace("words", "pairs") + 'run.job = "dpo"\n'
    text += f"model.checkpoint = {str(base)!r}\n"
    steps = whole_and_resumed(dpo.Dpo, PreferenceMetrics, text, monkeypatch)
    # The reference is the base with the same codes.
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("decode_base", [False, True])
def test_killed_policy_resumes_on_codes(decode_base, monkeypatch):
    text = NEW + POLICY + f"sampling.decode_base = {decode_base}\n"
    steps = whole_and_resumed(grpo.Grpo, PolicyMetrics, text, monkeypatch)
    assert steps[0]["kl"] < 1e-3 < steps[-1]["kl"]


def test_killed_student_resumes_on_codes(monkeypatch, tmp_path):
    teacher = texts.checkpoint("llama", tmp_path)
    text = (
        DATA
        + NEW
        + f"""
distill.teacher = {str(teacher)!r}
distill.teacher_base = "int8"
run.job = "distill"
"""
    )
    steps = whole_and_resumed(distill.Distill, DistillMetrics, text, monkeypatch)
    assert steps[-1]["divergence"] < steps[0]["divergence"]


@pytest.mark.slow
def test_policy_on_codes_equals_mesh(monkeypatch):
    pathlib.Path("job.gin").write_text(RUN + WIDE + POLICY)
    train = functools.partial(
        runs.train, "job.gin", "run.steps=2", "grpo.max_tokens_train=64"
    )
    train("run.out_dir=alone")
    mesh = "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    train("run.out_dir=mesh", *mesh)
    alone, sharded = (runs.steps(path, PolicyMetrics) for path in ("alone", "mesh"))
    for name in ("loss", "reward", "entropy", "kl"):
        expected = pytest.approx(alone[0][name], rel=1e-3, abs=1e-5)
        assert sharded[0][name] == expected, name
