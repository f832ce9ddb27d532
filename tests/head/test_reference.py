"""The dense reference against float64 oracles, and `jaxmem` against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head import reference
from tests.helpers import divergence, functions, oracle, selected, topk_divergence
from tests.helpers.functions import FUNCTIONS, values_and_gradients
from tests.helpers.targets import kind_of
from tests.helpers.tolerance import error

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEAD = {"softcap": 5.0, "vocab_size": functions.VOCAB}
MASKED = {"where": np.arange(functions.N) % 5 != 1, "temperature": 0.7}
EPSILON = 4e-6  # of sums in float32, of the size of the largest result


def described(W, bias=None, softcap=None, vocab_size=None, **options):
    """(the head, other options) of an oracle's options."""
    return jaxmem.Head(W, bias, softcap, vocab_size), options


def check(call, want, gradients, g, operands, options):
    """Value and gradients of call(hidden, head, options) are the oracle's."""
    trained = {"hidden": operands[0], "W": operands[1]}
    trained |= {k: v for k, v in options.items() if k == "bias"}

    @jax.jit
    def run(trained):
        own = options | {k: v for k, v in trained.items() if k == "bias"}
        head, rest = described(trained["W"], **own)
        return call(trained["hidden"], head, rest)

    made, pull = jax.vjp(run, {k: jnp.asarray(v) for k, v in trained.items()})
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        assert error(a, b) <= EPSILON
    (made,) = pull(jax.tree.map(jnp.asarray, g))
    for name, need in zip(("hidden", "W", "bias"), gradients, strict=True):
        if name in made:
            assert error(made[name], need) <= EPSILON, name


FLOATS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")


@pytest.mark.parametrize("options", [{}, selected.OPTIONS], ids=["plain", "options"])
def test_statistics_equal_the_oracle(options):
    h, W, labels, _ = selected.make()
    labels = labels % 100
    labels[5] = -1
    rng = np.random.default_rng(1)
    g = {k: rng.standard_normal(len(h)).astype(np.float32) for k in FLOATS}
    want, gradients = oracle.head(h, W, labels, g, **options)

    def call(hidden, head, rest):
        stats = reference.token_stats(hidden, head, labels, **rest)
        return {k: getattr(stats, k) for k in FLOATS}

    check(call, want, gradients, g, (h, W), options)


def test_losses_equal_the_oracle():
    """The loss is linear in the statistics, so that its slopes are the oracle's g."""
    h, W, labels, _ = selected.make()
    labels[5] = -1
    slopes = dict(zip(FLOATS, (-1.5, 0.3, 0.02, -0.7), strict=True))
    g = {k: np.full(len(h), slope / 7) for k, slope in slopes.items()}
    want, gradients = oracle.head(h, W, labels, g)
    total = sum(np.sum(g[k] * want[k]) for k in FLOATS)

    def loss_fn(stats):
        return sum(slopes[k] * getattr(stats, k) for k in FLOATS), {"p": stats.logprob}

    def call(hidden, head, rest):
        return reference.token_loss(loss_fn, hidden, head, labels, normalizer=7)

    zero = np.zeros(len(h), np.float32)
    want = total, {"p": want["logprob"]}
    check(call, want, gradients, (np.float32(1), {"p": zero}), (h, W), {})


@pytest.mark.parametrize("verb", ["reverse_kl", "forward_kl", "jsd 0.1"])
def test_divergences_from_a_teacher_equal_the_oracle(verb):
    operands = divergence.make()
    g = np.random.default_rng(1).standard_normal(len(operands[0])).astype(np.float32)
    options = {"softcap": 3.0, "temperature": 0.7}
    want, gradients = divergence.exact(verb, g, operands, **options)

    def call(hidden, head, rest):
        teacher = jaxmem.Teacher(operands[2], jaxmem.Head(operands[3], softcap=3.0))
        return reference.divergence(hidden, head, kind_of(verb, teacher), **rest)

    check(call, want, gradients, g, operands[:2], options)


