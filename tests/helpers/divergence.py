"""Divergences of two heads, in float64 and from materialised logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.head import reference
from tests.helpers import oracle
from tests.helpers.targets import KINDS, of_two_heads

N, D, D_REFERENCE, V, CHUNK = 37, 24, 10, 130, 16
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


def exact(verb, g, operands, **options):
    """The divergences in float64, and the policy's gradients derived by hand.

    Options of the reference default as documented.
    """
    h, W, h_ref, W_ref = operands
    scaling = {"softcap": None, "temperature": 1.0, "vocab_size": V}
    scaling |= {k: v for k, v in options.items() if k in (*scaling, "bias")}
    others = {k: v for k, v in scaling.items() if k != "bias"}
    others |= {
        k.removeprefix("teacher_"): v for k, v in options.items() if "teacher_" in k
    }
    policy = oracle.Logits.of(h, W, **scaling)
    teacher = oracle.Logits.of(h_ref, W_ref, **others)
    name, _, beta = verb.partition(" ")
    kind, beta = KINDS[name].__name__, float(beta or 0.5)
    values, pull = oracle.divergence(kind, policy.z, teacher.z, beta)
    return values, policy.gradients(pull(g))


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


def same_depth(std, std_reference, seed=0):
    return [*make(std, seed)[:2], *make(std_reference, seed + 1)[:2]]


def shapes(n, d, v, dtype=jnp.float32):
    head = jax.ShapeDtypeStruct((n, d), dtype), jax.ShapeDtypeStruct((v, d), dtype)
    return *head, *head


def of_reference(hidden, W, target, chunk):
    """The divergence from two arrays of float32 logits."""
    return reference.divergence(hidden, W, target)


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
    rough = of_two_heads(verb, jax.jit(of_reference))(*operands)
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
