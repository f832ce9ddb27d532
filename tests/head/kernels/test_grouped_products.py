"""Products of rows by group: against float64, interpreted; lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.models.config import ModelConfig
from jaxmem.models.experts import grouped
from jaxmem.models.mixture import Expert, Experts
from jaxmem.models.partitioning import Layout, MeshConfig
from tests.helpers.cases import slow
from tests.helpers.interpreter import needs_pallas

pytestmark = needs_pallas

COUNTS = np.array([100, 0, 190, 28])  # rows of each group: none, and less than a half
WIDTHS = 136, 70  # not whole tiles, nor whole copies


def problem(dtype=jnp.bfloat16):
    """(x, two y, two W, where, group of each row or -1)."""
    from jaxmem.models.kernels import grouped_products

    rng = np.random.default_rng(0)
    first = np.append(0, np.cumsum(-(-COUNTS // grouped_products.ROWS)))
    tiles = np.arange(first[-1] + 1)  # one of no rows
    groups = np.minimum(np.searchsorted(first[1:], tiles, side="right"), 3)
    of_rows = np.full(len(tiles) * grouped_products.ROWS, -1)
    for group, count in enumerate(COUNTS):
        start = first[group] * grouped_products.ROWS
        of_rows[start : start + count] = group

    def drawn(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    k, n = WIDTHS
    x, *ys = (drawn(len(of_rows), width) for width in (k, n, n))
    x, *ys = (jnp.where((of_rows >= 0)[:, None], a, 0).astype(dtype) for a in (x, *ys))
    where = grouped_products.GroupOffsets(
        *(jnp.asarray(a, jnp.int32) for a in (groups, first, COUNTS))
    )
    weights = [drawn(len(COUNTS), k, n) for _ in range(2)]
    return x, ys, weights, where, of_rows


def launches(x, ys, weights, where, dtype):
    """Every product, of one matrix and of two."""
    from jaxmem.head.backends import hopper
    from jaxmem.models.kernels import grouped_products

    narrow = grouped_products.launch(x.dtype, hopper.n_blocks())
    wide = grouped_products.launch(dtype, hopper.n_blocks())
    some = [
        [
            *grouped_products.of_rows(narrow, [x], weights[:n], where),
            *grouped_products.of_rows(
                narrow, ys[:n], weights[:n], where, transposed=True
            ),
            *grouped_products.of_groups(wide, x, ys[:n], where, dtype),
        ]
        for n in (1, 2)
    ]
    return some[0] + some[1]


def exact(x, ys, weights, of_rows):
    """Products and gradients in float64; 0 in rows of no group."""
    x, *ys, a, b = (np.asarray(v, np.float64) for v in (x, *ys, *weights))

    def by_rows(rows, matrices):
        each = np.einsum("pk,pkn->pn", rows, matrices[of_rows])
        return np.where((of_rows >= 0)[:, None], each, 0)

    def by_groups(rows, slopes):
        parts = [rows[of_rows == g].T @ slopes[of_rows == g] for g in range(len(a))]
        return np.stack(parts)

    back = [by_rows(y, w.swapaxes(1, 2)) for y, w in zip(ys, (a, b), strict=True)]
    one = [by_rows(x, a), back[0], by_groups(x, ys[0])]
    both = [by_rows(x, a), by_rows(x, b), back[0] + back[1]]
    return one + both + [by_groups(x, y) for y in ys]


def check(dtype):
    x, ys, weights, where, of_rows = problem()
    found = launches(x, ys, weights, where, dtype)
    for got, want in zip(found, exact(x, ys, weights, of_rows), strict=True):
        if got.ndim == 2:  # others are undefined
            got = jnp.where((of_rows >= 0)[:, None], got, 0)
        got = np.asarray(got, np.float64)
        rounded = got.ndim == 2 or dtype == jnp.bfloat16
        rtol, atol = 2.0**-8 if rounded else 0, 1e-6 * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_products(dtype):
    check(np.dtype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_gpu(dtype):
    check(np.dtype(dtype))


@pytest.mark.slow
@pytest.mark.usefixtures("lowered_anywhere")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_lowered_for_a_gpu(dtype):
    arrays = problem(dtype)[:4]
    run = functools.partial(launches, dtype=np.dtype(jnp.float32))
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.full
@pytest.mark.usefixtures("lowered_anywhere")
def test_lowered_on_a_mesh(monkeypatch):
    """Each device multiplies by its part of the experts' width."""
    monkeypatch.setattr(grouped, "refuses", lambda x: None)
    config = ModelConfig().replaced(
        {
            "layers": 1,
            "hidden": 128,
            "heads": 2,
            "kv_heads": 2,
            "head_dim": 64,
            "vocab_size": 64,
            "feed_forwards": ("experts",),
            "experts.count": 6,
            "experts.per_token": 2,
            "experts.ff": 128,
            "experts.bias": True,
            "dtype": "bfloat16",
        }
    )
    x = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
    chosen = jax.ShapeDtypeStruct((4, 8, 2), jnp.int32)
    scale = jax.ShapeDtypeStruct((4, 8, 2), jnp.float32)
    with Layout(MeshConfig(fsdp=2, tensor=2)).context():
        definition, weights = nnx.split(
            nnx.eval_shape(lambda: Experts(config, rngs=nnx.Rngs(0)))
        )

        def loss(weights, x, chosen, scale):
            out = nnx.merge(definition, weights)(x, chosen, scale)
            return jnp.sum(jnp.sin(out))

        slopes = jax.jit(jax.grad(loss, (0, 1, 3))).trace(weights, x, chosen, scale)
        text = slopes.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 6


