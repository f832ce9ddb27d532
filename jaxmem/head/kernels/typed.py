"""Types of operands and results of kernels inside `jax.shard_map`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from jaxmem.head.maths import vocab_shards


def alike(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, typed as varying along the mesh axes of any of them."""
    return vocab_shards.vary(operands, vocab_shards.varying(operands))


def run(kernel: Callable[..., Any], *operands: jax.Array) -> Any:
    """The results of a kernel, typed as varying along its operands' mesh axes.

    `plgpu.kernel` checks no such types, and gives its results none.
    """
    return vocab_shards.vary(kernel(*alike(*operands)), vocab_shards.varying(operands))


def launch(
    body: Callable[..., None], out_type: Any, grid: Mapping[str, int], params: Any,
    operands: Sequence[jax.Array], scratch: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """`run` of a kernel with a program for each point of a grid of named axes."""
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch,
        compiler_params=params,
    )
    return run(kernel, *operands)
