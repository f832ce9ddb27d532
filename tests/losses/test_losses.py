"""Every loss against float64 numpy, its gradient against finite differences of that.

The reference is dense: logits, their softmax, the formula as the paper has it (with its
min and max, where jaxmem clips), and central differences of all of it.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import losses
from tests.helpers.cases import full, slow
from tests.helpers.described import described

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE, V, D = (5, 8), 7, 6
FLOATS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")
STEP = 1e-6


@pytest.fixture(scope="module")
def problem():
    """Logits with labels, what other policies said of them, and advantages."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((*SHAPE, V)).astype(np.float32)
    y = rng.integers(0, V, SHAPE).astype(np.int32)
    lp = dense(z, y)["logprob"]
    given = dict(
        old=lp + rng.normal(0, 0.4, SHAPE),
        ref=lp + rng.normal(0, 0.7, SHAPE),
        A=rng.standard_normal(SHAPE),
        w=rng.uniform(0, 2, SHAPE),
        log_ratio=rng.normal(0, 4e-4, SHAPE),
    )
    given["A"][0, :2] = 0
    return z, y, {k: v.astype(np.float32) for k, v in given.items()}


def dense(z, y):
    """All that a token's loss may be made of, in float64."""
    z = np.asarray(z, np.float64)
    m = z.max(-1, keepdims=True)
    lse = m + np.log(np.exp(z - m).sum(-1, keepdims=True))
    ln_p = z - lse
    return dict(
        logprob=np.take_along_axis(ln_p, y[..., None], -1)[..., 0],
        entropy=-(np.exp(ln_p) * ln_p).sum(-1),
        logsumexp=lse[..., 0],
        sum_pi_squared=np.exp(2 * ln_p).sum(-1),
    )


def named(arrays):
    return types.SimpleNamespace(**arrays)


# ---------------------------------------------------------- formulas of the papers


def surrogate(r, A, low, high, dual=None):
    out = -np.minimum(r * A, np.clip(r, 1 - low, 1 + high) * A)
    if dual is None:
        return out
    return np.where(A < 0, np.minimum(out, -dual * A), out)


def soft_gate(r, A, good, bad):
    """SAPO's loss; TRL, verl and NeMo-RL write it the same way."""
    tau = np.where(A > 0, good, bad)
    return -A * 4 / tau / (1 + np.exp(-tau * (r - 1)))


def k3(lp, ref):
    return np.exp(ref - lp) - 1 - (ref - lp)


def drop(r, low, high):
    """TRL's masked importance sampling, with the lower bound of its #4732."""
    return np.where((r < low) | (r > high), 0, r)


def seq_mask_tis(log_ratio, low, high):
    """NeMo-RL's seq-mask-tis where every row is a sequence and every token counts."""
    mean = np.exp(log_ratio.mean(-1, keepdims=True))
    return np.exp(log_ratio) * ((mean >= low) & (mean <= high))


# name: (ours, reference); `s` is what dense gives, `c` the same, held constant where
# the loss stops the gradient, `o` the other arrays.
TOKEN_LOSSES = {
    "cross_entropy": (lambda s, o: losses.cross_entropy(s.logprob),
     lambda s, c, o: -s.logprob),
    "sft": (lambda s, o: losses.sft(s.logprob, o.w), lambda s, c, o: -o.w * s.logprob),
    "z_loss": (lambda s, o: losses.z_loss(s.logsumexp, coefficient=0.5),
     lambda s, c, o: 0.5 * s.logsumexp**2),
    "policy_gradient": (lambda s, o: losses.policy_gradient(s.logprob, o.A),
     lambda s, c, o: -o.A * s.logprob),
    "ppo_clip": (lambda s, o: losses.ppo_clip(s.logprob, o.old, o.A),
     lambda s, c, o: surrogate(np.exp(s.logprob - o.old), o.A, 0.2, 0.2)),
    "ppo_clip, dual": (
     lambda s, o: losses.ppo_clip(s.logprob, o.old, o.A, dual_clip=1.5),
     lambda s, c, o: surrogate(np.exp(s.logprob - o.old), o.A, 0.2, 0.2, 1.5)),
    "grpo": (lambda s, o: losses.grpo(s.logprob, o.old, o.ref, o.A, beta=0.3),
     lambda s, c, o: (surrogate(np.exp(s.logprob - o.old), o.A, 0.2, 0.2) + 0.3 *
         k3(s.logprob, o.ref))),
    "dr_grpo": (lambda s, o: losses.dr_grpo(s.logprob, o.old, o.A, clip_low=0.1),
     lambda s, c, o: surrogate(np.exp(s.logprob - o.old), o.A, 0.1, 0.2)),
    "dapo": (lambda s, o: losses.dapo(s.logprob, o.old, o.A),
     lambda s, c, o: surrogate(np.exp(s.logprob - o.old), o.A, 0.2, 0.28)),
    "gspo": (lambda s, o: losses.gspo(s.logprob, o.log_ratio, o.A),
     lambda s, c, o: surrogate(np.exp(o.log_ratio + s.logprob - c.logprob), o.A, 3e-4,
         4e-4)),
    "cispo": (
     lambda s, o: losses.cispo(s.logprob, o.old, o.A, clip_low=0.3, clip_high=0.5),
     lambda s, c, o: -np.clip(np.exp(c.logprob - o.old), 0.7, 1.5) * o.A * s.logprob),
    "sapo": (lambda s, o: losses.sapo(s.logprob, o.old, o.A, temperature_neg=1.5),
     lambda s, c, o: soft_gate(np.exp(s.logprob - o.old), o.A, 1.0, 1.5)),
    "entropy_bonus": (lambda s, o: losses.entropy_bonus(s.entropy),
     lambda s, c, o: -0.01 * s.entropy),
    "kl_k1": (lambda s, o: losses.kl_k1(s.logprob, o.ref),
     lambda s, c, o: s.logprob - o.ref),
    "kl_k2": (lambda s, o: losses.kl_k2(s.logprob, o.ref),
     lambda s, c, o: 0.5 * (s.logprob - o.ref) ** 2),
    "kl_k3": (lambda s, o: losses.kl_k3(s.logprob, o.ref),
     lambda s, c, o: k3(s.logprob, o.ref)),
    "kl_low_variance": (
     lambda s, o: losses.kl_low_variance(s.logprob, o.ref, limit=0.2),
     lambda s, c, o: np.minimum(k3(s.logprob, o.ref), 0.2)),
    "truncated_importance_weights": (lambda s, o:
         (losses.truncated_importance_weights(s.logprob, o.ref, cap=1.5) * s.logprob),
     lambda s, c, o: np.minimum(np.exp(c.logprob - o.ref), 1.5) * s.logprob),
    "masked_importance_weights": (lambda s, o:
         (losses.masked_importance_weights(s.logprob, o.ref, cap=1.5) * s.logprob),
     lambda s, c, o: drop(np.exp(c.logprob - o.ref), 0, 1.5) * s.logprob),
    "icepop_weights": (lambda s, o: (losses.icepop_weights(s.logprob, o.ref, low=0.7,
         high=1.5) * s.logprob),
     lambda s, c, o: drop(np.exp(c.logprob - o.ref), 0.7, 1.5) * s.logprob),
    "sequence_mask_weights": (lambda s, o: (losses.sequence_mask_weights(s.logprob,
         o.ref, np.ones(SHAPE, int), low=0.7, high=1.1) * s.logprob),
     lambda s, c, o: seq_mask_tis(c.logprob - o.ref, 0.7, 1.1) * s.logprob),
    "a sum of them": (lambda s, o: (losses.dapo(s.logprob, o.old, o.A) +
         losses.entropy_bonus(s.entropy, coefficient=0.1) + s.sum_pi_squared),
     lambda s, c, o: (surrogate(np.exp(s.logprob - o.old), o.A, 0.2, 0.28) - 0.1 *
         s.entropy + s.sum_pi_squared)),
}  # fmt: skip


