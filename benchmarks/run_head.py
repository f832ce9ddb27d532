"""Time and memory of the head, jaxmem against materialised logits and the bare GEMM.

    python -m benchmarks.run_head --shape 8192,4096,151936 --dtype bfloat16 --peaks \
        --out head_h200.csv

A path is a verb and its options, such as "token_stats chunk=auto where=half". Each is
held against float64 first; of "logprobs gradient_samples=128", the gradients' error is
the noise of one draw. The unit is the bare GEMM `hidden @ W.T` of the same run;
`jaxmem/base/timing.py` says how paths take turns. With --peaks, the allocator's peak of
each path is measured as well, in a process of its own.
"""

import argparse
import functools
import inspect
import sys

import jax
import jax.numpy as jnp

import jaxmem
from benchmarks import on_jax, results, workers

PATHS = [
    "materialised",
    "materialised_stats",
    "token_stats",
    "token_stats chunk=auto",
    "token_stats chunk=4096",
    "token_stats where=half",
    "token_loss",
    "cross_entropy",
    "token_stats implementation=xla",
    "logprobs",
]


def materialised(h, W, y):
    """Log-probabilities through [N, V] logits in float32, by autodiff."""
    logits = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
    ln_p = jax.nn.log_softmax(logits)
    return {"logprob": jnp.take_along_axis(ln_p, y[:, None], axis=1)[:, 0]}


def materialised_stats(h, W, y):
    """`materialised`, and the entropy."""
    logits = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
    ln_p = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(ln_p, y[:, None], axis=1)[:, 0]
    return {"logprob": logprob, "entropy": -(jnp.exp(ln_p) * ln_p).sum(1)}


def token_stats(h, W, y, **options):
    """All five outputs."""
    return jaxmem.token_stats(h, W, y, **options)._asdict()


def logprobs(h, W, y, **options):
    """Log-probabilities alone."""
    return {"logprob": jaxmem.logprobs(h, W, y, **options)}


def token_loss(h, W, y, g=None, names=("logprob", "entropy"), **options):
    """A loss known inside: log-probability and entropy, weighted by g."""

    def weighted(stats, *weights):
        outputs = {name: getattr(stats, name) for name in names}
        total = sum(w * x for w, x in zip(weights, outputs.values(), strict=True))
        return total, outputs

    weights = [g[name] if g else jnp.ones(len(y)) for name in names]
    return jaxmem.token_loss(weighted, h, W, y, *weights, normalizer=1, **options)


LOSSES = {
    "token_loss": token_loss,
    "cross_entropy": functools.partial(token_loss, names=("logprob",)),
}
VERBS = {
    f.__name__: f for f in (materialised, materialised_stats, token_stats, logprobs)
}


def call_of(path: str) -> on_jax.Call:
    """The call that a path names."""
    verb, *words = path.split()
    options = {
        k: workers.value_of(text) for k, _, text in (w.partition("=") for w in words)
    }
    half = options.pop("where", None) == "half"
    if "gradient_samples" in options:
        options["key"] = jax.random.key(0)
        options["gradient"] = jaxmem.Sample(options.pop("gradient_samples"))
    if "gradient_blocks" in options:
        options["gradient"] = jaxmem.Recompute(options.pop("gradient_blocks"))

    def masked(y):
        return {"where": jnp.arange(len(y)) % 2 == 0} if half else {}

    def call(h, W, y):
        if verb in LOSSES:
            return LOSSES[verb](h, W, y, **options, **masked(y))[1]
        return VERBS[verb](h, W, y, **options, **masked(y))

    def total(h, W, y, g):
        return LOSSES[verb](h, W, y, g, **options, **masked(y))

    if verb in LOSSES:
        call.total = total
    return call


def measure(shape, dtype, paths, repetitions):
    """One row a path; the shape's inputs, check and timing in this process."""
    calls = {path: call_of(path) for path in paths}
    masked = [path for path in paths if "where=half" in path]
    return on_jax.measure(shape, dtype, calls, repetitions, masked)


def work(args):
    """A worker's part: rows to the driver."""
    dtype = getattr(jnp, args.dtype)
    for shape in args.shapes:
        try:
            if args.worker == "peak":
                row = on_jax.peak_mib(shape, dtype, call_of(args.path[0]))
                workers.send(row)
                continue
            for row in measure(shape, dtype, args.path, args.repetitions):
                workers.send(row)
        except Exception as error:  # the other shapes go on
            print(f"N,D,V={shape} failed: {workers.said(error)}", flush=True)


def drive(args):
    """Timing in one process, then each peak in its own; the CSV grows row by row."""
    rows = []
    with workers.compilation_cache() as environment:
        start = functools.partial(workers.start, "benchmarks.run_head", environment)
        common = ["--dtype", args.dtype, "--repetitions", str(args.repetitions)]
        shapes = [f"--shape={','.join(map(str, shape))}" for shape in args.shapes]
        paths = [f"--path={path}" for path in args.path]
        for row in start(["--worker=time", *common, *shapes, *paths]):
            rows.append(row)
            results.merge(args.out, [row])
            results.show(row)
        for row in rows if args.peaks else []:
            shape = f"--shape={row['n']},{row['d']},{row['v']}"
            peak = ["--worker=peak", *common, shape, f"--path={row['path']}"]
            for columns in start(peak):
                row.update(columns)
            results.merge(args.out, [row])
            results.show(row)
    if len(rows) < len(args.shapes) * len(args.path):
        sys.exit("some shapes failed, see above")


def parser():
    flags = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    workers.add_shapes(flags)
    flags.add_argument("--path", action="append", help=f"of {', '.join(PATHS)}")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--repetitions", type=int, default=5)
    flags.add_argument("--peaks", action="store_true", help="the allocator's too")
    flags.add_argument("--out", default="head.csv", help="CSV in benchmarks/results")
    flags.add_argument("--worker", choices=["time", "peak"], help=argparse.SUPPRESS)
    return flags


def main(arguments=None):
    args = parser().parse_args(arguments)
    args.path = args.path or PATHS
    for path in args.path:
        if path.split()[0] not in (*VERBS, *LOSSES):
            sys.exit(f"--path must be of {', '.join([*VERBS, 'token_loss'])}: {path!r}")
    args.shapes = workers.shapes_of(args)
    work(args) if args.worker else drive(args)


if __name__ == "__main__":
    main()
