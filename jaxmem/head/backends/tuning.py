"""Measures tiles and launches: each kernel of a head alone, one field at a time.

Used by `python -m jaxmem bench --tune`. A candidate's result is compared with the
default's before it is timed; kernels and the plain GEMM are timed alternately (see
`jaxmem/base/timing.py`).
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.base import timing
from jaxmem.head.backends import hopper
from jaxmem.head.kernels import block_sizes, dlogits, forward, products, tuned
from jaxmem.head.kernels.logits import Env
from jaxmem.head.kernels.tiles import SampledLaunch, Tiles
from jaxmem.head.maths import column_sampling, row_stats

# Candidate values by field.
TRIED: dict[str, tuple[int, ...]] = {
    "panel": (4, 8, 16, 32),
    "group": (1, 2, 3, 4, 8),
    "stages": (3, 4),
    "slots": (1, 2, 4),
    "stored": (32, 64),
    "cluster": (1, 2),
    "at_once": (1, 2, 4, 8),
    "unroll": (2, 4, 8, 16),
    "sums": (2, 4, 8, 16, 32),
}
_FIELDS = {  # tuned, by kernel; the group of "exps" is that of "statistics"
    "statistics": ("panel", "group", "cluster"),
    "exps": ("panel", "slots", "stored", "stages", "cluster"),
    "derivative": ("panel", "group", "slots", "stored", "stages", "cluster"),
    "to_hidden": ("panel", "group", "slots", "stages", "cluster"),
    "to_W": ("panel", "group", "slots", "stages", "cluster"),
    "sampled_to_hidden": ("at_once", "unroll"),
    "sampled_to_W": ("at_once", "unroll", "sums"),
    "sampled_pieces": ("at_once", "unroll"),
}
_NOISE = 0.997  # a candidate is better if its time ratio is below
_AGAIN = 5  # factor of repetitions for the final comparison with the default
_CHUNK = 1024  # tokens, on which the block of the vocabulary depends
# Slots of a token's sampled entries, and how many of them are filled: those of K=128
# with data like a policy's, whose columns have the popularity of words.
_SLOTS, _FILLED = 128, 40


class HeadShape(NamedTuple):
    """Sizes of a head's call."""

    tokens: int
    depth: int
    columns: int


class Measured(NamedTuple):
    """One candidate: its time relative to the whole GEMM's, or why it has none."""

    kernel: str
    tiles: Tiles | SampledLaunch
    over_gemm: float | None
    ms: float | None
    why: str


def tune(
    shape: tuple[int, int, int], kernels, stopwatch: timing.Stopwatch, repetitions: int
) -> Iterator[tuple[list[Measured], dict]]:
    """Yield (measurements, table entry) of each kernel, from candidates of each field.

    The shape is (N, D, V), D and V multiples of 64, for W [V, D] in bfloat16.
    """
    n, depth, columns = shape = HeadShape(*shape)
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (n, depth), jnp.bfloat16)
    W = (jax.random.normal(keys[1], (columns, depth)) * depth**-0.5).astype(h.dtype)
    y = jax.random.randint(keys[2], (n,), 0, columns)
    head = tuned.TunedKey(jax.devices()[0].device_kind, depth, columns, "vd")
    gemm = jax.jit(lambda h, W: h @ W.T).lower(h, W).compile()
    for kernel in kernels:
        program, operands = program_of(kernel, shape, h, W, y)
        yield _tune_one(
            kernel, head, program, operands, functools.partial(gemm, h, W), stopwatch,
            repetitions,
        )  # fmt: skip


