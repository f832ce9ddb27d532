"""token_loss: a loss known inside, its gradient in one pass, against float64."""

import functools
import traceback
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from jaxmem.head.maths import checks
from jaxmem.head.verbs import rule
from tests.helpers import oracle
from tests.helpers.argument_errors import ERRORS, GOOD, Traced
from tests.helpers.cases import Case, slow
from tests.helpers.described import described
from tests.helpers.programs import CPU
from tests.helpers.token_losses import nll, ppo

F32 = jnp.float32


# These programs are tiny: all their time would go into optimizing them.
pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


def arguments(problem, seed=3):
    """Advantages and old log-probabilities near the new ones; NaN where masked."""
    rng = np.random.default_rng(seed)
    new = oracle.head(*problem, {"logprob": np.zeros(len(problem.y))})[0]["logprob"]
    old = new + 0.3 * rng.standard_normal(len(problem.y))
    advantage = rng.standard_normal(len(problem.y))
    masked = problem.y < 0
    return tuple(
        np.where(masked, np.nan, x).astype(np.float32) for x in (advantage, old)
    )


N, D, V, CHUNK = 48, 8, 200, 16


@pytest.fixture
def problem():
    h, W, y = Case(N, D, V).make()
    return Case(N, D, V).make()._replace(y=np.where(y % 5, y, -1))


def total(h, W, y, *per_token, loss_fn=ppo, **options):
    return described(jaxmem.token_loss)(
        loss_fn, h, W, y, *per_token, chunk=CHUNK, **options
    )


GRADIENTS = {"argnums": (0, 1, 3, 4), "has_aux": True}
differentiated = jax.jit(jax.value_and_grad(total, **GRADIENTS))


@pytest.mark.full
@pytest.mark.parametrize("loss_fn", [nll, ppo])
def test_metrics_are_float32_per_token(problem, loss_fn):
    loss, metrics = total(*problem, *arguments(problem), loss_fn=loss_fn)
    assert loss.shape == () and isinstance(metrics, dict)
    assert sorted(metrics) == ([] if loss_fn is nll else ["hit", "ratio", "square"])
    for metric in metrics.values():
        assert metric.shape == (N,) and metric.dtype == jnp.float32
        assert not metric[problem.y < 0].any() and np.isfinite(metric).all()


def test_metrics_have_no_gradient(problem):
    def metric(h):
        return total(h, *problem[1:], *arguments(problem))[1]["ratio"].sum()

    def by_metric(h):
        """A total whose loss_fn closes over a constant, which is allowed."""
        mean = metric(h) / N
        return total(h, *problem[1:], loss_fn=lambda s: -s.logprob * mean)[0]

    none, some = jax.jit(lambda h: [jax.grad(f)(h) for f in (metric, by_metric)])(
        problem.h
    )
    assert not none.any() and some.any()


@pytest.mark.full
def test_any_leading_shape_and_trailing_axes(problem):
    weights = np.random.default_rng(0).random((N, 3), np.float32)

    def loss_fn(stats, weights):
        assert weights.shape == (*stats.logprob.shape, 3)
        return weights.sum(1) * stats.logprob, {"first": weights[:, 0]}

    def run(h, y, weights):
        return total(h, problem.W, y, weights, loss_fn=loss_fn)

    grad = jax.value_and_grad(run, (0, 2), has_aux=True)
    (want, flat), (dh, dweights) = grad(problem.h, problem.y, weights)
    (got, metrics), (dh2, dweights2) = grad(
        problem.h.reshape(2, 4, 6, D), problem.y.reshape(2, 4, 6),
        weights.reshape(2, 4, 6, 3),
    )  # fmt: skip
    assert got == want and metrics["first"].shape == (2, 4, 6)
    np.testing.assert_array_equal(metrics["first"].ravel(), flat["first"])
    np.testing.assert_array_equal(dh2, dh.reshape(2, 4, 6, D))
    np.testing.assert_array_equal(dweights2, dweights.reshape(2, 4, 6, 3))
    assert dweights[problem.y >= 0].all() and not dweights[problem.y < 0].any()


