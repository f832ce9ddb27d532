"""Time to trace a call with its gradients, and of an eager call, in two versions.

    python -m benchmarks.run_tracing --before ../older --after .

The folders are checkouts of the two versions. Times are milliseconds of the calling
thread, on which other programs have little influence: medians of 50, ten in each of
five processes a version, which take turns. jax's caches are cleared before each trace.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

NAME, KEYS = "tracing_cpu.csv", ("call", "when")
PROCESSES, REPEATS = 5, 10
_WORKER = "--measure"


def calls() -> dict:
    """Functions of hidden states and W, with one signature in both versions."""
    import jax.numpy as jnp

    import jaxmem

    y, ids = jnp.arange(96), jnp.arange(96 * 8).reshape(96, 8) % 384

    def nll(stats):
        return -stats.logprob

    return {
        "logprobs": lambda h, W: jaxmem.logprobs(h, W, y, 32).sum(),
        "token_stats": lambda h, W: jaxmem.token_stats(h, W, y, 32).entropy.sum(),
        "token_loss": lambda h, W: jaxmem.token_loss(nll, h, W, y, chunk=32)[0],
        "selected_logprobs": lambda h, W: jaxmem.selected_logprobs(h, W, ids, 32).sum(),
        "topk": lambda h, W: jaxmem.topk(h, W, 8, 32).logprobs.sum(),
    }


def measure() -> dict[str, dict[str, list[float]]]:
    """Milliseconds by call and column, in this process."""
    import jax
    import jax.numpy as jnp

    h, W = jnp.ones((96, 32)), jnp.ones((384, 32))

    def trace(call):
        jax.clear_caches()
        return _timed(jax.make_jaxpr(jax.value_and_grad(call, (0, 1))), h, W)

    found = {}
    for name, call in calls().items():
        call(h, W)
        eager = [_timed(call, h, W) for _ in range(REPEATS)]
        traces = [trace(call) for _ in range(REPEATS)]
        found[name] = {"trace_ms": traces, "eager_ms": eager}
    return found


def _timed(run, *arguments) -> float:
    start = time.thread_time()
    run(*arguments)
    return (time.thread_time() - start) * 1e3


def main(arguments=None):
    from benchmarks import results

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="a checkout")
    parser.add_argument("--after", default=".", help="a checkout")
    parser.add_argument("--csv", default=NAME)
    asked = parser.parse_args(arguments)
    found = {"before": [], "after": []}
    for _ in range(PROCESSES):
        for when, times in found.items():
            folder = pathlib.Path(getattr(asked, when)).resolve()
            run = subprocess.run(
                [sys.executable, __file__, _WORKER], stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": str(folder)}, check=True,
            )  # fmt: skip
            times.append(json.loads(run.stdout))
    rows = [
        {"call": name, "when": when}
        | {k: round(statistics.median(sum((t[name][k] for t in times), [])), 2)
           for k in ("trace_ms", "eager_ms")}
        | results.provenance()
        for when, times in found.items()
        for name in times[0]
    ]  # fmt: skip
    print("wrote", results.merge(asked.csv, rows, KEYS))


if __name__ == "__main__":
    if sys.argv[1:] == [_WORKER]:
        print(json.dumps(measure()))
    else:
        main()
