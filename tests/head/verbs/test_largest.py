"""The k most likely columns, to float64: ids in order, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.cases import slow
from tests.helpers.described import described
from tests.helpers.largest import CHUNK, D, N, make
from tests.helpers.selected import exact, materialised, scaled
from tests.helpers.targets import of_columns, reverse_kl
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_as_good

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


@functools.partial(jax.jit, static_argnames=("k", "layout", "options"))
def ours(h, W, k, g, arrays, layout="vd", options=()):
    """(logprobs, ids), and the gradients of hidden, W and bias, if any."""

    def call(h, W, bias):
        W = W if layout == "vd" else W.T
        given = arrays | bias | {"layout": layout} | dict(options)
        return described(jaxmem.topk)(h, W, k, CHUNK, **given)

    bias = {k: v for k, v in arrays.items() if k == "bias"}
    value, pull = jax.vjp(call, h, W, bias)
    no_g = np.zeros(value.ids.shape, jax.dtypes.float0)
    return value, jax.tree.leaves(pull(jaxmem.TopK(g, no_g)))


def cotangents(k):
    return np.random.default_rng(1).standard_normal((N, k)).astype(np.float32)


def check(h, W, k, dtype="float32", layout="vd", **options):
    """Ids in their order; values and gradients no worse than the materialised ones."""
    g = cotangents(k)
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    numbers = tuple((k, v) for k, v in options.items() if k not in arrays)
    low = jnp.asarray(h).astype(dtype), jnp.asarray(W).astype(dtype)
    (made, ids), gradients = ours(*low, k, g, arrays, layout, numbers)
    z = scaled(np, h.astype(float) @ W.T, **({"vocab_size": len(W)} | options))
    np.testing.assert_array_equal(ids, np.argsort(-z, axis=1, kind="stable")[:, :k])
    assert (made.dtype, ids.dtype) == (jnp.float32, jnp.int32)
    operands, options = (*low, None, np.asarray(ids)), {"vocab_size": len(W)} | options
    want, exact_gradients = exact("selected", g, operands, **options)
    numbers = tuple((k, v) for k, v in options.items() if k not in arrays)
    rough, rough_gradients = materialised(operands, g, arrays, "selected", numbers)
    assert_as_good(made, rough, want, STATS_EPSILON, "logprobs")
    assert (np.diff(made, axis=1) <= 0).all()
    for name, got, near, need in zip(
        ("dhidden", "dW", "dbias"), gradients, rough_gradients, exact_gradients,
        strict=False,
    ):  # fmt: skip
        assert_as_good(got, near, need, EPSILON[got.dtype.name], name)


@pytest.mark.parametrize("k, v", [
    (130, 130), slow(5, 130), slow(4, 2049), slow(1, 1), slow(1, 130), slow(129, 130),
    slow(1, 50257),
])  # fmt: skip
def test_ids_values_and_gradients(k, v):
    check(*make(v), k)


@pytest.mark.parametrize("std", [0.0, 20.0], ids=["flat", "peaked"])
def test_flat_and_peaked(std):
    check(*make(700, std), 9)


def test_topk_excluded_columns_last_padding_never():
    h, W = make(130)
    bias = np.where(np.arange(130) % 3 == 0, -np.inf, 0).astype(np.float32)
    made, ids = jaxmem.topk(h, jaxmem.Head(W, bias=bias, vocab_size=100), 100, CHUNK)
    np.testing.assert_array_equal(np.sort(ids), np.tile(np.arange(100), (N, 1)))
    np.testing.assert_array_equal(np.isneginf(made), np.asarray(ids) % 3 == 0)
    np.testing.assert_array_equal(ids[:, -34:], np.tile(np.arange(0, 100, 3), (N, 1)))


def test_topk_confident_token_keeps_digits():
    """1 + Σ others rounds to 1: the logprob of the first keeps its digits."""
    h, W = np.eye(8, dtype=np.float32), np.zeros((50, 8), np.float32)
    np.fill_diagonal(W, 25.0)
    made, ids = jaxmem.topk(h, W, 2)
    np.testing.assert_array_equal(ids, [[i, 0 if i else 1] for i in range(8)])
    np.testing.assert_allclose(made[:, 0], -np.log1p(49 * np.exp(-25.0)), rtol=1e-6)


def test_topk_gradient_of_logprobs_not_of_ids():
    h, W = make(300)

    def directly(h, W):
        return jaxmem.topk(h, W, 4, CHUNK).logprobs.sum()

    def of_ids(h):
        return jaxmem.topk(h, W, 4, CHUNK).ids.astype(jnp.float32).sum()

    @jax.jit
    def run(h, W):
        return jax.grad(jax.checkpoint(directly), (0, 1))(h, W), jax.grad(of_ids)(h)

    got, none = run(h, W)
    ids = np.argsort(-(h @ W.T), axis=1, kind="stable")[:, :4]
    _, want = exact("selected", np.ones((N, 4)), (h, W, None, ids), vocab_size=300)
    for a, b in zip(got, want, strict=False):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert not none.any()


@pytest.mark.slow  # it calls verbs that are tested one by one
def test_topk_ids_as_columns_of_divergence():
    """A student's reverse KL over its own best columns; masked tokens have 0."""
    (h, W), (teacher, _) = make(300), make(300, seed=3)
    where = np.arange(N) < 30
    ids = jaxmem.topk(h, W, 5, CHUNK, where=where).ids
    q = jaxmem.selected_logprobs(teacher, W, ids, CHUNK)
    made = of_columns("reverse_kl")(h, W, ids, q, CHUNK)
    whole = reverse_kl(h, W, teacher, W, CHUNK)
    assert (made <= whole + 1e-6).all() and made[:30].all() and not made[30:].any()


