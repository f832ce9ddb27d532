"""The derivatives of the head: two custom_vjps.

`token_stats` cannot know what its outputs are for, so it makes each chunk's logits once
more for the derivative; unless the head is frozen and the output one, whose derivative
by hidden then awaits its scale. `token_loss` knows, and makes all from the same logits.

Over a vocabulary in shards, the rules are those of the whole: parts of statistics are
merged before anything follows from them, and where jax takes a result for each shard's
own, the results' cotangents are summed over the shards.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from jaxmem.backends import choose as _backends
from jaxmem.core import (
    operands as _operands,
    partition as _spread,
    shards as _shards,
    spec as _spec,
    stats as _stats,
)
from jaxmem.core.spec import Spec
from jaxmem.core.stats import TokenStats
from jaxmem.functional import traced_loss as _loss
from jaxmem.functional.traced_loss import Loss, Values

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
    if spec.keeps_gradient:
        keep = functools.partial(_keep, spec, backend)
        keep = _once(_by_tokens(spec, keep, (_of_tokens(source), True), True))
        made, kept = keep(source, rows)
        return made, (checkpoint_name(kept, "jaxmem_dhidden"), rows.active)
    needed = [*spec.outputs, *(name for name in _SAVED if name not in spec.outputs)]
    made, kept = _forward_and_keep(spec, backend, source, rows, tuple(needed))
    made = {k: checkpoint_name(v, f"jaxmem_{k}") for k, v in made.items()}
    return {k: made[k] for k in spec.outputs}, (source, rows, made, kept)


def _token_stats_bwd(spec, backend, residuals, cotangents):
    if spec.keeps_gradient:
        kept, active = residuals
        (g,) = _of_all_shards(spec, cotangents).values()
        return _scaled(kept, active, g), None
    source, rows, made, kept = residuals
    cotangents = _of_all_shards(spec, cotangents)
    saved = _stats.Outputs(*(made.get(name) for name in _stats.Outputs._fields))
    asked = _stats.Cotangents(
        *(_unless_zero(cotangents.get(name)) for name in _stats.Cotangents._fields)
    )
    if all(g is None for g in asked):
        return jax.tree.map(jnp.zeros_like, source), None
    dsource = _backward(spec, backend, source, rows, saved, asked, kept)
    return _operands.trained(spec, dsource), None


_token_stats.defvjp(_token_stats_fwd, _token_stats_bwd, symbolic_zeros=True)


def _keep(spec, backend, source, rows):
    """The one output, and its derivative by hidden, [N, D], in hidden's type."""
    spec, n_rows = _fitted(spec, rows), rows.labels.shape[0]
    (name,) = spec.outputs

    def of_chunk(row_ids, outputs):
        ones = (row_ids < n_rows).astype(spec.stats_dtype)
        g = dict.fromkeys(_stats.Cotangents._fields) | {name: ones}
        return {name: getattr(outputs, name)}, _stats.Cotangents(**g)

    made = {name: jnp.zeros(n_rows, spec.stats_dtype)}
    one_pass = _backends.KNOWN[backend].one_pass
    made, dsource = one_pass(spec, source, rows, of_chunk, made)
    return made, dsource.hidden


