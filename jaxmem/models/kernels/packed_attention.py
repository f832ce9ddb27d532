"""Causal attention within the documents of packed rows, by cuDNN's ragged kernel.

cuDNN takes the length and the offset of each document, and computes no score of two
documents. `jax.nn.dot_product_attention` has no argument for them: with a mask it
hands cuDNN a bias [B, 1, T, T], with which all scores of a row are computed. So the
call that XLA turns into cuDNN's graph is made here, with XLA's fields of it.

Sources: `CudnnfMHABackendConfig` in XLA's xla/service/gpu/backend_configs.proto, and
"ragged offsets" in cuDNN's frontend, docs/operations/Attention.md.
"""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp

# On average of a batch: more cost idle programs of the kernel, and memory for
# logsumexps, of which cuDNN has T for each document and head.
DOCUMENTS_OF_A_ROW = 16


class DocumentRuns(NamedTuple):
    """Documents of a batch [B, T] in their order, for at most M of them.

    Padding is a document, too, so that each token is in one.
    """

    starts: jax.Array  # [M + 1] index of a first token in the batch, then B · T
    index: jax.Array  # [B, T] the document of each token
    fit: jax.Array  # [] False if there are more than M, or one is in several parts

    @property
    def lengths(self) -> jax.Array:
        """Tokens of each document, [M]; 0 after the last one."""
        return self.starts[1:] - self.starts[:-1]


def documents(segment_ids: jax.Array, limit: int = DOCUMENTS_OF_A_ROW) -> DocumentRuns:
    """The documents of rows [B, T], at most `limit` a row on average.

    A document is a run of equal ids. They fit if ids other than 0, which is padding,
    rise along a row: then two runs with one id are never one document.
    """
    rows, length = segment_ids.shape
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins = segment_ids != previous
    before = jnp.pad(
        jax.lax.cummax(segment_ids, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=0
    )
    rises = ~begins | (segment_ids == 0) | (segment_ids > before)
    size, flat = rows * limit, begins.reshape(-1)
    starts = jnp.nonzero(flat, size=size + 1, fill_value=rows * length)[0]
    index = (jnp.cumsum(flat) - 1).reshape(rows, length)
    fit = jnp.all(rises) & (jnp.sum(flat) <= size)
    return DocumentRuns(starts.astype(jnp.int32), index.astype(jnp.int32), fit)


def attend_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    batch: DocumentRuns,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The result [B, T, heads, head_dim] and the logsumexps [heads, B · T] in float32.

    Queries are [B, T, heads, head_dim]; keys and values have kv_heads. Results are
    undefined unless the documents fit.
    """
    rows, length, heads, _ = query.shape
    shapes = (
        jax.ShapeDtypeStruct((rows, heads, length, value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct((batch.starts.size - 1, heads, length), jnp.float32),
        _WORKSPACE,
    )
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmax",
        shapes,
        output_layouts=(_STORED, None, None),
        custom_call_api_version=2,
        legacy_backend_config=_config(query, key, batch, scale, _FORWARD),
    )
    out, lse, _ = call(query, key, value, *_ragged_operands(batch, query, key))
    return jnp.transpose(out, (0, 2, 1, 3)), by_token(lse, batch)


def attend_backward(
    query: jax.Array, key: jax.Array, value: jax.Array, batch: DocumentRuns, scale: float,
    forward: tuple[jax.Array, jax.Array], dout: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Gradients of queries, keys and values; `forward` is that of `attend_forward`."""
    out, lse = forward
    shapes = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in (query, key, value)
    ]
    call = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmaxBackward",
        [*shapes, _WORKSPACE],
        output_layouts=(_STORED, _STORED, _STORED, None),
        custom_call_api_version=2,
        legacy_backend_config=_config(query, key, batch, scale, _BACKWARD),
    )
    lse = by_document(lse, batch, query.shape[1])
    ragged = _ragged_operands(batch, query, key)
    *gradients, _ = call(query, key, value, lse, dout, out, *ragged)
    return tuple(jnp.transpose(x, (0, 2, 1, 3)) for x in gradients)


def by_token(lse: jax.Array, batch: DocumentRuns) -> jax.Array:
    """Logsumexps [heads, B · T] from cuDNN's [M, heads, T], of T in each document.

    These are M times as many: so the forward pass keeps the former.
    """
    index = batch.index.reshape(-1)
    offset = jnp.arange(index.size) - batch.starts[index]
    heads, length = lse.shape[1:]
    flat = jnp.transpose(lse, (1, 0, 2)).reshape(heads, -1)
    return flat[:, index * length + offset]


def by_document(lse: jax.Array, batch: DocumentRuns, length: int) -> jax.Array:
    """Logsumexps [M, heads, T] from `by_token`; any after a document's last token."""
    token = batch.starts[:-1, None] + jnp.arange(length)
    token = jnp.minimum(token, lse.shape[1] - 1)
    return jnp.transpose(lse[:, token], (1, 0, 2))


def _ragged_operands(batch, query, key):
    """Lengths of documents, and their offsets in elements, as cuDNN reads them."""
    rows, count = query.shape[0], batch.starts.size - 1
    lengths = batch.lengths.reshape(rows, -1)
    offsets = jnp.pad(batch.starts, (0, rows - 1), mode="edge")
    offsets = offsets.reshape(rows, count // rows + 1)
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


def _config(query, key, batch, scale, products) -> str:
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
            "dimensions": [str(n) for n in (rows, heads, length, key.shape[1])],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": (batch.starts.size - 1) // rows,
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
