"""Loops of "xla" for rules that read single columns: a chunk's logits are in memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem.head.backends import xla
from jaxmem.head.backends.protocol import ByLogits, ColumnGroup, ScaledHead
from jaxmem.head.maths import id_columns, scaling
from jaxmem.head.maths.backend_operands import (
    Factors,
    cotangent,
    for_active_chunks,
    put,
    put_all,
    sum_over_shards,
    take,
)


def forward(
    heads: Sequence[ScaledHead],
    of_chunk: Callable[..., Any],
    initial: Any,
    groups: Sequence[ColumnGroup] | None = None,
) -> Any:
    """See `ColumnLoops.forward`."""
    results = initial
    for rows in _rows_of(heads, groups):

        def chunk(row_ids, results, rows=rows):
            logits, _ = rows.read(row_ids)
            return put_all(results, row_ids, of_chunk(row_ids, *logits))

        results = for_active_chunks(rows.chunk, rows.active, chunk, results)
    return results


def backward(
    heads: Sequence[ScaledHead],
    of_chunk: Callable[..., ByLogits],
    groups: Sequence[ColumnGroup] | None = None,
) -> Factors:
    """See `ColumnLoops.backward`."""
    parts = _rows_of(heads, groups)
    sums = parts[0].zero_sums()
    for rows in parts:

        def chunk(row_ids, sums, rows=rows):
            logits, read = rows.read(row_ids)
            d = of_chunk(row_ids, *logits)
            return rows.accumulate(row_ids, read, d, sums)

        sums = for_active_chunks(rows.chunk, rows.active, chunk, sums)
    return cotangent(heads[0].spec, sums, heads[0].source)


def one_pass(
    heads: Sequence[ScaledHead],
    of_chunk: Callable[..., tuple[Any, ByLogits]],
    initial: Any,
) -> tuple[Any, Factors]:
    """See `ColumnLoops.one_pass`."""
    rows = _WholeRows(heads)

    def chunk(row_ids, carry):
        results, sums = carry
        logits, read = rows.read(row_ids)
        new, d = of_chunk(row_ids, *logits)
        sums = rows.accumulate(row_ids, read, d, sums)
        return put_all(results, row_ids, new), sums

    carry = initial, rows.zero_sums()
    results, sums = for_active_chunks(rows.chunk, rows.active, chunk, carry)
    return results, sum_over_shards(heads[0].spec, sums)


def _rows_of(heads, groups) -> "Sequence[_WholeRows | _FewColumns]":
    if groups is None:
        return [_WholeRows(heads)]
    (head,) = heads
    return [_FewColumns(head, group) for group in groups]


class _WholeRows:
    """Rows of heads' logits in all columns."""

    def __init__(self, heads: Sequence[ScaledHead]):
        self.heads = [x._replace(source=x.source.cast(x.spec)) for x in heads]
        self.spec, self.head, rows = self.heads[0]
        self.rows, self.chunk, self.active = rows, self.spec.chunk, rows.active

    def read(self, row_ids) -> tuple[tuple[jax.Array, ...], None]:
        """(logits of each head, nothing for `accumulate`)."""
        logits = tuple(xla.logits(*head, row_ids) for head in self.heads)
        # Materialised: scaled once, though they are read more than once.
        return lax.optimization_barrier(logits), None

    def zero_sums(self):
        return xla.zero_sums(self.spec, self.head)

    def accumulate(self, row_ids, read: Any, d: ByLogits, sums):
        spec, dz = self.spec, d.everywhere
        if d.ids is not None:
            # Rounded for the products before that, so that the other columns are not
            # stored in float32; unless a bias has a gradient, which is a sum of it.
            dtype = spec.compute_dtype if self.head.bias is None else spec.stats_dtype
            index = id_columns.indices_of(spec, d.ids)
            at_ids = jnp.asarray(d.at_ids).astype(dtype)
            dz = dz.astype(dtype).at[index].set(at_ids, mode="drop")
        return xla.accumulate(spec, self.head, row_ids, dz, sums)


class _FewColumns:
    """Rows of a head's logits in few columns, whose rows of W are gathered.

    W is not cast, because few of its columns are used.
    """

    def __init__(self, head: ScaledHead, group: ColumnGroup):
        self.spec, source, self.rows = head
        bias = source.bias
        bias = None if bias is None else bias.astype(self.spec.stats_dtype)
        self.head = source._replace(bias=bias)
        self.chunk, self.active, self.columns = group

    def read(self, row_ids) -> tuple[tuple[jax.Array], tuple[jax.Array, jax.Array]]:
        """(logits [C, K], (columns [C, K], their rows of W [C, K, D]))."""
        columns, spec = self.columns(row_ids), self.spec
        vd, past_end = spec.layout == "vd", {"mode": "fill", "fill_value": 0}
        W = self.head.W.at[columns if vd else (slice(None), columns)].get(**past_end)
        W = (W if vd else jnp.moveaxis(W, 0, -1)).astype(spec.compute_dtype)
        h, dtype = take(self.head.hidden, row_ids), spec.stats_dtype
        z = jnp.einsum("cd,ckd->ck", h, W, preferred_element_type=dtype)
        if self.head.bias is not None:
            z = z + self.head.bias.at[columns].get(**past_end)
        z = scaling.scale(spec, self.rows, row_ids, z)
        return (jnp.where(columns < spec.columns, z, -jnp.inf),), (columns, W)

    def zero_sums(self):
        return xla.zero_sums(self.spec, self.head)

    def accumulate(self, row_ids, read: Any, d: ByLogits, sums):
        (columns, W), dz, dtype = read, d.everywhere, self.spec.stats_dtype
        dh = jnp.einsum(
            "ck,ckd->cd", dz.astype(W.dtype), W, preferred_element_type=dtype
        )
        dhidden = put(sums.hidden, row_ids, dh.astype(sums.hidden.dtype))
        if sums.W is None:
            return Factors(dhidden, None, None)
        h = take(self.head.hidden, row_ids).astype(dtype)
        dW = dz[:, :, None] * h[:, None, :]
        if self.spec.layout == "vd":
            dW = sums.W.at[columns].add(dW, mode="drop")
        else:
            dW = sums.W.at[:, columns].add(jnp.moveaxis(dW, -1, 0), mode="drop")
        dbias = sums.bias
        if dbias is not None:
            dbias = dbias.at[columns].add(dz, mode="drop")
        return Factors(dhidden, dW, dbias)
