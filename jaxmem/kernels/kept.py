"""Derivative of logits from their exponentials, in place: no second look at them.

Elementwise, so XLA makes the kernel. The arithmetic is `_stats.dlogits`; ln p is the
logarithm of what was kept to 8 bits, which is as exact as a derivative in 16 bits.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem._stats import Coefficients, Outputs
from jaxmem.kernels.forward import Kept
from jaxmem.kernels.logits import Env


def derivative(
    env: Env, kept: Kept, n_active, step: int, labels, rows: Outputs, c: Coefficients,
    inverse_temperature=None,
) -> jax.Array:  # fmt: skip
    """dloss/d(h Wᵀ), [n_rows, columns] in hidden's type, in the place of kept.exps.

    0 where masked, and in what whole steps of rows hold besides active ones; rows from
    there on hold anything.

    Args:
        env: that of the kernel which kept them.
        kept: exponentials; given up.
        n_active: int32, rows that count.
        step: rows at a time; divides n_rows.
        labels: int32 [n_rows].
        rows: statistics of the rows, [n_rows].
        c: coefficients of the rows, [n_rows].
        inverse_temperature: float32 [n_rows], or None.
    """
    shift = (kept.max - rows.max) - rows.log_sum  # ln p = ln(exps) + shift
    logsumexp = rows.max + rows.log_sum
    of_rows = labels, rows.logprob, logsumexp, c, inverse_temperature

    def some(i, exps):
        first = i * step

        def cut(x):
            return lax.dynamic_slice_in_dim(x, first, step)

        live = first + jnp.arange(step, dtype=jnp.int32) < n_active
        of_tiles = lax.dynamic_slice_in_dim(shift, first, step, axis=1).T
        made = _derivative(env, cut(exps), of_tiles, live, *jax.tree.map(cut, of_rows))
        return lax.dynamic_update_slice_in_dim(exps, made, first, axis=0)

    # Without an active row, products still read one stage of rows.
    n_steps = jnp.maximum((n_active + step - 1) // step, 1)
    return lax.fori_loop(0, n_steps, some, kept.exps)


def _derivative(
    env, exps, shift, live, labels, logprob, logsumexp, c, inverse_temperature
):
    """Of some rows: exps [C, V], shift [C, n_tiles], the rest [C]."""
    # Once a tile, not once a number: kept from being made inside the large loop.
    scale, shift = lax.optimization_barrier((jnp.exp(shift), shift))
    exps = exps.astype(jnp.float32)
    p = exps * _of_tiles(env, scale)
    # The smallest that a logarithm can be taken of; p is 0 there.
    log_p = jnp.log(jnp.maximum(exps, jnp.finfo(jnp.float32).tiny))
    log_p = log_p + _of_tiles(env, shift)
    column = lax.broadcasted_iota(jnp.int32, exps.shape, 1)
    slope = jnp.zeros((), jnp.float32) if c.alpha is None else c.alpha[:, None]
    is_label = column == labels[:, None]
    if c.label is not None:
        slope = jnp.where(is_label, slope, slope - c.label[:, None])
    if c.beta is not None:
        slope = slope + c.beta[:, None] * log_p
    if c.gamma is not None:
        slope = slope + c.gamma[:, None] * p
    dz = p * slope
    if c.label is not None:
        at_label = c.label * -jnp.expm1(logprob)
        dz = dz + jnp.where(is_label, at_label[:, None], 0.0)
    unscaled = 1.0
    if inverse_temperature is not None:
        unscaled = inverse_temperature[:, None]
    if env.softcap is not None:
        if c.label is not None:  # where p may be too small to have a logarithm
            log_p = jnp.where(is_label, logprob[:, None], log_p)
        capped = (log_p + logsumexp[:, None]) / (env.softcap * unscaled)
        dz = dz * (1 - capped**2)
    dz = dz * unscaled
    return jnp.where(live[:, None] & (column < env.vocab_size), dz, 0).astype(env.dtype)


def _of_tiles(env, x):
    """A number a tile [C, n_tiles], over the tile's columns; 0 beyond the last."""
    wide = jnp.repeat(x, env.tiles.columns, axis=1)
    missing = env.columns - wide.shape[1]
    return (
        jnp.pad(wide, ((0, 0), (0, missing))) if missing > 0 else wide[:, : env.columns]
    )
