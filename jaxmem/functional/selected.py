"""Log-probabilities of given token ids: under the whole softmax, or within a support.

`selected_logprobs` normalises over the vocabulary and computes all logits of a chunk;
`support_logprobs` normalises over K ids and multiplies by no other column of W.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.backends import xla
from jaxmem.core import checks, partition, shards as _shards, stats as _stats
from jaxmem.core.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.core.operands import Head, cast, for_active_chunks, put, take
from jaxmem.core.options import Chunk, HeadOptions, Implementation, Layout
from jaxmem.core.spec import Spec
from jaxmem.functional import arguments, rule
from jaxmem.functional.rule import LoopRule


@with_automatic_axes(sharded_like(ids=1, hidden=1))
def selected_logprobs(
    hidden: ArrayLike,
    W: ArrayLike,
    ids: ArrayLike,
    chunk: Chunk = 1024,
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probabilities of K given ids per token under the head's softmax.

        out_k = z[ids_k] - ln Σ_v e^(z_v),   z as in `logprobs`                (nats)
        dz_v = Σ_k g_k ([ids_k = v] - p_v)

    Distillation from a teacher's top K needs these from the student. The FLOPs are
    those of `logprobs` for any K.

    Args:
        hidden: final hidden states [..., D].
        W: vocabulary matrix, [V, D] or [D, V].
        ids: token ids [..., K], any integer dtype; they may repeat. A negative id is
            absent: its result is 0, with a gradient of 0. A token without ids costs
            nothing.
        chunk: as in `logprobs`.
        where: booleans that broadcast to hidden.shape[:-1]; False masks a token.
        temperature: as in `logprobs`.
        softcap: as in `logprobs`.
        bias: as in `logprobs`.
        vocab_size: as in `logprobs`.
        layout: as in `logprobs`.
        implementation: "xla", or None, which means the same.

    Returns:
        float32 [..., K] (float64 for float64 hidden): 0 where masked or absent, with a
        gradient of exactly 0, even where the hidden state is NaN; NaN for an id ≥ V
        that is known at run time only.

    **Memory** beyond inputs, outputs and gradients, with b the item size of hidden
    and C = min(chunk, tokens rounded up to 16): forward 4·C·V; backward (8 + b)·C·V +
    4·V·D, the latter for the float32 sum of W's gradient, unless W is frozen. XLA for
    CPUs may widen 16-bit weights to float32, 4·V·D.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: shapes disagree, the layout is ambiguous, or an id is ≥ V.
        NotImplementedError: a gradient of the temperature or a second derivative is
            requested, or the implementation does not have this verb.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> jaxmem.selected_logprobs(h, W, jnp.array([[0, 3], [2, -1]])).round(2)
    Array([[-1.39, -1.39],
           [-1.39,  0.  ]], dtype=float32)

    Reference: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    arXiv:1503.02531.
    """
    verb = "selected_logprobs"
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, implementation=implementation,
    )  # fmt: skip
    rule.check_only_xla(verb, implementation)
    source, layout, shape = arguments.read_head(hidden, W, options)
    spec = _spec_of(source, dataclasses.replace(options, layout=layout), None)
    rows = arguments.read_rows(spec, shape, arguments.NO_LABELS, options)
    where = arguments.read_where(where, shape)
    ids = _flat(check_ids("ids", ids, where, shape, spec.vocab_size), shape)
    rows = rows._replace(active=rows.active & jnp.any(ids >= 0, axis=-1))
    shapes = _shapes(source, shape) | {"ids": (*shape, ids.shape[-1])}
    live_bytes = 4 * spec.chunk * spec.columns
    rule.record(verb, shapes, implementation, spec.chunk, live_bytes)
    if 0 in ids.shape:
        return jnp.zeros((*shape, ids.shape[-1]), spec.stats_dtype)
    spec, source = arguments.typed(spec, source, (rows, ids))
    results = rule.run(_Selected(spec), (source,), ((rows,), ids))
    return jnp.reshape(results, (*shape, ids.shape[-1]))


