"""Reductions of logits in memory, by kernels for NVIDIA GPUs from Hopper on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import devices
from jaxmem.head.kernels import arithmetic, block_sizes
from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.block_sums import BlockSums, Density, Masses, PairSums
from jaxmem.head.maths.column_sampling import Sampling
from jaxmem.head.maths.divergence_terms import Arithmetic
from jaxmem.head.maths.spec import Spec

# The kernels are imported where they run: Pallas takes a while to import.
BLOCK: int = block_sizes.ROW_BLOCK
PAIR_BLOCK: int = block_sizes.PAIR_BLOCK
ARITHMETIC: Arithmetic = arithmetic.OPERATIONS


def is_of_machine() -> bool:
    """True if this process can run them."""
    return devices.backend() == "gpu" and devices.has_mosaic()


def supports(columns: int, dtype: Any) -> bool:
    """See `RowReductions.supports`."""
    from jaxmem.head.kernels import row_sums

    return row_sums.supports(columns, dtype)


def supports_blocks(columns: int, dtype: Any, k: int = 1) -> bool:
    """See `RowReductions.supports_blocks`."""
    from jaxmem.head.kernels import row_blocks

    return row_blocks.supports(columns, dtype, k)


def block_sums(z: jax.Array) -> BlockSums:
    """See `RowReductions.block_sums`."""
    from jaxmem.head.kernels import row_blocks

    return row_blocks.parts(z)


def top_k(z: jax.Array, blocks: BlockSums, k: int) -> tuple[jax.Array, jax.Array]:
    """See `RowReductions.top_k`."""
    from jaxmem.head.kernels import row_blocks

    return row_blocks.top_k(z, blocks.largest, k)


def pair_sums(
    terms: Callable[..., Sequence[jax.Array]], z: jax.Array, y: jax.Array
) -> PairSums:
    """See `RowReductions.pair_sums`."""
    from jaxmem.head.kernels import row_pairs

    return row_pairs.parts(terms, z, y)


def sums(
    terms: Callable[..., Sequence[jax.Array]],
    tiles: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
) -> list[jax.Array]:
    """See `RowReductions.sums`."""
    from jaxmem.head.kernels import row_sums

    return row_sums.sums(terms, tiles, rows)


def select(
    spec: Spec, density: Density, masses: Masses, starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `RowReductions.select`."""
    from jaxmem.head.kernels import sampled_blocks

    sampling = Sampling(spec.gradient_samples or 0, spec.columns, sampled_blocks.MARGIN)
    bounds = sampled_blocks.bounds(sampling, *masses)
    drawn = sampled_blocks.select(sampling, density, bounds, masses.width, starts)
    return drawn.columns, column_sampling.inverse(sampling, drawn.p)