def _tune_one(kernel, head, program, operands, gemm, stopwatch, repetitions):
    """Tune fields in turn, each from the best so far: (measurements, table entry).

    At the end, the best and the default are timed again for longer, because the
    smallest of many noisy numbers is mostly luck.
    """
    default = tuned.default(kernel, head)
    best, results, correct = default, {}, {}
    expected = jax.block_until_ready(jax.jit(program(default))(*operands))

    def take_turns(candidates, repetitions):
        runs = {tiles: correct[tiles] for tiles in candidates if tiles in correct}
        _, timings = timing.take_turns(stopwatch, gemm, runs, repetitions)
        for tiles, result in timings.items():
            results[tiles] = Measured(
                kernel, tiles, result and round(result.over_unit, 4),
                result and round(result.ms, 3), "" if result else timing.OUT_OF_MEMORY,
            )  # fmt: skip
        return timings

    for field in _FIELDS[kernel]:
        candidates, refused = _vary_field(best, field)
        for key, why in refused.items():
            results[key] = Measured(kernel, best, None, None, why)
        new = [tiles for tiles in candidates if tiles not in correct]
        for tiles, compiled in _compile_all(program, new, operands).items():
            why = _reason_to_skip(compiled, operands, expected)
            if why:
                results[tiles] = Measured(kernel, tiles, None, None, why)
            else:
                correct[tiles] = functools.partial(compiled, *operands)
        best = _faster_beyond_noise(best, take_turns(candidates, repetitions))
    if best != default:
        best = _faster_beyond_noise(
            default, take_turns([default, best], _AGAIN * repetitions)
        )
    measured = {
        "over_gemm": results[best].over_gemm, "ms": results[best].ms,
        "default_over_gemm": results[default].over_gemm,
    }  # fmt: skip
    return list(results.values()), tuned.entry_of(kernel, head, best, measured)


def _reason_to_skip(compiled, operands, expected) -> str:
    """The reason why a candidate is not timed; an empty string if it is."""
    if isinstance(compiled, Exception):
        return str(compiled)[:200]
    return "" if _results_agree(compiled(*operands), expected) else "wrong result"


def _faster_beyond_noise(best, timings):
    """The fastest of one round, if it is faster by more than noise."""
    cost = {tiles: result.over_unit for tiles, result in timings.items() if result}
    fastest = min(cost, key=lambda tiles: cost[tiles], default=best)
    return fastest if cost.get(fastest, 0) < _NOISE * cost.get(best, 9e9) else best


def _vary_field(best, field) -> tuple[list[Any], dict[Any, str]]:
    """Tiles or launches that differ in a field; invalid ones, with the reason."""
    candidates, refused = [best], {}
    for value in TRIED[field]:
        try:
            tiles = dataclasses.replace(best, **{field: value})
        except ValueError as error:
            refused[field, value] = f"with {field}={value}: {error}"
            continue
        candidates += [tiles] if tiles != best else []
    return candidates, refused


def _compile_all(program, candidates, operands) -> dict[Any, Any]:
    """Compiled programs, or the exception that the compiler raised; in parallel."""

    def compile_one(tiles):
        try:
            return jax.jit(program(tiles)).lower(*operands).compile()
        except Exception as error:  # an invalid kernel is a result, too
            return error

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(candidates, pool.map(compile_one, candidates), strict=True))


