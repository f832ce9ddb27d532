"""The derivative rules of `support_logprobs`, for dense and for ragged supports."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.head.backends import xla
from jaxmem.head.maths import row_stats, vocab_shards
from jaxmem.head.maths.backend_operands import (
    Factors,
    cotangent,
    for_active_chunks,
    no_statistics,
    put,
    put_all,
    take,
)
from jaxmem.head.verbs.rule import LoopRule
from jaxmem.head.verbs.token_ids import existing_columns

_NARROWEST = 4  # ids; the least width of a ragged support
# A chunk of ragged supports is one part in `_PARTS` of all entries or smaller, because
# the last chunk of each width is partly empty; below `_FEW` entries it costs nothing.
_PARTS, _FEW = 16, 4096
_NO_ID = jnp.iinfo(jnp.int32).max  # stands for a support that is not valid


class WidthGroup(NamedTuple):
    """Tokens whose supports are computed at one width."""

    width: int  # ids of a support, with empty slots
    chunk: int  # tokens at a time
    active: jax.Array  # bool [N], True for the active tokens of the group


@dataclasses.dataclass(frozen=True)
class SupportRule(LoopRule):
    """The rule of `support_logprobs`; the constants are the supports [N, K]."""

    def forward_loop(self, source, rows, supports):
        (rows,), source = rows, self._widen_bias(source)

        def chunk(width, row_ids, results):
            labels, ids, columns = self._read_support(rows, supports, row_ids, width)
            z, _ = self._logits(source, rows, row_ids, columns)
            position, is_valid = _label_positions(labels, ids)
            is_valid &= jnp.all(ids < self.spec.vocab_size, axis=-1)
            stats, _ = row_stats.of_tile(z, position)
            return put_all(results, row_ids, (stats, is_valid))

        valid = vocab_shards.vary(jnp.zeros_like(rows.active), self.spec.varying)
        results = no_statistics(self.spec, rows), valid
        stats, valid = self._for_chunks(rows, supports, chunk, results)
        if self.spec.shards:
            stats = row_stats.merge_over(stats, self.spec.shards.axes)
        outputs = row_stats.finish(stats, valid)
        logprob = jnp.where(rows.active, outputs.logprob, 0)
        saved = logprob, {"max": outputs.max, "log_sum": outputs.log_sum}
        return vocab_shards.vary(saved, self.spec.varying)

    def backward_loop(self, source, rows, supports, result, saved, g):
        (rows,), original, source = rows, source, self._widen_bias(source)
        saved = saved | {"logprob": result}

        def chunk(width, row_ids, sums):
            labels, ids, columns = self._read_support(rows, supports, row_ids, width)
            z, rows_of_W = self._logits(source, rows, row_ids, columns)
            outputs = row_stats.Outputs(
                *(take(saved.get(k), row_ids) for k in row_stats.Outputs._fields)
            )
            g_row = take(g, row_ids)
            cotangents = row_stats.Cotangents(g_row)
            position, _ = _label_positions(labels, ids)
            dz = row_stats.dlogits(z, position, outputs, cotangents)
            # A token whose support is invalid is NaN only where its result was used.
            dz = jnp.where(g_row[:, None] == 0, 0, dz)
            dz = xla.unscale(self.spec, rows, row_ids, z, dz)
            return self._accumulate(sums, source, row_ids, columns, rows_of_W, dz)

        sums = xla.zero_sums(self.spec, source)
        sums = self._for_chunks(rows, supports, chunk, sums)
        return cotangent(self.spec, sums, original)

    def _for_chunks(self, rows, supports, body, carry):
        """Run `body(width, row_ids, carry) -> carry` over chunks of active tokens."""
        for group in self._width_groups(rows, supports):

            def chunk(row_ids, carry, width=group.width):
                return body(width, row_ids, carry)

            carry = for_active_chunks(group.chunk, group.active, chunk, carry)
        return carry

    def _width_groups(self, rows, supports) -> Iterator[WidthGroup]:
        """Yields the groups of all active tokens."""
        yield WidthGroup(supports.shape[1], self.spec.chunk, rows.active)

    def _read_ids(self, supports, row_ids, width):
        """The supports of the rows, [C, width]; negative where absent."""
        return take(supports, row_ids, fill_value=-1)

    def _widen_bias(self, source):
        """The bias in the dtype of `cast`; W is not cast, as few columns are used."""
        bias, dtype = source.bias, self.spec.stats_dtype
        return source._replace(bias=None if bias is None else bias.astype(dtype))

    def _read_support(self, rows, supports, row_ids, width):
        """Labels [C], ids and columns [C, K] of the rows; repeated ids are absent."""
        labels = take(rows.labels, row_ids, fill_value=-1)
        ids = jnp.sort(self._read_ids(supports, row_ids, width), axis=-1)
        ids = jnp.where(ids == jnp.roll(ids, 1, axis=-1).at[:, 0].set(-1), -1, ids)
        return labels, ids, existing_columns(self.spec, ids)

    def _logits(self, source, rows, row_ids, columns):
        """Scaled logits [C, K], -inf where absent, and the columns of W, [C, K, D]."""
        vd, past_end = self.spec.layout == "vd", {"mode": "fill", "fill_value": 0}
        W = source.W.at[columns if vd else (slice(None), columns)].get(**past_end)
        W = (W if vd else jnp.moveaxis(W, 0, -1)).astype(self.spec.compute_dtype)
        h = take(source.hidden, row_ids)
        dtype = self.spec.stats_dtype
        z = jnp.einsum("cd,ckd->ck", h, W, preferred_element_type=dtype)
        if source.bias is not None:
            z = z + source.bias.at[columns].get(**past_end)
        z = xla.scale(self.spec, rows, row_ids, z)
        return jnp.where(columns < self.spec.columns, z, -jnp.inf), W

    def _accumulate(self, sums, source, row_ids, columns, rows_of_W, dz):
        dtype = self.spec.stats_dtype
        dh = jnp.einsum("ck,ckd->cd", dz.astype(rows_of_W.dtype), rows_of_W,
                        preferred_element_type=dtype)  # fmt: skip
        dhidden = put(sums.hidden, row_ids, dh.astype(sums.hidden.dtype))
        if sums.W is None:
            return Factors(dhidden, None, None)
        h = take(source.hidden, row_ids).astype(dtype)
        dW = dz[:, :, None] * h[:, None, :]
        if self.spec.layout == "vd":
            dW = sums.W.at[columns].add(dW, mode="drop")
        else:
            dW = sums.W.at[:, columns].add(jnp.moveaxis(dW, -1, 0), mode="drop")
        dbias = sums.bias
        if dbias is not None:
            dbias = dbias.at[columns].add(dz, mode="drop")
        return Factors(dhidden, dW, dbias)


@dataclasses.dataclass(frozen=True)
class RaggedSupportRule(SupportRule):
    """The rule of `Ragged` supports, grouped by widths that double.

    A width's tokens run as dense supports of that width. What is computed is therefore
    less than twice the ids of a support, if it has more than `_NARROWEST`.
    """

    max_ids: int = 1  # the most ids of a support

    def _width_groups(self, rows, supports) -> Iterator[WidthGroup]:
        """See `SupportRule._width_groups`; an invalid support has the least width."""
        n_rows, capacity = rows.labels.shape[0], supports.ids.shape[0]
        entries = chunk_entries(self.spec.chunk, self.max_ids, capacity)
        narrower = -1
        for width in _doubling_widths(self.max_ids):
            active = rows.active & (supports.counts <= width)
            tokens = min(n_rows, entries // width)
            if narrower > 0:  # each of them has more ids than that
                active &= supports.counts > narrower
                tokens = min(tokens, capacity // (narrower + 1))
            narrower = width
            if tokens > 0:
                yield WidthGroup(width, tokens, active)

    def _read_ids(self, supports, row_ids, width):
        k = jnp.arange(width, dtype=jnp.int32)[None]
        counts = take(supports.counts, row_ids)[:, None]
        index = take(supports.starts, row_ids)[:, None] + k
        ids = supports.ids.at[jnp.where(k < counts, index, supports.ids.shape[0])]
        ids = ids.get(mode="fill", fill_value=-1)
        return jnp.where(counts < 0, _NO_ID, ids)


def chunk_entries(chunk: int, max_ids: int, capacity: int) -> int:
    """The most entries of ragged supports whose columns are alive at once.

    A chunk of the widest supports has as many, but no more than `_FEW` or one part in
    `_PARTS` of the capacity, whichever is more.
    """
    return max(max_ids, min(chunk * max_ids, max(_FEW, capacity // _PARTS)))


def _doubling_widths(largest: int) -> list[int]:
    """Widths that double from `_NARROWEST`, up to the largest, which is the last."""
    widths = [min(_NARROWEST, largest)]
    while widths[-1] < largest:
        widths.append(min(2 * widths[-1], largest))
    return widths


def _label_positions(labels, ids) -> tuple[Any, Any]:
    """(index of each label in its support, or -1; True where it is present)."""
    matches = (ids == labels[:, None]) & (ids >= 0)
    present = jnp.any(matches, axis=-1)
    position = jnp.where(present, jnp.argmax(matches, axis=-1), -1)
    return position.astype(jnp.int32), present
