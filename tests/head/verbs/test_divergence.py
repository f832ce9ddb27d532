"""Divergences of two heads where they cancel or are infinite; their errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.cases import full, slow
from tests.helpers.divergence import (
    CHUNK,
    D_REFERENCE,
    VERBS,
    D,
    N,
    V,
    check_confident_heads,
    check_equal_heads,
    check_nearly_equal_heads,
    exact,
    make,
    ours,
    same_depth,
)
from tests.helpers.targets import jsd, loss_of_two_heads, reverse_kl
from tests.helpers.tolerance import STATS_EPSILON

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")
# Another weight than 1/2 has a test of its own digits.
EACH = [full(verb) if verb == "jsd 0.1" else verb for verb in VERBS]


# Where the textbook's sums cancel. These share the functions of values and gradients.


@pytest.mark.parametrize("step", [slow(1e-2), 1e-3])
@pytest.mark.parametrize("verb", EACH)
def test_nearly_equal_heads_keep_their_digits(verb, step):
    check_nearly_equal_heads(verb, step)


@pytest.mark.parametrize("verb", EACH)
def test_equal_heads_give_exactly_zero(verb):
    check_equal_heads(verb)


@pytest.mark.parametrize("verb", EACH)
def test_both_confident_of_the_same_token(verb):
    check_confident_heads(verb)


def test_jsd_is_symmetric_and_bounded():
    operands, g = same_depth(4.0, 3.0), np.ones(N, np.float32)
    half, _ = ours(operands, g, {}, "jsd")
    swapped, _ = ours([*operands[2:], *operands[:2]], g, {}, "jsd")
    np.testing.assert_allclose(half, swapped, rtol=1e-6)
    assert (np.asarray(half) <= np.log(2)).all() and np.asarray(half).max() > 0.6


@pytest.mark.parametrize("beta, std", [
    (1e-6, 4.0), slow(1 - 1e-6, 1.0), slow(1 - 1e-4, 4.0), slow(1e-2, 1.0),
    slow(0.5, 4.0),
])  # fmt: skip
def test_jsd_of_any_weight_keeps_its_digits(beta, std):
    """ln(p/m) tends to 0 where m tends to p, whatever p/q is."""
    h, W, *reference = same_depth(std, std)
    g = np.ones(N, np.float32)
    want, (dh, dW, _) = exact(f"jsd {beta}", g, [h, W, *reference])
    value, gradients = ours([h, W, *reference], g, {}, f"jsd {beta}")
    np.testing.assert_allclose(value, want, rtol=STATS_EPSILON)
    for got, need in zip(gradients, (dh, dW), strict=True):
        atol = STATS_EPSILON * np.abs(need).max()
        np.testing.assert_allclose(got, need, atol=atol)


@pytest.mark.full
def test_jsd_where_a_ratio_overflows():
    h, W, h_ref, W_ref = make()
    far = np.zeros(V, np.float32)
    far[7], far[9] = 95.0, -95.0
    for name in ("bias", "teacher_bias"):
        g, arrays = np.ones(N, np.float32), everything(**{name: far})
        value, gradients = ours([h, W, h_ref, W_ref], g, arrays, "jsd")
        want, need = exact("jsd", g, make(), **{name: far})
        np.testing.assert_allclose(value, want, rtol=STATS_EPSILON)
        for got, exact_one in zip(gradients, need, strict=False):
            np.testing.assert_allclose(got, exact_one, atol=STATS_EPSILON)


# Infinite logits and divergences, masks, paddings. These share theirs.


def everything(**changes):
    arrays = {
        "bias": np.zeros(V, np.float32),
        "teacher_bias": np.zeros(V, np.float32),
        "where": np.ones(N, bool),
    }
    return arrays | changes


RULED = np.where(np.isin(np.arange(V), [3, 5]), -np.inf, 0).astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize(
    "verb,p_alone,q_alone",
    [
        # p = 0 adds nothing; q = 0 < p is infinite.
        ("reverse_kl", np.isfinite, np.isposinf),
        ("forward_kl", np.isposinf, np.isfinite),
        ("jsd", np.isfinite, np.isfinite),
    ],
)
def test_tokens_that_a_bias_rules_out(verb, p_alone, q_alone):
    g = np.ones(N, np.float32)
    value, gradients = ours(make(), g, everything(bias=RULED), verb)
    assert p_alone(value).all() and np.isfinite(gradients[1]).all()
    value, _ = ours(make(), g, everything(teacher_bias=RULED), verb)
    assert q_alone(value).all()
    both = everything(bias=RULED, teacher_bias=RULED)
    value, (dh, dW, dbias) = ours(make(), g, both, verb)
    h, W, h_ref, W_ref = make()
    kept = RULED == 0
    want, need = exact(verb, g, [h, W[kept], h_ref, W_ref[kept]])
    np.testing.assert_allclose(value, want, rtol=2e-6)
    assert not dW[~kept].any() and not dbias[~kept].any()
    for got, exact_one in zip((dh, dW[kept], dbias[kept]), need, strict=True):
        np.testing.assert_allclose(got, exact_one, atol=4e-6)


def test_token_below_float32_range_is_finite():
    """q underflows to 0, ln q does not."""
    far = np.zeros(V, np.float32)
    far[7] = -200.0
    value, _ = ours(make(), np.ones(N), everything(teacher_bias=far), "reverse_kl")
    want, _ = exact("reverse_kl", np.ones(N), make(), teacher_bias=far)
    np.testing.assert_allclose(value, want, rtol=2e-6)


def test_unused_infinite_divergence_is_harmless():
    h, W, h_ref, W_ref = make()
    h_ref[:, 0], W_ref[:, 0] = 0, 0
    h_ref[4, 0], W_ref[6, 0] = 1e20, -1e20  # their product is beyond float32
    asked = np.float32(np.arange(N) != 4)
    value, (dh, dW, _) = ours([h, W, h_ref, W_ref], asked, everything(), "reverse_kl")
    np.testing.assert_array_equal(np.isinf(value), np.arange(N) == 4)
    np.testing.assert_array_equal(dh.any(1), np.arange(N) != 4)
    assert np.isfinite(dh).all() and np.isfinite(dW).all()


@pytest.mark.full
@pytest.mark.parametrize("padded", ["reference", "policy"])
def test_paddings_of_the_vocabulary_may_differ(padded):
    h, W, h_ref, W_ref = make()
    g = np.ones(N, np.float32)
    want, (dh, dW, _) = exact("jsd", g, make())
    if padded == "policy":
        W = np.concatenate([W, np.full((30, D), 9.0, np.float32)])
    W_ref = np.concatenate([W_ref, np.full((7, D_REFERENCE), 9.0, np.float32)])
    options = (("vocab_size", V),)
    value, got = ours([h, W, h_ref, W_ref], g, {}, "jsd", options=options)
    np.testing.assert_allclose(value, want, rtol=2e-6)
    np.testing.assert_allclose(got[0], dh, atol=1e-6)
    np.testing.assert_allclose(got[1][:V], dW, atol=1e-6)
    assert not got[1][V:].any()


def test_frozen_head_with_masks_and_infinities():
    h, W, h_ref, W_ref = make()
    where = np.arange(N) % 4 > 0
    h[~where], h_ref[:, 0], W_ref[:, 0] = np.nan, 0, 0
    h_ref[5, 0], W_ref[6, 0] = 1e20, -1e20  # their product is beyond float32
    asked = np.where(where, np.float32(np.arange(N) != 5), np.nan)
    operands = [h, W, h_ref, W_ref]
    value, (dh, dW) = ours(operands, asked, {"where": where}, "reverse_kl", frozen=True)
    np.testing.assert_array_equal(np.isinf(value), np.arange(N) == 5)
    assert not value[~where].any()
    np.testing.assert_array_equal(dh.any(1), where & (np.arange(N) != 5))
    assert np.isfinite(dh).all() and not dW.any()
    _, (poisoned, _) = ours(
        operands, asked + 1, {"where": where}, "reverse_kl", frozen=True
    )
    np.testing.assert_array_equal(np.isnan(poisoned).all(1), np.arange(N) == 5)


# Contracts.


def test_types_of_the_two_heads_may_differ():
    h, W, h_ref, W_ref = (jnp.asarray(x) for x in make())
    mixed = [h.astype("bfloat16"), W, h_ref.astype("float16"), W_ref.astype("bfloat16")]
    value, (dh, dW) = ours(mixed, jnp.ones(N), {}, "reverse_kl")
    assert (value.dtype, dh.dtype, dW.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    want, _ = exact("reverse_kl", np.ones(N), make())
    np.testing.assert_allclose(value, want, atol=0.05)


def test_report_names_both_heads():
    operands = make()
    with jaxmem.report() as calls:
        jax.eval_shape(lambda: reverse_kl(*operands, CHUNK))
        jax.eval_shape(lambda: jsd(*operands, CHUNK, implementation="xla"))
    assert {call.verb for call in calls.calls} == {"divergence"}
    assert calls.calls[0].shapes == {
        "hidden": (N, D), "W": (V, D),
        "Teacher.hidden": (N, D_REFERENCE), "Teacher.W": (V, D_REFERENCE),
    }  # fmt: skip
    assert calls.calls[0].live_logits_bytes == 2 * 4 * CHUNK * V
    assert [call.why for call in calls.calls] == [
        "the only one with divergence",
        "named by the caller",
    ]


# What is refused, and how.

ERRORS = [
    ({"hidden": 1}, TypeError,
     "hidden must be floating point (float32, bfloat16, float16), got int32"),
    ({"teacher_hidden": "text"}, TypeError,
     "Teacher.hidden must be an array of numbers, got str"),
    ({"teacher_hidden": np.ones((N, 3), np.float32)}, ValueError,
     "Teacher.W must be [V, 3] or [3, V] to match Teacher.hidden's last axis D=3, "
     "got shape (130, 10)"),
    ({"teacher_hidden": np.ones((N - 1, D_REFERENCE), np.float32)}, ValueError,
     "Teacher.hidden must have hidden's tokens, shape (37,), got (36,)"),
    ({"teacher_W": np.ones((D_REFERENCE, D_REFERENCE), np.float32)}, ValueError,
     "Teacher.layout is ambiguous: Teacher.W is square, (10, 10); pass "
     "jaxmem.Head(W, layout='vd') if its rows are tokens (an embedding table), or 'dv' "
     "if its columns are (a Dense or nnx.Linear kernel)"),
    ({"teacher_layout": "no"}, ValueError,
     "Teacher.layout must be 'vd', 'dv' or None, got 'no'"),
    ({"teacher_W": np.ones((99, D_REFERENCE), np.float32)}, ValueError,
     "W and Teacher.head must have the same vocabulary, got 130 and 99 tokens; if "
     "one is padded, pass jaxmem.Head(W, vocab_size=…)"),
    ({"teacher_W": np.ones((99, D_REFERENCE), np.float32), "vocab_size": 130},
     ValueError, "vocab_size must be an integer from 1 to 99, the number of columns, "
     "got 130"),
    ({"teacher_bias": np.ones(3, np.float32)}, ValueError,
     "Teacher.bias must have one entry per token of the vocabulary, shape (130,), got "
     "shape (3,)"),
    ({"teacher_softcap": -1.0}, ValueError,
     "Teacher.softcap must be positive and finite, got -1.0"),
    ({"teacher_softcap": "none"}, TypeError,
     "Teacher.softcap must be a Python number or None, got 'none'"),
    ({"teacher_temperature": 0.0}, ValueError,
     "Teacher.temperature must be positive and finite, got 0.0; for greedy decoding "
     "use token_stats(...).is_argmax"),
    ({"teacher_temperature": np.ones(3)}, ValueError,
     "Teacher.temperature must be a scalar or one per token, shape (37,), got shape "
     "(3,)"),
    ({"where": np.ones(3, bool)}, ValueError,
     "where must broadcast to the tokens' shape (37,), got shape (3,)"),
    ({"chunk": 0}, ValueError,
     "chunk must be a positive number of tokens, None or 'auto', got 0"),
    ({"implementation": "fast"}, ValueError,
     "implementation must be None or one of 'xla', 'hopper', got 'fast'"),
    ({"implementation": "hopper"}, NotImplementedError,
     "implementation='hopper' has no divergence: its kernels reduce one head's logits "
     "to the statistics of token_stats and keep no row of them; pass "
     "implementation=None"),
]  # fmt: skip
NAMES = ("hidden", "W", "teacher_hidden", "teacher_W")


@pytest.mark.parametrize("changes,kind,message", ERRORS, ids=lambda x: str(x)[:40])
def test_errors(changes, kind, message):
    with pytest.raises(kind) as error:
        reverse_kl(**(dict(zip(NAMES, make(), strict=True)) | changes))
    assert str(error.value) == message


BETAS = [
    (0, ValueError, "beta must lie between 0 and 1, got 0; the limits are ForwardKL "
     "(towards 0) and ReverseKL (towards 1)"),
    (1.0, ValueError, "beta must lie between 0 and 1, got 1.0; the limits are "
     "ForwardKL (towards 0) and ReverseKL (towards 1)"),
    ("half", TypeError, "beta must be a Python number, got 'half'"),
    (jnp.ones(()), TypeError,
     "beta must be a Python number, got an array of float32, shape ()"),
]  # fmt: skip


@pytest.mark.parametrize("beta,kind,message", BETAS, ids=lambda x: str(x)[:20])
def test_errors_of_beta(beta, kind, message):
    with pytest.raises(kind) as error:
        jaxmem.JSD(None, beta)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "target", [None, jaxmem.JSD(), jaxmem.Teacher(*make()[2:]), "reverse_kl"]
)
def test_other_targets_are_refused(target):
    with pytest.raises(TypeError, match="target must be jaxmem.ForwardKL"):
        jaxmem.divergence(*make()[:2], target)


def test_unseen_temperature_not_positive_is_nan():
    def run(t):
        both = {"temperature": 1.0, "teacher_temperature": t}
        return reverse_kl(*make(), CHUNK, **both)

    per_token = np.where(np.arange(N) == 3, -1, 1).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(jax.jit(run)(per_token)), per_token < 0)


def test_gradient_of_temperature_is_refused():
    with pytest.raises(NotImplementedError, match="temperature is not differentiable"):
        jax.grad(lambda t: reverse_kl(*make(), teacher_temperature=t).sum())(2.0)


# Losses of a divergence.

RNG = np.random.default_rng(5)
LABELS = RNG.integers(0, V, N)
WEIGHT = RNG.uniform(0.5, 2, N).astype(np.float32)


def mixture(stats, divergence, weight):
    """A loss of a divergence, cross-entropy and entropy; its metrics."""
    loss = weight * divergence - 0.3 * stats.logprob + 0.1 * stats.entropy
    return loss, {"divergence": divergence, "entropy": stats.entropy}


@pytest.mark.full
def test_infinite_divergence_left_out_of_loss():
    h, W, h_ref, W_ref = make()
    bias = np.zeros(V, np.float32)
    bias[7] = -np.inf  # excluded by the reference, not by the policy

    def loss(h, used):
        def of(stats, divergence):
            return used * divergence - stats.logprob if used else -stats.logprob

        given = h, W, LABELS, h_ref, jaxmem.Head(W_ref, bias=bias)
        return loss_of_two_heads("reverse_kl", of)(*given, chunk=CHUNK)[0]

    dh, value = jax.jit(lambda h: (jax.grad(loss)(h, 0.0), loss(h, 1.0)))(h)
    assert np.isfinite(dh).all() and np.isinf(value)


def test_report_of_a_loss():
    with jaxmem.report() as calls:
        run = functools.partial(loss_of_two_heads("jsd", mixture), chunk=CHUNK)
        h, W, *reference = make()
        jax.eval_shape(run, h, W, LABELS, *reference, WEIGHT)
    (call,) = calls.calls
    assert call.verb == "divergence_loss"
    assert call.live_logits_bytes == 4 * CHUNK * 2 * V


@pytest.mark.parametrize("changes, error, message", [
    ({"implementation": "hopper"}, NotImplementedError, "has no divergence_loss"),
    ({"chunk": 0}, ValueError, "chunk must be"),
    ({"normalizer": -1.0}, ValueError, "normalizer must"),
    ({"statistics_temperature": 0.0}, ValueError, "statistics_temperature must"),
    ({"statistics_temperature": np.ones(3)}, ValueError, "scalar or one per token"),
    ({"labels": LABELS[:5]}, ValueError, "labels must have"),
    ({"teacher_hidden": np.ones((3, 10))}, ValueError, "Teacher.hidden must"),
    ({"loss_fn": lambda stats: stats.logprob}, TypeError, "1 per-token argument"),
    ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
])  # fmt: skip
def test_wrong_arguments_of_a_loss(changes, error, message):
    names = "hidden", "W", "teacher_hidden", "teacher_W"
    given = dict(zip(names, make(), strict=True))
    given |= {"loss_fn": lambda stats, d: d, "labels": LABELS, "chunk": CHUNK}
    given |= changes
    loss = loss_of_two_heads("reverse_kl", given.pop("loss_fn"))
    with pytest.raises(error, match=message):
        loss(**given)


@pytest.mark.parametrize("target", ["reverse_kl", jaxmem.JSD()], ids=str)
def test_other_targets_of_a_loss_are_refused(target):
    with pytest.raises(TypeError, match="target must be jaxmem.ForwardKL"):
        jaxmem.divergence_loss(mixture, *make()[:2], LABELS, target, WEIGHT)


def test_array_as_target_is_named_by_shape():
    h, W = make()[:2]
    for target, got in (
        (h, "an array"),
        (jaxmem.ForwardKL(h), "ForwardKL of an array"),
    ):
        message = f"got {got} of float32, shape {re.escape(str(h.shape))}$"
        with pytest.raises(TypeError, match=message):
            jaxmem.divergence(h, W, target)


def loss_of_constants(of):
    """A loss as a function of a temperature and of a factor of the target."""
    h, W, teacher_h, teacher_W = make()
    ids, log_q = jnp.zeros((N, 1), jnp.int32), jnp.full((N, 1), -0.5)

    def loss(statistics_temperature, constant):
        targets = {
            "teacher": jaxmem.Teacher(teacher_h * constant, teacher_W),
            "columns": jaxmem.Columns(ids, log_q * constant),
            "drawn": jaxmem.Drawn(ids),
        }
        return jaxmem.divergence_loss(
            mixture, h, W, LABELS, jaxmem.ForwardKL(targets[of]), WEIGHT,
            statistics_temperature=statistics_temperature, chunk=CHUNK,
        )[0]  # fmt: skip

    return loss


@pytest.mark.parametrize("of", ["teacher", "columns", "drawn"])
def test_gradient_of_statistics_temperature_refused(of):
    with pytest.raises(NotImplementedError, match="^jaxmem: statistics_temperature is"):
        jax.eval_shape(jax.grad(loss_of_constants(of)), 1.3, 1.0)
