"""Rows of logits by blocks of neighbours, by Pallas's Triton backend.

One read of the logits gives the largest logit of each block and the sum of the other
exponentials relative to it. The row's normaliser follows from these few numbers, as do
the blocks that the row's k largest logits are in, and the mass of each block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.core import running_sums
from jaxmem.core.stats import Normaliser
from jaxmem.kernels import row_sums
from jaxmem.kernels.typed import alike, result

WIDTH = 64  # columns of a block
_TILE = 4096  # columns of a program
_WARPS = 4
_TOP = np.uint32(2**31)
_LARGEST_ROW = 16384  # entries that one program selects from


class Parts(NamedTuple):
    """Sums of each block of logits, float32 [C, ⌈V / WIDTH⌉]."""

    largest: jax.Array  # m, the largest logit
    others: jax.Array  # Σ e^(z - m) without the 1 of a largest logit


def supports(n_rows: int, columns: int, dtype: Any, k: int = 1) -> bool:
    """Whether the kernels take logits of this shape and type, and select k of them."""
    selected_from = max(pl.cdiv(columns, WIDTH), k * WIDTH)
    return row_sums.supports(n_rows, columns, dtype) and selected_from <= _LARGEST_ROW


def parts(z: jax.Array) -> Parts:
    """The blocks of logits z [C, V], float32, all -inf beyond V."""
    return Parts(*_launch(_others, z))


def quick_parts(z: jax.Array, exp: Callable[[jax.Array], jax.Array]) -> Parts:
    """`parts` in fewer instructions.

    Small sums are exact in the row's first block only; others have an absolute error of
    an epsilon.

    Args:
        z: logits [C, V], float32.
        exp: e^x for x ≤ 0.

    Returns:
        The blocks.
    """
    largest, sums = _launch(functools.partial(_sums, exp), z)
    return without_largest(z, largest, sums, WIDTH)


def _launch(reduce, z):
    """Maxima of the blocks, and what `reduce` makes of each."""
    (z,) = alike(z)
    shape = len(z), pl.cdiv(z.shape[1], WIDTH)
    return pl.pallas_call(
        functools.partial(_reduce_blocks, reduce, z.shape[1]),
        grid=(len(z), pl.cdiv(z.shape[1], _TILE)),
        in_specs=[pl.no_block_spec],
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[result(shape, jnp.float32, z)] * 2,
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        name="row_blocks",
    )(z)


def without_largest(z: jax.Array, largest, sums, width: int) -> Parts:
    """`Parts` of blocks of some width, from sums with the 1 of a largest logit.

    Subtracting it loses a small sum, which matters in the row's first block alone.
    """
    first = jnp.argmax(largest, axis=1)[:, None]
    column, entries = running_sums.window(z, first, width)
    inside = (column >= first[..., None] * width) & (column < z.shape[1])
    entries = jnp.where(inside, entries, -jnp.inf)[:, 0]
    row_max = jnp.max(largest, axis=1, keepdims=True)
    is_largest = entries >= row_max
    others = jnp.where(is_largest, 0, jnp.exp(entries - row_max))
    others = jnp.sum(others, axis=1) + (jnp.sum(is_largest, axis=1) - 1)
    block = jnp.arange(largest.shape[1], dtype=jnp.int32)
    return Parts(largest, jnp.where(block == first, others[:, None], sums - 1))


def normaliser(blocks: Parts) -> Normaliser:
    """The normaliser of the rows; see `core.stats.normaliser`."""
    largest, others = blocks
    row_max = jnp.max(largest, axis=1)
    is_largest = largest == row_max[:, None]
    scaled = (others + 1) * jnp.exp(largest - row_max[:, None])
    # Without the 1 of a largest logit: adding and subtracting it loses a small sum.
    smaller = jnp.sum(jnp.where(is_largest, others, scaled), axis=1)
    smaller += jnp.sum(is_largest.astype(jnp.float32), axis=1) - 1
    return Normaliser(row_max, jnp.log1p(jnp.where(row_max == -jnp.inf, -1, smaller)))


def top_k(z: jax.Array, largest: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of rows of logits, largest first, equal ones in their order.

    They are in the k blocks with the largest maxima; see `core.selection.top_k`.

    Args:
        z: float32 [C, V].
        largest: of its `Parts`.
        k: how many, at most V; see `supports`.

    Returns:
        (logits, their columns in int32), [C, k] each.
    """
    _, blocks = select(largest, min(k, largest.shape[1]))
    entries, columns = select(z, k, blocks)
    entries, at = lax.top_k(entries, k)
    return entries, jnp.take_along_axis(columns, at, axis=1, mode="promise_in_bounds")


