"""Old, reference and update passes of GRPO, without a sampler.

Case "job" is grpo_qwen3_8b_h200.gin with completions of full length; "unshared" and
"shared" have groups with prompts as long as completions, which are read each time or
once. Tokens, log-probabilities and advantages are random. Tokens of a row are those of
all sequences with their prompts, whether these are read or not. Phase "all before" is
that of an old pass that reads the whole rollout, as the reference pass does, whose
seconds count twice.
"""

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks.run_grpo import CONFIGS
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.sampling import Samples
from jaxmem.train.configuration import load
from jaxmem.train.jobs.grpo import Grpo
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import Graded, PromptIds
from jaxmem.train.jobs.rollout.samples import Sampled, SlotUse
from jaxmem.train.metrics import memory_of
from jaxmem.train.output.progress import ProgressReport

CONFIG = "grpo_qwen3_8b_h200.gin"
CASES = ("job", "unshared", "shared")


@dataclasses.dataclass(frozen=True)
class LongPrompts(TaskConfig):
    """Sums, with room for longer prompts."""

    room: int = 512

    @property
    def prompt_length(self):
        return self.room


class UnsampledProgram(PolicyProgram):
    """The programs of GRPO; that of the sampler is not compiled."""

    def trace_sample(self, greedy=False):
        lowered = SimpleNamespace(compile=lambda: None)
        return SimpleNamespace(lower=lambda: lowered)  # pyright: ignore


def random_rollout(config, number, attempt, position, params) -> Sampled:
    """Completions of random tokens and of full length, in the place of sampled ones."""
    rng, grpo = np.random.default_rng(number), config.grpo
    n, (prompt, completion) = grpo.samples, lengths_of(config)
    ids = rng.integers(2, 14, (grpo.prompts, prompt), np.int32)
    prompts = PromptIds(
        ids.repeat(grpo.group_size, axis=0), np.full(n, prompt, np.int32), None
    )
    tokens = rng.integers(2, 14, (n, completion), np.int32)
    logprobs = rng.normal(-2, 0.5, tokens.shape).astype(np.float32)
    lengths, mask = np.full(n, completion, np.int32), np.ones(tokens.shape, bool)
    samples: Any = Samples(tokens, mask, logprobs, None, lengths)  # pyright: ignore
    rewards = rng.normal(size=n).astype(np.float32)
    return Sampled(
        prompts, Completions.of_samples(prompts, samples), samples,
        Graded(rewards, rewards), np.ones(n, bool), np.ones_like(lengths),
        SlotUse(0, 0),
    )  # fmt: skip


def lengths_of(config):
    """Tokens of a prompt and of a completion."""
    return config.task.prompt_length, config.sampling.max_new_tokens


def config_of(case, minibatches, tokens, group, overrides):
    """The case's config; of long prompts, a group's tokens are a micro-batch."""
    given = [f"grpo.minibatches={minibatches}", *overrides]
    if case == "job":
        return load(CONFIGS / CONFIG, given)[0]
    given += [f"sampling.max_new_tokens={tokens}", f"grpo.group_size={group}"]
    given += ["grpo.row_lengths=None", "grpo.prompts=4"]
    given += [f"grpo.max_tokens_train={tokens * (group + 1)}"]
    given += [f"grpo.max_tokens_forward={2 * tokens * (group + 1)}"]
    config, _ = load(CONFIGS / CONFIG, given)
    task = LongPrompts(**dataclasses.asdict(config.task), room=tokens)
    grpo = dataclasses.replace(config.grpo, share_prompts=case == "shared")
    return dataclasses.replace(config, task=task, grpo=grpo)


def measure(case, config, overrides, rollouts) -> Iterator[dict]:
    """A row per pass, and two of all: medians over the rollouts but the first."""
    job = Grpo(config)
    job.program = UnsampledProgram(config)
    job._sample_rewarded = functools.partial(random_rollout, config)
    job.open()
    job.compile(ProgressReport(Console(quiet=True), 1, 0, 1))
    state, seconds = job.program.initial_state(), []
    for number in range(1, rollouts + 1):
        state, step = job.step(number, state)
        jax.block_until_ready(state.params)
        old, reference = step.old_seconds, step.reference_seconds
        update = step.update_seconds
        seconds.append({
            "old": old, "reference": reference, "update": update,
            "all": old + reference + update, "all before": 2 * reference + update,
        })  # fmt: skip
    programs = job._compiled
    peaks = {
        "old": [*programs.logprobs.values()],
        "reference": [*programs.reference.values()],
        "update": [*programs.gradients.values(), programs.update],
    }
    grpo, (prompt, completion) = config.grpo, lengths_of(config)
    tokens = grpo.samples * (prompt + completion - 1)
    for phase in seconds[0]:
        taken = float(np.median([row[phase] for row in seconds[1:]]))
        sizes = [memory_of(program).peak for program in peaks.get(phase, [])]
        yield {
            "config": CONFIG, "overrides": " ".join(overrides), "case": case,
            "minibatches": grpo.minibatches, "group_size": grpo.group_size,
            "prompt_tokens": prompt, "completion_tokens": completion, "phase": phase,
            "tokens": tokens, "seconds": round(taken, 3),
            "tokens_per_second": round(tokens / taken) if taken > 1e-3 else "",
            "program_gib": round(max(sizes) / 2**30, 2) if sizes else "",
        }  # fmt: skip


def passes(cases, minibatches, rollouts, sizes, overrides) -> Iterator[dict]:
    """Rows of each case and number of minibatches; sizes are those of long prompts."""
    for case in cases:
        for count in minibatches:
            config = config_of(case, count, *sizes, overrides)
            yield from measure(case, config, overrides, rollouts)