def _results_agree(results, expected) -> bool:
    """True if results agree to 8 bits of the largest; orders of sums differ."""

    def close(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.all(jnp.abs(a - b) <= 2**-7 * jnp.max(jnp.abs(b)) + 1e-6)

    flags = jax.jit(lambda *t: jax.tree.map(close, *t))(results, expected)
    return all(map(bool, jax.tree.leaves(flags)))


def program_of(kernel, shape, h, W, y) -> tuple[Callable[[Any], Callable], tuple]:
    """(tiles -> a function of arrays, the arrays) of a kernel with its usual shapes."""
    if kernel in tuned.LAUNCHES:
        return _sampled_program(kernel, h, W)
    n, depth, columns = shape

    def env(tiles):
        return Env(
            tiles, n, depth, columns, columns, "vd", h.dtype, None, hopper.n_blocks()
        )

    if kernel in ("statistics", "exps"):
        exps = kernel == "exps"
        function = forward.statistics_and_exps if exps else forward.statistics
        active = jnp.full(1, n, jnp.int32)
        return lambda t: functools.partial(function, env(t)), (h, W, y, active)
    tile = tuned.DEFAULTS["derivative"].columns
    n_tiles, clusters = -(-columns // tile), hopper.n_clusters()
    width = tile * block_sizes.backward_tiles(
        n_tiles, n, _CHUNK, columns, depth, clusters
    )
    if kernel == "derivative":
        return _derivative_program(env, width, n, h, W, y)
    dz = jax.random.normal(jax.random.key(3), (n, width), h.dtype)
    return _product_program(kernel, dz, h, W)


def _product_program(kernel, dz, h, W):
    """A product into arrays allocated by the call, so that no copy is timed with it."""
    width = dz.shape[1]
    rows, block = jnp.int32(len(dz)), (jnp.int32(0), jnp.int32(width))

    def to_hidden(tiles):
        launch = products.ProductLaunch(tiles, "vd", hopper.n_blocks(), add=True)
        return lambda dz, W: products.to_hidden(
            launch, dz, W, rows, block, jnp.zeros(h.shape, jnp.float32)
        )

    def to_W(tiles):
        launch = products.ProductLaunch(tiles, "vd", hopper.n_blocks(), add=False)
        return lambda dz, h: products.to_W(
            launch, dz, h, rows, block, lax.empty((width, h.shape[1]), W.dtype)
        )

    return (to_hidden, (dz, W)) if kernel == "to_hidden" else (to_W, (dz, h))


def _sampled_program(kernel, h, W):
    """(launch -> a function of arrays, the arrays) of a sum of sampled rows."""
    from jaxmem.head.kernels import sampled_products

    dz = _random_entries(len(h), len(W))
    if kernel == "sampled_to_hidden":
        return (
            lambda launch: (
                lambda dz, W: sampled_products.to_hidden(launch, dz, W, "vd", W.dtype)
            ),
            (dz, W),
        )
    pairs = column_sampling.sort_by_column(dz)

    def to_W(launch):
        pieces = tuned.LAUNCHES["sampled_pieces"]
        launches = sampled_products.ColumnLaunches(launch, pieces)
        like = jax.ShapeDtypeStruct(W.shape, W.dtype)
        return lambda pairs, h: sampled_products.to_weights(
            launches, pairs, h, like, "vd"
        )

    def to_pieces(launch):
        def run(pairs, h):
            n_live = jnp.sum(pairs.columns < len(W), dtype=jnp.int32)
            pieces = sampled_products.sum_pieces(launch, pairs, n_live, len(W), h)
            # Sums of pieces that are not whole are undefined.
            return jnp.where(pieces.whole[:, None] > 0, pieces.sums, 0)

        return run

    return (to_W if kernel == "sampled_to_W" else to_pieces), (pairs, h)


def _random_entries(n, columns) -> column_sampling.SparseDerivative:
    """Entries [n, slots] in columns of density 1 / j, the slots past a few empty."""
    shape = n, _SLOTS
    of_columns, of_values = jax.random.split(jax.random.key(4))
    drawn = jnp.exp(jax.random.uniform(of_columns, shape) * jnp.log(columns)) - 1
    is_filled = jnp.arange(_SLOTS) < _FILLED
    drawn = jnp.where(
        is_filled, jnp.minimum(drawn.astype(jnp.int32), columns - 1), columns
    )
    values = jnp.where(is_filled, jax.random.normal(of_values, shape), 0)
    return column_sampling.SparseDerivative(drawn, values)


def _derivative_program(env, width, n, h, W, y):
    zeros, ones = jnp.zeros(n), jnp.ones(n)
    log_sum = jnp.full(n, jnp.log(W.shape[0] * 1.0))
    rows = row_stats.Outputs(-log_sum, ones, log_sum, zeros, zeros > 0, zeros, log_sum)
    c = row_stats.Coefficients(ones, ones, ones, None)

    def derivative(tiles):
        def run(h, W, y):
            part = jnp.array([n, 0, width // tiles.columns], jnp.int32)
            inputs = dlogits.LogitsInputs(h, W, y)
            operands = dlogits.operands(env(tiles), inputs, rows, c)
            return dlogits.derivative(env(tiles), operands, part, width)

        return run

    return derivative, (h, W, y)
