"""One table of the head's functions, each called of `jaxmem` or of its reference."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.helpers.cases import full

N, D, D_TEACHER, V, K = 11, 8, 6, 40, 4
VOCAB = V - 5  # ids are below it, so that a head may be padded


def make(seed: int = 0) -> dict[str, np.ndarray]:
    """Operands of every function, by name; some tokens and ids are absent."""
    rng = np.random.default_rng(seed)

    def floats(*shape, size=1.0):
        return (rng.standard_normal(shape) * size).astype(np.float32)

    ids = np.stack([rng.permutation(VOCAB)[:K] for _ in range(N)]).astype(np.int32)
    labels = ids[:, 1].copy()
    labels[3], ids[0, 2], ids[4], ids[6, 3] = -1, -1, -1, ids[6, 0]
    support = np.concatenate([np.abs(labels)[:, None], ids], axis=1)
    return {
        "hidden": floats(N, D), "W": floats(V, D, size=D**-0.5), "bias": floats(V),
        "teacher_hidden": floats(N, D_TEACHER), "labels": labels, "ids": ids,
        "teacher_W": floats(V, D_TEACHER, size=D_TEACHER**-0.5),
        "log_q": np.log(rng.dirichlet(np.ones(K + 1), N)[:, :K]).astype(np.float32),
        "support": support, "advantages": floats(N), "weights": floats(N),
        "logits": floats(N, V),
    }  # fmt: skip


def policy_loss(stats, advantages):
    """A loss that reads all statistics."""
    loss = -advantages * stats.logprob - 0.1 * stats.entropy
    loss = loss + 0.01 * stats.logsumexp + 0.3 * stats.sum_pi_squared
    return loss, {"entropy": stats.entropy}


def mixed_loss(stats, divergence, advantages):
    """A loss of statistics and of a divergence."""
    return advantages * divergence - stats.logprob, {"divergence": divergence}


@dataclasses.dataclass(frozen=True)
class HeadFunction:
    """A function of the head, and how to call it.

    Attributes:
        call: (module, operands, head, options) -> the result.
        has_gradient: False if nothing is differentiable.
        samples: True if it takes gradient=Sample(k).
    """

    call: Callable[[Any, dict, Any, dict], Any]
    has_gradient: bool = True
    samples: bool = True


def _of_labels(name):
    def call(module, p, head, options):
        return getattr(module, name)(p["hidden"], head, p["labels"], **options)

    return HeadFunction(call)


def _of_logits(name):
    def call(module, p, head, options):
        options = {"softcap": head.softcap, "vocab_size": head.vocab_size} | options
        return getattr(module, name)(p["logits"], p["labels"], **options)

    return HeadFunction(call, samples=False)


def _target(kind, of, p):
    targets = {
        "teacher": lambda: jaxmem.Teacher(p["teacher_hidden"], _teacher_head(p)),
        "columns": lambda: jaxmem.Columns(p["ids"], p["log_q"]),
        "columns without rest": lambda: jaxmem.Columns(p["ids"], p["log_q"], False),
        "drawn ids": lambda: jaxmem.Drawn(p["ids"]),
    }
    return kind(targets[of]())


def _teacher_head(p):
    return jaxmem.Head(p["teacher_W"], vocab_size=p["vocab_size"])


def _divergence(kind, of):
    def call(module, p, head, options):
        return module.divergence(p["hidden"], head, _target(kind, of, p), **options)

    return HeadFunction(call)


def _divergence_loss(kind, of, **changes):
    def call(module, p, head, options):
        return module.divergence_loss(
            mixed_loss, p["hidden"], head, p["labels"], _target(kind, of, p),
            p["advantages"], **changes | options,
        )  # fmt: skip

    return HeadFunction(call)


def _token_loss(module, p, head, options):
    operands = p["hidden"], head, p["labels"], p["advantages"]
    return module.token_loss(policy_loss, *operands, **options)


def _ragged_support(module, p, head, options):
    counts = np.full(N, K + 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    operands = p["hidden"], head, p["labels"], p["support"].reshape(-1)
    return module.support_logprobs(*operands, offsets=offsets, max_ids=K + 1, **options)


_KINDS = jaxmem.ForwardKL, jaxmem.ReverseKL, jaxmem.JSD
FUNCTIONS = {
    "logprobs": _of_labels("logprobs"),
    "token_stats": _of_labels("token_stats"),
    "entropy": HeadFunction(
        lambda module, p, head, options: module.entropy(p["hidden"], head, **options)
    ),
    "token_loss": HeadFunction(_token_loss),
    "logprobs_from_logits": _of_logits("logprobs_from_logits"),
    "token_stats_from_logits": _of_logits("token_stats_from_logits"),
    "topk": HeadFunction(
        lambda module, p, head, options: module.topk(p["hidden"], head, 3, **options)
    ),
    "sample_ids": HeadFunction(
        lambda module, p, head, options: module.sample_ids(
            p["hidden"], head, 5, jax.random.key(0), **options
        ),
        has_gradient=False,
        samples=False,
    ),
    "record_entries": HeadFunction(
        lambda module, p, head, options: module.record_entries(
            p["hidden"], head, p["labels"], K, jax.random.key(0), **options
        ),
        has_gradient=False,
        samples=False,
    ),
    "selected_logprobs": HeadFunction(
        lambda module, p, head, options: module.selected_logprobs(
            p["hidden"], head, p["ids"], **options
        )
    ),
    "support_logprobs": HeadFunction(
        lambda module, p, head, options: module.support_logprobs(
            p["hidden"], head, p["labels"], p["support"], **options
        ),
        samples=False,
    ),
    "support_logprobs of ragged ids": HeadFunction(_ragged_support, samples=False),
} | {
    f"{name} {kind.__name__} {of}": function(kind, of)
    for name, function in (
        ("divergence", _divergence), ("divergence_loss", _divergence_loss)
    )
    for kind, of in (
        *((kind, "teacher") for kind in _KINDS),
        (jaxmem.JSD, "columns"),
        (jaxmem.ReverseKL, "columns without rest"),
        (jaxmem.ForwardKL, "drawn ids"),
    )
} | {
    "divergence_loss at another temperature": _divergence_loss(
        jaxmem.ReverseKL, "teacher", statistics_temperature=0.7
    ),
}  # fmt: skip


# Each function once; its other cases are in `.ci/run`.
_FIRST = {name.split()[0]: name for name in reversed(FUNCTIONS)}
CASES = [name if name in _FIRST.values() else full(name) for name in FUNCTIONS]


TRAINED = "hidden", "W", "bias", "logits"


def values_and_gradients(module, name, p, head_options, options, names=TRAINED):
    """(result, gradients of its weighted sum by the named operands)."""
    function = FUNCTIONS[name]

    def run(trained):
        q = p | trained
        head = jaxmem.Head(q["W"], bias=q["bias"], **head_options)
        q |= {"vocab_size": head_options.get("vocab_size", V)}
        result = function.call(module, q, head, options)
        return weighted_sum(result), result

    trained = {k: jnp.asarray(p[k]) for k in names}
    if not function.has_gradient:
        return jax.jit(run)(trained)[1], {}
    gradients, result = jax.jit(jax.grad(run, has_aux=True))(trained)
    return result, gradients


def weighted_sum(tree):
    """A scalar that every float of a tree changes."""
    total = 0.0
    for i, x in enumerate(jax.tree.leaves(tree)):
        if jnp.issubdtype(x.dtype, jnp.floating):
            weights = np.random.default_rng(i).standard_normal(x.shape)
            total += jnp.sum(x * jnp.asarray(weights, x.dtype))
    return jnp.asarray(total)


def assert_near(made, want):
    """Equal ids and booleans, and floats up to rounding."""
    assert jax.tree.structure(made) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
