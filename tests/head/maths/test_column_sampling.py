"""Sampled entries of a derivative, against integers, and their bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.maths import column_sampling
from jaxmem.head.maths.column_sampling import Sampling
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


def kept_by_definition(facts, p, start):
    """Columns of one row where a multiple of u lies, in integers; in slots."""
    q = np.minimum((p * np.float32(facts.rate * facts.one)).astype(int) + 1,
                   facts.one)  # fmt: skip
    end = np.cumsum(np.where(p > 0, q, 0)) + int(start)
    multiples = np.diff(end // facts.one, prepend=0)
    assert multiples.max() <= 1
    return np.nonzero(multiples)[0]


def random_exps(n, v, std, seed=0):
    rng = np.random.default_rng(seed)
    z = std * rng.standard_normal((n, v))
    exps = np.exp(z - z.max(1, keepdims=True)).astype(np.float32)
    return exps, (1 / exps.sum(1)).astype(np.float32)


@pytest.mark.parametrize(
    "slots, v",
    [
        (1, 1), (5, 300), slow(5, 7), slow(128, 16), slow(1, 33), slow(1024, 33),
        slow(128, 300), slow(128, 4099),
    ],
)  # fmt: skip
def test_selection_by_definition(slots, v):
    facts = Sampling(slots, v)
    exps, scale = map(np.concatenate, zip(
        *(random_exps(6, v, std) for std in (0.0, 2.0, 20.0)), strict=True
    ))  # fmt: skip
    exps[np.arange(18), np.arange(18) % v] = 0  # the labels
    exps[-1] = 0
    starts = np.array([0, 1, 2, facts.one - 2, facts.one - 1, 5] * 3, np.int32)
    got = jax.jit(column_sampling.select, static_argnums=0)(facts, exps, scale, starts)
    for i in range(18):
        p = exps[i] * scale[i]
        want = kept_by_definition(facts, p, starts[i])
        padding = slots - len(want)
        assert padding >= 0
        want = np.pad(want, (0, padding), constant_values=v)
        np.testing.assert_array_equal(got.columns[i], want)
        p = np.append(p, np.float32(0))[want]
        np.testing.assert_array_equal(got.p[i], p)


@pytest.mark.parametrize("v", [512, slow(50257), 151936, slow(2**20)])
@pytest.mark.parametrize("slots", [1, 16, 100, 1024])
def test_slots_suffice_for_any_distribution(slots, v):
    """Whatever rounds up: probabilities of a few units, or that add up to too much."""
    facts = Sampling(slots, v)
    assert facts.slots * facts.one <= 2**30
    units = jax.jit(functools.partial(column_sampling.units, facts))
    for p in (np.full(v, 1.0001 / v), np.geomspace(1, 1e-30, v),
              np.append(np.full(slots, 1.0 / slots), np.full(v, 1e-30))):  # fmt: skip
        p = (p / p.sum() * 1.0001).astype(np.float32)
        q = np.asarray(units(p), np.int64)
        assert q.min() >= (p > 0).min() and q.max() <= facts.one
        assert q.sum() <= slots * facts.one


def test_units_of_nan_are_zero():
    p = jnp.array([np.nan, -np.nan, 0.0, 1e-30, 1.0, 1.00001])
    facts = Sampling(128, 6)
    got = column_sampling.units(facts, p)
    np.testing.assert_array_equal(got, [0, 0, 0, 1, facts.one, facts.one])


def test_starts_follow_from_key_and_token():
    facts, key = Sampling(100, 300), jax.random.key(3)
    keys = column_sampling.token_keys(key, (50, 100))
    every = column_sampling.starts(facts, column_sampling.draws(keys.reshape(-1)))
    few = column_sampling.starts(facts, column_sampling.draws(keys[0, 70:90]))
    np.testing.assert_array_equal(every[70:90], few)
    assert column_sampling.token_keys(keys, (50, 100)) is keys
    assert 0 <= every.min() and every.max() < facts.one
    assert abs(float(every.mean()) / facts.one - 0.5) < 0.02
    other = column_sampling.token_keys(jax.random.key(4), (5000,))
    other = column_sampling.starts(facts, column_sampling.draws(other))
    assert np.mean(np.asarray(every) == other) < 0.01


def test_shard_starts_uniform_and_distinct():
    facts = Sampling(100, 300)
    draws = column_sampling.draws(
        column_sampling.token_keys(jax.random.key(0), (4096,))
    )
    every = np.stack([column_sampling.starts(facts, draws, i) for i in range(4)])
    u = every / facts.one
    assert np.all(np.abs(u.mean(1) - 0.5) < 0.02)
    assert np.all(np.abs(np.corrcoef(u) - np.eye(4)) < 0.06)
    # A bijection of the draws: each start stands for as many of them.
    low = np.arange(2**16, dtype=np.uint32)
    whole = column_sampling.starts(Sampling(2**14, 2**15), jnp.asarray(low << 16), 3)
    assert np.bincount(np.asarray(whole) >> 10, minlength=64).std() < 5 * 32
