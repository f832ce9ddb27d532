"""The verbs over a mesh of devices: global arrays in, global arrays out."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.core import checks, shards as _shards
from jaxmem.core.options import AxisName
from jaxmem.functional import arguments
from jaxmem.functional.divergence import check_tokens
from jaxmem.functional.selected import check_ids, check_support


def parallel(
    verb: Callable,
    mesh: Mesh | AbstractMesh,
    *,
    vocab: AxisName | None = None,
    tokens: AxisName | PartitionSpec | None = None,
    W_fsdp: AxisName | None = None,
) -> Callable:
    """A verb whose vocabulary and tokens are split over the devices of a mesh.

        parallel(verb, mesh, ...)(hidden, W, labels, ...) = verb(hidden, W, labels, ...)

    The arrays are global and may lie on the devices in any way. Where they lie as the
    verb needs them, none moves: hidden, labels and all else there is of tokens split
    along their first axes, and W and bias, or logits, along the vocabulary. The results
    are split as tokens are; along explicit axes, tokens that do not divide by the
    devices come back whole, as a type has no uneven parts.

    Args:
        verb: `jaxmem.logprobs`, `token_stats`, `entropy`, `token_loss`,
            `logprobs_from_logits` or `token_stats_from_logits`, or a functools.partial
            of one, with arguments by name. Or a verb that needs all of W:
            `selected_logprobs`, `support_logprobs`, `kl`, `forward_kl` or `jsd`.
        mesh: devices, with axes by name.
        vocab: mesh axes that split the vocabulary; None: each device has all of it. For
            a verb that needs all of W, it is gathered along them, and they split the
            first axis of the tokens as well.
        tokens: mesh axes that split the first axis of the tokens, or a PartitionSpec
            with one entry an axis: `P(("data", "fsdp"), "sequence")` for [B, T].
        W_fsdp: those of the tokens' mesh axes along which W is stored in parts of D.
            It is gathered for the call, and its gradient scattered as it is summed.

    Returns:
        The verb, with the same arguments but axis_name, and the same results. Where
        token_loss has no normalizer, it counts the active tokens of all devices.

    **Memory** a device: that of the verb for its tokens and its part of the vocabulary,
    and V·D over the size of vocab for a W that is gathered. A vocabulary or tokens that
    do not divide by the devices are padded in a copy of W, or of hidden; to save that
    one, pad W when it is made and pass vocab_size. A verb that needs all of W takes V·D
    for it.

    **Communication** over vocab: as in `logprobs`. W's gradient is summed over the
    tokens' mesh axes, in W's type; along W_fsdp W itself moves once forward, and
    its gradient once backward.

    Raises:
        TypeError: a verb that cannot be split, an axis that is not a name.
        ValueError: an axis that the mesh does not have, or that is used twice; a W_fsdp
            that does not split tokens too, or that does not divide D; axis_name given;
            and what the verb raises.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
    >>> logprobs = jaxmem.sharding.parallel(
    ...     jaxmem.logprobs, mesh, vocab="tensor", tokens="data"
    ... )
    >>> h, W, y = jnp.zeros((2, 8)), jnp.zeros((4, 8)), jnp.array([0, 3])
    >>> print(jax.jit(logprobs)(h, W, y))
    [-1.3862944 -1.3862944]

    Reference: splitting the vocabulary is due to Shoeybi et al., "Megatron-LM", 2019,
    arXiv:1909.08053, section 3.
    """
    signature = _signature(verb)
    plan = _plan(mesh, vocab, tokens, W_fsdp)

    @functools.wraps(verb)
    def run(*args, **options):
        call = signature.bind(*args, **options)
        call.apply_defaults()
        if "axis_name" not in signature.parameters:
            return _run_with_all_of_W(verb, plan, call)
        if call.arguments["axis_name"] is not None:
            raise ValueError(
                "axis_name must not be given to what jaxmem.sharding.parallel made, "
                "which passes its own vocab"
            )
        return _run(verb, plan, call)

    return run


_HEADS = ("", "reference_")  # what names of a head's arguments begin with


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which mesh axes split what; an empty tuple splits nothing."""

    mesh: Mesh | AbstractMesh
    vocab: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]  # of each axis of tokens, from the first one on
    W_fsdp: tuple[str, ...]

    @property
    def token_axes(self) -> tuple[str, ...]:
        return sum(self.tokens, ())

    def parts(self, axes: tuple[str, ...]) -> int:
        """How many parts the axes make."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A global array, what splits each of its axes, and what fills up uneven ones."""

    array: Any
    split: tuple[tuple[str, ...], ...]
    fill: Any = 0

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*(axes or None for axes in self.split))


