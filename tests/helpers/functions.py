"""One table of the head's functions: how each is called, and its float64 oracle.

`call(module, …)` takes the functions from `jaxmem`, from its reference, or from any
other object that has them: those over a mesh, or the methods of a Flax module.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.helpers import draws, oracle
from tests.helpers.cases import full

N, D, D_TEACHER, V, K = 12, 8, 4, 40, 4
PADDING = 5  # ids are below V - 5, so that a head may be padded
VOCAB = V - PADDING
KEY = jax.random.key(0)
TEACHER = {"softcap": 3.0, "temperature": 1.5}  # of a teacher with scaling of its own


def make(seed: int = 0, n=N, d=D, v=V, std=1.0) -> dict[str, np.ndarray]:
    """Operands of every function, by name; some tokens and ids are absent."""
    rng, vocab_size = np.random.default_rng(seed), v - PADDING

    def floats(*shape, size=1.0):
        return (rng.standard_normal(shape) * size).astype(np.float32)

    ids = [rng.permutation(vocab_size)[:K] for _ in range(n)]
    ids = np.reshape(np.array(ids, np.int32), (n, K))
    labels = ids[:, 1].copy()
    some = rng.random(n)
    ids[rng.random((n, K)) < 0.1] = -1
    ids[some < 0.25, 3] = ids[some < 0.25, 0]  # repeated
    ids[(0.4 < some) & (some < 0.5)] = -1
    support = np.concatenate([labels[:, None], ids], axis=1)
    labels[some > 0.85] = -1
    log_q = np.log(rng.dirichlet(np.ones(K + 1), n)[:, :K]).astype(np.float32)
    return {
        "hidden": floats(n, d), "W": floats(v, d, size=std * d**-0.5),
        "bias": floats(v), "labels": labels, "ids": ids,
        "teacher_hidden": floats(n, D_TEACHER),
        "teacher_W": floats(v, D_TEACHER, size=std * D_TEACHER**-0.5),
        "teacher_bias": floats(v),
        "log_q": np.where(ids < 0, np.nan, log_q),  # of absent ids nothing is read
        "warmth": np.linspace(0.5, 2, n, dtype=np.float32), "support": support,
        "widths": np.resize(np.array([K + 1, 1, 3, 2], np.int32), n),
        "advantages": floats(n), "logits": floats(n, v, size=std),
    }  # fmt: skip


# What has one entry a token; the rest is weights.
OF_TOKENS = (
    "hidden", "labels", "ids", "teacher_hidden", "log_q", "support", "advantages",
    "logits", "warmth", "widths",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HeadFunction:
    """A function of the head, how to call it, and what it returns.

    Attributes:
        call: (module, operands, head, options) -> the result.
        exact: (operands, scaling, mask) -> (the result in float64, a function from
            its cotangents to gradients by name). Scaling are the head's softcap and
            vocab_size, and the temperature. Among the operands is the `result` of the
            call, of whose random columns an oracle may compute the rest.
        trained: the operands that are differentiated; none if nothing is.
        gradients: the kinds of gradient= that it takes beside None.
    """

    call: Callable[[Any, dict, Any, dict], Any]
    exact: Callable[[dict, dict, np.ndarray], tuple[Any, Callable]]
    trained: tuple[str, ...] = ("hidden", "W", "bias")
    gradients: tuple[type, ...] = (jaxmem.Recompute, jaxmem.Sample)
    blocks: bool = False  # it takes Recompute(blocks) too

    @property
    def samples(self):
        """True if it takes gradient=Sample(k)."""
        return jaxmem.Sample in self.gradients


def rows(on, x, fill=0):
    """Rows of x, and `fill` where a token is masked."""
    return np.where(on.reshape(-1, *[1] * (np.ndim(x) - 1)), x, fill)


def of_logits(p, scaling, on):
    """The head's logits, which are 0 where a token is masked."""
    return oracle.Logits.of(p["hidden"], p["W"], p["bias"], on=on, **scaling)


def by_name(logits, dz):
    """Gradients by name; terms of those of hidden and W."""
    terms = dict(zip(("hidden", "W"), logits.terms(dz), strict=True))
    made = dict(zip(("hidden", "W", "bias"), logits.gradients(dz), strict=True))
    return made | {"terms": terms}


