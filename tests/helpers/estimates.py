"""Gradients by Sample(k): their mean over keys, and what is exact in them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxmem
from jaxmem import Sample
from tests.helpers import crossing
from tests.helpers.crossing import SAMPLE, Setting, problem
from tests.helpers.functions import FUNCTIONS

KEY = jax.random.key(7)
SAMPLED = [name for name, function in FUNCTIONS.items() if function.samples]
SETTING = Setting(temperature="token", gradient=SAMPLE, std=1.5)
N_DRAWS = 256
# The derivative is 0 but in the given columns, which are all kept.
OF_FEW_COLUMNS = [name for name in SAMPLED if re.match("divergence .* without", name)]


def draws_of(name, setting, p, module=jaxmem):
    """(results, gradients by name) of a function with as many keys."""
    trained = crossing.trained_of(name, setting)

    @jax.jit
    def run(keys):
        return lax.map(
            lambda key: crossing.run(module, name, setting, trained, p | {"key": key}),
            keys,
        )

    return run(jax.random.split(KEY, N_DRAWS))


def check_mean(name, setting=SETTING, module=jaxmem):
    """The mean of gradients lies within their own spread around the exact gradient."""
    p = problem(setting)
    results, gradients = draws_of(name, setting, p, module)
    result = jax.tree.map(lambda x: x[0], results)
    _, exact = crossing.exact(name, setting, p, result)
    for x in jax.tree.leaves(results):
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    for k, x in gradients.items():
        x, want = np.asarray(x, np.float64), exact[k]
        rounding = 4e-6 * max(1.0, np.abs(want).max())
        deviation, error = x.std(0) / N_DRAWS**0.5, x.mean(0) - want
        # A row of W may have no draw, and no spread: all rows are seen together.
        assert np.sum(error**2) < 2 * np.sum(deviation**2) + error.size * rounding**2, k
        assert k == "W" or np.all(np.abs(error) < 5 * deviation + 5 * rounding), k
        is_exact = k == "advantages" or name in OF_FEW_COLUMNS
        assert is_exact == (deviation.max() < rounding), k


def check_results(name, setting=SETTING):
    """Sampling the gradient changes no bit of a result, with gradients and without."""
    exact, p = dataclasses.replace(setting, gradient=None), problem(setting)
    run = functools.partial(crossing.run, jaxmem, name)
    for trained in (), crossing.trained_of(name, setting):
        want, got = (run(x, trained, p)[0] for x in (exact, setting))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def check_every_column_kept(kind):
    """Two of three columns have a probability of at least 1/K each."""
    p, q = ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    W, other = (np.pad(np.log(np.float32(x)), (0, 9))[:, None] for x in (p, q))
    bias, h = np.where(np.arange(12) < 3, 0, -1e9), np.ones((2, 1), np.float32)
    bias = bias.astype(np.float32)  # so that K < V may exceed what is kept

    @functools.partial(jax.jit, static_argnames="gradient")
    def gradients(h, W, gradient):
        def total(h, W):
            target = kind(jaxmem.Teacher(h, jaxmem.Head(other, bias, layout="vd")))
            head, key = jaxmem.Head(W, bias, layout="vd"), KEY if gradient else None
            made = jaxmem.divergence(h, head, target, gradient=gradient, key=key)
            return jnp.sum(made)

        return jax.grad(total, (0, 1))(h, W)

    for got, want in zip(*(gradients(h, W, x) for x in (Sample(8), None)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
