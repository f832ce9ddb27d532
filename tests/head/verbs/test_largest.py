"""The k most likely columns: the order of equal ones, their digits, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import slow
from tests.helpers.described import described
from tests.helpers.largest import CHUNK, D, N, make
from tests.helpers.targets import of_columns, reverse_kl
from tests.helpers.tolerance import STATS_EPSILON

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


@pytest.mark.parametrize("v, k, std", [
    (130, 130, 1.0), slow(1, 1, 1.0), slow(50257, 1, 1.0), slow(2049, 4, 20.0),
])  # fmt: skip
def test_ids_in_order_with_equal_ones(v, k, std):
    h, W = make(v, std)
    got, ids = jaxmem.topk(h, W, k, CHUNK)
    want, values, _ = oracle.topk(h.astype(float) @ W.T.astype(float), k)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_allclose(got, values, rtol=1e-6, atol=STATS_EPSILON)
    assert (np.diff(got, axis=1) <= 0).all()


def test_topk_excluded_columns_last_padding_never():
    h, W = make(130)
    bias = np.where(np.arange(130) % 3 == 0, -np.inf, 0).astype(np.float32)
    got, ids = jaxmem.topk(h, jaxmem.Head(W, bias=bias, vocab_size=100), 100, CHUNK)
    np.testing.assert_array_equal(np.sort(ids), np.tile(np.arange(100), (N, 1)))
    np.testing.assert_array_equal(np.isneginf(got), np.asarray(ids) % 3 == 0)
    np.testing.assert_array_equal(ids[:, -34:], np.tile(np.arange(0, 100, 3), (N, 1)))


def test_topk_confident_token_keeps_digits():
    """1 + Σ others rounds to 1: the logprob of the first keeps its digits."""
    h, W = np.eye(8, dtype=np.float32), np.zeros((50, 8), np.float32)
    np.fill_diagonal(W, 25.0)
    got, ids = jaxmem.topk(h, W, 2)
    np.testing.assert_array_equal(ids, [[i, 0 if i else 1] for i in range(8)])
    np.testing.assert_allclose(got[:, 0], -np.log1p(49 * np.exp(-25.0)), rtol=1e-6)


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
    logits = oracle.Logits.of(h, W)
    _, _, pull = oracle.topk(logits.z, 4)
    want = logits.gradients(pull(np.ones((N, 4))))
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
    got = of_columns("reverse_kl")(h, W, ids, q, CHUNK)
    whole = reverse_kl(h, W, teacher, W, CHUNK)
    assert (got <= whole + 1e-6).all() and got[:30].all() and not got[30:].any()


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