def exact_of(function, labels=False):
    """The exact form of function(z, p) -> (values, pull)."""

    def exact(p, scaling, on):
        on = on & (p["labels"] >= 0) if labels else on
        logits = of_logits(p, scaling, on)
        values, pull = function(logits.z, p)
        return rows(on, values), lambda g: by_name(logits, pull(rows(on, g)))

    return exact


def _statistics_of(z, y, on):
    """`jaxmem.TokenStats`, and a pull of cotangents of that kind."""
    values, pull = oracle.statistics(z, y)
    values = jax.tree.map(functools.partial(rows, on), values)
    stats = jaxmem.TokenStats(**values, is_argmax=on & oracle.is_argmax(z, y))
    return stats, lambda g: pull({k: rows(on, getattr(g, k)) for k in values})


def _token_stats(p, scaling, on):
    on = on & (p["labels"] >= 0)
    logits = of_logits(p, scaling, on)
    stats, pull = _statistics_of(logits.z, p["labels"], on)
    return stats, lambda g: by_name(logits, pull(g))


def _entropy(z, p):
    values, pull = oracle.statistics(z, np.zeros(len(z), int))
    return values["entropy"], lambda g: pull({"entropy": g})


def _logprobs(z, p):
    values, pull = oracle.statistics(z, p["labels"])
    return values["logprob"], lambda g: pull({"logprob": g})


def _stats_from_logits(p, scaling, on):
    on = on & (p["labels"] >= 0)
    u = rows(on, np.asarray(p["logits"]).astype(np.float64))
    z, slope = oracle.scale(u, **scaling)
    stats, pull = _statistics_of(z, p["labels"], on)

    def gradients(g):
        du = pull(g) * slope
        padding = [(0, 0), (0, u.shape[1] - du.shape[1])]
        return {"logits": np.pad(du, padding)}

    return stats, gradients


def _logprobs_from_logits(p, scaling, on):
    stats, pull = _stats_from_logits(p, scaling, on)
    none = jaxmem.TokenStats(*(0 * np.float64(x) for x in stats))
    return stats.logprob, lambda g: pull(none._replace(logprob=g))


def _topk(p, scaling, on):
    logits = of_logits(p, scaling, on)
    ids, values, pull = oracle.topk(logits.z, 3)
    made = jaxmem.TopK(rows(on, values), rows(on, ids, -1))
    return made, lambda g: by_name(logits, pull(rows(on, g.logprobs)))


def _sample_ids(p, scaling, on):
    z = of_logits(p, scaling, on).z
    ids = oracle.draws(z, draws.uniform(5, len(z), KEY))
    return rows(on, ids, -1), lambda g: {}


def _record_entries(p, scaling, on):
    """Entries at the columns of the result, which are drawn."""
    labels, on = p["labels"], on & (p["labels"] >= 0)
    z = of_logits(p, scaling, on).z
    stats, _ = oracle.statistics(z, labels)
    columns = np.asarray(p["result"].columns)
    columns = columns.reshape(len(z), columns.shape[-1])
    kept = columns < z.shape[1]
    assert not (kept & (columns == labels[:, None])).any()
    assert all(
        len({*row[row < z.shape[1]]}) == sum(row < z.shape[1]) for row in columns
    )
    columns = np.where(on[:, None] & kept, columns, np.iinfo(np.int32).max)
    at_columns = np.take_along_axis(z, np.where(kept, columns, 0), 1)
    of_label = np.take_along_axis(z, np.maximum(labels, 0)[:, None], 1)[:, 0]
    statistics = (
        of_label,
        *(stats[k] for k in ("logsumexp", "entropy", "sum_pi_squared")),
    )
    made = jaxmem.RecordedEntries(
        columns, np.where(kept, at_columns, 0), *(rows(on, x) for x in statistics)
    )
    return made, lambda g: {}


def _selected(z, p):
    return oracle.selected(z, p["ids"])


def _support(z, p):
    return oracle.support(z, np.maximum(p["labels"], 0), p["support"])


def _ragged_support(z, p):
    ids = np.where(np.arange(K + 1) < p["widths"][:, None], p["support"], -1)
    return oracle.support(z, np.maximum(p["labels"], 0), ids)


