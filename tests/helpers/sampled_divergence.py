"""Divergences with sampled gradients, and their operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.helpers.cases import Case
from tests.helpers.described import FIELDS
from tests.helpers.targets import (
    forward_kl,
    loss_of_columns,
    loss_of_two_heads,
    of_columns,
    of_two_heads,
    reverse_kl,
)

N, D, V, K = 4, 8, 60, 8
KEY = jax.random.key(7)
LABELS = np.array([3, 11, 0, 7])


def mixture(stats, divergence):
    """A loss of a divergence, cross-entropy and entropy."""
    return divergence - 0.3 * stats.logprob + 0.1 * stats.entropy


def top(other_h, other_W):
    """Two ids of a teacher, the label, and one that is absent; with their ln p."""
    z = other_h @ other_W[:50].T
    ids = np.argsort(-z)[:, :4].astype(np.int32)
    labels = np.resize(LABELS, len(ids))
    ids[:, 1], ids[:, 2] = -1, labels
    ids[2, 2] = -1  # one token has not its label
    ids[(ids == labels[:, None]) & (np.arange(4) != 2)] = -1
    z -= np.log(np.exp(z).sum(1, keepdims=True))
    return ids, np.take_along_axis(z, np.maximum(ids, 0), 1) - np.float32(0.2)


def in_loss(verb, **more):
    """A loss of the operands of a divergence, not divided."""

    def run(h, W, *others, **options):
        labels = jnp.resize(LABELS, h.shape[:-1])
        made = more | {"normalizer": 1.0} | options
        return verb(h, W, labels, *others, **made)[0]

    return run


def selected(h, W, ids, _, verb=jaxmem.selected_logprobs, **options):
    """A sum of log-probabilities with weights of both signs."""
    head = jaxmem.Head(W, **{k: options.pop(k) for k in FIELDS if k in options})
    log_p = verb(h, head, ids, **options)
    return jnp.sum(log_p * jnp.linspace(-1, 1.5, ids.shape[-1]), -1)


def largest(h, W, *_, **options):
    """A sum of the largest log-probabilities."""
    head = jaxmem.Head(W, **{k: options.pop(k) for k in FIELDS if k in options})
    return jaxmem.topk(h, head, 3, **options).logprobs @ jnp.float32([0.5, 1, -1])


VERBS = {
    "reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": of_two_heads("jsd 0.3"),
    "forward_kl of columns": of_columns("forward_kl"),
    "jsd of columns": of_columns("jsd 0.3"),
    "forward_kl of draws": of_columns("forward_kl"), "selected of draws": selected,
    "topk": largest,
    "loss of forward_kl": in_loss(loss_of_two_heads("forward_kl", mixture)),
    "loss of jsd, warm": in_loss(loss_of_two_heads("jsd", mixture),
     statistics_temperature=0.6),
    "loss of columns": in_loss(loss_of_columns("reverse_kl", mixture)),
    "loss of draws, warm": in_loss(loss_of_columns("forward_kl", mixture),
     statistics_temperature=0.6),
}  # fmt: skip


@functools.cache
def problem(n=N, d=D, v=V):
    h, W, _ = Case(n, d, v, std=1.5).make()
    other_h, other_W, _ = Case(n, d + 4, v, std=1.5).make(seed=3)
    return h, W, other_h, other_W


def operands_of(name, *sizes):
    """Operands with a target: another head, its columns, or ids (one repeats)."""
    h, W, *others = problem(*sizes)
    if "columns" in name:
        return h, W, *top(*others)
    ids = top(*others)[0]
    repeated = np.concatenate([ids, ids[:, 2:3]], 1)
    return (h, W, repeated, None) if "draws" in name else problem(*sizes)


def loss_of(verb, g, **options):
    verb = VERBS.get(verb, verb)

    def loss(h, W, *others):
        made = verb(h, W, *others, **options)
        return jnp.sum(g * made)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def check_values():
    """Sampling the gradient changes no bit of a value."""
    operands = problem(50, 16, 300)
    exact = jax.jit(lambda *a: jnp.sum(VERBS["jsd"](*a, chunk=16)))(*operands)
    options = {"chunk": 16, "gradient": jaxmem.Sample(20), "key": KEY}
    drawn = loss_of("jsd", 1.0, **options)(*operands)[0]
    np.testing.assert_array_equal(drawn, exact)


def check_every_column_kept(verb):
    """Two of three columns have a probability of at least 1/K each."""
    W = np.log(np.array([[0.5], [0.3], [0.2]], np.float32))
    other = np.log(np.array([[0.2], [0.3], [0.5]], np.float32))
    ones = np.ones((2, 1), np.float32)
    options = {"vocab_size": 3, "layout": "vd"}
    pad = np.zeros((9, 1), np.float32)  # so that K < V may exceed what is kept
    W, other = np.concatenate([W, pad]), np.concatenate([other, pad])
    want = loss_of(verb, 1.0, **options)(ones, W, ones, other)[1]
    options = options | {
        "vocab_size": 12,
        "bias": np.where(np.arange(12) < 3, 0, -1e9),
        "teacher_bias": np.where(np.arange(12) < 3, 0, -1e9),
    }
    options = {k: np.float32(v) if "bias" in k else v for k, v in options.items()}
    drawn = options | {"gradient": jaxmem.Sample(8), "key": KEY}
    got = loss_of(verb, 1.0, **drawn)(ones, W, ones, other)[1]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
