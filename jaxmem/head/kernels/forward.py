"""Forward kernel: `Stats` of every row, one pass over the vocabulary.

A unit (`ring.for_each_unit`) folds its tiles of the vocabulary into statistics in
registers, then writes five numbers per row; groups are merged afterwards, in a tree
whose shape depends on the vocabulary only. If the backward pass must not recompute the
logits, the epilogue stores their exponentials in 16 bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import int8_factors, logits, padding, ring
from jaxmem.head.kernels.logits import MASK_VALUE, Env
from jaxmem.head.kernels.ring import Ring
from jaxmem.head.kernels.tiles import N_COMPUTE
from jaxmem.head.maths import row_stats
from jaxmem.head.maths.eight_bits import Rounded
from jaxmem.head.maths.row_stats import Stats

N_STATS = len(Stats._fields)
_WIDTH = 8  # columns of logits per slice; the fewest that registers hold whole
_AT_ONCE = 8  # groups merged per pass: few passes, and short code


class Kept(NamedTuple):
    """Exponentials in 16 bits: e^(z - m), m the largest logit of the row's tile.

    With a reference, m is the larger of both. Inactive rows are undefined. bfloat16 has
    float32's range, so that no exponential underflows by the conversion; float16 loses
    those below 6e-8. A label's exponential is stored as 0.
    """

    exps: jax.Array  # [n_rows, columns of W], in 16 bits
    max: jax.Array  # m, float32 [n_tiles, n_rows]
    # Sums of a tile's exponentials except the label's, before they are rounded to 16
    # bits; float32 [n_tiles, n_rows], or None if not requested.
    sums: Any = None
    reference: Any = None  # in base 2, float32 [n_rows], or None without one


def statistics(env: Env, *operands, **options) -> Stats:
    """Stats [n_rows] of the first `n_active` rows; the others are undefined.

    The operands and options are those of `_name_operands`.
    """
    (partial,) = _launch_kernel(env, _name_operands(env, *operands, **options))
    return _merge_groups(partial)


def statistics_and_exps(
    env: Env, *operands, tile_sums: bool = False, reference=None
) -> tuple[Stats, Kept]:
    """`statistics`, bitwise equal, and the exponentials that they are sums of.

    A reference is a logit of each row in base 2, float32 [n_rows]; tile_sums are for
    exponentials without one.
    """
    named = _name_operands(env, *operands)
    if reference is not None:
        named["reference"] = reference
    partial, *kept = _launch_kernel(env, named, tile_sums)
    return _merge_groups(partial), Kept(*kept, reference=reference)


def others_and_exps(
    env: Env, hidden: Rounded, W: Rounded, labels, n_active
) -> tuple[Stats, Kept]:
    """Statistics of all columns but the labels', of `int8_factors.padded` operands.

    Their label_logit is -inf. `Kept`, with sums, has the exponentials that they are
    sums of, rounded to 16 bits.
    """
    operands = int8_factors.operands(env, hidden, W)
    operands |= _name_labels(env, labels, n_active)
    partial, *kept = _launch_kernel(env, operands, tile_sums=True)
    stats = _merge_groups(partial)
    nothing = jnp.full_like(stats.label_logit, -jnp.inf)
    return stats._replace(label_logit=nothing), Kept(*kept)


def _name_labels(env, labels, n_active):
    """Operands that describe labels and the active rows, by name."""
    marked = logits.tiles_with_labels_or_mask(env, labels)
    return {"labels": labels, "n_active": n_active, "marked": marked}


def _name_operands(
    env, hidden, W, labels, n_active, bias=None, inverse_temperature=None
) -> dict[str, Any]:
    """The kernel's operands by name.

    Labels are int32 [n_rows], n_active int32 [1]; bias float32 [V], -inf allowed.
    """
    operands: dict[str, Any] = dict(h=hidden, **logits.weights(env, W))
    operands |= _name_labels(env, labels, n_active)
    if bias is not None:
        operands["bias"] = logits.whole_tiles(env, bias)
    if inverse_temperature is not None:
        operands["inverse_temperature"] = inverse_temperature
    return operands


def _launch_kernel(env, operands, tile_sums=False):
    """`Stats` of every group, [n_groups, N_STATS, n_rows], and `Kept` if stored."""
    n_groups = -(-_n_tiles(env) // env.tiles.group)
    shape = (n_groups, N_STATS, env.n_rows)
    results = {"out": jax.ShapeDtypeStruct(shape, jnp.float32)}
    if env.tiles.stored:
        shape = env.n_rows, padding.whole(env.columns)
        results["exps"] = jax.ShapeDtypeStruct(shape, env.exps_dtype)
        per_tile = jax.ShapeDtypeStruct((_n_tiles(env), env.n_rows), jnp.float32)
        results |= dict.fromkeys(("max", "sums") if tile_sums else ("max",), per_tile)
    return plgpu.kernel(
        functools.partial(_kernel, env, (*operands, *results)),
        out_type=tuple(results.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **env.product.launch(),
    )(*operands.values())


def _n_tiles(env):
    """Tiles that cover the vocabulary; padding beyond the last is not read."""
    return -(-env.vocab_size // env.tiles.columns)


def _merge_groups(partial):
    """`Stats` [n_rows] of the groups' statistics [n_groups, N_STATS, n_rows].

    A pass merges a few groups; the tree of passes is the same for any number of rows.
    """
    stats = Stats(*(partial[:, i] for i in range(N_STATS)))
    while (n := len(stats.max)) > 1:
        size = -(-n // _AT_ONCE)
        missing_shape = size * _AT_ONCE - n, stats.max.shape[1]
        missing = row_stats.empty(missing_shape, stats.max.dtype)
        padded = [jnp.concatenate(pair) for pair in zip(stats, missing, strict=True)]
        parts = (
            Stats(*(x[i : i + size] for x in padded))
            for i in range(0, size * _AT_ONCE, size)
        )
        stats = functools.reduce(row_stats.merge, parts)
        if size > _AT_ONCE:
            # XLA would fuse this pass into each result of the next, and so repeat it.
            stats = lax.optimization_barrier(stats)
    return Stats(*(x[0] for x in stats))


def _kernel(env, names, *refs):
    gmem, t = dict(zip(names, refs, strict=True)), env.tiles
    rows = (N_COMPUTE, t.rows)
    scratch = {}
    if t.stored:
        scratch["max_smem"] = plgpu.SMEM(rows, jnp.float32)
        scratch["sums_smem"] = plgpu.SMEM(rows, jnp.float32)
        scratch["exps_smem"] = plgpu.SMEM(
            (N_COMPUTE, t.slots, t.rows, t.stored),
            env.exps_dtype,
            transforms=ring.swizzle(env.exps_dtype, t.stored),
        )
    if env.in_8_bits:
        scratch |= int8_factors.scratch(env)

    @functools.partial(
        pl.run_scoped,
        buffers=Ring.scratch(env.product),
        labels_smem=plgpu.SMEM(rows, jnp.int32),
        temperature_smem=plgpu.SMEM(rows, jnp.float32),
        reference_smem=plgpu.SMEM(rows, jnp.float32),
        bias_smem=plgpu.SMEM((N_COMPUTE, t.columns), jnp.float32),
        out_smem=plgpu.SMEM((N_COMPUTE, N_STATS, t.rows), jnp.float32),
        loaded=plgpu.Barrier(num_barriers=N_COMPUTE),
        collective_axes="wg",
        **scratch,
    )
    def _run_with_buffers(buffers, **smem):
        extent = env.extent(gmem["n_active"][0], _n_tiles(env))
        scope = _UnitScope(env, extent, gmem, smem, Ring(**buffers))
        unit = functools.partial(_process_unit, scope)
        W = gmem["w"], gmem.get("w_last")
        ring.run(env.product, extent, Ring(**buffers), gmem["h"], W, unit)


class _UnitScope(NamedTuple):
    """Context of a block of the kernel, for any of its units."""

    env: Env
    extent: Any
    gmem: dict[str, Any]  # operands and results, by name
    smem: dict[str, Any]  # the buffers of both warpgroups, by name
    ring: Ring


class _Keeping(NamedTuple):
    """The store of a tile's exponentials."""

    store: Callable[[int, Any], None]  # of the i-th part
    reference: Any  # float32 [rows], in base 2; None for the tile's largest logit


