"""Verbs under plain `jax.jit` on arrays in parts: each device takes its own tokens."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem.head.maths import partition
from tests.helpers import oracle, targets
from tests.helpers.cases import full, slow
from tests.helpers.crossing import Setting, check
from tests.helpers.functions import FUNCTIONS, each_once
from tests.helpers.meshes import InParts

B, T, D, V = 8, 16, 8, 96
MESHES = {  # sizes, names, and how tokens [B, T] and W [V, D] lie
    "data": ((8,), ("data",), P("data"), P()),
    "fsdp": ((8,), ("data",), P("data"), P(None, "data")),
    "tensor": ((4, 2), ("data", "tensor"), P("data"), P("tensor")),
    "sequence": ((2, 2, 2), ("data", "seq", "x"), P("data", "seq"), P("x", "data")),
}


def logprobs(h, W, y, a):
    return (jaxmem.logprobs(h, W, y, chunk=None) * a).sum()


def token_loss(h, W, y, a):
    def loss(stats, a):
        return -a * stats.logprob + 0.1 * stats.entropy, {"entropy": stats.entropy}

    loss, metrics = jaxmem.token_loss(loss, h, W, y, a, chunk=None)
    return loss + jax.lax.stop_gradient(metrics["entropy"]).mean()


def kl(h, W, y, a):
    return (targets.reverse_kl(h, W, 2 * h, W, chunk=None) * a).sum()


QUICK = [(logprobs, "data"), (token_loss, "data")]
REST = [
    full(logprobs, "fsdp"), full(logprobs, "tensor"), full(logprobs, "sequence"),
    full(kl, "data"),
    *(slow(verb, name) for verb in (token_loss, kl) for name in [*MESHES][1:]),
]  # fmt: skip


def with_gradients(verb):
    return jax.jit(jax.value_and_grad(verb, (0, 1)))


@functools.cache
def problem():
    rng = np.random.default_rng(0)
    h, a = rng.standard_normal((B, T, D)), rng.standard_normal((B, T))
    W, y = rng.standard_normal((V, D)), rng.integers(-1, V, (B, T))
    return h.astype("f"), W.astype("f"), np.abs(y).astype(np.int32), a.astype("f")


def exact(h, W, y, g, **options):
    """Outputs, and gradients of hidden and W, in float64; g are of each token."""
    g = {k: np.reshape(x, -1) for k, x in g.items()}
    h = h.reshape(-1, D)
    outputs, (dh, dW, dbias) = oracle.head(h, W, y.reshape(-1), g, **options)
    return outputs, [dh.reshape(*y.shape, D), dW, dbias]


def exact_token_loss(h, W, y, a):
    ones = np.ones(a.size) / a.size
    g = {"logprob": -a.reshape(-1) * ones, "entropy": 0.1 * ones}
    outputs, slopes = exact(h, W, y, g)
    value = sum((g[k] * outputs[k]).sum() for k in g) + outputs["entropy"].mean()
    return value, slopes[:2]


def exact_logprobs(h, W, y, a):
    outputs, (dh, dW, _) = exact(h, W, y, {"logprob": a})
    return (outputs["logprob"] * a.reshape(-1)).sum(), (dh, dW)


def place(name):
    sizes, names, tokens, weights = MESHES[name]
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    specs = tokens, weights, tokens, tokens
    return tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(problem(), specs, strict=True)
    )


@functools.cache
def compiled(verb, name):
    """jax keeps no program of this kind from one run to the next."""
    return with_gradients(verb).lower(*place(name)).compile()


def products(compiled):
    """Rows and columns of the results of all matrix products."""
    return re.findall(r"= \w+\[(\d+),(\d+)\]\S* dot\(", compiled.as_text())


def in_parts():
    """Each function on all meshes; of each, the first row in `.ci/run` on one."""
    for i, (name, case) in enumerate(
        zip(FUNCTIONS, each_once([*FUNCTIONS]), strict=True)
    ):
        for j, mesh in enumerate(MESHES):
            is_first = isinstance(case, str) and (i + j) % len(MESHES) == 0
            is_quick = (name, mesh) == ("logprobs", "data")
            case_of = pytest.param if is_quick else full if is_first else slow
            yield case_of(name, mesh)


@pytest.mark.parametrize("name, mesh", list(in_parts()))
def test_partition_results_equal_float64(name, mesh, quick_compilation):
    setting = Setting(tokens=(B, T), temperature="token")
    check(name, setting, InParts(*MESHES[mesh]))


@pytest.mark.parametrize("verb, name", [*QUICK, *REST])
def test_partition_logits_of_own_tokens_only(verb, name, quick_compilation):
    shapes = products(compiled(verb, name))
    rows = {int(rows) for rows, columns in shapes if int(columns) == V}
    assert rows == {B * T // 8}


def test_gradients_of_weights_are_summed_once(quick_compilation):
    text = compiled(logprobs, "data").as_text()
    sums = re.findall(r"all-reduce(?:-start)?\(", text)
    assert len(sums) == 1  # of the loss and dW together
    assert "all-gather" not in text


@pytest.mark.parametrize("size", [slow(4), slow(12), 30])
def test_tokens_that_the_devices_do_not_divide(size, quick_compilation):
    h, W, y, a = (x if x.shape == (V, D) else x.reshape(-1, *x.shape[2:])[:size]
                  for x in problem())  # fmt: skip
    want = exact_token_loss(h, W, y, a)
    mesh = jax.make_mesh((4, 2), ("data", "x"), axis_types=(AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, P())
    got = with_gradients(token_loss)(*jax.device_put((h, W, y, a), whole))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_inside_scan_remat_and_vmap(quick_compilation):
    h, W, y, a = place("fsdp")

    def total(h, W):
        def body(sum_, _):
            each = jax.vmap(lambda h, y: jaxmem.logprobs(h, W, y, 16))(h, y)
            return sum_ + (each * a).sum(), None

        return jax.lax.scan(jax.checkpoint(body), 0.0, length=2)[0]

    got = jax.jit(jax.value_and_grad(total, (0, 1)))(h, W)
    value, (dh, dW) = exact_logprobs(*problem())
    want = 2 * value, (2 * dh, 2 * dW)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-5)


@pytest.mark.slow
def test_partition_retraces_loss_for_fewer_rows(quick_compilation):
    """On each device fewer than a chunk, and than what the loss is called with."""
    h, W, y, a = place("data")

    def loss(h, W):
        def of(stats, a):
            return -a * stats.logprob * stats.entropy, {}

        runs = (jaxmem.token_loss(of, h, W, y, a, chunk=c)[0] for c in (5, 64))
        return jnp.stack([*runs])

    got = jax.jit(jax.jacrev(loss, (0, 1)))(h, W)
    numbers, n = problem(), a.size
    outputs, _ = exact(*numbers[:3], {"logprob": numbers[3]})
    g = {"logprob": outputs["entropy"], "entropy": outputs["logprob"]}
    g = {k: -numbers[3].reshape(-1) * x / n for k, x in g.items()}
    _, want = exact(*numbers[:3], g)
    for x, exact_one in zip(got, want, strict=False):
        for of_chunk in x:
            np.testing.assert_allclose(of_chunk, exact_one, rtol=2e-5, atol=2e-6)


def test_partition_not_inside_shard_map():
    assert partition.is_possible()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    seen = []
    jax.eval_shape(
        jax.shard_map(
            lambda: seen.append(partition.is_possible()), mesh=mesh, in_specs=(),
            out_specs=P(),
        )
    )  # fmt: skip
    assert seen == [False]


@pytest.mark.full
def test_partition_unchanged_by_mesh_in_context(quick_compilation):
    h, W, y, a = place("tensor")
    with jax.set_mesh(h.sharding.mesh):
        got = with_gradients(token_loss)(h, W, y, a)
    for x, want in zip(
        jax.tree.leaves(got), jax.tree.leaves(exact_token_loss(*problem())), strict=True
    ):
        np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-5)


def text_of(softcap, arrays):
    """The program's text as jax's compilation cache reads it, without addresses."""

    def total(h, W, y, a):
        return (
            jaxmem.logprobs(h, jaxmem.Head(W, softcap=softcap), y, chunk=None) * a
        ).sum()

    lowered = with_gradients(total).lower(*arrays).as_text()
    return re.sub(r'backend_config = "\d+"', "", lowered)


@pytest.fixture
def address_in_key():
    """Sets jax's option; what is lowered before and after does not count."""
    name = "jax_remove_custom_partitioning_ptr_from_cache_key"
    before = getattr(jax.config, name)

    def update(kept):
        jax.config.update(name, not kept)
        jax.clear_caches()

    yield update
    update(not before)


@pytest.mark.full
def test_partition_cache_key_without_addresses(address_in_key, quick_compilation):
    arrays = place("data")
    address_in_key(True)
    assert text_of(4.0, arrays) == text_of(5.0, arrays)  # but for their addresses
    want = jax.device_get(compiled(logprobs, "data")(*arrays))
    address_in_key(False)
    assert text_of(4.0, arrays) != text_of(5.0, arrays)
    assert text_of(4.0, arrays) == text_of(4.0, arrays)
    got = jax.device_get(with_gradients(logprobs)(*arrays))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
