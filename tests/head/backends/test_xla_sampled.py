"""The loops of sampled derivatives in plain XLA: against float64, and their bounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.backends import xla, xla_sampled
from jaxmem.head.maths import column_sampling, row_stats
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import Sampling
from jaxmem.head.maths.spec import Spec
from tests.helpers import oracle
from tests.helpers.cases import CASES, Case, slow
from tests.helpers.sampled_gradients import FLOATS, SAVED, cotangents, random_draws

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.partial(jax.jit, static_argnums=0)
def run(spec, source, rows, g):
    """(outputs, entries, derivative, gradients) of the backend, in one program."""
    made, entries = xla_sampled.forward(spec, source, rows, SAVED)
    saved = row_stats.Outputs(**made, is_argmax=jnp.zeros(0))
    cotangents = row_stats.Cotangents(*(g.get(k) for k in FLOATS))
    operands = rows, saved, cotangents, entries
    dz = column_sampling.derivative_by_products(
        spec, column_sampling.sampling_of(spec), *operands
    )
    return made, entries, dz, xla_sampled.backward(spec, source, *operands)


def arguments(h, W, y, *, chunk=64, where=True, temperature=None, bias=None, **options):
    """(spec, source, rows) of one call."""
    layout = options.pop("layout", "vd")
    columns = W.shape[0 if layout == "vd" else 1]
    spec = Spec(
        columns, options.pop("vocab_size", columns), chunk, FLOATS, h.dtype, layout,
        **options,
    )  # fmt: skip
    h, W, y, temperature, bias = jax.tree.map(jnp.asarray, (h, W, y, temperature, bias))
    return spec, Factors(h, W, bias), TokenRows(y, (y >= 0) & where, temperature)


def call(h, W, y, g, slots, *, key=0, token_ids=None, **options):
    spec, source, rows = arguments(h, W, y, gradient_samples=slots, **options)
    draws = random_draws(96 if token_ids is not None else len(y), key)
    draws = draws if token_ids is None else draws[jnp.asarray(token_ids)]
    return run(spec, source, rows._replace(draws=draws), g)


def exact_outputs(h, W, y, **options):
    spec, *operands = arguments(h, W, y, **options)
    return jax.jit(xla.forward, static_argnums=(0, 3))(spec, *operands, SAVED)


def dense(dz, v):
    """[N, V] of the entries."""
    n = len(dz.columns)
    made = np.zeros((n, v + 1))
    np.add.at(made, (np.arange(n)[:, None], np.asarray(dz.columns)), dz.values)
    return made[:, :v]


N_DRAWS, V, D, K = 4096, 200, 8, 16


@functools.cache
def one_row():
    """A token whose probabilities lie on both sides of 1/K, as many times."""
    h, W, y = Case(1, D, V, std=2.0).make()
    return np.repeat(h, N_DRAWS, 0), W, np.repeat(y, N_DRAWS)


@functools.cache
def draws(name):
    """(entries, derivative, gradients, those in float64, probabilities)."""
    h, W, y = one_row()
    g = {k: np.full(N_DRAWS, -1.5 * (k == name), np.float32) for k in FLOATS}
    _, (dh, _, _) = oracle.head(h[:1], W, y[:1], {name: g[name][:1]})
    z = h[:1].astype(np.float64) @ W.T
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    return *call(h, W, y, g, K)[1:], dh, p[0]


def exact_dz(p, y, name):
    """dz of one row in float64, for a cotangent of -1.5."""
    onehot, entropy = np.arange(V) == y, -np.sum(p * np.log(p))
    return -1.5 * {
        "logprob": onehot - p, "entropy": -p * (np.log(p) + entropy), "logsumexp": p,
        "sum_pi_squared": 2 * p * (p - np.sum(p * p)),
    }[name]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FLOATS)
def test_sampled_mean_is_the_derivative(name):
    _, dz, grads, dh, p = draws(name)
    y, want = one_row()[2][0], exact_dz(p, one_row()[2][0], name)
    got = dense(dz, V)
    q = np.minimum(1, Sampling(K, V).rate * p)
    q[y] = 1
    deviation = np.abs(want) * np.sqrt((1 - q) / q / N_DRAWS)
    error = np.abs(got.mean(0) - want)
    assert np.all(error < 4.5 * deviation + 3e-6)  # of 200 columns
    assert np.sum(error > 2 * deviation + 3e-6) < 0.1 * V
    # The same draws, as both products see them.
    W = one_row()[1].astype(np.float64)
    assert (
        abs(np.asarray(grads.hidden).mean(0) - dh[0]).max()
        < 4.5 * np.sqrt(deviation**2 @ W**2).max() + 1e-5
    )
    np.testing.assert_allclose(grads.hidden, got @ W, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(grads.W, got.T @ one_row()[0], rtol=1e-4, atol=2e-3)


@pytest.mark.full
def test_sampled_large_entries_exact_and_few():
    entries, dz, _, _, p = draws("logprob")
    y, got = one_row()[2][0], dense(dz, V)
    exact = (p >= 1.01 / K) | (np.arange(V) == y)
    assert 3 <= exact.sum() < K and not exact.all()
    want = np.broadcast_to(exact_dz(p, y, "logprob"), got.shape)
    np.testing.assert_allclose(got[:, exact], want[:, exact], rtol=2e-5)
    assert (got != 0).sum(1).max() <= K + 1
    live = np.asarray(entries.columns) < V
    np.testing.assert_array_equal(live, np.asarray(entries.p) > 0)
    assert len({tuple(row) for row in np.asarray(entries.columns)}) > 50


def test_noise_is_below_that_of_a_label():
    """Its trace: m/κ, and so 1/(K-1) of what one label from the model has."""
    _, dz, _, _, p = draws("logprob")
    small = np.delete(p, one_row()[2][0])
    rate = Sampling(K, V).rate
    trace = dense(dz, V).var(0).sum() / 1.5**2
    assert trace < 1.05 * small[small < 1 / rate].sum() / rate
    assert trace < 1.05 * np.sum(p * (1 - p)) / (K - 1)
    assert trace > 0.5 * np.sum(small[small < 1 / rate] * (1 / rate - small[
        small < 1 / rate]))  # fmt: skip


@pytest.mark.full
def test_sampled_bits_depend_on_key():
    h, W, y = Case(40, 16, 300).make()
    g = cotangents(40)
    a, b, other = (call(h, W, y, g, 8, key=key)[1:] for key in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert np.any(np.asarray(a[0].columns) != other[0].columns)


@pytest.mark.slow
def test_sampled_token_independent_of_chunk_and_masks(optimized):
    h, W, y = Case(96, 16, 300).make()
    g = cotangents(96)
    made, entries, _, grads = call(h, W, y, g, 8, chunk=16)
    exact = exact_outputs(h, W, y, chunk=96)
    jax.tree.map(np.testing.assert_array_equal, made, exact)
    ids = np.random.default_rng(0).permutation(96)[:40]
    few = call(h[ids], W, y[ids], {k: v[ids] for k, v in g.items()}, 8,
               chunk=40, token_ids=ids)  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[ids], b), entries, few[1])
    on = np.isin(np.arange(96), ids)
    _, masked, _, masked_grads = call(h, W, y, g, 8, chunk=16, where=on)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[on], b[on]), entries, masked
    )
    np.testing.assert_array_equal(masked.columns[~on], 300)
    np.testing.assert_array_equal(grads.hidden[on], masked_grads.hidden[on])


@pytest.mark.full
@pytest.mark.parametrize("name", ["peaked", "logits to 1e4", "label -100 everywhere",
                                  "NaN in masked rows", slow("V=1")])  # fmt: skip
def test_sampled_entries_exact_or_empty(name):
    """An entry is empty, or dz/q of a column that is no other's and not the label."""
    v = min(CASES[name].v, 300)
    h, W, y = dataclasses.replace(CASES[name], n=40, d=16, v=v).make()
    _, entries, dz, grads = call(h, W, y, cotangents(40), 8)
    live = np.asarray(entries.p) > 0
    assert np.all((np.asarray(entries.columns) == v) == ~live)
    assert not np.any(live & (np.asarray(entries.columns) == y[:, None]))
    assert not live[y < 0].any()
    for x in jax.tree.leaves((grads, dz)):
        assert np.isfinite(x).all()
    label = np.asarray(dz.columns)[:, 0]
    np.testing.assert_array_equal(label, np.where(y >= 0, y, v))
    for row in np.asarray(dz.columns):
        row = row[row < v]
        assert len(set(row)) == len(row)


