"""jaxmem's side of `run_step`: one variant of a training step in this process."""

import json
import sys
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
from rich.console import Console

from benchmarks import results, step_rows, trace_summary, workers
from benchmarks.run_long_step import types_of
from jaxmem.train import configuration
from jaxmem.train.jobs import sft

GIB = 2**30
TRACED = 3  # steps


def prepare(job):
    """The program of a job and its trace: nothing is on the device yet.

    There is no trace where the device's memory chooses the policy.
    """
    config, _ = configuration.load(job["config"], job["overrides"])
    assert config.run.job == "sft"
    assert config.model.vocab_size is not None
    if job["loss"] == "logprobs":
        sft.head_loss = loss_of_logprobs
    packed = job["lengths"] != "full"
    program = sft.SftProgram(config, config.model.vocab_size, packed=packed)
    fits = config.remat.policy == "fit"
    return config, program, None if fits else program.trace_backward()


def loss_of_logprobs(head, hidden, labels, normalizer, *_):
    """`head_loss` without the knowledge that a loss is what is wanted."""
    total = -jnp.sum(head.logprobs(hidden, labels))
    return total / jnp.maximum(normalizer, 1), {}


def measure(job, config, program, traced):
    """Columns: memory by the compiler, and the allocator's peak; seconds, tokens/s."""
    options = {k: workers.value_of(v) for k, v in job["options"].items()}
    start = time.perf_counter()
    if traced is None:
        program.choose_policy(Console())
        traced = program.trace_backward()
    compiled = traced.lower().compile(compiler_options=options or None)
    step = program.with_update(compiled)
    row = {"compile_s": round(time.perf_counter() - start, 1), **types_of(program)}
    row["policy"] = described(program.policy)
    account = compiled.memory_analysis()
    row["temporary_gib"] = round(account.temp_size_in_bytes / GIB, 2)
    state, frozen = program.initial_state(), program.frozen()
    batches = step_rows.batches(config, job["lengths"])
    placed = [*map(program.layout.place, batches)]
    jax.block_until_ready((state, frozen, placed))
    ends, losses, unread = [], [], None
    for number, batch in enumerate(placed, start=1):
        drawn_by = program.step_numbers(config.head, number)
        state, numbers = step(state, frozen, batch, *drawn_by)
        unread, read = numbers["loss"], unread  # as jaxmem.train.loop reads them
        if read is not None:
            losses.append(float(read))
            ends.append(time.perf_counter())
    assert unread is not None
    losses.append(float(unread))
    ends.append(time.perf_counter())
    row |= step_rows.columns(batches, ends)
    mfu = program.mfu(row["tokens_per_second"])
    row |= {
        "loss_read": "one step late",
        "mfu": "" if mfu is None else round(mfu, 4),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        row["device_peak_gib"] = round(stats["peak_bytes_in_use"] / GIB, 2)
    drawn_by = program.step_numbers(config.head, config.run.steps + 1)
    given = frozen, placed[-1], *drawn_by
    if not job["trace"]:
        return row, []
    operations = trace_summary.operations(compiled.as_text() or "")
    return row, profile(step, state, given, operations)


def described(policy):
    """A policy in a few words."""
    if policy is None:
        return "nothing recomputed"
    facts = {"save": policy.save, "offload": policy.offload}
    words = [f"{name} {' '.join(names)}" for name, names in facts.items() if names]
    words += ["save products"] * policy.dots
    words += [f"last {policy.last} blocks whole"] * bool(policy.last)
    return ", ".join(words) or "all recomputed"


def profile(step, state, given, operations):
    """Rows of `trace_summary`, classes and kernels; none where there is no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                state, numbers = step(state, *given)
            float(numbers["loss"])
        events = trace_summary.device_events(folder, operations)
    classes = trace_summary.summary(events, TRACED)
    return [*classes, *trace_summary.kernels(events, TRACED)]


def main(text: str) -> None:
    job, row, shares = json.loads(text), {}, []
    try:
        prepared = prepare(job)
        sys.stdin.readline()  # whoever measures now has the device
        row, shares = measure(job, *prepared)
    except Exception as error:  # the other variants are measured all the same
        traceback.print_exc(file=sys.stdout)
        row = {"note": workers.said(error)}
    workers.send({**row, "shares": shares, **results.provenance()})


if __name__ == "__main__":
    main(sys.argv[1])
