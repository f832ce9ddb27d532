"""Queries, keys and values from one product: against float64; lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import devices
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.kernels import rotary
from tests.helpers import decoders, hlo
from tests.helpers.cases import slow
from tests.helpers.interpreter import needs_pallas

pytestmark = needs_pallas

HEADS, KV_HEADS, LAYER, EPSILON = 6, 2, 1, 1e-2


def problem(dtype, norms, width=64, rows=3):
    """(joined, tables), and the norms or None."""
    rng = np.random.default_rng(0)
    joined = jnp.asarray(rng.normal(size=(rows, HEADS + 2 * KV_HEADS, width)), dtype)
    angles = rng.uniform(0, 9, (rows, width // 2))
    tables = jnp.cos(jnp.float32(angles)), jnp.sin(jnp.float32(angles))
    scales = jnp.asarray(rng.normal(size=(2, 3, width)), dtype)
    norms = rotary.Norms(LAYER, tuple(scales), 1.0, EPSILON) if norms else None
    return joined, tables, norms


def exact(joined, tables, norms):
    """The rotation in float64, of complex numbers."""
    x = np.asarray(joined, np.float64)
    cos, sin = (np.asarray(t, np.float64)[:, None] for t in tables)
    parts = np.split(x, [HEADS, HEADS + KV_HEADS], axis=1)
    for i in range(2):
        if norms is not None:
            mean = np.mean(parts[i] ** 2, axis=-1, keepdims=True)
            scale = 1 + np.asarray(norms.scales[i][LAYER], np.float64)
            parts[i] = parts[i] / np.sqrt(mean + EPSILON) * scale
        low, high = np.split(parts[i], 2, axis=-1)
        turned = (low + 1j * high) * (cos + 1j * sin)
        parts[i] = np.concatenate([turned.real, turned.imag], axis=-1)
    return parts


def check(made, want, dtype):
    # Two roundings, of numbers up to 16.
    atol = 32 * float(jnp.finfo(dtype).eps)
    for ours, theirs in zip(made, want, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
        np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=atol)


@pytest.mark.parametrize(
    "dtype, norms",
    [
        ("float32", False),
        slow("bfloat16", True),
        slow("bfloat16", False),
        slow("float32", True),
    ],
)
def test_against_float64(dtype, norms, rows_interpreted):
    joined, tables, norms = problem(dtype, norms)
    made = rotary.split(joined, KV_HEADS, tables, norms)
    check(made, exact(joined, tables, norms), dtype)


TWO_KINDS = {
    "pattern": ("local", "global"),
    "self_attn.window": 3,
    "rope.local_theta": 9.0,
}


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {
            "qk_norm.enabled": True,
            "norm.offset": True,
            "self_attn.qkv_bias": True,
            **TWO_KINDS,
        },
        slow({"qk_norm.enabled": True, "norm.offset": True}),
        slow({"self_attn.qkv_bias": True}),
        slow({"qk_norm.enabled": True, **TWO_KINDS}),
    ],
    ids=["all", "norms", "biases", "two kinds of layers"],
)
def test_decoder_with_rotary_kernel(changes, rows_interpreted, monkeypatch):
    config = ModelConfig(
        layers=2, hidden=32, ff=48, heads=4, kv_heads=2, head_dim=64, vocab_size=61
    ).replaced(changes)
    definition, weights = nnx.split(decoders.drawn(config))
    rng = np.random.default_rng(0)
    model, joined = (nnx.merge(definition, weights) for _ in range(2))
    joined.blocks.attention.join()
    prompts, lengths = rng.integers(0, 61, (3, 5), np.int32), np.array([2, 5, 4])
    _, cache = jax.jit(lambda m: m.prefill(prompts, lengths, 8))(model)
    decode = jax.jit(lambda m: m.decode(prompts[:, 0], cache))
    want = decode(model)
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    assert "rotary" in str(jax.make_jaxpr(decode)(joined))
    for ours, theirs in zip(*map(jax.tree.leaves, (decode(joined), want)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_supports_head_widths():
    assert all(map(rotary.supports, (64, 128, 256, 512)))
    assert not any(map(rotary.supports, (32, 80, 96, 1024)))


@pytest.mark.parametrize("norms", [False, True])
def test_lowered_for_a_gpu(norms):
    joined, tables, norms = problem("bfloat16", norms, 128)
    run = jax.jit(functools.partial(rotary.split, kv_heads=KV_HEADS, norms=norms))
    text = hlo.lowered_for_an_h200(run, joined, tables=tables)
    assert "rotary" in text and "mosaic" in text


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_on_a_gpu(width, norms):
    joined, tables, norms = problem("bfloat16", norms, width)
    made = jax.jit(functools.partial(rotary.split, kv_heads=KV_HEADS, norms=norms))(
        joined, tables=tables
    )
    check(made, exact(joined, tables, norms), "bfloat16")
