"""The head under jax's transformations, and what its derivative keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import print_saved_residuals

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import Case
from tests.helpers.programs import count_gemms

pytestmark = pytest.mark.usefixtures("on_one_device", "quick_compilation")

N, D, V, CHUNK = 48, 8, 200, 16


@pytest.fixture
def problem():
    h, W, y = Case(N, D, V).make()
    return jnp.asarray(h), jnp.asarray(W), jnp.asarray(np.where(y % 5, y, -1))


def logprobs(h, W, y):
    return jnp.cos(jaxmem.logprobs(h, W, y, CHUNK)).sum()


def token_stats(h, W, y):
    """Mixes every output."""
    return sum(jnp.sum(jnp.cos(x)) for x in jaxmem.token_stats(h, W, y, CHUNK)[:4])


def token_loss(h, W, y):
    def loss_fn(stats):
        return jnp.cos(stats.logprob) + stats.entropy**2

    return jaxmem.token_loss(loss_fn, h, W, y, chunk=CHUNK)[0]


def exact(loss, h, W, y):
    """Gradients of hidden, W and the bias, in float64."""
    got, _ = oracle.head(h, W, y, {"logprob": np.zeros(N)})
    n = (y >= 0).sum()
    g = {
        logprobs: {"logprob": -np.sin(got["logprob"])},
        token_loss: {
            "logprob": -np.sin(got["logprob"]) / n,
            "entropy": 2 * got["entropy"] / n,
        },
        token_stats: {k: -np.sin(x) for k, x in got.items()},
    }[loss]
    return oracle.head(h, W, y, g)[1]


# Several derivatives of one call.


@pytest.mark.full
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_frozen_head_does_not_freeze_next_call(problem, order):
    """Eagerly, where one cached trace could serve the wrong call."""
    for frozen in order:

        def loss(h, W, y, frozen=frozen):
            return logprobs(h, lax.stop_gradient(W) if frozen else W, y)

        assert jax.grad(loss, 1)(*problem).any() != frozen


@pytest.mark.parametrize(
    "fn, wrap",
    [(logprobs, lambda f: f), (token_loss, jax.checkpoint), (token_stats, lambda f: f)],
)
@pytest.mark.slow
def test_traced_function_has_several_derivatives(problem, fn, wrap):
    """jax keeps one structure of residuals for all of them."""
    jitted, (h, W, y) = wrap(jax.jit(fn)), problem
    both = exact(fn, h, W, y)
    for order in ((0,), (0, 1), (1,), (0,), (0, 1)):
        got = jax.grad(jitted, order)(h, W, y)
        for x, i in zip(got, order, strict=True):
            np.testing.assert_allclose(x, both[i], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [logprobs, token_loss, token_stats])
def test_residuals_hold_no_more_weights(problem, fn):
    """Residuals hold nothing of W but itself, and at most one row of D a token."""

    def pulled(h, W, y):
        return jax.vjp(lambda h: fn(h, W, y), h)[1]

    pull, W = jax.eval_shape(pulled, *problem), problem[1]
    sizes = [x.size for x in jax.tree.leaves(pull)]
    if fn is not token_loss:  # some way of differentiation makes the logits again
        sizes.remove(W.size)
    assert max(sizes) <= N * D


def test_nothing_of_logits_size_is_saved(problem):
    _, pull = jax.vjp(functools.partial(token_stats, y=problem[2]), *problem[:2])
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


# Cotangents that are not numbers, or none.


def test_masked_token_is_zero_for_nan_cotangent(problem):
    h, W, y = problem
    h = jnp.where((y < 0)[:, None], jnp.nan, h)
    out, pull = jax.vjp(lambda h: jaxmem.logprobs(h, W, y, CHUNK), h)
    (dh,) = pull(jnp.where(y < 0, jnp.nan, 1.0))
    assert not dh[y < 0].any() and np.isfinite(dh).all() and not out[y < 0].any()


def test_invalid_label_is_nan_where_used(problem):
    h, W, y = problem
    y = jnp.where(jnp.arange(N) < 2, V, abs(y))

    @jax.jit
    def pulled(y, g):
        run = functools.partial(jaxmem.logprobs, chunk=CHUNK)
        out, pull = jax.vjp(lambda h: run(h, W, y), h)
        return out, pull(g)[0]

    out, dh = pulled(y, jnp.where(jnp.arange(N) == 0, 0.0, 1.0))
    assert np.isnan(out[:2]).all() and np.isfinite(out[2:]).all()
    assert not dh[0].any() and np.isnan(dh[1]).all() and np.isfinite(dh[2:]).all()


def test_gradient_is_zero_without_cotangent(problem):
    h, W, y = problem

    def unused(h):
        lp = jaxmem.logprobs(h, W, y, CHUNK)
        return lax.stop_gradient(lp).sum() + h.sum()

    assert (jax.grad(unused)(h) == 1).all()


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


# Transformations.


@pytest.mark.full
def test_under_checkpoint_and_its_policies(problem):
    """A policy that saves the kept gradient by its name saves its GEMMs too."""
    policy = jax.checkpoint_policies.save_only_these_names("jaxmem_dhidden")

    def step(h, *rest, **how):
        return jax.value_and_grad(jax.checkpoint(logprobs, **how))(h, *rest)

    want, gemms = exact(logprobs, *problem)[0], []
    for how in ({}, {"policy": policy}):
        run = jax.jit(functools.partial(step, **how)).lower(*problem).compile()
        np.testing.assert_allclose(run(*problem)[1], want, rtol=2e-5, atol=1e-5)
        gemms.append(count_gemms(run.as_text()))
    assert gemms[1] <= gemms[0] and gemms[1] <= 4


@pytest.mark.slow
def test_vmap_over_heads(problem):
    h, W, y = problem
    heads = jnp.stack([W, 2 * W, W - 1])
    got = jax.jit(jax.vmap(jax.grad(token_stats, 1), (None, 0, None)))(h, heads, y)
    for each, head in zip(got, heads, strict=True):
        want = exact(token_stats, h, head, y)[1]
        np.testing.assert_allclose(each, want, rtol=2e-5, atol=2e-5)


def test_vmap_keeps_the_chunk_bound(problem):
    """The mapped axis runs in sequence: no [B, chunk, V] appears."""
    h, W, y = problem
    mapped = jax.jit(jax.vmap(lambda h, y: jaxmem.logprobs(h, W, y, CHUNK)))
    text = mapped.lower(h.reshape(4, -1, D), y.reshape(4, -1)).as_text()
    assert f"<{CHUNK}x{V}xf32" in text and f"<4x{CHUNK}x{V}xf32" not in text


TABLE = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)


def exported(chunk):
    """`jax.export` of a call with a symbolic number of tokens."""
    (n,) = export.symbolic_shape("n")
    shapes = (
        jax.ShapeDtypeStruct((n, 8), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )

    @jax.jit
    def run(h, y):
        return jaxmem.logprobs(h, TABLE, y, chunk=chunk)

    return export.export(run)(*shapes)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [32, "auto"])
def test_export_serves_any_number_of_tokens(chunk):
    rng, call = np.random.default_rng(1), exported(chunk).call
    for n in (5, 70):
        h, y = rng.standard_normal((n, 8)).astype(np.float32), np.arange(n) % 40
        got = call(h, y.astype(np.int32))
        np.testing.assert_allclose(got, jaxmem.logprobs(h, TABLE, y), rtol=1e-5)


def test_export_of_one_chunk_names_symbolic_size():
    message = "^chunk must be a number of tokens or 'auto', not None, .* symbolic, n"
    with pytest.raises(ValueError, match=message):
        exported(None)
