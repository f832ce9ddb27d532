"""Passes of GRPO over a rollout whose groups' prompts are read once, and each time.

    python -m benchmarks.run_shared --out shared_h200.csv
    python -m benchmarks.run_shared --out shared_h200.csv model.attention=cudnn

The job is grpo_qwen3_8b_h200.gin, in groups of 16 with prompts as long as completions;
tokens, log-probabilities and advantages are random. Old, reference and update passes
are timed, with one minibatch and with two; tokens are those of all sequences, with
their prompts, whether these are read or not.
"""

import argparse
import dataclasses
import time
from types import SimpleNamespace

import jax
import numpy as np
from rich.console import Console

from benchmarks import results
from benchmarks.run_grpo import CONFIGS
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.sampling import Samples
from jaxmem.train.configuration import load
from jaxmem.train.jobs.asked import Graded
from jaxmem.train.jobs.grpo import Grpo
from jaxmem.train.jobs.minibatches import Minibatch
from jaxmem.train.jobs.rollout_metrics import Rollout
from jaxmem.train.jobs.rollouts import Completions
from jaxmem.train.metrics import memory_of
from jaxmem.train.progress import ProgressReport

CONFIG = "grpo_qwen3_8b_h200.gin"


@dataclasses.dataclass(frozen=True)
class LongPrompts(TaskConfig):
    """Sums, with room for prompts that are none."""

    room: int = 512

    @property
    def prompt_length(self):
        return self.room


def config_of(share, minibatches, tokens, group, overrides):
    """Four groups, in micro-batches of one group's tokens that are read at once."""
    given = [f"sampling.max_new_tokens={tokens}", f"grpo.group_size={group}"]
    given += [f"grpo.minibatches={minibatches}", "grpo.prompts=4"]
    given += ["grpo.row_lengths=None", f"grpo.max_tokens_train={tokens * (group + 1)}"]
    given += [f"grpo.max_tokens_forward={2 * tokens * (group + 1)}", *overrides]
    config, _ = load(CONFIGS / CONFIG, given)
    task = LongPrompts(**dataclasses.asdict(config.task), room=tokens)
    grpo = dataclasses.replace(config.grpo, share_prompts=share)
    return dataclasses.replace(config, task=task, grpo=grpo)


def rollout_of(config, seed):
    """Random tokens of full length, and what they are worth."""
    rng, grpo, tokens = np.random.default_rng(seed), config.grpo, config.task.room
    shape = grpo.samples, config.sampling.max_new_tokens
    prompts = rng.integers(2, 14, (grpo.prompts, tokens), np.int32)
    prompts = prompts.repeat(grpo.group_size, axis=0)
    sampled = rng.integers(2, 14, shape, np.int32)
    full = np.full(grpo.samples, shape[1], np.int32)
    completions = Completions.of(prompts, np.full_like(full, tokens), sampled, full)
    logprobs = rng.normal(-2, 0.5, shape).astype(np.float32)
    made = Samples(sampled, np.ones(shape, bool), logprobs, None, full)
    worth = rng.normal(size=grpo.samples).astype(np.float32)
    return Rollout(
        None, completions, made, None, Graded(worth, worth), worth,
        np.ones(grpo.samples, bool), np.ones_like(full), 0, None,
    )  # fmt: skip


def take(job, number, state):
    """Seconds of the passes of one rollout."""
    rollout, marks = rollout_of(job.config, number), [time.perf_counter()]

    def mark():
        marks.append(time.perf_counter())

    old = job._old(number, state.params, rollout)
    mark()
    reference = job._logprobs(job._compiled.reference, job._reference, rollout)
    mark()
    learned = Minibatch(
        rollout.completions, rollout.advantages, old.drawn_from, reference.drawn_from,
        None,
    )  # fmt: skip
    state, _ = job._learn(number, state, learned, old)
    jax.block_until_ready(state.params)
    mark()
    return state, np.diff(marks)


def measure(share, minibatches, tokens, group, overrides, steps):
    """A row a pass, and one of all: medians over the rollouts but the first."""
    config = config_of(share, minibatches, tokens, group, overrides)
    job = Grpo(config)
    job.program = job.make_program(job.vocabulary())
    lowered = SimpleNamespace(compile=lambda: None)  # nothing is sampled
    job.program.trace_sample = lambda: SimpleNamespace(lower=lambda: lowered)
    job.open()
    job.compile(ProgressReport(Console(quiet=True), 1, 0, 1))
    state, seconds = job.program.initial_state(), []
    for number in range(1, steps + 1):
        state, taken = take(job, number, state)
        seconds.append([*taken, taken.sum()])
    made = job._compiled
    peaks = {
        "old": [*made.logprobs.values()],
        "reference": [*made.reference.values()],
        "update": [*made.gradients.values(), made.update],
    }
    read = config.grpo.samples * (2 * tokens - 1)
    for i, phase in enumerate((*peaks, "all")):
        took = float(np.median([row[i] for row in seconds[1:]]))
        sizes = [memory_of(program).peak for program in peaks.get(phase, [])]
        yield {
            "config": CONFIG, "overrides": " ".join(overrides),
            "share_prompts": share, "minibatches": minibatches, "group_size": group,
            "prompt_tokens": tokens, "completion_tokens": tokens, "phase": phase,
            "tokens": read, "seconds": round(took, 3),
            "tokens_per_second": round(read / took) if took > 1e-3 else "",
            "program_gib": round(max(sizes) / 2**30, 2) if sizes else "",
        }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a prompt")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    rows = []
    for minibatches in (1, 2):
        for share in (False, True):
            case = share, minibatches, given.tokens, given.group
            for row in measure(*case, given.overrides, given.steps):
                print(row, flush=True)
                rows.append(row)
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
