"""Backward kernel: the logits again, and their derivative in the type of the inputs.

Three coefficients and a label a row (`_stats.coefficients`) serve every output. The
arithmetic is `_stats.dlogits`, with what is one number a row folded beforehand.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem._stats import Coefficients, Outputs
from jaxmem.kernels import logits
from jaxmem.kernels.logits import Env, Ring
from jaxmem.kernels.tiles import N_COMPUTE

# ln S of a row that is not there: every p underflows, and 0 · ln p stays 0.
NO_ROW = -logits.NOTHING


def derivative(
    env: Env, hidden, W, labels, rows: Outputs, c: Coefficients, bias=None,
    inverse_temperature=None,
) -> jax.Array:  # fmt: skip
    """dloss/d(h Wᵀ), [n_rows, columns] in hidden's type; 0 in masked columns.

    Args:
        env: what to run.
        hidden: [n_rows, D].
        W: [V, D] or [D, V].
        labels: int32 [n_rows].
        rows: statistics of the rows, [n_rows]; `log_sum` is NO_ROW where there is none.
        c: coefficients of the rows, [n_rows].
        bias: float32 [V], -inf allowed, or None.
        inverse_temperature: float32 [n_rows], or None.
    """
    of_rows = _fold(rows, c, inverse_temperature)
    operands: dict[str, Any] = dict(
        h=hidden, w=W, labels=labels, rows=jnp.stack(tuple(of_rows.values()))
    )
    if bias is not None:
        operands["bias"] = logits.whole_tiles(env, bias)
    return plgpu.kernel(
        functools.partial(_kernel, env, (*operands, "out"), tuple(of_rows)),
        out_type=jax.ShapeDtypeStruct((env.n_rows, env.columns), env.dtype),
        grid=(env.n_blocks,),
        grid_names=("block",),
        num_threads=N_COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands.values())


def _fold(rows, c, inverse_temperature):
    """The numbers a row that the kernel reads, by name; what is absent is zero."""
    zero = jnp.zeros_like(rows.max)
    alpha = zero if c.alpha is None else c.alpha
    folded = dict(max=rows.max, log_sum=rows.log_sum, alpha=alpha)
    if c.label is not None:
        folded["slope"] = alpha - c.label
        folded["at_label"] = c.label * -jnp.expm1(rows.logprob)
    if c.beta is not None:
        folded["beta"] = c.beta
    if c.gamma is not None:
        folded["gamma"] = c.gamma
    if inverse_temperature is not None:
        folded["inverse_temperature"] = inverse_temperature
    return folded


def _kernel(env, names, row_names, *refs):
    t, gmem = env.tiles, dict(zip(names, refs, strict=True))

    @functools.partial(
        pl.run_scoped,
        ring=Ring.scratch(env),
        labels_smem=plgpu.SMEM((N_COMPUTE, t.rows), jnp.int32),
        rows_smem=plgpu.SMEM((N_COMPUTE, len(row_names), t.rows), jnp.float32),
        bias_smem=plgpu.SMEM((N_COMPUTE, t.columns), jnp.float32),
        out_smem=plgpu.SMEM(
            (N_COMPUTE, t.slots, t.rows, t.stored),
            env.dtype,
            transforms=logits.swizzle(t.stored),
        ),
        loaded=plgpu.Barrier(num_barriers=N_COMPUTE),
        collective_axes="wg",
    )
    def _scope(ring, **mine):
        ring, wg = Ring(**ring), lax.axis_index("wg")
        n_active = jnp.int32(env.n_rows)

        @pl.when(wg == N_COMPUTE)
        def _memory():
            logits.load_tiles(env, n_active, gmem["h"], gmem["w"], ring)

        @pl.when(wg < N_COMPUTE)
        def _compute():
            plgpu.set_max_registers(logits.COMPUTE_REGISTERS, action="increase")
            smem = {k: ref.at[wg] for k, ref in mine.items()}
            unit = functools.partial(_unit, env, row_names, gmem, smem, ring)
            logits.for_each_unit(env, n_active, unit, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)


def _unit(env, row_names, gmem, smem, ring, row_tile, group, n_tiles, step):
    """Derivatives of this warpgroup's rows over one group of tiles."""
    t = env.tiles
    start = row_tile * t.block_rows + lax.axis_index("wg") * t.rows
    rows = pl.ds(start, t.rows)
    fetch = functools.partial(logits.fetch, smem["loaded"])
    labels = fetch(gmem["labels"].at[rows], smem["labels_smem"])
    fetch(gmem["rows"].at[:, rows], smem["rows_smem"])

    def tile(i, step):
        at, bias = env.tile(group, i), None
        columns = pl.ds(at * t.columns, t.columns)
        if "bias" in gmem:
            bias = fetch(gmem["bias"].at[columns], smem["bias_smem"])

        def store(z):
            # Read anew for each tile: registers are the logits'.
            row = {k: smem["rows_smem"][j] for j, k in enumerate(row_names)}
            dz = _of_tile(env, z, at, labels, row, bias)
            _store(env, dz, gmem["out"], rows, at * t.columns, smem["out_smem"])

        logits.multiply(env, ring, step, store)
        return step + env.n_steps

    return lax.fori_loop(0, n_tiles, tile, step)


def _store(env, dz, out_gmem, rows, start, out_smem):
    """From buffers by turns; what lies beyond the last column is not written."""
    dz = dz.astype(env.dtype)
    width, n_slots = env.tiles.stored, env.tiles.slots
    for i in range(env.tiles.columns // width):
        plgpu.wait_smem_to_gmem(n_slots - 1, wait_read_only=True)
        out_smem[i % n_slots] = dz[:, i * width : (i + 1) * width]
        plgpu.commit_smem()
        columns = pl.ds(start + i * width, width)
        plgpu.copy_smem_to_gmem(out_smem.at[i % n_slots], out_gmem.at[rows, columns])


def _of_tile(env, u, tile, labels, row, bias):
    row = {k: logits.along(x, u.shape) for k, x in row.items()}
    inverse_temperature = row.get("inverse_temperature")
    capped, z = logits.scale(env, u, bias, inverse_temperature)
    at = logits.column(env, z.shape, tile)
    if env.vocab_size < env.columns:
        z = jnp.where(at < env.vocab_size, z, logits.NOTHING)
    log_p = (z - row["max"]) - row["log_sum"]
    p = jnp.exp(log_p)
    slope, at_label = row["alpha"], None
    if "slope" in row:
        is_label = at == logits.along(labels, z.shape)
        slope = jnp.where(is_label, slope, row["slope"])
        at_label = jnp.where(is_label, row["at_label"], 0.0)
    if "beta" in row:
        slope = slope + row["beta"] * log_p
    if "gamma" in row:
        slope = slope + row["gamma"] * p
    dz = p * slope
    if at_label is not None:
        dz = dz + at_label
    if inverse_temperature is not None:
        dz = dz * inverse_temperature
    if env.softcap is not None:
        dz = dz * (1 - (capped / env.softcap) * (capped / env.softcap))
    return dz
