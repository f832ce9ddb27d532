"""Named instructions: what they compute, and that they are in the compiled kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import devices
from tests import hlo
from tests.functional.test_divergence import make
from tests.kernels import needs_pallas

pytestmark = [
    needs_pallas,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
EPS = float(np.finfo(np.float32).eps)


def computed(x, y):
    """e^x, e^(x - y), x y + 0.5, and x or at most -3, by a kernel."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.triton as plt

    from jaxmem.kernels import arithmetic

    def kernel(x_ref, y_ref, *refs):
        x, y = x_ref[...], y_ref[...]
        found = (
            arithmetic.exp(x), arithmetic.exp(x, y), arithmetic.fma(x, y, 0.5),
            arithmetic.at_most(x, -3.0),
        )  # fmt: skip
        for ref, value in zip(refs, found, strict=True):
            ref[...] = value

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 4,
        compiler_params=plt.CompilerParams(num_warps=1),
    )(x, y)


def check():
    rng = np.random.default_rng(0)
    x, y = (-20 * rng.random(128, np.float32) for _ in range(2))
    x[:4] = -np.inf, np.nan, -95.0, 0.0  # e^-95 is subnormal
    exp, of_difference, fma, at_most = computed(jnp.asarray(x), jnp.asarray(y))
    wide, other = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(exp, np.exp(wide), rtol=24 * EPS, atol=1e-37)
    want = np.exp(wide - other)
    np.testing.assert_allclose(of_difference, want, rtol=48 * EPS, atol=1e-37)
    np.testing.assert_allclose(fma, wide * other + 0.5, rtol=2 * EPS)
    np.testing.assert_array_equal(at_most, np.fmin(x, np.float32(-3)))


def test_meanings_against_float64(triton_interpreted):
    check()


@pytest.mark.gpu
def test_instructions_on_a_gpu():
    check()


@pytest.mark.parametrize("verb", ["kl", "jsd"])
def test_kernels_have_them(verb, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    operands = [jnp.asarray(x) for x in make()]
    call = functools.partial(getattr(jaxmem, verb), chunk=None)
    text = hlo.lowered_for_an_h200(call, *operands)
    assert "fma.rn.f32" in text and "ex2.approx.ftz.f32" in text
