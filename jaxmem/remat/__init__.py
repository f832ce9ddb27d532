"""Rematerialisation and offloading policies for blocks, by checkpoint name.

A block gives names to its intermediate values (`name`); a `Policy` saves a named value
on the device or offloads it to the host. All other values are recomputed from the
block's input in the backward pass. XLA offloads correctly in one form only: blocks in
one `jax.lax.scan`, not unrolled, with a named input. `scan_blocks` has that form.

    import jax.numpy as jnp
    from jaxmem import remat

    def block(h, weights):
        gate = remat.name(h @ weights["gate"], "gate")
        return h + jnp.tanh(gate) @ weights["down"]

    h = remat.scan_blocks(block, weights, h, "offload_block")

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174; for the host, Rhu et al., "vDNN", 2016, arXiv:1602.08124.
"""

from jaxmem.base import imports
from jaxmem.remat import offload as offload
from jaxmem.remat.blocks import (
    block as block,
    compiler_options as compiler_options,
    name as name,
    recompute as recompute,
    scan_blocks as scan_blocks,
    verify as verify,
)
from jaxmem.remat.cost import host_bytes as host_bytes
from jaxmem.remat.fitting import (
    Rates as Rates,
    device_bytes as device_bytes,
    device_limit as device_limit,
    fit as fit,
    measure_rates as measure_rates,
    planned_rates as planned_rates,
)
from jaxmem.remat.policies import (
    NAMES as NAMES,
    PRESETS as PRESETS,
    Policy as Policy,
    preset as preset,
)
from jaxmem.remat.residuals import (
    Residual as Residual,
    Residuals as Residuals,
    residuals as residuals,
)

__dir__ = imports.public_dir(__name__)
