"""What a traced program costs: products, bytes by name, bytes to the host."""

import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem._remat_policy import CUDNN_FORWARD

_HOST = jax.memory.Space.Host
# cuDNN's kernels of attention: backward makes 5 products for forward's 2. They run at
# about 0.6 of the rate of large products, so that one of their operations counts more.
_ATTENTION = {
    CUDNN_FORWARD: 1 / 0.6,
    "dot_product_attention_bwd_wrapper": 2.5 / 0.6,
}


def equations(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """(equation, how often it runs); of a loop without a known end, one turn."""
    for equation in jaxpr.eqns:
        yield equation, 1
        name = equation.primitive.name
        if name == "pallas_call":
            continue  # its own jaxpr is of one block
        times = equation.params["length"] if name == "scan" else 1
        for inner in _inner(equation.params.values()):
            for found, n in equations(inner):
                yield found, times * n


def _inner(params):
    """The jaxprs among an equation's parameters."""
    for value in params:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def host_bytes(fn: Callable, *args) -> int:
    """Bytes that one call sends to the host, by its jaxpr: nothing is compiled or run.

    Loops count as often as they run; of a loop without a known end, one turn.
    """
    return bytes_to_host(jax.make_jaxpr(fn)(*args).jaxpr)


def bytes_to_host(jaxpr: Any) -> int:
    """The same, of what is traced already."""
    return sum(
        times * sum(_nbytes(x) for x in _outputs(eqn) if x.memory_space == _HOST)
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name == "device_put"
    )


def bytes_by_name(jaxpr: Any) -> dict[str, int]:
    """Of what is named, summed over all blocks; cuDNN's attention is "attn_lse"."""
    made: dict[str, int] = collections.Counter()
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "name":
            made[eqn.params["name"]] += times * sum(map(_nbytes, _outputs(eqn)))
        elif eqn.primitive.name == CUDNN_FORWARD:
            made["attn_lse"] += times * sum(map(_nbytes, _outputs(eqn)))
    return dict(made)


def products(jaxpr: Any) -> float:
    """Operations in products of matrices, and in attention's kernels."""
    return sum(times * _operations(eqn) for eqn, times in equations(jaxpr))


def _operations(equation):
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
