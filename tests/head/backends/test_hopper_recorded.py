"""Recorded entries by the kernels of sampled derivatives, without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jaxmem
from tests.helpers import hlo
from tests.helpers.cases import Case, slow
from tests.helpers.interpreter import needs_pallas
from tests.helpers.recorded import exact, moved

pytestmark = needs_pallas
N, D, V, K = 10, 64, 70, 12


def policy(stats):
    return -stats.logprob + 0.1 * stats.entropy, {"logsumexp": stats.logsumexp}


def loss(h, W, y, entries, layout, **options):
    head = jaxmem.Head(W, layout=layout)
    options |= {"gradient": jaxmem.Recorded(entries), "implementation": "hopper"}
    return jaxmem.token_loss(policy, h, head, y, normalizer=1, **options)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["vd", slow("dv")])
def test_recorded_gradients_by_kernels(layout, on_one_device, interpreted):
    h, W, y = Case(N, D, V, std=2.0).make()
    y[3] = -1
    entries = jaxmem.record_entries(h, W, y, K, jax.random.key(0))
    h, W = (jnp.asarray(x, jnp.bfloat16) for x in moved(h, W, 0.1))
    h = h.at[3].set(jnp.nan)
    run = jax.value_and_grad(loss, (0, 1), has_aux=True)
    given = W if layout == "vd" else W.T
    (_, told), (dh, dW) = jax.jit(run, static_argnums=4)(h, given, y, entries, layout)
    ones = np.ones(N)
    g = {"logprob": -ones, "entropy": 0.1 * ones}
    want, slopes = exact(*map(np.float64, (h, W)), y, entries, g)
    for name, limit in ("logsumexp", 2e-6), ("forward_error", 1e-4):
        np.testing.assert_allclose(told[name], want[name], rtol=limit, atol=1e-6)
    dW = dW if layout == "vd" else dW.T
    for got, expected in zip((dh, dW), slopes, strict=False):
        limit = 8e-3 * np.abs(expected).max()
        np.testing.assert_allclose(np.float64(got), expected, atol=limit, rtol=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["vd", slow("dv")])
def test_lowers_for_an_h200(layout, lowered_anywhere):
    """Four kernels, none of which is of a product over the vocabulary."""
    n, d, v, k = 512, 256, 151936, 128
    shape = (v, d) if layout == "vd" else (d, v)
    h, W = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((n, d), shape))
    numbers = jax.ShapeDtypeStruct((n,), jnp.int32)
    floats = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((n, k), *[(n,)] * 4)]
    columns = jax.ShapeDtypeStruct((n, k), jnp.int32)
    entries = jaxmem.RecordedEntries(columns, *floats)

    def both(h, W, y, entries):
        run = jax.value_and_grad(loss, (0, 1), has_aux=True)
        return run(h, W, y, entries, layout)

    text = hlo.lowered_for_an_h200(both, h, W, numbers, entries)
    assert text.count("mosaic_gpu_v2") == 4
    assert "stablehlo.dot_general" not in text


@pytest.mark.full
def test_old_pass_lowers_for_an_h200(lowered_anywhere):
    n, d, v = 512, 256, 50304
    h, W = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((n, d), (v, d)))
    numbers = jax.ShapeDtypeStruct((n,), jnp.int32)

    def record(h, W, y, key):
        return jaxmem.record_entries(h, W, y, 64, key, implementation="hopper")

    key = jax.eval_shape(lambda: jax.random.key(0))
    text = hlo.lowered_for_an_h200(record, h, W, numbers, key)
    assert "mosaic_gpu_v2" in text


@pytest.mark.full
def test_typed_over_a_mesh(lowered_anywhere):
    """The record has one type on all shards of the vocabulary, and so have results."""
    n, d, v, k = 512, 512, 32768, 64
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    mesh = AbstractMesh((2, 2), ("t", "v"), abstract_device=device)
    record, public = (
        jaxmem.sharding.parallel(
            functools.partial(x, implementation="hopper"), mesh, tokens="t", vocab="v"
        )
        for x in (jaxmem.record_entries, jaxmem.logprobs)
    )

    def loss(h, W, y):
        entries = record(h, W, y, k=k, key=jax.random.key(0))
        assert entries.columns.shape == (n, k)
        return jnp.sum(public(h, W, y, gradient=jaxmem.Recorded(entries)))

    h, W = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((n, d), (v, d)))
    y = jax.ShapeDtypeStruct((n,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        assert jax.jit(jax.grad(loss, (0, 1))).trace(h, W, y)