def test_all_the_mass_in_one_column():
    h, W = np.eye(1, 16, dtype=np.float32).repeat(40, 0), np.zeros((300, 16))
    W[7, 0] = 200
    y = np.arange(40, dtype=np.int32)
    g = {k: v * (k == "logprob") for k, v in cotangents(40).items()}
    *_, dz, grads = call(h, W.astype(np.float32), y, g, 8)
    onehot = np.eye(300)
    want = g["logprob"][:, None] * (onehot[y] - onehot[7])
    np.testing.assert_allclose(dense(dz, 300), want, atol=1e-7)
    np.testing.assert_allclose(grads.W[:, 0], want.sum(0), atol=1e-6)


@pytest.mark.parametrize("name", ["logprob", "entropy"])
def test_sampled_invalid_label_is_nan_where_used(name):
    h, W, y = Case(40, 16, 300).make()
    y[[0, 2]] = 300, 1000
    g = {k: v * (k == name) for k, v in cotangents(40).items()}
    made, *_, grads = call(h, W, y, g, 8)
    np.testing.assert_array_equal(np.isnan(made["logprob"]), y >= 300)
    bad = np.isnan(np.asarray(grads.hidden)).any(1)
    np.testing.assert_array_equal(bad, (y >= 300) & (name == "logprob"))