# Losses, whose slopes are written out for the oracle.


def policy_loss(stats, advantages):
    """A loss that reads all statistics."""
    loss = -advantages * stats.logprob - 0.1 * stats.entropy
    loss = loss + 0.02 * stats.logsumexp**2 + 0.3 * stats.sum_pi_squared
    return loss, {"entropy": stats.entropy, "is_argmax": stats.is_argmax}


def mixed_loss(stats, divergence, advantages):
    """A loss of statistics and of a divergence."""
    loss = advantages * divergence - stats.logprob + 0.1 * stats.entropy
    return loss, {"divergence": divergence, "entropy": stats.entropy}


def sized(function, loss_fn, p, *operands, **options):
    """(loss, metrics) of a loss and a normalizer of p's size, which change neither."""
    of_loss, of_count = p.get("size", (1.0, 1.0))
    if of_loss == of_count == 1:
        return function(loss_fn, *operands, **options)

    def larger(*args):
        loss, metrics = loss_fn(*args)
        return of_loss * loss, metrics

    active = p["labels"] >= 0
    active = active & p["where"] if "where" in p else active
    count = of_count * jnp.sum(active)
    loss, metrics = function(larger, *operands, **options, normalizer=count)
    return of_count / of_loss * loss, metrics


def mean(losses, metrics, on):
    """(loss, metrics), and the cotangent of each of the tokens."""
    metrics = {k: rows(on, x) * 1.0 for k, x in metrics.items()}
    count = max(on.sum(), 1)
    return (np.sum(rows(on, losses)) / count, metrics), on / count


def _token_loss(p, scaling, on):
    on = on & (p["labels"] >= 0)
    weights = rows(on, np.float64(p["advantages"]))
    logits = of_logits(p, scaling, on)
    stats, pull = _statistics_of(logits.z, p["labels"], on)
    made, share = mean(*policy_loss(stats, weights), on)

    def gradients(g):
        share_of_g = share * g[0]
        slopes = jaxmem.TokenStats(
            -weights, np.full(len(on), -0.1), 0.04 * stats.logsumexp,
            np.full(len(on), 0.3), None,
        )  # fmt: skip
        slopes = [None if x is None else x * share_of_g for x in slopes]
        of_weights = {"advantages": -share_of_g * stats.logprob}
        return by_name(logits, pull(jaxmem.TokenStats(*slopes))) | of_weights

    return made, gradients


# Targets of divergences: (operands) -> the target, and (z, operands, scaling) -> what
# the oracle returns.


@dataclasses.dataclass(frozen=True)
class Target:
    """A divergence's kind and what is known of its target."""

    kind: type
    of: str
    beta: float | None = None  # of a JSD

    def __str__(self):
        return f"{self.kind.__name__} {self.of}"

    def make(self, p):
        """The argument `target`."""
        of = {
            "teacher": lambda: jaxmem.Teacher(p["teacher_hidden"], self._head(p)),
            "scaled teacher": lambda: jaxmem.Teacher(
                p["teacher_hidden"],
                self._head(p, p["teacher_bias"], TEACHER["softcap"]),
                TEACHER["temperature"],
            ),
            "columns": lambda: jaxmem.Columns(p["ids"], p["log_q"]),
            "columns without rest": lambda: jaxmem.Columns(p["ids"], p["log_q"], False),
            "drawn ids": lambda: jaxmem.Drawn(p["ids"]),
        }[self.of]()
        return self.kind(of) if self.beta is None else self.kind(of, self.beta)

    def _head(self, p, bias=None, softcap=None):
        # The matrix of a teacher is [V, D] wherever that of the student is not.
        return jaxmem.Head(p["teacher_W"], bias, softcap, p["vocab_size"], "vd")

    def exact(self, z, p, scaling, on):
        """The divergence, and its pull."""
        kind, beta = self.kind.__name__, self.beta or 0.5
        if self.of == "drawn ids":
            return oracle.cross_entropy_of_draws(z, p["ids"])
        if "columns" in self.of:
            rest = self.of == "columns"
            columns = p["ids"], rows(on, np.float64(p["log_q"]), -9), rest
            return oracle.divergence_of_columns(kind, z, *columns, beta)
        own = {"softcap": None, "temperature": scaling["temperature"], "bias": 0.0}
        if self.of == "scaled teacher":
            own = TEACHER | {"bias": p["teacher_bias"]}
        teacher = oracle.Logits.of(
            p["teacher_hidden"], p["teacher_W"], on=on,
            vocab_size=scaling["vocab_size"], **own,
        )  # fmt: skip
        return oracle.divergence(kind, z, teacher.z, beta)


