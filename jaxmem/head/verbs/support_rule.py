"""The derivative rules of `support_logprobs`, for dense and for ragged supports."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxmem.head.backends.protocol import ByLogits, ColumnGroup, ScaledHead
from jaxmem.head.maths import row_stats, scaling, vocab_shards
from jaxmem.head.maths.backend_operands import no_statistics, take
from jaxmem.head.maths.id_columns import existing_columns
from jaxmem.head.verbs.rule import LoopRule

_NARROWEST = 4  # ids; the least width of a ragged support
# A chunk of ragged supports is one part in `_PARTS` of all entries or smaller, because
# the last chunk of each width is partly empty; below `_FEW` entries it costs nothing.
_PARTS, _FEW = 16, 4096
_NO_ID = jnp.iinfo(jnp.int32).max  # stands for a support that is not valid


class SupportRule(LoopRule):
    """The rule of `support_logprobs`; the constants are the supports [N, K]."""

    def forward_loop(self, source, rows, supports):
        (rows,) = rows

        def of_chunk(row_ids, z):
            labels, ids = self._read_support(rows, supports, row_ids, z.shape[1])
            position, is_valid = _label_positions(labels, ids)
            is_valid &= jnp.all(ids < self.spec.vocab_size, axis=-1)
            stats, _ = row_stats.of_tile(z, position)
            return stats, is_valid

        valid = vocab_shards.vary(jnp.zeros_like(rows.active), self.spec.varying)
        results = no_statistics(self.spec, rows), valid
        heads = [ScaledHead(self.spec, source, rows)]
        groups = list(self._groups(rows, supports))
        stats, valid = self.loops.forward(heads, of_chunk, results, groups)
        if self.spec.shards:
            stats = row_stats.merge_over(stats, self.spec.shards.axes)
        outputs = row_stats.finish(stats, valid)
        logprob = jnp.where(rows.active, outputs.logprob, 0)
        saved = logprob, {"max": outputs.max, "log_sum": outputs.log_sum}
        return vocab_shards.vary(saved, self.spec.varying)

    def backward_loop(self, source, rows, supports, result, saved, g):
        (rows,) = rows
        saved = saved | {"logprob": result}

        def of_chunk(row_ids, z):
            labels, ids = self._read_support(rows, supports, row_ids, z.shape[1])
            outputs = row_stats.Outputs(
                *(take(saved.get(k), row_ids) for k in row_stats.Outputs._fields)
            )
            g_row = take(g, row_ids)
            cotangents = row_stats.Cotangents(g_row)
            position, _ = _label_positions(labels, ids)
            dz = row_stats.dlogits(z, position, outputs, cotangents)
            # A token whose support is invalid is NaN only where its result was used.
            dz = jnp.where(g_row[:, None] == 0, 0, dz)
            return ByLogits(scaling.unscale(self.spec, rows, row_ids, z, dz))

        heads = [ScaledHead(self.spec, source, rows)]
        groups = list(self._groups(rows, supports))
        return self.loops.backward(heads, of_chunk, groups)

    def _groups(self, rows, supports) -> Iterator[ColumnGroup]:
        """Yields the groups of all active tokens, each with supports of one width."""
        width = supports.shape[1]
        yield self._group(rows, supports, width, self.spec.chunk, rows.active)

    def _group(self, rows, supports, width, chunk, active) -> ColumnGroup:
        def columns(row_ids):
            _, ids = self._read_support(rows, supports, row_ids, width)
            return existing_columns(self.spec, ids)

        return ColumnGroup(chunk, active, columns)

    def _read_ids(self, supports, row_ids, width):
        """The supports of the rows, [C, width]; negative where absent."""
        return take(supports, row_ids, fill_value=-1)

    def _read_support(self, rows, supports, row_ids, width):
        """Labels [C] and ids [C, width] of the rows; repeated ids are absent."""
        labels = take(rows.labels, row_ids, fill_value=-1)
        ids = jnp.sort(self._read_ids(supports, row_ids, width), axis=-1)
        return labels, jnp.where(
            ids == jnp.roll(ids, 1, axis=-1).at[:, 0].set(-1), -1, ids
        )


@dataclasses.dataclass(frozen=True)
class RaggedSupportRule(SupportRule):
    """The rule of `Ragged` supports, grouped by widths that double.

    A width's tokens run as dense supports of that width. What is computed is therefore
    less than twice the ids of a support, if it has more than `_NARROWEST`.
    """

    max_ids: int = 1  # the most ids of a support

    def _groups(self, rows, supports):
        """See `SupportRule._groups`; an invalid support has the least width."""
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
                yield self._group(rows, supports, width, tokens, active)

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