@pytest.fixture(scope="module")
def from_logits(problem):
    """The statistics of jaxmem, and what pulls their cotangents back to the logits."""
    z, y, _ = problem

    @jax.jit
    def pull(z, g):
        def stats(z):
            made = jaxmem.token_stats_from_logits(z, y, implementation="xla")
            return {k: getattr(made, k) for k in FLOATS}

        made, pull = jax.vjp(stats, z)
        return made, pull(g)

    zeros = {k: jnp.zeros(SHAPE) for k in FLOATS}
    return pull(z, zeros)[0], lambda g: pull(z, g)[1][0]


@pytest.fixture(scope="module")
def of_every_loss(problem, from_logits):
    """Values and slopes by the statistics, in one program."""

    @jax.jit
    def run(stats, other):
        def both(ours):
            made, back = jax.vjp(lambda x: ours(named(x), named(other)), stats)
            return made, back(jnp.ones_like(made))[0]

        return {name: both(ours) for name, (ours, _) in TOKEN_LOSSES.items()}

    return run(from_logits[0], problem[2])


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_value_and_gradient(name, problem, from_logits, of_every_loss):
    z, y, other = problem
    _, pull = from_logits
    _, reference = TOKEN_LOSSES[name]
    value, slopes = of_every_loss[name]
    assert value.dtype == jnp.float32 and value.shape == SHAPE
    held, other = dense(z, y), {k: v.astype(np.float64) for k, v in other.items()}

    def at(z):
        return reference(*map(named, (dense(z, y), held, other)))

    np.testing.assert_allclose(value, at(z), rtol=1e-5, atol=1e-6)
    gradient = np.stack(
        [
            (at(z + STEP * unit) - at(z - STEP * unit)) / (2 * STEP)
            for unit in np.eye(V, dtype=np.float64)
        ],
        axis=-1,
    )
    np.testing.assert_allclose(pull(slopes), gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_sixteen_bits_where_promotion_is_strict(name, problem):
    z, y, other = problem
    stats = {k: v.astype(np.float32) for k, v in dense(z, y).items()}
    other = {k: v.astype(jnp.bfloat16) for k, v in other.items()}
    with jax.numpy_dtype_promotion("strict"):
        ours, _ = TOKEN_LOSSES[name]
        made = jax.eval_shape(lambda *x: ours(*map(named, x)), stats, other)
    assert made.dtype == jnp.float32


def test_problem_meets_every_branch_and_no_kink(problem):
    z, y, other = problem
    ratio, A = np.exp(dense(z, y)["logprob"] - other["old"]), other["A"]
    for bound in (0.7, 0.8, 0.9, 1.2, 1.28, 1.5):
        assert np.abs(ratio - bound).min() > 1e-5
    assert np.abs(other["log_ratio"] - np.log(1.0004)).min() > 2 * STEP
    log_ratio = dense(z, y)["logprob"] - other["ref"]
    ratio_to_ref, of_rows = np.exp(log_ratio), np.exp(log_ratio.mean(-1))
    assert 0 < ((of_rows >= 0.7) & (of_rows <= 1.1)).sum() < len(of_rows)
    for bound in (0.7, 1.5):
        assert np.abs(ratio_to_ref - bound).min() > 1e-5
    assert (ratio_to_ref < 0.7).any() and (ratio_to_ref > 1.5).any()
    for sign in (A > 0, A < 0):
        assert (sign & (ratio < 0.7)).any() and (sign & (ratio > 1.5)).any()
        assert (sign & (other["log_ratio"] > 5e-4)).any()
        assert (sign & (other["log_ratio"] < -4e-4)).any()


# ------------------------------------------------------------------------- ratios


@functools.partial(jax.jit, static_argnames=("loss", "coefficients"))
def value_and_slope(loss, lp, *rest, coefficients=()):
    made, back = jax.vjp(lambda lp: loss(lp, *rest, **dict(coefficients)), lp)
    return made, back(jnp.ones_like(made))[0]


def test_cispo_without_a_lower_bound_is_verls():
    log_ratio = np.array([-12.0, -3.0, -0.1, 0.1, 3.0, 12.0])
    lp, A = np.linspace(-3, -1, 6), np.array([1.0, -1.0, 2.0, -2.0, 1.0, -1.0])
    # clip_ratio_low=10, clip_ratio_high=0.2, as in verl's example of CISPO: its
    # torch.clamp(ratio, 1 - 10, 1 + 0.2) has no lower bound, as ratios are positive.
    weight = np.clip(np.exp(np.clip(log_ratio, -20, 20)), 1 - 10, 1 + 0.2)
    for clip_low in (10, 10.0, math.inf, 1.0):
        got, slope = value_and_slope(
            lambda lp, old, A, low=clip_low: losses.cispo(
                lp, old, A, clip_low=low, clip_high=0.2
            ),
            *map(jnp.float32, (lp, lp - log_ratio, A)),
        )
        np.testing.assert_allclose(got, -weight * A * lp, rtol=1e-5)
        np.testing.assert_allclose(slope, -weight * A, rtol=1e-5)
    with pytest.raises(ValueError, match="clip_low must be a number, at least 0, got"):
        losses.cispo(lp, lp, A, clip_low=-0.1)


POLICY = {
    "ppo_clip": lambda lp, old, A: losses.ppo_clip(lp, old, A),
    "dual": lambda lp, old, A: losses.ppo_clip(lp, old, A, dual_clip=3.0),
    "grpo": lambda lp, old, A: losses.grpo(lp, old, old, A),
    "grpo without a reference": lambda lp, old, A: losses.grpo(lp, old, None, A),
    "dr_grpo": losses.dr_grpo,
    "dapo": losses.dapo,
    "gspo": lambda lp, old, A: losses.gspo(
        lp, losses.sequence_log_ratio(lp, old, jnp.ones(lp.shape, int)), A
    ),
    "cispo": losses.cispo,
    "sapo": lambda lp, old, A: losses.sapo(lp, old, A),
    "kl_k3": lambda lp, old, A: losses.kl_k3(lp, old),
    "kl_low_variance": lambda lp, old, A: losses.kl_low_variance(lp, old),
    "weights": lambda lp, old, A: losses.truncated_importance_weights(lp, old),
    "masked weights": lambda lp, old, A: losses.masked_importance_weights(lp, old),
    "icepop weights": lambda lp, old, A: losses.icepop_weights(lp, old),
    "sequence weights": lambda lp, old, A: losses.sequence_mask_weights(
        lp, old, jnp.ones(lp.shape, int)
    ),
}


@jax.jit
def of_policies(lp, old, A):
    """Values and slopes of all of them, in one program."""
    return {name: value_and_slope(loss, lp, old, A) for name, loss in POLICY.items()}


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_ratios_do_not_overflow(name, log_ratio):
    # The policy, or the sampler, gave the token no chance at all. The first token of
    # each row is good, the second bad.
    lp = jnp.full((2, 2), min(log_ratio, 0.0))
    A = jnp.array([[1.0, -1.0], [0.0, -3.0]])
    loss, slope = of_policies(lp, lp - log_ratio, A)[name]
    assert np.isfinite(loss).all() and np.isfinite(slope).all()
    if name != "cispo":  # whose weight is clipped, and never its gradient
        assert not slope.any()
    at_edge = of_policies(jnp.full((2, 2), 19.9), jnp.zeros((2, 2)), A)[name]
    assert np.isfinite(at_edge).all()


@pytest.mark.parametrize("name", POLICY)
def test_masked_token_has_ratio_one(name):
    nothing = jnp.zeros((2, 2))
    loss, slope = of_policies(nothing, nothing, nothing)[name]
    want = 1 if name.endswith("weights") else 0
    assert (loss == want).all() and (slope == 0).all()


def test_traced_coefficients_and_16_bits_give_float32():
    lp, A = jnp.array([0.5, 0.5], jnp.bfloat16), jnp.array([1, -1])

    @jax.jit
    def run(clip, coefficient):
        loss = losses.ppo_clip(lp, 0 * lp, A, clip_high=clip, dual_clip=1 + clip)
        return loss + losses.entropy_bonus(lp, coefficient=coefficient)

    got = run(jnp.float32(0.25), jnp.float32(0.5))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [-1.25 - 0.25, 1.25 - 0.25])


