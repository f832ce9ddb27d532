"""gradient=Recompute(blocks): the same results and gradients, summed block by block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem import Recompute
from jaxmem.head.backends import xla
from tests.helpers import oracle
from tests.helpers.cases import Case, slow
from tests.helpers.crossing import Setting, check
from tests.helpers.described import described
from tests.helpers.functions import FUNCTIONS
from tests.helpers.token_stats import cotangents
from tests.helpers.tolerance import error

pytestmark = pytest.mark.usefixtures("quick_compilation")

BF16, F32 = jnp.bfloat16, jnp.float32
# Of 128 columns: four blocks, the last of 3 columns; the tokens in three chunks.
N, D, V, BLOCKS, CHUNK = 300, 16, 387, 4, 32


@pytest.fixture
def of_blocks(monkeypatch):
    """Traced blocks, once each: (first column, or None in a loop; columns)."""
    seen, derivative = [], xla.derivative

    def listen(spec, part, rows, row_ids, saved, cotangents, *start):
        if start:  # a block's; one of the whole vocabulary has none
            columns = part.W.shape[0 if spec.layout == "vd" else 1]
            block = start[0] if isinstance(start[0], int) else None, columns
            seen.extend([] if block in seen else [block])
        return derivative(spec, part, rows, row_ids, saved, cotangents, *start)

    monkeypatch.setattr(xla, "derivative", listen)
    jax.clear_caches()
    return seen


def problem(seed=0, h_dtype=F32, masked=True):
    """hidden in float32 and W in 16 bits: the products of both are float32's."""
    h, W, y = Case(N, D, V, std=3.0).make(seed)
    if masked:
        y[::5] = -1
        h[::5] = np.nan
    return jnp.asarray(h, h_dtype), jnp.asarray(W, BF16), y


def of_stats(h, W, y, **options):
    g = cotangents(len(y))
    stats = described(jaxmem.token_stats)(h, W, y, CHUNK, **options)._asdict()
    return sum(jnp.vdot(g[k], stats[k]) for k in g)


def of_loss(h, W, y, **options):
    def loss(stats, g):
        return g * stats.logprob + stats.entropy, {"entropy": stats.entropy}

    g = cotangents(len(y))["logprob"]
    return described(jaxmem.token_loss)(loss, h, W, y, g, chunk=CHUNK, **options)[0]


def gradients(run, operands, y, as_text=False, **options):
    """The loss, and gradients by hidden and W. Or their program."""

    def total(h, W):
        return run(h, W, y, **options)

    traced = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*operands)
    return traced.as_text() if as_text else traced.compile()(*operands)


def assert_same(got, want, of_W=2.0**-8):
    """All in float32 but W's gradient, which is rounded once."""
    (value, made), (exact, wanted) = got, want
    np.testing.assert_allclose(value, exact, rtol=1e-6)
    for a, b in zip(made, wanted, strict=True):
        assert a.dtype == b.dtype
        epsilon = of_W if a.dtype == BF16 else 3e-6
        assert error(a, b.astype(F32)) < epsilon


@pytest.mark.full
@pytest.mark.parametrize("name", [x for x, f in FUNCTIONS.items() if f.blocks])
def test_blocks_against_float64(name, on_one_device, of_blocks):
    """The gradient of hidden in float32 shows a column that is missing, or twice."""
    dtypes, options = ("float32", "bfloat16"), {"padded": False, "columns": 300}
    check(name, Setting(dtypes, gradient=Recompute(2), **options))
    assert of_blocks == [(None, 256), (256, 44)]


@pytest.mark.parametrize("run, why", [
    (of_stats, "frozen"), slow(of_loss, "float32"), slow(of_stats, "float32"),
    slow(of_loss, "frozen"),
])  # fmt: skip
def test_recompute_without_sums_changes_nothing(run, why, on_one_device, of_blocks):
    h, W, y = problem()
    W = W.astype(F32) if why == "float32" else W

    def of_call(h, W, y, **options):
        return run(h, jax.lax.stop_gradient(W) if why == "frozen" else W, y, **options)

    program = functools.partial(gradients, of_call, (h, W), y, as_text=True)
    assert program(gradient=Recompute(BLOCKS)) == program()
    assert not of_blocks


@pytest.mark.slow
def test_hidden_gradient_is_rounded_once_per_block(on_one_device):
    """No further from float64 than twice what one rounding of the sums gives, in the
    mean over all tokens."""
    h, W, y = Case(512, 64, 4096, std=2.0).make()
    h, W = jnp.asarray(h, BF16), jnp.asarray(W, BF16)
    exact = oracle.head(h, W, y, cotangents(len(y)))[1][0]
    rounded = gradients(of_stats, (h, W), y)[1][0]
    made = gradients(of_stats, (h, W), y, gradient=Recompute(8))[1][0]

    def distance(x):
        return np.linalg.norm(np.asarray(x, np.float64) - exact)

    assert distance(rounded) > 1e-4 * np.linalg.norm(exact)
    assert distance(made) < 2 * distance(rounded)


