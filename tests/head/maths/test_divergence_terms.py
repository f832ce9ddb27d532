"""Terms and slopes of a mixture, one by one, where their logarithms would cancel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.verbs.kinds import JSD
from tests.helpers.cases import full

# One for the even series, others for the general one: little weight on either side.
BETAS = [0.5, 0.4, 0.1, 1e-3, 1e-6, 0.9, 1 - 1e-6]


def pairs(dtype, smallest):
    """(p, q, ln p - ln q): tiny and huge ratios, and both sides of the thresholds."""
    rng = np.random.default_rng(0)
    size = np.exp(rng.uniform(np.log(smallest), np.log(70), 500))
    size = np.concatenate([size, np.linspace(0.45, 0.55, 21), np.linspace(1, 1.2, 21)])
    x = np.concatenate([size, -size]).astype(dtype)
    larger = np.exp(rng.uniform(-8, 0, len(x)))
    smaller = larger * np.exp(-np.abs(x.astype(np.float64)))
    p, q = np.where(x > 0, larger, smaller), np.where(x > 0, smaller, larger)
    return p.astype(dtype), q.astype(dtype), x


def log_of_mixture(own, other, x):
    """ln(own + other e^x) in float64."""
    near = np.log1p(other * np.expm1(x))
    return np.where(near < -0.5, np.log(own + other * np.exp(x)), near)


def exact(beta, p, x):
    """Term and slope in float64; its relative error is about 1e-16 / |x|."""
    p, x = p.astype(np.float64), x.astype(np.float64)
    of_p = -(1 - beta) * p * log_of_mixture(1 - beta, beta, -x)
    of_q = -beta * p * np.exp(-x) * log_of_mixture(beta, 1 - beta, x)
    return of_p + of_q, of_p


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "dtype,smallest,epsilon",
    [("float32", 1e-5, 2.0**-23), full("float64", 1e-1, 1e-14)],
)
def test_terms_keep_their_digits(beta, dtype, smallest, epsilon):
    p, q, x = pairs(dtype, smallest)
    with jax.enable_x64(dtype == "float64"):
        divergence = JSD(beta=beta)
        args = [jnp.asarray(a) for a in (p, q, x)]
        term = np.asarray(sum(divergence.terms(*args)))
        slope = np.asarray(divergence.slopes(*args))
    assert term.dtype == slope.dtype == dtype
    want, want_slope = exact(beta, p, x)
    # Beyond the series, two logarithms are up to 13 times as large as their difference.
    roundings = np.where(np.abs(x) < 0.5, 4, 26)
    assert (np.abs(term / want - 1) <= roundings * epsilon).all()
    np.testing.assert_allclose(slope, want_slope, rtol=6 * epsilon)
    assert (term >= 0).all()


@pytest.mark.parametrize("beta", [0.5, 0.1, 0.9])
def test_jsd_terms_of_excluded_columns(beta):
    """p = 0 < q: x = -inf; the other way round; and both, which has no ratio."""
    p, q = jnp.array([0.0, 0.3, 0.0]), jnp.array([0.3, 0.0, 0.0])
    x = jnp.array([-jnp.inf, jnp.inf, jnp.nan])
    term = sum(JSD(beta=beta).terms(p, q, x))
    want = [-0.3 * beta * np.log(beta), -0.3 * (1 - beta) * np.log(1 - beta), 0]
    np.testing.assert_allclose(term, want, rtol=1e-6)
    slope = JSD(beta=beta).slopes(p, q, x)
    np.testing.assert_allclose(slope, [0, want[1], 0], rtol=1e-6)
