"""A forward kernel of the head with operands of 8 bits, for `run_lowbit.py`.

As `jaxmem/kernels/forward.py`, with the same ring of buffers: the product of two 8-bit
factors is scaled by a number per row of hidden and one per row of W, folded into
`Stats`, and its exponentials are stored in bfloat16. int8 is summed in int32, e4m3 in
the tensor core's float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.core import row_stats
from jaxmem.core.row_stats import Stats
from jaxmem.kernels import forward, logits, ring
from jaxmem.kernels.logits import LN_2, LOG2_E, MASK_VALUE
from jaxmem.kernels.ring import Extent, Product, Ring, ceil_div
from jaxmem.kernels.tiles import N_COMPUTE, Tiles

EXPS = jnp.bfloat16
_BITS = 0x4B400000  # of 1.5 · 2^23 in float32


@dataclasses.dataclass(frozen=True)
class Tiles8(Tiles):
    """Tiles of 8-bit operands; depth counts bytes.

    Attributes:
        lag: stages by which the second warpgroup follows the first, so that one
            multiplies while the other runs its epilogue; 0 for no order.
        all_sums: whether Σ p ln p and Σ p² are summed, or Σ p alone.
        channels: channels that are multiplied in bfloat16 instead; 0 or 16.
        added: whether int32 becomes float32 by an addition, of 25 bits without the last
            four, and not by the instruction, which shares its unit with the
            exponentials.
    """

    lag: int = 0
    all_sums: bool = True
    channels: int = 0
    added: bool = False

    @property
    def smem_bytes(self) -> int:
        ring = self.stages * (self.block_rows + self.columns) * self.depth
        out = self.slots * self.block_rows * self.stored * self.stored_bytes
        wide = self.channels * 2 * N_COMPUTE * (self.rows + self.columns)
        return ring + out + wide + 6_144


@dataclasses.dataclass(frozen=True)
class Env:
    """Static facts of one launch."""

    tiles: Tiles8
    n_rows: int
    depth: int
    columns: int
    dtype: np.dtype
    n_blocks: int

    @property
    def product(self) -> Product:
        return Product(self.tiles, self.dtype, "mk", "nk", self.n_blocks)

    @property
    def n_tiles(self) -> int:
        return -(-self.columns // self.tiles.columns)

    @property
    def vocab_size(self) -> int:  # what `logits.tiles_with_labels_or_mask` asks for
        return self.columns

    @property
    def sums_dtype(self):
        return jnp.int32 if self.dtype == np.int8 else jnp.float32


def quantised(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """(x in 8 bits, the scale of each row): x ≈ scale · values."""
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=1), 1e-30) / largest
    x = x / scale[:, None]
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scale


def statistics_and_exps(env: Env, hidden, W, labels, wide=None):
    """(Stats, exponentials [n_rows, V], largest logit of each tile [n_tiles, n_rows]).

    Args:
        env: static facts.
        hidden: (8-bit [n_rows, D], scale [n_rows]).
        W: (8-bit [V, D], scale [V]).
        labels: int32 [n_rows].
        wide: `tiles.channels` channels of hidden [n_rows, 16] and W [V, 16] in
            bfloat16, which are 0 among the 8-bit ones.

    Returns:
        The three; without `tiles.stored` the last two are None.
    """
    t = env.tiles
    pad = env.n_tiles * t.columns - env.columns
    operands: dict[str, Any] = dict(
        h=hidden[0], w=W[0], labels=labels, h_scale=hidden[1],
        w_scale=jnp.pad(W[1], (0, pad)),
        marked=logits.tiles_with_labels_or_mask(env, labels),
    )  # fmt: skip
    if t.channels:
        operands |= {"h_wide": wide[0], "w_wide": wide[1]}
    n_groups = -(-env.n_tiles // t.group)
    shape = (n_groups, forward.N_STATS, env.n_rows)
    results = {"out": jax.ShapeDtypeStruct(shape, jnp.float32)}
    if t.stored:
        results["exps"] = jax.ShapeDtypeStruct((env.n_rows, env.columns), EXPS)
        of_tiles = jax.ShapeDtypeStruct((env.n_tiles, env.n_rows), jnp.float32)
        results |= {"max": of_tiles, "sums": of_tiles}
    made = plgpu.kernel(
        functools.partial(_kernel, env, (*operands, *results)),
        out_type=tuple(results.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **env.product.launch(),
    )(*operands.values())
    partial, exps, largest, _ = (*made, None, None, None)[:4]
    groups = Stats(*(partial[:, i] for i in range(forward.N_STATS)))
    return forward._merge_groups(groups), exps, largest


def _buffers(env):
    t = env.tiles
    transforms = (
        plgpu.TilingTransform((8, min(t.depth, 128))),
        plgpu.SwizzleTransform(min(t.depth, 128)),
    )
    smem = functools.partial(plgpu.SMEM, dtype=env.dtype, transforms=transforms)
    return dict(
        lhs_smem=smem((t.stages, t.block_rows, t.depth)),
        rhs_smem=smem((t.stages, t.columns, t.depth)),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        free=ring._free_barriers(t),
    )


def _scratch(t):
    """Buffers of the stores and of channels in bfloat16."""
    rows, scratch = (N_COMPUTE, t.rows), {}
    if t.stored:
        scratch["max_smem"] = plgpu.SMEM(rows, jnp.float32)
        scratch["sums_smem"] = plgpu.SMEM(rows, jnp.float32)
        scratch["exps_smem"] = plgpu.SMEM(
            (N_COMPUTE, t.slots, t.rows, t.stored), EXPS,
            transforms=ring.swizzle(EXPS, t.stored),
        )  # fmt: skip
    if t.channels:
        smem = functools.partial(
            plgpu.SMEM, dtype=EXPS, transforms=ring.swizzle(EXPS, t.channels)
        )
        scratch["h_wide_smem"] = smem((N_COMPUTE, t.rows, t.channels))
        scratch["w_wide_smem"] = smem((N_COMPUTE, t.columns, t.channels))
    return scratch


def _kernel(env, names, *refs):
    gmem, t = dict(zip(names, refs, strict=True)), env.tiles
    rows = (N_COMPUTE, t.rows)

    @functools.partial(
        pl.run_scoped,
        buffers=_buffers(env),
        labels_smem=plgpu.SMEM(rows, jnp.int32),
        h_scale_smem=plgpu.SMEM(rows, jnp.float32),
        w_scale_smem=plgpu.SMEM((N_COMPUTE, t.columns), jnp.float32),
        out_smem=plgpu.SMEM((N_COMPUTE, forward.N_STATS, t.rows), jnp.float32),
        loaded=plgpu.Barrier(num_barriers=N_COMPUTE),
        scales=plgpu.Barrier(
            num_arrivals=2 if t.channels else 1, num_barriers=N_COMPUTE
        ),
        go=plgpu.Barrier(num_arrivals=1),
        collective_axes="wg",
        **_scratch(t),
    )
    def _scope(buffers, go, **mine):
        n_steps = ceil_div(env.depth, t.depth)
        extent = Extent(env.n_rows, env.n_tiles, n_steps)
        scope = env, extent, gmem, mine, Ring(**buffers), go
        unit = functools.partial(_unit, scope)
        W = gmem["w"], None
        ring.run(env.product, extent, Ring(**buffers), gmem["h"], W, unit)


def _unit(scope, tile, n_tiles, step):
    env, extent, gmem, smem, buffers, go = scope
    t, wg = env.tiles, lax.axis_index("wg")
    smem, start = (
        {k: x.at[wg] for k, x in smem.items()},
        tile(0).first_row + wg * t.rows,
    )
    rows = pl.ds(start, t.rows)
    labels, h_scale = _load_rows(env, rows, gmem, smem)

    def of_tile(i, carry):
        step, so_far = carry[0], Stats(*carry[1:])
        at = tile(i).column
        marked = gmem["marked"][lax.div(start, t.rows), at]
        _load_columns(env, at, gmem, smem)
        stored = dataclasses.replace(env, dtype=np.dtype(EXPS))
        keep = functools.partial(forward._keep, stored, (at, rows), gmem, smem)

        def fold(sums):
            plgpu.barrier_wait(smem["scales"])
            z, factor = _scaled(env, sums, smem, h_scale)
            stats = _of_tile(
                env, z, factor, at, labels, marked, keep if t.stored else None
            )
            if t.stored:
                forward._keep_numbers(at, rows, gmem, smem, stats)
            else:
                plgpu.commit_smem()  # all have read the scales
            return tuple(row_stats.merge(so_far, stats))

        stats = _multiply(env, extent, buffers, go, step, fold)
        return step + extent.n_steps, *stats

    step, *stats = lax.fori_loop(0, n_tiles, of_tile, (step, *_nothing(t)))
    forward._write(stats, smem["out_smem"])
    plgpu.copy_smem_to_gmem(smem["out_smem"], gmem["out"].at[tile(0).column, :, rows])
    return step


def _nothing(t):
    nothing = jnp.full((t.rows,), MASK_VALUE, jnp.float32)
    zero = jnp.zeros((t.rows,), jnp.float32)
    return Stats(nothing, zero, zero, zero, nothing)


def _load_rows(env, rows, gmem, smem):
    """(labels, scales) of a unit's rows, whose bfloat16 channels are loaded, too."""
    fetch = functools.partial(logits.fetch, smem["loaded"])
    labels = fetch(gmem["labels"].at[rows], smem["labels_smem"])
    h_scale = fetch(gmem["h_scale"].at[rows], smem["h_scale_smem"])
    if env.tiles.channels:
        plgpu.copy_gmem_to_smem(
            gmem["h_wide"].at[rows, :], smem["h_wide_smem"], smem["loaded"]
        )
        plgpu.barrier_wait(smem["loaded"])
    return labels, h_scale