def _divergence(target):
    def call(module, p, head, options):
        return module.divergence(p["hidden"], head, target.make(p), **options)

    def exact(p, scaling, on):
        logits = of_logits(p, scaling, on)
        values, pull = target.exact(logits.z, p, scaling, on)
        return rows(on, values), lambda g: by_name(logits, pull(rows(on, g)))

    return HeadFunction(call, exact)


def _divergence_loss(target, warmth=None):
    """Statistics have another temperature, a number or the operand of that name."""

    def call(module, p, head, options):
        if warmth is not None:
            options = options | {"statistics_temperature": p.get(warmth, warmth)}
        operands = p["hidden"], head, p["labels"], target.make(p), p["advantages"]
        return sized(module.divergence_loss, mixed_loss, p, *operands, **options)

    def exact(p, scaling, on):
        on = on & (p["labels"] >= 0)
        weights = rows(on, np.float64(p["advantages"]))
        logits = of_logits(p, scaling, on)
        divergence, pull = target.exact(logits.z, p, scaling, on)
        own = {} if warmth is None else {"temperature": p.get(warmth, warmth)}
        of_stats = of_logits(p, scaling | own, on)
        stats, pull_stats = _statistics_of(of_stats.z, p["labels"], on)
        made, share = mean(*mixed_loss(stats, divergence, weights), on)

        def gradients(g):
            share_of_g, zero = share * g[0], np.zeros(len(on))
            slopes = jaxmem.TokenStats(-share_of_g, 0.1 * share_of_g, zero, zero, None)
            by_parts = (
                by_name(logits, pull(weights * share_of_g)),
                by_name(of_stats, pull_stats(slopes)),
            )
            made = jax.tree.map(np.add, *by_parts)
            return made | {"advantages": rows(on, divergence) * share_of_g}

        return made, gradients

    return HeadFunction(call, exact, ("hidden", "W", "bias", "advantages"))


def _of_labels(name, exact):
    def call(module, p, head, options):
        return getattr(module, name)(p["hidden"], head, p["labels"], **options)

    return HeadFunction(call, exact, blocks=True)


def _of_caller_logits(name, exact):
    def call(module, p, head, options):
        options = {"softcap": head.softcap, "vocab_size": head.vocab_size} | options
        return getattr(module, name)(p["logits"], p["labels"], **options)

    return HeadFunction(call, exact, ("logits",), ())


def _call_token_loss(module, p, head, options):
    operands = p["hidden"], head, p["labels"], p["advantages"]
    return sized(module.token_loss, policy_loss, p, *operands, **options)


def _call_ragged_support(module, p, head, options):
    """The first `widths` ids of each token, between entries that belong to none."""
    widths, columns = p["widths"].reshape(-1), jnp.arange(K + 1)[None]
    offsets = 2 + jnp.append(0, jnp.cumsum(widths))
    at = jnp.where(columns < widths[:, None], offsets[:-1, None] + columns, 2**30)
    ids = jnp.full(widths.size * (K + 1) + 5, VOCAB, jnp.int32)
    ids = ids.at[at].set(p["support"].reshape(at.shape), mode="drop")
    operands = p["hidden"], head, p["labels"], ids
    return module.support_logprobs(*operands, offsets=offsets, max_ids=K + 1, **options)


