"""Arguments of the public functions: checked, flattened to [N, ...], and typed."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import devices
from jaxmem.backends import choose
from jaxmem.backends.protocol import Backend
from jaxmem.core import (
    checks,
    column_sampling,
    eight_bits,
    gradients,
    partition,
    prng_keys,
    report,
    vocab_shards,
)
from jaxmem.core.backend_operands import Factors, Logits, Rows
from jaxmem.core.head import Head, as_head
from jaxmem.core.options import CallOptions, Implementation, Layout
from jaxmem.core.spec import Spec

NO_LABELS = object()  # stands for the labels of a verb that takes none


class Call(NamedTuple):
    """A call whose arguments have passed all checks."""

    spec: Spec
    backend: Backend
    source: Any  # Factors or Logits
    rows: Rows
    shape: tuple[int, ...]  # of the caller's tokens


def head_call(
    verb: str, outputs: Sequence[str], hidden, W, labels, options: CallOptions
) -> Call:
    """A call that computes logits from hidden states [..., D] and a head."""
    source, head, shape = read_head(hidden, W)
    recorded = verb, shapes_of(source, shape)
    return _call(recorded, outputs, (source, head), shape, labels, options)


def columns_call(
    verb: str, hidden, W, options: CallOptions, labels=NO_LABELS
) -> tuple[Spec, Factors, Rows, tuple[int, ...]]:
    """A call that only "xla" runs: (spec, source, rows, tokens' shape).

    The source is still to be typed, and the call to be recorded.
    """
    check_only_xla(verb, options.implementation)
    source, head, shape = read_head(hidden, W)
    spec = _spec_of(source, head, (), options)
    return spec, source, read_rows(spec, shape, labels, options), shape


def logits_call(
    verb: str, outputs: Sequence[str], logits, described: Head, labels,
    options: CallOptions,
) -> Call:  # fmt: skip
    """A call with given logits [..., V], which `described` describes instead of a W."""
    logits = checks.as_array("logits", logits)
    checks.check_hidden(logits, "logits")
    shape = logits.shape[:-1]
    source = Logits(jnp.reshape(logits, (math.prod(shape), logits.shape[-1])))
    recorded = verb, {"logits": logits.shape}
    return _call(recorded, outputs, (source, described), shape, labels, options)


def _call(recorded, outputs, source_and_head, shape, labels, options):
    if options.implementation is not None:
        choose.check(options.implementation)
    source, head = source_and_head
    spec = _spec_of(source, head, outputs, options)
    rows = read_rows(spec, shape, labels, options)
    if spec.forward != "exact":
        eight_bits.check(spec, source, rows)
    given = source
    spec, source = typed(spec, given, rows)
    if spec.gradient_samples:
        spec, source = _with_token_axes(spec, given, source)
    backend, why = choose.choose(options.implementation, spec, source)
    live_bytes = 4 * spec.chunk * spec.columns if backend.stores_logits else 0
    verb, shapes = recorded
    report.record(
        report.Call(
            verb, shapes, backend.name, why, spec.chunk, live_bytes,
            spec.gradient_samples, spec.forward,
        )
    )  # fmt: skip
    return Call(spec, backend, source, rows, shape)


def _with_token_axes(spec, given, source):
    """W as it was given, if there are fewer tokens on all devices than columns.

    Then its gradient takes less communication in parts of the vocabulary.
    """
    axes = vocab_shards.varying(source) - vocab_shards.varying((given.W, given.bias))
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    axes = tuple(axis for axis in mesh_axes if axis in axes)
    if not axes or given.hidden.shape[0] * jax.lax.axis_size(axes) >= spec.columns:
        return spec, source
    spec = dataclasses.replace(spec, token_axes=axes)
    return spec, given._replace(hidden=source.hidden)


def shapes_of(source: Factors, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's operands as given, for `jaxmem.report()`."""
    return {"hidden": (*shape, source.hidden.shape[-1]), "W": source.W.shape}


def check_only_xla(verb: str, implementation: Implementation | None) -> None:
    """Check the implementation of a verb that only "xla" has.

    Raises:
        NotImplementedError: another backend is named.
        ValueError: no such backend exists.
    """
    choose.check(implementation)
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f"implementation={implementation!r} has no {verb}: its kernels reduce one "
            "head's logits to the statistics of token_stats and keep no row of them; "
            "pass implementation=None"
        )


