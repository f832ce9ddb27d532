"""What a traced program costs, on all devices: products, bytes by name, on hosts."""

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.remat.policies import CUDNN_FORWARD

_HOST = jax.memory.Space.Host
# cuDNN's kernels of attention: backward makes 5 products for forward's 2. They run at
# about 0.6 of the rate of large products, so that one of their operations counts more.
_ATTENTION = {
    CUDNN_FORWARD: 1 / 0.6,
    "dot_product_attention_bwd_wrapper": 2.5 / 0.6,
}


def devices(compiled: jax.stages.Compiled) -> int:
    """How many a program runs on."""
    places = jax.tree.leaves(compiled.input_shardings)
    return max((len(place.device_set) for place in places), default=1)


def equations(
    jaxpr: Any, turns: Callable[[Any], int] = lambda loop: 1
) -> Iterator[tuple[Any, int]]:
    """(equation, how often it runs); of a loop without a known end, what `turns` says.

    That is one turn, unless given: equation of a `while` -> how many.
    """
    for equation in jaxpr.eqns:
        yield equation, 1
        is_loop = equation.primitive.name == "while"
        times = turns(equation) if is_loop else _times(equation)
        for inner in _inner(equation):
            for found, n in equations(inner, turns):
                yield found, times * n


def _times(equation):
    """How often the jaxprs of an equation run."""
    name, params = equation.primitive.name, equation.params
    if name == "shard_map":  # on each device, of whose part the jaxpr is
        shape = params["mesh"].shape
        return math.prod(shape[axis] for axis in params["newly_manual_axes"])
    return params["length"] if name == "scan" else 1


def _inner(equation):
    """The jaxprs among an equation's parameters."""
    if equation.primitive.name == "pallas_call":
        return  # its own is of one block
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def host_bytes(fn: Callable | jax.stages.Traced, *args) -> int:
    """Bytes that the host holds at most, by a function's jaxpr: nothing is compiled.

    All devices' count together. What a loop sends there counts as often as the loop
    stacks it: micro-batches whose gradients are taken in turn share one room.

    Args:
        fn: to be traced with the arguments; or what `jax.jit(...).trace(...)` gave.
    """
    if isinstance(fn, jax.stages.Traced):
        return bytes_on_host(fn.jaxpr.jaxpr)
    return bytes_on_host(jax.make_jaxpr(fn)(*args).jaxpr)


def bytes_on_host(jaxpr: Any) -> int:
    """The same, of a jaxpr."""

    def made(equation):
        if equation.primitive.name == "device_put":
            yield "", sum(_nbytes(x) for x in _outputs(equation) if _is_there(x))

    return _held(jaxpr, made, _is_there)[""]


def bytes_to_host(jaxpr: Any) -> int:
    """Bytes that are sent to the host, however often."""
    return sum(
        times * sum(_nbytes(x) for x in _outputs(eqn) if _is_there(x))
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name == "device_put"
    )


def bytes_by_name(jaxpr: Any) -> dict[str, int]:
    """Of what is named, in all blocks that are alive together; cuDNN's attention is
    "attn_lse".
    """

    def made(equation):
        kind = equation.primitive.name
        if kind in ("name", CUDNN_FORWARD):
            label = equation.params["name"] if kind == "name" else "attn_lse"
            yield label, sum(map(_nbytes, _outputs(equation)))

    return dict(_held(jaxpr, made, lambda aval: True))


def _held(jaxpr, made, counts) -> collections.Counter[str]:
    """Bytes by key of what equations make, and of loops, what they stack of it.

    made: equation -> (key, bytes) pairs. counts: whether a loop's result may hold some.
    """
    total: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        total.update(dict(made(eqn)))
        for inner in _inner(eqn):
            for key, once in _held(inner, made, counts).items():
                held = once * _times(eqn)
                if eqn.primitive.name == "scan":
                    room = sum(_nbytes(x) for x in _stacks(eqn, inner) if counts(x))
                    held = max(once, min(held, room))
                total[key] += held
    return total


def _stacks(scan, body):
    """Results that the turns of a scan stack; the others are carried, of one shape."""
    pairs = zip(_outputs(scan), (x.aval for x in body.outvars), strict=True)
    return [whole for whole, part in pairs if whole.shape != part.shape]


def products(jaxpr: Any) -> float:
    """Operations in products of matrices, and in attention's kernels."""
    return sum(times * operations(eqn) for eqn, times in equations(jaxpr))


def operations(equation: Any) -> float:
    """The same, of one equation that runs once."""
    name = equation.primitive.name
    if name == "dot_general":
        lhs, (out,) = equation.invars[0].aval, _outputs(equation)
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * out.size * math.prod(lhs.shape[axis] for axis in contracted)
    if name == "pallas_call":
        estimate = equation.params.get("cost_estimate")
        return estimate.flops if estimate else 0
    if name in _ATTENTION:
        query, key = (x.aval for x in equation.invars[:2])
        causal = "CAUSAL" in str(equation.params.get("mask_type"))
        pairs = query.size * key.shape[1] / (2 if causal else 1)
        return 4 * pairs * _ATTENTION[name]
    return 0


def _outputs(equation):
    return [x.aval for x in equation.outvars]


def _nbytes(aval):
    return aval.size * aval.dtype.itemsize


def _is_there(aval):
    return aval.memory_space == _HOST
