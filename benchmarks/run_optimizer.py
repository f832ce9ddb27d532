"""Adam's state on the device, or on the host in several forms: time and memory.

    python -m benchmarks.run_optimizer --gib 8 --out optimizer_h200.csv

device: all of it on the device. whole: the update's program fetches all of it and sends
it back. scan: the same layer by layer, in one loop. leaves: `offload.Streamed`, a leaf
at a time. slices: the same, 128 MiB of parameters at a time. Each runs in a process of
its own, with as many GiB of float32 parameters in four stacks of 16 layers, the
gradients beside them, and is held against the first.
"""

import argparse
import functools
import inspect
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import results, workers
from jaxmem import offload

FORMS = ("device", "whole", "scan", "leaves", "slices")
LAYERS, STACKS = 16, 4
GIB = 2**30
KEYS = ("form", "parameters_gib", "device")


class State(NamedTuple):
    mean: Any
    square: Any


class Adam:
    """As optax has them: init, and update, which returns what is added."""

    @staticmethod
    def init(params):
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return State(zeros(params), zeros(params))

    @staticmethod
    def update(gradients, state, params):
        def mix(decay, old, new):
            return decay * old + (1 - decay) * new

        mean = jax.tree.map(functools.partial(mix, 0.9), state.mean, gradients)
        squares = jax.tree.map(jnp.square, gradients)
        square = jax.tree.map(functools.partial(mix, 0.999), state.square, squares)
        added = jax.tree.map(
            lambda m, s, p: -1e-3 * (m / (jnp.sqrt(s) + 1e-8) + 0.01 * p),
            mean, square, params,
        )  # fmt: skip
        return added, State(mean, square)


def apply(params, gradients, state):
    added, state = Adam.update(gradients, state, params)
    return jax.tree.map(jnp.add, params, added), state


def moved(tree, space):
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


def whole(params, gradients, state):
    params, state = apply(params, gradients, moved(state, jax.memory.Space.Device))
    return params, moved(state, jax.memory.Space.Host)


def scan(params, gradients, state):
    """Layer by layer; the state's stacks never leave the host as a whole."""

    def layer(_, parts):
        return None, whole(*parts)

    return jax.lax.scan(layer, None, (params, gradients, state))[1]


def build(form, params):
    """(the state, a step) of a form."""
    if form in ("leaves", "slices"):
        size = 2**40 if form == "leaves" else 128 * 2**20
        streamed = offload.Streamed(Adam(), slice_bytes=size)
        return streamed.init(params), streamed.update
    run = {"device": apply, "whole": whole, "scan": scan}[form]
    if form == "device":
        return jax.jit(Adam.init)(params), jax.jit(run, donate_argnums=(0, 2))
    here = jax.tree.map(lambda x: x.sharding, params)
    there = State(
        *[jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), here)] * 2
    )
    state = jax.jit(Adam.init, out_shardings=there)(params)
    return state, jax.jit(run, donate_argnums=(0, 2), out_shardings=(here, there))


def work(args):
    shape = LAYERS, 8192, max(1, args.gib * GIB // (4 * STACKS * LAYERS * 8192))
    if args.gib == 0:
        shape = LAYERS, 8, 16

    @jax.jit
    def draw(seed):  # in one pass, so that nothing here sets the peak
        numbers = jax.lax.broadcasted_iota(jnp.float32, shape, 2)
        return {str(i): jnp.sin(numbers + i + seed) for i in range(STACKS)}

    params, gradients = draw(0), draw(1)
    jax.block_until_ready((params, gradients))
    device = jax.devices()[0]
    held = (device.memory_stats() or {}).get("bytes_in_use", 0)
    state, step = build(args.worker, params)
    jax.block_until_ready(state)
    started = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    taken = []
    for i in range(args.rounds + 1):
        start = time.perf_counter()
        params, state = jax.block_until_ready(step(params, gradients, state))
        if i:
            taken.append((time.perf_counter() - start) * 1e3)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    row = {
        "form": args.worker,
        "parameters_gib": round(size / GIB, 3),
        "leaf_gib": round(size / STACKS / GIB, 3),
        "ms": round(statistics.median(taken), 1),
        "held_gib": round(held / GIB, 3),
        "peak_before_gib": round(started / GIB, 3),
        "peak_gib": round(peak / GIB, 3),
        "mean": float(jnp.mean(jnp.square(params["0"][0]))),
        "rounds": args.rounds,
    }
    workers.send(row | results.provenance())


def drive(args):
    rows = []
    with workers.compilation_cache() as environment:
        environment |= {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "100"}
        for form in args.form or FORMS:
            asked = [f"--worker={form}", f"--gib={args.gib}", f"--rounds={args.rounds}"]
            for row in workers.start("benchmarks.run_optimizer", environment, asked):
                first = rows[0] if rows else row
                row["over_first"] = round(row["ms"] / first["ms"], 3)
                row["error"] = f"{abs(row['mean'] / first['mean'] - 1):.1e}"
                rows.append(row)
                results.merge(args.out, [row], KEYS)
                print(row, flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument(
        "--gib", type=int, default=8, help="of parameters; 0: a few KiB"
    )
    parser.add_argument("--form", action="append", choices=FORMS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", default="optimizer.csv", help="in benchmarks/results")
    parser.add_argument("--worker", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    (work if args.worker else drive)(args)


if __name__ == "__main__":
    main()
