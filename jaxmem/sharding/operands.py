"""Reads the arguments of a verb as global arrays: checks, specs and padding."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.head.maths import checks, column_sampling, gradients, recorded
from jaxmem.head.maths.backend_operands import Ragged
from jaxmem.head.maths.head import Head, as_head
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.head.verbs import arguments
from jaxmem.head.verbs.support import read_supports
from jaxmem.head.verbs.token_ids import check_ids
from jaxmem.sharding.mesh_axes import MeshAxes


@dataclasses.dataclass(frozen=True)
class Operand:
    """A global array, the mesh axes that shard each of its axes, its padding value.

    Axes are padded to a multiple of what `multiples` says, 1 if it is empty.
    """

    array: Any
    split: tuple[tuple[str, ...], ...]
    fill: Any = 0
    multiples: tuple[int, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the array."""
        return PartitionSpec(*(axes or None for axes in self.split))


def _read_supports(values, where, tokens, of_tokens):
    """The supports; ragged ones as (ids, starts and counts), of which ids are whole."""
    supports = read_supports(
        values["labels"], values["support_ids"], values["offsets"], values["max_ids"],
        where, tokens,
    )  # fmt: skip
    if not isinstance(supports, Ragged):
        return {"support_ids": Operand(supports, of_tokens, -1)}
    starts, counts = (
        jnp.reshape(x, tokens[0]) for x in (supports.starts, supports.counts)
    )
    of_each = Operand(starts, of_tokens), Operand(counts, of_tokens)
    return {"support_ids": Operand(supports.ids, ()), "offsets": of_each}


@dataclasses.dataclass(frozen=True)
class Places:
    """The mesh and the tokens by which a target's operands are placed."""

    plan: MeshAxes
    where: Any  # the checked mask
    tokens: tuple[int, ...]  # their shape
    vocab_size: int  # of the student
    split: tuple[tuple[str, ...], ...]  # of the tokens' axes

    def of_tokens(self, array, fill):
        """Place an array whose first axes are the tokens', padded by `fill`."""
        return Operand(array, self.split, fill)

    def number(self, name, value):
        """Place a temperature that is an array; return a number as it is."""
        if value is None:
            return None
        operands = _read_temperature(name, value, self.tokens, self.split)
        return operands.get(name, value)

    def head(self, hidden, head, owner):
        """(head of hidden states, placed; the number of its columns)."""
        return _read_head(self.plan, hidden, head, owner, None)


def read(plan, values, split) -> dict[str, Any]:
    """A tree of `Operand` and numbers by argument name, checked as global arrays.

    Arguments that remain in `values` are static, and adapted. `split` has the
    mesh axes that shard each axis of the tokens.
    """
    name = "hidden" if "hidden" in values else "logits"
    data = checks.as_array(name, values[name])
    shape = data.shape[:-1]
    if name == "hidden":
        groups = values.get("vocab_groups")
        head, columns = _read_head(plan, data, values["W"], "", groups)
        vocab_size = checks.check_vocab_size(head.vocab_size, columns)
        head = dataclasses.replace(head, vocab_size=vocab_size)
        operands = {name: Operand(data, split), "W": head}
    else:
        operands = {name: Operand(data, (*split, plan.vocab))}
        vocab_size = checks.check_vocab_size(values["vocab_size"], data.shape[-1])
        values["vocab_size"] = vocab_size
    operands |= _read_rows(values, shape, split, vocab_size)
    operands |= _read_key(values, shape, split, vocab_size)
    operands |= _read_recorded(values.get("gradient"), shape, split)
    if "target" in values:
        where = checks.read_where(values["where"], shape)
        target, places = values["target"], Places(plan, where, shape, vocab_size, split)
        placed = target.of.placed(places)
        operands["target"] = dataclasses.replace(target, of=placed)
    return operands


def check_axes(plan, name, shape):
    """The mesh axes that shard each axis of the tokens."""
    if len(plan.tokens) > len(shape):
        raise ValueError(
            f"tokens must split no more axes than {name} has of tokens, {len(shape)}, "
            f"got {len(plan.tokens)}"
        )
    return plan.tokens + ((),) * (len(shape) - len(plan.tokens))


def _read_head(plan, hidden, head, owner, vocab_groups) -> tuple[Head, int]:
    """A head of operands, and its columns.

    The layout is resolved here, because a shard of W may be square.
    """
    head = as_head(head)
    W = checks.as_array(f"{owner}W", head.W)
    layout = checks.check_layout(hidden, W, head.layout, owner)
    columns, depth = W.shape if layout == "vd" else W.shape[::-1]
    if depth % plan.parts(plan.W_fsdp):
        raise ValueError(
            f"W_fsdp must make parts of one size of {owner}hidden's last axis "
            f"D={depth}, got {plan.parts(plan.W_fsdp)} parts"
        )
    split, parts = (plan.vocab, plan.W_fsdp), plan.parts(plan.vocab)
    groups = checks.check_vocab_groups(vocab_groups, 0, parts) or 1
    in_order = slice(None, None, 1 if layout == "vd" else -1)
    of_W = Operand(W, split[in_order], multiples=(groups, 1)[in_order])
    bias = head.bias
    if bias is not None:
        bias = checks.as_array(f"{owner}bias", bias)
        checks.check_bias(bias, columns, f"{owner}bias")
        bias = Operand(bias, (plan.vocab,), multiples=(groups,))
    return dataclasses.replace(head, W=of_W, bias=bias, layout=layout), columns


