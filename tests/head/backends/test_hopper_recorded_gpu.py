"""Recorded entries by kernels, on the chip: records, results and gradients of XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.maths import recorded
from tests.helpers.cases import Case
from tests.helpers.recorded import moved

pytestmark = pytest.mark.gpu
N, D, V, K = 600, 320, 5001, 64


@functools.cache
def problem():
    h, W, y = Case(N, D, V, std=3.0).make()
    h, new_h = h, moved(h, W, 0.02)[0]
    new_W = moved(h, W, 0.02)[1]
    y = np.where(np.arange(N) % 7 == 2, -1, y % 4900).astype(np.int32)
    return *(jnp.asarray(x, jnp.bfloat16) for x in (h, W, new_h, new_W)), y


def head(W, layout):
    W = W if layout == "vd" else W.T
    return jaxmem.Head(W, vocab_size=4900, layout=layout, softcap=20.0)


@functools.partial(jax.jit, static_argnames=("layout", "implementation"))
def record(h, W, y, layout, implementation):
    return jaxmem.record_entries(
        h, head(W, layout), y, K, jax.random.key(1), chunk=256, temperature=0.9,
        implementation=implementation,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("layout", "implementation"))
def run(h, W, y, entries, layout, implementation):
    """((loss, statistics), gradients by hidden and W)."""

    def loss_fn(stats):
        told = stats._replace(is_argmax=stats.is_argmax.astype(jnp.float32))
        return -stats.logprob + 0.1 * stats.entropy, told._asdict()

    def loss(h, W):
        return jaxmem.token_loss(
            loss_fn, h, head(W, layout), y, chunk=256, temperature=0.9,
            gradient=jaxmem.Recorded(entries), implementation=implementation,
        )  # fmt: skip

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(h, W)


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_results_and_gradients_are_those_of_xla(layout):
    h, W, new_h, new_W, y = problem()
    entries = record(h, W, y, layout, "xla")
    (want, told), slopes = run(new_h, new_W, y, entries, layout, "xla")
    (loss, found), made = run(new_h, new_W, y, entries, layout, "hopper")
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert told.keys() == found.keys() and "forward_error" in told
    for name in told.keys() - {"is_argmax"}:
        np.testing.assert_allclose(
            found[name], told[name], rtol=2e-4, atol=2e-5, err_msg=name
        )
    for a, b in zip(made, slopes, strict=True):
        a, b = np.float64(a), np.float64(b)
        assert np.linalg.norm(a - b) < 6e-3 * np.linalg.norm(b)
    again = run(new_h, new_W, y, entries, layout, "hopper")
    jax.tree.map(np.testing.assert_array_equal, again, ((loss, found), made))


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_old_pass_records_what_xla_records(layout):
    """Kernels find entries by rounded exponentials, so other ones in places."""
    h, W, new_h, new_W, y = problem()
    made, want = (record(h, W, y, layout, x) for x in ("hopper", "xla"))
    for a, b in zip(made[2:], want[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-3)
    z = np.float64(h) @ np.float64(W).T
    z = 20 * np.tanh(z / 20) / 0.9
    live = np.asarray(made.columns) < 4900
    assert not live[np.asarray(y) < 0].any()
    rows = np.broadcast_to(np.arange(N)[:, None], live.shape)[live]
    exact = z[rows, np.asarray(made.columns)[live]]
    np.testing.assert_allclose(np.asarray(made.logits)[live], exact, atol=1e-3)
    counts = live.sum(1)[np.asarray(y) >= 0]
    of_xla = (np.asarray(want.columns) < 4900).sum(1)[np.asarray(y) >= 0]
    assert abs(counts.mean() / of_xla.mean() - 1) < 0.02
    # Where every column of large probability is kept by both, ln Z is exact in both.
    p = np.exp(z - np.float64(want.logsumexp)[:, None])[:, :4900]
    certain = p[np.arange(N), np.argmax(p, 1)] * recorded.sampling_of(K, V).rate > 1.05
    on = certain & (np.asarray(y) >= 0) & (np.argmax(p, 1) != np.asarray(y))
    top = np.argmax(p, 1)[:, None]
    assert np.all(np.any(np.asarray(made.columns) == top, 1)[on]) and on.sum() > 100
    exact_lnz = jaxmem.token_stats(
        new_h, head(new_W if layout == "vd" else new_W, layout), np.abs(y),
        temperature=0.9,
    ).logsumexp  # fmt: skip
    found = run(new_h, new_W, y, made, layout, "hopper")[0][1]
    far = np.where(y >= 0, found["logsumexp"] - exact_lnz, 0)
    told = np.asarray(found["forward_error"])
    ratio = np.sqrt(np.mean(far**2)) / np.sqrt(np.mean(told**2))
    assert 0.3 < ratio < 1.5, ratio
