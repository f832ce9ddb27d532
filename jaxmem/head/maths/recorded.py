"""Entries recorded with a token's old logits, and its statistics under new weights.

docs/sampled.md has the estimator. Let z0 be a token's logits when it was recorded,
Z0 = Σ_j e^z0_j and p0 = e^z0 / Z0. `column_sampling` keeps column j ≠ y with
probability q_j of p0_j, and the label y always. With new logits z1 of the kept columns
S and of the label alone, a sum over the vocabulary of a function f of the logits is
estimated by

    Σ_j f(z1_j) ≈ Σ_j f(z0_j) + f(z1_y) - f(z0_y) + Σ_(j in S) (f(z1_j) - f(z0_j)) / q_j

without bias, and without any error where no logit has changed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmem.head.maths import (
    column_sampling,
    row_stats,
    scaling,
)
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries, Sampling
from jaxmem.head.maths.row_stats import Outputs
from jaxmem.head.maths.spec import Spec

_EMPTY = np.iinfo(np.int32).max  # the column of an empty slot


class RecordedEntries(NamedTuple):
    """Logits of few columns of each token, and statistics of its whole distribution.

    `jaxmem.Recorded` derives the statistics under later weights from them. Logits are
    scaled: after bias, softcap and temperature. They are constants for every gradient.
    A masked token has no entries, and zeros.

    Attributes:
        columns: int32 [..., K], ids in the whole vocabulary; an empty slot has one past
            the last column.
        logits: float32 [..., K], of these columns; undefined in empty slots.
        label_logit: float32 [...], of the label, which is not among the columns.
        logsumexp: float32 [...], ln Z0.
        entropy: float32 [...], of p0, exact.
        sum_pi_squared: float32 [...], of p0, exact.
    """

    columns: Any
    logits: Any
    label_logit: Any
    logsumexp: Any
    entropy: Any
    sum_pi_squared: Any

    @property
    def k(self) -> int:
        """Slots of a token."""
        return self.columns.shape[-1]


def sampling_of(k: int, columns: int) -> Sampling:
    """The sampling of recorded entries, over all columns of the logits.

    Its margin is that of kernels that find entries by bounds, so that probabilities of
    a record do not depend on what made it.
    """
    return Sampling(k, columns, column_sampling.MARGIN)


def record(
    logits: jax.Array, labels: jax.Array, k: int, draws: jax.Array
) -> RecordedEntries:
    """Entries of rows of scaled logits that are in memory.

    Args:
        logits: [B, V], -inf in columns of padding.
        labels: int32 [B], such as the ids that were sampled; outside [0, V) masked.
        k: slots of a token, a Python integer below V.
        draws: uniform uint32 [B], one for each token.
    """
    z, labels, n_columns = jnp.asarray(logits), jnp.asarray(labels), logits.shape[1]
    z = z.astype(jnp.promote_types(z.dtype, jnp.float32))
    sampling = sampling_of(k, n_columns)
    exists = (labels >= 0) & (labels < n_columns)
    stats, exps = row_stats.of_tile(z, jnp.where(exists, labels, -1))
    outputs = row_stats.finish(stats, exists)
    scale = column_sampling.scale(stats.max, outputs)
    starts = column_sampling.starts(sampling, draws)
    selected = column_sampling.select(sampling, exps, scale, starts)
    kept = column_sampling.at_columns(z, selected.columns)
    return of_rows(selected, kept, stats.label_logit, outputs, exists)


def of_rows(
    selected: Entries, z: jax.Array, label_logit: jax.Array, outputs: Outputs, exists
) -> RecordedEntries:
    """A record from selected entries, their logits [N, K], and outputs of rows.

    The entries of rows that do not exist are empty, and their numbers 0.
    """
    live = (selected.p > 0) & exists[:, None]
    statistics = label_logit, outputs.logsumexp, outputs.entropy, outputs.sum_pi_squared
    return RecordedEntries(
        jnp.where(live, selected.columns, _EMPTY),
        jnp.where(live, z, 0),
        *(jnp.where(exists, x, 0) for x in statistics),
    )


def compact(entries: RecordedEntries) -> RecordedEntries:
    """Slots in the order of their columns, empty ones last."""
    columns, logits = lax.sort((entries.columns, entries.logits), num_keys=1)
    return entries._replace(columns=columns, logits=logits)


def scaled(
    spec: Spec, source: Factors, rows: TokenRows, columns: jax.Array, z: jax.Array
) -> jax.Array:
    """Logits after bias, softcap and temperature, from products h · W_j [N, n]."""
    if source.bias is not None:
        bias = source.bias.astype(spec.stats_dtype)
        z = z + bias.at[columns].get(mode="clip")
    return scaling.scale(spec, rows, jnp.arange(len(z), dtype=jnp.int32), z)