def _read_rows(values, shape, of_tokens, vocab_size):
    """The per-token operands, and numbers that may be traced."""
    operands, where = {}, checks.read_where(values["where"], shape)
    if "labels" in values:
        labels = checks.as_visible_array("labels", values["labels"])
        checks.check_labels(labels, where, shape, vocab_size)
        labels = arguments.as_int32(labels, vocab_size)
        operands["labels"] = Operand(labels, of_tokens, -1)
    if where is not None:
        where = jnp.broadcast_to(jnp.asarray(where), shape)
        operands["where"] = Operand(where, of_tokens, False)
    for name in ("temperature", "statistics_temperature"):
        if values.get(name) is not None:
            operands |= _read_temperature(name, values[name], shape, of_tokens)
    if isinstance(values.get("normalizer"), jax.Array):
        operands["normalizer"] = Operand(values["normalizer"], ())
    if "support_ids" in values:
        operands |= _read_supports(values, where, (shape, vocab_size), of_tokens)
    if "ids" in values:
        ids = check_ids("ids", values["ids"], where, shape, vocab_size)
        operands["ids"] = Operand(ids, of_tokens, -1)
    if "per_token" in values:
        arrays = _per_token(values["per_token"], shape)
        operands["per_token"] = tuple(Operand(x, of_tokens) for x in arrays)
    return operands


def _read_key(values, shape, of_tokens, vocab_size):
    """Data of one key for each token, so that devices draw what one device would."""
    if "gradient" in values:
        gradients.facts(values["gradient"], vocab_size)
        values["key"] = column_sampling.check_key(
            values["key"], values["gradient"], shape
        )
    elif "key" in values:
        values["key"] = column_sampling.check_keys(values["key"], shape)
    if values.get("key") is None:
        return {}
    keys = column_sampling.token_keys(values["key"], shape)
    return {"key": Operand(jax.random.key_data(keys), of_tokens)}


def _read_recorded(gradient, shape, of_tokens) -> dict[str, Any]:
    """Recorded entries, split as tokens are; their columns are of all shards."""
    if not isinstance(gradient, gradients.Recorded):
        return {}
    entries = recorded.check(gradient.entries, shape)
    fills = recorded.EMPTY, *(0,) * (len(entries) - 1)
    placed = (
        Operand(x, of_tokens, fill) for x, fill in zip(entries, fills, strict=True)
    )
    return {"gradient": gradients.Recorded(RecordedEntries(*placed))}


def _read_temperature(name, value, shape, of_tokens):
    """An operand, or none for a Python number."""
    temperature = checks.as_visible_array(name, value)
    checks.check_temperature(temperature, shape, name)
    if not temperature.shape and not isinstance(temperature, jax.Array):
        return {}
    return {name: Operand(temperature, of_tokens if temperature.shape else (), 1)}


def _per_token(values, shape):
    """Yields the per-token arguments, checked."""
    for i, value in enumerate(values):
        x = checks.as_array(f"per_token[{i}]", value)
        checks.check_per_token(f"per_token[{i}]", x, shape)
        yield x


def pad(plan, operand):
    """The array, padded so that every axis is divisible, with its sharding."""
    x = jnp.asarray(operand.array)
    multiples = operand.multiples or (1,) * x.ndim
    missing = [
        -size % math.lcm(plan.parts(axes), multiple)
        for size, axes, multiple in zip(x.shape, operand.split, multiples, strict=False)
    ]
    if any(missing):
        missing += [0] * (x.ndim - len(missing))
        x = jnp.pad(x, [(0, n) for n in missing], constant_values=operand.fill)
    return _resharded(plan, x, operand.split)  # explicit axes need an explicit reshard


def unpad(plan, results, shape):
    """The results without the padding of tokens."""

    def unpad_array(x):
        if x.shape[: len(shape)] == shape:
            return x
        return _resharded(plan, x, ())[tuple(map(slice, shape))]  # uneven has no type

    return jax.tree.map(unpad_array, results)


def _resharded(plan, x, split):
    """Reshard x along explicit axes; the compiler handles the others."""
    types = dict(zip(plan.mesh.axis_names, plan.mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in types.items() if kind == AxisType.Explicit}
    if not explicit:
        return x
    typed = tuple(tuple(a for a in axes if a in explicit) for axes in split)
    return jax.sharding.reshard(x, NamedSharding(plan.mesh, Operand(x, typed).spec))