def _process_unit(scope, tile, n_tiles, step):
    """Writes the statistics of this warpgroup's rows over one group of tiles."""
    env, gmem = scope.env, scope.gmem
    t, wg = env.tiles, lax.axis_index("wg")
    smem = {k: ref.at[wg] for k, ref in scope.smem.items()}
    start = tile(0).first_row + wg * t.rows
    rows = pl.ds(start, t.rows)
    fetch = functools.partial(logits.fetch, smem["loaded"])
    labels = fetch(gmem["labels"].at[rows], smem["labels_smem"])
    inverse_temperature = _inverse_temperature(env, gmem, smem, rows)
    if "reference" in gmem:
        fetch(gmem["reference"].at[rows], smem["reference_smem"])
    h_scale = int8_factors.load_rows(rows, gmem, smem) if env.in_8_bits else None

    def process_tile(i, carry):
        step, group_stats = carry[0], Stats(*carry[1:])
        column_tile, bias = tile(i).column, None
        marked = gmem["marked"][lax.div(start, t.rows), column_tile]
        if "bias" in gmem:
            columns = pl.ds(column_tile * t.columns, t.columns)
            bias = fetch(gmem["bias"].at[columns], smem["bias_smem"])
        if env.in_8_bits:
            int8_factors.load_columns(env, column_tile, gmem, smem)

        def keep(i, exps):
            """Stores the i-th part of the tile's exponentials."""
            columns = pl.ds(column_tile * t.columns + i * t.stored, t.stored)
            ring.store_part(
                i, gmem["exps"].at[rows, columns],
                lambda: exps.astype(env.exps_dtype), smem["exps_smem"],
            )  # fmt: skip

        def fold(z):
            if h_scale is not None:
                z = int8_factors.scaled(env, z, h_scale, smem)
            z = logits.scale(env, z, bias, inverse_temperature)
            to_base_2 = logits.to_base_2(env, bias)
            reference = smem["reference_smem"][...] if "reference" in gmem else None
            stats, kept_max = _reduce_tile(
                env, z, to_base_2, column_tile, labels, marked,
                _Keeping(keep, reference) if t.stored else None,
            )  # fmt: skip
            if t.stored:
                numbers = {"max": kept_max, "sums": stats.sum_others}
                _keep_numbers(column_tile, rows, gmem, smem, numbers)
            return tuple(row_stats.merge(group_stats, stats))

        stats = ring.multiply(env.product, scope.extent, scope.ring, step, fold)
        return step + scope.extent.n_steps, *stats

    step, *stats = lax.fori_loop(0, n_tiles, process_tile, (step, *_empty_stats(t)))
    # The previous unit's store may still read the same buffer.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, x in enumerate(stats):
        smem["out_smem"][i] = x
    plgpu.commit_smem()
    # A group is named by its first tile.
    plgpu.copy_smem_to_gmem(smem["out_smem"], gmem["out"].at[tile(0).column, :, rows])
    return step


