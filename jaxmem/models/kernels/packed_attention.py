"""Causal attention within the documents of packed rows, by cuDNN's ragged kernel.

cuDNN takes the length and the offset of each document, and computes no score of two
documents. `jax.nn.dot_product_attention` has no argument for them: with a mask it
hands cuDNN a bias [B, 1, T, T], with which all scores of a row are computed. So this
module builds the custom call that XLA turns into a graph of cuDNN.

A call's workspace and time grow with the number of its documents times its longest
length. So documents are grouped by length, and each group is a call of its own: fewer
than 4 documents of a row are longer than T / 4, fewer than 16 longer than T / 16.

Sources: `CudnnfMHABackendConfig` in XLA's xla/service/gpu/backend_configs.proto, and
"ragged offsets" in cuDNN's frontend, docs/operations/Attention.md.
"""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmem import devices

_PARTS = 1, 4, 16  # a group for each n has documents of T / n tokens at most
_SLOTS = 4  # documents for each such part


class DocumentGroup(NamedTuple):
    """At most M documents of a batch [B, T], of at most 4 · B · T / M tokens each."""

    starts: jax.Array  # [M] index of a first token among B · T, then B · T
    lengths: jax.Array  # [M] tokens, then 0
    index: jax.Array  # [B, T] the document of each token that is in one
    member: jax.Array  # [B, T] True if a token is in one

    @property
    def longest(self) -> int:
        """Tokens that its longest document may have."""
        return _SLOTS * self.index.size // self.starts.size


class PackedRows(NamedTuple):
    """The documents of a batch, without padding, in groups of falling lengths."""

    groups: tuple[DocumentGroup, ...]
    fit: jax.Array  # [] False if short ones are too many, or one is in several parts


def supports(query: jax.Array) -> bool:
    """True if offsets in queries [B, T, heads, head_dim] fit into XLA's 32 bits."""
    return query.size < 2**31


def documents(segment_ids: jax.Array) -> PackedRows:
    """The documents of rows [B, T], which are runs of equal ids; 0 is padding.

    They fit if ids rise along a row, so that no two runs are one document, and if
    those of the last group, of T / 16 tokens at most, are no more than 64 a row.
    """
    length = segment_ids.shape[1]
    before = jnp.pad(jax.lax.cummax(segment_ids, axis=1)[:, :-1], ((0, 0), (1, 0)))
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    rises = (segment_ids == previous) | (segment_ids > before)
    fit = jnp.all(rises | (segment_ids == 0))
    begins = (segment_ids != previous).at[:, 0].set(True)
    lengths = _run_lengths(begins)
    parts = [n for n in _PARTS if length % n == 0]
    groups = []
    for n in parts:
        member = (segment_ids != 0) & (lengths * n <= length)
        if n != parts[-1]:
            member &= lengths * n * 4 > length
        group, count = _group(begins, lengths, member, n)
        groups.append(group)
        fit &= count <= group.starts.size
    return PackedRows(tuple(groups), fit)


def _run_lengths(begins: jax.Array) -> jax.Array:
    """[B, T] tokens of each token's run, from True where a run begins."""
    begins, shape = begins.reshape(-1), begins.shape
    token = jnp.arange(begins.size)
    first = jax.lax.cummax(jnp.where(begins, token, 0))
    ends = jnp.append(begins[1:], True)
    last = jax.lax.cummin(jnp.where(ends, token, begins.size), reverse=True)
    return (last - first + 1).reshape(shape)


def _group(begins, lengths, member, n: int) -> tuple[DocumentGroup, jax.Array]:
    """The group of documents of T / n tokens at most, and the number of its members."""
    shape, size = member.shape, member.size
    firsts = (begins & member).reshape(-1)
    limit = shape[0] * n * _SLOTS
    starts = jnp.nonzero(firsts, size=limit, fill_value=size)[0]
    own = lengths.reshape(-1)[jnp.minimum(starts, size - 1)]
    index = jnp.maximum(jnp.cumsum(firsts) - 1, 0).reshape(shape)
    group = DocumentGroup(
        starts.astype(jnp.int32),
        jnp.where(starts < size, own, 0).astype(jnp.int32),
        index.astype(jnp.int32),
        member,
    )
    return group, jnp.sum(firsts)


def attend_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, batch: PackedRows, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The result [B, T, heads, head_dim] and the logsumexps [heads, B · T] in float32.

    Queries are [B, T, heads, head_dim]; keys and values have kv_heads. Both results are
    0 for padding, and undefined unless the documents fit.
    """
    heads = query.shape[2]
    out = jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    lse = jnp.zeros((heads, query.shape[0] * query.shape[1]), jnp.float32)
    for group in batch.groups:
        call = functools.partial(_group_forward, group=group, scale=scale)
        part, part_lse = _unless_empty(group, call, (out, lse), query, key, value)
        out = jnp.where(group.member[..., None, None], part, out)
        lse = jnp.where(group.member.reshape(-1), part_lse, lse)
    return out, lse


def attend_backward(
    query: jax.Array, key: jax.Array, value: jax.Array, batch: PackedRows, scale: float,
    forward: tuple[jax.Array, jax.Array], dout: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Gradients of queries, keys and values; `forward` is that of `attend_forward`."""
    gradients = tuple(jnp.zeros_like(x) for x in (query, key, value))
    for group in batch.groups:
        call = functools.partial(_group_backward, group=group, scale=scale)
        parts = _unless_empty(group, call, gradients, query, key, value, forward, dout)
        member = group.member[..., None, None]
        gradients = tuple(
            jnp.where(member, part, gradient)
            for part, gradient in zip(parts, gradients, strict=True)
        )
    return gradients


