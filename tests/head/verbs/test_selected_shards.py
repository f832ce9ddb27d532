"""`selected_logprobs` over shards of the vocabulary, to float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.helpers.meshes import MESHES, jit, mesh_of, sharded_by
from tests.helpers.selected import exact
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, assert_close

if jax.device_count() < 8:  # on one GPU; a CPU counts as eight (tests/conftest.py)
    pytest.skip(f"needs 8 devices, has {jax.device_count()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, D, V, K, COLUMNS, CHUNK = 24, 8, 37, 5, 40, 4
MASKED = (np.arange(N) >= 6) & (np.arange(N) < 12)  # all tokens of a data shard of four


@functools.cache
def problem(v=V):
    """hidden, W, ids, bias, temperature, where, cotangents; W has padding.

    The ids of a token are on many shards, on one shard, equal, or absent.
    """
    rng = np.random.default_rng(0)
    h, W = (rng.standard_normal((n, D), np.float32) for n in (N, COLUMNS))
    ids = rng.integers(0, v, (N, K)).astype(np.int32)
    ids[0], ids[1], ids[2] = np.arange(K), np.arange(v - K, v), ids[2, 0]
    ids[3:5, 3:], ids[5] = -1, -1
    h[MASKED] = np.nan
    bias = np.linspace(-2, 2, COLUMNS, dtype=np.float32)
    warm = np.linspace(0.3, 3, N, dtype=np.float32)
    return h, W, ids, bias, warm, ~MASKED, rng.standard_normal((N, K), np.float32)


def selected(h, W, ids, bias, warm, where, axis_name=None, v=V, layout="vd"):
    head = jaxmem.Head(W if layout == "vd" else W.T, bias, 5.0, v, layout)
    options = {"temperature": warm, "where": where, "axis_name": axis_name}
    return jaxmem.selected_logprobs(h, head, ids, CHUNK, **options)


sharded = functools.partial(sharded_by, (1, 3))  # W and the bias


def with_gradients(call, v=V):
    h, W, ids, bias, warm, where, g = problem(v)

    @jit
    def run(h, W, bias):
        value, pull = jax.vjp(
            lambda h, W, bias: call(h, W, ids, bias, warm, where), h, W, bias
        )
        return value, pull(g)

    return run(h, W, bias)


@functools.cache
def alone_and_exact(v=V):
    h, W, ids, bias, warm, where, g = problem(v)
    ids = np.where(where[:, None], ids, -1)
    operands = np.where(where[:, None], h, 0), W, None, ids
    want = exact(
        "selected", g, operands, bias=bias, temperature=warm[:, None], softcap=5.0,
        vocab_size=v,
    )  # fmt: skip
    return with_gradients(functools.partial(selected, v=v), v), want


def check(got, v=V):
    alone, want = alone_and_exact(v)
    assert_close(got[0], alone[0], want[0], STATS_EPSILON, "logprobs")
    names = "hidden", "W", "bias"
    for name, a, b, c in zip(names, got[1], alone[1], want[1], strict=True):
        assert np.isfinite(a).all() and c.any()
        assert_close(a, b, c, EPSILON["float32"], name)
    nothing = MASKED | (np.arange(N) == 5)
    assert not got[0][nothing].any() and not got[1][0][nothing].any()


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.slow
def test_selected_on_every_mesh(name):
    """The tests below are of "2x4" and "1x8"."""
    check(with_gradients(sharded(selected, name)))


@pytest.mark.full
def test_selected_unchecked_vma_and_columns_last():
    call = functools.partial(selected, layout="dv")
    check(with_gradients(sharded(call, "2x4", check_vma=False)))


@pytest.mark.slow
def test_shards_of_nothing_but_padding():
    """The vocabulary is in two of eight parts, of five columns each."""
    call = functools.partial(selected, v=9)
    check(with_gradients(sharded(call, "1x8"), 9), 9)


@pytest.mark.slow
def test_gathered_hidden_with_gradients_inside():
    h, W, ids, bias, warm, where, g = problem()

    def run(h, W, ids, bias, warm, where, g):
        def loss(h, W, bias):
            h = lax.all_gather(h, "tensor", tiled=True)
            return jnp.vdot(g, selected(h, W, ids, bias, warm, where, "tensor"))

        return jax.grad(loss, (0, 1, 2))(h, W, bias)

    tokens, split, parts = P("data"), P("tensor"), P(("data", "tensor"))
    got = jit(
        jax.shard_map(
            run, mesh=mesh_of(MESHES["2x4"][0]),
            in_specs=(parts, split, tokens, split, tokens, tokens, tokens),
            out_specs=(parts, split, split),
        )
    )(h, W, ids, bias, warm, where, g)  # fmt: skip
    check((alone_and_exact()[0][0], got))


@pytest.mark.full
def test_invalid_id_is_nan_in_its_result():
    """Column V is there, as padding; the others of its token are numbers."""
    h, W, ids, bias, warm, where, _ = problem()
    ids = ids.copy()
    ids[0, 1], ids[1, 4] = V, 2**31 - 1
    bad = (ids >= V) & where[:, None]
    split = sharded(selected, "2x4")

    def total(h, ids, weights):
        logps = split(h, W, ids, bias, warm, where)
        return jnp.sum(jnp.where(weights == 0, 0, logps * weights)), logps

    run = jit(jax.grad(total, has_aux=True))
    dh, logps = run(h, ids, np.float32(~bad))
    np.testing.assert_array_equal(np.isnan(logps), bad)
    assert np.isfinite(dh).all() and dh[:2].any()
    dh, _ = run(h, ids, np.ones_like(logps))
    np.testing.assert_array_equal(np.isnan(dh).any(1), bad.any(1))


def test_selected_collectives():
    """Each array once for all tokens of a device, by all-reduces; W is not gathered."""
    h, W, ids, bias, warm, where, g = problem()
    split = sharded(selected, "2x4")

    def run(h, W):
        return jnp.vdot(split(h, W, ids, bias, warm, where), g)

    text = jax.jit(jax.grad(run, (0, 1))).lower(h, W).compile().as_text()
    # XLA may make one all-reduce of several arrays.
    reduced = re.findall(r" = ([^=]*?) all-reduce(?:-start)?\(", text)
    shapes = re.findall(r"f32\[[\d,]*\]", " ".join(reduced))
    n = N // 2
    rows, at_ids = f"f32[{n}]", f"f32[{n},{K}]"
    dhidden, dW = f"f32[{n},{D}]", f"f32[{COLUMNS // 4},{D}]"  # dW over the tokens
    assert sorted(shapes) == sorted([*(rows,) * 3, at_ids, dhidden, dW])
    assert not re.search("all-gather|all-to-all|collective-permute", text)


def test_errors():
    h, W, ids, *_ = problem()
    with pytest.raises(ValueError, match="axis_name='tensor' must be bound by an encl"):
        jaxmem.selected_logprobs(h, W, ids, axis_name="tensor")
    with pytest.raises(TypeError, match="axis_name must be the name of a mesh axis, o"):
        jaxmem.selected_logprobs(h, W, ids, axis_name=3)
    whole = jax.shard_map(
        functools.partial(jaxmem.selected_logprobs, axis_name="tensor"),
        mesh=mesh_of({"tensor": 8}), in_specs=(P(), P(), P()), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="W must be this shard's part of the vocabula"):
        whole(np.nan_to_num(h), W, ids)
    above = jax.shard_map(
        lambda h, W: jaxmem.selected_logprobs(
            h, jaxmem.Head(W, vocab_size=V), np.full((N, 1), V), axis_name="tensor"
        ),
        mesh=mesh_of({"tensor": 8}), in_specs=(P(), P("tensor")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"ids must be below vocab_size={V}, got {V}"):
        above(np.nan_to_num(h), W)
