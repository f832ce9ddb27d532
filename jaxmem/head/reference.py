"""Every function of the head in plain jax.numpy: the formulas, and nothing else.

Read this file first. The functions have the names, arguments and results of `jaxmem`'s,
without the options that change cost only (chunk, gradient, implementation, …) and
without checks of arguments. They store all logits; those of `jaxmem` return the same
values and gradients, up to rounding, without them. `options` are where and temperature.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import rel_entr  # p ln(p/q), and 0 where p is 0

from jaxmem.head.maths import recorded
from jaxmem.head.maths.column_sampling import draws, token_keys
from jaxmem.head.maths.head import as_head
from jaxmem.head.maths.row_stats import TokenStats
from jaxmem.head.verbs.column_targets import Columns, Drawn
from jaxmem.head.verbs.kinds import JSD, ForwardKL, ReverseKL
from jaxmem.head.verbs.teacher import Teacher
from jaxmem.head.verbs.topk import TopK


def logits_of(hidden, W, temperature=1.0):
    """Logits of hidden states, [..., vocab_size].

    z = softcap·tanh((h Wᵀ + bias) / softcap) / temperature
    """
    head, depth = as_head(W), hidden.shape[-1]
    is_vd = head.W.shape[-1] == depth if head.layout is None else head.layout == "vd"
    matrix = (head.W.T if is_vd else head.W).astype(hidden.dtype)
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    z = jnp.matmul(hidden, matrix, preferred_element_type=dtype)
    z = z if head.bias is None else z + head.bias.astype(dtype)
    return scale(z, head.softcap, head.vocab_size, temperature)


def scale(z, softcap, vocab_size, temperature):
    """Logits with softcap and temperature, without columns of padding."""
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return z[..., :vocab_size] / jnp.expand_dims(temperature, -1)


def read(hidden, W, labels=0, *, where=True, temperature=1.0):
    """(z, active) of all tokens; active is True unless a label is < 0 or masked."""
    labels = jnp.broadcast_to(labels, hidden.shape[:-1])
    active = (labels >= 0) & where
    hidden = jnp.where(active[..., None], hidden, 0)  # it may hold NaN
    return logits_of(hidden, W, temperature), active


def statistics(z, active, labels):
    """Statistics of p = softmax(z), 0 where not active.

    ln p[label], -Σ p ln p, ln Σ e^z, Σ p², z[label] ≥ max z
    """
    ln_p, label = jax.nn.log_softmax(z), jnp.expand_dims(labels, -1)
    p = jnp.exp(ln_p)
    stats = TokenStats(
        logprob=at(ln_p, label)[..., 0],
        entropy=-jnp.sum(p * ln_p, -1),
        logsumexp=jax.nn.logsumexp(z, -1),
        sum_pi_squared=jnp.sum(p * p, -1),
        is_argmax=at(z, label)[..., 0] >= jnp.max(z, -1),
    )
    return jax.tree.map(lambda x: jnp.where(active, x, jnp.zeros_like(x)), stats)


def at(x, ids):
    """Entries of x [..., V] at ids [..., K]; any where an id is negative."""
    return jnp.take_along_axis(x, jnp.maximum(ids, 0), -1)


def token_stats(hidden, W, labels, **options):
    """`statistics` of each token."""
    return statistics(*read(hidden, W, labels, **options), labels)


def logprobs(hidden, W, labels, **options):
    """Log-probability of each label, ln p[label]."""
    return token_stats(hidden, W, labels, **options).logprob


def entropy(hidden, W, **options):
    """Entropy of each token's softmax, -Σ p ln p."""
    return token_stats(hidden, W, jnp.zeros(hidden.shape[:-1], int), **options).entropy


def token_stats_from_logits(
    logits, labels, *, where=True, temperature=1.0, softcap=None, vocab_size=None
):
    """`statistics` of the caller's logits."""
    active = (labels >= 0) & where
    z = jnp.where(active[..., None], logits, 0)
    z = z.astype(jnp.promote_types(z.dtype, jnp.float32))
    return statistics(scale(z, softcap, vocab_size, temperature), active, labels)


def logprobs_from_logits(logits, labels, **options):
    """Log-probability of each label, from the caller's logits."""
    return token_stats_from_logits(logits, labels, **options).logprob


def token_loss(loss_fn, hidden, W, labels, *per_token, normalizer=None, **options):
    """Loss and metrics, `mean_loss` of the statistics and per-token arrays."""
    z, active = read(hidden, W, labels, **options)
    stats = statistics(z, active, labels)
    return mean_loss(loss_fn, active, normalizer, stats, *per_token)


def divergence_loss(
    loss_fn, hidden, W, labels, target, *per_token, normalizer=None,
    statistics_temperature=None, **options,
):  # fmt: skip
    """Loss and metrics, `mean_loss` of statistics, divergence and per-token arrays."""
    _, active = read(hidden, W, labels, **options)
    D = divergence(hidden, W, target, **options | {"where": active})
    if statistics_temperature is not None:
        options |= {"temperature": statistics_temperature}
    stats = token_stats(hidden, W, labels, **options)
    return mean_loss(loss_fn, active, normalizer, stats, D, *per_token)


def mean_loss(loss_fn, active, normalizer, *operands):
    """Sum of loss_fn(*operands) over active tokens / normalizer, and its metrics."""

    def rows(x):
        return jnp.reshape(x, (active.size, *x.shape[active.ndim :]))

    result = loss_fn(*jax.tree.map(rows, operands))
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    losses, metrics = jax.tree.map(
        lambda x: jnp.where(active, jnp.reshape(x, active.shape), 0), (losses, metrics)
    )
    count = jnp.sum(active) if normalizer is None else jnp.asarray(normalizer)
    return jnp.sum(losses) / jnp.where(count == 0, 1, count), lax.stop_gradient(metrics)


