"""Backward kernel: recomputes logits, and stores their derivative in the inputs' dtype.

Three coefficients and a label per row (`row_stats.coefficients`) serve every output.
The arithmetic is that of `row_stats.dlogits`, with per-row factors folded beforehand
(`fold`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import logits, ring
from jaxmem.head.kernels.logits import Env
from jaxmem.head.kernels.ring import Ring
from jaxmem.head.kernels.tiles import N_COMPUTE
from jaxmem.head.maths.row_stats import Coefficients, Outputs

# Largest logit of an absent row: every exponential underflows.
NO_ROW = -logits.MASK_VALUE


class DlogitsOperands(NamedTuple):
    """Operands of the kernel, for any part of the vocabulary."""

    arrays: dict[str, Any]
    row_names: tuple[str, ...]  # names of the per-row numbers


class LogitsInputs(NamedTuple):
    """Inputs of the logits of some rows."""

    hidden: jax.Array  # [n_rows, D]
    W: jax.Array  # [V, D] or [D, V]
    labels: jax.Array  # int32 [n_rows]
    bias: jax.Array | None = None  # float32 [V], -inf allowed
    inverse_temperature: jax.Array | None = None  # float32 [n_rows]


def operands(
    env: Env, inputs: LogitsInputs, rows: Outputs, c: Coefficients
) -> DlogitsOperands:
    """The operands, computed once for all parts, not in each iteration of a loop.

    The statistics' `max` is NO_ROW for an absent row.
    """
    row_numbers = fold(rows, c, inputs.inverse_temperature, env.softcap)
    arrays: dict[str, Any] = dict(
        h=inputs.hidden, w=inputs.W, labels=inputs.labels,
        rows=jnp.stack(tuple(row_numbers.values())),
        marked=logits.tiles_with_labels_or_mask(env, inputs.labels),
    )  # fmt: skip
    if inputs.bias is not None:
        arrays["bias"] = logits.whole_tiles(env, inputs.bias)
    return DlogitsOperands(arrays, tuple(row_numbers))


def derivative(env: Env, operands: DlogitsOperands, part, width: int) -> jax.Array:
    """dloss/d(h Wᵀ) of some tiles, [n_rows, width] in hidden's type; 0 where masked.

    `part` is int32 [3]: active rows, first tile of the vocabulary, number of tiles.
    Rows after the last cluster and columns after the last tile are undefined.
    """
    arrays = operands.arrays | {"part": part}
    arrays |= logits.weights(env, arrays["w"])
    names = (*arrays, "out"), operands.row_names
    return _launch_kernel(env, names, width, tuple(arrays.values()))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # lowered once, see `products`
def _launch_kernel(env, names, width, arrays):
    return plgpu.kernel(
        functools.partial(_kernel, env, *names),
        out_type=jax.ShapeDtypeStruct((env.n_rows, width), env.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **env.product.launch(),
    )(*arrays)


def fold(rows: Outputs, c: Coefficients, inverse_temperature, softcap) -> dict:
    """The float32 per-row operands of the kernels by name.

    With e_j = 2^(x_j) = e^(z_j - max), which is S times p_j,

        dz_j = e_j (slope + beta x_j + gamma e_j)

    and at_label if j is the label, computed without the difference 1 - p, which would
    cancel. A coefficient that is None counts as zero.
    """
    label, alpha, beta, gamma = (
        0.0 if x is None else x for x in (c.label, c.alpha, c.beta, c.gamma)
    )
    inverse = 1 if inverse_temperature is None else inverse_temperature
    scale = inverse * jnp.exp(-rows.log_sum)  # of 1/S
    folded = dict(max=rows.max * logits.LOG2_E)
    folded["slope"] = (alpha - label - beta * rows.log_sum) * scale
    if c.beta is not None:
        folded["beta"] = beta * logits.LN_2 * scale
    if c.gamma is not None:
        folded["gamma"] = gamma * scale * jnp.exp(-rows.log_sum)
    logprob = jnp.maximum(rows.logprob, logits.MASK_VALUE)  # times 0 it is 0
    p = jnp.exp(logprob)
    at_label = p * (alpha + beta * logprob + gamma * p) - label * jnp.expm1(logprob)
    at_label = at_label * inverse
    if softcap is not None:
        capped = (logprob + rows.log_sum + rows.max) / (softcap * inverse)
        # At most 1; an absent row's is infinite.
        at_label = at_label * (1 - jnp.minimum(capped * capped, 1))
    folded["at_label"] = at_label
    if inverse_temperature is not None:
        folded["inverse_temperature"] = inverse_temperature
    return folded


def _kernel(env, names, row_names, *refs):
    t, gmem = env.tiles, dict(zip(names, refs, strict=True))

    @functools.partial(
        pl.run_scoped,
        buffers=Ring.scratch(env.product),
        labels_smem=plgpu.SMEM((N_COMPUTE, t.rows), jnp.int32),
        rows_smem=plgpu.SMEM((N_COMPUTE, len(row_names), t.rows), jnp.float32),
        bias_smem=plgpu.SMEM((N_COMPUTE, t.columns), jnp.float32),
        out_smem=plgpu.SMEM(
            (N_COMPUTE, t.slots, t.rows, t.stored),
            env.dtype,
            transforms=ring.swizzle(env.dtype, t.stored),
        ),
        loaded=plgpu.Barrier(num_barriers=N_COMPUTE),
        collective_axes="wg",
    )
    def _run_with_buffers(buffers, **smem):
        n_active, first_tile, n_tiles = (gmem["part"][i] for i in range(3))
        extent = env.extent(n_active, n_tiles, first_tile)
        scope = _Scope(env, extent, row_names, gmem, smem, Ring(**buffers))
        unit = functools.partial(_process_unit, scope)
        W = gmem["w"], gmem.get("w_last")
        ring.run(env.product, extent, Ring(**buffers), gmem["h"], W, unit)


class _Scope(NamedTuple):
    """Context of a block of the kernel, for any of its tiles."""

    env: Env
    extent: Any
    row_names: tuple[str, ...]
    gmem: dict[str, Any]  # operands and results, by name
    smem: dict[str, Any]  # the buffers of both warpgroups, by name
    ring: Ring


class _StoreTarget(NamedTuple):
    """The part of the result that a tile's derivatives are stored to."""

    gmem: Any
    smem: Any  # buffers of the parts of a tile
    rows: Any
    first_column: Any


