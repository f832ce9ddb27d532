"""The one custom derivative, by which every public function's `Rule` is applied.

A `Rule` computes a result and its derivative; `run` makes the result differentiable,
and raises a clear error for second derivatives, forward mode and a gradient of the
temperature. Rules that loop over chunks of logits themselves are `LoopRule`s.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from jaxmem.head.backends.protocol import Backend, ColumnLoops, columns_of
from jaxmem.head.maths import checks, partition
from jaxmem.head.maths.backend_operands import Factors, Ragged, TokenRows
from jaxmem.head.maths.eight_bits import EightBits
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.traced_loss import LossOperands


@dataclasses.dataclass(frozen=True)
class Rule:
    """Static facts of a call, with its result and derivative.

    `trained` are the operands with a derivative; the first is the head or the logits.
    `fixed` are constants; the first are the tokens' `TokenRows`.
    """

    spec: Spec

    def forward(self, trained, fixed) -> Any:
        """The result, if no derivative is requested."""
        raise NotImplementedError

    def forward_and_save(self, trained, fixed) -> tuple[Any, Any]:
        """The result, and the residuals that `backward` needs.

        Frozen or not, they are one tree, and hold the same operands; see `empty`.
        """
        raise NotImplementedError

    def backward(self, residuals, cotangents) -> Any:
        """Cotangents of trained; cotangents of the result may be `SymbolicZero`."""
        raise NotImplementedError

    def frozen(self) -> "Rule":
        """The rule where W and bias are constants."""
        spec = dataclasses.replace(self.spec, frozen_head=True, gradient_blocks=1)
        return dataclasses.replace(self, spec=spec)

    def refuse(self, fixed) -> None:
        """Raise for constants that are differentiated: `perturbed` leaves."""
        for rows in jax.tree.leaves(fixed, is_leaf=lambda x: isinstance(x, TokenRows)):
            temperature = getattr(rows, "temperature", None)
            if temperature is not None and temperature.perturbed:
                raise NotImplementedError(
                    "jaxmem: temperature is not differentiable here; wrap it in "
                    "jax.lax.stop_gradient, or divide hidden (and bias) by it and pass "
                    "1"
                )


def run(rule: Rule, trained, fixed) -> Any:
    """The rule's result, differentiable with respect to trained."""
    try:
        return _compiled(rule, trained, fixed)
    except TypeError as error:
        raise checks.forward_mode(error) from error


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def jaxmem_call(rule, trained, fixed):
    """One traced function for every rule; profiles show its name."""
    return rule.forward(trained, fixed)


def _save_residuals(rule, trained, fixed):
    if any(map(_PERTURBED, jax.tree.leaves(fixed))):
        rule.refuse(fixed)
    weights = list(map(_PERTURBED, jax.tree.leaves(trained[0][1:])))
    frozen = bool(weights) and not any(weights)
    trained, fixed = jax.tree.map(_VALUE, (trained, fixed))
    rule = rule.frozen() if frozen else rule
    result, residuals = rule.forward_and_save(trained, fixed)
    # Known from a shape while the backward pass is traced.
    return result, (jnp.zeros((int(frozen), 0)), residuals)


def _pull_back(rule, residuals, cotangents):
    rule = rule.frozen() if residuals[0].shape[0] else rule
    return rule.backward(residuals[1], cotangents), None


jaxmem_call.defvjp(_save_residuals, _pull_back, symbolic_zeros=True)
_compiled = jax.jit(jaxmem_call, static_argnums=0)
_PERTURBED, _VALUE = map(operator.attrgetter, ("perturbed", "value"))


def empty() -> jax.Array:
    """An array in place of a residual that another way of differentiation has.

    One traced call may be differentiated in several ways, and jax takes the residuals
    of all of them to be one tree, with the same operands in it.
    """
    return jnp.zeros(0)