def test_old_and_reference_are_constants():
    A, lp = jnp.array([1.0, -1.0]), jnp.array([-1.0, -2.0])

    def total(old, ref, *advantages):
        of_gradient, of_dapo = advantages
        loss = losses.grpo(lp, old, ref, A) + losses.policy_gradient(lp, of_gradient)
        return (loss + losses.dapo(lp, lp, of_dapo)).sum()

    slopes = jax.jit(jax.grad(total, (0, 1, 2, 3)))(lp, lp, A, A)
    assert not np.any(slopes)


# -------------------------------------------------------------------- divergences


def expected(estimator, theta, ref):
    """Over tokens sampled from softmax(theta): all of them, each by its probability."""
    lp = jax.nn.log_softmax(theta)
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(lp)) * estimator(lp, ref))


def kl(a, b):
    return jnp.sum(jnp.exp(a) * (a - b))


def test_estimators_by_enumeration():
    @jax.jit
    def run(theta, ref):
        ref, lp = jax.nn.log_softmax(ref), jax.nn.log_softmax(theta)
        made = {
            estimator: jax.value_and_grad(
                functools.partial(expected, getattr(losses, f"kl_{estimator}"))
            )(theta, ref)
            for estimator in ("k1", "k2", "k3")
        }
        forward = jax.value_and_grad(lambda t: kl(jax.nn.log_softmax(t), ref))(theta)
        reverse = jax.grad(lambda t: kl(ref, jax.nn.log_softmax(t)))(theta)
        return made, forward, reverse, losses.kl_k3(lp, ref)

    with jax.enable_x64(True):
        made, (forward, d_forward), d_reverse, each = jax.tree.map(
            np.asarray, run(*np.random.default_rng(1).standard_normal((2, 6)))
        )
    assert float(forward) > 0.1
    np.testing.assert_allclose(made["k1"][0], forward, rtol=1e-12)
    np.testing.assert_allclose(made["k3"][0], forward, rtol=1e-12)
    assert abs(made["k2"][0] - forward) > 1e-3  # biased
    np.testing.assert_allclose(made["k1"][1], 0, atol=1e-15)
    np.testing.assert_allclose(made["k2"][1], d_forward, rtol=1e-12)
    np.testing.assert_allclose(made["k3"][1], d_reverse, rtol=1e-12)
    assert (each > 0).all()


