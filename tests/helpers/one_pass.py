"""A loss of every statistic on "hopper", against "xla" in float32 on equal numbers."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.helpers.cases import Case
from tests.helpers.described import described


def every_option(case, masked):
    """All that scales or masks logits; each `masked`-th token is masked."""
    return {
        "case": case,
        "layout": "dv",
        "softcap": 5.0,
        "vocab_size": 250,
        "temperature": np.linspace(0.5, 2, case.n, dtype=np.float32),
        "where": np.arange(case.n) % masked > 0,
        "bias": np.sin(np.arange(300, dtype=np.float32)),
    }


# How the rows fall: in one block, in several; with all that scales or masks logits.
ONE_PASS = {
    "one block": {"case": Case(100, 33, 600, std=3.0, chunk=48)},
    "several blocks": {"case": Case(300, 16, 300, std=2.0, chunk=32)},
    "every option": every_option(Case(130, 64, 300, std=3.0, chunk=64), 3),
    "several blocks, every option": every_option(
        Case(300, 64, 300, std=3.0, chunk=32), 9
    ),
}


def check_one_pass(case, dtype="bfloat16", where=None, and_none=True, **options):
    """Loss, metrics and all gradients; where some are masked, with none active, too."""
    h, W, y = case.make()
    y = np.where(np.arange(len(y)) % 7 == 3, -1, y % options.get("vocab_size", case.v))
    h, W = (jnp.asarray(x, dtype) for x in (h, W))
    W = W.T if options.pop("layout", "vd") == "dv" else W
    weight = np.linspace(-1, 1, len(y), dtype=np.float32)
    bias = options.pop("bias", None)

    def run(h, W, weight, bias, where, implementation):
        def loss(h, W, weight, bias):
            return described(jaxmem.token_loss)(
                _of_every_statistic, h, W, y, weight, chunk=case.chunk,
                implementation=implementation, bias=bias, where=where, **options,
            )  # fmt: skip

        wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
        return jax.value_and_grad(loss, wanted, has_aux=True)(h, W, weight, bias)

    run = jax.jit(run, static_argnums=5)
    for rows in (where, np.zeros(len(y), bool))[: 1 + and_none]:
        got = run(h, W, weight, bias, rows, "hopper")
        want = run(*(x.astype(jnp.float32) for x in (h, W)), weight, bias, rows, "xla")
        jax.tree.map(close, got, want)


# A loss of log-probabilities and normalisers, whose derivative is by rows a multiple of
# the exponentials; logits that are far above the label's, a derivative that the label
# has alone, and a second block of rows without an active one, where that does not hold.
BY_ROWS = {
    "fitting": {"case": Case(100, 33, 300, std=2.0, chunk=48)},
    "far above": {"case": Case(100, 33, 300, std=60.0, chunk=48)},
    "label alone": {"case": Case(100, 33, 300, std=2.0, chunk=48), "of_label": 1.0},
    "large weights": {"case": Case(100, 33, 300, std=2.0, chunk=48), "scale": 1e30},
    "transposed": {"case": Case(100, 64, 320, std=2.0, chunk=48), "layout": "dv"},
    "nothing in a block": {"case": Case(600, 16, 300, std=2.0, chunk=32), "first": 200},
}


def check_by_rows(case, of_label=0.0, first=None, layout="vd", scale=1.0):
    """Loss and gradients of log-probabilities, with temperatures; some are masked."""
    h, W, y = case.make()
    y = np.where(np.arange(len(y)) % 7 == 3, -100, y % case.v)
    y = np.where(np.arange(len(y)) < (first or len(y)), y, -100)
    h, W = (jnp.asarray(x, "bfloat16") for x in (h, W))
    W = W.T if layout == "dv" else W
    weight = np.linspace(-1, 1, len(y), dtype=np.float32)
    weight[:3] = 0
    weight *= scale
    temperature = np.linspace(0.5, 2, len(y), dtype=np.float32)

    def loss_fn(stats, weight):
        of_normaliser = of_label * stats.logsumexp + (1 - of_label) * 0.01 * (
            stats.logsumexp**2
        )
        return -weight * stats.logprob - weight * of_normaliser

    def run(h, W, implementation):
        def loss(h, W):
            return described(jaxmem.token_loss)(
                loss_fn, h, W, y, weight, chunk=case.chunk, temperature=temperature,
                implementation=implementation,
            )[0]  # fmt: skip

        return jax.value_and_grad(loss, (0, 1))(h, W)

    run = jax.jit(run, static_argnums=2)
    got = run(h, W, "hopper")
    want = run(*(x.astype(jnp.float32) for x in (h, W)), "xla")
    jax.tree.map(close, got, want)


def _of_every_statistic(stats, weight):
    """Its derivative by each statistic is not 0, and by one no constant."""
    loss = -weight * stats.logprob - 0.3 * stats.entropy + 0.2 * stats.sum_pi_squared
    loss += 0.01 * stats.logsumexp**2
    return loss, {"entropy": stats.entropy, "is_argmax": stats.is_argmax * 1.0}


def close(got, want):
    """To 8 bits of the largest, as a derivative in 16 bits is."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    scale = np.abs(want).max(initial=1e-6)
    np.testing.assert_allclose(got, want, atol=2**-7 * scale, rtol=0)