@pytest.mark.parametrize("tail", [True, False], ids=["rest", "no rest"])
@pytest.mark.parametrize("way", ["reverse_kl", "forward_kl", "jsd"])
def test_divergences_of_known_columns_equal_the_oracle(way, tail):
    h, W, ids, ln_q = operands = topk_divergence.make()
    ids[3, 1:] = -1
    g = np.random.default_rng(1).standard_normal(len(h)).astype(np.float32)
    want, gradients = topk_divergence.exact(way, tail, g, operands)

    def call(hidden, head, rest):
        columns = jaxmem.Columns(ids, ln_q, tail)
        target = kind_of(topk_divergence.named(way), columns)
        return reference.divergence(hidden, head, target, **rest)

    check(call, want, gradients, g, (h, W), {})


def test_loss_of_a_divergence_equals_the_oracle():
    """Its divergence is at one temperature, its statistics are at another one."""
    operands = h, W, *teacher = divergence.make()
    labels = np.arange(len(h)) * 3
    g = np.full(len(h), 1 / len(h))
    D, of_divergence = divergence.exact("reverse_kl", 2 * g, operands, temperature=0.7)
    stats, of_stats = oracle.head(h, W, labels, {"logprob": -g}, temperature=1.3)
    gradients = [a + b for a, b in zip(of_divergence, of_stats, strict=True)]

    def call(hidden, head, rest):
        return reference.divergence_loss(
            lambda stats, D: 2 * D - stats.logprob, hidden, head, labels,
            jaxmem.ReverseKL(jaxmem.Teacher(*teacher)), temperature=0.7,
            statistics_temperature=1.3,
        )[0]  # fmt: skip

    want = np.sum(g * (2 * D - stats["logprob"]))
    check(call, want, gradients, np.float32(1), (h, W), {})


@pytest.mark.parametrize("verb", ["selected", "support", "ragged"])
def test_logprobs_of_ids_equal_the_oracle(verb):
    h, W, labels, ids = operands = selected.make()
    ids[4, 3:], ids[:, 0] = -1, ids[:, 2]
    of_ids = "selected" if verb == "selected" else "support"
    g = selected.cotangents(of_ids)
    options = selected.OPTIONS | {"vocab_size": None}
    want, gradients = selected.exact(of_ids, g, operands, **options)

    def call(hidden, head, rest):
        if verb == "selected":
            return reference.selected_logprobs(hidden, head, ids, **rest)
        supports, ragged = ids, {}
        if verb == "ragged":
            ragged = {"offsets": np.arange(len(ids) + 1) * ids.shape[1], "max_ids": 6}
            supports = ids.ravel()
        return reference.support_logprobs(
            hidden, head, labels, supports, **ragged, **rest
        )

    check(call, want, gradients, g, (h, W), options)


def test_largest_and_drawn_ids_are_those_of_float64():
    h, W, _, _ = selected.make()
    z = h.astype(np.float64) @ W.T.astype(np.float64)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    top = reference.topk(jnp.asarray(h), jnp.asarray(W), 5)
    order = np.argsort(-p, axis=1)[:, :5]
    np.testing.assert_array_equal(top.ids, order)
    assert error(top.logprobs, np.log(np.take_along_axis(p, order, 1))) <= EPSILON
    key = jax.random.key(0)
    ids = reference.sample_ids(jnp.asarray(h), jnp.asarray(W), 2000, key)
    counts = (np.asarray(ids)[..., None] == np.arange(p.shape[1])).sum(1)
    assert np.abs(counts / 2000 - p).max() < 5 * np.sqrt(0.25 / 2000)


@pytest.mark.parametrize("name", functions.CASES)
def test_jaxmem_equals_the_reference(name):
    p = functions.make()
    p["hidden"][~MASKED["where"]] = np.nan
    made = values_and_gradients(jaxmem, name, p, HEAD, MASKED)
    functions.assert_near(made, values_and_gradients(reference, name, p, HEAD, MASKED))


def test_reference_has_every_function():
    calls = {name.split()[0] for name in FUNCTIONS}
    functions_of_head = {
        name
        for name, item in vars(jaxmem.head).items()
        if callable(item) and name[0].islower() and name != "report"
    }
    assert calls == functions_of_head
    assert calls <= vars(reference).keys()