def _load_columns(env, at, gmem, smem):
    """Starts to load what a tile's epilogue reads, so that its latency is not there."""
    t = env.tiles
    columns = pl.ds(at * t.columns, t.columns)
    plgpu.copy_gmem_to_smem(
        gmem["w_scale"].at[columns], smem["w_scale_smem"], smem["scales"]
    )
    if t.channels:
        plgpu.copy_gmem_to_smem(
            gmem["w_wide"].at[columns, :], smem["w_wide_smem"], smem["scales"]
        )


def _multiply(env, extent, buffers, go, step, epilogue) -> Any:
    """`ring.multiply` with sums of the operands' kind, and the order of warpgroups."""
    t, wg = env.tiles, lax.axis_index("wg")
    mine = pl.ds(wg * t.rows, t.rows)
    if t.lag:

        @pl.when(wg == 1)
        def _follow():
            plgpu.barrier_wait(go)

    def stage(i, acc_ref):
        slot = lax.rem(step + i, t.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        rhs = buffers.rhs_smem.at[slot]
        plgpu.wgmma(acc_ref, buffers.lhs_smem.at[slot, mine], rhs.transpose((1, 0)))
        plgpu.wgmma_wait(1)
        if t.lag:

            @pl.when((i == t.lag - 1) & (wg == 0))
            def _lead():
                plgpu.barrier_arrive(go)

        @pl.when(i > 0)
        def _release_previous():
            plgpu.barrier_arrive(buffers.free.at[lax.rem(step + i - 1, t.stages)])

        return acc_ref

    @functools.partial(
        pl.run_scoped,
        acc_ref=plgpu.WGMMAAccumulatorRef((t.rows, t.columns), env.sums_dtype),
    )
    def accumulated(acc_ref):
        acc_ref = lax.fori_loop(0, extent.n_steps, stage, acc_ref)
        sums = acc_ref[...]
        last = lax.rem(step + extent.n_steps - 1, t.stages)
        plgpu.barrier_arrive(buffers.free.at[last])
        return epilogue(sums)

    return accumulated


def _as_float(env, sums):
    """The sums in float32; those of int32 rounded down to multiples of 16 if added.

    The bits of 1.5 · 2^23, plus an integer below 2^22, are those of the float sum.
    """
    if not (env.tiles.added and env.sums_dtype == jnp.int32):
        return sums.astype(jnp.float32)
    bits = (sums >> 4) + jnp.int32(_BITS)
    return lax.bitcast_convert_type(bits, jnp.float32) - jnp.float32(1.5 * 2**23)


def _scaled(env, sums, smem, h_scale):
    """(parts z, factor): factor · z are base-2 logits."""
    width = env.tiles.stored or forward._WIDTH
    z = []
    for i, part in enumerate(logits.parts(sums, width)):
        scale = smem["w_scale_smem"][pl.ds(i * width, width)]
        if env.tiles.added and env.sums_dtype == jnp.int32:
            scale = scale * 16
        scale = lax.broadcast_in_dim(scale, part.shape, (1,))
        z.append(_as_float(env, part) * scale)
    if not env.tiles.channels:
        return z, h_scale * LOG2_E
    z = jnp.concatenate([x * logits.along(h_scale, x.shape) for x in z], axis=1)

    def add(acc_ref):
        columns = smem["w_wide_smem"].transpose((1, 0))
        plgpu.wgmma(acc_ref, smem["h_wide_smem"], columns)
        plgpu.wgmma_wait(0)

    z = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(z))
    return logits.parts(z, width), jnp.full_like(h_scale, LOG2_E)