def _run(verb, plan, call):
    operands, shape = _read(plan, call.arguments)
    of_tokens = _Operand(None, plan.tokens).spec
    is_loss = "normalizer" in call.arguments

    def on_device(arrays):
        given = call.arguments | arrays
        if "W" in given:
            given["W"] = _gathered(plan, given["W"], given["layout"])
        if is_loss and given["normalizer"] is None:
            given["normalizer"] = _count(plan, given["labels"], given["where"])
        of_device = inspect.BoundArguments(call.signature, given)
        made = verb(*of_device.args, **of_device.kwargs)
        return (_summed(plan, made[0]), made[1]) if is_loss else made

    made = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(jax.tree.map(lambda x: x.spec, operands),),
        out_specs=(PartitionSpec(), of_tokens) if is_loss else of_tokens,
    )(jax.tree.map(lambda x: _filled(plan, x), operands))
    if is_loss:
        return made[0], _cut(plan, made[1], shape)
    return _cut(plan, made, shape)


def _run_with_all_of_W(verb, plan, call):
    """Tokens split over all axes that split anything; W gathered along the others."""
    given = call.arguments
    hidden = checks.as_array("hidden", given["hidden"])
    checks.check_hidden(hidden)
    shape = hidden.shape[:-1]
    if shape:
        first, *rest = plan.tokens or ((),)
        wide = dataclasses.replace(plan, tokens=(first + plan.vocab, *rest))
    else:  # one token [D], of which every device has all
        wide = plan = dataclasses.replace(plan, vocab=())
    of_tokens = _check_axes(wide, "hidden", shape)
    operands, columns = _read_heads(plan, given, shape, of_tokens)
    operands |= _read_rows_and_ids(given, shape, of_tokens, min(columns.values()))

    def on_device(arrays):
        given = call.arguments | arrays
        for head, size in columns.items():
            given |= _whole(wide, given, head, size)
        of_device = inspect.BoundArguments(call.signature, given)
        return verb(*of_device.args, **of_device.kwargs)

    made = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(jax.tree.map(lambda x: x.spec, operands),),
        out_specs=_Operand(None, wide.tokens).spec,
    )(jax.tree.map(lambda x: _filled(plan, x), operands))
    return _cut(plan, made, shape)


def _read_heads(plan, given, shape, of_tokens):
    """One head's operands or both heads', and how many columns each has.

    given gets their layouts.
    """
    operands, columns = {}, {}
    for head in _HEADS:
        name = f"{head}hidden"
        if name in given:
            hidden = checks.as_array(name, given[name])
            checks.check_hidden(hidden, name)
            operands[name] = _Operand(hidden, of_tokens)
            operands |= _read_weights(plan, hidden, given, head)
            check_tokens(hidden.shape[:-1], shape)
            vocabulary = 0 if given[f"{head}layout"] == "vd" else 1
            columns[head] = operands[f"{head}W"].array.shape[vocabulary]
    return operands, columns


def _read_rows_and_ids(given, shape, of_tokens, columns):
    """What there is of each token besides hidden, for the verbs that need all of W."""
    vocab_size = checks.check_vocab_size(given["vocab_size"], columns)
    operands = _read_rows(given | {"vocab_size": vocab_size}, shape, of_tokens)
    where = arguments.read_where(given["where"], shape)
    if where is None:  # what fills tokens up costs nothing only where it is masked
        operands["where"] = _Operand(jnp.ones(shape, bool), of_tokens, False)
    for name in ("ids", "support_ids"):
        if name in given:
            ids = check_ids(name, given[name], where, shape, vocab_size)
            operands[name] = _Operand(ids, of_tokens, -1)
    if "support_ids" in given:
        labels = checks.as_visible_array("labels", given["labels"])
        ids = checks.as_visible_array("support_ids", given["support_ids"])
        check_support(labels, ids, where, shape)
    name = "reference_temperature"
    if given.get(name) is not None:
        operands |= _read_temperature(name, given[name], shape, of_tokens)
    return operands