def layer(seed=0):
    """Weights of experts that have everything, and what they are applied to."""
    rng = np.random.default_rng(seed)
    groups, hidden, ff, rank, rows, chosen = 5, 24, 40, 4, 90, 2

    def drawn(*shape):
        return jnp.asarray(rng.standard_normal(shape) * shape[-1] ** -0.5, jnp.float32)

    def matrix(k, n):
        return {
            "kernel": drawn(groups, k, n), "bias": drawn(groups, n),
            "lora_a": drawn(groups, k, rank), "lora_b": drawn(groups, rank, n),
        }  # fmt: skip

    weights = {
        "gate": matrix(hidden, ff), "up": matrix(hidden, ff), "down": matrix(ff, hidden)
    }  # fmt: skip
    choice = rng.permuted(np.tile(np.arange(groups), (rows, 1)), axis=1)[:, :chosen]
    choice = np.where(choice == 3, 4 - choice.sum(1, keepdims=True) % 2, choice)
    x = jnp.asarray(rng.standard_normal((rows, hidden)), jnp.bfloat16)
    return weights, x, jnp.asarray(choice), jnp.asarray(rng.random(choice.shape))


@functools.partial(jax.jit, static_argnums=0)
def layer_and_slopes(run, weights, x, choice, scale):
    def loss(weights, x, scale):
        out = grouped.apply(run, weights, x, choice, scale)
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, (0, 1, 2), has_aux=True)(weights, x, scale)


def check_layer(monkeypatch):
    """Also with adapters, biases, bounds, and an expert that nobody chooses."""
    (weights, *arrays), run = layer(), Expert("bfloat16", "silu", 0.5, True, 2.0, False)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    found = []
    for refused in (None, "not asked for"):
        monkeypatch.setattr(grouped, "refuses", lambda x, r=refused: r)
        jax.clear_caches()
        found.append(layer_and_slopes(run, weights, *arrays))
    exact = dataclasses.replace(run, dtype="float32")
    weights, *arrays = jax.tree.map(
        lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a,
        (weights, *arrays),
    )
    with jax.default_matmul_precision("highest"):
        found.append(layer_and_slopes(exact, weights, *arrays))
    leaves = map(jax.tree_util.tree_leaves_with_path, found)
    for (path, ours), (_, loop), (_, want) in zip(*leaves, strict=True):
        ours, loop, want = (np.asarray(v, np.float64) for v in (ours, loop, want))
        error, bound = np.linalg.norm(ours - want), np.linalg.norm(loop - want)
        assert error <= 1.5 * bound + 1e-6 * np.linalg.norm(want), path


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_expert_layer_equals_loop(monkeypatch):
    check_layer(monkeypatch)


@pytest.mark.gpu
def test_expert_layer_on_gpu(monkeypatch):
    check_layer(monkeypatch)


def test_report_names_what_runs():
    weights, *arrays = layer()
    run = Expert("bfloat16", "silu", None, False, 1.0, False)
    with jaxmem.report() as found:
        jax.eval_shape(functools.partial(grouped.apply, run), weights, *arrays)
    (call,) = found.calls
    assert str(call) == (
        "experts(x[90, 24] choice[90, 2] groups[5]): loop (kernels need an NVIDIA "
        "Hopper GPU, jax runs on 'cpu')"
    )
