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

    Returns s [B, T, D], and each module's result. Without a norm the modules read s
    itself. With `more`, s has the checkpoint name "block_mid". Residuals are s, and 4
    bytes per token with the name "norm_rms": the modules' input is computed again.
    """
    if more is not None:
        x = remat.name(partitioning.constrain_activations(x + more), "block_mid")

    def project(x: jax.Array):
        y = x if norm is None else norm(x)
        return tuple(read(y) for read in readers)

    return x, remat.recompute(project, save=["norm_rms"])(x)
