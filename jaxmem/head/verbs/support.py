"""`support_logprobs`: log-probabilities of labels within a sampler's supports.

It multiplies by no other column of W. `jaxmem.head.verbs.selected` normalises over the
vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmem.head.maths import checks
from jaxmem.head.maths.backend_operands import Ragged
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.head.maths.head import Matrix
from jaxmem.head.maths.spec import AxisName, CallOptions, Chunk, Implementation
from jaxmem.head.verbs import arguments, rule
from jaxmem.head.verbs.ragged import entries_of, read_ragged
from jaxmem.head.verbs.support_rule import RaggedSupportRule, SupportRule, chunk_entries
from jaxmem.head.verbs.token_ids import check_ids, flat_ids


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def support_logprobs(
    hidden: ArrayLike,
    W: Matrix,
    labels: ArrayLike,
    support_ids: ArrayLike,
    chunk: Chunk = "auto",
    *,
    offsets: ArrayLike | None = None,
    max_ids: int | None = None,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probability of each label among the tokens that it was sampled from.

        out = z[label] - ln Σ_(v in support) e^(z_v),   z as in `logprobs`     (nats)

    A sampler that truncates to the top k or top p draws from a softmax over the
    remaining tokens. To compare a policy with it, evaluate the policy on the same
    support. Only the support's columns of W are read, far faster if W is [V, D]:
    2·N·K·D FLOPs, and as many for each gradient, for any V.

    **Ragged supports.** With offsets, token i's ids are
    `support_ids[offsets[i] : offsets[i + 1]]`, as vLLM returns them and
    `jaxmem.packing.support_to_csr` makes them. Supports are grouped by widths 4, 8, 16,
    … max_ids, so a token costs less than twice its ids, or 4.

    Args:
        support_ids: the support of each token, [..., K], including the label, padded by
            negative ids; an id that repeats counts once. With offsets, [M], for any M:
            entries that offsets leave out are ignored.
        chunk: tokens whose columns may exist at once; None for all of them; "auto"
            for as many as fit 1 GiB in float32.
        offsets: integers [N + 1] that do not decrease, for N tokens; None for dense
            supports.
        max_ids: with offsets, the most ids that a token may have, a Python integer.
        axis_name: as in `logprobs`; labels and supports are ids of the whole
            vocabulary. Each shard multiplies as many rows as one device would, zeros
            for others' ids.
        implementation: "xla", or None, which means the same.
        hidden, W, labels, where, temperature: as in `logprobs`.

    Returns:
        float32 [...] (float64 for float64 hidden): 0 for a masked token, with a
        gradient of exactly 0, even where its hidden state is NaN; NaN for a token whose
        support lacks its label, contains an id ≥ V, has more than max_ids ids or
        offsets that are out of order, if that is known at run time only.

    Raises:
        TypeError, NotImplementedError: as `logprobs`.
        ValueError: as `logprobs`; or a label is not in its support, or offsets
            decrease, reach beyond the ids or give a token more than max_ids.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> support = jnp.array([[0, 3, -1], [1, 2, 3]])
    >>> jaxmem.support_logprobs(h, W, jnp.array([0, 3]), support).round(2)
    Array([-0.69, -1.1 ], dtype=float32)
    >>> ids, offsets = jnp.array([0, 3, 1, 2, 3]), jnp.array([0, 2, 5])
    >>> jaxmem.support_logprobs(
    ...     h, W, jnp.array([0, 3]), ids, offsets=offsets, max_ids=3
    ... ).round(2)
    Array([-0.69, -1.1 ], dtype=float32)

    Reference: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019,
    arXiv:1904.09751, which introduces top-p sampling.
    """
    verb = "support_logprobs"
    options = CallOptions(
        chunk=chunk, where=where, temperature=temperature, axis_name=axis_name,
        implementation=implementation,
    )  # fmt: skip
    spec, source, rows, shape = arguments.columns_call(verb, hidden, W, options, labels)
    tokens, where = (shape, spec.vocab_size), checks.read_where(where, shape)
    supports = read_supports(labels, support_ids, offsets, max_ids, where, tokens)
    if isinstance(supports, Ragged):
        widest = min(int(max_ids or 0), len(supports.ids))
    else:
        supports, widest = flat_ids(supports, shape), supports.shape[-1]
    n_rows, depth = source.hidden.shape
    chunk = checks.check_chunk(chunk, n_rows, max(widest, 1) * depth)
    spec = dataclasses.replace(spec, chunk=chunk)
    shapes = source.shapes(shape) | {"support_ids": jnp.shape(support_ids)}
    entries = spec.chunk * widest
    if isinstance(supports, Ragged):
        entries = chunk_entries(spec.chunk, widest, supports.ids.shape[0])
    backend = arguments.choose_columns(
        verb, spec, source, implementation, shapes, 4 * entries
    )
    if 0 in shape:
        return jnp.zeros(shape, spec.stats_dtype)
    spec, source = arguments.typed(spec, source, (rows, supports))
    support_rule = SupportRule(spec, backend)
    if isinstance(supports, Ragged):
        support_rule = RaggedSupportRule(spec, backend, widest)
    results = rule.run(support_rule, (source,), ((rows,), supports))
    return jnp.reshape(results, shape)


def read_supports(
    labels, support_ids, offsets, max_ids: int | None, where, tokens
) -> jax.Array | Ragged:
    """The checked supports, [..., K], or with offsets `Ragged` of tokens in one axis.

    `tokens` are their shape and the size of the vocabulary.
    """
    labels = checks.as_visible_array("labels", labels)
    support_ids = checks.as_visible_array("support_ids", support_ids)
    if offsets is not None:
        supports = read_ragged(support_ids, offsets, max_ids, where, tokens)
    elif max_ids is None:
        supports = check_ids("support_ids", support_ids, where, *tokens)
    else:
        raise ValueError(
            f"max_ids must be None without offsets, got {checks.brief(max_ids)}; a "
            "dense support has as many ids as its last axis"
        )
    _check_support(labels, support_ids, offsets, where, tokens[0])
    return supports


def _check_support(labels, support_ids, offsets, where, shape: tuple[int, ...]) -> None:
    """Raise for an empty support, or a visible label that is not in its support."""
    if offsets is None and support_ids.shape[-1] == 0:
        raise ValueError("support_ids must contain at least one id per token, got none")
    offsets = None if offsets is None else checks.as_visible_array("offsets", offsets)
    if not all(map(checks.is_visible, (labels, support_ids, offsets, where))):
        return
    labels, support_ids = np.asarray(labels), np.asarray(support_ids)
    missing = (labels >= 0) & checks.counted_tokens(where, shape)
    if offsets is None:
        missing &= np.all(support_ids != labels[..., None], axis=-1)
    else:
        owners, entries = entries_of(support_ids, offsets)
        present = np.zeros(labels.size, bool)
        present[owners[entries == np.ravel(labels)[owners]]] = True
        missing &= ~present.reshape(shape)
    if missing.any():
        first = tuple(int(i) for i in np.argwhere(missing)[0])
        raise ValueError(
            f"labels must be among the support_ids of their token, but "
            f"{labels[first]} at {first} is not; mark padding with a negative label or "
            "with where="
        )
