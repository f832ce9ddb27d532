"""Forward kernel: `Stats` of every row, one pass over the vocabulary.

A unit (`logits.for_each_unit`) folds its tiles of the vocabulary into statistics that
stay in registers, then writes five numbers a row; groups are merged afterwards, in a
tree whose shape depends on the vocabulary alone.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem import _stats
from jaxmem._stats import Stats
from jaxmem.kernels import logits
from jaxmem.kernels.logits import NOTHING, Env, Ring
from jaxmem.kernels.tiles import N_COMPUTE

N_STATS = len(Stats._fields)


def statistics(
    env: Env, hidden, W, labels, n_active, bias=None, inverse_temperature=None
) -> Stats:
    """Stats [n_rows] of the first `n_active` rows; the rest hold anything.

    Args:
        env: what to run.
        hidden: [n_rows, D].
        W: [V, D] or [D, V].
        labels: int32 [n_rows].
        n_active: int32 [1].
        bias: float32 [V], -inf allowed, or None.
        inverse_temperature: float32 [n_rows], or None.
    """
    operands: dict[str, Any] = dict(h=hidden, w=W, labels=labels, n_active=n_active)
    if bias is not None:
        operands["bias"] = logits.whole_tiles(env, bias)
    if inverse_temperature is not None:
        operands["inverse_temperature"] = inverse_temperature
    partial = plgpu.kernel(
        functools.partial(_kernel, env, tuple(operands)),
        out_type=jax.ShapeDtypeStruct((env.n_groups, N_STATS, env.n_rows), jnp.float32),
        grid=(env.n_blocks,),
        grid_names=("block",),
        num_threads=N_COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands.values())
    return _merge_groups(Stats(*(partial[:, i] for i in range(N_STATS))))


def _merge_groups(stats):
    """Halves onto halves: the same tree however many rows there are."""
    while (n := stats.max.shape[0]) > 1:
        half = n // 2
        merged = _stats.merge(
            Stats(*(x[:half] for x in stats)),
            Stats(*(x[half : 2 * half] for x in stats)),
        )
        odd = Stats(*(x[2 * half :] for x in stats))
        stats = Stats(
            *(jnp.concatenate(pair) for pair in zip(merged, odd, strict=True))
        )
    return Stats(*(x[0] for x in stats))


def _kernel(env, names, *refs):
    gmem = dict(zip((*names, "out"), refs, strict=True))
    rows = (N_COMPUTE, env.tiles.rows)

    @functools.partial(
        pl.run_scoped,
        ring=Ring.scratch(env),
        labels_smem=plgpu.SMEM(rows, jnp.int32),
        temperature_smem=plgpu.SMEM(rows, jnp.float32),
        bias_smem=plgpu.SMEM((N_COMPUTE, env.tiles.columns), jnp.float32),
        out_smem=plgpu.SMEM((N_COMPUTE, N_STATS, env.tiles.rows), jnp.float32),
        loaded=plgpu.Barrier(num_barriers=N_COMPUTE),
        collective_axes="wg",
    )
    def _scope(ring, **mine):
        ring, wg = Ring(**ring), lax.axis_index("wg")
        n_active = gmem["n_active"][0]

        @pl.when(wg == N_COMPUTE)
        def _memory():
            logits.load_tiles(env, n_active, gmem["h"], gmem["w"], ring)

        @pl.when(wg < N_COMPUTE)
        def _compute():
            plgpu.set_max_registers(logits.COMPUTE_REGISTERS, action="increase")
            smem = {k: ref.at[wg] for k, ref in mine.items()}
            unit = functools.partial(_unit, env, gmem, smem, ring)
            logits.for_each_unit(env, n_active, unit, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)


def _unit(env, gmem, smem, ring, row_tile, group, n_tiles, step):
    """Statistics of this warpgroup's rows over one group of tiles."""
    t = env.tiles
    start = row_tile * t.block_rows + lax.axis_index("wg") * t.rows
    rows = pl.ds(start, t.rows)
    fetch = functools.partial(logits.fetch, smem["loaded"])
    labels = fetch(gmem["labels"].at[rows], smem["labels_smem"])
    inverse_temperature = None
    if "inverse_temperature" in gmem:
        of_rows = gmem["inverse_temperature"].at[rows]
        inverse_temperature = logits.along(
            fetch(of_rows, smem["temperature_smem"]), (t.rows, t.columns)
        )

    def tile(i, carry):
        step, so_far = carry[0], Stats(*carry[1:])
        at, bias = env.tile(group, i), None
        if "bias" in gmem:
            columns = pl.ds(at * t.columns, t.columns)
            bias = fetch(gmem["bias"].at[columns], smem["bias_smem"])

        def fold(z):
            _, z = logits.scale(env, z, bias, inverse_temperature)
            return tuple(_stats.merge(so_far, _of_tile(env, z, at, labels)))

        return step + env.n_steps, *logits.multiply(env, ring, step, fold)

    nothing = jnp.full((t.rows,), NOTHING, jnp.float32)
    zero = jnp.zeros((t.rows,), jnp.float32)
    empty = Stats(nothing, zero, zero, zero, nothing)
    step, *made = lax.fori_loop(0, n_tiles, tile, (step, *empty))
    # The last unit's numbers may still be on their way out of the same buffer.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, x in enumerate(made):
        smem["out_smem"][i] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem["out_smem"], gmem["out"].at[group, :, rows])
    return step


def _of_tile(env, z, tile, labels):
    """`_stats.of_tile`, where a gather of the label's logit would not be possible."""
    at = logits.column(env, z.shape, tile)
    if env.vocab_size % env.tiles.columns:
        z = jnp.where(at < env.vocab_size, z, NOTHING)
    is_label = at == logits.along(labels, z.shape)
    label_logit = jnp.max(jnp.where(is_label, z, NOTHING), axis=1)
    row_max = jnp.max(z, axis=1)
    shifted = z - logits.along(row_max, z.shape)
    exps = jnp.exp(shifted)
    return Stats(
        max=row_max,
        sum_others=jnp.sum(jnp.where(is_label, 0.0, exps), axis=1),
        sum_shifted=jnp.sum(exps * shifted, axis=1),
        sum_squares=jnp.sum(exps * exps, axis=1),
        label_logit=label_logit,
    )
