"""Blocks of two heads' logits: against float64, inside the verbs, lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import devices
from jaxmem.head.backends import choose, hopper_rows
from jaxmem.head.kernels import row_pairs
from jaxmem.head.maths import block_sums, row_stats
from jaxmem.head.verbs import two_heads
from jaxmem.head.verbs.kinds import JSD, ForwardKL, ReverseKL
from tests.helpers import divergence
from tests.helpers.cases import slow
from tests.helpers.divergence import make
from tests.helpers.interpreter import needs_pallas
from tests.helpers.row_kernels import EPS, lowered_loss, rows_of_logits
from tests.helpers.targets import forward_kl, reverse_kl

pytestmark = needs_pallas
WIDTH, TERMS = row_pairs.WIDTH, ReverseKL().block_terms
BACKEND = dataclasses.replace(choose.BACKENDS[-1], reductions=hopper_rows)
VERBS = {"reverse_kl": reverse_kl, "forward_kl": forward_kl}


def blocks_of(z):
    """Blocks of rows of logits, in float64."""
    padded = np.pad(z, ((0, 0), (0, -z.shape[1] % WIDTH)), constant_values=-np.inf)
    return padded.reshape(len(z), -1, WIDTH).astype(np.float64)


def both(columns):
    """Near to each other, independent, and with columns that only one of them has."""
    z = rows_of_logits(columns)[:5]
    y = z[[1, 0, 2, 3, 4]]
    y[2] = z[2] + np.linspace(-1e-2, 1e-2, columns, dtype=np.float32)
    z[3, -1] = y[4, 1] = -np.inf
    return z, y


# A last tile that overlaps the one before, and a last block that is cut.
@pytest.mark.slow
@pytest.mark.parametrize("columns", [512 + 3 * WIDTH + 7])
def test_parts_against_float64(columns, rows_interpreted):
    z, y = both(columns)
    found = row_pairs.parts(TERMS, jnp.asarray(z), jnp.asarray(y))
    tops, exps = [], []
    for head, logits in ((found.z, z), (found.y, y)):
        tiles = blocks_of(logits)
        tops.append(tiles.max(-1))
        exps.append(np.exp(tiles - tiles.max(-1, keepdims=True)))
        np.testing.assert_array_equal(head.largest, tops[-1])
        want = np.sort(exps[-1], -1)[..., :-1].sum(-1)
        np.testing.assert_allclose(head.others, want, rtol=16 * EPS, atol=16 * EPS)
        first = np.arange(len(z)), tops[-1].argmax(1)
        np.testing.assert_allclose(head.others[first], want[first], rtol=16 * EPS)
    w, v = exps
    with np.errstate(invalid="ignore"):  # -inf - -inf
        d = (blocks_of(z) - blocks_of(y)) - (tops[0] - tops[1])[..., None]
        excess = np.where(w == 0, v, w * d - (w - v)).sum(-1)
    np.testing.assert_allclose(found.sums[0], excess, rtol=1e-4)
    np.testing.assert_allclose(found.sums[1], (w - v).sum(-1), atol=WIDTH * EPS)


@pytest.fixture
def by_kernels(rows_interpreted, monkeypatch):
    monkeypatch.setattr(devices, "backend", lambda: "gpu")


@pytest.mark.full
@pytest.mark.parametrize("verb", ["reverse_kl", slow("forward_kl")])
def test_divergence_where_sums_cancel(verb, by_kernels):
    divergence.check_nearly_equal_heads(verb, 1e-3)
    divergence.check_equal_heads(verb)
    divergence.check_confident_heads(verb)


def excluding(blocks, value=-np.inf):
    """A bias of 4 blocks of columns."""
    return np.where(np.arange(4 * WIDTH) < blocks * WIDTH, value, 0).astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("verb", ["forward_kl", "reverse_kl"])
def test_blocks_that_a_head_excludes(verb, by_kernels):
    operands = make(v=4 * WIDTH)
    few, more = excluding(1), excluding(2)
    less = more if verb == "reverse_kl" else few  # of the reference
    other = few if verb == "reverse_kl" else more

    def call(h, bias, teacher_bias):
        (W, other, W_other), Head = operands[1:], jaxmem.Head
        heads = Head(W, bias), other, Head(W_other, teacher_bias)
        return VERBS[verb](h, *heads).sum()

    got, gradient = jax.value_and_grad(call)(operands[0], other, less)
    assert np.isinf(got) and (np.isnan(gradient).all() or verb == "forward_kl")
    value, gradient = jax.value_and_grad(call)(operands[0], less, other)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    # Logits so low that their probabilities are 0 exclude as well.
    if verb == "reverse_kl":
        assert call(operands[0], excluding(2, -200), more) == call(
            operands[0], more, more
        )


@pytest.mark.slow
def test_divergence_is_never_negative(rows_interpreted):
    """Here sums of both signs cancel within the rounding of one block."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((64, 520)).astype(np.float32) * 5
    y = (z + 1e-5 * rng.standard_normal(z.shape)).astype(np.float32)
    rule = two_heads.TwoHeadsRule(None, BACKEND, ReverseKL(), None)
    value, _, _ = rule.values(jnp.asarray(z), jnp.asarray(y))
    assert (np.asarray(value) >= 0).all()