def _empty_stats(t):
    """`Stats` of the rows of a tile before the first column."""
    lowest = jnp.full((t.rows,), MASK_VALUE, jnp.float32)
    zero = jnp.zeros((t.rows,), jnp.float32)
    return Stats(lowest, zero, zero, zero, lowest)


def _inverse_temperature(env, gmem, smem, rows):
    """Inverse temperatures of the rows of a tile; None for 1."""
    if "inverse_temperature" not in gmem:
        return None
    inverse = gmem["inverse_temperature"].at[rows]
    inverse = logits.fetch(smem["loaded"], inverse, smem["temperature_smem"])
    return logits.along(inverse, (env.tiles.rows, env.tiles.columns))


def _keep_numbers(tile, rows, gmem, smem, numbers):
    """Stores what a tile's exponentials are relative to and, if requested, its sums.

    The buffer is free: the previous tile's copy is complete, because later stores
    waited for it. Stores complete in order, and there are no more buffers than a tile
    has parts.
    """
    numbers = {k: x for k, x in numbers.items() if k in gmem}
    for name, x in numbers.items():
        smem[f"{name}_smem"][...] = x
    plgpu.commit_smem()
    for name in numbers:
        plgpu.copy_smem_to_gmem(smem[f"{name}_smem"], gmem[name].at[tile, rows])