@pytest.mark.full
def test_arguments_of_any_type(problem):
    keep = problem.y % 2 == 0

    def loss_fn(stats, keep, count, scale):
        return jnp.where(keep, stats.logprob, 0) * count.astype(F32) * scale.astype(F32)

    scale = jnp.full(N, 2, jnp.bfloat16)
    got, dscale = jax.value_and_grad(
        lambda scale: total(*problem, keep, problem.y, scale, loss_fn=loss_fn)[0]
    )(scale)
    logprob = oracle.head(*problem, {"logprob": np.zeros(N)})[0]["logprob"]
    want = np.sum(keep * logprob * problem.y * (problem.y >= 0)) * 2
    assert got == pytest.approx(float(want) / (problem.y >= 0).sum(), rel=1e-5)
    assert dscale.dtype == jnp.bfloat16
    assert dscale.astype(F32).sum() == pytest.approx(float(got) / 2, rel=1e-2)
    by_count = jax.grad(
        lambda count: total(*problem, keep, count, scale, loss_fn=loss_fn)[0],
        allow_int=True,
    )
    allowed = jax.eval_shape(by_count, problem.y)
    assert allowed.dtype == jax.dtypes.float0


# Masks, counts, empty batches


@pytest.mark.full
@pytest.mark.parametrize("live", [CHUNK + 1, 1])
def test_rows_past_last_active_are_ignored(problem, live):
    """They hold numbers of an active row, so that loss_fn sees no others."""
    where = np.arange(N) < live
    weights = np.where(where, 2.0, 0.0).astype(np.float32)
    seen = []

    def loss_fn(stats, weight):
        jax.debug.callback(lambda *x: seen.append(x), weight, stats.logsumexp)
        return jnp.log(weight) * stats.logprob / weight

    value, (dh, dweight) = jax.value_and_grad(
        lambda h, weight: total(
            h, problem.W, abs(problem.y), weight, loss_fn=loss_fn, where=where
        )[0],
        (0, 1),
    )(problem.h, weights)
    jax.effects_barrier()
    none = {"logprob": np.zeros(N)}
    logsumexp = oracle.head(*problem[:2], abs(problem.y), none)[0]["logsumexp"][where]
    assert len(seen) == -(-live // CHUNK)
    for weight, got in seen:
        assert (weight == 2).all()
        assert np.isclose(got[:, None], logsumexp, rtol=1e-5).any(1).all()
    assert np.isfinite(value)
    for x in (dh, dweight):
        assert x[where].all() and not x[~where].any()


def test_all_masked_is_zero_not_nan(problem):
    operands = *problem[:2], np.full(N, -1), *arguments(problem)
    for normalizer in (None, 0, jnp.zeros((), jnp.int32)):
        (loss, metrics), gradients = jax.value_and_grad(
            functools.partial(total, normalizer=normalizer), **GRADIENTS
        )(*operands)
        assert loss == 0
        assert not any(x.any() for x in (*metrics.values(), *gradients))


def test_invalid_label_is_nan(problem):
    y = np.where(np.arange(N) == 7, V, abs(problem.y))
    loss, metrics = jax.jit(total)(
        *problem[:2], y, *arguments(problem._replace(y=abs(problem.y)))
    )
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(metrics["ratio"]), np.arange(N) == 7)


def test_unseen_negative_normalizer_is_nan(problem):
    operands = *problem, *arguments(problem)
    assert np.isnan(jax.jit(lambda n: total(*operands, normalizer=n)[0])(-1.0))


