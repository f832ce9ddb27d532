"""SkyRL's table of chunked log-probabilities, forward and backward, on this device.

    python -m benchmarks.run_skyrl --out skyrl_h200.csv

They measured sequences of bfloat16 logits, one row a sequence length, vocabulary and
chunk, on a B200 (github.com/NovaSky-AI/SkyRL, pull request 1610): the gradient of the
sum of log-probabilities with respect to the logits. The same here from logits, by
`jaxmem.logprobs_from_logits`, and from hidden states, by `jaxmem.logprobs`, where no
logits are ever made. MiB are all that is live at the peak: inputs, gradients, and the
rest by the compiler's account; a few are held against the allocator's (--peaks).
"""

import argparse
import concurrent.futures
import functools
import inspect
import itertools
import statistics
import time

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import on_jax, results, workers
from jaxmem.timing import OUT_OF_MEMORY

KEYS = ("source", "tokens", "v", "chunk", "device")
TOKENS, VOCABULARIES = (32768, 65536, 131072), (32000, 64000, 128000)
CHUNKS = ("None", "1024", "4096", "8192", "16384")
D = 4096
PEAKS = [("hidden", 131072, 128000, "1024"), ("logits", 65536, 128000, "1024")]

# (tokens, vocabulary) to ms and MiB of each chunk, as they published them; their last
# pair, (131072, 128000), ran out of memory at every chunk.
THEIRS = {
    (32768, 32000): "17.0 15601 41.5 10501 38.3 12001 37.7 14001 37.5 20001",
    (65536, 32000): "33.5 31202 82.7 20501 76.5 22001 75.2 24001 74.7 28001",
    (131072, 32000): "66.6 62404 165.9 40503 152.9 42003 150.2 44003 149.0 48003",
    (32768, 64000): "33.4 31201 78.6 21001 75.0 24001 74.5 28001 74.5 40001",
    (65536, 64000): "66.4 62402 157.4 41001 149.8 44001 148.6 48001 148.5 56001",
    (131072, 64000): "133.7 124804 314.7 81003 299.4 84003 297.0 88003 296.7 96003",
    (32768, 128000): "66.4 62401 152.8 42001 148.5 48001 148.3 56001 148.3 80001",
    (65536, 128000): "132.2 124802 305.5 82001 296.9 88001 296.5 96001 296.3 112001",
}


