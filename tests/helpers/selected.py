"""Log-probabilities of selected ids and supports, in float64 and materialised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.helpers import oracle
from tests.helpers.described import described

N, D, V, K, CHUNK = 37, 24, 130, 6, 16


def make(std=1.0, seed=0, v=V):
    """hidden, W, labels, and K distinct ids a token, the label among them."""
    rng = np.random.default_rng(seed)
    h = rng.standard_normal((N, D), np.float32)
    W = rng.standard_normal((v, D), np.float32) * std / D**0.5
    ids = np.stack([rng.permutation(v)[:K] for _ in range(N)]).astype(np.int32)
    return h, W.astype(np.float32), ids[:, 2].copy(), ids


def scaled(xp, z, bias=0.0, softcap=None, temperature=1.0, vocab_size=V):
    z = z + bias
    z = z if softcap is None else softcap * xp.tanh(z / softcap)
    return (z / xp.reshape(temperature, (-1, 1)))[:, :vocab_size]


def exact(verb, g, operands, **options):
    """The result in float64, and the gradients of hidden, W and bias by hand."""
    h, W, y, ids = operands
    logits = oracle.Logits.of(h, W, **{"vocab_size": V} | options)
    if verb == "selected":
        values, pull = oracle.selected(logits.z, ids)
    else:
        values, pull = oracle.support(logits.z, y, ids)
    return values, logits.gradients(pull(g))


@functools.partial(jax.jit, static_argnames=("verb", "layout", "options", "chunk"))
def ours(operands, g, arrays, verb, layout="vd", options=(), chunk=CHUNK):
    """Value, and the gradients of hidden, W and bias, if any."""
    h, W, y, ids = operands

    def call(h, W, bias):
        W = W if layout == "vd" else W.T
        given = arrays | bias | {"layout": layout} | dict(options)
        if verb == "selected":
            return described(jaxmem.selected_logprobs)(h, W, ids, chunk, **given)
        return described(jaxmem.support_logprobs)(h, W, y, ids, chunk, **given)

    value, pull = jax.vjp(call, h, W, {k: v for k, v in arrays.items() if k == "bias"})
    return value, jax.tree.leaves(pull(g))


@functools.partial(jax.jit, static_argnames=("verb", "options"))
def materialised(operands, g, arrays, verb, options=()):
    """Log-probabilities from float32 logits [N, V], masked outside of the support."""
    h, W, y, ids = operands

    def call(h, W, bias):
        z = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
        z = scaled(jnp, z, **(arrays | bias | dict(options)))
        if verb == "selected":
            ln_p = jnp.take_along_axis(jax.nn.log_softmax(z), jnp.maximum(ids, 0), 1)
            return jnp.where(ids >= 0, ln_p, 0)
        inside = jnp.any(jnp.arange(z.shape[1]) == ids[:, :, None], axis=1)
        ln_p = jax.nn.log_softmax(jnp.where(inside, z, -1e30))
        return jnp.take_along_axis(ln_p, y[:, None], 1)[:, 0]

    value, pull = jax.vjp(call, h, W, {k: v for k, v in arrays.items() if k == "bias"})
    return value, jax.tree.leaves(pull(g))


def cotangents(verb, shape=(N, K)):
    g = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return g if verb == "selected" else g[:, 0]


OPTIONS = {
    "softcap": 5.0,
    "temperature": np.linspace(0.3, 3, N, dtype=np.float32),
    "bias": np.linspace(-2, 2, V, dtype=np.float32),
    "vocab_size": 100,
}


def total(verb, chunk, **options):
    def selected(h, W, y, ids):
        return described(jaxmem.selected_logprobs)(h, W, ids, chunk, **options).sum()

    def support(h, W, y, ids):
        return described(jaxmem.support_logprobs)(h, W, y, ids, chunk, **options).sum()

    return {"selected": selected, "support": support}[verb]


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array