@dataclasses.dataclass(frozen=True)
class LoopRule(Rule):
    """A rule of two loops of a backend over chunks of this device's active tokens.

    trained is `(source,)`; fixed is `(rows, constants)`, where rows is a tuple of
    `TokenRows`, and the constants are heads, `Ragged` lists of ids, or arrays whose
    first axis is tokens.
    """

    backend: Backend

    @property
    def loops(self) -> ColumnLoops:
        """The backend's loops over rows of logits."""
        return columns_of(self.backend)

    def forward_loop(self, source: Factors, rows, constants) -> tuple[Any, dict]:
        """The result, and per-row residuals of the backward loop by name."""
        raise NotImplementedError

    def saving_loop(self, source: Factors, rows, constants) -> tuple[Any, dict]:
        """`forward_loop`, where a derivative is requested."""
        return self.forward_loop(source, rows, constants)

    def backward_loop(self, source: Factors, rows, constants, result, saved, g) -> Any:
        """Cotangent of the source, for the result's cotangent g."""
        raise NotImplementedError

    def forward(self, trained, fixed):
        return self._run_loop(trained, fixed, saving=False)[0]

    def forward_and_save(self, trained, fixed):
        result, saved = self._run_loop(trained, fixed, saving=True)
        saved = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in saved.items()}
        return result, (*trained, *fixed, result, saved)

    def backward(self, residuals, cotangents):
        if isinstance(cotangents, SymbolicZero):
            return (jax.tree.map(jnp.zeros_like, residuals[0]),)
        cotangents = sum_over_shards(self.spec, cotangents)

        def loop(spec, *operands):
            return dataclasses.replace(self, spec=spec).backward_loop(*operands)

        return (on_tokens(self.spec, loop, *residuals, cotangents),)

    def _run_loop(self, trained, fixed, saving):
        def loop(spec, *operands):
            rule = dataclasses.replace(self, spec=spec)
            return (rule.saving_loop if saving else rule.forward_loop)(*operands)

        return on_tokens(self.spec, loop, *trained, *fixed)


def on_tokens(spec: Spec, loop: Callable, *operands: Any) -> Any:
    """`loop(spec, *operands)`, not differentiable any further.

    If XLA may partition the program, each device has its own share of the tokens. Under
    vmap one example runs after another, so that `chunk` still bounds the logits that
    are alive. The first array of the operands begins with an axis of tokens.
    """
    run = functools.partial(loop, spec)
    if spec.token_parallel:
        fitted = functools.partial(_run_fitted, loop, spec)
        run = partition.by_tokens(fitted, of_tokens)
    guarded = jax.custom_jvp(sequential_vmap(run))
    guarded.defjvp(_refuse_second_order)
    return guarded(*operands)


def of_tokens(tree) -> Any:
    """A tree of booleans: True for arrays whose first axis is tokens.

    This holds for all but scalars, a head's W and bias, and its copy in 8 bits, the ids
    of ragged lists, and what a loss closes over.
    """

    def flags(x) -> Any:
        kind = type(x)
        return kind(*_OF_TOKENS[kind]) if kind in _OF_TOKENS else x.ndim > 0

    return jax.tree.map(flags, tree, is_leaf=lambda x: type(x) in _OF_TOKENS)


_OF_TOKENS: dict[type, Any] = {
    Factors: (True, False, False),
    Ragged: (True, True, False),
    EightBits: (False, False),
    LossOperands: (True, False),
}


def _run_fitted(loop, spec, *operands):
    """The loop's result, with a chunk of at most this device's number of tokens."""
    n_tokens = jax.tree.leaves(operands)[0].shape[0]
    chunk = checks.check_chunk(spec.chunk, n_tokens, spec.columns)
    return loop(dataclasses.replace(spec, chunk=chunk), *operands)


def sum_over_shards(spec: Spec, cotangents) -> Any:
    """Cotangents of results that jax types as device-varying, summed over shards."""
    if not (spec.shards and spec.shards.own_results):
        return cotangents
    axes = spec.shards.own_results
    return jax.tree.map(
        lambda g: g if isinstance(g, SymbolicZero) else lax.psum(g, axes), cotangents
    )


def scaled(dhidden: jax.Array, active: jax.Array, g: Any) -> Factors:
    """Cotangent of a frozen head, whose derivative by hidden is known, [N, D].

    It is scaled by g [N], or a `SymbolicZero`; 0 where g is 0 or a row is inactive,
    even for NaN.
    """
    if isinstance(g, SymbolicZero):
        return Factors(jnp.zeros_like(dhidden), None, None)
    g = jnp.where(active, g, 0)[:, None]
    product = jnp.where(g == 0, 0, g * dhidden.astype(g.dtype))
    return Factors(product.astype(dhidden.dtype), None, None)


def _refuse_second_order(primals, tangents):
    raise NotImplementedError(
        "jaxmem: second derivatives of the head are not supported; for a "
        "Hessian-vector product apply jax.nn.log_softmax to materialised logits"
    )
