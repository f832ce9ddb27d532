"""Divergences of two heads, in float64 and from materialised logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.targets import of_two_heads
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_as_good

N, D, D_REFERENCE, V, CHUNK = 37, 24, 10, 130, 16
# The derivative subtracts a mean over the row, which is rounded as statistics are.
GRADIENT_EPSILON = EPSILON | {"float32": STATS_EPSILON}
VERBS = {x: of_two_heads(x) for x in ("reverse_kl", "forward_kl", "jsd", "jsd 0.1")}


def make(std=1.0, seed=0, n=N, d=D, d_reference=D_REFERENCE, v=V):
    """hidden, W of two independent heads whose logits have this standard deviation."""
    rng = np.random.default_rng(seed)
    heads = []
    for depth in (d, d_reference):
        h = rng.standard_normal((n, depth), np.float32)
        W = rng.standard_normal((v, depth), np.float32) * std / depth**0.5
        heads += [h, W.astype(np.float32)]
    return heads


def beta_of(verb):
    return float(verb.removeprefix("jsd") or 0.5)


def textbook(xp, verb, ln_p, ln_q):
    """Σ p (ln p - ln q) and the like, with the rounding of the type."""
    p, q = xp.exp(ln_p), xp.exp(ln_q)
    if verb == "reverse_kl":
        return (p * (ln_p - ln_q)).sum(-1)
    if verb == "forward_kl":
        return (q * (ln_q - ln_p)).sum(-1)
    beta = beta_of(verb)
    ln_m = xp.log(beta * q + (1 - beta) * p)
    of_q, of_p = (q * (ln_q - ln_m)).sum(-1), (p * (ln_p - ln_m)).sum(-1)
    return beta * of_q + (1 - beta) * of_p


def scaled(xp, z, bias, softcap, temperature):
    z = z + bias
    z = z if softcap is None else softcap * xp.tanh(z / softcap)
    return z / temperature


def both_scaled(xp, z, y, bias=0.0, softcap=None, temperature=1.0, **options):
    """Logits of both heads, the reference's options defaulting as documented."""
    of_reference = (
        options.get("teacher_bias", 0.0),
        options.get("teacher_softcap", softcap),
        options.get("teacher_temperature", temperature),
    )
    v = options.get("vocab_size", V)
    z = scaled(xp, z, bias, softcap, temperature)[:, :v]
    return z, scaled(xp, y, *of_reference)[:, :v]


def exact(verb, g, operands, **options):
    """The divergences in float64, and the policy's gradients derived by hand."""
    h, W, h_ref, W_ref = (np.asarray(x).astype(np.float64) for x in operands)
    z, y = both_scaled(np, h @ W.T, h_ref @ W_ref.T, **options)
    ln_p, ln_q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (z, y))
    p, q = np.exp(ln_p), np.exp(ln_q)
    if verb == "reverse_kl":
        slope = ln_p - ln_q
    elif verb == "forward_kl":
        slope = -q / p
    else:
        beta = beta_of(verb)
        slope = (1 - beta) * (ln_p - np.log(beta * q + (1 - beta) * p))
    temperature, softcap = options.get("temperature", 1.0), options.get("softcap")
    du = g[:, None] * p * (slope - (p * slope).sum(1, keepdims=True)) / temperature
    if softcap is not None:
        du = du * (1 - (z * temperature / softcap) ** 2)
    du = np.pad(du, ((0, 0), (0, len(W) - du.shape[1])))
    return textbook(np, verb, ln_p, ln_q), (du @ W, du.T @ h, du.sum(0))


@functools.partial(jax.jit, static_argnames=("verb", "layout", "options", "frozen"))
def ours(operands, g, arrays, verb, layout="vd", options=(), frozen=False):
    """Value, and the gradients of hidden, W and bias, if any."""
    _, _, h_ref, W_ref = operands
    layouts = {"layout": layout, "teacher_layout": layout}

    def call(h, W, bias):
        W, bias = jax.lax.stop_gradient((W, bias)) if frozen else (W, bias)
        W, other = (W, W_ref) if layout == "vd" else (W.T, W_ref.T)
        given = arrays | bias | layouts | dict(options)
        return of_two_heads(verb)(h, W, h_ref, other, CHUNK, **given)

    bias = {k: v for k, v in arrays.items() if k == "bias"}
    value, pull = jax.vjp(call, *operands[:2], bias)
    return value, jax.tree.leaves(pull(g))


