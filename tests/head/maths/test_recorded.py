"""Recorded entries: their probabilities, and sums that they estimate, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.maths import column_sampling, recorded
from tests.helpers.cases import Case
from tests.helpers.recorded import enumerate_starts, starts_of_each_set

pytestmark = pytest.mark.usefixtures("quick_compilation")

K, V = 5, 40


def row(std, seed=0):
    rng = np.random.default_rng(seed)
    z = (std * rng.standard_normal(V)).astype(np.float32)
    return z, int(rng.integers(V))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("std", [0.5, 3.0, 8.0])
def test_columns_are_kept_with_their_probabilities(std, monkeypatch):
    enumerate_starts(monkeypatch)
    z, y = row(std)
    p = softmax(np.float64(z))
    p[y] = 0
    starts, weights, q = starts_of_each_set(np.float32(p), K)
    many = np.tile(z, (len(starts), 1)), np.full(len(starts), y)
    entries = recorded.record(*many, K, jnp.asarray(starts, jnp.uint32))
    kept = np.zeros((len(starts), V + 1))
    columns = np.minimum(entries.columns, V)
    kept[np.arange(len(starts))[:, None], columns] = 1
    got = weights @ kept[:, :V]
    np.testing.assert_allclose(got, q, atol=4 * V / 2**27)
    assert not got[y] and np.all(got[p > 0] > 0)
    assert np.all(got >= np.minimum(1, (K * 0.99 - 0.01) * p) - 1e-6)


def test_record_has_logits_and_exact_statistics():
    z, y = row(3.0)
    z[7] = -np.inf  # padding
    rows, labels = np.stack([z, z, z]), np.array([y, -1, V])
    draws = jnp.arange(3, dtype=jnp.uint32) << 30
    entries = jax.jit(recorded.record, static_argnums=2)(rows, labels, K, draws)
    p, live = softmax(np.float64(z)), np.asarray(entries.columns[0]) < V
    assert 0 < live.sum() <= K and y not in np.asarray(entries.columns[0])
    columns = np.asarray(entries.columns[0])[live]
    np.testing.assert_array_equal(entries.logits[0][live], z[columns])
    assert entries.label_logit[0] == z[y]
    ln_p = np.where(p > 0, np.log(np.maximum(p, 1e-300)), 0)
    want = np.log(np.sum(np.exp(np.float64(z)))), -np.sum(p * ln_p), np.sum(p * p)
    got = [x[0] for x in entries[3:]]
    np.testing.assert_allclose(got, want, rtol=2e-6)
    for x in entries[1:]:  # tokens without a label
        assert not np.asarray(x)[1:].any()
    assert np.all(np.asarray(entries.columns)[1:] >= V)
    assert entries.columns.dtype == jnp.int32


HEADS = {
    "plain": ({}, {}),
    "all": (
        {"softcap": 4.0, "vocab_size": V - 3, "layout": "dv"},
        {"temperature": 0.7},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_record_entries_is_record_of_logits(name):
    """The old pass records scaled logits, whatever the head has."""
    described, options = HEADS[name]
    h, W, y = Case(6, 24, V, std=3.0).make()
    y = np.where(np.arange(6) == 2, -1, y % (V - 3)).astype(np.int32)
    bias = np.linspace(-1, 1, V, dtype=np.float32) if described else None
    head = jaxmem.Head(
        W.T if described.get("layout") == "dv" else W, bias=bias, **described
    )
    key = jax.random.key(2)
    run = functools.partial(jaxmem.record_entries, k=K, key=key, **options)
    entries = jax.jit(run)(h, head, y)
    z = np.float64(h) @ np.float64(W).T + (0 if bias is None else bias)
    if described:
        z = 4 * np.tanh(z / 4) / 0.7
        z[:, V - 3 :] = -np.inf
    draws = column_sampling.draws(column_sampling.token_keys(key, (6,)))
    want = recorded.record(jnp.float32(z), y, K, draws)
    np.testing.assert_array_equal(
        np.minimum(entries.columns, V), np.minimum(want.columns, V)
    )
    for got, expected in zip(entries[1:], want[1:], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_record_entries_have_the_tokens_shape_and_no_derivative():
    h, W, y = Case(6, 24, V).make()
    h, y = h.reshape(2, 3, 24), y.reshape(2, 3)

    def total(h, W):
        entries = jaxmem.record_entries(h, W, y, K, jax.random.key(0))
        assert entries.columns.shape == entries.logits.shape == (2, 3, K)
        assert all(x.shape == (2, 3) for x in entries[2:])
        return sum(jnp.sum(x) for x in entries[1:])

    slopes = jax.grad(total, (0, 1))(h, W)
    assert not any(np.asarray(x).any() for x in slopes)
