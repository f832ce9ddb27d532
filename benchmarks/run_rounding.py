"""How far tensor cores round logits towards zero, and what is left of it.

    python -m benchmarks.run_rounding --out rounding_h200.csv

Logits h·w of D terms are held against float64, for random normal operands of two
standard deviations and for hidden states of which one in 64 is 60 times the others: at
the front of D, at its end, or spread. `lacks` is what they lack of themselves (of all,
by least squares); the errors are the largest of any row, in nats, of the label's logit,
of logsumexp and of their difference.
"""

import argparse
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from benchmarks import results

N, V = 1024, 12288
DEPTHS, STDS = (512, 1024, 2048, 2304, 4096, 5120, 8192), (1.0, 20.0)
OUTLIERS = ("none", "first", "last", "spread")
KEYS = ("path", "d", "std", "outliers", "dtype", "device")


def problem(d, std, outliers, dtype):
    """Hidden states and W for logits of this standard deviation; labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    size = np.where(np.arange(d) % 64 == 0, 60.0, 1.0)
    if outliers != "spread":
        size = np.sort(size)[:: -1 if outliers == "first" else 1]
    if outliers == "none":
        size = np.ones(d)
    h = jax.random.normal(keys[0], (N, d)) * (size / np.sqrt((size**2).mean()))
    W = jax.random.normal(keys[1], (V, d)) * d**-0.5
    labels = jax.random.randint(keys[2], (N,), 0, V)
    return (h * std).astype(dtype), W.astype(dtype), labels


def exact(h, W):
    """Logits in float64."""
    with jax.enable_x64(True):
        return np.asarray(h.astype(jnp.float64) @ W.astype(jnp.float64).T)


def of_logits(z, y):
    """(the label's, logsumexp), in float64."""
    largest = z.max(1)
    total = np.log(np.exp(z - largest[:, None]).sum(1)) + largest
    return z[np.arange(len(y)), y], total


def largest_errors(got, want):
    """Columns; got and want are (label's logits, logsumexp)."""
    errors = [a - b for a, b in zip(got, want, strict=True)]
    errors.append(errors[0] - errors[1])
    names = "label_error", "logsumexp_error", "logprob_error"
    return {k: f"{abs(e).max():.1e}" for k, e in zip(names, errors, strict=True)}


def lacks(got, want):
    """What part of want is missing in got, by least squares."""
    return f"{-np.vdot(got - want, want) / np.vdot(want, want):.2e}"


def measure(d, std, outliers, dtype):
    """A row of one GEMM in float32, and one of jaxmem on the same."""
    h, W, y = problem(d, std, outliers, dtype)
    want, labels = exact(h, W), np.asarray(y)
    of_want = of_logits(want, labels)
    z = jax.jit(lambda h, W: jnp.matmul(h, W.T, preferred_element_type=jnp.float32))
    z = np.asarray(z(h, W), np.float64)
    stats = jax.jit(jaxmem.token_stats)(h, W, y)
    logprob, total = np.asarray([stats.logprob, stats.logsumexp], np.float64)
    made = {
        "materialised": of_logits(z, labels),
        "token_stats": (logprob + total, total),
    }
    common = {"d": d, "std": std, "outliers": outliers, "dtype": jnp.dtype(dtype).name}
    return [
        {"path": path, **common}
        | {"lacks": lacks(z, want) if path == "materialised" else ""}
        | {"lacks_of_label": lacks(got[0], of_want[0]), **largest_errors(got, of_want)}
        for path, got in made.items()
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--depth", type=int, action="append", help=f"of {DEPTHS}")
    parser.add_argument(
        "--out", default="rounding.csv", help="CSV in benchmarks/results"
    )
    args = parser.parse_args(arguments)
    cases = [
        (d, std, outliers, jnp.bfloat16)
        for d, std, outliers in itertools.product(args.depth or DEPTHS, STDS, OUTLIERS)
        if outliers == "none" or (std, d) == (max(STDS), 4096)
    ]
    if not args.depth:
        cases.append((4096, max(STDS), "none", jnp.float16))
    for case in cases:
        rows = [{**row, **results.provenance()} for row in measure(*case)]
        results.merge(args.out, rows, KEYS)
        for row in rows:
            print(row, flush=True)


if __name__ == "__main__":
    main()
