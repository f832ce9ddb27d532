"""Arguments of the public functions: checked, flattened to [N, ...], and typed."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.head.backends import choose
from jaxmem.head.backends.protocol import Backend
from jaxmem.head.maths import (
    call_report,
    checks,
    column_sampling,
    eight_bits,
    gradients,
    partition,
    recorded,
    vocab_shards,
)
from jaxmem.head.maths.backend_operands import CallerLogits, Factors, TokenRows
from jaxmem.head.maths.head import Head, as_head
from jaxmem.head.maths.spec import CallOptions, Implementation, Spec

NO_LABELS = object()  # stands for the labels of a verb that takes none


class HeadOperands(NamedTuple):
    """Operands of a head, or the caller's logits, with all tokens in one axis."""

    source: Any  # Factors or CallerLogits
    head: Head  # with its layout
    shape: tuple[int, ...]  # of the caller's tokens


class CheckedCall(NamedTuple):
    """A call whose arguments have passed all checks."""

    spec: Spec
    backend: Backend
    source: Any  # Factors or CallerLogits
    rows: Any  # `TokenRows`; of a loss, the constants of its rule
    shape: tuple[int, ...]  # of the caller's tokens


class ColumnsCall(NamedTuple):
    """A checked call of a verb that reads single columns, whose source is not typed."""

    spec: Spec
    source: Factors
    rows: TokenRows
    shape: tuple[int, ...]  # of the caller's tokens


def columns_call(
    verb: str, hidden, W, options: CallOptions, labels=NO_LABELS
) -> ColumnsCall:
    """The call of a verb that reads single columns; its backend is still to choose."""
    choose.check_columns(verb, options.implementation)
    source, head, shape = read_head(hidden, W)
    spec = spec_of(source, head, (), options)
    gradients.facts_of_whole_logits(options.gradient, spec.vocab_size)
    rows = read_rows(spec, shape, labels, options)
    return ColumnsCall(spec, source, rows, shape)


def choose_columns(
    verb: str,
    spec: Spec,
    source: Factors,
    implementation: Implementation | None,
    shapes,
    live_bytes: int | None = None,
) -> Backend:
    """The backend of a verb that reads single columns; the call is recorded.

    The live bytes are those of a chunk's logits, unless others are given.
    """
    backend, why = choose.choose_columns(implementation, spec, source)
    if live_bytes is None:
        live_bytes = 4 * spec.chunk * spec.columns
    if not backend.stores_logits:
        live_bytes = 0
    is_sole_backend = len(choose.with_columns()) == 1
    if is_sole_backend and implementation is None:
        why = f"the only one with {verb}"
    facts = spec.chunk, live_bytes, spec.gradient_samples, spec.forward, is_sole_backend
    call_report.record(verb, shapes, backend.name, why, *facts)
    return backend


def read_logits(logits, head: Head) -> HeadOperands:
    """The operands of a caller's logits [..., V]; `head` has no W."""
    logits = checks.as_array("logits", logits)
    checks.check_hidden(logits, "logits")
    shape = logits.shape[:-1]
    flat = jnp.reshape(logits, (math.prod(shape), logits.shape[-1]))
    return HeadOperands(CallerLogits(flat), head, shape)


def call(
    verb: str,
    outputs: Sequence[str],
    operands: HeadOperands,
    labels,
    options: CallOptions,
) -> CheckedCall:
    """The call of a verb, whose arguments are checked and recorded."""
    source, shape = operands.source, operands.shape
    spec = spec_of(source, operands.head, outputs, options)
    rows = read_rows(spec, shape, labels, options)
    if spec.forward == "int8":
        eight_bits.check(spec, source, rows)
    type_operands = _type_samples if spec.gradient_samples else typed
    spec, source = type_operands(spec, source, rows)
    backend, why = choose.choose(options.implementation, spec, source)
    has_logits = backend.stores_logits and spec.forward != "recorded"
    live_bytes = 4 * spec.chunk * spec.columns if has_logits else 0
    facts = spec.chunk, live_bytes, spec.gradient_samples, spec.forward
    call_report.record(verb, source.shapes(shape), backend.name, why, *facts)
    return CheckedCall(spec, backend, source, rows, shape)