def _of_tile(env, z, factor, tile, labels, marked, keep):
    """`Stats` of a tile; factor · z are its base-2 logits."""
    width = env.tiles.stored or forward._WIDTH
    first = tile * env.tiles.columns

    def with_labels_or_masks():
        at = [logits.column(x.shape, first + i * width) for i, x in enumerate(z)]
        mark = functools.partial(forward._mark, env, at, labels)
        return _sums(env, z, factor, keep, mark)

    def plain():
        return _sums(env, z, factor, keep)

    return Stats(*lax.cond(marked > 0, with_labels_or_masks, plain))


def _sums(env, parts, factor, keep=None, mark=None):
    """`forward._sums` with a factor of each row."""
    narrow = (parts[0].shape[0], forward._WIDTH)
    label = largest = jnp.full(narrow, MASK_VALUE, jnp.float32)
    for i, z in enumerate(parts):
        if mark is not None:
            z, is_label = mark(i, z)
            here = jnp.where(is_label, z, MASK_VALUE)
            label = forward._fold(jnp.maximum, label, here)
        largest = forward._fold(jnp.maximum, largest, z)
    row_max = jnp.max(largest, axis=1) * factor
    so_far = [jnp.zeros(narrow, jnp.float32)] * 3
    for i, z in enumerate(parts):
        is_label = None
        if mark is not None:
            z, is_label = mark(i, z)
        shifted = z * logits.along(factor, z.shape) - logits.along(row_max, z.shape)
        exps = jnp.exp2(shifted)
        others = exps if is_label is None else jnp.where(is_label, 0.0, exps)
        if keep is not None:
            keep(i, exps, others)
        terms = others, exps * shifted, exps * exps
        if not env.tiles.all_sums:
            terms = terms[:1]
        so_far[: len(terms)] = [
            forward._fold(jnp.add, x, y)
            for x, y in zip(so_far, terms, strict=False)
        ]  # fmt: skip
    others, weighted, squares = (jnp.sum(x, axis=1) for x in so_far)
    label = jnp.max(label, axis=1) * factor
    row_max, label = (jnp.maximum(x * LN_2, MASK_VALUE) for x in (row_max, label))
    return row_max, others, weighted * LN_2, squares, label
