"""Ids drawn from the softmax: the inverse of its distribution function, to float64."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.maths import column_sampling
from jaxmem.head.verbs import draws
from tests.helpers import oracle
from tests.helpers.cases import full
from tests.helpers.described import described
from tests.helpers.draws import CHUNK, KEY, D, N, V, make, uniform

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


def softmax(h, W):
    return np.exp(oracle.log_softmax(h.astype(float) @ W.T.astype(float)))


def assert_inverse(ids, u, p):
    """u lies between the running sums before and at its id, but for rounding.

    A sum of V probabilities that are rounded to 2^-30, of relative errors near 1e-6.
    """
    ends = np.pad(np.cumsum(p, axis=1), ((0, 0), (1, 0)))
    low, high = (np.take_along_axis(ends, ids + i, axis=1) for i in (0, 1))
    slack = p.shape[1] * 2.0**-30 + 2e-6
    assert (low - slack <= u).all() and (u <= high + slack).all()


@pytest.mark.parametrize("std", [0.0, 1.0, 15.0], ids=["flat", "ordinary", "peaked"])
@pytest.mark.parametrize("v", [full(300), 4099])
def test_sample_ids_inverts_distribution_function(v, std):
    h, W = make(std, v)
    ids = np.asarray(jaxmem.sample_ids(h, W, 50, KEY, CHUNK))
    assert (ids.shape, ids.dtype) == ((N, 50), np.int32)
    assert_inverse(ids, uniform(50), softmax(h, W))
    assert std == 15.0 or len(np.unique(ids)) > min(v, 100) / 2


def test_sample_ids_by_bits_at_powers_of_two():
    """256 equal columns among excluded ones: the first 8 bits are the number of one."""
    columns = np.sort(np.random.default_rng(0).permutation(V)[:256])
    bias = np.full(V, -np.inf, np.float32)
    bias[columns] = 2.5
    h, W = np.zeros((N, D), np.float32), np.zeros((V, D), np.float32)
    want = columns[np.floor(uniform(50) * 256).astype(int)]
    np.testing.assert_array_equal(biased(h, W, bias), want)


def biased(h, W, bias):
    return jaxmem.sample_ids(h, jaxmem.Head(W, bias=bias), 50, KEY, CHUNK)


def test_draw_at_bounds_of_a_column():
    """The first and the last number that draw it."""
    bits = np.array([[0, 2**24 - 1, 2**24, 2**25 - 1, 2**25, 2**32 - 1]], np.uint32)
    whole = types.SimpleNamespace(shards=None)
    ids = jax.jit(lambda z, bits: draws._draw(whole, z, bits))(
        jnp.zeros((1, 256)), bits
    )
    np.testing.assert_array_equal(ids, [[0, 0, 1, 1, 2, 255]])


@pytest.mark.slow
def test_frequencies():
    """Each count within 5 standard deviations, all of them together within 5 too."""
    (h, W), tokens, n = make(2.0, 40), 64, 4000
    p = softmax(h[:1], W)[0]
    h = np.tile(h[:1], (tokens, 1))
    ids = np.asarray(jaxmem.sample_ids(h, W, n, KEY, CHUNK))
    total = tokens * n
    counts = np.bincount(ids.ravel(), minlength=40)
    deviation = (counts - total * p) / np.sqrt(total * p * (1 - p))
    assert np.abs(deviation).max() < 5
    chi_squared = ((counts - total * p) ** 2 / (total * p)).sum()
    assert abs(chi_squared - 39) < 5 * math.sqrt(2 * 39)
    # Draws of one token are independent, as are those of two tokens.
    for a, b in ((ids[:, 1:], ids[:, :-1]), (ids[1:], ids[:-1])):
        both = np.mean(a == b)
        same = (p * p).sum()
        assert abs(both - same) < 5 * math.sqrt(same * (1 - same) / a.size)


def test_excluded_columns_are_never_drawn():
    h, W = make()
    bias = np.where(np.arange(V) % 3 == 0, 0, -np.inf).astype(np.float32)
    assert (biased(h, W, bias) % 3 == 0).all()
    certain = np.where(np.arange(V) == 7, 0, -np.inf).astype(np.float32)
    assert (biased(h, W, certain) == 7).all()


@pytest.mark.slow
def test_sample_ids_depend_on_key_and_position_only(optimized):
    """Not on the chunk, other tokens, or their mask."""
    h, W = make()
    want = np.asarray(jaxmem.sample_ids(h, W, 20, KEY, 16))
    keys, where = column_sampling.token_keys(KEY, (N,)), np.arange(5, N) % 3 > 0
    some = np.asarray(jaxmem.sample_ids(h[5:], W, 20, keys[5:], None, where=where))
    np.testing.assert_array_equal(some[where], want[5:][where])
    assert (some[~where] == -1).all()
    raw = jax.random.key_data(KEY)
    np.testing.assert_array_equal(jaxmem.sample_ids(h, W, 20, raw, 16), want)
    other = jaxmem.sample_ids(h, W, 20, jax.random.key(4), 16)
    assert np.mean(other == want) < 0.5
    np.testing.assert_array_equal(jaxmem.sample_ids(h, W, 20, KEY, 16), want)


def test_sample_ids_of_nan_row_alone():
    h, W = make()
    want = np.array(jaxmem.sample_ids(h, W, 50, KEY, CHUNK))
    h[5], want[5] = np.nan, -1
    np.testing.assert_array_equal(jaxmem.sample_ids(h, W, 50, KEY, CHUNK), want)


@pytest.mark.full
def test_vmap_over_tokens_and_their_keys():
    h, W = make()
    keys = column_sampling.token_keys(KEY, (32,)).reshape(2, 16)

    def draw(h, key=KEY):
        return jaxmem.sample_ids(h, W, 3, key, CHUNK)

    mapped = jax.vmap(draw)(h[:32].reshape(2, 16, D), keys)
    np.testing.assert_array_equal(mapped.reshape(32, 3), draw(h[:32]))


def test_products_of_32_bits():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (1000, 3), np.uint32)
    bits[:2] = [[0, 1, 2**32 - 1], [2**16 - 1, 2**16, 2**31]]
    total = rng.integers(0, 2**31, (1000, 1)).astype(np.int32)
    total[:6, 0] = 0, 1, 2**16 - 1, 2**16, 2**30, 2**31 - 1
    want = [[int(b) * int(total[i, 0]) >> 32 for b in x] for i, x in enumerate(bits)]
    np.testing.assert_array_equal(draws._scale_bits(jnp.asarray(bits), total), want)


H, W_ = make()
ERRORS = [
    ({"n": 0}, ValueError, "n must be an integer, at least 1 and below 2**31, got 0"),
    ({"n": True}, ValueError,
     "n must be an integer, at least 1 and below 2**31, got True"),
    ({"key": 3}, TypeError,
     "key must be a PRNG key, as jax.random.key makes them, got 3"),
    ({"key": None}, TypeError,
     "key must be a PRNG key, as jax.random.key makes them, got None"),
    ({"key": jax.random.split(KEY, 3)}, ValueError,
     "key must be one PRNG key or one for each token, [37], got keys of shape [3]"),
    ({"where": np.ones(3, bool)}, ValueError,
     "where must broadcast to the tokens' shape (37,), got shape (3,)"),
    ({"implementation": "hopper"}, NotImplementedError,
     "implementation='hopper' has no sample_ids: its kernels reduce one head's logits "
     "to the statistics of token_stats and keep no row of them; pass "
     "implementation=None"),
]  # fmt: skip


@pytest.mark.parametrize("changes,kind,message", ERRORS, ids=lambda x: str(x)[:30])
def test_errors(changes, kind, message):
    with pytest.raises(kind) as caught:
        described(jaxmem.sample_ids)(
            **({"hidden": H, "W": W_, "n": 3, "key": KEY} | changes)
        )
    assert str(caught.value) == message
