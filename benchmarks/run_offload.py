"""Memory and time of offloading: policies of a deep stack, and an optimizer's state.

    python -m benchmarks.run_offload --out offload_h100.csv
    python -m benchmarks.run_offload --variant full --variant "full last=2"
    python -m benchmarks.run_offload --optimizer --out optimizer_h100.csv

Policies: steps of `stack.step` by variant, a preset of `jaxmem.remat` and words that
`stack.read` explains. One process compiles all of them. Another takes the compiled
programs from jax's cache, runs one step of each, in the order of their memory, reads
the allocator's peak after each, compares the gradients' norms of each layer with the
first variant's, and then times all of them in turns, step by step. Programs for a GPU
that promise bytes on the host are verified.

Optimizer: a step of AdamW on four stacks of float32 parameters, with its moments on the
device, or on the host and streamed in slices (`offload.Streamed`); each in a process of
its own.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import inspect
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import on_jax, results, stack, workers
from jaxmem import remat
from jaxmem.base import timing
from jaxmem.remat import offload

VARIANTS = [
    "full",
    "full last=4",
    "offload_block",
    "offload_block last=4",
    "offload_block last=6",
    "offload_attention",
    "save_attention",
    "dots",
]
GIB = 2**30
KEYS = ("variant", "layers", "width", "tokens", "device")
OPTIMIZER_KEYS = ("form", "parameters_gib", "device")
FORMS = ("device", "slices")
STACKS, LAYERS = 4, 16  # of the optimizer's parameters
HOST_LIMIT = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}


# ------------------------------------------------------------ programs of policies


def compile_all(sizes, variants) -> dict[str, jax.stages.Compiled]:
    """The programs by variant; a variant that does not compile is printed.

    The first is compiled alone, so that the GEMMs that were tuned for it serve the
    others, which are compiled in parallel.
    """
    lowered = {
        text: stack.trace(sizes, variant).lower() for text, variant in variants.items()
    }
    first, *others = lowered
    programs = {first: lowered[first].compile()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {text: pool.submit(lowered[text].compile) for text in others}
    for text, job in jobs.items():
        if error := job.exception():
            print(f"{text}: {workers.said(error)}", flush=True)
        else:
            programs[text] = job.result()
    return programs


def work_compile(args):
    """Send a row of the compiler's numbers for each variant."""
    sizes, variants = stack.SIZES[args.sizes], variants_of(args)
    start = time.perf_counter()
    programs = compile_all(sizes, variants)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for text, program in programs.items():
        variant = variants[text]
        account: Any = program.memory_analysis()
        row = {
            "variant": text, "layers": sizes.layers, "width": sizes.width,
            "tokens": sizes.rows * sizes.length * variant.rows,
            "temp_gib": in_gib(account.temp_size_in_bytes),
            "program_gib": in_gib(remat.device_bytes(program)),
            "host_gib": in_gib(account.host_temp_size_in_bytes),
            "verified": verified(
                sizes, variant, program, programs.get(on_device(variant, variants))
            ),
        }  # fmt: skip
        workers.send(row | results.provenance())


def on_device(variant, variants) -> str:
    """The variant that differs in offloading nothing alone; "" where there is none."""
    if variant.policy is None:
        return ""
    policy = dataclasses.replace(variant.policy, offload=())
    twin = dataclasses.replace(variant, policy=policy, options=())
    return next((text for text, other in variants.items() if other == twin), "")


def verified(sizes, variant, program, without) -> str:
    """ "yes", the error of `remat.verify`, or "" where no bytes are promised."""
    weights = jax.eval_shape(lambda: stack.initial(sizes, variant.last))
    h = jax.eval_shape(lambda: stack.hidden(sizes, variant.rows))
    promised = remat.host_bytes(stack.step(sizes, variant), weights, h)
    if not promised or jax.default_backend() == "cpu":
        return ""
    try:
        remat.verify(program, promised, without=without)
    except RuntimeError as error:
        return workers.said(error)
    return "yes"


# ---------------------------------------------------------------- steps of policies