def test_k3_of_near_policies_does_not_cancel():
    delta = np.float32([0, 1e-7, -1e-7, 1e-4, -1e-4, 1e-2, 0.0299, 0.0301, -0.0301, 1])
    value, slope = value_and_slope(losses.kl_k3, -delta, np.zeros_like(delta))
    exact = delta.astype(np.float64)
    exact = exact**2 / 2 + exact**3 / 6 + exact**4 / 24 + exact**5 / 120
    near = np.abs(delta) < 0.03  # where a series is summed, which rounds thrice
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(value[near], exact[near], rtol=4 * eps)
    np.testing.assert_allclose(value[:-1], exact[:-1], rtol=1e-5)
    np.testing.assert_allclose(value[-1], np.e - 2, rtol=1e-6)
    np.testing.assert_allclose(slope, -np.expm1(delta), rtol=1e-5, atol=1e-12)
    assert (value >= 0).all()


def test_low_variance_kl_has_flat_ceiling():
    value, slope = value_and_slope(
        losses.kl_low_variance, jnp.array([-9.0, -1.0]), jnp.zeros(2)
    )
    np.testing.assert_allclose(value, [10, np.e - 2], rtol=1e-6)
    assert slope[0] == 0 and slope[1] < 0


# ---------------------------------------------------------------- label smoothing


def test_label_smoothing_from_hidden_states():
    """With every option but a softcap."""
    vocab_size = V - 2
    options = {
        "bias": np.linspace(-1, 2, V, dtype=np.float32),
        "temperature": np.linspace(0.5, 2, SHAPE[0], dtype=np.float32),
        "vocab_size": vocab_size,
        "layout": "dv",
    }
    rng = np.random.default_rng(2)
    h = rng.standard_normal((SHAPE[0], D)).astype(np.float32)
    W = rng.standard_normal((V, D)).astype(np.float32)
    y = rng.integers(0, vocab_size, SHAPE[0]).astype(np.int32)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def loss(h, W):
        head = h, W.T
        stats = described(jaxmem.token_stats)(*head, y, implementation="xla", **options)
        mean = described(losses.mean_logit)(*head, **options) - stats.logsumexp
        return losses.label_smoothing(stats.logprob, mean, smoothing=0.3).sum()

    value, (dh, dW) = loss(h, W)
    tau = np.float64(options["temperature"])[:, None]
    h, W = h.astype(np.float64), W.astype(np.float64)
    z = ((h @ W.T + options["bias"]) / tau)[:, :vocab_size]
    ln_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    target = 0.7 * (np.arange(vocab_size) == y[:, None]) + 0.3 / vocab_size
    dz = (np.exp(ln_p) - target) / tau
    np.testing.assert_allclose(value, -(target * ln_p).sum(), rtol=1e-5)
    np.testing.assert_allclose(dh, dz @ W[:vocab_size], atol=3e-6)
    np.testing.assert_allclose(dW[:vocab_size], dz.T @ h, atol=3e-6)
    assert not dW[vocab_size:].any()


def test_mean_logit_of_a_masked_token_is_nothing():
    h, W = np.ones((3, D), "f4"), np.ones((V, D), "f4")
    h[1], where = np.nan, np.array([True, False, True])

    def total(h, W):
        head = jaxmem.Head(W, bias=np.ones(V, "f4"))
        out = losses.mean_logit(h, head, where=where)
        return out.sum(), out

    slopes, out = jax.jit(jax.grad(total, (0, 1), has_aux=True))(h, W)
    np.testing.assert_array_equal(out, [D + 1, 0, D + 1])
    dh, dW = map(np.asarray, slopes)
    assert not dh[1].any() and np.isfinite(dW).all()


def test_mean_logit_temperature_as_logprobs():
    """Any where a token does not count; NaN where it is not positive and does."""
    W, where = jnp.ones((V, D)), jnp.array([True, False, True])

    @jax.jit
    def slope(temperature):
        return jax.grad(
            lambda W: losses.mean_logit(
                jnp.ones((3, D)), W, temperature=temperature, where=where
            ).sum()
        )(W)

    np.testing.assert_allclose(slope(jnp.array([1.0, 0.0, 2.0])), 1.5 / V)
    assert np.isnan(slope(jnp.array([1.0, 1.0, -2.0]))).all()


def test_mean_logit_gradient_by_temperature():
    def total(temperature):
        h, W = jnp.ones((3, D)), jnp.ones((V, D))
        return losses.mean_logit(h, W, temperature=temperature).sum()

    assert jax.grad(total)(2.0) == -3 * D / 4


@pytest.mark.parametrize("promotion", [slow("standard"), "strict"])
def test_mean_logit_of_sixteen_bits_is_float32(promotion):
    h = jnp.ones((2, 512), jnp.bfloat16)
    W = (jnp.arange(4 * 512).reshape(4, 512) % 97 / 97).astype(jnp.bfloat16)
    want = np.asarray(W, np.float64).sum(1).mean()
    with jax.numpy_dtype_promotion(promotion):
        out = jax.jit(losses.mean_logit)(h, W)
        dW = jax.jit(jax.grad(lambda W: losses.mean_logit(h, W).sum()))(W)
    assert (out.dtype, dW.dtype) == (jnp.float32, W.dtype)
    np.testing.assert_allclose(out, want, rtol=1e-6)


# ---------------------------------------------------------------------- sequences

# Two rows: a prompt of two tokens that does not count, padding, an empty sequence.
IDS = np.array([[1, 1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 0]])
ON = np.array([[0, 0, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1, 1, 1]], bool)
SEQUENCES = [(0, [2, 3]), (0, [4, 5]), (1, [0]), (1, [3, 4, 5, 6])]


@pytest.fixture(scope="module")
def packed():
    rng = np.random.default_rng(3)
    lp = -rng.exponential(1, IDS.shape).astype(np.float32)
    old = (lp + rng.normal(0, 1e-3, IDS.shape)).astype(np.float32)
    for x in (lp, old):
        x[~(ON & (IDS > 0))] = np.nan
    return lp, old


def test_sums_and_ratios_of_packed_sequences(packed):
    lp, old = packed
    sum_of = functools.partial(losses.sequence_sum, num_segments=4, where=ON)
    sums = jax.jit(sum_of)(lp, IDS)
    want = np.zeros((2, 4))
    ratio = np.zeros(IDS.shape)
    for row, tokens in SEQUENCES:
        want[row, IDS[row, tokens[0]]] = lp[row, tokens].sum()
        ratio[row, tokens] = (lp[row, tokens] - old[row, tokens]).mean()
    np.testing.assert_allclose(sums, want, rtol=1e-6)
    got = jax.jit(losses.sequence_log_ratio)(lp, old, IDS, where=ON)
    np.testing.assert_allclose(got, ratio, atol=1e-7)
    slope = jax.jit(jax.grad(lambda lp: sum_of(lp, IDS)[1, 2]))(lp)
    np.testing.assert_array_equal(slope, ON & (IDS == 2) & [[False], [True]])