def uses_kernels(implementation: Implementation | None) -> bool:
    """Whether kernels may read the logits of a verb that only "xla" has."""
    on_gpu = implementation is None and devices.backend() == "gpu"
    return on_gpu and devices.has_mosaic()


def record_only_xla(
    verb: str,
    spec: Spec,
    shapes,
    implementation: Implementation | None,
    live_bytes=None,
) -> None:
    """Record the call of a verb that only "xla" has in every open `jaxmem.report()`.

    The live bytes are those of a chunk's logits, unless others are given.
    """
    why = "named by the caller" if implementation else f"the only one with {verb}"
    live_bytes = 4 * spec.chunk * spec.columns if live_bytes is None else live_bytes
    report.record(
        report.Call(
            verb, shapes, "xla", why, spec.chunk, live_bytes, spec.gradient_samples
        )
    )


def _spec_of(source, head, outputs, options):
    data = source.hidden if isinstance(source, Factors) else source.logits
    columns = columns_of(source, head.layout)
    shards, all_columns, groups, more = None, columns, None, {}
    if options.axis_name is not None:
        shards = vocab_shards.check_axis_name(options.axis_name)
        all_columns = columns * shards.count if shards else columns
    vocab_size = all_columns
    if head.vocab_size is not None:
        vocab_size = checks.check_vocab_size(head.vocab_size, all_columns)
    if options.vocab_groups is not None:
        groups = _groups_of(options, all_columns, shards)
    if options.gradient is not None:
        more = gradients.facts(options.gradient, vocab_size)
    if head.softcap is not None:
        more["softcap"] = checks.check_softcap(head.softcap)
    spec = Spec(
        columns=columns,
        vocab_size=vocab_size,
        # The chunk, and so the bits, of "auto" may not depend on the shards.
        chunk=checks.check_chunk(
            options.chunk, data.shape[0], all_columns if groups else columns
        ),
        outputs=tuple(outputs),
        compute_dtype=np.dtype(data.dtype),
        layout=head.layout,
        shards=shards,
        token_parallel=partition.is_possible(),
        vocab_groups=groups,
        **more,
    )
    # Sums in the dtype of W are its gradient itself.
    if spec.gradient_blocks > 1 and source.W.dtype == spec.stats_dtype:
        return dataclasses.replace(spec, gradient_blocks=1)
    return spec


def _groups_of(options, all_columns, shards):
    """The checked `vocab_groups`, or None."""
    n_shards = shards.count if shards else 1
    groups = checks.check_vocab_groups(options.vocab_groups, all_columns, n_shards)
    if groups and options.gradient is not None:
        raise NotImplementedError(
            f"vocab_groups cannot be combined with gradient={options.gradient}; pass "
            "one of both"
        )
    return groups


