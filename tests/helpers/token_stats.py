"""Statistics of tokens, checked against the oracle and materialised logits."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem
from tests.helpers import oracle
from tests.helpers.described import described
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_as_good

FLOATS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")


def materialised(h, W, y, *, bias=None, softcap=None, temperature=1.0, vocab_size=None):
    """Statistics from materialised float32 logits, by the formulas of textbooks."""
    z = jnp.matmul(h, W.T, preferred_element_type=jnp.float32)
    z = z if bias is None else z + bias[None, :].astype(jnp.float32)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    z = z / jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), y.shape)[:, None]
    z = z[:, :vocab_size]
    ln_p, live = jax.nn.log_softmax(z), y >= 0
    p = jnp.exp(ln_p)
    at_label = jnp.take_along_axis(ln_p, jnp.maximum(y, 0)[:, None], 1)[:, 0]
    made = (at_label, -jnp.sum(p * ln_p, 1), jax.nn.logsumexp(z, 1), jnp.sum(p * p, 1))
    return {k: jnp.where(live, v, 0) for k, v in zip(FLOATS, made, strict=True)}


def cotangents(n, seed=1):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(n).astype(np.float32) for k in FLOATS}


def outputs_and_gradients(fn, g, *operands):
    @jax.jit
    def both(g, *operands):
        made, pull = jax.vjp(lambda *a: {k: fn(*a)[k] for k in g}, *operands)
        return made, pull(g)

    return both(g, *operands)


def check(
    problem,
    implementation,
    chunk=64,
    dtype="float32",
    layout="vd",
    bias=None,
    gradient=None,
    **options,
):
    """Outputs and gradients of a call against the oracle and the materialised path."""
    h, W = (jnp.asarray(x).astype(dtype) for x in (problem.h, problem.W))
    operands = [h, W] if bias is None else [h, W, jnp.asarray(bias)]
    g = cotangents(len(problem.y))

    def ours(h, W, bias=None):
        W = W if layout == "vd" else W.T
        return described(jaxmem.token_stats)(
            h, W, problem.y, chunk, bias=bias, layout=layout,
            gradient=gradient, implementation=implementation, **options,
        )._asdict()  # fmt: skip

    def naive(h, W, bias=None):
        h = jnp.where((problem.y >= 0)[:, None], h, 0)
        return materialised(h, W, problem.y, bias=bias, **options)

    made, gradients = outputs_and_gradients(ours, g, *operands)
    rough, rough_gradients = outputs_and_gradients(naive, g, *operands)
    bias = 0.0 if bias is None else bias
    exact, exact_gradients = oracle.head(h, W, problem.y, g, bias=bias, **options)
    for name in FLOATS:
        assert made[name].dtype == jnp.float32
        assert_as_good(made[name], rough[name], exact[name], STATS_EPSILON, name)
    names = ("dhidden", "dW", "dbias")
    for name, got, near, want, x in zip(
        names, gradients, rough_gradients, exact_gradients, operands, strict=False
    ):
        assert got.dtype == x.dtype
        assert_as_good(got, near, want, EPSILON[x.dtype.name], name)


OPTIONS = {
    "softcap": {"softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "bias": {"bias": np.linspace(-2, 2, 130, dtype=np.float32)},
    "vocab_size": {"vocab_size": 100},
}