def _whole(plan, given, head, size):
    """All of a head's W and bias, without what filled them up; typed as `_gathered`."""
    W, bias = given[f"{head}W"], given[f"{head}bias"]
    W, bias = _shards.vary((W, bias), frozenset(plan.token_axes))
    vocab, depth = (0, 1) if given[f"{head}layout"] == "vd" else (1, 0)
    if plan.W_fsdp:
        W = lax.all_gather(W, plan.W_fsdp, axis=depth, tiled=True)
    if plan.vocab:
        W = lax.all_gather(W, plan.vocab, axis=vocab, tiled=True)
        W = lax.slice_in_dim(W, 0, size, axis=vocab)
    if plan.vocab and bias is not None:
        bias = lax.all_gather(bias, plan.vocab, tiled=True)[:size]
    return {f"{head}W": W, f"{head}bias": bias}


def _gathered(plan, W, layout):
    """All of D. Typed first, so that gradients are scattered before they are summed."""
    W = _shards.vary(W, frozenset(plan.token_axes))
    if not plan.W_fsdp:
        return W
    return lax.all_gather(W, plan.W_fsdp, axis=1 if layout == "vd" else 0, tiled=True)


def _count(plan, labels, where):
    """Active tokens of all devices."""
    active = labels >= 0 if where is None else (labels >= 0) & where
    return _summed(plan, jnp.sum(active, dtype=jnp.int32))


def _summed(plan, x):
    return lax.psum(x, plan.token_axes) if plan.token_axes else x


