"""Attention of one token to a cache: against float64, interpreted; lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models.kernels import cached_attention
from tests.helpers import hlo
from tests.helpers.cases import full, slow
from tests.helpers.interpreter import needs_pallas

pytestmark = needs_pallas

# rows, key-value heads, group, slots, width, layers
SHAPES = {
    "more programs than heads": (1, 2, 4, 264, 64, 3),
    "one query a head": (3, 2, 1, 72, 64, 2),
    "wide heads": (2, 1, 2, 136, 256, 1),
    "less than a block": (2, 1, 12, 24, 128, 2),
}


@pytest.fixture
def interpreted(rows_interpreted, monkeypatch):
    """The interpreter multiplies no factor that is in registers."""

    def product(a, b, columns):
        return jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def added(acc, a, b):
        return acc + product(a, b, acc.shape[1])

    monkeypatch.setattr(cached_attention, "_multiply", product)
    monkeypatch.setattr(cached_attention, "_accumulate", added)


def problem(shape, dtype=jnp.bfloat16):
    """(query, token, cached), and the slots that each row sees."""
    rows, heads, group, slots, width, layers = shape
    rng = np.random.default_rng(0)

    def normal(*axes):
        return jnp.asarray(rng.normal(size=axes), dtype)

    query = normal(rows, heads, group, width)
    token = normal(rows, heads, width), normal(rows, heads, width)
    seen = (rng.random((rows, slots)) < 0.7) & (np.arange(slots) < slots * 2 // 3)
    seen[0] = False  # the new token alone
    # What no row may see must not reach a result, whatever it is.
    cached = normal(2, layers, rows, heads, slots, width)
    cached = jnp.where(seen[:, None, :, None], cached, 1e9).astype(dtype)
    return query, token, tuple(cached), seen


def place(layer, seen):
    return cached_attention.Place(jnp.int32(layer), jnp.asarray(seen))


def exact(query, token, cached, layer, seen, scale, softcap):
    """Attention in float64, one row and head at a time."""
    query, *token = (np.asarray(x, np.float64) for x in (query, *token))
    cached = [np.asarray(x[layer], np.float64) for x in cached]
    out = np.empty(query.shape)
    for row, head in np.ndindex(query.shape[:2]):
        keys, values = (
            np.concatenate([all_[row, head, seen[row]], own[row, head, None]])
            for all_, own in zip(cached, token, strict=True)
        )
        scores = scale * query[row, head] @ keys.T
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, head] = weights @ values / weights.sum(-1, keepdims=True)
    return out


@pytest.mark.parametrize(
    "name, softcap",
    [
        full("wide heads", None),
        slow("more programs than heads", 2.0),
        slow("less than a block", 2.0),
        slow("one query a head", None),
        slow("more programs than heads", None),
        slow("one query a head", 2.0),
        slow("wide heads", 2.0),
        slow("less than a block", None),
    ],
)
def test_against_float64(name, softcap, interpreted):
    shape = SHAPES[name]
    query, token, cached, seen = problem(shape)
    layer = shape[-1] - 1
    got = cached_attention.attend(
        query, token, cached, place(layer, seen), scale=0.3, softcap=softcap
    )
    assert (got.shape, got.dtype) == (query.shape, query.dtype)
    want = exact(query, token, cached, layer, seen, 0.3, softcap)
    # Weights and the result are rounded to bfloat16; values are up to 4.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=2.0**-6)


@pytest.mark.full
def test_cached_attention_reads_visible_blocks_only(interpreted):
    shape = 4, 1, 4, 5 * cached_attention.BLOCK - 8, 64, 1
    query, token, cached, _ = problem(shape)
    blocks = np.array(
        [[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0] * 5], bool
    )
    of_slots = np.repeat(blocks, cached_attention.BLOCK, axis=1)[:, : shape[3]]
    seen = of_slots & (np.random.default_rng(1).random(of_slots.shape) < 0.5)
    cached = tuple(jnp.where(seen[:, None, :, None], x, 0) for x in cached)
    unread = ~of_slots[:, None, :, None]
    spoilt = tuple(jnp.where(unread, jnp.nan, x) for x in cached)
    got = cached_attention.attend(query, token, spoilt, place(0, seen), scale=0.3)
    want = exact(query, token, cached, 0, seen, 0.3, None)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=2.0**-6)


def test_supports_listed_shapes():
    def supports(dtype="bfloat16", group=4, width=128, cached="bfloat16", slots=8):
        query = jax.ShapeDtypeStruct((2, 2, group, width), dtype)
        keys = jax.ShapeDtypeStruct((1, 2, 2, slots, width), cached)
        return cached_attention.supports(query, keys)

    assert supports() and supports("float16", 16, 64, "float16")
    assert not supports("float32", cached="float32")
    assert not supports("float16")
    assert supports(group=1) and supports(group=64)
    assert not supports(group=72)
    assert not supports(width=96) and not supports(width=512)
    assert not supports(slots=12)


@pytest.mark.parametrize(
    "name", [x if x == "less than a block" else slow(x) for x in SHAPES]
)
def test_lowered_for_a_gpu(name):
    query, token, cached, seen = problem(SHAPES[name])
    run = jax.jit(functools.partial(cached_attention.attend, scale=0.3, softcap=3.0))
    text = hlo.lowered_for_an_h200(run, query, token, cached, place(0, seen))
    assert "cached_attention" in text and "mosaic" in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_on_a_gpu(shape):
    query, token, cached, seen = problem(shape)
    got = jax.jit(functools.partial(cached_attention.attend, scale=0.3))(
        query, token, cached, place(0, seen)
    )
    want = exact(query, token, cached, 0, seen, 0.3, None)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=2.0**-6)