TARGETS = (
    *(Target(kind, "teacher") for kind in (jaxmem.ForwardKL, jaxmem.ReverseKL)),
    Target(jaxmem.JSD, "teacher"),
    Target(jaxmem.JSD, "columns", 0.3),
    Target(jaxmem.ReverseKL, "columns without rest"),
    Target(jaxmem.ForwardKL, "drawn ids"),
    Target(jaxmem.JSD, "scaled teacher", 0.1),
    Target(jaxmem.ForwardKL, "columns"),
)
FUNCTIONS = {
    "logprobs": _of_labels("logprobs", exact_of(_logprobs, labels=True)),
    "token_stats": _of_labels("token_stats", _token_stats),
    "entropy": HeadFunction(
        lambda module, p, head, options: module.entropy(p["hidden"], head, **options),
        exact_of(_entropy), blocks=True,
    ),
    "token_loss": HeadFunction(
        _call_token_loss, _token_loss, ("hidden", "W", "bias", "advantages"),
        blocks=True,
    ),
    "logprobs_from_logits": _of_caller_logits(
        "logprobs_from_logits", _logprobs_from_logits
    ),
    "token_stats_from_logits": _of_caller_logits(
        "token_stats_from_logits", _stats_from_logits
    ),
    "topk": HeadFunction(
        lambda module, p, head, options: module.topk(p["hidden"], head, 3, **options),
        _topk,
    ),
    "sample_ids": HeadFunction(
        lambda module, p, head, options: module.sample_ids(
            p["hidden"], head, 5, KEY, **options
        ),
        _sample_ids, (), (),
    ),
    "record_entries": HeadFunction(
        lambda module, p, head, options: module.record_entries(
            p["hidden"], head, p["labels"], K, KEY, **options
        ),
        _record_entries, (), (),
    ),
    "selected_logprobs": HeadFunction(
        lambda module, p, head, options: module.selected_logprobs(
            p["hidden"], head, p["ids"], **options
        ),
        exact_of(_selected),
    ),
    "support_logprobs": HeadFunction(
        lambda module, p, head, options: module.support_logprobs(
            p["hidden"], head, p["labels"], p["support"], **options
        ),
        exact_of(_support, labels=True), gradients=(),
    ),
    "support_logprobs of ragged ids": HeadFunction(
        _call_ragged_support, exact_of(_ragged_support, labels=True), gradients=()
    ),
} | {
    f"{name} {target}": function(target)
    for name, function in (
        ("divergence", _divergence), ("divergence_loss", _divergence_loss)
    )
    for target in TARGETS
} | {
    "divergence_loss at another temperature": _divergence_loss(TARGETS[1], 0.7),
    "divergence_loss of draws at another temperature": _divergence_loss(
        TARGETS[5], "warmth"
    ),
}  # fmt: skip


def each_once(names):
    """The first row of each function; its others are in `.ci/run`."""
    firsts = {name.split()[0]: name for name in reversed(names)}
    return [name if name in firsts.values() else full(name) for name in names]


CASES = each_once([*FUNCTIONS])


def cotangents(tree):
    """Weights of every float of a tree, in float32; 0 of integers and booleans."""
    return jax.tree.unflatten(jax.tree.structure(tree), [
        np.random.default_rng(i).standard_normal(x.shape).astype(np.float32)
        * np.float32(1 if x.ndim else N)  # a loss is a mean
        if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape)
        for i, x in enumerate(jax.tree.leaves(tree))
    ])  # fmt: skip


def weighted_sum(tree, used=None):
    """A scalar that every float of a tree changes; a token's are times `used` [N]."""
    total = 0.0
    for x, g in zip(*map(jax.tree.leaves, (tree, cotangents(tree))), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            g = jnp.asarray(g, x.dtype)
            if used is not None and g.ndim:
                of_token = g.size // max(len(used), 1)
                rows_of_g = g.reshape(len(used), of_token) * used[:, None]
                g = rows_of_g.reshape(g.shape)
            total += jnp.sum(x * g)
    return jnp.asarray(total)


@dataclasses.dataclass(frozen=True)
class Named:
    """The functions of `jaxmem` under a name, whose programs are traced anew."""

    name: str

    def __getattr__(self, function):
        return getattr(jaxmem, function)


@dataclasses.dataclass(frozen=True)
class Methods:
    """The methods of a Flax module as functions, which do not use their W."""

    head: Any

    def __getattr__(self, name):
        method, place_of_W = getattr(self.head, name), 1 + name.endswith("_loss")

        def call(*args, **options):
            return method(*args[:place_of_W], *args[place_of_W + 1 :], **options)

        return call
