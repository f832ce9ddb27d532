"""Step time against memory of a deep stack's policies: saved, on the host, made again.

    python -m benchmarks.run_offload --out offload_h200.csv
    python -m benchmarks.run_offload --variant full --variant "full last=2"

A variant is a preset of `jaxmem.remat` and words that `stack.read` explains. One
process compiles all of them. Another takes what the first one compiled, lets the
variants run in the order of their memory, reads the allocator's peak after each, holds
the norms of the gradients in each layer against the first variant's, and then times
them in turns, step by step. Programs for a GPU that promise bytes on the host are
verified.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import inspect
import pathlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import on_jax, results, schedule, stack, workers
from jaxmem import remat, timing

OVERLAP_OFF = "xla_gpu_enable_pipelined_host_offloading=False"
GRAPHS = "xla_gpu_enable_command_buffer=default"
VARIANTS = [
    "full",
    "none",
    "save_attention",
    "offload_attention",
    "offload_block",
    f"offload_block {GRAPHS}",
    f"offload_block {OVERLAP_OFF}",
    "full last=4",
    "full last=6",
    "offload_block save=attn_lse",
    "offload_block last=4:none",
    "offload_block last=4",
    "offload_block last=7",
    "offload_block rows=8",
]
GIB = 2**30
KEYS = ("variant", "layers", "width", "tokens", "device")


def compile_all(sizes, variants) -> dict[str, jax.stages.Compiled]:
    """The first alone, so that what GEMMs were tried for it serves all the others."""
    lowered = {
        text: stack.trace(sizes, variant).lower() for text, variant in variants.items()
    }
    first, *others = lowered
    made = {first: lowered[first].compile()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {text: pool.submit(lowered[text].compile) for text in others}
    for text, job in jobs.items():
        if job.exception():
            print(f"{text}: {workers.said(job.exception())}", flush=True)
        else:
            made[text] = job.result()
    return made


# -------------------------------------------------------------------- columns


def facts(sizes, text, variant, compiled, without) -> dict[str, Any]:
    """What the compiler says: bytes, what runs while copies are on their way."""
    account: Any = compiled.memory_analysis()
    row = {
        "variant": text,
        "layers": sizes.layers,
        "width": sizes.width,
        "tokens": sizes.rows * sizes.length * variant.rows,
        "temp_gib": round(account.temp_size_in_bytes / GIB, 3),
        "program_gib": round(remat.device_bytes(compiled) / GIB, 3),
        "host_gib": round(account.host_temp_size_in_bytes / GIB, 3),
    }
    copies = schedule.host_copies(compiled.as_text() or "")
    for there, name in ((True, "to_host"), (False, "from_host")):
        of_loops = [
            c.products
            for c in copies
            if c.to_host == there and c.computation != "ENTRY"
        ]
        row[f"products_while_{name}"] = min(of_loops, default="")
    return row | {"verified": verified(sizes, variant, compiled, without)}


def twin_of(variant, variants) -> str | None:
    """The variant that differs in nothing but that it offloads nothing."""
    if variant.policy is None:
        return None
    policy = dataclasses.replace(variant.policy, offload=())
    bare = dataclasses.replace(variant, policy=policy, options=())
    return next((text for text, other in variants.items() if other == bare), None)


def verified(sizes, variant, compiled, without) -> str:
    """yes, what is wrong, or nothing where nothing is promised."""
    shapes = jax.eval_shape(lambda: stack.initial(sizes, variant.last))
    h = jax.eval_shape(lambda: stack.hidden(sizes, variant.rows))
    promised = remat.host_bytes(stack.step(sizes, variant), shapes, h)
    if not promised or jax.default_backend() == "cpu":
        return ""
    try:
        remat.verify(compiled, promised, without=without)
    except RuntimeError as error:
        return workers.said(error)
    return "yes"


def gradient_error(norms, wanted) -> float:
    """Largest relative difference of a layer's norm, of any kind of weight."""
    errors = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b) / b)), norms, wanted)
    return max(jax.tree.leaves(errors))


# ---------------------------------------------------------------------- runs


def work_compile(args):
    """Rows of facts; what is compiled stays in jax's cache."""
    sizes, variants = stack.SIZES[args.sizes], read_all(args)
    start = time.perf_counter()
    programs = compile_all(sizes, variants)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for text, run in programs.items():
        without = programs.get(twin_of(variants[text], variants))
        row = facts(sizes, text, variants[text], run, without)
        workers.send(row | results.provenance())


def work_run(args):
    """Columns of the variants, which come from the leanest to the largest.

    What is known is sent at once, and again when there is more.
    """
    sizes, variants = stack.SIZES[args.sizes], read_all(args)
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
    if not args.rounds:
        return
    for taken in turns(sizes, args, timed, programs):
        for text in timed:
            workers.send(rows[text] | taken[text])


def read_all(args):
    return {text: stack.read(text) for text in args.variant}