def _type_samples(spec, source, rows):
    """`typed`, but W keeps its type if all devices have fewer tokens than columns.

    Its gradient then takes less communication in parts of the vocabulary.
    """
    untyped = source
    spec, source = typed(spec, untyped, rows)
    token_axes = vocab_shards.varying(source)
    token_axes = token_axes - vocab_shards.varying((untyped.W, untyped.bias))
    all_axes = jax.sharding.get_abstract_mesh().axis_names
    token_axes = tuple(axis for axis in all_axes if axis in token_axes)
    if (
        not token_axes
        or untyped.hidden.shape[0] * jax.lax.axis_size(token_axes) >= spec.columns
    ):
        return spec, source
    spec = dataclasses.replace(spec, token_axes=token_axes)
    return spec, untyped._replace(hidden=source.hidden)


def spec_of(source: Any, head: Head, outputs, options: CallOptions) -> Spec:
    """The static facts of a call."""
    tokens, dtype = source[0].shape[0], np.dtype(source[0].dtype)
    columns = all_columns = vocab_size = source.columns(head.layout)
    facts: dict[str, Any] = {"token_parallel": partition.is_possible()}
    if options.axis_name is not None:
        facts["shards"] = shards = vocab_shards.check_axis_name(options.axis_name)
        all_columns = vocab_size = columns * shards.count
    if head.vocab_size is not None:
        vocab_size = checks.check_vocab_size(head.vocab_size, all_columns)
    if head.softcap is not None:
        facts["softcap"] = checks.check_softcap(head.softcap)
    if options.gradient is not None:
        facts |= gradients.facts(options.gradient, vocab_size)
        if source.W.dtype == np.promote_types(dtype, np.float32):
            facts["gradient_blocks"] = 1  # sums in W's dtype are its gradient itself
    chunk_columns = columns
    if options.vocab_groups is not None:
        facts["vocab_groups"] = _check_vocab_groups(
            options, all_columns, facts.get("shards")
        )
        chunk_columns = all_columns  # the bits may not depend on the shards
    chunk = checks.check_chunk(options.chunk, tokens, chunk_columns, source.depth)
    outputs = tuple(outputs)
    return Spec(columns, vocab_size, chunk, outputs, dtype, head.layout, **facts)


def _check_vocab_groups(options, all_columns, shards):
    """The checked `vocab_groups`."""
    n_shards = shards.count if shards else 1
    groups = checks.check_vocab_groups(options.vocab_groups, all_columns, n_shards)
    if options.gradient is not None:
        raise NotImplementedError(
            f"vocab_groups cannot be combined with gradient={options.gradient}; pass "
            "one of both"
        )
    return groups


def read_head(hidden, W, prefix: str = "") -> HeadOperands:
    """The operands of hidden states and a head.

    Errors put the prefix before the arguments' names, as in Teacher.W.
    """
    head = as_head(W)
    hidden = checks.as_array(f"{prefix}hidden", hidden)
    W = checks.as_array(f"{prefix}W", head.W)
    checks.check_hidden(hidden, f"{prefix}hidden")
    layout = checks.check_layout(hidden, W, head.layout, prefix)
    bias = head.bias
    if bias is not None:
        bias = checks.as_array(f"{prefix}bias", bias)
        columns = W.shape[0 if layout == "vd" else 1]
        checks.check_bias(bias, columns, f"{prefix}bias")
    shape, depth = hidden.shape[:-1], hidden.shape[-1]
    flat = jnp.reshape(hidden, (math.prod(shape), depth))
    head = dataclasses.replace(head, layout=layout)
    return HeadOperands(Factors(flat, W, bias), head, shape)


