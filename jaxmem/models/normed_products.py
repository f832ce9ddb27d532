"""A norm of the residual stream, and the products that read it."""

from collections.abc import Sequence

import jax
from flax import nnx

from jaxmem import remat
from jaxmem.models import norms, partitioning


def apply(
    norm: norms.RMSNorm | None,
    readers: Sequence[nnx.Linear],
    x: jax.Array,
    more: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Add to the residual stream, normalise it, and apply modules to the result.

        s = x + more,   out_i = readers_i(norm(s))

    Args:
        norm: of the last axis; None: the modules read s itself.
        readers: modules, such as `nnx.Linear`.
        x: [B, T, D].
        more: like x, or None for 0; with it, s has the checkpoint name "block_mid".

    Returns:
        s like x, and each module's result.

    **Memory** of residuals: s in its own dtype, and 4 bytes per token under the
    checkpoint name "norm_rms". The modules' input is computed again.
    """
    if more is not None:
        x = remat.name(partitioning.constrain_activations(x + more), "block_mid")

    def project(x: jax.Array):
        y = x if norm is None else norm(x)
        return tuple(read(y) for read in readers)

    return x, remat.recompute(project, save=["norm_rms"])(x)