def test_weights_make_a_mean_of_sequence_means():
    mean_weights = jax.jit(losses.sequence_mean_weights)
    weights = mean_weights(IDS, where=ON)
    want = np.zeros(IDS.shape)
    for row, tokens in SEQUENCES:
        want[row, tokens] = 1 / len(tokens) / len(SEQUENCES)
    np.testing.assert_allclose(weights, want, rtol=1e-6)
    # Rows of their own, by the count that the whole step has.
    apart = [mean_weights(IDS[i], where=ON[i], num_sequences=4) for i in (0, 1)]
    np.testing.assert_array_equal(np.stack(apart), weights)
    assert not mean_weights(IDS, where=np.zeros_like(ON)).any()


def test_gspo_is_the_clipped_sequence_objective(packed):
    """Value and gradient of the objective of sequences, with nothing held constant."""
    lp, old = packed
    A = np.array([1.0, -1.0, 0.5, 2.0])
    tokens_A = np.zeros(IDS.shape, np.float32)
    for advantage, (row, tokens) in zip(A, SEQUENCES, strict=True):
        tokens_A[row, tokens] = advantage
    clips = dict(clip_low=3e-4, clip_high=3e-4)

    @jax.jit
    def ours(lp):
        log_ratio = losses.sequence_log_ratio(lp, old, IDS, where=ON)
        weights = losses.sequence_mean_weights(IDS, where=ON)
        lp = jnp.where(weights > 0, lp, 0)  # as jaxmem.logprobs gives it
        return jnp.sum(losses.gspo(lp, log_ratio, tokens_A, **clips) * weights)

    def reference(lp):
        s = np.exp([(lp[r, t] - old64[r, t]).mean() for r, t in SEQUENCES])
        return surrogate(s, A, 3e-4, 3e-4).mean()

    exact, old64 = lp.astype(np.float64), old.astype(np.float64)
    value, slope = jax.value_and_grad(ours)(lp)
    np.testing.assert_allclose(value, reference(exact), rtol=1e-5)
    want = np.zeros(IDS.shape)
    for row, tokens in SEQUENCES:
        for t in tokens:
            unit = np.zeros(IDS.shape)
            unit[row, t] = STEP
            want[row, t] = (
                (reference(exact + unit) - reference(exact - unit)) / 2 / STEP
            )
    np.testing.assert_allclose(slope, want, atol=1e-5)
    moving = [bool(want[row, tokens].any()) for row, tokens in SEQUENCES]
    assert any(moving) and not all(moving)


def test_masks_of_packed_sequences(packed):
    lp, rollout = packed
    ratio = np.exp(lp.astype(np.float64) - rollout)
    bounds = dict(low=0.9995, high=1.0005)
    mean, every = np.zeros((2, *IDS.shape))
    for row, tokens in SEQUENCES:
        of_tokens = ratio[row, tokens]
        inside = (of_tokens >= 0.9995) & (of_tokens <= 1.0005)
        every[row, tokens] = of_tokens * inside.all()
        geometric = np.prod(of_tokens) ** (1 / len(tokens))
        mean[row, tokens] = of_tokens * (0.9995 <= geometric <= 1.0005)
    mask = jax.jit(losses.sequence_mask_weights, static_argnames="statistic")
    got = mask(lp, rollout, IDS, where=ON, **bounds)
    np.testing.assert_allclose(got, mean, rtol=1e-6)
    got = mask(lp, rollout, IDS, where=ON, statistic="every_token", **bounds)
    np.testing.assert_allclose(got, every, rtol=1e-6)
    kept = [
        [bool(x[row, tokens[0]]) for row, tokens in SEQUENCES] for x in (mean, every)
    ]
    assert kept[0] != kept[1] and any(kept[0]) and not all(kept[0])


def test_invalid_segment_id_is_nan():
    @jax.jit
    def run(lp, ids):
        masks = [
            losses.sequence_mask_weights(lp, lp, ids, statistic=statistic)
            for statistic in ("geometric_mean", "every_token")
        ]
        weights = losses.sequence_mean_weights(ids, num_sequences=3)
        sums = losses.sequence_sum(lp, ids, num_segments=3)
        return [losses.sequence_log_ratio(lp, lp, ids), *masks], weights, sums

    ids = np.array([[1, 7, 0], [1, 2, 2]])
    of_tokens, weights, sums = jax.device_get(run(np.zeros((2, 3), "f4"), ids))
    for values in of_tokens:
        np.testing.assert_array_equal(np.isnan(values), [[0, 1, 0], [0, 0, 0]])
    assert np.isnan(weights[0, 1]) and np.isfinite(weights[1]).all()
    assert np.isnan(sums[0]).all() and np.isfinite(sums[1]).all()


