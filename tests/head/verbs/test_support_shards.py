"""`support_logprobs` over shards of the vocabulary, to float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.described import described
from tests.helpers.meshes import MESHES, collectives, jit, sharded_by
from tests.helpers.selected import exact
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_close

if jax.device_count() < 8:  # on one GPU; a CPU counts as eight (tests/conftest.py)
    pytest.skip(f"needs 8 devices, has {jax.device_count()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, D, V, K, COLUMNS, CHUNK = 24, 8, 37, 5, 40, 4
MASKED = (np.arange(N) >= 6) & (np.arange(N) < 12)  # all tokens of a data shard of four
OPTIONS = {"softcap": 5.0, "vocab_size": V}


@functools.cache
def problem():
    """hidden, W, labels, ids, bias, temperature, cotangents; W has padding.

    The ids of a token are on many shards, on one shard, or the label's alone.
    """
    rng = np.random.default_rng(0)
    h, W = (rng.standard_normal((n, D), np.float32) for n in (N, COLUMNS))
    ids = np.stack([rng.permutation(V)[:K] for _ in range(N)]).astype(np.int32)
    ids[0], ids[1], ids[2, 1:] = np.arange(K), np.arange(V - K, V), ids[2, 0]
    y = ids[:, 0].copy()
    ids[3:6, 3:] = -1
    h[MASKED], y[MASKED] = np.nan, -1
    bias = np.linspace(-2, 2, COLUMNS, dtype=np.float32)
    warm = np.linspace(0.3, 3, N, dtype=np.float32)
    return h, W, y, ids, bias, warm, rng.standard_normal(N).astype(np.float32)


def dense(h, W, y, ids, bias, warm, axis_name=None):
    return described(jaxmem.support_logprobs)(
        h, W, y, ids, CHUNK, temperature=warm, axis_name=axis_name, bias=bias, **OPTIONS
    )


def ragged(h, W, y, ids, bias, warm, axis_name=None):
    """The ids as CSR, between entries that belong to no token."""
    offsets = jnp.arange(len(ids) + 1) * ids.shape[1] + 2
    entries = jnp.pad(ids.ravel(), 2, constant_values=1)
    return described(jaxmem.support_logprobs)(
        h, W, y, entries, CHUNK, temperature=warm, axis_name=axis_name,
        offsets=offsets, max_ids=K + 1, bias=bias, **OPTIONS,
    )  # fmt: skip


sharded = functools.partial(sharded_by, (1, 4))  # W and the bias


def with_gradients(call):
    h, W, y, ids, bias, warm, g = problem()

    @jit
    def run(h, W, bias):
        value, pull = jax.vjp(
            lambda h, W, bias: call(h, W, y, ids, bias, warm), h, W, bias
        )
        return value, pull(g)

    return run(h, W, bias)


@functools.cache
def alone_and_exact():
    h, W, y, ids, bias, warm, g = problem()
    operands = np.where(MASKED[:, None], 0, h), W, y, ids
    options = {"bias": bias, "temperature": warm[:, None]} | OPTIONS
    return with_gradients(dense), exact("support", g, operands, **options)


def check(got):
    alone, want = alone_and_exact()
    assert_close(got[0], alone[0], want[0], STATS_EPSILON, "logprobs")
    names = "hidden", "W", "bias"
    for name, a, b, c in zip(names, got[1], alone[1], want[1], strict=True):
        assert np.isfinite(a).all() and c.any()
        assert_close(a, b, c, EPSILON["float32"], name)
    assert not got[0][MASKED].any() and not got[1][0][MASKED].any()


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("call", [dense, ragged])
@pytest.mark.slow
def test_support_on_every_mesh(call, name):
    check(with_gradients(sharded(call, name)))


@pytest.mark.full
@pytest.mark.parametrize("call", [dense, ragged])
def test_support_with_unchecked_vma(call):
    check(with_gradients(sharded(call, "2x4", check_vma=False)))


@pytest.mark.parametrize("call", [dense, ragged])
@pytest.mark.slow
def test_invalid_id_or_label_is_nan_in_its_token(call):
    """A label outside of its support, or an id that no shard has."""
    h, W, y, ids, bias, warm, _ = problem()
    y, ids = y.copy(), ids.copy()
    y[0], ids[1, -1] = K, V  # column V is there, as padding
    split = sharded(call, "2x4")

    def total(h, weights, y, ids):
        logprobs = split(h, W, y, ids, bias, warm)
        return jnp.sum(jnp.where(weights == 0, 0, logprobs * weights)), logprobs

    run = jit(jax.grad(total, has_aux=True))
    weights = np.where(np.arange(N) < 2, 0, 1).astype(np.float32)
    dh, logprobs = run(h, weights, y, ids)
    np.testing.assert_array_equal(np.isnan(logprobs), np.arange(N) < 2)
    assert np.isfinite(dh).all() and dh.any()


@pytest.mark.parametrize("call", [dense, ragged])
@pytest.mark.slow
def test_support_collectives(call):
    """The logprobs' all-reduces, once for all tokens of a device; W is not gathered."""
    h, W, y, ids, bias, warm, g = problem()
    split = sharded(call, "2x4")

    def run(h, W):
        return jnp.vdot(split(h, W, y, ids, bias, warm), g)

    assert collectives(jax.grad(run, (0, 1)), h, W) == [
        ("pmax", f"f32[2,{N // 2}]"),
        ("psum_invariant", f"f32[3,{N // 2}]"),
        ("psum_invariant", f"f32[{COLUMNS // 4},{D}]"),  # of W, over the tokens
        ("psum_invariant", f"f32[{N // 2},{D}]"),
    ]


def test_errors():
    h, W, y, ids, *_ = problem()
    with pytest.raises(ValueError, match="axis_name='tensor' must be bound by an encl"):
        jaxmem.support_logprobs(h, W, y, ids, axis_name="tensor")