def work_run(args):
    """Send each variant's peak, then its times after each round."""
    sizes, variants = stack.SIZES[args.sizes], variants_of(args)
    programs = compile_all(sizes, variants)
    rows, norms = {}, {}
    for text in args.variant:
        row, norms[text] = first_step(sizes, variants[text], programs[text])
        rows[text] = {"variant": text} | link() | row
        workers.send(rows[text])
    timed = {k: v for k, v in variants.items() if norms[k] and not v.is_large}
    for text in timed:
        error = gradient_error(norms[text], norms[args.first])
        rows[text]["gradient_error"] = f"{error:.1e}"
    for taken in rounds(sizes, args, timed, programs) if args.rounds else ():
        for text in timed:
            workers.send(rows[text] | taken[text])


def variants_of(args):
    return {text: stack.read(text) for text in args.variant}


def first_step(sizes, variant, program) -> tuple[dict[str, Any], Any]:
    """The allocator's peak, where it rose, and the norms of the gradients.

    A variant that needs all of the device is timed here, by one step.
    """
    row, before = {}, peak_bytes()
    try:
        weights, h = operands(sizes, variant)
        weights, _, norms = jax.block_until_ready(program(weights, h))
        peak = peak_bytes()
        if variant.is_large:
            seconds, weights = seconds_of(program, weights, h)
            row |= {"ms": round(seconds * 1e3, 1), "rounds": 1}
    except jax.errors.JaxRuntimeError as error:
        if not on_jax.is_out_of_memory(error):
            raise
        return {"ms": timing.OUT_OF_MEMORY}, None
    if peak > before:  # otherwise it is an earlier variant's
        row["peak_gib"] = in_gib(peak)
    return row, jax.device_get(norms)


def operands(sizes, variant):
    return stack.initial(sizes, variant.last), stack.hidden(sizes, variant.rows)


def seconds_of(program, weights, h):
    """(seconds of one step, the weights after it); the given weights are consumed."""
    start = time.perf_counter()
    weights = jax.block_until_ready(program(weights, h))[0]
    return time.perf_counter() - start, weights


def gradient_error(norms, expected) -> float:
    """The largest relative difference of a layer's norm, of all kinds of weight."""
    errors = jax.tree.map(
        lambda a, b: float(np.max(np.abs(a - b) / b)), norms, expected
    )
    return max(jax.tree.leaves(errors))


def rounds(sizes, args, variants, programs) -> Iterator[dict[str, dict[str, Any]]]:
    """After each round, the columns of time so far; the order of variants rotates.

    Variants with as many blocks after the scan share their weights.
    """
    weights = {v.last: stack.initial(sizes, v.last) for v in variants.values()}
    h = stack.hidden(sizes)

    def once(text):
        last = variants[text].last
        seconds, weights[last] = seconds_of(programs[text], weights[last], h)
        return seconds

    order, seconds = list(variants), {text: [] for text in variants}
    once(args.first)  # warms up
    for i in range(args.rounds):
        for text in order[i:] + order[:i]:
            seconds[text].append(once(text))
        yield {k: columns(taken, seconds[args.first]) for k, taken in seconds.items()}


def columns(seconds, of_first) -> dict[str, Any]:
    """Median milliseconds, and the median ratio to the first variant's same round."""
    ratios = [a / b for a, b in zip(seconds, of_first, strict=True)]
    middle = statistics.median(ratios)
    return {
        "ms": round(statistics.median(seconds) * 1e3, 1),
        "over_first": round(middle, 4),
        "spread": round((max(ratios) - min(ratios)) / middle, 4),
        "rounds": len(seconds),
    }


@functools.cache
def link() -> dict[str, float]:
    """GB/s of a copy of one GiB to the host, and back."""
    n = 2**10 if jax.default_backend() == "cpu" else GIB // 2
    x = jax.block_until_ready(jnp.zeros(n, jnp.bfloat16))
    host = x.sharding.with_memory_kind("pinned_host")
    there = jax.block_until_ready(jax.device_put(x, host))

    def rate(array, target):
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(array, target))
            seconds.append(time.perf_counter() - start)
        return round(array.nbytes / min(seconds) / 1e9, 1)

    return {"to_host_gbs": rate(x, host), "from_host_gbs": rate(there, x.sharding)}


# ------------------------------------------------------------------ the optimizer