def _process_unit(scope, tile, n_tiles, step):
    """Stores the derivatives of this warpgroup's rows over one group of tiles."""
    env, gmem = scope.env, scope.gmem
    t, wg = env.tiles, lax.axis_index("wg")
    smem = {k: ref.at[wg] for k, ref in scope.smem.items()}
    start = tile(0).first_row + wg * t.rows
    rows = pl.ds(start, t.rows)
    fetch = functools.partial(logits.fetch, smem["loaded"])
    fetch(gmem["labels"].at[rows], smem["labels_smem"])
    fetch(gmem["rows"].at[:, rows], smem["rows_smem"])

    def process_tile(i, step):
        column_tile, bias = tile(i).column, None
        is_marked = gmem["marked"][lax.div(start, t.rows), column_tile] > 0
        if "bias" in gmem:
            columns = pl.ds(column_tile * t.columns, t.columns)
            bias = fetch(gmem["bias"].at[columns], smem["bias_smem"])
        first_in_result = (column_tile - scope.extent.first_tile) * t.columns
        target = _StoreTarget(gmem["out"], smem["out_smem"], rows, first_in_result)
        first = column_tile * t.columns

        def mend(i, part):
            mark = functools.partial(_mark_part, env, part, first + i * t.stored)
            at_label = smem["rows_smem"].at[scope.row_names.index("at_label")]
            pl.when(is_marked)(lambda: mark(smem["labels_smem"], at_label))

        def read_row():
            """Reads them again for each part: the accumulator needs the registers."""
            return {k: smem["rows_smem"][j] for j, k in enumerate(scope.row_names)}

        def store(z):
            inverse = read_row().get("inverse_temperature")
            along = None if inverse is None else logits.along(inverse, z.shape)
            z = logits.parts(logits.scale(env, z, bias, along), t.stored)
            _store_tile(env, target, z, logits.to_base_2(env, bias), read_row, mend)

        ring.multiply(env.product, scope.extent, scope.ring, step, store)
        return step + scope.extent.n_steps

    return lax.fori_loop(0, n_tiles, process_tile, step)


def _store_tile(env, target, z, to_base_2, read_row, mend):
    """Stores one part after another, so that few derivatives are in registers."""
    width = env.tiles.stored
    for i, part in enumerate(z):
        columns = pl.ds(target.first_column + i * width, width)
        derivative = functools.partial(
            _differentiate_part, env, part, to_base_2, read_row
        )
        ring.store_part(
            i, target.gmem.at[target.rows, columns], derivative, target.smem,
            mend=functools.partial(mend, i),
        )  # fmt: skip


def _differentiate_part(env, z, to_base_2, read_row):
    """Derivatives of a part of a tile, without labels and masks."""
    row = {k: logits.along(x, z.shape) for k, x in read_row().items()}
    x = z * to_base_2 - row["max"]
    return of_exponentials(env, jnp.exp2(x), x, z, row).astype(env.dtype)


def _mark_part(env, smem, first, labels, at_label):
    """Overwrites derivatives in SMEM, whose registers the other parts need."""
    dz = plgpu.load(smem, layout=plgpu.Layout.WGMMA)
    smem[...] = marked(env, dz, first, labels[...], at_label[...])


def of_exponentials(env: Env, e, x, z, row: dict) -> jax.Array:
    """dloss/d(h Wᵀ) [C, columns] of one part of a tile, from e = 2^x = e^(z - max).

    Labels and masks come later (`marked`). z is read only if there is a softcap. `row`
    has the results of `fold`.
    """
    slope = row["slope"]
    if "beta" in row:
        slope = slope + row["beta"] * x
    if "gamma" in row:
        slope = slope + row["gamma"] * e
    dz = e * slope
    if env.softcap is not None:
        capped = z / (env.softcap * row.get("inverse_temperature", 1.0))
        dz = dz * (1 - capped * capped)
    return dz


def marked(env: Env, dz, first, labels, at_label) -> jax.Array:
    """Derivatives [C, columns] from column `first` on, with labels and masks."""
    column = logits.column(dz.shape, first)
    at_label = logits.along(at_label.astype(dz.dtype), dz.shape)
    dz = jnp.where(column == logits.along(labels, dz.shape), at_label, dz)
    return jnp.where(column < env.vocab_size, dz, jnp.zeros((), dz.dtype))
