"""Gradients for one block of the vocabulary after another, for `Recompute(blocks)`.

The outer loop is over blocks of W's columns, the inner one over chunks of tokens. Sums
of W's gradient exist for one block at a time, and are then rounded into the gradient.
Hidden's gradient is added up over the blocks in hidden's dtype: with many tokens, sums
in float32 would take more memory than the blocks save.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends import xla
from jaxmem.head.maths import checks, row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import (
    Factors,
    TokenRows,
    cotangent,
    for_active_chunks,
    put,
    take,
)
from jaxmem.head.maths.spec import Spec

_ALIGNMENT = 128  # columns of a block


def backward(
    spec: Spec, source: Factors, rows: TokenRows, saved: row_stats.Outputs, cotangents
) -> Factors:
    """See `xla.backward`; rounds hidden's gradient once per block, if not sharded."""
    head = source.cast(spec)
    width = block_columns(spec)
    n_whole, last_width = divmod(spec.columns, width)
    axis = 0 if spec.layout == "vd" else 1
    size = _rows_at_once(spec, rows.labels.shape[0])

    def add_rows(part, start, sums):
        """`sums`, with the contribution of all active rows and the part's columns."""

        def chunk(row_ids, sums):
            dz = xla.derivative(spec, part, rows, row_ids, saved, cotangents, start)
            dh, dW, dbias = xla.products(spec, part, row_ids, dz)
            dh += take(sums.hidden, row_ids).astype(dh.dtype)
            dhidden = put(sums.hidden, row_ids, dh.astype(sums.hidden.dtype))
            return Factors(
                dhidden, sums.W + dW, None if sums.bias is None else sums.bias + dbias
            )

        return for_active_chunks(size, rows.active, chunk, sums)

    def block(start, width, total):
        W = lax.dynamic_slice_in_dim(head.W, start, width, axis)
        bias = head.bias
        if bias is not None:
            bias = lax.dynamic_slice_in_dim(bias, start, width, 0)
        part = Factors(head.hidden, W, bias)
        nothing: Any = xla.zero_sums(spec, part)
        sums = nothing._replace(hidden=total.hidden)
        sums = add_rows(part, start, sums)
        dW = sums.W.astype(source.W.dtype)
        dW = lax.dynamic_update_slice_in_dim(total.W, dW, start, axis)
        dbias = None
        if total.bias is not None:
            dbias = lax.dynamic_update_slice_in_dim(total.bias, sums.bias, start, 0)
        return Factors(sums.hidden, dW, dbias)

    total: Any = xla.zero_sums(spec, head)
    W = vocab_shards.vary(jnp.zeros_like(source.W), spec.part_varying)
    total = total._replace(W=W)
    total = lax.fori_loop(0, n_whole, lambda i, t: block(i * width, width, t), total)
    if last_width:
        total = block(n_whole * width, last_width, total)
    return cotangent(spec, total, source)


def block_columns(spec: Spec) -> int:
    """Columns of a block; the last one may have fewer."""
    whole = -(-spec.columns // (spec.gradient_blocks * _ALIGNMENT)) * _ALIGNMENT
    return min(whole, spec.columns)


def _rows_at_once(spec: Spec, n_rows: int) -> int:
    """Rows of a chunk, with as many logits of a block as a chunk has of all columns.

    They are no more than the columns of a block: their sums would take more than W's.
    """
    size = min(spec.chunk * spec.gradient_blocks, max(spec.chunk, block_columns(spec)))
    return checks.check_chunk(size, n_rows, spec.columns)