# -------------------------------------------------------------------- preferences


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_preferences_from_tokens(name):
    rng = np.random.default_rng(4)
    lp = -rng.exponential(1, (4, 5)).astype(np.float32)  # chosen, rejected, chosen, ...
    ref = (lp + rng.normal(0, 2, lp.shape)).astype(np.float32)
    lengths = np.array([5, 3, 1, 4])
    on = np.arange(5) < lengths[:, None]
    loss = getattr(losses, name)

    def ours(lp):
        chosen, rejected, *rest = (
            losses.sequence_sum(x, on.astype(int), num_segments=2)[first::2, 1]
            for x in (lp, ref)
            for first in (0, 1)
        )
        return loss(chosen, rejected, *rest, beta=0.3).mean()

    def reference(lp):
        sums = np.where(on, lp - ref.astype(np.float64), 0).sum(1)
        h = sums[0::2] - sums[1::2]
        pairs = np.log1p(np.exp(-0.3 * h)) if name == "dpo" else (h - 1 / 0.6) ** 2
        return pairs.mean()

    value, slope = jax.jit(jax.value_and_grad(ours))(lp)
    exact = lp.astype(np.float64)
    np.testing.assert_allclose(value, reference(exact), rtol=1e-5)
    units = STEP * np.eye(lp.size).reshape(-1, *lp.shape)
    want = [(reference(exact + u) - reference(exact - u)) / 2 / STEP for u in units]
    np.testing.assert_allclose(slope.ravel(), want, atol=1e-5)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_preferences_of_means_without_reference(name):
    rng = np.random.default_rng(5)
    means = (-rng.exponential(1, (2, 6))).astype(np.float32)
    means[:, 0] = -1e-3, -30.0
    numbers = dict(beta=1.7, gamma=0.4) if name == "simpo" else dict(beta=0.3)

    def reference(chosen, rejected):
        if name == "simpo":  # eq. 6 of arXiv:2405.14734
            return np.log1p(np.exp(0.4 - 1.7 * (chosen - rejected)))
        odds_c, odds_r = (p / (1 - p) for p in (np.exp(chosen), np.exp(rejected)))
        supervised = -chosen  # eq. 6 and 7 of arXiv:2403.07691
        return supervised - 0.3 * np.log(1 / (1 + odds_r / odds_c))

    def ours(chosen, rejected):
        return getattr(losses, name)(chosen, rejected, **numbers)

    exact = means.astype(np.float64)
    value = jax.jit(ours)(*means)
    np.testing.assert_allclose(value, reference(*exact), rtol=2e-5)
    slopes = jax.jit(jax.grad(lambda *x: ours(*x).sum(), (0, 1)))(*means)
    for slope, unit in zip(slopes, np.eye(2)[..., None], strict=True):
        step = 1e-7 * unit
        want = (reference(*(exact + step)) - reference(*(exact - step))) / 2e-7
        np.testing.assert_allclose(slope, want, rtol=1e-3, atol=2e-5)


def test_orpo_finite_for_certain_completions():
    value, slopes = jax.value_and_grad(
        lambda chosen, rejected: losses.orpo(chosen, rejected).sum(), (0, 1)
    )(jnp.array([0.0, -2000.0, 0.0]), jnp.array([-2000.0, 0.0, 0.0]))
    assert np.isfinite(value)
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_preferences_finite_with_constant_reference():
    far = [jnp.array([x]) for x in (-2000.0, -1000.0, 0.0, 0.0)]
    for loss in (losses.dpo, losses.ipo):
        value, slopes = jax.value_and_grad(
            lambda *a, loss=loss: loss(*a)[0], argnums=(0, 1, 2, 3)
        )(*far)
        assert np.isfinite(value) and np.isfinite(slopes).all()
        assert slopes[0] < 0 < slopes[1]
        assert not slopes[2].any() and not slopes[3].any()


# --------------------------------------------------------------------- advantages


advantages = jax.jit(
    losses.grpo_advantages, static_argnames=("num_groups", "normalize_std")
)
rloo = jax.jit(losses.rloo_advantages)
GROUPS = [
    [1.0, 0.0, 0.0, 1.0, 0.5],
    [0.9] * 3,  # whose mean is not 0.9 in float32
    [0.7],
    [-3.0, 9.0],
    [1e4, 1e4 + 1],
]


def numpy_advantages(group, normalize_std=True, epsilon=1e-6):
    group = np.asarray(group, np.float32).astype(np.float64)
    if np.ptp(group) == 0:
        return np.zeros(len(group))
    scale = group.std(ddof=1) + epsilon if normalize_std else 1
    return (group - group.mean()) / scale


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_of_groups_of_any_size(normalize_std):
    rewards = np.concatenate(GROUPS)
    ids = np.repeat(np.arange(len(GROUPS)), [len(g) for g in GROUPS])
    order = np.random.default_rng(5).permutation(len(rewards))
    got = advantages(
        rewards[order], ids[order], num_groups=6, normalize_std=normalize_std
    )
    want = np.concatenate([numpy_advantages(g, normalize_std) for g in GROUPS])
    np.testing.assert_allclose(got, want[order], rtol=2e-5)
    assert got.dtype == jnp.float32
    assert (got[want[order] == 0] == 0).all() and (want == 0).sum() == 5


def test_advantages_of_last_axis_equal_those_of_ids():
    rewards = np.random.default_rng(6).integers(0, 2, (3, 2, 4)).astype(np.float32)
    got = advantages(rewards)
    ids = np.arange(6).repeat(4).reshape(3, 2, 4)
    np.testing.assert_array_equal(got, advantages(rewards, ids, num_groups=6))
    for i in np.ndindex(3, 2):
        np.testing.assert_allclose(got[i], numpy_advantages(rewards[i]), rtol=1e-5)


def test_rloo_is_the_reward_less_the_others_mean():
    rewards = np.random.default_rng(7).standard_normal((3, 4)).astype(np.float32)
    others = (rewards.sum(1, keepdims=True) - rewards) / 3
    np.testing.assert_allclose(rloo(rewards), rewards - others, rtol=1e-5, atol=1e-6)
    assert not rloo(jnp.array([[0.3], [2.0]])).any()


def numpy_of_batch(rewards, live, of_groups):
    """Deviations from the mean of the group, or of the batch, over the batch's std."""
    kept = np.where(live, np.asarray(rewards, np.float64), np.nan)
    axis = 1 if of_groups else None
    mean = np.nanmean(kept, axis=axis, keepdims=True)
    return np.nan_to_num((kept - mean) / (np.nanstd(kept, ddof=1) + 1e-6))


@pytest.mark.parametrize("of_groups", [True, False])
def test_batch_advantages_oracle(of_groups):
    loss = losses.reinforce_plus_plus_advantages
    if of_groups:
        loss = losses.batch_std_advantages
    rng = np.random.default_rng(8)
    rewards, live = rng.normal(3, 2, (4, 5)).astype("f4"), rng.random((4, 5)) < 0.7
    rewards[0], live[1, 1:], live[:, 0] = 0.9, False, True  # equal, and alone
    want = numpy_of_batch(rewards, live, of_groups)
    compiled = jax.jit(loss, static_argnames="num_groups" if of_groups else ())
    got = np.asarray(compiled(np.where(live, rewards, np.nan), where=live))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not got[~live].any() and (got[0] == 0).all() == of_groups
    equal, nothing = np.full((2, 3), 0.9, "f4"), np.full((2, 3), np.nan, "f4")
    assert not np.any(compiled(equal))  # whose mean is not 0.9 in float32
    assert not np.any(compiled(nothing, where=np.zeros((2, 3), bool)))
    if of_groups:  # by ids, where a negative one is left out
        ids = np.where(live, np.arange(4)[:, None], -1)
        by_id = compiled(rewards.ravel(), ids.ravel(), num_groups=4)
        np.testing.assert_allclose(by_id, got.ravel(), rtol=1e-6)


