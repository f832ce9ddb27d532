"""What verbs with loops of their own share: read a head, say what runs, differentiate.

Such a verb is a `Rule`: a forward and a backward loop over chunks of active tokens,
which see rows of logits that `token_stats` would have reduced too far.
"""

import dataclasses
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
    """Static facts of a call and its two loops; a dataclass.

    What is given is constant: heads, and arrays of tokens.
    """

    @property
    def spec(self) -> Spec:
        """Its `chunk` is cut to the rows that a device has."""
        ...

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
    return _forward(rule, source, rows, given)[0]


def _call_fwd(rule, source, rows, given):
    for one in rows:
        _vjp._refuse_temperature_gradient(one)
    source, rows, given = (_vjp._values(x) for x in (source, rows, given))
    result, saved = _forward(rule, source, rows, given)
    saved = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in saved.items()}
    return result, (source, rows, given, result, saved)


def _call_bwd(rule, residuals, g):
    if isinstance(g, SymbolicZero):
        return jax.tree.map(jnp.zeros_like, residuals[0]), None, None
    of_tokens = _of_tokens((*residuals, g))
    run = _vjp._by_tokens(
        rule.spec,
        lambda source, rows, *other: _fitted(rule, rows).backward(source, rows, *other),
        of_tokens,
        of_tokens[0],
    )
    return _vjp._once(run)(*residuals, g), None, None


def _forward(rule, source, rows, given):
    run = _vjp._by_tokens(
        rule.spec,
        lambda source, rows, given: _fitted(rule, rows).forward(source, rows, given),
        _of_tokens((source, rows, given)),
        True,
    )
    return _vjp._once(run)(source, rows, given)


def _fitted(rule, rows):
    spec = _vjp._fitted(rule.spec, rows[0])
    return dataclasses.replace(rule, spec=spec)  # pyright: ignore[reportArgumentType]


def _of_tokens(tree):
    """Every array but a head's weights."""
    return jax.tree.map(
        lambda x: _vjp._of_tokens(x) if isinstance(x, Head) else True,
        tree,
        is_leaf=lambda x: isinstance(x, Head),
    )


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
