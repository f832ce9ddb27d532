"""Products of a mixture of experts on one GPU, beside dense ones of as many rows.

    python -m benchmarks.run_experts --out experts_h100.csv
    python -m benchmarks.run_experts --tokens 64 --out experts_h100.csv
    python -m benchmarks.run_experts --routing trained --no-loops --side jax

At Qwen3-30B-A3B's dimensions, in bfloat16, with the uneven routing of
`benchmarks/experts_routing.py`. First the distance of a layer and its gradients from
those in float32 is measured. Then the paths take turns with a dense product
[rows, hidden] x [hidden, ff] of all routed rows:

    products      of such size that the result needs
    of_dense      their number times the dense product's time, over the path's

transformers' experts on torch's grouped products run in a process of their own, with
torch's own dense product. Rows of each expert go into a file of their own.
"""

import argparse
import functools
import inspect
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks import experts_routing, results, workers
from jaxmem.base import timing

KEYS = ("path", "tokens", "experts", "chosen", "hidden", "ff", "routing", "device")


class Sizes(NamedTuple):
    """Sizes of a layer, and its number of tokens."""

    tokens: int
    experts: int
    chosen: int
    hidden: int
    ff: int
    routing: str = "drawn"

    @property
    def rows(self) -> int:
        """Rows that are routed to experts."""
        return self.tokens * self.chosen

    def choices(self) -> np.ndarray:
        """The experts of each token, [tokens, chosen]."""
        return experts_routing.choices(*self[:3], self.routing)


class Path(NamedTuple):
    """A program, its operands, and how many dense products its result needs."""

    run: Callable[..., Any]
    operands: tuple
    products: int