def read_head(hidden, W, prefix: str = "") -> tuple[Factors, Head, tuple[int, ...]]:
    """The operands with tokens in one axis, the head, and the tokens' shape.

    Args:
        hidden: [..., D].
        W: [V, D] or [D, V], or a `Head`.
        prefix: of the arguments' names in errors, as in Teacher.W.

    Returns:
        `Factors` with hidden [N, D], the head with its layout, and the shape of the
        tokens.
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
    return Factors(flat, W, bias), dataclasses.replace(head, layout=layout), shape


def columns_of(source: Factors | Logits, layout: Layout | None) -> int:
    """Columns of the logits, including padding."""
    if isinstance(source, Logits):
        return source.logits.shape[-1]
    return source.W.shape[0 if layout == "vd" else 1]


def read_rows(spec: Spec, shape: tuple[int, ...], labels, options: CallOptions) -> Rows:
    """Labels, mask and temperature per token, [N]; labels are 0 for NO_LABELS."""
    labels = np.zeros(shape, np.int32) if labels is NO_LABELS else labels
    labels = checks.as_visible_array("labels", labels)
    where = None if options.where is None else read_where(options.where, shape)
    checks.check_labels(labels, where, shape, spec.vocab_size)
    dtype = spec.stats_dtype
    temperature = read_temperature("temperature", options.temperature, shape, dtype)
    labels = as_int32(labels, spec.vocab_size)
    active = labels >= 0
    if where is not None:
        active = active & jnp.broadcast_to(jnp.asarray(where), shape)
    return Rows(
        jnp.reshape(labels, (-1,)),
        jnp.reshape(active, (-1,)),
        temperature,
        _draws(options, shape) if options.gradient or options.key is not None else None,
    )


def _draws(options, shape):
    """One random number per token, [N]; None where gradients are exact."""
    keys = prng_keys.check_key(options.key, options.gradient, shape)
    if keys is None:
        return None
    return column_sampling.draws(
        jnp.reshape(column_sampling.token_keys(keys, shape), (-1,))
    )


def read_where(where, shape: tuple[int, ...]):
    """The checked mask; None if there is none."""
    if where is None:
        return None
    where = checks.as_visible_array("where", where)
    checks.check_where(where, shape)
    return where


def as_int32(ids, vocab_size: int) -> jax.Array:
    """int32 ids, clipped to [-1, vocab_size] in their own dtype to avoid overflow."""
    info = jnp.iinfo(ids.dtype)
    if info.max > np.iinfo(np.int32).max:
        low = ids.dtype.type(max(-1, info.min))
        clip = np.clip if isinstance(ids, np.ndarray) else jnp.clip
        ids = clip(ids, low, ids.dtype.type(vocab_size))
    return jnp.asarray(ids.astype(np.int32))


def read_temperature(
    name: str, temperature, shape: tuple[int, ...], dtype
) -> jax.Array | None:
    """Checked, [N]; None for 1. A traced one that is not positive becomes NaN."""
    if type(temperature) is float and temperature == 1:
        return None
    temperature = checks.as_visible_array(name, temperature)
    checks.check_temperature(temperature, shape, name)
    if not isinstance(temperature, jax.Array) and np.all(np.asarray(temperature) == 1):
        return None
    temperature = jnp.asarray(temperature).astype(dtype)
    temperature = jnp.where(temperature > 0, temperature, jnp.nan)
    return jnp.reshape(jnp.broadcast_to(temperature, shape), (-1,))


def typed(spec: Spec, source: Any, deciding) -> tuple[Spec, Any]:
    """Spec and source, typed as varying along mesh axes inside `jax.shard_map`.

    Results vary along the axes of `deciding` and of the source, except those that shard
    the vocabulary. The derivative of typing W as varying along an axis of tokens sums
    its gradient over that axis.

    Args:
        spec: of the call.
        source: `Factors` or `Logits`.
        deciding: operands along whose axes the results vary.

    Returns:
        Both, with types.
    """
    is_head, shards = isinstance(source, Factors), spec.shards
    decided, split = vocab_shards.varying(deciding), frozenset()
    if shards:
        array = ("W", source.W) if is_head else ("logits", source.logits)
        vocab_shards.check_split(shards, *array)
        hidden = source.hidden if is_head else source
        shards = vocab_shards.described(shards, hidden, deciding)
        split = frozenset(shards.axes)
    varying = (vocab_shards.varying(source) - split) | decided
    spec = dataclasses.replace(spec, shards=shards, varying=varying)
    varied = vocab_shards.vary(source, spec.part_varying)
    if is_head and shards:
        axes = spec.part_varying.difference(shards.same_hidden)
        varied = varied._replace(hidden=vocab_shards.vary(source.hidden, axes))
    return spec, varied