def _read(plan, given) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Operands by argument, and the tokens' shape; all checked while still global.

    What is left in given is static, and made fit for the parts.
    """
    name = "hidden" if "hidden" in given else "logits"
    data = checks.as_array(name, given[name])
    checks.check_hidden(data, name)
    shape = data.shape[:-1]
    of_tokens = _check_axes(plan, name, shape)
    if name == "hidden":
        operands = {name: _Operand(data, of_tokens)}
        operands |= _read_weights(plan, data, given)
        columns = operands["W"].array.shape[0 if given["layout"] == "vd" else 1]
    else:
        operands = {name: _Operand(data, (*of_tokens, plan.vocab))}
        columns = data.shape[-1]
    given["vocab_size"] = checks.check_vocab_size(given["vocab_size"], columns)
    given["axis_name"] = plan.vocab or None
    return operands | _read_rows(given, shape, of_tokens), shape


def _check_axes(plan, name, shape):
    """What splits each axis of the tokens."""
    if len(plan.tokens) > len(shape):
        raise ValueError(
            f"tokens must split no more axes than {name} has of tokens, {len(shape)}, "
            f"got {len(plan.tokens)}"
        )
    return plan.tokens + ((),) * (len(shape) - len(plan.tokens))


def _read_weights(plan, hidden, given, head=""):
    """W and bias; their layout is settled, as a part of W may be square."""
    W = checks.as_array(f"{head}W", given[f"{head}W"])
    layout = checks.check_layout(hidden, W, given[f"{head}layout"], head)
    given[f"{head}layout"] = layout
    columns, depth = W.shape if layout == "vd" else W.shape[::-1]
    if depth % plan.parts(plan.W_fsdp):
        raise ValueError(
            f"W_fsdp must make parts of one size of {head}hidden's last axis "
            f"D={depth}, got {plan.parts(plan.W_fsdp)} parts"
        )
    split = plan.vocab, plan.W_fsdp
    operands = {f"{head}W": _Operand(W, split if layout == "vd" else split[::-1])}
    if given[name := f"{head}bias"] is not None:
        bias = checks.as_array(name, given[name])
        checks.check_bias(bias, columns, name)
        operands[name] = _Operand(bias, (plan.vocab,))
    return operands


def _read_rows(given, shape, of_tokens):
    """What there is of each token, and numbers that jit may have hidden."""
    operands, where = {}, given["where"]
    if where is not None:
        where = checks.as_visible_array("where", where)
        checks.check_where(where, shape)
    if "labels" in given:
        labels = checks.as_visible_array("labels", given["labels"])
        checks.check_labels(labels, where, shape, given["vocab_size"])
        labels = arguments.as_int32(labels, given["vocab_size"])
        operands["labels"] = _Operand(labels, of_tokens, -1)
    if where is not None:
        where = jnp.broadcast_to(jnp.asarray(where), shape)
        operands["where"] = _Operand(where, of_tokens, False)
    temperature = given["temperature"]
    operands |= _read_temperature("temperature", temperature, shape, of_tokens)
    if isinstance(given.get("normalizer"), jax.Array):
        operands["normalizer"] = _Operand(given["normalizer"], ())
    if "per_token" in given:
        arrays = _per_token(given["per_token"], shape)
        operands["per_token"] = tuple(_Operand(x, of_tokens) for x in arrays)
    return operands


def _read_temperature(name, value, shape, of_tokens):
    """An operand, or none for a number that jit has not hidden."""
    temperature = checks.as_visible_array(name, value)
    checks.check_temperature(temperature, shape, name)
    if not temperature.shape and not isinstance(temperature, jax.Array):
        return {}
    return {name: _Operand(temperature, of_tokens if temperature.shape else (), 1)}


def _per_token(values, shape):
    for i, value in enumerate(values):
        x = checks.as_array(f"per_token[{i}]", value)
        checks.check_per_token(f"per_token[{i}]", x, shape)
        yield x


def _filled(plan, operand):
    """The array with parts of one size along every axis, laid out as they are."""
    x = jnp.asarray(operand.array)
    missing = [
        -size % plan.parts(axes)
        for size, axes in zip(x.shape, operand.split, strict=False)
    ]
    if any(missing):
        missing += [0] * (x.ndim - len(missing))
        x = jnp.pad(x, [(0, n) for n in missing], constant_values=operand.fill)
    return _resharded(plan, x, operand.split)  # nothing else would move it


def _cut(plan, made, shape):
    """Results without what filled the tokens up."""

    def one(x):
        if x.shape[: len(shape)] == shape:
            return x
        return _resharded(plan, x, ())[tuple(map(slice, shape))]  # uneven: no type

    return jax.tree.map(one, made)


def _resharded(plan, x, split):
    """Split so along the axes that types speak of; the compiler sees to the others."""
    types = dict(zip(plan.mesh.axis_names, plan.mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in types.items() if kind == AxisType.Explicit}
    if not explicit:
        return x
    typed = tuple(tuple(a for a in axes if a in explicit) for axes in split)
    return jax.sharding.reshard(x, NamedSharding(plan.mesh, _Operand(x, typed).spec))


def _signature(verb):
    try:
        signature = inspect.signature(verb)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    names = signature.parameters
    has_data = {"hidden", "logits"} & names.keys()
    takes_shards = "axis_name" in names and has_data
    if not takes_shards and not {"hidden", "W", "where"} <= names.keys():
        raise TypeError(
            "verb must be a function of jaxmem's that takes axis_name, such as "
            "jaxmem.logprobs, or a functools.partial of one with arguments by name, "
            f"got {verb!r}"
        )
    return signature


def _plan(mesh, vocab, tokens, W_fsdp):
    """Names, all there and none used twice for the same array."""
    if tokens is None:
        tokens = ()
    elif not isinstance(tokens, PartitionSpec):
        tokens = (tokens,)
    of_tokens = tuple(_names(mesh, "tokens", axes) for axes in tokens)
    plan = _Plan(
        mesh, _names(mesh, "vocab", vocab), of_tokens, _names(mesh, "W_fsdp", W_fsdp)
    )
    for axis in (used := plan.vocab + plan.token_axes):
        if used.count(axis) > 1:
            raise ValueError(
                f"vocab and tokens must split along different mesh axes, got {axis!r} "
                "twice"
            )
    if len(set(plan.W_fsdp)) < len(plan.W_fsdp):
        raise ValueError(f"W_fsdp must name a mesh axis once, got {W_fsdp!r}")
    for axis in plan.W_fsdp:
        if axis not in plan.token_axes:
            raise ValueError(
                f"W_fsdp must name mesh axes that split tokens too, got {axis!r}, and "
                f"tokens={plan.token_axes}"
            )
    return plan


def _names(mesh, argument, axes) -> tuple[str, ...]:
    axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got "
            f"{axes!r}"
        )
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"{argument} must name axes of the mesh, {tuple(mesh.axis_names)}, got "
                f"{axis!r}"
            )
    return axes