@functools.partial(jax.jit, static_argnames=("verb", "options"))
def materialised(operands, g, arrays, verb, options=()):
    """The divergence from two float32 arrays of logits [N, V]."""
    matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

    def call(h, W, bias):
        logits = matmul(h, W.T), matmul(operands[2], operands[3].T)
        z, y = both_scaled(jnp, *logits, **(arrays | bias | dict(options)))
        return textbook(jnp, verb, jax.nn.log_softmax(z), jax.nn.log_softmax(y))

    bias = {k: v for k, v in arrays.items() if k == "bias"}
    value, pull = jax.vjp(call, *operands[:2], bias)
    return value, jax.tree.leaves(pull(g))


def check(verb, operands, dtype="float32", layout="vd", **options):
    """Value and gradients against float64, no worse than the materialised path's."""
    operands = [jnp.asarray(x).astype(dtype) for x in operands]
    g = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    numbers = tuple((k, v) for k, v in options.items() if k not in arrays)
    made, gradients = ours(operands, g, arrays, verb, layout, numbers)
    rough, rough_gradients = materialised(operands, g, arrays, verb, numbers)
    want, exact_gradients = exact(verb, g, operands, **options)
    assert made.dtype == jnp.float32
    assert (np.asarray(made) >= 0).all()
    assert_as_good(made, rough, want, STATS_EPSILON, verb)
    for name, got, near, need in zip(
        ("dhidden", "dW", "dbias"), gradients, rough_gradients, exact_gradients,
        strict=False,
    ):  # fmt: skip
        assert_as_good(got, near, need, GRADIENT_EPSILON[got.dtype.name], name)


def same_depth(std, std_reference, seed=0):
    return [*make(std, seed)[:2], *make(std_reference, seed + 1)[:2]]


def shapes(n, d, v, dtype=jnp.float32):
    head = jax.ShapeDtypeStruct((n, d), dtype), jax.ShapeDtypeStruct((v, d), dtype)
    return *head, *head


def check_nearly_equal_heads(verb, step):
    """A divergence of 1e-5 or 1e-7, where the textbook's sum loses itself."""
    h, W, noise, _ = same_depth(0.5, 0.5)
    operands = [h, W, h + np.float32(step) * noise, W]
    g = np.ones(N, np.float32)
    want, exact_gradients = exact(verb, g, operands)
    assert 1e-8 < want.mean() < 1e-4
    value, gradients = ours(operands, g, {}, verb)
    # What remains is the rounding of the logits themselves, epsilon / step.
    tolerance = 2e-6 / step
    np.testing.assert_allclose(value, want, rtol=tolerance)
    rough, _ = materialised([jnp.asarray(x) for x in operands], g, {}, verb)
    assert np.abs(rough / want - 1).max() > 5 * tolerance
    for got, need in zip(gradients, exact_gradients, strict=False):
        np.testing.assert_allclose(got, need, atol=tolerance * np.abs(need).max())


def check_equal_heads(verb):
    """The divergence of a head from itself, and its gradients, are exactly 0."""
    head = same_depth(3.0, 3.0)[:2]
    value, gradients = ours([*head, *head], np.ones(N, np.float32), {}, verb)
    assert not value.any() and not any(x.any() for x in gradients)


def check_confident_heads(verb):
    """p and q round to 1 at the label: all that differs is far below epsilon."""
    h = np.eye(D, dtype=np.float32)[np.arange(N) % D]
    W = np.zeros((V, D), np.float32)
    np.fill_diagonal(W, 25.0)
    operands, g = [h, W, h, W * np.float32(0.9)], np.ones(N, np.float32)
    want, (dh, _, _) = exact(verb, g, operands)
    assert 0 < want.max() < 1e-7
    value, (got, _) = ours(operands, g, {}, verb)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(got, dh, atol=1e-5 * np.abs(dh).max())
