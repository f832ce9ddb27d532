"""The kernels of sampled derivatives together, without a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import jaxmem
from jaxmem import Sample
from jaxmem.head.backends import hopper, hopper_sampled
from jaxmem.head.kernels import tuned
from jaxmem.head.kernels.tiles import SampledLaunch
from jaxmem.head.maths import row_stats
from jaxmem.head.maths.backend_operands import Factors, TokenRows
from jaxmem.head.maths.column_sampling import SparseDerivative
from jaxmem.head.maths.spec import Spec
from tests.helpers import hlo
from tests.helpers.cases import Case, slow
from tests.helpers.interpreter import needs_pallas
from tests.helpers.sampled_gradients import FLOATS, SAVED, random_draws

pytestmark = needs_pallas
KERNEL = "mosaic_gpu_v2"


def problem(n, d, v, slots, layout="vd", **options):
    """(spec, source, rows) of random numbers, with some rows masked."""
    h, W, y = Case(n, d, v, std=3.0).make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    where = jnp.arange(n) % 5 > 0
    bias = options.pop("bias", None)
    temperature = options.pop("temperature", None)
    spec = Spec(
        v, options.pop("vocab_size", v), 256, FLOATS, h.dtype, layout,
        gradient_samples=slots, **options,
    )  # fmt: skip
    y = y % spec.vocab_size
    rows = TokenRows(jnp.asarray(y), where, temperature, random_draws(n))
    source = Factors(h, W if layout == "vd" else W.T, bias)
    return spec, source, rows


def run(spec, source, rows, g):
    """(outputs, entries, gradients)."""
    made, entries = hopper_sampled.forward(spec, source, rows, SAVED)
    saved = row_stats.Outputs(**made, is_argmax=jnp.zeros(0))
    cotangents = row_stats.Cotangents(*(g.get(k) for k in FLOATS))
    grads = hopper_sampled.backward(spec, source, rows, saved, cotangents, entries)
    return made, entries, grads


@pytest.mark.full
@pytest.mark.parametrize("layout, kernels", [("vd", 8), slow("dv", 8)])
def test_lowers_for_an_h200(layout, kernels, lowered_anywhere):
    """Every kernel of both passes; two launches forward."""
    n, d, v = 512, 256, 151936
    spec = Spec(v, v, 256, FLOATS, jnp.bfloat16, layout, gradient_samples=128)
    shape = (v, d) if layout == "vd" else (d, v)

    def both(h, W, y, g, draws):
        rows = TokenRows(y, y >= 0, None, draws)
        return run(spec, Factors(h, W, jnp.zeros(v)), rows, g)

    numbers = jax.ShapeDtypeStruct((n,), jnp.int32)
    g = {k: jax.ShapeDtypeStruct((n,), jnp.float32) for k in FLOATS}
    h, W = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, d), shape))
    text = hlo.lowered_for_an_h200(
        both, h, W, numbers, g, jax.ShapeDtypeStruct((n,), jnp.uint32)
    )
    assert text.count(KERNEL) == kernels


@pytest.mark.parametrize("kernel", tuned.LAUNCHES)
def test_gradient_takes_measured_launch_of_head(kernel, monkeypatch):
    n, d, v = 64, 256, 512
    spec, source, rows = problem(n, d, v, 4)
    columns = jnp.arange(n * 5, dtype=jnp.int32).reshape(n, 5)
    dz = SparseDerivative(columns, jnp.ones((n, 5)))

    def traced():
        made = jax.make_jaxpr(lambda: hopper_sampled.gradient(spec, source, rows, dz))
        return str(made())

    unmeasured = traced()
    key = hopper.key_of(spec, v, d)
    entry = tuned.entry_of(kernel, key, SampledLaunch(1, 2, sums=4), {})
    monkeypatch.setattr(tuned, "table", lambda: dict([tuned._read_entry(0, entry)]))
    assert traced() != unmeasured
    other = dataclasses.replace(key, depth=2 * d)
    entry = tuned.entry_of(kernel, other, SampledLaunch(1, 2, sums=4), {})
    monkeypatch.setattr(tuned, "table", lambda: dict([tuned._read_entry(0, entry)]))
    assert traced() == unmeasured


@pytest.mark.full
@pytest.mark.parametrize("verb, layout", [("token_loss", "dv"), ("logprobs", "vd")])
def test_typed_over_a_mesh(verb, layout, lowered_anywhere):
    """Results of kernels vary over the axes that their operands vary over, which is
    checked while a call is traced."""
    n, d, v, key = 512, 512, 32768, jax.random.key(0)
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    mesh = AbstractMesh((2, 2), ("t", "v"), abstract_device=device)
    public = jaxmem.sharding.parallel(
        getattr(jaxmem, verb), mesh, tokens="t", vocab="v"
    )
    options = {"chunk": 128, "gradient": Sample(64), "key": key}

    def loss(h, W, y):
        W = jaxmem.Head(W, layout=layout)
        if verb == "logprobs":
            return jnp.sum(public(h, W, y, implementation="hopper", **options))
        run = functools.partial(public, lambda stats: -stats.logprob)
        return run(h, W, y, implementation="hopper", **options)[0]

    shapes = (n, d), (v, d) if layout == "vd" else (d, v)
    h, W = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    y = jax.ShapeDtypeStruct((n,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        assert jax.jit(jax.grad(loss, (0, 1))).trace(h, W, y)
