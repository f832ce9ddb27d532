"""Costs of a traced program over all devices: operations, named bytes, host bytes."""

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.remat.policies import CUDNN_FORWARD

_HOST = jax.memory.Space.Host
# cuDNN's attention kernels: the backward one computes 5 products, the forward one 2.
# They reach about 0.6 of the rate of large products, so their operations are weighted.
_ATTENTION = {
    CUDNN_FORWARD: 1 / 0.6,
    "dot_product_attention_bwd_wrapper": 2.5 / 0.6,
}


def devices(compiled: jax.stages.Compiled) -> int:
    """The number of devices that a program runs on."""
    shardings = jax.tree.leaves(compiled.input_shardings)
    return max((len(sharding.device_set) for sharding in shardings), default=1)


def equations(
    jaxpr: Any, turns: Callable[[Any], int] = lambda loop: 1
) -> Iterator[tuple[Any, int]]:
    """Yield (equation, number of executions) for all equations of a jaxpr.

    `turns` maps a `while` equation to its number of iterations.
    """
    for equation in jaxpr.eqns:
        yield equation, 1
        is_loop = equation.primitive.name == "while"
        times = turns(equation) if is_loop else _count_executions(equation)
        for inner in _inner_jaxprs(equation):
            for inner_equation, n in equations(inner, turns):
                yield inner_equation, times * n


def _count_executions(equation):
    """The number of executions of an equation's inner jaxprs."""
    name, params = equation.primitive.name, equation.params
    if name == "shard_map":  # the jaxpr runs on each device, on its shard
        shape = params["mesh"].shape
        return math.prod(shape[axis] for axis in params["newly_manual_axes"])
    return params["length"] if name == "scan" else 1


def _inner_jaxprs(equation):
    """The jaxprs among an equation's parameters."""
    if equation.primitive.name == "pallas_call":
        return  # its jaxpr describes one block only
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def host_bytes(fn: Callable | jax.stages.Traced, *args) -> int:
    """Peak bytes on the host, estimated from a function's jaxpr without compiling it.

    The bytes of all devices are added up. What a scan offloads is counted once per
    iteration only if the scan stacks it: micro-batches whose gradients are computed one
    after the other reuse the same memory.

    Args:
        fn: a function to trace with the arguments, or the result of
            `jax.jit(...).trace(...)`.
        args: the arguments, if fn is a function.
    """
    if isinstance(fn, jax.stages.Traced):
        return bytes_on_host(fn.jaxpr.jaxpr)
    return bytes_on_host(jax.make_jaxpr(fn)(*args).jaxpr)


def bytes_on_host(jaxpr: Any) -> int:
    """Peak bytes on the host of a jaxpr, as in `host_bytes`."""

    def held_by(equation):
        if equation.primitive.name == "device_put":
            yield "", sum(nbytes(x) for x in _output_avals(equation) if _is_on_host(x))

    return _count_held(jaxpr, held_by, _is_on_host)[""]


def bytes_to_host(jaxpr: Any) -> int:
    """Bytes that are sent to the host, counting repeated transfers."""
    return sum(
        times * sum(nbytes(x) for x in _output_avals(eqn) if _is_on_host(x))
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name == "device_put"
    )


def bytes_by_name(jaxpr: Any) -> dict[str, int]:
    """Bytes per checkpoint name, of all blocks that are alive at the same time.

    Outputs of cuDNN's attention count as "attn_lse".
    """

    def held_by(equation):
        kind = equation.primitive.name
        if kind in ("name", CUDNN_FORWARD):
            label = equation.params["name"] if kind == "name" else "attn_lse"
            yield label, sum(map(nbytes, _output_avals(equation)))

    return dict(_count_held(jaxpr, held_by, lambda aval: True))


def _count_held(jaxpr, held_by, counts) -> collections.Counter[str]:
    """Bytes by key of what equations compute and, for loops, of what these stack.

    `held_by` maps an equation to (key, bytes) pairs, and `counts` says whether a result
    of a loop, by its aval, may hold some of these bytes.
    """
    total: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        total.update(dict(held_by(eqn)))
        for inner in _inner_jaxprs(eqn):
            for key, once in _count_held(inner, held_by, counts).items():
                held = once * _count_executions(eqn)
                if eqn.primitive.name == "scan":
                    room = sum(
                        nbytes(x) for x in _stacked_results(eqn, inner) if counts(x)
                    )
                    held = max(once, min(held, room))
                total[key] += held
    return total


def _stacked_results(scan, body):
    """Results that a scan stacks over its iterations; the others are carried."""
    pairs = zip(_output_avals(scan), (x.aval for x in body.outvars), strict=True)
    return [whole for whole, part in pairs if whole.shape != part.shape]


def products(jaxpr: Any) -> float:
    """Operations in matrix products and in attention kernels."""
    return sum(times * operations(eqn) for eqn, times in equations(jaxpr))


def operations(equation: Any) -> float:
    """Operations of one equation that runs once, as `products` counts them."""
    name = equation.primitive.name
    if name == "dot_general":
        lhs, (out,) = equation.invars[0].aval, _output_avals(equation)
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


def _output_avals(equation):
    return [x.aval for x in equation.outvars]


def nbytes(aval: Any) -> int:
    """Bytes of an array."""
    return aval.size * aval.dtype.itemsize


def _is_on_host(aval):
    return aval.memory_space == _HOST
