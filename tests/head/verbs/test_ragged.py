"""Ragged supports against float64 and against dense ones; what is not valid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import packing
from tests.helpers.described import described
from tests.helpers.selected import (
    CHUNK,
    D,
    N,
    V,
    changed,
    cotangents,
    exact,
    make as make_dense,
    materialised,
    ours as ours_dense,
)
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_as_good

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

MAX_IDS = 11  # between widths, of which 4 and 8 are below
ENTRIES = N * MAX_IDS + 9  # of every support here, so that all run one program


def make(std=1.0, limit=V):
    """hidden, W, labels, and dense supports of 1 to MAX_IDS ids, one of each width."""
    h, W, _, _ = make_dense(std)
    rng = np.random.default_rng(1)
    counts = rng.integers(1, MAX_IDS + 1, N)
    counts[:8] = 1, 2, 4, 5, 8, 9, MAX_IDS - 1, MAX_IDS
    ids = np.stack([rng.permutation(limit)[:MAX_IDS] for _ in range(N)])
    ids = np.where(np.arange(MAX_IDS) < counts[:, None], ids, -1).astype(np.int32)
    return h, W, ids[np.arange(N), counts // 2].copy(), ids


@functools.partial(jax.jit, static_argnames=("layout", "options", "chunk", "max_ids"))
def ours(operands, g, arrays, layout="vd", options=(), chunk=CHUNK, max_ids=MAX_IDS):
    """Value, and the gradients of hidden, W and bias, if any; supports are traced."""
    h, W, y, ids, offsets = operands

    def call(h, W, bias):
        W = W if layout == "vd" else W.T
        given = arrays | bias | {"layout": layout} | dict(options)
        given |= {"offsets": offsets, "max_ids": max_ids}
        return described(jaxmem.support_logprobs)(h, W, y, ids, chunk, **given)

    value, pull = jax.vjp(call, h, W, {k: v for k, v in arrays.items() if k == "bias"})
    return value, jax.tree.leaves(pull(g))


def ragged(operands, after=7):
    """The operands with a CSR support, with entries of no token at both ends."""
    h, W, y, dense = operands
    ids, offsets = packing.support_to_csr(dense)
    before = ENTRIES - len(ids) - after
    noise = np.resize([-7, V], before), np.full(after, V + 5)
    ids = np.concatenate([noise[0], ids, noise[1]]).astype(np.int32)
    return h, W, y, ids, offsets + before


def everything(**changes):
    """A mask and a bias, so that tests with and without them share one program."""
    return {"where": np.ones(N, bool), "bias": np.zeros(V, np.float32)} | changes


def check(operands, dtype="float32", layout="vd", chunk=CHUNK, **options):
    h, W, y, dense = operands
    operands = [jnp.asarray(h).astype(dtype), jnp.asarray(W).astype(dtype), y, dense]
    g = cotangents("support")
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    numbers = tuple((k, v) for k, v in options.items() if k not in arrays)
    given = everything(**arrays)
    logprobs, gradients = ours(ragged(operands), g, given, layout, numbers, chunk)
    rough, rough_gradients = materialised(operands, g, arrays, "support", numbers)
    want, exact_gradients = exact("support", g, operands, **options)
    assert logprobs.dtype == jnp.float32 and logprobs.shape == want.shape
    assert (np.asarray(logprobs) <= 0).all()
    assert_as_good(logprobs, rough, want, STATS_EPSILON, "logprobs")
    for name, got, near, need in zip(
        ("dhidden", "dW", "dbias"), gradients, rough_gradients, exact_gradients,
        strict=False,
    ):  # fmt: skip
        assert_as_good(got, near, need, EPSILON[got.dtype.name], name)


@pytest.mark.parametrize("std", [0.0, 1.0, 15.0], ids=["flat", "ordinary", "peaked"])
def test_values_and_gradients(std):
    check(make(std))


def test_ids_that_repeat_or_are_absent():
    h, W, y, dense = make()
    dense[:, 5] = y
    dense[::2, 1] = dense[::2, 0]
    operands = h, W, y, dense
    csr = ragged((h, W, y, np.where(dense < 0, V, dense)))  # as many ids a token
    ids = np.where(csr[3] == V, -5, csr[3])
    value, gradients = ours(
        (*csr[:3], ids, csr[4]), cotangents("support"), everything()
    )
    want, need = exact("support", cotangents("support"), operands)
    np.testing.assert_allclose(value, want, rtol=2e-6, atol=2e-6)
    for got, exact_one in zip(gradients, need, strict=False):
        np.testing.assert_allclose(got, exact_one, atol=2e-5)


def test_equal_widths_equal_dense_form_bitwise():
    h, W, y, dense = make()
    dense[:] = np.where(dense < 0, (dense[:, :1] + np.arange(MAX_IDS)) % V, dense)
    g = cotangents("support")
    want, of_dense = ours_dense((h, W, y, dense), g, {}, "support")
    value, (dh, dW, _) = ours(ragged((h, W, y, dense)), g, everything())
    np.testing.assert_array_equal(value, want)
    for got, exact_one in zip((dh, dW), of_dense, strict=True):
        np.testing.assert_array_equal(got, exact_one)


def test_token_independent_of_others():
    h, W, y, dense = make()
    order = np.random.default_rng(2).permutation(N)
    g = cotangents("support")
    want, (dh, *_) = ours(ragged((h, W, y, dense)), g, everything())
    shuffled = h[order], W, y[order], dense[order]
    got, (moved, *_) = ours(ragged(shuffled), g[order], everything())
    np.testing.assert_array_equal(got, want[order])
    np.testing.assert_array_equal(moved, dh[order])


@pytest.mark.slow
def test_any_leading_shape_and_integer_type():
    dense = [x[:24] if len(x) == N else x for x in make()]
    h, W, y, ids, offsets = ragged(dense)
    offsets, options = offsets.astype(np.uint64), {"max_ids": MAX_IDS}

    @jax.jit
    def run(h, y, ids):
        cut = h.reshape(2, 3, 4, D), W, y.reshape(2, 3, 4), ids
        one = h[0], W, y[0], ids
        return [
            jaxmem.support_logprobs(*x, offsets=at, **options)
            for x, at in ((cut, offsets), (one, offsets[:2]))
        ]

    shaped, one = run(h, y, ids.astype(np.int16))
    want, _ = exact("support", np.ones(24), dense)
    np.testing.assert_allclose(shaped, want.reshape(2, 3, 4), atol=2e-6)
    assert one.shape == () and abs(one - want[0]) < 1e-6


def test_masked_tokens_give_exactly_nothing():
    h, W, y, dense = make()
    where = np.arange(N) % 4 == 0
    h[~where], y[1] = np.nan, V + 5
    dense[2], dense[5, :] = -1, V + 7  # empty, and one that does not exist
    g, operands = cotangents("support"), ragged((h, W, y, dense))
    value, (dh, dW, _) = ours(operands, g, everything(where=where))
    assert not value[~where].any() and not dh[~where].any()
    assert np.isfinite(value).all() and np.isfinite(dh).all()
    want, need = exact("support", g[where], [h[where], W, y[where], dense[where]])
    np.testing.assert_allclose(value[where], want, atol=2e-6)
    np.testing.assert_allclose(dW, need[1], atol=1e-5)
    padding = np.where(where, y, -1)
    alike, (also_dh, also_dW, _) = ours((h, W, padding, *operands[3:]), g, everything())
    for a, b in zip((alike, also_dh, also_dW), (value, dh, dW), strict=True):
        np.testing.assert_array_equal(a, b)
    value, gradients = ours(operands, g, everything(where=np.zeros(N, bool)))
    assert not value.any() and not any(x.any() for x in gradients)


def poisoned(operands, bad):
    """Check that exactly these tokens are NaN, and others not where g does not ask."""
    g, bad = cotangents("support"), np.isin(np.arange(N), bad)
    value, (dh, *_) = ours(operands, g, everything())
    np.testing.assert_array_equal(np.isnan(value), bad)
    np.testing.assert_array_equal(np.isnan(dh).any(1), bad)
    _, unused = ours(operands, np.where(bad, 0, g), everything())
    assert all(np.isfinite(x).all() for x in unused)


def test_invalid_id_is_nan_in_its_token():
    h, W, y, dense = make()
    dense[7], dense[9, dense[9] == y[9]] = -1, -1  # empty; without its label
    dense[11, 0] = V
    poisoned(ragged((h, W, y, dense)), [7, 9, 11])


def test_too_many_ids_poison_only_their_tokens():
    h, W, y, dense = make()
    more = np.full((N, 1), -1)
    more[[7, 20]] = np.setdiff1d(np.arange(V), dense[[7, 20]])[0]
    dense = np.concatenate([dense, more], axis=1).astype(np.int32)
    counts = (dense >= 0).sum(1)
    poisoned(ragged((h, W, y, dense)), np.flatnonzero(counts > MAX_IDS))


def test_invalid_offsets_are_nan_in_their_tokens():
    h, W, y, ids, offsets = ragged(make(), after=0)
    first, offsets[20] = offsets[20], offsets[19] - 1
    poisoned((h, W, y, ids, offsets), [19, 20])  # which overlap
    offsets[20] = first
    offsets[-1] = ENTRIES + 1
    poisoned((h, W, y, ids, offsets), [N - 1])
    offsets[-1], offsets[:2] = ENTRIES, (-(2**31) + 1, -1)
    poisoned((h, W, y, ids, offsets), [0, 1])


def test_label_excluded_by_bias_is_impossible():
    """-inf, and its gradient moves mass to no place that is not a number."""
    h, W, y, dense = make()
    bias = np.zeros(V, np.float32)
    bias[y[3]] = -np.inf
    of_label = y == y[3]
    value, gradients = ours(
        ragged((h, W, y, dense)), cotangents("support"), everything(bias=bias)
    )
    np.testing.assert_array_equal(np.isneginf(value), of_label)
    assert np.isfinite(value[~of_label]).all()
    assert all(np.isfinite(x).all() for x in gradients[:2])


def test_ragged_support_without_ids():
    h, W, y, _ = make()
    none = np.zeros(0, np.int32), np.zeros(N + 1, np.int32)
    for labels, bad in ((y, True), (np.full(N, -1), False)):
        run = jax.jit(functools.partial(jaxmem.support_logprobs, max_ids=3))
        value = run(h, W, labels, none[0], offsets=none[1])
        assert np.isnan(value).all() if bad else not value.any()
    empty = jaxmem.support_logprobs(h[:0], W, y[:0], none[0], offsets=[0], max_ids=3)
    assert empty.shape == (0,)


@pytest.mark.slow
def test_under_checkpoint_and_vmap():
    h, W, y, dense = (x[:32] if len(x) == N else x for x in make())
    halves = [packing.support_to_csr(dense[i : i + 16], capacity=400) for i in (0, 16)]
    stacked = [np.stack(x) for x in zip(*halves, strict=True)]

    @jax.checkpoint
    def total(h, W, y, ids, offsets):
        options = {"offsets": offsets, "max_ids": MAX_IDS}
        value = jaxmem.support_logprobs(h, W, y, ids, CHUNK, **options)
        return jnp.sum(jnp.cos(value)), value

    def mapped(h, W):
        cut = h.reshape(2, 16, D), W, y.reshape(2, 16), *stacked
        sums, values = jax.vmap(total, (0, None, 0, 0, 0))(*cut)
        return sums.sum(), values

    got, value = jax.jit(jax.grad(mapped, (0, 1), has_aux=True))(h, W)
    want, _ = exact("support", np.ones(32), (h, W, y, dense))
    np.testing.assert_allclose(value.ravel(), want, atol=2e-6)
    _, need = exact("support", -np.sin(want), (h, W, y, dense))
    for a, b in zip(got, need, strict=False):
        np.testing.assert_allclose(a, b, atol=2e-5)


# What is refused, and how.

GOOD = dict(
    zip(
        ("hidden", "W", "labels", "support_ids", "offsets"), ragged(make()), strict=True
    )
) | {"max_ids": MAX_IDS}
IDS, OFFSETS, LABELS = GOOD["support_ids"], GOOD["offsets"], GOOD["labels"]

ERRORS = [
    ({"max_ids": None}, ValueError,
     "max_ids must be given with offsets: the most ids that a token may have, such as "
     "the sampler's top_k"),
    ({"max_ids": 0}, ValueError,
     "max_ids must be an integer, at least 1 and below 2**31, got 0"),
    ({"offsets": None}, ValueError,
     "max_ids must be None without offsets, got 11; a dense support has as many ids as "
     "its last axis"),
    ({"support_ids": IDS[None]}, ValueError,
     "support_ids must have one axis with offsets, which say where each token's ids "
     f"begin, got shape (1, {len(IDS)})"),
    ({"support_ids": IDS * 0.5}, TypeError,
     "support_ids must be integers, got float64; convert them with "
     "support_ids.astype('int32')"),
    ({"offsets": OFFSETS * 1.0}, TypeError,
     "offsets must be integers, got float64; convert them with "
     "offsets.astype('int32')"),
    ({"offsets": OFFSETS[1:]}, ValueError,
     "offsets must have one entry per token and one more, shape (38,), got (37,)"),
    ({"offsets": changed(OFFSETS, 5, 0)}, ValueError,
     f"offsets must not decrease, got {OFFSETS[4]} and then 0 at 5"),
    ({"offsets": OFFSETS - OFFSETS[0] - 1}, ValueError,
     f"offsets must be from 0 to {len(IDS)}, the entries of support_ids, got -1 to "
     f"{OFFSETS[-1] - OFFSETS[0] - 1}"),
    ({"offsets": changed(OFFSETS, -1, 2**31 - 1)}, ValueError,
     f"offsets must be from 0 to {len(IDS)}, the entries of support_ids, got "
     f"{OFFSETS[0]} to 2147483647"),
    ({"max_ids": 10}, ValueError,
     "offsets must give a token at most max_ids=10 ids, got 11 at token 7; raise "
     "max_ids, or mask the token with where="),
    ({"support_ids": changed(IDS, OFFSETS[0] + 2, V)}, ValueError,
     "support_ids must be below vocab_size=130, got 130; mark absent entries "
     "with a negative id, or exclude the token with where="),
    ({"labels": changed(LABELS, 3, (LABELS[3] + 1) % V)}, ValueError,
     f"labels must be among the support_ids of their token, but {LABELS[3] + 1} at "
     "(3,) is not; mark padding with a negative label or with where="),
]  # fmt: skip


@pytest.mark.parametrize("changes,kind,message", ERRORS, ids=lambda x: str(x)[:30])
def test_errors(changes, kind, message):
    with pytest.raises(kind) as error:
        jaxmem.support_logprobs(**(GOOD | changes))
    assert str(error.value) == message


def test_masked_ids_are_not_checked():
    where = np.arange(N) != 7
    masked = GOOD | {"where": where}
    masked["support_ids"] = changed(IDS, slice(OFFSETS[7], OFFSETS[8]), V)
    assert jax.eval_shape(lambda: jaxmem.support_logprobs(**masked)).shape == (N,)