def work_optimizer(args):
    """Send the row of one form: the time of a step, and the allocator's peak."""
    width = max(args.gib * GIB // (4 * STACKS * LAYERS * 8192), 1)
    shape = (LAYERS, 8192, width) if args.gib else (LAYERS, 8, 16)

    @jax.jit
    def draw(seed):  # in one pass, so that no temporary sets the peak
        numbers = jax.lax.broadcasted_iota(jnp.float32, shape, 2)
        return {str(i): jnp.sin(numbers + i + seed) for i in range(STACKS)}

    params, gradients = jax.block_until_ready((draw(0), draw(1)))
    state, step = optimizer(args.form[0], params)
    jax.block_until_ready(state)
    before, seconds = peak_bytes(), []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        params, state = jax.block_until_ready(step(params, gradients, state))
        seconds.append(time.perf_counter() - start)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    row = {
        "form": args.form[0], "parameters_gib": in_gib(size),
        "ms": round(statistics.median(seconds[1:]) * 1e3, 1),
        "peak_before_gib": in_gib(before), "peak_gib": in_gib(peak_bytes()),
        "mean_square": float(jnp.mean(jnp.square(params["0"][0]))),
        "rounds": args.rounds,
    }  # fmt: skip
    workers.send(row | results.provenance())


def optimizer(form, params):
    """(state, a step of AdamW) of a form; steps consume parameters and state."""
    adamw = optax.adamw(1e-3, weight_decay=0.01)
    if form == "slices":
        streamed = offload.Streamed(adamw)
        return streamed.init(params), streamed.update

    @functools.partial(jax.jit, donate_argnums=(0, 2))
    def step(params, gradients, state):
        updates, state = adamw.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(adamw.init)(params), step


# ------------------------------------------------------------------------- driver


def in_gib(n_bytes) -> float:
    return round(n_bytes / GIB, 3)


def peak_bytes() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def drive(args):
    """Measure the policies; the CSV grows row by row."""
    with workers.compilation_cache() as environment:
        start = functools.partial(
            workers.start, "benchmarks.run_offload", environment | HOST_LIMIT
        )
        common = [f"--rounds={args.rounds}", f"--sizes={args.sizes}"]
        given = [f"--variant={text}" for text in args.variant]
        rows = {r["variant"]: r for r in start(["--worker=compile", *common, *given])}
        by_memory = sorted(rows, key=lambda text: rows[text]["program_gib"])
        given = [f"--variant={text}" for text in by_memory]
        common += [f"--first={args.variant[0]}"]
        for measured in start(["--worker=run", *common, *given]):
            row = rows[measured["variant"]]
            row |= measured
            results.merge(args.out, [row], KEYS)
            if row.get("rounds") in (None, args.rounds):
                print(row, flush=True)


def drive_optimizer(args):
    """Measure the forms of the optimizer; each is compared with the first."""
    rows = []
    with workers.compilation_cache() as environment:
        for form in args.form or FORMS:
            given = ["--worker=optimizer", f"--form={form}", f"--gib={args.gib}"]
            given += [f"--rounds={args.rounds}"]
            for row in workers.start(
                "benchmarks.run_offload", environment | HOST_LIMIT, given
            ):
                rows.append(row)
                row["over_first"] = round(row["ms"] / rows[0]["ms"], 3)
                error = abs(row["mean_square"] / rows[0]["mean_square"] - 1)
                row["error"] = f"{error:.1e}"
                results.merge(args.out, [row], OPTIMIZER_KEYS)
                print(row, flush=True)


WORK = {"compile": work_compile, "run": work_run, "optimizer": work_optimizer}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--variant", action="append", help="of policies; repeat")
    parser.add_argument("--sizes", choices=list(stack.SIZES), default="deep")
    parser.add_argument("--optimizer", action="store_true", help="measure its state")
    parser.add_argument("--form", action="append", choices=FORMS, help="of its state")
    parser.add_argument("--gib", type=int, default=8, help="of parameters; 0: some KiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="offload.csv or optimizer.csv in results/")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=list(WORK), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.variant = args.variant or VARIANTS
    args.out = args.out or ("optimizer.csv" if args.optimizer else "offload.csv")
    run = WORK[args.worker] if args.worker else drive
    (drive_optimizer if args.optimizer else run)(args)


if __name__ == "__main__":
    main()