def test_report():
    h, W = make(300)
    with jaxmem.report() as calls:
        jax.eval_shape(lambda: jaxmem.topk(h, W, 3, CHUNK))
    (call,) = calls.calls
    assert (call.verb, call.chunk, call.implementation) == ("topk", CHUNK, "xla")
    assert call.live_logits_bytes == 4 * CHUNK * 300
    assert call.shapes == {"hidden": (N, D), "W": (300, D)}


H, W_ = make(130)
ERRORS = [
    ({"k": 131}, ValueError, "k must be at most vocab_size=130, got 131"),
    ({"k": 101, "vocab_size": 100}, ValueError,
     "k must be at most vocab_size=100, got 101"),
    ({"k": 0}, ValueError,
     "k must be an integer, at least 1 and below 2**31, got 0"),
    ({"k": 1.5}, ValueError,
     "k must be an integer, at least 1 and below 2**31, got 1.5"),
    ({"k": jnp.int32(3)}, ValueError,
     "k must be an integer, at least 1 and below 2**31, got an array of int32, shape "
     "()"),
    ({"where": np.ones(3, bool)}, ValueError,
     "where must broadcast to the tokens' shape (37,), got shape (3,)"),
    ({"axis_name": "tensor"}, ValueError,
     "axis_name='tensor' must be bound by an enclosing jax.shard_map, and there is "
     "none here; for arrays that are not split by hand use jaxmem.sharding.parallel"),
    ({"implementation": "hopper"}, NotImplementedError,
     "implementation='hopper' has no topk: its kernels reduce one head's logits to the "
     "statistics of token_stats and keep no row of them; pass implementation=None"),
]  # fmt: skip


@pytest.mark.parametrize("changes,kind,message", ERRORS, ids=lambda x: str(x)[:30])
def test_errors(changes, kind, message):
    with pytest.raises(kind) as caught:
        described(jaxmem.topk)(**({"hidden": H, "W": W_, "k": 3} | changes))
    assert str(caught.value) == message
