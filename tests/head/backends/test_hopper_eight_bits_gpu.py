"""A forward pass in 8 bits by kernels, on the chip: no bias, equal bits, its error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.maths import eight_bits
from tests.helpers.cases import Case

pytestmark = pytest.mark.gpu


def problem(n=600, d=320, v=5001):
    """With channels that 8 bits cannot hold beside the others."""
    h, W, y = Case(n, d, v, std=2.0).make()
    h[:, 3] *= 30
    W[:, 3] /= 30
    W[:, 5] *= 30
    h[:, 5] /= 30
    return jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16), y % 4900


@functools.partial(jax.jit, static_argnames=("layout", "forward"))
def gradients(h, W, y, key, layout, forward=None):
    """(loss, statistics), gradients by hidden and W."""
    options = {"implementation": "hopper", "chunk": 256, "where": y % 3 > 0}
    if forward:
        options |= {"gradient": jaxmem.Sample(64, forward), "key": key}

    def loss_fn(stats):
        told = stats._replace(is_argmax=stats.is_argmax.astype(jnp.float32))
        return -stats.logprob + 0.1 * stats.entropy, told._asdict()

    def loss(h, W):
        head = jaxmem.Head(W, vocab_size=4900, layout=layout)
        return jaxmem.token_loss(loss_fn, h, head, y, **options)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, W)


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_means_are_exact_and_errors_as_told(layout):
    h, W, y = problem()
    W = W if layout == "vd" else W.T
    (_, want), exact = gradients(h, W, y, jax.random.key(0), layout)
    draws, told, made, single = 64, [], [], []
    total = [0.0, 0.0]
    for i in range(draws):
        (_, found), slopes = gradients(h, W, y, jax.random.key(i), layout, "int8")
        told.append(np.asarray(found.pop(eight_bits.ERROR), np.float64))
        made.append({k: np.asarray(x, np.float64) for k, x in found.items()})
        slopes = [np.float64(x) for x in slopes]
        total = [a + b for a, b in zip(total, slopes, strict=True)]
        far = zip(slopes, exact, strict=True)
        single.append([np.linalg.norm(a - np.float64(b)) for a, b in far])
    for name in ("logprob", "entropy", "logsumexp", "sum_pi_squared"):
        errors = np.stack([x[name] for x in made]) - np.float64(want[name])
        deviation = errors.std(0)
        assert 1e-5 < np.sqrt(np.mean(deviation**2)) < 0.02
        mean = np.abs(errors.mean(0))
        rounding = 4e-3 if name in ("entropy", "sum_pi_squared") else 2e-4
        assert np.all(mean <= 6 * deviation / draws**0.5 + rounding), name
    active = np.asarray(y % 3 > 0)
    assert not np.stack(told)[:, ~active].any()
    errors = np.stack([x["logsumexp"] for x in made]) - np.float64(want["logsumexp"])
    ratio = np.sqrt(np.mean(np.square(told))) / np.sqrt(np.mean(errors**2))
    assert 0.7 < ratio < 2, ratio
    right = np.mean([x["is_argmax"] == np.float64(want["is_argmax"]) for x in made])
    assert right > 0.99
    single = np.sqrt(np.mean(np.square(single), 0))
    for mean, b, one in zip(total, exact, single, strict=True):
        error = np.linalg.norm(mean / draws - np.float64(b))
        rounding = 4e-3 * np.linalg.norm(np.float64(b))
        assert error < 1.3 * one / draws**0.5 + rounding, (error, one)
    again = gradients(h, W, y, jax.random.key(3), layout, "int8")
    twice = gradients(h, W, y, jax.random.key(3), layout, "int8")
    jax.tree.map(np.testing.assert_array_equal, again, twice)
