"""Backend "hopper" on the chip: every case in 16 bits, real shapes, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers.cases import CASES, Case
from tests.helpers.described import described
from tests.helpers.hopper import UNROLLED, check_entropy_alone, close
from tests.helpers.one_pass import BY_ROWS, ONE_PASS, check_by_rows, check_one_pass
from tests.helpers.token_stats import FLOATS, OPTIONS, check, cotangents

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned():
    """Fill free memory with NaN, so that no buffer holds a right answer of before."""
    if jax.default_backend() == "gpu":
        jax.block_until_ready(jnp.full(2**27, jnp.nan))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name, dtype):
    case = CASES[name]
    if (name, dtype) == ("V=127", "bfloat16"):
        pytest.skip("xla's derivative in 8 bits misses this tolerance by as much")
    check(case.make(), "hopper", case.chunk, dtype=dtype)


@pytest.mark.parametrize("names", [[name] for name in OPTIONS] + [list(OPTIONS)])
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_options_and_layouts(names, layout):
    options = {k: v for name in names for k, v in OPTIONS[name].items()}
    if "bias" in options:  # its gradient is a sum of 16-bit derivatives, like W's
        options["bias"] = jnp.asarray(options["bias"], jnp.bfloat16)
    problem = Case(70, 33, 130, std=3.0).make()
    problem = problem._replace(y=problem.y % 100)
    check(problem, "hopper", dtype="bfloat16", layout=layout, **options)


# Ragged rows, ragged vocabularies, many chunks.
REAL = {
    "llama": Case(1000, 2048, 128256, chunk=256),
    "gpt2": Case(700, 768, 50257, chunk=128),
    "marked, peaked": Case(300, 1000, 32001, std=20.0, chunk=100),
    "blocks of rows": Case(6000, 64, 5000, std=3.0, chunk=64),
    "several launches": Case(6000, 512, 32001, std=3.0, chunk=256),
    "blocks of columns": Case(3000, 1024, 5001, chunk=16),
}


@pytest.mark.parametrize("name", REAL)
def test_real_shapes(name):
    case = REAL[name]
    check(case.make(), "hopper", case.chunk, dtype="bfloat16")


def test_entropy_alone_has_gradients():
    check_entropy_alone(*Case(300, 1000, 5001, std=3.0).make())


@pytest.mark.parametrize("name", BY_ROWS)
def test_token_loss_by_rows(name):
    check_by_rows(**BY_ROWS[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ONE_PASS)
def test_token_loss_of_every_statistic(name, dtype):
    check_one_pass(dtype=dtype, **ONE_PASS[name])


@pytest.mark.parametrize("name", REAL)
def test_token_loss_at_real_shapes(name):
    check_one_pass(REAL[name])


def run(h, W, y, chunk=64, vocab_size=None, **options):
    """Statistics and gradients, as numpy."""

    @jax.jit
    def both(h, W, y, options):
        def fn(h, W):
            stats = described(jaxmem.token_stats)(
                h,
                W,
                y,
                chunk,
                implementation="hopper",
                vocab_size=vocab_size,
                **options,
            )
            return {k: getattr(stats, k) for k in FLOATS}

        made, pull = jax.vjp(fn, h, W)
        g = {k: jnp.cos(v) for k, v in made.items()}
        return made, pull(g)

    return jax.tree.map(np.asarray, both(h, W, y, options))


@pytest.fixture(scope="module")
def problem():
    h, W, y = Case(300, 256, 5000).make()
    return jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16), jnp.asarray(y)


def assert_equal_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_rerun_is_bitwise(problem):
    assert_equal_bits(run(*problem), run(*problem))


def test_rerun_in_several_launches_is_bitwise():
    case = REAL["several launches"]
    h, W, y = case.make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    assert_equal_bits(run(h, W, y, case.chunk), run(h, W, y, case.chunk))


def test_logit_of_label_corrects_tensor_core_rounding():
    """On average: beside logits in float32, all of which they round towards zero."""
    h, W, y = Case(512, 4096, 8192, std=20.0).make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    with jax.enable_x64(True):
        exact = jnp.sum(h.astype(float) * W[y].astype(float), axis=1)
    exact = np.asarray(exact)
    z = jax.jit(lambda h, W: jnp.matmul(h, W.T, preferred_element_type=jnp.float32))
    theirs = np.asarray(z(h, W))[np.arange(len(y)), y]
    stats, _ = run(h, W, jnp.asarray(y))
    ours = stats["logprob"].astype(np.float64) + stats["logsumexp"]
    assert np.linalg.norm(ours - exact) < 0.7 * np.linalg.norm(theirs - exact)


def test_statistics_are_batch_invariant(problem):
    """A row's bits depend on no other row: in any order, alone, among masked rows, and
    for any number of rows per launch."""
    h, W, y = problem
    made, (dh, _) = run(h, W, y)
    order = np.random.default_rng(0).permutation(len(y))
    permuted, (dh_permuted, _) = run(h[order], W, y[order])
    assert_equal_bits({k: v[order] for k, v in made.items()}, permuted)
    np.testing.assert_array_equal(dh[order], dh_permuted)
    alone, _ = run(h[:1], W, y[:1])
    assert_equal_bits({k: v[:1] for k, v in made.items()}, alone)
    for chunk in (1, 100, None):
        assert_equal_bits(made, run(h, W, y, chunk)[0])
    where = np.arange(len(y)) % 3 == 1
    masked, _ = run(h, W, y, where=where)
    assert_equal_bits({k: np.where(where, v, 0) for k, v in made.items()}, masked)


def test_masked_rows_give_nothing(problem):
    h, W, y = problem
    where = np.arange(len(y)) % 3 == 0
    made, (dh, dW) = run(jnp.where(where[:, None], h, jnp.nan), W, y, where=where)
    kept, (dh_kept, dW_kept) = run(h[where], W, y[where])
    assert_equal_bits({k: v[where] for k, v in made.items()}, kept)
    assert not any(v[~where].any() for v in made.values()) and not dh[~where].any()
    # Sums over the vocabulary and over rows are cut into blocks by the number of rows.
    for got, want in ((dh[where], dh_kept), (dW, dW_kept)):
        np.testing.assert_allclose(
            got.astype(np.float32), want.astype(np.float32), atol=2e-2, rtol=2e-2
        )
    nothing, gradients = run(h, W, y, where=np.zeros(len(y), bool))
    assert not any(v.any() for v in (*nothing.values(), *gradients))


def test_vocabulary_padding_changes_no_bit(problem):
    h, W, y = problem
    padded = jnp.concatenate([W, jnp.full((123, W.shape[1]), 9, W.dtype)])
    made, _ = run(h, W, y)

    got, (_, dW) = run(h, padded, y, vocab_size=5000)
    assert_equal_bits(made, got)
    assert not dW[5000:].any() and dW[:5000].any()


def test_invalid_label_is_nan_alone(problem):
    h, W, y = problem
    y = np.asarray(y).copy()
    y[7] = len(W)
    made, (dh, _) = run(h, W, jnp.asarray(y))
    assert np.isnan(made["logprob"][7]) and np.isfinite(made["entropy"]).all()
    assert np.isfinite(np.delete(made["logprob"], 7)).all()
    assert np.isnan(dh[7].astype(np.float32)).all()
    assert np.isfinite(np.delete(dh, 7, 0).astype(np.float32)).all()


def test_nan_row_stays_alone(problem):
    h, W, y = problem
    made, _ = run(h.at[5].set(jnp.nan), W, y)
    assert np.isnan(made["logprob"][5])
    assert np.isfinite(np.delete(made["logprob"], 5)).all()


def test_tokens_that_the_bias_rules_out(problem):
    h, W, y = problem
    bias = np.where(np.arange(len(W)) % 2, -np.inf, 0).astype(np.float32)
    ruled, (dh, _) = run(h, W, y // 2 * 2, bias=bias)
    kept, _ = run(h, W[::2], y // 2)
    for name in FLOATS:
        np.testing.assert_allclose(ruled[name], kept[name], rtol=2e-6, atol=2e-6)
    assert np.isfinite(dh.astype(np.float32)).all()


def test_tiles_that_the_bias_masks_whole(problem):
    """Their largest logit less itself is to be 0, whatever operations are fused."""
    h, W, y = problem
    bias = np.where(np.arange(len(W)) < 1000, 0, -np.inf).astype(np.float32)
    masked, (dh, dW) = run(h, W, y % 1000, bias=bias)
    kept, (dh_kept, dW_kept) = run(h, W[:1000], y % 1000)
    for name in FLOATS:
        np.testing.assert_allclose(masked[name], kept[name], rtol=2e-6, atol=2e-6)
    assert not dW[1000:].any()
    for got, want in ((dh, dh_kept), (dW[:1000], dW_kept)):
        np.testing.assert_allclose(
            got.astype(np.float32), want.astype(np.float32), atol=2e-2, rtol=2e-2
        )


@pytest.mark.parametrize("chunk", [32, None])
def test_frozen_head_launches_no_product_for_dw(problem, chunk):
    """In one block of the vocabulary, and in a loop over many."""
    h, W, y = problem
    W, y = W[:4992], y % 4992  # of whole swizzles: the last block is like the others

    def loss(h, W):
        return jaxmem.logprobs(h, W, y, chunk, implementation="hopper").sum()

    def launches(*wanted):
        compiled = jax.jit(jax.grad(loss, wanted)).lower(h, W).compile()
        return compiled.as_text().count('custom_call_target="mosaic_gpu')

    assert launches(0) == launches(0, 1) - 1


def test_more_cotangents_than_one_step_of_rows():
    h, W, y = Case(1000, 64, 1000).make()
    g = cotangents(1000)
    operands = [jnp.asarray(x, jnp.bfloat16) for x in (h, W)]

    def fn(implementation, chunk):
        def stats(h, W):
            made = jaxmem.token_stats(h, W, y, chunk, implementation=implementation)
            return {k: getattr(made, k) for k in g}

        return jax.vjp(stats, *operands)[1](g)

    for ours, theirs in zip(fn("hopper", 50), fn("xla", 500), strict=True):
        ours, theirs = (np.asarray(x).astype(np.float32) for x in (ours, theirs))
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=2**-7 * scale)


@pytest.mark.parametrize("vocabulary", [1024, 5000])
def test_gradients_of_each_micro_batch(vocabulary):
    """A scan stacks them; kernels that write in place must not write into the stack.

    XLA let W's product, where it is one block's: of the smaller vocabulary.
    """
    h, W, y = Case(768, 256, vocabulary).make()
    h, W = (jnp.asarray(x, jnp.bfloat16) for x in (h, W))
    g = jnp.cos(jnp.arange(256.0))

    def gradients(hy):
        def loss(h, W):
            stats = jaxmem.token_stats(h, W, hy[1], implementation="hopper")
            return jnp.vdot(g, stats.logprob + stats.entropy)

        return jax.grad(loss, (0, 1))(hy[0], W)

    batches = h.reshape(3, 256, -1), jnp.asarray(y).reshape(3, 256)
    stacked = jax.jit(functools.partial(jax.lax.map, gradients))(batches)
    for i in range(3):
        alone = jax.jit(gradients)((batches[0][i], batches[1][i]))
        close([x[i] for x in stacked], alone)


@pytest.mark.parametrize("options", [None, UNROLLED], ids=["", "unrolled"])
def test_gradients_over_micro_batches(problem, options):
    h, W, y = problem
    g = jnp.cos(jnp.arange(100.0))

    def loss(h, W, y):
        stats = jaxmem.token_stats(h, W, y, implementation="hopper")
        return jnp.vdot(g, stats.logprob + stats.entropy)

    def total(h, W):
        losses = jax.lax.map(lambda hy: loss(hy[0], W, hy[1]), (h, y.reshape(3, 100)))
        return jnp.sum(losses)

    both = jax.jit(jax.grad(total, (0, 1)), compiler_options=options)
    dh, dW = both(h.reshape(3, 100, -1), W)
    one = jax.jit(jax.grad(loss, (0, 1)))
    parts = [one(h[i : i + 100], W, y[i : i + 100]) for i in (0, 100, 200)]
    close(list(dh), [part[0] for part in parts])
    close(dW, sum(part[1].astype(jnp.float32) for part in parts))


@pytest.mark.parametrize("name", ["gpt2", "several launches", "blocks of rows"])
def test_vocabulary_blocks_in_unrolled_loop(name):
    case = REAL[name]
    h, W, y = case.make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)

    def loss(h, W):
        return jaxmem.logprobs(h, W, y, case.chunk, implementation="hopper").sum()

    def gradients(options):
        run = jax.jit(jax.grad(loss, (0, 1)), compiler_options=options)
        return run.lower(h, W).compile()

    plain, unrolled = gradients(None), gradients(UNROLLED)
    target = 'custom_call_target="mosaic_gpu'
    assert unrolled.as_text().count(target) > plain.as_text().count(target)
    close(unrolled(h, W), plain(h, W))


@pytest.mark.parametrize("case", [
    Case(3000, 64, 1000), Case(3000, 64, 1000, chunk=50),
    Case(6000, 512, 32000, chunk=256), Case(6000, 512, 32001, chunk=256),
    Case(400, 64, 1001, chunk=256),
])  # fmt: skip
def test_W_in_float32_gets_its_gradient_in_float32(case):
    """Written in one go, in blocks of columns, and summed over blocks of rows."""
    h, W, y = case.make()
    h, W, g = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W), cotangents(case.n)

    def gradient(implementation):
        def stats(W):
            made = jaxmem.token_stats(
                h, W, y, case.chunk, implementation=implementation
            )
            return {k: getattr(made, k) for k in g}

        return jax.jit(lambda W, g: jax.vjp(stats, W)[1](g)[0])(W, g)

    ours, theirs = gradient("hopper"), gradient("xla")
    assert ours.dtype == jnp.float32
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, atol=2**-8 * scale)


@pytest.mark.parametrize(
    "n, v", [(2048, 32768), (4096, 32768), (12_288, 32768), (2048, 32001)]
)
def test_memory_is_the_formula_of_the_page(n, v):
    d, chunk = 1024, 256
    h, W = jnp.zeros((n, d), jnp.bfloat16), jnp.zeros((v, d), jnp.bfloat16)

    def loss(h, W):
        y = jnp.zeros(n, jnp.int32)
        return jaxmem.logprobs(h, W, y, chunk, implementation="hopper").sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(h, W).compile()
    formula = 2 * chunk * v + 6 * n * d
    if v % 64:  # blocks of W's gradient, before they are put among the others
        formula += 4 * chunk * v * d // n
    assert compiled.memory_analysis().temp_size_in_bytes <= formula + 2**20

    compiled = jax.jit(loss).lower(h, W).compile()
    formula = min(n, 8192) * (2 * d + v / 25) + (512 * d if v % 64 else 0)
    assert formula / 2 < compiled.memory_analysis().temp_size_in_bytes
    assert compiled.memory_analysis().temp_size_in_bytes <= formula + 2**20


@pytest.mark.parametrize("n", [2048, 4096])
def test_token_loss_memory_below_xla(n):
    """Exponentials of all rows in the place of float32 sums, or of some beside them."""
    d, v, chunk = 1024, 32768, 256
    h, W = jnp.zeros((n, d), jnp.bfloat16), jnp.zeros((v, d), jnp.bfloat16)

    def loss(h, W):
        return jaxmem.token_loss(
            lambda stats: -stats.logprob - stats.entropy, h, W,
            jnp.zeros(n, jnp.int32), chunk=chunk, implementation="hopper",
        )[0]  # fmt: skip

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(h, W).compile()
    formula = 4 * chunk * v + 4 * v * d + 6 * n * d
    assert compiled.memory_analysis().temp_size_in_bytes <= formula + 2**23