def _scaled(kept, active, g):
    """Cotangent of a frozen head; 0 where g is, or nothing is active, even for NaN."""
    if isinstance(g, SymbolicZero):
        return _operands.Head(jnp.zeros_like(kept), None, None)
    g = jnp.where(active, g, 0)[:, None]
    dhidden = jnp.where(g == 0, 0, g * kept.astype(g.dtype))
    return _operands.Head(dhidden.astype(kept.dtype), None, None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def token_loss(
    spec: Spec, backend: str, loss: Loss, source, rows, operands, count
) -> tuple[jax.Array, dict]:
    """Sum of the active rows' losses, divided by count; and metrics [N] by name.

    Differentiable in source, the per-token operands and count; metrics are constants.
    """
    return _token_loss(spec, backend, loss, source, rows, operands, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _token_loss(spec, backend, loss, source, rows, operands, count):
    stats = _forward(spec, backend, source, rows, TokenStats._fields)
    run = functools.partial(_values_of_rows, spec, loss)
    given = True, True, _loss.Operands(True, False)  # pyright: ignore
    run = _once(_by_tokens(spec, run, given, True))
    values = run(stats, rows, operands)
    return jnp.sum(values.loss) / count, values.metrics


def _token_loss_fwd(spec, backend, loss, source, rows, operands, count):
    _refuse_temperature_gradient(rows)
    _refuse_closed_gradient(loss, operands)
    source, rows, operands = _values(source), _values(rows), _values(operands)
    run, count = functools.partial(_one_pass, spec, backend, loss), count.value
    of_source = _of_tokens(source)
    given = of_source, True, _loss.Operands(True, False), False  # pyright: ignore
    run = _once(_by_tokens(spec, run, given, (True, of_source)))
    values, dsource = run(source, rows, operands, count)
    dsource = _operands.trained(spec, dsource)
    # The cotangents' types, of what is still in the sums'.
    types = jax.tree.map(
        lambda x: jnp.zeros(0, x.dtype), _operands.trained(spec, source)
    )
    made = jnp.sum(values.loss) / count
    return (made, values.metrics), (dsource, types, values.per_token, made, count)


def _token_loss_bwd(spec, backend, loss, residuals, cotangents):
    dsource, types, dper_token, made, count = residuals
    g, _ = cotangents
    if isinstance(g, SymbolicZero):
        zero = jax.tree.map(
            lambda x, like: jnp.zeros_like(x, like.dtype), dsource, types
        )
        dper_token, dcount = jax.tree.map(jnp.zeros_like, (dper_token, count))
        return zero, None, _loss.Operands(dper_token, None), dcount

    def scaled(by, x, like):
        wide = np.promote_types(by.dtype, x.dtype)
        return (by.astype(wide) * x.astype(wide)).astype(like.dtype)

    of_rows = functools.partial(scaled, g / count)
    g_head = _of_all_shards(spec, g)
    g_head = g_head if _divides_early(spec) else g_head / count
    of_head = functools.partial(scaled, g_head)
    dsource = jax.tree.map(of_head, dsource, types)
    doperands = _loss.Operands(jax.tree.map(of_rows, dper_token, dper_token), None)
    return dsource, None, doperands, -g * made / count


_token_loss.defvjp(_token_loss_fwd, _token_loss_bwd, symbolic_zeros=True)


def _values_of_rows(spec, loss, stats, rows, operands) -> Values:
    """The loss and its metrics from statistics [N], for as many as it was traced."""
    n_rows = rows.labels.shape[0]

    def chunk(row_ids, made):
        of_rows = TokenStats(
            *(_operands.take(stats[k], row_ids) for k in TokenStats._fields)
        )
        values = _loss.evaluate(loss, row_ids, of_rows, operands, n_rows)
        return _operands.put_all(made, row_ids, values)

    made = _loss.nothing(loss, spec, operands, n_rows, pull=False)
    made = _shards.vary(made, spec.varying)
    return _operands.for_active_chunks(loss.n_rows, rows.active, chunk, made)


def _divides_early(spec):
    """Whether cotangents are divided by the count before they meet the logits.

    No scale is left for the gradients then; but float16 would lose small derivatives.
    """
    return spec.compute_dtype != jnp.float16


def _one_pass(spec, backend, loss, source, rows, operands, count):
    spec, n_rows = _fitted(spec, rows), rows.labels.shape[0]

    def of_chunk(row_ids, outputs):
        stats = TokenStats(*(getattr(outputs, k) for k in TokenStats._fields))
        values, g = _loss.differentiate(loss, row_ids, stats, operands, n_rows)
        if _divides_early(spec):
            g = jax.tree.map(lambda x: x / count, g)
        return values, g

    made = _loss.nothing(loss, spec, operands, n_rows, pull=True)
    one_pass = _backends.KNOWN[backend].one_pass
    made, dsource = one_pass(spec, source, rows, of_chunk, made)
    if spec.spread and _divides_early(spec):  # half the bytes to sum
        dsource = jax.tree.map(
            lambda x, like: x.astype(like.dtype),
            dsource,
            _operands.trained(spec, source),
        )
    return made, dsource


def _forward(spec, backend, source, rows, names):
    forward = _backends.KNOWN[backend].forward
    if spec.shards:
        forward = functools.partial(_merged, backend)
    run = _by_tokens(
        spec,
        lambda s, r: forward(_fitted(spec, r), s, r, names),
        (_of_tokens(source), True),
        True,
    )
    return _once(run)(source, rows)


def _merged(backend, spec, source, rows, names):
    """`forward` from what each shard knows."""
    part = _backends.KNOWN[backend].statistics(spec, source, rows)
    return _operands.outputs(spec, rows, part, names)


def _of_all_shards(spec, cotangents):
    """Cotangents of results that jax takes for each shard's own, summed over them."""
    if not (spec.shards and spec.shards.own_results):
        return cotangents
    return jax.tree.map(
        lambda g: (
            g if isinstance(g, SymbolicZero) else lax.psum(g, spec.shards.own_results)
        ),
        cotangents,
    )


def _forward_and_keep(spec, backend, source, rows, names):
    """The outputs, and what saves the backward pass some logits, or nothing."""
    if not spec.residual_rows:
        return _forward(spec, backend, source, rows, names), ()
    keep = _backends.KNOWN[backend].forward_and_keep
    made, kept = _once(lambda s, r: keep(spec, s, r, names))(source, rows)
    return made, jax.tree.map(lambda x: checkpoint_name(x, "jaxmem_exps"), kept)


def _backward(spec, backend, source, rows, saved, cotangents, kept):
    backward = _backends.KNOWN[backend].backward
    if kept:
        backward = functools.partial(backward, spec)
        return _once(backward)(source, rows, saved, cotangents, kept)
    of_source = _of_tokens(source)
    run = _by_tokens(
        spec,
        lambda s, r, *other: backward(_fitted(spec, r), s, r, *other),
        (of_source, True, True, True),
        of_source,
    )
    return _once(run)(source, rows, saved, cotangents)


def _of_tokens(source):
    """Of what a source is, and its cotangent: which arrays are of tokens."""
    if isinstance(source, _operands.Logits):
        return source._replace(logits=True)
    return _operands.Head(True, False, False)  # pyright: ignore


def _fitted(spec, rows):
    """With no larger a chunk than there are rows here."""
    return dataclasses.replace(
        spec, chunk=_spec.check_chunk(spec.chunk, rows.labels.shape[0], spec.columns)
    )


def _by_tokens(spec, run, given, made):
    """run as it is, or such that several devices share its tokens out."""
    return _spread.by_tokens(run, given, made) if spec.spread else run


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


def _refuse_closed_gradient(loss, operands):
    for matters, x in zip(loss.closed, operands.closed, strict=True):
        if matters and x.perturbed:
            kind = f"{x.value.dtype}{list(x.value.shape)}"
            raise NotImplementedError(
                f"jaxmem: loss_fn closes over an array, {kind}, that is being "
                "differentiated; pass it as a per-token argument (broadcast to labels' "
                "shape), or wrap it in jax.lax.stop_gradient"
            )


def _values(tree):
    return jax.tree.map(lambda x: x.value, tree)


def _unless_zero(cotangent):
    return None if isinstance(cotangent, SymbolicZero) else cotangent