def _reduce_blocks(reduce, columns, z_ref, largest_ref, sums_ref):
    row, tile = pl.program_id(0), pl.program_id(1)
    block = tile * (_TILE // WIDTH) + jnp.arange(_TILE // WIDTH, dtype=jnp.int32)
    column = block[:, None] * WIDTH + jnp.arange(WIDTH, dtype=jnp.int32)[None]
    z = plt.load(z_ref.at[row, column], mask=column < columns, other=-jnp.inf)
    largest = jnp.max(z, axis=1)
    # A block of -inf has exponentials of 0, not NaN.
    shift = jnp.where(largest == -jnp.inf, 0, largest)[:, None]
    there = block < pl.cdiv(columns, WIDTH)
    plt.store(largest_ref.at[row, block], largest, mask=there)
    sums = reduce(z, largest[:, None], shift)
    plt.store(sums_ref.at[row, block], sums, mask=there)


def _others(z, largest, shift):
    is_largest = z == largest
    others = jnp.sum(jnp.where(is_largest, 0, jnp.exp(z - shift)), axis=1)
    return others + (jnp.sum(is_largest.astype(jnp.float32), axis=1) - 1)


def _sums(exp, z, largest, shift):
    del largest
    return jnp.sum(exp(z - shift), axis=1)


def select(
    x: jax.Array, k: int, blocks: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of rows, in the order of their columns.

    Of equal ones, those with the smallest columns.

    Args:
        x: float32 [C, n].
        k: how many, at most those that there are.
        blocks: int32 [C, b], ascending: only these blocks of `WIDTH` columns; None for
            all columns.

    Returns:
        (entries, their columns in int32), [C, k] each.
    """
    operands = alike(x) if blocks is None else alike(x, blocks)
    n = x.shape[1] if blocks is None else blocks.shape[1] * WIDTH
    # More warps hide more of the latency of gathering blocks.
    warps = max(pl.next_power_of_2(n) // (1024 if blocks is None else 512), 1)
    shape = len(x), k
    return pl.pallas_call(
        functools.partial(_select, x.shape[1], n, k),
        grid=(len(x),),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[
            result(shape, jnp.float32, *operands),
            result(shape, jnp.int32, *operands),
        ],
        compiler_params=plt.CompilerParams(num_warps=min(warps, 16), num_stages=1),
        name="row_select",
    )(*operands)


def _select(columns, n, k, x_ref, *refs):
    *block_refs, entries_ref, columns_ref = refs
    row = pl.program_id(0)
    place = jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32)
    column = place
    for ref in block_refs:
        of_place = plt.load(ref.at[row, place // WIDTH], mask=place < n, other=0)
        column = of_place * WIDTH + place % WIDTH
    inside = (place < n) & (column < columns)
    x = plt.load(x_ref.at[row, column], mask=inside, other=0.0)
    x = jnp.where(x == 0, 0.0, x)  # no -0, which is not below 0
    keys = jnp.where(inside, _ordered(x), 0)
    threshold = _kth_largest(keys, k)
    above, equal = keys > threshold, keys == threshold
    # Both counts in one running sum.
    counts = jnp.cumsum(above.astype(jnp.int32) * 2**16 + equal.astype(jnp.int32))
    n_above, n_equal = counts >> 16, counts & 0xFFFF
    wanted = k - jnp.sum(above.astype(jnp.int32))
    taken = above | (equal & (n_equal <= wanted))
    at = jnp.where(taken, n_above + jnp.minimum(n_equal, wanted) - 1, k)
    plt.store(entries_ref.at[row, at], x, mask=taken)
    plt.store(columns_ref.at[row, at], column, mask=taken)


def _ordered(x):
    """Positive uint32 in the order of float32 x without -0."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | _TOP)


def _kth_largest(keys, k):
    """A number that k uint32 keys reach; more only if several equal the k-th largest.

    It is found bit by bit, which ends as soon as exactly k keys reach it.
    """

    def unsure(carry):
        _, bit, n_reach = carry
        return (bit > 0) & (n_reach != k)

    def next_bit(carry):
        found, bit, n_reach = carry
        n_tried = jnp.sum((keys >= (found | bit)).astype(jnp.int32))
        enough = n_tried >= k
        found = jnp.where(enough, found | bit, found)
        return found, bit >> 1, jnp.where(enough, n_tried, n_reach)

    first = jnp.uint32(0), jnp.uint32(_TOP), jnp.int32(keys.size)
    return lax.while_loop(unsure, next_bit, first)[0]
