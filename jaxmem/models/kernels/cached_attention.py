"""Attention of one new token per row to a KV cache.

A program reads the keys and values of one row and key-value head once, for all queries
that share it, in blocks of slots, and only those in which the row sees a slot. It reads
the stack of all layers in place, so that no layer is sliced out, and its scores never
leave registers. Where rows and heads are too few to occupy the device, several programs
share the slots of a head, and their results are combined by their logsumexps.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxmem.head.kernels import logits, ring

BLOCK = 64  # slots that a program reads at once
_QUERIES = 64  # rows of a tensor core's product; the group's are its first
_PROGRAMS = 264  # two for each multiprocessor of an H200
_PART = 128  # columns of a head whose sums are in registers twice


class Place(NamedTuple):
    """The layer of the stack, and the slots of it, that queries attend to."""

    layer: jax.Array  # int32 scalar, of the stack
    seen: jax.Array  # [B, T] bool, slots to attend to


def supports(query: jax.Array, keys: jax.Array) -> bool:
    """True if `attend` can run on these types and shapes."""
    group, width = query.shape[-2:]
    return (
        query.dtype == keys.dtype
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and group <= _QUERIES
        and width in (64, 128, 256)
        and keys.shape[-2] % 8 == 0  # rows of TMA's tiles
    )


def attend(
    query: jax.Array,
    token: tuple[jax.Array, jax.Array],
    cached: tuple[jax.Array, jax.Array],
    location: Place,
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of one new token per row to the cached tokens and to itself.

        out = Σ_t p_t v_t,   p = softmax(scale q·k),   t cached or new

    With a softcap, scores s become softcap·tanh(s / softcap) before the softmax. The
    query is [B, kv_heads, group, head_dim], rotated; token has the keys and values of
    the new tokens, [B, kv_heads, head_dim]; cached those of all layers, [layers, B,
    kv_heads, T, head_dim]. Memory: 4·splits·B·heads·(head_dim + 1), if several programs
    share a head.
    """
    rows, heads, group, width = query.shape
    layers, slots = cached[0].shape[0], cached[0].shape[3]
    n, blocks = rows * heads, pl.cdiv(slots, BLOCK)
    fill = -group % 8 if group > 8 else 0  # to whole tiles, if there are several
    splits = max(1, min(_PROGRAMS // n, blocks // 2))
    kind = query.dtype if splits == 1 else jnp.float32
    kernel = plgpu.kernel(
        _AttentionKernel(heads, group, splits, scale, softcap),
        out_type=[
            jax.ShapeDtypeStruct((splits, n, group, width), kind),
            jax.ShapeDtypeStruct((splits, n, _QUERIES), jnp.float32),
        ],
        grid=(n, splits),
        grid_names=("head", "split"),
        scratch_types=_scratch_types(width, query.dtype, kind),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    seen = jnp.pad(location.seen, ((0, 0), (0, -slots % BLOCK)))
    out, lse = kernel(
        jnp.reshape(location.layer, (1,)).astype(jnp.int32),
        *_blocks_of_rows(seen),
        jnp.pad(query.reshape(n, group, width), ((0, 0), (0, fill), (0, 0))),
        *(x.reshape(n, width) for x in token),
        *(x.reshape(layers * n, slots, width) for x in cached),
        seen.astype(jnp.int8),
    )  # fmt: skip
    if splits == 1:
        return out.reshape(query.shape)
    shares = jax.nn.softmax(lse[:, :, :group], axis=0)[..., None]
    return jnp.sum(shares * out, axis=0).astype(query.dtype).reshape(query.shape)


def _blocks_of_rows(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers of the blocks with a slot that a row sees, [B, n]; how many, [B].

    What follows the last one is not read. Layers with the same `seen` share them in a
    compiled program whose layers are traced one after the other, as the sampler's are
    on a GPU.
    """
    some = jnp.any(seen.reshape(len(seen), -1, BLOCK), axis=2)
    so_far = jnp.cumsum(some, axis=1, dtype=jnp.int32)
    nth = jnp.arange(some.shape[1])[:, None]
    numbers = jnp.sum(so_far[:, None] <= nth, axis=2, dtype=jnp.int32)
    return numbers, so_far[:, -1]


def _scratch_types(width, dtype, kind) -> dict[str, Any]:
    """Buffers and barriers that a program allocates, by name."""
    swizzled = ring.swizzle(dtype)
    block = plgpu.SMEM((BLOCK, width), dtype, transforms=swizzled)
    return dict(
        # The result takes the place of the queries.
        rows_smem=plgpu.RefUnion(
            plgpu.SMEM((_QUERIES, width), dtype, transforms=swizzled),
            plgpu.SMEM((_QUERIES, min(width, _PART)), kind),
        ),
        keys_smem=block,
        values_smem=block,
        lse_smem=plgpu.SMEM((_QUERIES,), jnp.float32),
        loaded=plgpu.Barrier(),
        keys_full=plgpu.Barrier(),
        values_full=plgpu.Barrier(),
    )


class _Refs(NamedTuple):
    """References of a program to operands after the queries, and to its results."""

    key: Any  # [B kv_heads, head_dim], of the new token
    value: Any
    keys: Any  # [layers B kv_heads, T, head_dim], cached
    values: Any
    seen: Any  # int8 [B, T]
    out: Any
    lse: Any


class _Softmax(NamedTuple):
    """The softmax of the scores so far, and the values that it weights."""

    largest: jax.Array  # [queries], in base 2
    total: jax.Array  # [queries]
    mixed: tuple[jax.Array, ...]  # parts of [queries, head_dim]


@dataclasses.dataclass(frozen=True)
class _AttentionKernel:
    """One program: a row, a key-value head and a share of the slots."""

    heads: int
    group: int
    splits: int
    scale: float
    softcap: float | None

    __name__ = "cached_attention"

    def __call__(self, layer_ref, blocks_ref, count_ref, query_ref, *refs, **smem: Any):
        refs = _Refs(*refs)
        head, split = lax.axis_index("head"), lax.axis_index("split")
        query_smem, out_smem = smem["rows_smem"]
        row = lax.div(head, self.heads)
        share = ring.ceil_div(count_ref[row], self.splits)
        first = split * share
        end = jnp.minimum(first + share, count_ref[row])
        cached = layer_ref[0] * refs.key.shape[0] + head
        cache = {"keys": refs.keys, "values": refs.values}

        def slots_of(i):
            number = blocks_ref[row, jnp.minimum(i, blocks_ref.shape[1] - 1)]
            return pl.ds(number * BLOCK, BLOCK)

        def fetch(name, i, slots):
            @pl.when(i < end)
            def _():
                source, full = cache[name].at[cached, slots], smem[f"{name}_full"]
                plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"], full)

        def block(i, softmax: _Softmax):
            following = slots_of(i + 1)  # loaded before it is needed
            seen = _load_columns(refs.seen.at[row, slots_of(i)])
            plgpu.barrier_wait(smem["keys_full"])
            scores = _multiply(query_smem, smem["keys_smem"].transpose((1, 0)), BLOCK)
            fetch("keys", i + 1, following)
            seen = _repeat_rows(seen, scores.shape) != 0
            scores = jnp.where(seen, self._cap_scores(scores), -math.inf)
            plgpu.barrier_wait(smem["values_full"])
            softmax = _add_scores(softmax, scores, smem["values_smem"])
            fetch("values", i + 1, following)
            return softmax

        fetch("keys", first, slots_of(first))
        fetch("values", first, slots_of(first))
        self._fetch_queries(query_ref.at[head], query_smem, smem["loaded"])
        key_ref, value_ref = refs.key.at[head], refs.value.at[head]
        start = self._attend_token(query_smem, key_ref, value_ref, split == 0)
        softmax = lax.fori_loop(first, end, block, start)
        results = refs.out.at[split, head], refs.lse.at[split, head]
        self._write_results(softmax, out_smem, smem["lse_smem"], *results)

    def _fetch_queries(self, query_ref, query_smem, loaded):
        """Copy the group's queries, and zeros up to a multiple of eight, to a tile.

        The tile's other rows are undefined, and so are their results.
        """
        rows = pl.ds(0, -(-self.group // 8) * 8)
        beyond = pl.ds(lax.axis_index("split") * 0, rows.size)  # not checked
        plgpu.copy_gmem_to_smem(query_ref.at[beyond], query_smem.at[rows], loaded)
        plgpu.barrier_wait(loaded)

    def _attend_token(self, query_smem, key_ref, value_ref, counts) -> _Softmax:
        """Softmax of the new token alone; empty where it does not count."""
        scores, mixed = jnp.zeros(_QUERIES, jnp.float32), []
        for columns in _head_parts(query_smem.shape[1]):
            query = plgpu.load(query_smem.at[:, columns], layout=plgpu.Layout.WGMMA)
            query = query.astype(jnp.float32)
            key, value = (
                _repeat_rows(
                    _load_columns(ref.at[columns]).astype(jnp.float32), query.shape
                )
                for ref in (key_ref, value_ref)
            )
            scores += jnp.sum(query * key, axis=1)
            mixed.append(value)
        counts = lax.broadcast(counts, scores.shape)
        total = jnp.where(counts, 1.0, 0.0)
        # Finite, so that a program without a slot subtracts no infinities.
        largest = jnp.where(counts, self._cap_scores(scores), logits.MASK_VALUE)
        mixed = tuple(x * logits.along(total, x.shape) for x in mixed)
        return _Softmax(largest, total, mixed)

    def _cap_scores(self, scores):
        """Scaled scores, with the softcap if there is one, in base 2."""
        if self.softcap is None:
            return scores * (self.scale * logits.LOG2_E)
        # tanh(x) as 1 - 2/(1 + e^2x): the chip's own tanh is good to 11 bits only.
        cap = self.softcap * logits.LOG2_E
        return cap - 2 * cap / (1 + jnp.exp(scores * (2 * self.scale / self.softcap)))

    def _write_results(self, softmax: _Softmax, out_smem, lse_smem, out_ref, lse_ref):
        total = jnp.maximum(softmax.total, jnp.finfo(jnp.float32).tiny)
        lse_smem[...] = softmax.largest * logits.LN_2 + jnp.log(softmax.total)
        for part, columns in zip(
            softmax.mixed, _head_parts(out_ref.shape[1]), strict=True
        ):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = part / logits.along(total, part.shape)
            out_smem[...] = part.astype(out_smem.dtype)
            plgpu.commit_smem()
            rows = out_smem.at[pl.ds(0, self.group)]
            plgpu.copy_smem_to_gmem(rows, out_ref.at[:, columns])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref)
        plgpu.wait_smem_to_gmem(0)


def _add_scores(softmax: _Softmax, scores, values) -> _Softmax:
    """The softmax with more scores [queries, n] and values [n, head_dim]."""
    largest = jnp.maximum(softmax.largest, jnp.max(scores, axis=1))
    kept = jnp.exp2(softmax.largest - largest)
    weights = jnp.exp2(scores - logits.along(largest, scores.shape))
    total = softmax.total * kept + jnp.sum(weights, axis=1)
    weights, mixed = weights.astype(values.dtype), []
    for part, columns in zip(softmax.mixed, _head_parts(values.shape[1]), strict=True):
        part = part * logits.along(kept, part.shape)
        mixed.append(_accumulate(part, weights, values.at[:, columns]))
    return _Softmax(largest, total, tuple(mixed))


def _multiply(a, b, columns):
    def run(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(
        run, plgpu.WGMMAAccumulatorRef((_QUERIES, columns), jnp.float32)
    )


def _accumulate(acc, a, b):
    """The sum of acc and a · b, in the registers of acc."""

    def run(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        plgpu.wgmma_wait(0)

    return pl.run_state(run)(plgpu.WGMMAAccumulatorRef.init(acc))


def _load_columns(ref):
    """One number for each column of a product."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def _repeat_rows(row, shape):
    """An array whose rows all are `row`, one number per column."""
    return lax.broadcast_in_dim(row, shape, (1,))


def _head_parts(width):
    """Slices of a head's columns, so narrow that a product fits in registers."""
    return [pl.ds(start, min(width, _PART)) for start in range(0, width, _PART)]