def test_gradients_accumulate_over_a_scan(problem):
    operands = *problem, *arguments(problem)
    n_active = int((problem.y >= 0).sum())
    h, W, *rows = operands
    parts = jax.tree.map(lambda x: x.reshape(3, N // 3, *x.shape[1:]), (h, *rows))

    @jax.jit
    def accumulate(W, parts):
        def step(sums, part):
            h, *rows = part
            loss, dW = jax.value_and_grad(
                lambda W: total(h, W, *rows, normalizer=n_active)[0]
            )(W)
            return jax.tree.map(jnp.add, sums, (loss, dW)), None

        return lax.scan(step, (0.0, jnp.zeros_like(W)), parts)[0]

    (loss, _), gradients = differentiated(*operands)
    got = accumulate(W, parts)
    chex.assert_trees_all_close(got, (loss, gradients[1]), rtol=1e-5, atol=1e-7)


def test_loss_independent_of_chunk(problem):
    operands = *problem, *arguments(problem)
    run = jax.jit(
        lambda chunk: jaxmem.token_loss(ppo, *operands, chunk=chunk)[0],
        static_argnums=0,
    )
    assert run(16) == run(None) or not CPU


# Transformations and closures


def closing(h, W, y, scale, shift):
    def loss_fn(stats):
        return (shift.astype(F32) - stats.logprob) * scale.sum()

    return total(h, W, y, loss_fn=loss_fn)[0]


@pytest.mark.parametrize(
    "wrap",
    [
        slow(lambda f: jax.grad(f)),
        slow(lambda f: jax.grad(jax.jit(f))),
        lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
        slow(
            lambda f: (
                lambda *a: jax.vmap(jax.grad(f), (None,) * 4 + (0,))(
                    *a[:4], a[4][None]
                )[0]
            )
        ),
    ],
    ids=["grad", "grad of jit", "checkpoint", "vmap"],
)
def test_closed_over_values_may_be_traced(problem, wrap):
    got = wrap(closing)(*problem, jnp.array([1.0, 2.0]), jnp.int32(4))
    want = jax.grad(lambda h: 3 * total(h, *problem[1:], loss_fn=nll)[0])(problem.h)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_inner_jit_closure_is_read_each_time(problem):
    scale = []

    def loss_fn(stats):
        return jax.jit(lambda x: x * scale[-1])(stats.logprob)

    made = []
    for value in (2.0, 4.0):
        scale.append(jnp.array([value]))
        made.append(total(*problem, loss_fn=loss_fn)[0])
    np.testing.assert_allclose(made[1], 2 * made[0], rtol=1e-6)


def test_token_loss_makes_no_nan(problem):
    with jax.debug_nans(True):
        assert np.isfinite(total(*problem, loss_fn=nll)[0])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_closure_over_differentiated_value_refused(problem, wrap):
    with pytest.raises(
        NotImplementedError,
        match=r"^jaxmem: loss_fn closes over an array, float32\[2\], that is being "
        r"differentiated; pass it as a per-token argument \(broadcast to labels' "
        r"shape\), or wrap it in jax.lax.stop_gradient",
    ):
        jax.grad(wrap(closing), (0, 3))(*problem, jnp.array([1.0, 2.0]), jnp.int32(4))


def test_closing_over_what_is_stopped_is_fine(problem):
    def run(h, scale):
        stopped = lax.stop_gradient(scale)

        def loss_fn(stats):
            return -stats.logprob * stopped + lax.stop_gradient(scale)

        return total(h, *problem[1:], loss_fn=loss_fn)[0]

    dh, dscale = jax.grad(run, (0, 1))(problem.h, jnp.float32(2))
    assert dscale == 0 and dh.any()


def test_method_of_changed_object_is_retraced(problem):
    class Scaled:
        scale, table = 1.0, np.ones(1, np.float32)

        def loss(self, stats):
            return -self.scale * stats.logprob * self.table

    made, losses = Scaled(), []
    for scale, entry in ((1.0, 1.0), (2.0, 1.0), (2.0, 2.0)):
        made.scale, made.table = scale, np.full(1, entry, np.float32)
        losses.append(float(total(*problem, loss_fn=made.loss)[0]))
    np.testing.assert_allclose(losses, np.multiply(losses[0], [1, 2, 4]), rtol=1e-6)


def test_eager_calls_compile_once(problem):
    operands = *problem, *arguments(problem)
    total(*operands)
    before = rule._compiled._cache_size()
    total(*operands)
    assert rule._compiled._cache_size() == before


# Errors, and which backend ran

OF_HEAD = {k: v for k, v in GOOD["logprobs"].items()}


def call(loss_fn=nll, *per_token, **changes):
    operands = OF_HEAD | changes
    first = (operands.pop(k) for k in ("hidden", "W", "labels"))
    return described(jaxmem.token_loss)(loss_fn, *first, *per_token, **operands)


@pytest.mark.parametrize(
    ("changes", "exception", "message"),
    [case for case in ERRORS if "logits" not in case[0]],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors_of_the_head(changes, exception, message):
    traced = {k: v.value for k, v in changes.items() if isinstance(v, Traced)}
    plain = {k: v for k, v in changes.items() if k not in traced}
    with pytest.raises((TypeError, ValueError)) as caught:
        jax.jit(lambda traced: call(**plain, **traced))(traced)
    assert type(caught.value) is exception and str(caught.value) == message
    origin = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert Path(origin).parent.name in ("maths", "backends")


RESULT = "loss_fn must return a float array of shape (16,), one number a token of its "
PAIR = "chunk, or a pair of it and a dict of metrics, got "


@pytest.mark.parametrize(("arguments", "options", "exception", "message"), [
    ([checks], {}, TypeError,
     "loss_fn must be a function of a TokenStats and the per-token arguments, "
     f"got {checks!r}"),
    ([lambda s: s.logprob.mean()], {}, TypeError, f"{RESULT}{PAIR}float32 of shape ()"),
    ([lambda s: s.is_argmax], {}, TypeError, f"{RESULT}{PAIR}bool of shape (16,)"),
    ([lambda s: None], {}, TypeError, f"{RESULT}{PAIR}NoneType"),
    ([lambda s: (s.logprob, [s.entropy])], {}, TypeError,
     "loss_fn's metrics must be a dict of names to arrays, got list"),
    ([lambda s: (s.logprob, {"mean": s.entropy.mean()})], {}, TypeError,
     "loss_fn's metric 'mean' must be a real array of shape (16,), one number a "
     "token of its chunk, got float32 of shape ()"),
    ([nll, 2.0], {}, ValueError,
     "per_token[0] must have one entry per token, shape (3,) and maybe further "
     "axes, got shape (); broadcast it, or let loss_fn close over it, if "
     "all tokens share it"),
    ([nll, np.ones(3), np.ones((4, 3))], {}, ValueError,
     "per_token[1] must have one entry per token, shape (3,) and maybe further "
     "axes, got shape (4, 3); broadcast it, or let loss_fn close over it, if "
     "all tokens share it"),
    ([nll, np.ones(3) * 1j], {}, TypeError,
     "per_token[0] must hold real numbers, got complex64"),
    ([nll, None], {}, TypeError,
     "per_token[0] must be an array of numbers, got NoneType"),
    ([nll], {"normalizer": np.ones(3)}, ValueError,
     "normalizer must be a scalar, got shape (3,)"),
    ([nll], {"normalizer": -1}, ValueError,
     "normalizer must be finite and not negative, got -1"),
    ([nll], {"normalizer": float("nan")}, ValueError,
     "normalizer must be finite and not negative, got nan"),
    ([nll], {"normalizer": True}, TypeError,
     "normalizer must be a real number, got bool"),
], ids=lambda x: "")  # fmt: skip
def test_error(arguments, options, exception, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*arguments, **options)
    assert type(caught.value) is exception and str(caught.value) == message


def test_hopper_refuses_and_the_report_says_so():
    with pytest.raises(
        NotImplementedError,
        match="implementation='hopper' cannot run this call: it (needs|multiplies) ",
    ):
        call(implementation="hopper")
    with jaxmem.report() as calls:
        call()
    (made,) = calls.calls
    assert (made.verb, made.implementation) == ("token_loss", "xla")
    assert "'hopper' does not: it" in made.why