@with_automatic_axes(sharded_like(labels=0, hidden=1))
def support_logprobs(
    hidden: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    support_ids: ArrayLike,
    chunk: Chunk = "auto",
    *,
    where: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    layout: Layout | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Log-probability of each label among the tokens that it was sampled from.

        out = z[label] - ln Σ_(v in support) e^(z_v),   z as in `logprobs`     (nats)

    A sampler that truncates to the top k or top p draws from a softmax over the
    remaining tokens. To compare a policy with it, evaluate the policy on the same
    support. Only the support's columns of W are read: 2·N·K·D FLOPs, and as many for
    each gradient, for any V. Columns are contiguous in a [V, D] matrix, from which they
    are gathered far faster.

    Args:
        hidden: final hidden states [..., D].
        W: vocabulary matrix, [V, D] or [D, V].
        labels: token ids [...]. Negative marks padding.
        support_ids: the support of each token, [..., K], including the label, padded by
            negative ids; an id that repeats counts once.
        chunk: tokens whose columns may be alive at once; None for all of them; "auto"
            for as many as fit 512 MiB in float32.
        where: booleans that broadcast to labels; False masks a token.
        temperature: positive scalar or one per token, [...]; not differentiable.
        softcap: caps logits at ±softcap by tanh, before the temperature.
        bias: [V], added to the logits first.
        vocab_size: logical vocabulary when W is padded.
        layout: "vd" or "dv"; inferred from the shapes unless W is square.
        implementation: "xla", or None, which means the same.

    Returns:
        float32 [...] (float64 for float64 hidden): 0 for a masked token, with a
        gradient of exactly 0, even where its hidden state is NaN; NaN for a token whose
        support lacks its label or contains an id ≥ V, if that is known at run time
        only.

    **Memory** beyond inputs, outputs and gradients, with b the item size of hidden
    and C = min(chunk, tokens rounded up to 16): forward b·C·K·D; backward (4 + b)·C·K·D
    + 4·V·D, the latter for the float32 sum of W's gradient; if W is frozen, backward is
    as forward. XLA for CPUs widens 16-bit columns to float32.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: shapes disagree, the layout is ambiguous, an id is ≥ V, or a label
            is not in its support.
        NotImplementedError: a gradient of the temperature or a second derivative is
            requested, or the implementation does not have this verb.

    >>> import jax.numpy as jnp, jaxmem
    >>> h, W = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    >>> support = jnp.array([[0, 3, -1], [1, 2, 3]])
    >>> jaxmem.support_logprobs(h, W, jnp.array([0, 3]), support).round(2)
    Array([-0.69, -1.1 ], dtype=float32)

    Reference: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019,
    arXiv:1904.09751, which introduces top-p sampling.
    """
    verb = "support_logprobs"
    options = HeadOptions(
        chunk=chunk, where=where, temperature=temperature, softcap=softcap, bias=bias,
        vocab_size=vocab_size, layout=layout, implementation=implementation,
    )  # fmt: skip
    rule.check_only_xla(verb, implementation)
    source, layout, shape = arguments.read_head(hidden, W, options)
    columns = arguments.columns_of(source, layout)
    vocab_size = checks.check_vocab_size(vocab_size, columns)
    where = arguments.read_where(where, shape)
    labels = checks.as_visible_array("labels", labels)
    support_ids = checks.as_visible_array("support_ids", support_ids)
    ids = _flat(check_ids("support_ids", support_ids, where, shape, vocab_size), shape)
    numbers = ids.shape[1] * source.hidden.shape[1]
    spec = _spec_of(source, dataclasses.replace(options, layout=layout), numbers)
    rows = arguments.read_rows(spec, shape, labels, options)
    check_support(labels, support_ids, where, shape)
    shapes = _shapes(source, shape) | {"support_ids": (*shape, ids.shape[-1])}
    live_bytes = 4 * spec.chunk * ids.shape[1]
    rule.record(verb, shapes, implementation, spec.chunk, live_bytes)
    if 0 in shape:
        return jnp.zeros(shape, spec.stats_dtype)
    spec, source = arguments.typed(spec, source, (rows, ids))
    results = rule.run(_Support(spec), (source,), ((rows,), ids))
    return jnp.reshape(results, shape)


@dataclasses.dataclass(frozen=True)
class _Selected(LoopRule):
    """The rule of `selected_logprobs`; given are the ids [N, K]."""

    def forward_loop(self, source, rows, given):
        (rows,) = rows
        n_rows, dtype = given.shape[0], self.spec.stats_dtype
        source = cast(self.spec, source)

        def chunk(row_ids, results):
            z = self._logits(source, rows, row_ids)
            ids = take(given, row_ids, fill_value=-1)
            normaliser = _stats.normaliser(z)
            at_ids = z.at[self._places(ids)].get(mode="fill", fill_value=jnp.nan)
            log_p = jnp.where(ids < 0, 0, _stats.log_softmax(at_ids, normaliser))
            values = log_p, {"normaliser": normaliser}
            return jax.tree.map(lambda x, v: put(x, row_ids, v), results, values)

        zero = jnp.zeros(n_rows, dtype)
        saved = {"normaliser": _stats.Normaliser(zero, zero)}
        results = jnp.zeros(given.shape, dtype), saved
        results = _shards.vary(results, self.spec.varying)
        return for_active_chunks(self.spec.chunk, rows.active, chunk, results)

    def backward_loop(self, source, rows, given, result, saved, g):
        (rows,), original = rows, source
        source = cast(self.spec, source)

        def chunk(row_ids, sums):
            z = self._logits(source, rows, row_ids)
            ids = take(given, row_ids, fill_value=-1)
            log_p, g_ids = take(result, row_ids), take(g, row_ids)
            # An id ≥ V makes only those gradients NaN whose result was used.
            g_ids = jnp.where(jnp.isnan(log_p) & (g_ids != 0), jnp.nan, g_ids)
            g_ids = jnp.where(ids < 0, 0, g_ids)
            max_, log_sum = saved["normaliser"]
            # Rows past the last active one, as in `xla.backward`.
            log_sum = take(log_sum, row_ids, fill_value=jnp.inf)
            normaliser = _stats.Normaliser(take(max_, row_ids), log_sum)
            total = jnp.sum(g_ids, axis=-1, keepdims=True)
            dz = -total * jnp.exp(_stats.log_softmax(z, normaliser))
            ids, at_ids = _at_ids(ids, log_p, g_ids, total)
            dz = dz.at[self._places(ids)].set(at_ids, mode="drop")
            dz = xla.unscale(self.spec, rows, row_ids, z, dz)
            return xla.accumulate(self.spec, source, row_ids, dz, sums)

        sums = xla.zero_sums(self.spec, source)
        sums = for_active_chunks(self.spec.chunk, rows.active, chunk, sums)
        return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, original)

    def _logits(self, source, rows, row_ids):
        """Logits, materialised, so that they are scaled once though read twice."""
        return lax.optimization_barrier(xla.logits(self.spec, source, rows, row_ids))

    def _places(self, ids):
        """Rows and columns of the ids in logits; out of bounds where absent."""
        row = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        return row, _existing(self.spec, ids)


def _at_ids(ids, log_p, g, total):
    """Sorted ids and the derivative there, Σ_l g_l ([ids_l = ids_k] - p_k); [C, K].

    1 - p is computed from log p, because g - g p would cancel near p = 1.
    """
    ids, g, log_p = lax.sort((ids, g, log_p), dimension=1, num_keys=1)
    starts = ids[:, 1:] != ids[:, :-1]
    run = jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    of_run = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], run
    here = jnp.zeros_like(g).at[of_run].add(g)[of_run]  # summed over equal ids
    return ids, here * -jnp.expm1(log_p) - (total - here) * jnp.exp(log_p)


@dataclasses.dataclass(frozen=True)
class _Support(LoopRule):
    """The rule of `support_logprobs`; given are the supports [N, K]."""

    def forward_loop(self, source, rows, given):
        (rows,), source = rows, self._widen(source)

        def chunk(row_ids, results):
            labels, ids, columns = self._support(rows, given, row_ids)
            z, _ = self._logits(source, rows, row_ids, columns)
            position, is_valid = _position(labels, ids)
            is_valid &= jnp.all(ids < self.spec.vocab_size, axis=-1)
            outputs = _stats.finish(_stats.of_tile(z, position), is_valid)
            values = outputs.logprob, {k: getattr(outputs, k) for k in results[1]}
            return jax.tree.map(lambda x, v: put(x, row_ids, v), results, values)

        zero = jnp.zeros(given.shape[0], self.spec.stats_dtype)
        results = zero, {"max": zero, "log_sum": zero}
        results = _shards.vary(results, self.spec.varying)
        return for_active_chunks(self.spec.chunk, rows.active, chunk, results)

    def backward_loop(self, source, rows, given, result, saved, g):
        (rows,), original, source = rows, source, self._widen(source)
        saved = saved | {"logprob": result}

        def chunk(row_ids, sums):
            labels, ids, columns = self._support(rows, given, row_ids)
            z, rows_of_W = self._logits(source, rows, row_ids, columns)
            outputs = _stats.Outputs(
                *(take(saved.get(k), row_ids) for k in _stats.Outputs._fields)
            )
            g_row = take(g, row_ids)
            asked = _stats.Cotangents(g_row, None, None, None)
            c = _stats.coefficients(outputs, asked)
            dz = _stats.dlogits(z, _position(labels, ids)[0], outputs, c)
            # A token whose support is invalid is NaN only where its result was used.
            dz = jnp.where(g_row[:, None] == 0, 0, dz)
            dz = xla.unscale(self.spec, rows, row_ids, z, dz)
            return self._accumulate(sums, source, row_ids, columns, rows_of_W, dz)

        sums = xla.zero_sums(self.spec, source)
        sums = for_active_chunks(self.spec.chunk, rows.active, chunk, sums)
        return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, original)

    def _widen(self, source):
        """The bias in the dtype of `cast`; W is not cast, as few columns are used."""
        bias, dtype = source.bias, self.spec.stats_dtype
        return source._replace(bias=None if bias is None else bias.astype(dtype))

    def _support(self, rows, given, row_ids):
        """Labels [C], ids and columns [C, K] of the rows; repeated ids are absent."""
        labels = take(rows.labels, row_ids, fill_value=-1)
        ids = jnp.sort(take(given, row_ids, fill_value=-1), axis=-1)
        ids = jnp.where(ids == jnp.roll(ids, 1, axis=-1).at[:, 0].set(-1), -1, ids)
        return labels, ids, _existing(self.spec, ids)

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
        dbias = sums.bias
        if dbias is not None:
            dbias = dbias.at[columns].add(dz, mode="drop")
        dh = jnp.einsum("ck,ckd->cd", dz.astype(rows_of_W.dtype), rows_of_W,
                        preferred_element_type=dtype)  # fmt: skip
        dhidden = put(sums.hidden, row_ids, dh.astype(sums.hidden.dtype))
        h = take(source.hidden, row_ids).astype(dtype)
        dW = dz[:, :, None] * h[:, None, :]
        if self.spec.layout == "vd":
            dW = sums.W.at[columns].add(dW, mode="drop")
        else:
            dW = sums.W.at[:, columns].add(jnp.moveaxis(dW, -1, 0), mode="drop")
        return Head(dhidden, dW, dbias)


def _existing(spec, ids):
    """Columns of the ids; one past the end if absent or beyond the vocabulary."""
    return jnp.where((ids >= 0) & (ids < spec.vocab_size), ids, spec.columns)


def _position(labels, ids):
    """The position of each label in its support, and whether it is present."""
    matches = (ids == labels[:, None]) & (ids >= 0)
    present = jnp.any(matches, axis=-1)
    position = jnp.where(present, jnp.argmax(matches, axis=-1), -1)
    return position.astype(jnp.int32), present


def _spec_of(source, options, numbers):
    """The static facts; numbers is the count of float32 per token of a chunk."""
    columns = arguments.columns_of(source, options.layout)
    n_tokens = source.hidden.shape[0]
    return Spec(
        columns=columns,
        vocab_size=checks.check_vocab_size(options.vocab_size, columns),
        chunk=checks.check_chunk(options.chunk, n_tokens, numbers or columns),
        outputs=(),
        compute_dtype=source.hidden.dtype,
        layout=options.layout,
        softcap=checks.check_softcap(options.softcap),
        token_parallel=partition.is_possible(),
    )


def _shapes(source, shape):  # as given, for `jaxmem.report()`
    return {"hidden": (*shape, source.hidden.shape[-1]), "W": source.W.shape}


def check_ids(name: str, ids, where, shape: tuple[int, ...], vocab_size: int):
    """int32 ids [..., K], clipped so that none overflows.

    Raises:
        TypeError: they are not integers.
        ValueError: they have the wrong shape, or one is ≥ vocab_size.
    """
    ids = checks.as_visible_array(name, ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be integers, got {ids.dtype}; convert them with "
            f"{name}.astype('int32')"
        )
    if ids.shape[:-1] != shape or ids.ndim == 0:
        raise ValueError(
            f"{name} must have some entries a token, shape {shape} and one more axis, "
            f"got {ids.shape}"
        )
    if checks.is_visible(ids) and checks.is_visible(where):
        counted = _counted(where, shape)[..., None]
        largest = np.max(np.asarray(ids), initial=0, where=counted)
        if largest >= vocab_size:
            raise ValueError(
                f"{name} must be below vocab_size={vocab_size}, got {largest}; mark "
                "what is absent with a negative id, or the token with where="
            )
    return arguments.as_int32(ids, vocab_size)


def _flat(ids, shape):
    return jnp.reshape(ids, (math.prod(shape), ids.shape[-1]))


def check_support(labels, support_ids, where, shape: tuple[int, ...]) -> None:
    """Raise for an empty support, or a visible label that is not in its support."""
    if support_ids.shape[-1] == 0:
        raise ValueError("support_ids must hold at least one id a token, got none")
    if not all(map(checks.is_visible, (labels, support_ids, where))):
        return
    labels, support_ids = np.asarray(labels), np.asarray(support_ids)
    missing = (labels >= 0) & _counted(where, shape)
    missing &= np.all(support_ids != labels[..., None], axis=-1)
    if missing.any():
        first = tuple(int(i) for i in np.argwhere(missing)[0])
        raise ValueError(
            f"labels must be among their token's support_ids, got {labels[first]} at "
            f"{first}, which is not; mark padding with a negative label or with where="
        )


def _counted(where, shape):
    return np.broadcast_to(True if where is None else np.asarray(where), shape)