def test_sequences_left_out_of_their_group():
    rewards = np.float32([[1, 0, np.nan, 0], [np.nan] * 4])
    where = ~np.isnan(rewards)
    want = np.zeros((2, 4))
    want[0, [0, 1, 3]] = numpy_advantages([1, 0, 0])
    got = advantages(rewards, where=where)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    ids = np.where(where, [[0], [1]], -1)
    np.testing.assert_array_equal(got, advantages(rewards, ids, num_groups=2))


@pytest.mark.parametrize("dtype", ["int8", full("uint8"), full("uint32")])
def test_sequence_and_group_ids_of_any_integer_type(dtype):
    ids = np.arange(128, dtype=dtype)
    weights = jax.jit(losses.sequence_mean_weights)(np.minimum(ids, 1))
    np.testing.assert_allclose(weights, (ids > 0) / 127)
    rewards = np.arange(256, dtype=np.float32)
    compiled = jax.jit(losses.rloo_advantages, static_argnames="num_groups")
    got = compiled(rewards, np.repeat(ids, 2), num_groups=128)
    np.testing.assert_allclose(got, np.tile([-1.0, 1.0], 128))
    with pytest.raises(ValueError, match="group_ids must be below num_groups=127, got"):
        losses.rloo_advantages(rewards, np.repeat(ids, 2), num_groups=127)


def test_group_of_masked_sequence_may_be_any():
    rewards, where = jnp.array([1.0, 0.0, 5.0]), jnp.array([True, True, False])
    for call in (
        losses.rloo_advantages,
        jax.jit(losses.rloo_advantages, static_argnames="num_groups"),
    ):
        got = call(rewards, jnp.array([0, 0, 7]), num_groups=1, where=where)
        np.testing.assert_array_equal(got, [1, -1, 0])


def test_documented_constants_have_no_gradient():
    x, weights = jnp.array([[1.0, 0.0, 3.0]]), jnp.array([[1.0, 2.0, 4.0]])
    constants = (
        losses.grpo_advantages,
        losses.rloo_advantages,
        lambda x: losses.sequence_log_ratio(x, 0 * x, jnp.ones(x.shape, int)),
        lambda x: losses.truncated_importance_weights(x, x),
        lambda x: losses.masked_importance_weights(x, x),
        lambda x: losses.icepop_weights(x, 0.9 * x),
        lambda x: losses.sequence_mask_weights(x, x, jnp.ones(x.shape, int)),
    )
    # Not by a plain sum: advantages of a group add up to 0 whatever they are.
    each = jax.jit(jax.jacrev(lambda x: [jnp.vdot(f(x), weights) for f in constants]))
    assert not any(slope.any() for slope in each(x))


def test_nan_reward_gives_nan_advantages():
    got = advantages(jnp.array([[1.0, jnp.nan], [1.0, 0.0]]))
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


def test_invalid_group_id_is_nan():
    got = advantages(jnp.array([1.0, 0.0, 5.0]), jnp.array([0, 0, 1]), num_groups=1)
    assert np.isnan(got[2]) and np.isfinite(got[:2]).all()


def test_equal_rewards_teach_nothing():
    h, W = np.ones((6, D), np.float32), np.full((V, D), 0.1, np.float32)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def loss(h, W, rewards):
        A = losses.grpo_advantages(rewards).ravel()
        lp = jaxmem.logprobs(h, W, np.arange(6), implementation="xla")
        return losses.dapo(lp, jax.lax.stop_gradient(lp), A).sum()

    rewards = np.full((2, 3), 0.9, np.float32)
    value, gradients = loss(h, W, rewards)
    assert value == 0 and not any(np.any(g) for g in gradients)
    rewards[0, 0] = 1
    _, (dh, _, d_rewards) = loss(h, W, rewards)
    assert np.any(dh[:3]) and not np.any(dh[3:])
    assert not np.any(d_rewards)  # advantages are constants


# --------------------------------------------------------------- inside token_loss


def grpo_both_ways(h, W, y, given):
    """Masked tokens hold NaN, which neither way may see."""
    where = y >= 0
    given = [jnp.where(where, given[k], jnp.nan) for k in ("old", "ref", "A")]
    weights = losses.sequence_mean_weights(jnp.ones(y.shape, int), where=where)

    def loss(stats, old, ref, A, w):
        made = losses.grpo(stats.logprob, old, ref, A)
        return w * (made + losses.entropy_bonus(stats.entropy))

    inside, _ = jaxmem.token_loss(
        loss, h, W, y, *given, weights, chunk=16, normalizer=1
    )
    stats = jaxmem.token_stats(h, W, y, chunk=16)
    given = [jnp.where(where, x, 0) for x in given]
    return inside, loss(stats, *given, weights).sum()


def gspo_both_ways(h, W, y, given):
    lp = jaxmem.logprobs(h, W, y, chunk=16)
    ids, old = (y >= 0).astype(int), jnp.where(y >= 0, given["old"], 0)
    log_ratio = losses.sequence_log_ratio(lp, old, ids)  # here without a gradient

    def loss(stats, log_ratio, A, w):
        return w * losses.gspo(stats.logprob, log_ratio, A, clip_low=1, clip_high=1)

    weights = losses.sequence_mean_weights(ids)
    inside, _ = jaxmem.token_loss(
        loss, h, W, y, log_ratio, given["A"], weights, chunk=16, normalizer=1
    )
    return inside, (
        weights * losses.gspo(lp, log_ratio, given["A"], clip_low=1, clip_high=1)
    ).sum()


def label_smoothing_both_ways(h, W, y, given):
    def loss(stats, mean):
        return losses.label_smoothing(stats.logprob, mean - stats.logsumexp)

    mean = losses.mean_logit(h, W, where=y >= 0)
    inside, _ = jaxmem.token_loss(loss, h, W, y, mean, chunk=16, normalizer=1)
    return inside, loss(jaxmem.token_stats(h, W, y, chunk=16), mean).sum()