def divergence(hidden, W, target, **options):
    """Divergence of softmax(z) from what is known of the target; 0 where masked."""
    z, active = read(hidden, W, **options)
    temperature = options.get("temperature", 1.0)
    D = divergence_from(target.of, target.kind, jax.nn.log_softmax(z), temperature)
    return jnp.where(active, D, 0)


@functools.singledispatch
def divergence_from(of, kind, ln_p, temperature) -> jax.Array:
    """Divergence of p [..., V] from a teacher, from known columns, or from draws."""
    raise TypeError(type(of))


@divergence_from.register
def _(of: Teacher, kind, ln_p, temperature):
    temperature = temperature if of.temperature is None else of.temperature
    q = jax.nn.softmax(logits_of(of.hidden, of.head, temperature))
    return compare(kind, jnp.exp(ln_p), lax.stop_gradient(q))


@divergence_from.register
def _(of: Columns, kind, ln_p, temperature):
    same = of.ids[..., None] == of.ids[..., None, :]
    known = (of.ids >= 0) & (jnp.argmax(same, -1) == jnp.arange(of.ids.shape[-1]))
    p = jnp.where(known, jnp.exp(at(ln_p, of.ids)), 0)
    q = jnp.where(known, jnp.exp(lax.stop_gradient(of.logprobs)), 0)
    if of.tail:  # all other columns together are one more outcome
        p, q = (jnp.append(x, 1 - x.sum(-1, keepdims=True), axis=-1) for x in (p, q))
    p_sum, q_sum = (x.sum(-1, keepdims=True) for x in (p, q))
    p, q = p / jnp.where(p_sum > 0, p_sum, 1), q / jnp.where(q_sum > 0, q_sum, 1)
    return compare(kind, p, q)


@divergence_from.register
def _(of: Drawn, kind, ln_p, temperature):
    present = of.ids >= 0
    ln_p = jnp.where(present, at(ln_p, of.ids), 0)
    return -jnp.sum(ln_p, -1) / jnp.maximum(jnp.sum(present, -1), 1)


@functools.singledispatch
def compare(kind, p, q) -> jax.Array:
    """Divergence of a kind between distributions p and q, [..., K] each.

    KL(p ‖ q) = Σ p ln(p/q);   JSD: β KL(q ‖ m) + (1-β) KL(p ‖ m), m = β q + (1-β) p
    """
    raise TypeError(type(kind))


compare.register(ReverseKL, lambda kind, p, q: jnp.sum(rel_entr(p, q), -1))
compare.register(ForwardKL, lambda kind, p, q: jnp.sum(rel_entr(q, p), -1))


@compare.register
def _(kind: JSD, p, q):
    m, beta = kind.beta * q + (1 - kind.beta) * p, kind.beta
    return jnp.sum(beta * rel_entr(q, m) + (1 - beta) * rel_entr(p, m), -1)


def topk(hidden, W, k, **options):
    """The k largest log-probabilities in order, and ids; 0 and -1 where masked."""
    z, active = read(hidden, W, **options)
    ln_p, ids = lax.top_k(jax.nn.log_softmax(z), k)
    active = active[..., None]
    return TopK(jnp.where(active, ln_p, 0), jnp.where(active, ids, -1))


def sample_ids(hidden, W, n, key, **options):
    """Draws of n ids a token: the first at which Σ p exceeds a uniform number."""
    z, active = read(hidden, W, **options)
    keys = token_keys(key, active.shape).ravel()
    bits = jax.vmap(lambda key: jax.random.bits(key, (n,)))(keys)
    uniform = jnp.reshape(bits / 2.0**32, (*active.shape, n, 1))
    sums = jnp.cumsum(jax.nn.softmax(z), -1)[..., None, :]
    return jnp.where(active[..., None], jnp.sum(sums <= uniform, -1), -1)


def record_entries(hidden, W, labels, k, key, **options):
    """Logits of k columns a token, drawn by min(1, k p), and statistics."""
    z, active = read(hidden, W, labels, **options)
    keys = token_keys(key, active.shape).ravel()
    rows = jnp.reshape(z, (active.size, -1)), jnp.where(active, labels, -1).ravel()
    entries = recorded.record(*rows, k, draws(keys))
    return jax.tree.map(lambda x: x.reshape(*active.shape, *x.shape[1:]), entries)


def selected_logprobs(hidden, W, ids, **options):
    """Log-probabilities of K ids a token; 0 where an id is negative."""
    z, active = read(hidden, W, **options)
    exists = active[..., None] & (ids >= 0)
    return jnp.where(exists, at(jax.nn.log_softmax(z), ids), 0)


def support_logprobs(
    hidden, W, labels, support_ids, *, offsets=None, max_ids=None, **options
):
    """Log-probability of each label among the ids of its support.

    z[label] - ln Σ_(v in support) e^z_v
    """
    z, active = read(hidden, W, labels, **options)
    if offsets is None:
        offsets = jnp.arange(labels.size + 1) * support_ids.shape[-1]
    ids = jnp.ravel(support_ids)
    row = jnp.searchsorted(offsets, jnp.arange(ids.size), side="right") - 1
    row = jnp.where((row < 0) | (ids < 0), labels.size, row)
    inside = jnp.zeros((labels.size, z.shape[-1]), bool).at[row, ids].set(True)
    ln_p = jax.nn.log_softmax(jnp.where(inside.reshape(z.shape), z, -jnp.inf))
    return jnp.where(active, at(ln_p, labels[..., None])[..., 0], 0)
