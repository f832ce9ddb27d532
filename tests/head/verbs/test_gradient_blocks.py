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
from tests.helpers.cases import CASES, Case, slow
from tests.helpers.described import described
from tests.helpers.token_stats import check, cotangents
from tests.helpers.tolerance import EPSILON, error

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
    """By hidden, W and, if it is given, the bias; the loss too. Or their program."""

    def total(h, W, bias=None):
        W = W.T if options.get("layout") == "dv" else W
        return run(h, W, y, bias=bias, **options)

    numbers = tuple(range(len(operands)))
    traced = jax.jit(jax.value_and_grad(total, numbers)).lower(*operands)
    return traced.as_text() if as_text else traced.compile()(*operands)


def assert_same(got, want, of_W=2.0**-8):
    """All in float32 but W's gradient, which is rounded once."""
    (value, made), (exact, wanted) = got, want
    np.testing.assert_allclose(value, exact, rtol=1e-6)
    for a, b in zip(made, wanted, strict=True):
        assert a.dtype == b.dtype
        epsilon = of_W if a.dtype == BF16 else 3e-6
        assert error(a, b.astype(F32)) < epsilon


def exact_gradients(run, operands, y, where=True, layout=None, **options):
    """The result of `gradients` in float64."""
    h, W, *bias = operands
    count, g = (where & (y >= 0)).sum(), cotangents(len(y))
    if run is of_loss:
        g = {"logprob": g["logprob"] / count, "entropy": np.full(len(y), 1 / count)}
    options["bias"] = bias[0] if bias else 0.0
    return oracle.head(h, W, y, g, on=where, **options)[1]


def assert_as_exact(got, one_block, exact, largest_logit):
    """No further from float64 than twice what one block is, and epsilons.

    The logits of a block are products of another shape than those of the statistics,
    and may be rounded otherwise: p is then off by their relative error times |z|.
    """
    of_logits = float(jnp.finfo(F32).eps) * largest_logit
    np.testing.assert_allclose(got[0], one_block[0], rtol=1e-6)
    for a, b, want in zip(got[1], one_block[1], exact, strict=False):
        assert a.dtype == b.dtype
        epsilon = EPSILON[a.dtype.name] + of_logits
        bound = 2 * error(b.astype(F32), want) + epsilon
        assert error(a.astype(F32), want) <= bound


def largest_logit(h, W):
    """Before bias, softcap and temperature."""
    h = np.nan_to_num(np.asarray(h, np.float64))
    return np.abs(h @ np.asarray(W, np.float64).T).max()


@pytest.mark.full
@pytest.mark.parametrize("name, layout", [
    ("a third masked", "vd"), ("peaked", "dv"), ("a third masked", "dv"),
    ("peaked", "vd"), ("V=2049", "vd"), ("V=2049", "dv"),
])  # fmt: skip
def test_sixteen_bits_against_float64(name, layout, on_one_device, of_blocks):
    check(
        CASES[name].make(), "xla", 16, dtype="bfloat16", layout=layout,
        gradient=Recompute(3),
    )  # fmt: skip
    assert len(of_blocks) == 2  # those of the loop, and the last one


@pytest.mark.parametrize("run", [of_stats, of_loss])
@pytest.mark.parametrize(
    "name", ["bias", "softcap", "temperature", "vocab_size", "where", "dv"]
)
@pytest.mark.slow
def test_gradients_are_those_of_one_block(run, name, on_one_device, of_blocks):
    options = {
        "bias": {},
        "softcap": {"softcap": 5.0},
        "temperature": {"temperature": np.linspace(0.5, 2, N, dtype=np.float32)},
        "vocab_size": {"vocab_size": 300},
        "where": {"where": np.arange(N) % 3 > 0},
        "dv": {"layout": "dv"},
    }[name]
    h, W, y = problem()
    y = np.minimum(y, options.get("vocab_size", V) - 1)
    bias = [jnp.linspace(-1, 1, V)] if name == "bias" else []
    want = gradients(run, (h, W, *bias), y, **options)
    assert not of_blocks
    got = gradients(run, (h, W, *bias), y, gradient=Recompute(BLOCKS), **options)
    assert of_blocks == [(None, 128), (384, 3)]
    exact = exact_gradients(run, (h, W, *bias), y, **options)
    assert_as_exact(got, want, exact, largest_logit(h, W))
    dh = np.asarray(got[1][0])
    assert not dh[::5].any() and dh[1::5].any()
    if name == "vocab_size":
        assert not np.asarray(got[1][1])[300:].any()


def test_gradient_is_zero_without_active_tokens(on_one_device):
    h, W, y = problem()
    got = gradients(of_stats, (h, W), np.full_like(y, -1), gradient=Recompute(BLOCKS))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(got))


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
    exact = exact_gradients(of_stats, (h, W), y)[0]
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