def _unless_empty(group, call, results, *operands):
    """The call's results; zeros of the shapes of `results` if the group is empty."""

    def zeros(*_):
        return jax.tree.map(jnp.zeros_like, results)

    return jax.lax.cond(group.lengths[0] > 0, call, zeros, *operands)


def _group_forward(query, key, value, *, group, scale):
    operands = [_in_parts(x, group) for x in (query, key, value)]
    parts, length, heads, _ = operands[0].shape
    shapes = (
        jax.ShapeDtypeStruct((parts, heads, length, value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct((group.starts.size, heads, length), jnp.float32),
        _WORKSPACE,
    )
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmax",
        shapes,
        output_layouts=(_STORED, None, None),
        custom_call_api_version=2,
        legacy_backend_config=_config(operands[0], scale, _FORWARD),
    )
    out, lse, _ = call(*operands, *_ragged_operands(group, query, key))
    out = jnp.transpose(out, (0, 2, 1, 3)).reshape(*query.shape[:3], value.shape[3])
    return out, by_token(lse, group)


def _group_backward(query, key, value, forward, dout, *, group, scale):
    operands = [_in_parts(x, group) for x in (query, key, value)]
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in operands
    ]
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmaxBackward",
        [*shapes, _workspace(group, query)],
        output_layouts=(_STORED, _STORED, _STORED, None),
        custom_call_api_version=2,
        legacy_backend_config=_config(operands[0], scale, _BACKWARD),
    )
    out, lse = _in_parts(forward[0], group), by_document(forward[1], group)
    ragged = _ragged_operands(group, query, key)
    *gradients, _ = call(*operands, lse, _in_parts(dout, group), out, *ragged)
    return tuple(
        jnp.transpose(x, (0, 2, 1, 3)).reshape(operand.shape)
        for x, operand in zip(gradients, (query, key, value), strict=True)
    )


def _workspace(group: DocumentGroup, query: jax.Array) -> jax.ShapeDtypeStruct:
    """The workspace of a backward call, which XLA sizes unless nothing is compiled."""
    if not devices.is_stand_in():
        return _WORKSPACE
    _, _, heads, width = query.shape
    documents = group.starts.size
    # As planning.accounts has it, for as many documents as a group may have.
    sums = (documents, heads, group.longest, width + 1)
    return jax.ShapeDtypeStruct(sums, jnp.float32)


def _in_parts(x: jax.Array, group: DocumentGroup) -> jax.Array:
    """[B, T, ...] as [parts, T / n, ...], whose length cuDNN takes for the longest."""
    return x.reshape(-1, group.longest, *x.shape[2:])


def by_token(lse: jax.Array, group: DocumentGroup) -> jax.Array:
    """Logsumexps [heads, B · T] from cuDNN's [M, heads, longest].

    cuDNN's are four times as many, most of them unused. So residuals have these.
    """
    index = group.index.reshape(-1)
    offset = jnp.arange(index.size) - group.starts[index]
    heads, length = lse.shape[1:]
    offset = jnp.clip(offset, 0, length - 1)  # of tokens that are in no document
    flat = jnp.transpose(lse, (1, 0, 2)).reshape(heads, -1)
    return flat[:, index * length + offset]


def by_document(lse: jax.Array, group: DocumentGroup) -> jax.Array:
    """Logsumexps [M, heads, longest] from `by_token`.

    Behind a document's last token they are arbitrary, as cuDNN does not read them.
    """
    token = group.starts[:, None] + jnp.arange(group.longest)
    token = jnp.minimum(token, lse.shape[1] - 1)
    return jnp.transpose(lse[:, token], (1, 0, 2))


def _ragged_operands(group, query, key):
    """Lengths of documents, and their offsets in elements, as cuDNN reads them."""
    parts = group.starts.size // _SLOTS
    lengths = group.lengths.reshape(parts, _SLOTS)
    tokens = group.index.size
    offsets = jnp.pad(group.starts, (0, parts), constant_values=tokens)
    offsets = offsets.reshape(parts, _SLOTS + 1)
    # A token's heads are that many elements of [B, T, heads, head_dim].
    sizes = (x.shape[2] * x.shape[3] for x in (query, key))
    return lengths, lengths, *(offsets * size for size in sizes)


# Results are [B, heads, T, head_dim], stored as [B, T, heads, head_dim].
_STORED = (0, 2, 1, 3)
_WORKSPACE = jax.ShapeDtypeStruct((0,), jnp.uint8)  # cuDNN's, which XLA sizes
# Contracted and batch axes of the products, for operands [B, T, heads, head_dim] and
# probabilities [B, heads, T, T].
_FORWARD = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),  # queries and keys
    "bmm2": ((3, 1), ((0, 1), (0, 2))),  # probabilities and values
}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # to keys
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),  # to queries
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),  # to values
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),  # to probabilities
}


def _config(query, scale, products) -> str:
    """Fields of XLA's `GpuBackendConfig` as JSON."""
    rows, length, heads, _ = query.shape
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {  # of the probabilities
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[query.dtype.name],
            "dimensions": [str(n) for n in (rows, heads, length, length)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": _SLOTS,
        "is_paged_attention": False,
    }
    for name, ((left, right), (left_batch, right_batch)) in products.items():
        attention[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(axis) for axis in left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in right_batch],
        }
    return json.dumps(
        {"operation_queue_id": "0", "cudnn_fmha_backend_config": attention}
    )
