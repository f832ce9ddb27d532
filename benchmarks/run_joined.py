"""Products of one input: each matrix alone, or all of them joined for one product.

    python -m benchmarks.run_joined --out joined_h200.csv

Queries, keys and values of 32,768 tokens at Qwen3-0.6B's dimensions, and gate and up
with what follows them; forward, and with all gradients. Joining copies the matrices,
which counts, as their layout in a checkpoint stays. Both forms are held against each
other first.
"""

import argparse
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from jaxmem import timing
from jaxmem.models.feed_forward import gated

KEYS = ("layer", "form", "tokens", "device")


def apart(x, weights):
    return tuple(x @ W for W in weights)


def joined(x, weights):
    sizes = np.cumsum([W.shape[1] for W in weights])[:-1]
    return tuple(jnp.split(x @ jnp.concatenate(weights, axis=1), sizes, axis=-1))


def attention(form, x, weights):
    return form(x, weights)


def feed_forward(form, x, weights):
    return (gated(*form(x, weights), "silu"),)


LAYERS = {"attention": (attention, (2, 1, 1)), "feed-forward": (feed_forward, (3, 3))}
FORMS = {"apart": apart, "joined": joined}


def operands(tokens, width, times):
    """x, the matrices, and a cotangent of each result by its number of columns."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    weights = tuple(draw(width, n * width) * width**-0.5 for n in times)
    return draw(tokens, width), weights, draw


def calls(layer, tokens, width):
    """{(form, pass): call without arguments}."""
    run, times = LAYERS[layer]
    x, weights, draw = operands(tokens, width, times)
    shapes = jax.eval_shape(functools.partial(run, apart), x, weights)
    dy = tuple(draw(*y.shape) for y in shapes)

    def both(form, x, weights, dy):
        y, pull = jax.vjp(functools.partial(run, form), x, weights)
        return y, pull(dy)

    by_path = {}
    for name, form in FORMS.items():
        forward = jax.jit(functools.partial(run, form))
        backward = jax.jit(functools.partial(both, form))
        by_path[name, "forward"] = functools.partial(forward, x, weights)
        by_path[name, "forward_backward"] = functools.partial(backward, x, weights, dy)
    return by_path


def largest_difference(ours, theirs):
    """Of corresponding arrays, relative to their norm."""

    def one(a, b):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return max(jax.tree.leaves(jax.tree.map(one, ours, theirs)))


def measure(layer, tokens, width, repetitions):
    by_path = calls(layer, tokens, width)
    error = largest_difference(
        *(by_path[name, "forward_backward"]() for name in ("joined", "apart"))
    )
    assert error < 1e-2, f"{layer}: forms differ by {error}"
    watch = timing.Stopwatch(jax.block_until_ready, lambda error: False, 0.05)
    unit = by_path["apart", "forward"]
    _, times = timing.take_turns(watch, unit, by_path, repetitions)
    for form in FORMS:
        row = {"layer": layer, "form": form, "tokens": tokens, "width": width}
        for name in ("forward", "forward_backward"):
            timed = times[form, name]
            assert timed is not None, "no memory"
            row[f"{name}_ms"] = round(timed.ms, 4)
            row[f"{name}_spread"] = round(timed.spread, 3)
        yield {**row, "difference": f"{error:.1e}"}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument(
        "--out", default="joined_h200.csv", help="in benchmarks/results"
    )
    args = parser.parse_args(arguments)
    for layer in LAYERS:
        rows = list(measure(layer, args.tokens, args.width, args.repetitions))
        rows = [{**row, **results.provenance()} for row in rows]
        print(*rows, sep="\n", flush=True)
        results.merge(args.out, rows, KEYS)


if __name__ == "__main__":
    main()
