"""The head under jax's transformations, and what its derivative keeps and refuses."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import print_saved_residuals

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import Case

pytestmark = pytest.mark.usefixtures("on_one_device", "quick_compilation")

N, D, V, CHUNK = 48, 8, 200, 16


@pytest.fixture
def problem():
    h, W, y = Case(N, D, V).make()
    return jnp.asarray(h), jnp.asarray(W), jnp.asarray(np.where(y % 5, y, -1))


def loss(h, W, y):
    """Mixes every output."""
    stats = jaxmem.token_stats(h, W, y, CHUNK)
    return sum(jnp.sum(jnp.cos(field)) for field in stats[:4])


@jax.jit
def reference(h, W, y):
    return jax.value_and_grad(loss, (0, 1))(h, W, y)


def assert_same(got, want, rtol=2e-5):
    chex.assert_trees_all_close(got, want, rtol=rtol, atol=2e-5)


@pytest.mark.slow
def test_scan_inside_the_loss(problem):
    h, W, y = problem

    def scanned(h, W):
        @jax.checkpoint
        def body(total, part):
            return total + loss(part[0], W, part[1]), None

        return lax.scan(body, 0.0, (h.reshape(3, -1, D), y.reshape(3, -1)))[0]

    got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(h, W)
    assert_same(got, reference(*problem))


@pytest.mark.slow
def test_vmap_over_heads(problem):
    h, W, y = problem
    heads = jnp.stack([W, 2 * W, W - 1])
    got = jax.jit(jax.vmap(jax.grad(loss, 1), (None, 0, None)))(h, heads, y)
    want = jnp.stack([reference(h, head, y)[1][1] for head in heads])
    assert_same(got, want)


def test_vmap_keeps_the_chunk_bound(problem):
    """The mapped axis runs in sequence: no [B, chunk, V] appears."""
    h, W, y = problem
    mapped = jax.jit(jax.vmap(lambda h, y: jaxmem.logprobs(h, W, y, CHUNK)))
    text = mapped.lower(h.reshape(4, -1, D), y.reshape(4, -1)).as_text()
    assert f"<{CHUNK}x{V}xf32" in text and f"<4x{CHUNK}x{V}xf32" not in text


def test_nothing_of_logits_size_is_saved(problem):
    _, pull = jax.vjp(functools.partial(loss, y=problem[2]), *problem[:2])
    sizes = [leaf.size for leaf in jax.tree.leaves(pull)]
    assert max(sizes) <= max(N * D, V * D)


def test_statistics_are_named_for_remat_policies(problem, capsys):
    h, W, y = problem
    names = ("jaxmem_max", "jaxmem_log_sum", "jaxmem_logprob")
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def fn(h):
        again = jaxmem.Recompute()
        return jaxmem.logprobs(jnp.sin(h), W, y, CHUNK, gradient=again).sum()

    print_saved_residuals(jax.checkpoint(fn, policy=policy), h)
    assert capsys.readouterr().out.count("jaxmem_call") == len(names)
    print_saved_residuals(jax.checkpoint(fn), h)
    assert "jaxmem_call" not in capsys.readouterr().out


def test_temperature_under_stop_gradient(problem):
    h, W, y = problem

    def fn(h, t):
        return jaxmem.logprobs(h, W, y, temperature=lax.stop_gradient(t)).sum()

    dh, dt = jax.jit(jax.grad(fn, (0, 1)))(h, 0.5)
    _, (want, *_) = oracle.head(h, W, y, {"logprob": np.ones(N)}, temperature=0.5)
    assert dt == 0
    np.testing.assert_allclose(dh, want, rtol=2e-5, atol=2e-5)


def test_mixed_types_sum_in_type_of_weights(problem):
    """W in float32, hidden in bfloat16: dW never passes through bfloat16."""
    h, W, y = problem
    h16 = h.astype(jnp.bfloat16)

    def mean(h, W):
        return jaxmem.logprobs(h, W, y, CHUNK).sum()

    dh, dW = jax.jit(jax.grad(mean, (0, 1)))(h16, W)
    assert dh.dtype == jnp.bfloat16 and dW.dtype == jnp.float32
    rounded = dW.astype(jnp.bfloat16).astype(jnp.float32)
    assert (rounded != dW).mean() > 0.5
    _, (_, want, _) = oracle.head(h16, W, y, {"logprob": np.ones(N)})
    np.testing.assert_allclose(dW, want, atol=0.02 * np.abs(want).max())
