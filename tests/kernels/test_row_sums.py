"""Sums over rows of logits: against float64, inside the verbs, lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import devices
from jaxmem.core import stats
from jaxmem.kernels import row_sums
from tests.cases import slow
from tests.functional.test_divergence import CHUNK, exact, make
from tests.kernels import needs_pallas

pytestmark = [
    needs_pallas,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
EPS = float(np.finfo(np.float32).eps)


def rows_of_logits(columns):
    """Flat, confident, very confident with a tie, masked columns, and one NaN."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, columns)).astype(np.float32)
    z[1] *= 20
    z[2] = -30
    z[2, -1] = 0
    z[3] = 1e4
    z[4, ::3] = -np.inf
    z[5, columns // 2] = np.nan
    return z


# Less than a block, a share of several blocks, and a last block that is cut.
@pytest.mark.parametrize("columns", [130, 9 * row_sums.BLOCK + 7])
def test_normaliser_against_float64(columns, triton_interpreted):
    z = rows_of_logits(columns)
    got = row_sums.normaliser(jnp.asarray(z))
    exact_z = z[:5].astype(np.float64)
    largest = exact_z.max(1)
    np.testing.assert_array_equal(got.max[:5], largest)
    others = np.exp(exact_z - largest[:, None])
    others[np.arange(5), exact_z.argmax(1)] = 0
    want = np.log1p(others.sum(1))
    # Relative even where one column has all but 1e-13 of the mass.
    np.testing.assert_allclose(got.log_sum[:5], want, rtol=16 * EPS)
    assert np.isnan(got.log_sum[5])
    near = stats.normaliser(jnp.asarray(z[:5]))
    np.testing.assert_allclose(got.log_sum[:5], near.log_sum, rtol=64 * EPS)


def test_sums_against_float64(triton_interpreted):
    z, shift = rows_of_logits(4000)[:5], np.arange(5, dtype=np.float32)

    def terms(z, shift):
        e = jnp.exp(z - shift[:, None])
        return e, jnp.where(e == 0, 0, e * 2)

    z[3] = 1
    got = row_sums.sums(terms, (jnp.asarray(z),), (jnp.asarray(shift),))
    want = np.exp(z.astype(np.float64) - shift[:, None]).sum(1)
    np.testing.assert_allclose(got[0], want, rtol=16 * EPS)
    np.testing.assert_allclose(got[1], 2 * want, rtol=16 * EPS)


@pytest.mark.parametrize("verb", ["jsd", slow("kl"), slow("forward_kl")])
def test_verbs_with_them(verb, triton_interpreted, monkeypatch):
    monkeypatch.setattr(row_sums, "_SHARES", 2)
    operands = make()
    g = np.random.default_rng(1).standard_normal(len(operands[0])).astype(np.float32)
    call = functools.partial(getattr(jaxmem, verb), chunk=CHUNK)

    def run(h, W):
        return jax.vjp(lambda h, W: call(h, W, *operands[2:]), h, W)

    plain, pull = run(*operands[:2])
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    used = []
    sums = row_sums.sums
    monkeypatch.setattr(row_sums, "sums", lambda *a: used.append(1) or sums(*a))
    value, pull_here = run(*operands[:2])
    assert used, "the kernels did not run"
    want, gradients = exact(verb, g, operands)
    np.testing.assert_allclose(value, want, rtol=64 * EPS)
    np.testing.assert_allclose(value, plain, rtol=64 * EPS)
    for got, other, need in zip(pull_here(g), pull(g), gradients, strict=False):
        scale = np.abs(need).max()
        np.testing.assert_allclose(got, other, atol=16 * EPS * scale)
        np.testing.assert_allclose(got, need, atol=64 * EPS * scale)


def lowered(run, operands):
    """The text of a program for an H200."""
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_named_xla_runs_none(monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")
    operands = [jnp.asarray(x) for x in make()]
    assert "row_sums" in lowered(jaxmem.kl, operands)
    named = functools.partial(jaxmem.kl, implementation="xla")
    assert "row_sums" not in lowered(named, operands)


@pytest.mark.parametrize("verb", ["jsd", slow("kl"), slow("forward_kl")])
def test_lowered_for_a_gpu(verb, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")

    def loss(h, W, *reference):
        labels = jnp.zeros(len(h), jnp.int32)
        return jaxmem.divergence_loss(
            lambda stats, divergence: divergence, h, W, labels, *reference,
            divergence=verb,
        )[0]  # fmt: skip

    operands = [jnp.asarray(x, jnp.bfloat16) for x in make(v=3000)]
    text = lowered(jax.grad(loss, (0, 1)), operands)
    assert "row_normaliser" in text
    assert "row_sums" in text


def test_supports():
    assert row_sums.supports(1024, 151936, jnp.float32)
    assert not row_sums.supports(1024, 151936, jnp.float64)
    assert not row_sums.supports(2**15, 2**16, jnp.float32)  # offsets would overflow


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [130, 9 * row_sums.BLOCK + 7, 151936])
def test_on_a_gpu(columns):
    z = rows_of_logits(columns)[:5]
    got = jax.jit(row_sums.normaliser)(z)
    want = jax.jit(stats.normaliser)(z)
    np.testing.assert_array_equal(got.max, want.max)
    np.testing.assert_allclose(got.log_sum, want.log_sum, rtol=64 * EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("verb", ["kl", "forward_kl", "jsd"])
def test_verbs_on_a_gpu(verb):
    operands = [jnp.asarray(x, jnp.bfloat16) for x in make(n=300, d=64, v=5000)]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, h, W, *reference):
        def total(h, W):
            call = getattr(jaxmem, verb)
            value = call(h, W, *reference, 128, implementation=implementation)
            return value.sum(), value

        return jax.value_and_grad(total, (0, 1), has_aux=True)(h, W)

    (_, value), gradients = run(None, *operands)
    (_, plain), others = run("xla", *operands)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    for got, want in zip(gradients, others, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()
