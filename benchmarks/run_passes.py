"""Old, reference and update passes of GRPO, without a sampler.

    python -m benchmarks.run_passes --out passes_h100.csv
    python -m benchmarks.run_passes --out passes_h100.csv grpo.correction=ratio

Case "job" is grpo_qwen3_8b_h200.gin with completions of full length; "unshared" and
"shared" have groups of 16 with prompts as long as completions, which are read each time
or once. Tokens, log-probabilities and advantages are random. All passes are timed, with
one minibatch and with two; tokens are those of all sequences with their prompts,
whether these are read or not. In phase "all before" the old pass reads the whole
rollout, as the reference pass does, whose seconds count twice.
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


def config_of(case, minibatches, tokens, group, overrides):
    """Four groups, in micro-batches of one group's tokens that are read at once."""
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


def rollout_of(config, seed):
    """Random tokens of full length, and what they are worth."""
    rng, grpo = np.random.default_rng(seed), config.grpo
    tokens, sampled = sizes_of(config)
    shape = grpo.samples, sampled
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


def sizes_of(config):
    """Tokens of a prompt and of a completion."""
    return config.task.prompt_length, config.sampling.max_new_tokens


def take(job, number, state):
    """Seconds of the passes of one rollout."""
    rollout, marks = rollout_of(job.config, number), [time.perf_counter()]

    def mark():
        marks.append(time.perf_counter())

    old = job._old(number, state.params, rollout)
    mark()
    reference = job._logprobs(job._compiled.reference, job._reference, rollout)
    mark()
    before = old.drawn_from
    if job.config.grpo.starts_from_sampler:
        before = rollout.samples.logprobs
    learned = Minibatch(
        rollout.completions, rollout.advantages, before, reference.drawn_from, None
    )
    state, _ = job._learn(number, state, learned, old)
    jax.block_until_ready(state.params)
    mark()
    return state, np.diff(marks)


def measure(case, minibatches, tokens, group, overrides, steps):
    """A row a pass, and two of all: medians over the rollouts but the first."""
    config = config_of(case, minibatches, tokens, group, overrides)
    job = Grpo(config)
    job.program = job.make_program(job.vocabulary())
    lowered = SimpleNamespace(compile=lambda: None)  # nothing is sampled
    job.program.trace_sample = lambda _: SimpleNamespace(lower=lambda: lowered)
    job.open()
    job.compile(ProgressReport(Console(quiet=True), 1, 0, 1))
    state, seconds = job.program.initial_state(), []
    for number in range(1, steps + 1):
        state, taken = take(job, number, state)
        before = 2 * taken[1] + taken[2]
        seconds.append([*taken, taken.sum(), before])
    made = job._compiled
    peaks = {
        "old": [*made.logprobs.values()],
        "reference": [*made.reference.values()],
        "update": [*made.gradients.values(), made.update],
    }
    grpo, (prompt, sampled) = config.grpo, sizes_of(config)
    read = grpo.samples * (prompt + sampled - 1)
    for i, phase in enumerate((*peaks, "all", "all before")):
        took = float(np.median([row[i] for row in seconds[1:]]))
        sizes = [memory_of(program).peak for program in peaks.get(phase, [])]
        yield {
            "config": CONFIG, "overrides": " ".join(overrides),
            "case": case, "minibatches": minibatches, "group_size": grpo.group_size,
            "prompt_tokens": prompt, "completion_tokens": sampled, "phase": phase,
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
    parser.add_argument("--cases", nargs="+", default=["job", "unshared", "shared"])
    parser.add_argument("--minibatches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    rows = []
    for case in given.cases:
        for minibatches in given.minibatches:
            sizes = minibatches, given.tokens, given.group
            for row in measure(case, *sizes, given.overrides, given.steps):
                print(row, flush=True)
                rows.append(row)
    print("wrote", results.write(given.out, rows))


if __name__ == "__main__":
    main()
