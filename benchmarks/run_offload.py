"""Step time against memory of a deep stack's policies: saved, on the host, made again.

    python -m benchmarks.run_offload --peaks --out offload_h200.csv
    python -m benchmarks.run_offload --variant full --variant "full last=2:none"

A variant is a preset of `jaxmem.remat` and words that `stack.read` explains. One
process compiles all of them, holds the gradients' norms in each layer against the first
variant's, and times them in turns, step by step. Another takes what the first one
compiled, lets the variants run in the order of their memory, and reads the allocator's
peak after each. Programs for a GPU that promise bytes on the host are verified.
"""

import argparse
import concurrent.futures
import functools
import inspect
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import on_jax, results, schedule, stack, workers
from jaxmem import remat, timing

VARIANTS = [
    "full",
    "none",
    "dots",
    "save_attention",
    "offload_block",
    "offload_attention",
    "offload_block xla_gpu_enable_pipelined_host_offloading=False",
    "full last=2:none",
    "offload_block last=1:full",
    "offload_block last=2:none",
    "offload_block save=q last=2:none",
    "offload_block save=q,k,v last=2:none",
    "offload_block group=2",
    "offload_block rows=8",
]
GIB = 2**30
KEYS = ("variant", "layers", "width", "tokens", "device")


def sizes_of(args) -> stack.Sizes:
    return stack.TINY if args.tiny else stack.Sizes()


def compile_all(sizes, variants) -> dict[str, jax.stages.Compiled]:
    """The first alone, so that what GEMMs were tried for it serves all the others."""
    lowered = {text: stack.lower(sizes, variant) for text, variant in variants.items()}
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


def verified(sizes, variant, compiled, without) -> str:
    """yes, what is wrong, or nothing where nothing is promised."""
    shapes = jax.eval_shape(lambda: stack.initial(sizes, variant.last))
    h = jax.eval_shape(lambda: stack.hidden(sizes, variant.rows))
    promised = remat.host_bytes(stack.step(sizes, variant), shapes, h)
    if not promised or jax.default_backend() == "cpu":
        return ""
    if variant.rows != 1:
        without = None  # of another size
    try:
        remat.verify(compiled, promised, without=without)
    except RuntimeError as error:
        return workers.said(error)
    return "yes"


def gradient_error(norms, wanted) -> float:
    """Largest relative difference of a layer's norm, of any kind of weight."""
    errors = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b) / b)), norms, wanted)
    return max(jax.tree.leaves(errors))


# ---------------------------------------------------------------------- time


def work_time(args):
    """Rows of a worker: facts, gradients, milliseconds; what it can do, if not all."""
    sizes, variants = sizes_of(args), {text: stack.read(text) for text in args.variant}
    start = time.perf_counter()
    programs = compile_all(sizes, variants)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows, wanted = {}, None
    for text in list(programs):
        variant, run = variants[text], programs[text]
        row = facts(sizes, text, variant, run, programs.get("full"))
        try:
            weights, h = (
                stack.initial(sizes, variant.last),
                stack.hidden(sizes, variant.rows),
            )
            norms = jax.device_get(run(weights, h)[2])
        except jax.errors.JaxRuntimeError as error:
            if not on_jax.is_out_of_memory(error):
                raise
            workers.send(row | {"ms": timing.OUT_OF_MEMORY} | results.provenance())
            continue
        if variant.rows == 1:
            wanted = wanted or norms
            row["gradient_error"] = f"{gradient_error(norms, wanted):.1e}"
        rows[text] = row
        say(text, "ran once")
    taken = turns(sizes, args, {text: variants[text] for text in rows}, programs)
    for text, row in rows.items():
        workers.send(row | taken[text] | link() | results.provenance())


def say(*words):
    print(f"{time.perf_counter():.0f} s:", *words, flush=True)


def turns(sizes, args, variants, programs) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step: every round runs every variant, the order rotates.

    Variants with as many blocks after the scan share their weights.
    """
    weights = {v.last: stack.initial(sizes, v.last) for v in variants.values()}
    inputs = {v.rows: stack.hidden(sizes, v.rows) for v in variants.values()}

    def once(text):
        variant = variants[text]
        start = time.perf_counter()
        made = programs[text](weights[variant.last], inputs[variant.rows])
        weights[variant.last] = jax.block_until_ready(made)[0]
        return time.perf_counter() - start

    order, seconds = list(variants), {text: [] for text in variants}
    for i in range(args.rounds):
        for text in order[i:] + order[:i]:
            if i < 2 or variants[text].rows == 1:  # the large one is slow
                seconds[text].append(once(text))
        say("round", i + 1)
    trace(args, order, once, programs)
    return {text: _timed(taken, seconds[order[0]]) for text, taken in seconds.items()}


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


# --------------------------------------------------------------------- peaks


def work_peak(args):
    """The allocator's peak after each variant, from the smallest program upwards."""
    sizes, variants = sizes_of(args), {text: stack.read(text) for text in args.variant}
    device = jax.devices()[0]
    if device.memory_stats() is None:
        return
    programs = compile_all(sizes, variants)
    before = 0
    for text in sorted(programs, key=lambda text: remat.device_bytes(programs[text])):
        variant = variants[text]
        weights, h = (
            stack.initial(sizes, variant.last),
            stack.hidden(sizes, variant.rows),
        )
        try:
            made = jax.block_until_ready(programs[text](weights, h))
        except jax.errors.JaxRuntimeError as error:
            print(text, workers.said(error), flush=True)
            continue
        del weights, h, made
        peak = device.memory_stats()["peak_bytes_in_use"]
        told = round(peak / GIB, 3) if peak > before else ""  # else an earlier one's
        workers.send({"variant": text, "peak_gib": told})
        before = peak


# -------------------------------------------------------------------- driver


def drive(args):
    """Time in one process, peaks in another; the CSV grows row by row."""
    with workers.compilation_cache() as environment:
        environment |= {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}
        start = functools.partial(workers.start, "benchmarks.run_offload", environment)
        common = [f"--rounds={args.rounds}", *(["--tiny"] if args.tiny else [])]
        common += (
            [f"--trace={args.trace}", f"--traced={args.traced}"] if args.trace else []
        )
        asked = [f"--variant={text}" for text in args.variant]
        rows = {}
        for row in start(["--worker=time", *common, *asked]):
            rows[row["variant"]] = row
            results.merge(args.out, [row], KEYS)
            show(row)
        for columns in start(["--worker=peak", *common, *asked]) if args.peaks else []:
            row = rows.get(columns["variant"])
            if row is not None:
                row |= columns
                results.merge(args.out, [row], KEYS)
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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a stack for a CPU")
    parser.add_argument("--peaks", action="store_true", help="the allocator's too")
    parser.add_argument("--trace", help="folder for profiles of the first variants")
    parser.add_argument("--traced", type=int, default=3, help="how many of them")
    parser.add_argument("--out", default="offload.csv", help="in benchmarks/results")
    parser.add_argument("--worker", choices=["time", "peak"], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.variant = args.variant or VARIANTS
    if args.worker:
        {"time": work_time, "peak": work_peak}[args.worker](args)
    else:
        drive(args)


if __name__ == "__main__":
    main()