@pytest.mark.full
def test_frozen_head_has_no_gradient():
    h, W, y = Case(40, 16, 300).make()
    g = cotangents(40)
    *_, want = call(h, W, y, g, 8)
    *_, got = call(h, W, y, g, 8, frozen_head=True)
    assert got.W is None and got.bias is None
    np.testing.assert_array_equal(got.hidden, want.hidden)


@pytest.mark.full
@pytest.mark.parametrize(
    "columns", [slow([0] * 5000), [3] * 700 + [5, 6] + [99] * 2000]
)
def test_both_ways_to_add_a_column_up(columns, monkeypatch):
    """On a CPU one pair after another, elsewhere by products; many of one column."""
    rng = np.random.default_rng(0)
    columns, n = np.array(columns, np.int32), len(columns)
    tokens, values = rng.integers(0, 50, n), rng.standard_normal(n)
    h = rng.standard_normal((50, 8)).astype(np.float32)
    columns = np.append(columns, [100] * 9)
    pairs = column_sampling.SortedEntries(*map(jnp.asarray, (
        columns, np.append(tokens, [0] * 9).astype(np.int32),
        np.append(values, [np.nan] * 9).astype(np.float32),
    )))  # fmt: skip
    want = np.zeros((100, 8))
    np.add.at(want, columns[:n], values[:, None] * h[tokens])
    spec = Spec(100, 100, 64, FLOATS, np.dtype("float32"), "vd")
    head = Factors(jnp.asarray(h), jnp.zeros((100, 8)), jnp.zeros(100))
    for way in (xla_sampled._scatter_pairs, xla_sampled._multiply_pairs):
        monkeypatch.setattr(xla_sampled, "_scatter_pairs", way)
        monkeypatch.setattr(xla_sampled, "_BLOCK_NUMBERS", 8 * 30)  # 4 blocks
        got, bias = xla_sampled._to_weights(spec, pairs, head.hidden, head)
        np.testing.assert_allclose(got, want, atol=2e-4)
        bias_want = np.bincount(columns[:n], values, 100)
        np.testing.assert_allclose(bias, bias_want, atol=2e-4)
