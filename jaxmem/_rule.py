"""What verbs with loops of their own share: read a head, say what runs, differentiate.

Such a verb is a `Rule`: a forward and a backward loop over chunks of active tokens,
which see rows of logits that `token_stats` would have reduced too far.
"""

import functools
from collections.abc import Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxmem import _backends, _head, _report, _spec, _vjp
from jaxmem._spec import Layout, Spec
from jaxmem._xla import Head, Rows


class Rule(Hashable, Protocol):
    """Static facts of a call and its two loops; what is given is constant."""

    def forward(self, source: Head, rows, given) -> tuple[Any, dict]:
        """The result, and what the backward loop needs of each row, by name."""
        ...

    def backward(self, source: Head, rows, given, result, saved, g) -> Any:
        """Cotangent of the source for the result's cotangent g."""
        ...


def run(rule: Rule, source: Head, rows: tuple[Rows, ...], given) -> Any:
    """The rule's result, differentiable in source."""
    try:
        return _run(rule, source, rows, given)
    except TypeError as error:
        raise _spec.forward_mode(error) from error


@functools.partial(jax.jit, static_argnums=0)
def _run(rule, source, rows, given):
    return _call(rule, source, rows, given)


def _call(rule, source, rows, given):
    return _vjp._once(rule.forward)(source, rows, given)[0]


def _call_fwd(rule, source, rows, given):
    for one in rows:
        _vjp._refuse_temperature_gradient(one)
    source, rows, given = (_vjp._values(x) for x in (source, rows, given))
    result, saved = _vjp._once(rule.forward)(source, rows, given)
    saved = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in saved.items()}
    return result, (source, rows, given, result, saved)


def _call_bwd(rule, residuals, g):
    if isinstance(g, SymbolicZero):
        return jax.tree.map(jnp.zeros_like, residuals[0]), None, None
    return _vjp._once(rule.backward)(*residuals, g), None, None


_call = jax.custom_vjp(_call, nondiff_argnums=(0,))
_call.defvjp(_call_fwd, _call_bwd, symbolic_zeros=True)


def read_head(
    hidden, W, bias, layout: Layout | None, prefix: str = ""
) -> tuple[Head, Layout, tuple[int, ...]]:
    """The head with flat tokens, its layout, and the tokens' shape; all checked."""
    hidden = _spec.as_array(f"{prefix}hidden", hidden)
    W = _spec.as_array(f"{prefix}W", W)
    _spec.check_hidden(hidden, f"{prefix}hidden")
    layout = _spec.check_layout(hidden, W, layout, prefix)
    if bias is not None:
        bias = _spec.as_array(f"{prefix}bias", bias)
        _spec.check_bias(bias, columns_of(W, layout), f"{prefix}bias")
    shape, depth = hidden.shape[:-1], hidden.shape[-1]
    flat = jnp.reshape(hidden, (int(np.prod(shape)), depth))
    return Head(flat, W, bias), layout, shape


def columns_of(W, layout: Layout) -> int:
    """How many tokens W has, padding included."""
    return W.shape[0 if layout == "vd" else 1]


def read_rows(spec: Spec, shape: tuple[int, ...], where, temperature) -> Rows:
    """Rows without labels: active where nothing masks them."""
    return _head._rows(spec, shape, np.zeros(shape, np.int32), where, temperature)


def check_implementation(verb: str, implementation: str | None) -> None:
    """None or "xla"; a backend that exists but has no such verb says so."""
    _spec.check_implementation(implementation)
    _backends.check(implementation)
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f"implementation={implementation!r} has no {verb}: its kernels reduce one "
            "head's logits to the statistics of token_stats and keep no row of them; "
            "pass implementation=None"
        )


def record(verb, shapes, implementation, chunk: int, live_bytes: int) -> None:
    """Enters the call in every open `jaxmem.report()`."""
    why = "named by the caller" if implementation else f"the only one with {verb}"
    _report.record(_report.Call(verb, shapes, "xla", why, chunk, live_bytes))