def dpo_both_ways(h, W, y, given):
    ref = jnp.where(y >= 0, given["ref"], 0).sum(-1)

    def loss(lp):
        lp = lp.sum(-1)
        return losses.dpo(lp[0::2], lp[1::2], ref[0::2], ref[1::2]).sum()

    lp = jaxmem.logprobs(h, W, y, chunk=16)
    slope = jax.lax.stop_gradient(jax.grad(loss)(lp))
    fixed = jax.lax.stop_gradient(loss(lp) - (slope * lp).sum())  # for its value
    inside, _ = jaxmem.token_loss(
        lambda stats, slope: slope * stats.logprob,
        h,
        W,
        y,
        slope,
        chunk=16,
        normalizer=1,
    )
    return inside + fixed, loss(lp)


@pytest.mark.parametrize(
    "both_ways",
    [
        gspo_both_ways,
        *map(slow, (grpo_both_ways, label_smoothing_both_ways, dpo_both_ways)),
    ],
)
def test_inside_token_loss_as_outside(both_ways, problem):
    rng = np.random.default_rng(8)
    h = rng.standard_normal((4, 8, D)).astype(np.float32)
    W = rng.standard_normal((V, D)).astype(np.float32)
    y = np.where(rng.random((4, 8)) < 0.7, rng.integers(0, V, (4, 8)), -1)
    given = {k: v[:4] for k, v in problem[2].items()}

    @jax.jit
    def run(h, W):
        made, pull = jax.vjp(lambda h, W: both_ways(h, W, y, given), h, W)
        return made, pull((1.0, 0.0)), pull((0.0, 1.0))

    (inside, outside), slopes, want = run(h, W)
    np.testing.assert_allclose(inside, outside, rtol=1e-5)
    for a, b in zip(slopes, want, strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------- errors


ONE, TWO = jnp.zeros(1), jnp.zeros(2)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: losses.ppo_clip(TWO, TWO, ONE), ValueError,
     "advantages must have one entry per token, the shape (2,) of logprob, got "
     "(1,); broadcast it to the tokens first"),
    (lambda: losses.ppo_clip(TWO, TWO, "good"), TypeError,
     "advantages must be an array of numbers, got str"),
    (lambda: losses.dapo(TWO, TWO, TWO, clip_low=1.5), ValueError,
     "clip_low must be a number, in [0, 1], got 1.5"),
    (lambda: losses.cispo(TWO, TWO, TWO, clip_high=-1), ValueError,
     "clip_high must be a number, at least 0, got -1"),
    (lambda: losses.ppo_clip(TWO, TWO, TWO, dual_clip=0.5), ValueError,
     "dual_clip must be a number, at least 1, got 0.5"),
    (lambda: losses.grpo(TWO, TWO, TWO, TWO, beta=float("nan")), ValueError,
     "beta must be a number, at least 0, got nan"),
    (lambda: losses.ppo_clip(TWO, TWO, TWO, clip_low=None), ValueError,
     "clip_low must be a number, in [0, 1], got None"),
    (lambda: losses.ppo_clip(TWO, TWO, TWO, clip_high=True), ValueError,
     "clip_high must be a number, at least 0, got True"),
    (lambda: losses.dpo(TWO, TWO, TWO, TWO, beta=float("inf")), ValueError,
     "beta must be finite in float32, got inf"),
    (lambda: losses.z_loss(TWO, coefficient=10**5000), ValueError,
     "coefficient must be finite in float32, got <integer of about 5,001 " "digits>"),
    (lambda: losses.dapo(TWO, TWO, TWO, clip_low=jnp.zeros(3)), ValueError,
     "clip_low must broadcast to the tokens' shape (2,), got shape (3,)"),
    (lambda: losses.cross_entropy(jax.random.key(0)), TypeError,
     "logprob must hold real numbers, got key<fry>"),
    (lambda: losses.sft(TWO, jnp.zeros(2, jnp.float8_e4m3fn)), TypeError,
     "weights must hold real numbers, got float8_e4m3fn"),
    (lambda: losses.icepop_weights(TWO, TWO, low=3.0, high=2.0), ValueError,
     "low must be at most high=2, got 3"),
    (lambda: losses.sapo(TWO, TWO, TWO, temperature_neg=0), ValueError,
     "temperature_neg must be a number, at least 1e-30, got 0"),
    (lambda: losses.sequence_mask_weights(TWO, TWO, jnp.ones(2, int), statistic="mean"),
     ValueError,
     "statistic must be one of ('geometric_mean', 'every_token'), got 'mean'"),
    (lambda: losses.sequence_sum(TWO, jnp.ones(2, int), num_segments=10**30),
     ValueError,
     "num_segments must be an integer, at least 1 and below 2**31, got 1" + "0" * 30),
    (lambda: losses.grpo_advantages(TWO, normalize_std="no"), TypeError,
     "normalize_std must be True or False, got 'no'"),
    (lambda: losses.sequence_mean_weights(jnp.ones(2, int), num_sequences=TWO),
     ValueError, "num_sequences must be a scalar, got shape (2,)"),
    (lambda: losses.label_smoothing(TWO, TWO, smoothing=2), ValueError,
     "smoothing must be a number, in [0, 1], got 2"),
    (lambda: losses.mean_logit(jnp.zeros((2, 3)), jaxmem.Head(jnp.zeros((5, 3)),
         softcap=30)), NotImplementedError,
     "softcap=30: the mean of capped logits needs every logit; leave label "
     "smoothing out, or take it from logits with token_stats_from_logits"),
    (lambda: losses.sequence_sum(TWO, jnp.array([1, 5]), num_segments=3), ValueError,
     "segment_ids must be in [0, 3) for num_segments=3, got 5"),
    (lambda: losses.sequence_log_ratio(TWO, TWO, jnp.ones(2)), TypeError,
     "segment_ids must be integers, got float32; convert them with "
     "segment_ids.astype('int32')"),
    (lambda: losses.sequence_mean_weights(jnp.int32(1)), ValueError,
     "segment_ids must be [..., T], got a scalar"),
    (lambda: losses.grpo_advantages(TWO, jnp.array([0, 1])), ValueError,
     "num_groups must be given with group_ids: how many prompts"),
    (lambda: losses.rloo_advantages(TWO, jnp.array([0, 3]), num_groups=3), ValueError,
     "group_ids must be below num_groups=3, got 3"),
    (lambda: losses.grpo_advantages(TWO, jnp.array([0]), num_groups=3), ValueError,
     "group_ids must have one entry a sequence, shape (2,), got (1,)"),
])  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
