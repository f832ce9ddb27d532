"""Labels of several heads that predict several tokens ahead from each position."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.explicit_axes import merged, spec_of, with_automatic_axes

_MOST_HEADS = 2**16


def _sharding(arguments) -> PartitionSpec:
    return merged(
        *((None, *spec_of(arguments.get(k))) for k in ("labels", "segment_ids"))
    )


@with_automatic_axes(_sharding)
def multi_token_labels(
    labels: ArrayLike, heads: int, *, segment_ids: ArrayLike | None = None
) -> jax.Array:
    """Labels of H heads: head h predicts the label h positions later.

        out[h, ..., t] = labels[..., t + h], or -1 past the end of the row or sequence

    With hidden states [H, ..., T, D], one call of `jaxmem.token_loss` then trains all
    heads with one W: multi-token prediction.

    Args:
        labels: the next token of each position, [..., T] integers; negative is padding.
        heads: H, including the head that predicts `labels` themselves.
        segment_ids: sequence of each token in its packed row, [..., T]; None if a row
            holds one sequence. A label of another sequence is -1.

    Returns:
        int32 [H, ..., T].

    Raises:
        TypeError: labels or segment_ids are not integers.
        ValueError: labels have no axis, shapes disagree, or heads is not a Python
            integer from 1 to 65536.

    >>> import jax.numpy as jnp, jaxmem
    >>> ids = jnp.array([1, 1, 1, 2, 2])
    >>> jaxmem.losses.multi_token_labels(jnp.arange(5), 2, segment_ids=ids)
    Array([[ 0,  1,  2,  3,  4],
           [ 1,  2, -1,  4, -1]], dtype=int32)

    Reference: Gloeckle et al., "Better & Faster Large Language Models via Multi-token
    Prediction", 2024, arXiv:2404.19737.
    """
    heads = checks.check_count("heads", heads)
    labels = jnp.asarray(checks.as_integers("labels", labels))
    if labels.ndim == 0:
        raise ValueError("labels must have an axis of positions, got a scalar")
    if heads > _MOST_HEADS:  # each is a row of the result
        raise ValueError(f"heads must be at most {_MOST_HEADS}, got {heads}")
    if segment_ids is not None:
        segment_ids = checks.as_integers("segment_ids", segment_ids)
        if segment_ids.shape != labels.shape:
            raise ValueError(
                f"segment_ids must have the shape of labels, {labels.shape}, got "
                f"{segment_ids.shape}"
            )

    def of_head(h):
        ahead = _ahead(labels, h, -1)
        if segment_ids is None:
            return ahead
        same = _ahead(segment_ids, h, -1) == segment_ids
        return jnp.where(same, ahead, -1)

    return jnp.stack([of_head(h) for h in range(heads)]).astype(jnp.int32)


def _ahead(x, steps, fill):
    """The values that stand `steps` later on the last axis."""
    steps = min(steps, x.shape[-1])
    after = [(0, 0)] * (x.ndim - 1) + [(0, steps)]
    return jnp.pad(x[..., steps:], after, constant_values=fill)
