"""Norm and rotation of heads by one kernel: against float64; lowered for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import devices
from jaxmem.kernels import normed_rotary
from tests import hlo
from tests.cases import slow
from tests.kernels import needs_pallas
from tests.models import test_layers

pytestmark = [
    needs_pallas,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

OFFSET, EPSILON = 1.0, 1e-2
SHAPES = [(24, 4, 32), (5, 6, 64), (64, 40, 32), (7, 1, 32)]


def problem(dtype, shape):
    """x, dy, scale and tables."""
    rng = np.random.default_rng(0)
    tokens, _, width = shape
    x, dy = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    angles = rng.uniform(0, 9, (tokens, width // 2))
    tables = jnp.cos(jnp.float32(angles)), jnp.sin(jnp.float32(angles))
    return x, dy, jnp.asarray(rng.normal(size=width), dtype), tables


def exact(x, dy, scale, tables):
    """y, r, dx and dscale in float64, the rotations as those of complex numbers."""
    x, dy, scale = (np.asarray(a, np.float64) for a in (x, dy, scale))
    cos, sin = (np.asarray(t, np.float64)[:, None] for t in tables)

    def turned(x, by):
        low, high = np.split(x, 2, axis=-1)
        z = (low + 1j * high) * by
        return np.concatenate([z.real, z.imag], axis=-1)

    r = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON)
    scale = OFFSET + scale
    g = turned(dy, cos - 1j * sin)
    mean = np.mean(g * scale * x, axis=-1, keepdims=True)
    dx = r * g * scale - r**3 * x * mean
    return turned(r * x * scale, cos + 1j * sin), r[..., 0], dx, (g * r * x).sum((0, 1))


def by_kernels(x, dy, scale, tables):
    y, r = normed_rotary.forward(x, scale, tables, OFFSET, EPSILON)
    return y, r, *normed_rotary.backward(x, r, dy, scale, tables, OFFSET)


def check(got, want, dtype):
    """One rounding to the dtype, of at most 16; sums and r in float32."""
    dtypes = (dtype, "float32", dtype, "float32")
    for ours, theirs, kind in zip(got, want, dtypes, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, kind)
        largest = max(1.0, np.abs(theirs).max())
        atol = 4 * largest * float(jnp.finfo(kind).eps)
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_against_float64(dtype, shape, triton_interpreted):
    given = problem(dtype, shape)
    check(by_kernels(*given), exact(*given), dtype)


def config_of(name, dtype):
    return dataclasses.replace(test_layers.config_of(name, dtype=dtype), head_dim=32)


@pytest.mark.parametrize(
    "name, dtype", [slow("Qwen3", "bfloat16"), ("Gemma 3", "float32")]
)
def test_a_block_with_it_is_as_exact(name, dtype, triton_interpreted, monkeypatch):
    """Of the result and of each gradient: the error against float64."""
    config = config_of(name, dtype)
    given = test_layers.problem(config)
    usual = test_layers.with_gradients(test_layers.lean, config, dtype, *given)
    with jax.enable_x64(True):
        exact = test_layers.with_gradients(
            test_layers.ordinary, config, jnp.float64, *given
        )
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    got = test_layers.with_gradients(test_layers.lean, config, dtype, *given)
    unit, (times, more) = float(jnp.finfo(dtype).eps), test_layers.TYPES[dtype]
    for key, want in exact.items():
        bound = times * test_layers.error(usual[key], want) + more * unit
        assert test_layers.error(got[key], want) <= bound, key
    assert any((got[key] != usual[key]).any() for key in exact)  # the kernel ran


@pytest.mark.parametrize(
    "policy", ["none", slow("dots_and_attention"), "dots", slow("full")]
)
@pytest.mark.parametrize("name", [slow("Qwen3"), "Gemma 3"])
def test_a_block_with_it_keeps_the_same(name, policy, monkeypatch):
    """Of layers of two kinds, whose tables are shared by all layers, too."""
    config = config_of(name, "bfloat16")
    usual = test_layers.shaped(config, policy)
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    fused = test_layers.shaped(config, policy)
    assert fused.bytes_per_token == usual.bytes_per_token
    if policy == "none":
        assert usual.bytes_per_token == test_layers.kept_by(config)


def test_the_widths_that_it_supports():
    assert all(map(normed_rotary.supports, (32, 64, 128, 256)))
    assert not any(map(normed_rotary.supports, (16, 80, 96, 1024)))


def test_lowered_for_a_gpu():
    given = problem("bfloat16", (64, 16, 128))
    text = hlo.lowered_for_an_h200(by_kernels, *given)
    assert "normed_rotary" in text and "normed_rotary_backward" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 16, 128)])
def test_on_a_gpu(shape):
    given = problem("bfloat16", shape)
    check(jax.jit(by_kernels)(*given), exact(*given), "bfloat16")
