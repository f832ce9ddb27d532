"""Time and memory of the head, jaxmem against materialised logits, in one run.

    python -m benchmarks.run_head --shape 8192,256,32768 --dtype float32 --out cpu.csv

Each path is first held against float64 on a few rows; a path that fails is not timed.
Paths take turns within a repetition, so that a slow minute slows all of them. The unit
is the bare GEMM `hidden @ W.T` of the same run.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks import results

CHECKED_ROWS = 32


def materialised(h, W, y):
    """Mean negative log-probability through [N, V] logits in float32, by autodiff."""
    logits = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
    ln_p = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(ln_p, y[:, None], axis=1).mean()


def fused(h, W, y, chunk):
    """The same through jaxmem.logprobs."""
    return -jaxmem.logprobs(h, W, y, chunk).mean()


def fused_xla(h, W, y, chunk):
    """The same by the backend that runs everywhere."""
    return -jaxmem.logprobs(h, W, y, chunk, implementation="xla").mean()


def fused_stats(h, W, y, chunk):
    """Log-probability and entropy together, as post-training asks for them."""
    stats = jaxmem.token_stats(h, W, y, chunk)
    return -(stats.logprob + 0.01 * stats.entropy).mean()


def fused_half_masked(h, W, y, chunk):
    """Every other token masked: the cost should follow the tokens that count."""
    return -jaxmem.logprobs(h, W, y, chunk, where=jnp.arange(len(y)) % 2 == 0).mean()


def paths(chunks):
    """Name to loss; the materialised one first, the others relative to it."""
    table = {"materialised": materialised}
    for chunk in chunks:
        table[f"jaxmem chunk={chunk}"] = functools.partial(fused, chunk=chunk)
    variants = {"+entropy": fused_stats, "half masked": fused_half_masked}
    if jax.default_backend() == "gpu":
        variants["xla"] = fused_xla
    for name, loss in variants.items():
        table[f"jaxmem {name} chunk={chunks[0]}"] = functools.partial(
            loss, chunk=chunks[0]
        )
    return table


def problem(n, d, v, dtype):
    """Random normal states; W scaled so that logits have standard deviation 1."""
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (n, d), dtype)
    W = (jax.random.normal(keys[1], (v, d)) * d**-0.5).astype(dtype)
    return h, W, jax.random.randint(keys[2], (n,), 0, v)


def check(h, W, y, chunk):
    """Largest error of the log-probabilities of a few rows against float64, in nats."""
    h, y = h[:CHECKED_ROWS], y[:CHECKED_ROWS]
    z = np.asarray(h, np.float64) @ np.asarray(W, np.float64).T
    m = z.max(1)
    want = z[np.arange(len(y)), y] - m - np.log(np.exp(z - m[:, None]).sum(1))
    got = np.asarray(jaxmem.logprobs(h, W, y, chunk), np.float64)
    return float(np.abs(got - want).max())


def compile_path(loss, operands):
    """Forward, and forward with both gradients, compiled."""
    grad = jax.value_and_grad(loss, (0, 1))
    return [jax.jit(f).lower(*operands).compile() for f in (loss, grad)]


def seconds(run, operands):
    start = time.perf_counter()
    jax.block_until_ready(run(*operands))
    return time.perf_counter() - start


def fits(run, operands):
    """Warms up; whether the device has the memory."""
    try:
        jax.block_until_ready(run(*operands))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def median_ms(runs, operands, repetitions):
    """Median milliseconds of each, taking turns; None where memory runs out."""
    taken = {i: [] for i, run in enumerate(runs) if fits(run, operands)}
    for _ in range(repetitions):
        for i, times in taken.items():
            times.append(seconds(runs[i], operands) * 1e3)
    return [
        round(statistics.median(taken[i]), 2) if i in taken else None
        for i in range(len(runs))
    ]


def measure(shape, dtype, chunks, repetitions):
    """One row a path: ms and MiB, forward and with gradients."""
    operands = problem(*shape, dtype)
    errors = [check(*operands, chunk) for chunk in chunks]
    gemm = jax.jit(lambda h, W, y: h @ W.T).lower(*operands).compile()
    compiled = {k: compile_path(loss, operands) for k, loss in paths(chunks).items()}
    runs = [gemm] + [run for pair in compiled.values() for run in pair]
    gemm_ms, *times = median_ms(runs, operands, repetitions)
    rows = []
    for (name, pair), forward, both in zip(
        compiled.items(), times[::2], times[1::2], strict=True
    ):
        temps = [run.memory_analysis().temp_size_in_bytes for run in pair]
        rows.append({
            "n": shape[0], "d": shape[1], "v": shape[2], "dtype": dtype.__name__,
            "path": name,
            "gemm_ms": gemm_ms,
            "forward_ms": forward or "out of memory",
            "forward_backward_ms": both or "out of memory",
            "forward_over_gemm": round(forward / gemm_ms, 2) if forward else "",
            "forward_backward_over_gemm": round(both / gemm_ms, 2) if both else "",
            "forward_temp_mib": round(temps[0] / 2**20, 1),
            "forward_backward_temp_mib": round(temps[1] / 2**20, 1),
            "logprob_error_nats": f"{max(errors):.1e}",
        })  # fmt: skip
    return rows


def show(rows):
    for row in rows:
        print(
            f"N={row['n']} D={row['d']} V={row['v']} {row['dtype']} "
            f"{row['path']:28s} fwd {row['forward_ms']} ms "
            f"({row['forward_over_gemm']} GEMM) {row['forward_temp_mib']} MiB | "
            f"fwd+bwd {row['forward_backward_ms']} ms "
            f"({row['forward_backward_over_gemm']} GEMM) "
            f"{row['forward_backward_temp_mib']} MiB",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="N,D,V; may be repeated")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--chunk", action="append", type=int)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", required=True, help="CSV, under benchmarks/results")
    args = parser.parse_args()
    rows = []
    for shape in args.shape or ["8192,256,32768"]:
        sizes = tuple(int(x) for x in shape.split(","))
        measured = measure(
            sizes, getattr(jnp, args.dtype), args.chunk or [1024, 4096],
            args.repetitions,
        )  # fmt: skip
        show(measured)
        rows += measured
    print("wrote", results.write(args.out, rows))


if __name__ == "__main__":
    main()