def first_step(sizes, variant, program) -> tuple[dict[str, Any], Any]:
    """The allocator's peak, if it rose, and the norms of the gradients.

    What needs all of the device is timed here, after that: one step.
    """
    row, stats = {}, jax.devices()[0].memory_stats
    before = (stats() or {}).get("peak_bytes_in_use", 0)
    try:
        weights, _, norms = jax.block_until_ready(program(*operands(sizes, variant)))
        peak = (stats() or {}).get("peak_bytes_in_use", 0)
        if variant.is_large:
            taken, weights = seconds_of(program, weights, operands(sizes, variant)[1])
            row |= {"ms": round(taken * 1e3, 1), "rounds": 1}
    except jax.errors.JaxRuntimeError as error:
        if not on_jax.is_out_of_memory(error):
            raise
        return {"ms": timing.OUT_OF_MEMORY}, None
    if peak > before:  # else it is an earlier variant's
        row["peak_gib"] = round(peak / GIB, 3)
    return row, jax.device_get(norms)


def operands(sizes, variant):
    return stack.initial(sizes, variant.last), stack.hidden(sizes, variant.rows)


def seconds_of(program, weights, h):
    """Of one step; and the weights after it, those given being consumed."""
    start = time.perf_counter()
    weights = jax.block_until_ready(program(weights, h))[0]
    return time.perf_counter() - start, weights


def say(*words):
    print(f"{time.perf_counter():.0f} s:", *words, flush=True)


def turns(sizes, args, variants, programs) -> Iterator[dict[str, dict[str, Any]]]:
    """After each round, milliseconds of a step so far; the order rotates.

    Variants with as many blocks after the scan share their weights.
    """
    weights = {v.last: stack.initial(sizes, v.last) for v in variants.values()}
    h = stack.hidden(sizes)

    def once(text):
        last = variants[text].last
        seconds, weights[last] = seconds_of(programs[text], weights[last], h)
        return seconds

    order, seconds = list(variants), {text: [] for text in variants}
    once(args.first)
    for i in range(args.rounds):
        for text in order[i:] + order[:i]:
            seconds[text].append(once(text))
        say("round", i + 1)
        yield {k: _timed(taken, seconds[args.first]) for k, taken in seconds.items()}
    trace(args, order, once, programs)


def _timed(taken, first):
    ratios = [a / b for a, b in zip(taken, first, strict=False)]
    middle = statistics.median(ratios)
    return {
        "ms": round(statistics.median(taken) * 1e3, 1),
        "over_first": round(middle, 4),
        "spread": round((max(ratios) - min(ratios)) / middle, 4),
        "rounds": len(taken),
    }


def trace(args, order, once, programs):
    """The first programs, as they are scheduled, and a profile of one step of each."""
    for i, text in enumerate(order[: args.traced] if args.trace else []):
        folder = pathlib.Path(args.trace) / str(i)
        with jax.profiler.trace(str(folder)):
            once(text)
        (folder / "program.txt").write_text(programs[text].as_text() or "", "utf-8")
        say("traced", folder, text)


@functools.cache
def link() -> dict[str, float]:
    """GB/s to the host and back, of one gibibyte."""
    n = 2**10 if jax.default_backend() == "cpu" else 2**29
    x = jax.block_until_ready(jnp.zeros(n, jnp.bfloat16))
    host = x.sharding.with_memory_kind("pinned_host")
    there = jax.block_until_ready(jax.device_put(x, host))

    def rate(y, place):
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(y, place))
            taken.append(time.perf_counter() - start)
        return round(y.nbytes / min(taken) / 1e9, 1)

    return {"to_host_gbs": rate(x, host), "from_host_gbs": rate(there, x.sharding)}


# -------------------------------------------------------------------- driver


def drive(args):
    """Compiles in one process, runs in another; the CSV grows row by row."""
    with workers.compilation_cache() as environment:
        environment |= {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}
        start = functools.partial(workers.start, "benchmarks.run_offload", environment)
        common = [f"--rounds={args.rounds}", f"--sizes={args.sizes}"]
        if args.trace:
            common += [f"--trace={args.trace}", f"--traced={args.traced}"]
        asked = [f"--variant={text}" for text in args.variant]
        rows = {r["variant"]: r for r in start(["--worker=compile", *common, *asked])}
        by_size = sorted(rows, key=lambda text: rows[text]["program_gib"])
        asked = [f"--variant={text}" for text in by_size]
        common += [f"--first={args.variant[0]}"]
        for columns in start(["--worker=run", *common, *asked]):
            row = rows[columns["variant"]]
            row |= columns
            results.merge(args.out, [row], KEYS)
            if row.get("rounds") in (None, 1, args.rounds):
                show(row)


def show(row):
    said = ("ms", "over_first", "spread", "program_gib", "peak_gib", "host_gib")
    said += ("gradient_error", "products_while_to_host", "products_while_from_host")
    said += ("verified",)
    told = " | ".join(f"{k} {row[k]}" for k in said if row.get(k, "") != "")
    print(f"{row['variant']:45s} {told}", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--variant", action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", choices=list(stack.SIZES), default="deep")
    parser.add_argument("--trace", help="folder for profiles of the leanest variants")
    parser.add_argument("--traced", type=int, default=3, help="how many of them")
    parser.add_argument("--out", default="offload.csv", help="in benchmarks/results")
    parser.add_argument("--first", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=list(WORK), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.variant = args.variant or VARIANTS
    WORK.get(args.worker, drive)(args)


WORK = {"compile": work_compile, "run": work_run}

if __name__ == "__main__":
    main()