MESHES = {"tokens": (8, 1), "vocabulary": (1, 8), "both": (4, 2)}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("verb", ["token_stats", "token_loss"])
@pytest.mark.slow
def test_over_a_mesh(verb, name, of_blocks):
    """Each shard of the vocabulary has blocks of its own."""
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, has {jax.device_count()}")
    mesh = jax.make_mesh(
        MESHES[name], ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    run = {"token_stats": of_stats, "token_loss": of_loss}[verb]
    h, W, y = problem(masked=False)
    y[::5] = -1
    want = gradients(run, (h, W), y)
    split = jaxmem.sharding.parallel(
        getattr(jaxmem, verb), mesh, tokens="data", vocab="tensor"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxmem, verb, split)
        got = gradients(run, (h, W), y, gradient=Recompute(2))
    assert of_blocks
    # Over the tokens' shards, W's gradient is added up in its own type.
    assert_same(got, want, 2.0**-8 * MESHES[name][0])


@pytest.mark.slow
def test_remat_and_micro_batches(on_one_device):
    h, W, y = problem()

    @jax.checkpoint
    def loss(W, h, y):
        return of_stats(h, W, y, gradient=Recompute(BLOCKS))

    def total(W):
        batches = h.reshape(3, 100, D), jnp.asarray(y).reshape(3, 100)
        return jnp.sum(jax.lax.map(lambda hy: loss(W, *hy), batches))

    def plain(W):
        batches = h.reshape(3, 100, D), jnp.asarray(y).reshape(3, 100)
        return jnp.sum(jax.lax.map(lambda hy: of_stats(hy[0], W, hy[1]), batches))

    got, want = (jax.jit(jax.value_and_grad(f))(W) for f in (total, plain))
    assert_same((got[0], [got[1]]), (want[0], [want[1]]))


KEY = jax.random.key(0)


@pytest.mark.parametrize("options, raised, message", [
    (dict(gradient=2), TypeError, "gradient must be None, jaxmem.Recompute.*got 2"),
    (dict(gradient=Recompute), TypeError, "gradient must be None, jaxmem.Recompute"),
    (dict(gradient=Recompute(2), key=KEY), ValueError, "key must not be given without"),
])  # fmt: skip
def test_bad_arguments_are_refused_by_name(options, raised, message):
    h, W, y = problem()
    with pytest.raises(raised, match=message):
        described(jaxmem.logprobs)(h, W, y, **options)


def test_more_blocks_than_columns(on_one_device):
    """A block has 128 columns at least."""
    h, W, y = problem()
    program = functools.partial(gradients, of_stats, (h, W), y, as_text=True)
    assert program(gradient=Recompute(10**6)) == program(gradient=Recompute(BLOCKS))


# (tokens, D, V, chunk, blocks)
SIZES = [
    (4096, 128, 16384, 64, 4),
    (8192, 256, 8192, 128, 8),
    (4096, 256, 4096, 64, 32),
]


@pytest.mark.full
@pytest.mark.parametrize("verb", ["token_stats", "token_loss"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_memory_is_what_the_page_says(verb, size, on_one_device):
    n, d, v, chunk, n_blocks = size
    run = {"token_stats": of_stats, "token_loss": of_loss}[verb]

    def temp(n_blocks):
        def loss(h, W, y):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(globals(), "CHUNK", chunk)
                return run(h, W, y, gradient=Recompute(n_blocks))

        operands = [
            jax.ShapeDtypeStruct((n, d), F32), jax.ShapeDtypeStruct((v, d), BF16),
            jax.ShapeDtypeStruct((n,), jnp.int32),
        ]  # fmt: skip
        program = jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()
        return program.memory_analysis().temp_size_in_bytes

    columns = -(-v // n_blocks // 128) * 128
    rows = min(chunk * n_blocks, max(chunk, columns))
    cast = 4 * v * d  # W in the dtype of hidden
    promised = 8 * chunk * v + (4 + 4) * d * columns + (4 + 2 * 4) * d * rows + cast
    besides = 64 * n + 8 * n * d
    saved, made = 4 * v * d * (n_blocks - 1) / n_blocks, temp(n_blocks)
    assert made <= 1.04 * promised + besides
    assert made < temp(1) - 0.5 * saved
