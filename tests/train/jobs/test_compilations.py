"""After its first step, a run compiles nothing: the host's side computes with NumPy."""

import pathlib

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxmem.train import configuration, jobs
from jaxmem.train.optimizer import learning_rate_schedule
from jaxmem.train.output.progress import ProgressReport
from tests.helpers import runs, texts

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
SMALL = (
    "model.checkpoint=llama", "model.lora_rank=0", "model.dtype=float32",
    "run.steps=4", "run.out_dir=run",
)  # fmt: skip
ROWS = "data.sequence_length=16", "data.batch_size=4", "run.accumulate=2"
JOBS = {
    "sft_lora.gin": ("data.source=texts.jsonl", *ROWS),
    "dpo_lora.gin": ("data.source=pairs.jsonl", *ROWS, "data.held_out=0.2"),
    "distill_stdlib.gin": (
        "data.source=texts.jsonl", "distill.teacher=llama", *ROWS, "data.held_out=0.2",
    ),
    "grpo_checkpoint.gin": (
        "task.source=prompts.jsonl", "task.reward=prefix", "grpo.prompts=2",
        "grpo.group_size=4", "grpo.max_tokens_train=64", "grpo.max_tokens_forward=64",
        "grpo.row_lengths=(16,)", "sampling.max_new_tokens=4",
        "task.max_prompt_tokens=4",
        "grpo.minibatches=2",
    ),
}  # fmt: skip

# Programs that the first step and the first evaluation compile: sums over held-out
# documents, GRPO's advantages and its comparison with the sampler, the means of
# held-out pairs, and the greedy sampler.
FIRST = {
    "sft_lora.gin": (0, 1), "dpo_lora.gin": (0, 1), "grpo_checkpoint.gin": (2, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    words = [a + b + c for a in "abcdef" for b in "xyzuv" for c in "lm"]
    runs.write("texts.jsonl", [{"text": f"{word} and {word[::-1]}"} for word in words])
    rows = [{"prompt": w, "chosen": w, "rejected": w[::-1]} for w in words]
    runs.write("pairs.jsonl", rows)
    runs.write("prompts.jsonl", [{"prompt": x, "answer": x} for x in "bcdefghi"])


@pytest.fixture
def compilations():
    """Names of what jax has compiled so far; what was compiled before is forgotten."""
    named = []

    def listen(event, seconds, **details):
        del seconds
        if event.endswith("backend_compile_duration"):
            named.append(details)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield named
    jax.monitoring.clear_event_listeners()


@pytest.mark.full
@pytest.mark.parametrize("gin", JOBS)
def test_steps_compile_no_operation_alone(gin, compilations, monkeypatch):
    small = SMALL[2:] if gin == "distill_stdlib.gin" else SMALL
    overrides = [*JOBS[gin], *small]
    job = jobs.job_of(configuration.load(CONFIGS / gin, overrides)[0])
    job.build()
    job.open()
    job.compile(ProgressReport(Console(quiet=True), 4, 0, 1))
    state = job.initial_state()
    assert not list(job.warnings(state))

    def never(count):
        raise AssertionError("the schedule is read, not computed, after that")

    monkeypatch.setattr(job.program, "schedule", never)
    assert compilations
    of_step, of_evaluation = FIRST.get(gin, (0, 0))
    compilations.clear()
    state, read = job.step(1, state)
    taken = [read() if callable(read) else read]
    # Eager arithmetic on the host's side would compile each operation.
    assert len(compilations) == of_step, compilations
    for number in (2, 3):
        state, read = job.step(number, state)
        taken.append(read() if callable(read) else read)
    assert len(compilations) == of_step, compilations
    job.evaluate(state, taken[-1])
    assert len(compilations) == of_step + of_evaluation, compilations
    schedule = learning_rate_schedule(job.config.optimizer, 4)
    rates = [float(schedule(i)) for i in range(3)]
    np.testing.assert_allclose([x.learning_rate for x in taken], rates, rtol=1e-6)
