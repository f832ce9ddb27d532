"""The derivative of the head: one custom_vjp that recomputes logits chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from jaxmem import _backends, _stats
from jaxmem._spec import Spec

# What the backward pass needs of a row besides the logits that it recomputes.
_SAVED = ("max", "log_sum")


@functools.partial(jax.jit, static_argnums=(0, 1))
def token_stats(spec: Spec, backend: str, source, rows) -> dict:
    """The outputs that spec names, by name, [N]; differentiable in source."""
    return _token_stats(spec, backend, source, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_stats(spec, backend, source, rows):
    return _forward(spec, backend, source, rows, spec.outputs)


def _token_stats_fwd(spec, backend, source, rows):
    _refuse_temperature_gradient(rows)
    source, rows = _values(source), _values(rows)
    needed = [*spec.outputs, *(name for name in _SAVED if name not in spec.outputs)]
    made = _forward(spec, backend, source, rows, tuple(needed))
    made = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in made.items()}
    return {k: made[k] for k in spec.outputs}, (source, rows, made)


def _token_stats_bwd(spec, backend, residuals, cotangents):
    source, rows, made = residuals
    saved = _stats.Outputs(*(made.get(name) for name in _stats.Outputs._fields))
    asked = _stats.Cotangents(
        *(_unless_zero(cotangents.get(name)) for name in _stats.Cotangents._fields)
    )
    if all(g is None for g in asked):
        return jax.tree.map(jnp.zeros_like, source), None
    return _backward(spec, backend, source, rows, saved, asked), None


_token_stats.defvjp(_token_stats_fwd, _token_stats_bwd, symbolic_zeros=True)


def _forward(spec, backend, source, rows, names):
    forward = _backends.KNOWN[backend].forward
    return _once(lambda s, r: forward(spec, s, r, names))(source, rows)


def _backward(spec, backend, source, rows, saved, cotangents):
    backward = functools.partial(_backends.KNOWN[backend].backward, spec)
    return _once(backward)(source, rows, saved, cotangents)


def _once(run):
    """run, differentiable no further; under vmap, one example after another.

    In sequence, because `chunk` must go on bounding the logits that are alive.
    """
    once = jax.custom_jvp(sequential_vmap(run))
    once.defjvp(_refuse_second_order)
    return once


def _refuse_second_order(primals, tangents):
    raise NotImplementedError(
        "jaxmem: second derivatives of the head are not supported; for a "
        "Hessian-vector product apply jax.nn.log_softmax to materialised logits"
    )


def _refuse_temperature_gradient(rows):
    if rows.temperature is not None and rows.temperature.perturbed:
        raise NotImplementedError(
            "jaxmem: temperature is not differentiable here; wrap it in "
            "jax.lax.stop_gradient, or divide hidden (and bias) by it and pass 1"
        )


def _values(tree):
    return jax.tree.map(lambda x: x.value, tree)


def _unless_zero(cotangent):
    return None if isinstance(cotangent, SymbolicZero) else cotangent
