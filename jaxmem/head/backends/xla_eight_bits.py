"""Sampled derivatives of a forward pass in 8 bits, in plain XLA.

The reference of what `hopper_eight_bits` computes; see `maths.eight_bits`. The backward
pass is that of `xla_sampled`.
"""

import jax.numpy as jnp
from jax import lax

from jaxmem.head.maths import backend_operands, column_sampling, eight_bits, row_stats
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries
from jaxmem.head.maths.eight_bits import EightBits
from jaxmem.head.maths.spec import Spec


def forward(
    spec: Spec, source: Factors, rows: TokenRows, names, shared: EightBits
) -> tuple[dict, Entries]:
    """The named fields of `Outputs` and `eight_bits.ERROR` of every row, and entries.

    They are 0, and no entries, where a row is not active. `shared` is of all tokens of
    the call.
    """
    sampling = column_sampling.sampling_of(spec)
    head = source.cast(spec)
    starts = column_sampling.starts_of(spec, rows)

    def chunk(row_ids, results):
        hidden = backend_operands.take(head.hidden, row_ids)
        labels = backend_operands.take(rows.labels, row_ids)
        exists = labels < spec.vocab_size
        label_logit = eight_bits.label_logits(spec, head, hidden, labels)
        z = _without_labels(spec, _logits_in_8_bits(shared, hidden), labels)
        no_labels = jnp.full_like(labels, -1)
        others, exps = row_stats.of_tile(z, no_labels)
        normaliser = eight_bits.normaliser(others, label_logit)
        scale = column_sampling.scale(others.max, normaliser)
        selected = column_sampling.select(
            sampling, exps, scale, backend_operands.take(starts, row_ids)
        )
        z = eight_bits.logits_at(spec, head, hidden, selected.columns)
        new = eight_bits.corrected(sampling, others, selected, z, label_logit, exists)
        return eight_bits.put(results, row_ids, new)

    results = eight_bits.nothing(spec, sampling, rows, names)
    return backend_operands.for_active_chunks(spec.chunk, rows.active, chunk, results)


def _logits_in_8_bits(shared, hidden):
    """Logits ẑ of all columns."""
    W, of_hidden = shared.W, eight_bits.rounded(hidden, shared.channels)

    def product(h, W, dtype):
        over_d = (((1,), (1,)), ((), ()))
        return lax.dot_general(h, W, over_d, preferred_element_type=dtype)

    sums = product(of_hidden.values, W.values, jnp.int32).astype(jnp.float32)
    wide = (x.wide.astype(jnp.float32) for x in (of_hidden, W))
    wide = product(*wide, jnp.float32)
    return sums * of_hidden.scale[:, None] * W.scale + wide


def _without_labels(spec, z, labels):
    """-inf in the columns of labels, and in the padding of the vocabulary."""
    column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    is_counted = (column != labels[:, None]) & (column < spec.vocab_size)
    return jnp.where(is_counted, z, -jnp.inf)
