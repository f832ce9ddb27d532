"""Arithmetic of kernels: what it computes, and the instructions that it becomes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.interpreter import needs_pallas

pytestmark = needs_pallas
EPS = float(np.finfo(np.float32).eps)


def computed(x, y):
    """e^x, e^(x - y), x y + 0.5, and x or at most -3, by a kernel."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from jaxmem.head.kernels import arithmetic, row_tiles

    def kernel(x_ref, y_ref, *refs):
        x, y = x_ref[...], y_ref[...]
        found = (
            arithmetic.exp(x), arithmetic.exp(x, y), arithmetic.fma(x, y, 0.5),
            arithmetic.at_most(x, -3.0),
        )  # fmt: skip
        for ref, value in zip(refs, found, strict=True):
            ref[...] = value

    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return plgpu.kernel(kernel, out_type=(out,) * 4, compiler_params=row_tiles.PARAMS)(
        x, y
    )


def check():
    rng = np.random.default_rng(0)
    x, y = (-20 * rng.random(128, np.float32) for _ in range(2))
    x[:4] = -np.inf, np.nan, -95.0, 0.0  # e^-95 is subnormal
    exp, of_difference, fma, at_most = computed(jnp.asarray(x), jnp.asarray(y))
    wide, other = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(exp, np.exp(wide), rtol=24 * EPS, atol=1e-37)
    want = np.exp(wide - other)
    np.testing.assert_allclose(of_difference, want, rtol=48 * EPS, atol=1e-37)
    bound = EPS * (np.abs(wide * other) + np.abs(wide * other + 0.5))
    np.testing.assert_array_less(np.abs(fma - (wide * other + 0.5))[4:], bound[4:])
    np.testing.assert_array_equal(at_most, np.fmin(x, np.float32(-3)))


@pytest.mark.slow
def test_meanings_against_float64(rows_interpreted):
    check()


@pytest.mark.gpu
def test_instructions_on_a_gpu():
    check()