def problem(sizes: Sizes):
    """(weights, x, choices, scale) of a layer, and a slope of its result."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape, by=1.0):
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * jnp.bfloat16(by)

    e, d, f = sizes.experts, sizes.hidden, sizes.ff
    weights = {
        "gate": {"kernel": normal(e, d, f, by=d**-0.5)},
        "up": {"kernel": normal(e, d, f, by=d**-0.5)},
        "down": {"kernel": normal(e, f, d, by=f**-0.5)},
    }
    scale = jax.random.uniform(next(keys), (sizes.tokens, sizes.chosen))
    x, slope = (normal(sizes.tokens, d) for _ in range(2))
    return weights, x, jnp.asarray(sizes.choices()), scale, slope


def layer(weights, x, choice, scale, slope):
    from jaxmem.models.experts import grouped
    from jaxmem.models.mixture import Expert

    del slope
    run = Expert(str(x.dtype), "silu", None, False, 1.0, False)
    return grouped.apply(run, weights, x, choice, scale)


def by_loop(run):
    """`run`, with all kernels refused."""
    from jaxmem.models.experts import grouped

    def refused(*arguments):
        with mock.patch.object(grouped, "refuses", lambda x: "not asked for"):
            return run(*arguments)

    return refused


def slopes(run, argnums):
    """Gradients of a layer, which takes a slope last."""
    import jax
    import jax.numpy as jnp

    def loss(*arguments):
        return jnp.sum(run(*arguments) * arguments[-1].astype(jnp.float32))

    return jax.grad(loss, argnums)


def dense_layer(weights, x, slope):
    """A layer of one expert for all rows."""
    import jax

    del slope
    gate, up, down = (weights[name]["kernel"] for name in ("gate", "up", "down"))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def layers(sizes: Sizes, given, loops: bool) -> dict[str, Path]:
    """The layer and its gradients."""
    import jax
    import jax.numpy as jnp

    ways = {"kernels": layer} | ({"loop": by_loop(layer)} if loops else {})
    found = {}
    for name, run in ways.items():
        found |= {
            f"layer, {name}": Path(run, given, 3),
            f"layer's gradients of x, {name}": Path(slopes(run, (1, 3)), given, 6),
            f"layer's gradients, {name}": Path(slopes(run, (0, 1, 3)), given, 9),
        }
    one = jax.tree.map(lambda w: w[0], given[0])
    x, slope = (
        jax.random.normal(jax.random.key(i), (sizes.rows, sizes.hidden), jnp.bfloat16)
        for i in range(2)
    )
    found |= {
        "dense layer": Path(dense_layer, (one, x, slope), 3),
        "dense layer's gradients": Path(
            slopes(dense_layer, (0, 1)), (one, x, slope), 9
        ),
    }
    return found


def parts(sizes: Sizes, given) -> dict[str, Path]:
    """The kernels, and what comes before and after them."""
    import jax

    from jaxmem.head.backends import hopper
    from jaxmem.models.experts import grouped_rows, grouped_sorted
    from jaxmem.models.kernels import grouped_products

    weights, x, choice, scale, _ = given
    gate, up, down = (weights[name]["kernel"] for name in ("gate", "up", "down"))
    find = functools.partial(
        grouped_rows.tiles, groups=sizes.experts, size=grouped_products.ROWS
    )
    found = jax.jit(find)(choice)
    arguments = grouped_rows.Arguments(weights, x, scale, found)
    where = grouped_sorted.SortedRows.from_tiles(found).offsets
    gather = grouped_sorted.sorted_rows
    wide = jax.jit(gather)(arguments)[0]
    launch = grouped_products.launch(x.dtype, hopper.n_blocks())
    of_rows = functools.partial(grouped_products.of_rows, launch)
    back = functools.partial(of_rows, transposed=True)
    of_groups = functools.partial(
        grouped_products.of_groups, launch, dtype=np.dtype(x.dtype)
    )
    short, other = jax.jit(lambda *a: of_rows(*a))([wide], [gate, up], where)

    def add(rows, arguments):
        return grouped_sorted.added(rows, grouped_sorted.sorted_positions(arguments))

    return {
        "gate and up": Path(of_rows, ([wide], [gate, up], where), 2),
        "down": Path(of_rows, ([short], [down], where), 1),
        "dx of gate and up": Path(back, ([short, other], [gate, up], where), 2),
        "dx of down": Path(back, ([wide], [down], where), 1),
        "dW of gate and up": Path(of_groups, (wide, [short, other], where), 2),
        "dW of down": Path(of_groups, (short, [wide], where), 1),
        "sorting": Path(find, (choice,), 0),
        "gathering": Path(gather, (arguments,), 0),
        "adding": Path(add, (wide, arguments), 0),
    }


def dense(sizes: Sizes) -> dict[str, Path]:
    """One product of all rows, and its gradients; the first is the unit."""
    import jax
    import jax.numpy as jnp

    shapes = (
        (sizes.rows, sizes.hidden),
        (sizes.hidden, sizes.ff),
        (sizes.rows, sizes.ff),
    )
    x, w, y = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i, shape in enumerate(shapes)
    )
    return {
        "dense": Path(lambda x, w: x @ w, (x, w), 1),
        "dense dx": Path(lambda y, w: y @ w.T, (y, w), 1),
        "dense dW": Path(lambda x, y: x.T @ y, (x, y), 1),
    }


def errors(given) -> dict[str, float]:
    """Columns: distances of both ways, over the norm, from float32 by the loop."""
    import jax
    import jax.numpy as jnp

    def everything(run):
        return jax.jit(lambda *a: (run(*a), slopes(run, (0, 1, 3))(*a)))

    def wide(weights, x, choice, scale, slope):
        weights, x = jax.tree.map(lambda a: a.astype(jnp.float32), (weights, x))
        with jax.default_matmul_precision("highest"):
            return by_loop(layer)(weights, x, choice, scale, slope)

    @jax.jit
    def distance(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    want = everything(wide)(*given)
    names = "out", "dW_down", "dW_gate", "dW_up", "dx", "dscale"
    said = {}
    for way, run in (("kernels", layer), ("loop", by_loop(layer))):
        got = everything(run)(*given)
        pairs = zip(names, *map(jax.tree.leaves, (got, want)), strict=True)
        for name, a, b in pairs:
            said[f"{name}_error_{way}"] = float(f"{float(distance(a, b)):.3g}")
        del got
    return said


def measure(sizes: Sizes, loops: bool, repetitions: int) -> list[dict]:
    """One row a path."""
    import jax

    from jaxmem.commands.bench import stopwatch

    given = problem(sizes)
    said = errors(given)
    print(said, flush=True)
    paths = dense(sizes) | parts(sizes, given) | layers(sizes, given, loops)
    programs, runs = {}, {}
    for name, path in paths.items():
        try:
            programs[name] = jax.jit(path.run).lower(*path.operands).compile()
            runs[name] = functools.partial(programs[name], *path.operands)
            jax.block_until_ready(runs[name]())
        except Exception as error:  # the other paths are measured all the same
            runs.pop(name, None)
            print(f"{name}: {workers.said(error)}", flush=True)
    unit = runs.pop("dense")
    unit_ms, taken = timing.take_turns(stopwatch(), unit, runs, repetitions)
    rows = [row(sizes, "dense", timing.Timing(unit_ms, 1.0, 0.0), 1)]
    for name, timed in taken.items():
        if timed is not None:
            rows.append(row(sizes, name, timed, paths[name].products))
            size = programs[name].memory_analysis().temp_size_in_bytes
            rows[-1]["temp_mib"] = round(size / 2**20, 1)
            rows[-1] |= said if name == "layer's gradients, kernels" else {}
    return rows


def row(sizes: Sizes, path: str, timed: timing.Timing, products: int) -> dict:
    """Columns of a path."""
    of_dense = round(products / timed.over_unit, 3) if products else ""
    said = {
        "path": path, **sizes._asdict(), "products": products,
        "ms": round(timed.ms, 4), "of_dense": of_dense,
        "spread": round(timed.spread, 3),
    }  # fmt: skip
    print(said, flush=True)
    return said


def histogram(sizes: Sizes) -> list[dict]:
    """A row an expert."""
    counts = np.bincount(sizes.choices().reshape(-1), minlength=sizes.experts)
    same = {"tokens": sizes.tokens, "chosen": sizes.chosen, "routing": sizes.routing}
    return [{**same, "expert": i, "rows": int(n)} for i, n in enumerate(counts)]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in zip(
        Sizes._fields, (8192, 128, 8, 2048, 768, "drawn"), strict=True
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--side", choices=["jax", "torch"])
    parser.add_argument("--no-loops", action="store_true", help="kernels alone")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", default="experts_h100.csv", help="in results/")
    args = parser.parse_args(arguments)
    sizes = Sizes(*(getattr(args, name) for name in Sizes._fields))
    path = pathlib.Path(args.out)
    counts = path.with_name(f"{path.stem}_histogram.csv")
    results.merge(counts, histogram(sizes), ("tokens", "chosen", "routing", "expert"))
    if args.side != "torch":
        found = measure(sizes, not args.no_loops, args.repetitions)
        here = results.provenance()
        results.merge(path, [{**each, **here} for each in found], KEYS)
    if args.side != "jax":
        job = json.dumps([*sizes, args.repetitions])
        for each in workers.start("benchmarks.experts_torch", {}, [job]):
            results.merge(path, [each], KEYS)


if __name__ == "__main__":
    main()