KINDS = [ReverseKL(), ForwardKL(), JSD()]


def far_apart(columns):
    """Heads whose logits differ by a constant, beside which their digits are lost."""
    z = np.random.default_rng(0).standard_normal((8, columns)) * 6
    y = np.random.default_rng(1).standard_normal((8, columns)) / 2 + z - 1000
    return z.astype(np.float32), y.astype(np.float32)


def divergence_of(divergence, xp, z, y):
    log_p, log_q = (
        x - xp.log(xp.exp(x).sum(-1, keepdims=True))
        for x in (z - z.max(-1, keepdims=True), y - y.max(-1, keepdims=True))
    )
    p, q, middle = xp.exp(log_p), xp.exp(log_q), xp.logaddexp(log_p, log_q) - np.log(2)
    kl, forward = p * (log_p - log_q), q * (log_q - log_p)
    half = (p * (log_p - middle) + q * (log_q - middle)) / 2
    return dict(zip(KINDS, (kl, forward, half), strict=True))[divergence].sum(-1)


def check_far_apart(divergence, columns):
    z, y = far_apart(columns)
    want = divergence_of(divergence, np, *(x.astype(np.float64) for x in (z, y)))
    z, y = jnp.asarray(z), jnp.asarray(y)
    near = jax.jit(functools.partial(divergence_of, divergence, jnp))(z, y)
    rule = two_heads.TwoHeadsRule(None, BACKEND, divergence, None)
    made, _, _ = jax.jit(rule.values)(z, y)
    bound = 2 * np.abs(near - want).max() + 4 * EPS * np.abs(want).max()
    np.testing.assert_allclose(made, want, rtol=0, atol=bound)


@pytest.mark.full
@pytest.mark.parametrize(
    "divergence", [slow(KINDS[0]), KINDS[1], slow(KINDS[2])],
    ids=lambda d: type(d).__name__,
)  # fmt: skip
def test_heads_that_a_constant_separates(divergence, rows_interpreted):
    check_far_apart(divergence, 4 * WIDTH)


@pytest.mark.gpu
@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: type(d).__name__)
def test_heads_that_a_constant_separates_on_a_gpu(divergence):
    check_far_apart(divergence, 151936)


@pytest.mark.parametrize("verb", VERBS)
def test_lowered_for_a_gpu(verb, monkeypatch):
    text = lowered_loss(verb, monkeypatch)
    assert "row_pairs" in text
    assert "row_sums" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2048, 20 * row_pairs.WIDTH + 7, 151936])
def test_on_a_gpu(columns):
    z, y = (jnp.asarray(x) for x in both(columns))
    found = jax.jit(functools.partial(row_pairs.parts, TERMS))(z, y)
    for got, head in ((found.z, z), (found.y, y)):
        got, want = block_sums.normaliser(got), row_stats.normaliser(head)
        np.testing.assert_array_equal(got.max, want.max)
        np.testing.assert_allclose(got.log_sum, want.log_sum, rtol=64 * EPS)