def theirs(tokens, v, chunk):
    """Columns: what they measured on a B200, blank where they did not."""
    ms = mib = ""
    if (tokens, v) == (131072, 128000) and chunk in CHUNKS:
        ms = mib = OUT_OF_MEMORY
    elif (tokens, v) in THEIRS and chunk in CHUNKS:
        numbers = THEIRS[tokens, v].split()
        ms, mib = numbers[2 * CHUNKS.index(chunk) :][:2]
    return {"skyrl_b200_ms": ms, "skyrl_b200_mib": mib}


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_of(tokens, v):
    """Random normal, made by parts: random numbers take more room than they fill."""
    keys = jax.random.split(jax.random.key(0), 32)
    part = functools.partial(
        jax.random.normal, shape=(tokens // 32, v), dtype=jnp.bfloat16
    )
    return jax.lax.map(part, keys).reshape(tokens, v)


def inputs(source, tokens, v, d):
    """(differentiated operands, labels)."""
    if source == "logits":
        labels = jax.random.randint(jax.random.key(1), (tokens,), 0, v)
        return (logits_of(tokens, v),), labels
    h, W, labels = on_jax.problem((tokens, d, v), jnp.bfloat16)
    return (h, W), labels


def program(source, chunk, operands, labels):
    """Compiled: operands, labels -> gradients of their sum, log-probabilities."""

    def total(operands, labels):
        if source == "logits":
            made = jaxmem.logprobs_from_logits(operands[0], labels, chunk)
        else:
            made = jaxmem.logprobs(operands[0], operands[1], labels, chunk)
        return made.sum(), made

    both = jax.jit(jax.grad(total, has_aux=True))
    return both.lower(operands, labels).compile()


def compiling(pool, source, chunks, operands, labels):
    """Futures of `program`, by chunk: compiled side by side before any is timed."""
    jobs = {
        chunk: pool.submit(program, source, workers.value_of(chunk), operands, labels)
        for chunk in chunks
    }
    concurrent.futures.wait(jobs.values())
    return jobs


def measure(job, operands, labels, repetitions):
    """Columns: milliseconds and MiB, or that memory runs out."""
    missing = {"ms": OUT_OF_MEMORY, "mib": OUT_OF_MEMORY}
    try:
        run = job.result()
        once = functools.partial(run, operands, labels)
        clock = on_jax.stopwatch()
        calls = clock.calls(once)
        if calls is None:
            return missing
        taken = [clock.seconds(once, calls) for _ in range(repetitions)]
    except jax.errors.JaxRuntimeError as error:
        if not on_jax.is_out_of_memory(error):
            raise
        return missing
    inputs, made, rest = on_jax.memory_bytes(run)
    return {
        "ms": round(statistics.median(taken) * 1e3, 2),
        "mib": round((inputs + made + rest) / 2**20),
        "temp_mib": round(rest / 2**20, 1),
    }


def row_of(args, source, tokens, v, chunk, job, operands, labels):
    made = {"source": source, "tokens": tokens, "v": v, "chunk": chunk}
    made |= {"d": args.d if source == "hidden" else ""}
    made |= measure(job, operands, labels, args.repetitions)
    stats = jax.devices()[0].memory_stats()
    if args.worker == "peak" and stats:
        made["allocator_mib"] = round(stats["peak_bytes_in_use"] / 2**20)
    return made | theirs(tokens, v, chunk) | results.provenance()


def work(args):
    """A worker's part: rows to the driver, until the time is spent."""
    start = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor()
    for source, tokens, v in itertools.product(args.source, args.tokens, args.v):
        operands = labels = jobs = None  # their memory is free for the next
        try:
            operands, labels = inputs(source, tokens, v, args.d)
            jobs = compiling(pool, source, args.chunk, operands, labels)
            for chunk, job in jobs.items():
                if time.monotonic() - start > args.seconds:
                    print("time is up", flush=True)
                    return
                row = row_of(args, source, tokens, v, chunk, job, operands, labels)
                workers.send(row)
        except Exception as error:  # the other shapes go on
            print(f"{source} {tokens} x {v}: {workers.said(error)}", flush=True)


def show(row):
    print(
        f"{row['source']:7s} {row['tokens']:7d} x {row['v']:6d} chunk {row['chunk']:6s}"
        f" {row['ms']} ms, {row['mib']} MiB ({row.get('allocator_mib', '')} allocator)"
        f" | SkyRL on a B200: {row['skyrl_b200_ms']} ms, {row['skyrl_b200_mib']} MiB",
        flush=True,
    )


def drive(args):
    with workers.compilation_cache() as environment:
        start = functools.partial(workers.start, "benchmarks.run_skyrl", environment)
        common = [f"--d={args.d}", f"--seconds={args.seconds}"]
        common += [f"--repetitions={args.repetitions}"]
        asked = [
            f"--{name}={value}"
            for name in ("source", "tokens", "v", "chunk")
            for value in getattr(args, name)
        ]
        peaks = [
            ["--worker=peak", *(f"--{k}={x}" for k, x in zip(KEYS, row, strict=False))]
            for row in (PEAKS if args.peaks else [])
        ]
        for arguments in [["--worker=time", *asked], *peaks]:
            for row in start([*arguments, *common]):
                results.merge(args.out, [row], KEYS)
                show(row)


def parser():
    made = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    made.add_argument("--source", action="append", choices=["logits", "hidden"])
    made.add_argument("--tokens", action="append", type=int)
    made.add_argument("--v", action="append", type=int)
    made.add_argument("--chunk", action="append", help="a number, None or auto")
    made.add_argument("--d", type=int, default=D)
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--seconds", type=float, default=float("inf"))
    made.add_argument("--peaks", action="store_true", help="the allocator's, of a few")
    made.add_argument("--out", default="skyrl.csv", help="CSV in benchmarks/results")
    made.add_argument("--worker", choices=["time", "peak"], help=argparse.SUPPRESS)
    return made


def main(arguments=None):
    args = parser().parse_args(arguments)
    args.source = args.source or ["logits", "hidden"]
    args.tokens = args.tokens or TOKENS
    args.v = args.v or VOCABULARIES
    args.chunk = args.chunk or CHUNKS
    work(args) if args.worker else drive(args)


if __name__ == "__main__":
    main()
