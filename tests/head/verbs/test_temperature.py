"""Verbs that divide logits by a temperature, at |z| up to 1,000.

A product with the inverse that is rounded for some uses of a logit and not for others,
as by a compiler that contracts a product and a difference, makes probabilities that do
not add up to 1: with logits of two values of 900, by 4e-5. The difference of two heads'
logits loses what is small beside them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.targets import (
    forward_kl,
    jsd,
    loss_of_two_heads,
    reverse_kl,
    topk_kl,
)
from tests.helpers.tolerance import STATS_EPSILON, assert_as_good

N, V = 16, 1000
IDS = np.array([3, 500, 999])


@pytest.fixture(params=["signs of 40", "signs of 900", "std 100"])
def logits(request):
    """(hidden, W, W of the reference), whose products have no rounding error."""
    rng = np.random.default_rng(0)
    if request.param == "std 100":
        h = rng.integers(-8, 9, (N, 8)) * 3.0
        W = rng.integers(-8, 9, (V, 8)) / 2.0
        W_ref = W + rng.integers(-1, 2, (V, 8)) / 64
        assert 90 < (h @ W.T).std() < 150
        # As much for each column: another normaliser, the same distribution.
        h, W, W_ref = (np.pad(x, ((0, 0), (0, 1))) for x in (h, W, W_ref))
        h[:, -1], W_ref[:, -1] = 1, -800
    else:
        size = float(request.param.split()[-1])
        h = size * (1 + np.arange(N)[:, None] / 64)
        W, W_ref = (rng.choice([-1.0, 1.0], (V, 1)) for _ in range(2))
        # As many columns as the others have, for programs of the same shapes.
        h, W, W_ref = (np.pad(x, ((0, 0), (0, 8))) for x in (h, W, W_ref))
    return h, W, W_ref


def statistics(xp, z, y):
    """The results of each verb for logits over the temperature, [N] or [N, K]."""

    def log_softmax(z):
        z = z - z.max(-1, keepdims=True)
        return z - xp.log(xp.exp(z).sum(-1, keepdims=True))

    log_p, log_q = log_softmax(z), log_softmax(y)
    p, q, middle = xp.exp(log_p), xp.exp(log_q), xp.logaddexp(log_p, log_q) - np.log(2)
    at_ids = log_p[:, IDS]
    return {
        "logprob": log_p[:, 3],
        "entropy": -(p * log_p).sum(-1),
        "sum_pi_squared": (p * p).sum(-1),
        "selected": at_ids,
        "support": log_softmax(z[:, IDS])[:, 0],
        "topk": xp.sort(log_p, -1)[:, -1],
        "reverse_kl": (p * (log_p - log_q)).sum(-1),
        "forward_kl": (q * (log_q - log_p)).sum(-1),
        "jsd": ((p * (log_p - middle)).sum(-1) + (q * (log_q - middle)).sum(-1)) / 2,
        "topk_kl": -np.log(3) - at_ids.mean(-1),
        "loss": -log_p[:, 3].mean(),
        "divergence_loss": (p * (log_p - log_q)).sum(-1).mean(),
    }


def by_verbs(h, W, W_ref, temperature):
    options = {"temperature": temperature}
    y, ids = jnp.full(N, IDS[0]), jnp.broadcast_to(jnp.asarray(IDS), (N, 3))
    stats = jaxmem.token_stats(h, W, y, **options)
    heads = h, W, h, W_ref
    return {
        **{k: getattr(stats, k) for k in ("logprob", "entropy", "sum_pi_squared")},
        "selected": jaxmem.selected_logprobs(h, W, ids, **options),
        "support": jaxmem.support_logprobs(h, W, y, ids, **options),
        "topk": jaxmem.topk(h, W, 1, **options).logprobs[:, 0],
        "reverse_kl": reverse_kl(*heads, **options),
        "forward_kl": forward_kl(*heads, **options),
        "jsd": jsd(*heads, **options),
        "topk_kl": topk_kl(h, W, ids, jnp.full((N, 3), -np.log(3)), **options),
        "loss": jaxmem.token_loss(lambda s: -s.logprob, h, W, y, **options)[0],
        "divergence_loss": loss_of_two_heads("reverse_kl", lambda stats, d: d)(
            h, W, y, h, W_ref, **options
        )[0],
    }


@functools.partial(jax.jit, static_argnums=3)
def materialised(h, W, W_ref, T):
    T = np.float32(T)
    return statistics(jnp, (h @ W.T) / T, (h @ W_ref.T) / T)


def check(logits, temperature, by):
    """Each statistic against float64, with twice the error of the materialised one."""
    operands = [jnp.asarray(x, jnp.float32) for x in logits]
    T = np.float32(temperature)
    h, W, W_ref = logits
    want = statistics(np, h @ W.T / np.float64(T), h @ W_ref.T / np.float64(T))

    made = jax.jit(by_verbs, static_argnums=() if by == "token" else 3)(
        *operands, jnp.full(N, T) if by == "token" else float(T)
    )
    for name, near in materialised(*operands, float(T)).items():
        assert_as_good(made[name], near, want[name], STATS_EPSILON, name)


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_verbs_as_good_as_materialised_logits(logits, temperature):
    check(logits, temperature, "constant")


@pytest.mark.parametrize("logits", ["signs of 900", "std 100"], indirect=True)
@pytest.mark.slow
def test_temperature_for_each_token(logits):
    check(logits, 1.3, "token")


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_on_a_gpu(logits, temperature):
    """With jax's full precision of float32 products, which are exact here in any."""
    with jax.default_matmul_precision("highest"):
        check(logits, temperature, "constant")