def _reduce_tile(env, z, to_base_2, tile, labels, marked, keeping):
    """`row_stats.of_tile`, in few registers and instructions, and `Kept.max`.

    Few tiles have a label or a mask. Both leave the tile before anything else is
    computed, so that all tiles share the code that follows, and its registers.
    """
    z = logits.parts(z, env.tiles.stored or _WIDTH)
    narrow = (z[0].shape[0], _WIDTH)
    first = tile * env.tiles.columns

    def without_labels_and_masks():
        label, others = jnp.full(narrow, MASK_VALUE, jnp.float32), []
        for i, part in enumerate(z):
            column = logits.column(part.shape, first + i * part.shape[1])
            part = jnp.where(column < env.vocab_size, part, MASK_VALUE)
            is_label = column == logits.along(labels, part.shape)
            without_label = jnp.where(is_label, MASK_VALUE, part)
            label = _reduce_columns(
                jnp.maximum, label, jnp.where(is_label, part, MASK_VALUE)
            )
            others.append(without_label)
        return label, *others

    def unchanged():
        return jnp.full(narrow, MASK_VALUE, jnp.float32), *z

    label, *z = lax.cond(marked > 0, without_labels_and_masks, unchanged)
    label = jnp.max(label, axis=1)
    if env.in_8_bits:  # exact elsewhere
        label = jnp.full_like(label, MASK_VALUE)
    return _sum_parts(z, label, to_base_2, keeping, env.in_8_bits)


def _sum_parts(parts, label, to_base_2, keeping=None, rounded=False):
    """`Stats` over columns in parts of one width, and a label that is in none of them.

    Returns the logit that stored exponentials are relative to, too. If rounded, the
    sums are of exponentials in bfloat16.
    """
    narrow = (parts[0].shape[0], _WIDTH)
    largest = jnp.full(narrow, MASK_VALUE, jnp.float32)
    for z in parts:
        largest = _reduce_columns(jnp.maximum, largest, z)
    row_max = jnp.maximum(jnp.max(largest, axis=1), label) * to_base_2
    kept_max, kept_scale = row_max, None
    if keeping is not None and keeping.reference is not None:
        kept_max = jnp.maximum(row_max, keeping.reference)
        kept_scale = jnp.exp2(row_max - kept_max)
    sums = [jnp.zeros(narrow, jnp.float32)] * 3
    for i, z in enumerate(parts):
        shifted = z * to_base_2 - logits.along(row_max, z.shape)
        exps = jnp.exp2(shifted)
        if rounded:
            exps = exps.astype(jnp.bfloat16).astype(jnp.float32)
        if keeping is not None:
            scaled = exps
            if kept_scale is not None:
                scaled = exps * logits.along(kept_scale, exps.shape)
            keeping.store(i, scaled)
        terms = exps, exps * shifted, exps * exps
        pairs = zip(sums, terms, strict=True)
        sums = [_reduce_columns(jnp.add, x, y) for x, y in pairs]
    sum_others, sum_shifted, sum_squares = (jnp.sum(x, axis=1) for x in sums)
    label = label * to_base_2
    shifted = label - row_max
    label_exp = jnp.exp2(shifted)
    sum_shifted = sum_shifted + label_exp * shifted
    sum_squares = sum_squares + label_exp * label_exp
    # Rounded before the subtraction: a fused multiply-subtract would not round the
    # product, and of MASK_VALUE the difference would be 2^76 instead of 0.
    row_max, label, kept_max = (
        jnp.maximum(x * logits.LN_2, MASK_VALUE) for x in (row_max, label, kept_max)
    )
    sum_shifted = sum_shifted * logits.LN_2
    return Stats(row_max, sum_others, sum_shifted, sum_squares, label), kept_max


def _reduce_columns(op, narrow, part):
    """Reduces the columns of a part by op, _WIDTH at a time."""
    return functools.reduce(op, logits.parts(part, _WIDTH), narrow)