def read_rows(
    spec: Spec, shape: tuple[int, ...], labels, options: CallOptions
) -> TokenRows:
    """The rows of all tokens, [N]; labels are 0 for NO_LABELS."""
    where, temperature, dtype = options.where, options.temperature, spec.stats_dtype
    divisor = draws = entries = None
    if where is not None:
        where = checks.read_where(where, shape)
    if isinstance(options.gradient, gradients.Recorded):
        if labels is NO_LABELS:
            raise gradients.no_recorded("this function has no labels")
        entries = recorded.read(options.gradient.entries, spec, shape)
    labels = np.zeros(shape, np.int32) if labels is NO_LABELS else labels
    labels = checks.as_visible_array("labels", labels)
    checks.check_labels(labels, where, shape, spec.vocab_size)
    if not isinstance(temperature, float) or temperature != 1:
        divisor = read_temperature("temperature", temperature, shape, dtype)
    labels = as_int32(labels, spec.vocab_size)
    active = labels >= 0
    if where is not None:
        active = active & jnp.broadcast_to(jnp.asarray(where), shape)
    if options.gradient is not None or options.key is not None:
        keys = column_sampling.check_key(options.key, options.gradient, shape)
        if keys is not None:
            keys = jnp.reshape(column_sampling.token_keys(keys, shape), (-1,))
            draws = column_sampling.draws(keys)
    return TokenRows(labels.reshape(-1), active.reshape(-1), divisor, draws, entries)


def as_int32(ids, vocab_size: int) -> jax.Array:
    """int32 ids, clipped to [-1, vocab_size] in their own dtype to avoid overflow."""
    if jnp.iinfo(ids.dtype).max > np.iinfo(np.int32).max:
        info = jnp.iinfo(ids.dtype)
        low = ids.dtype.type(max(-1, info.min))
        clip = np.clip if isinstance(ids, np.ndarray) else jnp.clip
        ids = clip(ids, low, ids.dtype.type(vocab_size))
    return jnp.asarray(ids.astype(np.int32))


def read_temperature(
    name: str, temperature, shape: tuple[int, ...], dtype
) -> jax.Array | None:
    """Checked, [N]; None for 1. A traced one that is not positive becomes NaN."""
    temperature = checks.as_visible_array(name, temperature)
    checks.check_temperature(temperature, shape, name)
    if not isinstance(temperature, jax.Array) and np.all(np.asarray(temperature) == 1):
        return None
    temperature = jnp.asarray(temperature).astype(dtype)
    temperature = jnp.where(temperature > 0, temperature, jnp.nan)
    return jnp.reshape(jnp.broadcast_to(temperature, shape), (-1,))


def typed(spec: Spec, source: Any, deciding) -> tuple[Spec, Any]:
    """Spec and source, typed as varying along mesh axes inside `jax.shard_map`.

    Results vary along the axes of the operands `deciding` and of the source, except
    those that shard the vocabulary. The derivative of typing W as varying along an axis
    of tokens sums its gradient over that axis.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:  # not inside of one
        return spec, source
    is_head, shards = isinstance(source, Factors), spec.shards
    decided, split = vocab_shards.varying(deciding), frozenset()
    if shards:
        array = ("W", source.W) if is_head else ("logits", source.logits)
        vocab_shards.check_split(shards, *array)
        hidden = source.hidden if is_head else source
        shards = vocab_shards.described(shards, hidden, deciding)
        split = frozenset(shards.axes)
    varying = (vocab_shards.varying(source) - split) | decided
    # W's gradient is summed over all axes by that typing, and not by token_axes.
    spec = dataclasses.replace(spec, shards=shards, varying=varying, token_axes=())
    varied = vocab_shards.vary(source, spec.part_varying)
    if is_head and shards:
        axes = spec.part_varying.difference(shards.same_hidden)
        varied = varied._replace(hidden=vocab_shards.vary(source.hidden, axes))
    return spec, varied
