"""The kernels of a forward pass in 8 bits, without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import Sample
from jaxmem.head.backends import (
    hopper_eight_bits,
    hopper_sampled,
    xla_eight_bits,
    xla_sampled,
)
from jaxmem.head.maths import column_sampling, eight_bits, row_stats
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.spec import Spec
from tests.helpers import hlo, oracle
from tests.helpers.cases import Case, slow
from tests.helpers.interpreter import needs_pallas
from tests.helpers.sampled_gradients import FLOATS, SAVED, cotangents, random_draws

pytestmark = needs_pallas
NAMES = (*SAVED, "is_argmax", eight_bits.ERROR)


def problem(n, d, v, slots, layout="vd", vocab_size=None, std=1.0):
    """(spec, source, rows) of random numbers, with some rows masked."""
    h, W, y = Case(n, d, v, std=std).make()
    h[:, 3] *= 30
    W[:, 3] /= 30
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    spec = Spec(
        v, vocab_size or v, 256, FLOATS, h.dtype, layout, gradient_samples=slots,
        forward="int8",
    )  # fmt: skip
    h = h.at[::5].set(jnp.nan)
    where = jnp.arange(n) % 5 > 0
    rows = TokenRows(jnp.asarray(y % spec.vocab_size), where, None, random_draws(n))
    return spec, Factors(h, W if layout == "vd" else W.T, None), rows


def run(spec, source, rows, g):
    """(outputs, entries, gradients), these by XLA: test_hopper_sampled has kernels."""
    shared = eight_bits.of_call(spec, source, rows)
    made, entries = hopper_eight_bits.forward(spec, source, rows, NAMES, shared)
    saved = row_stats.Outputs(**{k: made[k] for k in NAMES[:-1]})
    cotangents = row_stats.Cotangents(*(g.get(k) for k in FLOATS))
    dz = column_sampling.derivative_by_products(
        spec, hopper_sampled.sampling_of(spec), rows, saved, cotangents, entries
    )
    return made, entries, xla_sampled.gradient(spec, source, rows, dz)


@pytest.mark.slow
@pytest.mark.parametrize("layout, vocab_size", [("vd", 60), ("dv", 60)])
def test_sampled_exact_with_enough_slots(layout, vocab_size, interpreted):
    """Every column is kept with certainty, so that nothing of 8 bits is left."""
    n, d, v = 20, 64, 70
    spec, source, rows = problem(n, d, v, 160, layout, vocab_size, std=0.25)
    g, on = cotangents(n), np.asarray(rows.active)
    made, entries, grads = jax.jit(run, static_argnums=0)(spec, source, rows, g)
    kept = np.sum(np.asarray(entries.p) > 0, 1)
    W = source.W if layout == "vd" else source.W.T
    want, slopes = oracle.head(
        source.hidden, W, np.asarray(rows.labels), g, on=on, vocab_size=vocab_size
    )
    np.testing.assert_array_equal(kept, on * (vocab_size - 1))
    for name in FLOATS:
        # Entropy has the rounding of stored exponentials, at most 2^-9 of a term.
        limit = 4e-3 if name == "entropy" else 2e-4
        np.testing.assert_allclose(made[name], want[name], atol=limit, err_msg=name)
    slopes = slopes[0], slopes[1] if layout == "vd" else slopes[1].T
    for a, b in zip(grads, slopes, strict=False):
        limit = 8e-3 * np.abs(b).max()
        np.testing.assert_allclose(np.float64(a), b, atol=limit, rtol=2e-2)


@pytest.mark.slow
def test_statistics_are_those_of_8_bits(interpreted):
    from jaxmem.head.kernels import int8_factors
    from jaxmem.head.kernels.forward import others_and_exps

    spec, source, rows = problem(256, 64, 300, 16, vocab_size=290)
    source = source._replace(hidden=jnp.nan_to_num(source.hidden))
    shared = eight_bits.of_call(spec, source, rows)
    low = int8_factors.padded(eight_bits.rounded(source.hidden, shared.channels))
    W = int8_factors.padded(shared.W)
    env = hopper_eight_bits._launch_env(spec, W.values, 256)
    z = xla_eight_bits._logits_in_8_bits(shared, source.hidden)
    z = xla_eight_bits._without_labels(spec, z, rows.labels)
    active = jnp.array([256], jnp.int32)
    stats, kept = jax.jit(others_and_exps, static_argnums=0)(
        env, low, W, rows.labels, active
    )
    np.testing.assert_allclose(stats.max, z.max(1), rtol=1e-5)
    want, _ = row_stats.of_tile(z, jnp.full(256, -1))
    for name in ("sum_others", "sum_shifted", "sum_squares"):
        got, exact = (np.asarray(getattr(x, name)) for x in (stats, want))
        np.testing.assert_allclose(got, exact, rtol=4e-3, atol=1e-3, err_msg=name)
    # The sums are those of the exponentials as they are stored.
    scale = np.exp(np.float64(kept.max) - np.float64(stats.max)).T
    width = env.tiles.columns
    exps = np.float64(kept.exps)[:, :290]
    total = sum(
        exps[:, i * width : (i + 1) * width].sum(1) * scale[:, i]
        for i in range(scale.shape[1])
    )
    np.testing.assert_allclose(stats.sum_others, total, rtol=2e-6)
    at_label = np.take_along_axis(exps, np.asarray(rows.labels)[:, None], axis=1)
    assert not at_label.any()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["vd", slow("dv")])
def test_lowers_for_an_h200(layout, lowered_anywhere):
    n, d, v = 512, 320, 50257
    W = jax.ShapeDtypeStruct((v, d) if layout == "vd" else (d, v), jnp.bfloat16)
    operands = [
        jax.ShapeDtypeStruct((n, d), jnp.bfloat16), W,
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.eval_shape(lambda: jax.random.key(0)),
    ]  # fmt: skip

    def loss(h, W, y, key):
        options = dict(gradient=Sample(64, "int8"), key=key, implementation="hopper")
        head = jaxmem.Head(W, layout=layout)
        return jnp.sum(jaxmem.logprobs(h, head, y, chunk=256, **options))

    text = hlo.lowered_for_an_h200(jax.grad(loss, (0, 1)), *operands)
    assert "sampled_logits" in text or text.count("mosaic_gpu_v2") >= 8
