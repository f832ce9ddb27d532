"""Recompute(blocks) of "hopper" on the chip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import Recompute
from tests.helpers.cases import Case
from tests.helpers.hopper import UNROLLED, close
from tests.helpers.one_pass import check_one_pass
from tests.helpers.token_stats import OPTIONS, check, cotangents

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def poisoned():
    """Fill free memory with NaN, so that no buffer holds a right answer of before."""
    if jax.default_backend() == "gpu":
        jax.block_until_ready(jnp.full(2**27, jnp.nan))


@pytest.fixture
def of_blocks(monkeypatch):
    """Tiles of a block, of every block that is traced."""
    from jaxmem.head.kernels import products

    seen, add_block = set(), products.add_block

    def listen(blocks, *args):
        seen.add(blocks.n_tiles)
        return add_block(blocks, *args)

    monkeypatch.setattr(products, "add_block", listen)
    jax.clear_caches()
    return seen


# Many tokens beside few columns, so that not all of them share a block.
CASES = {
    "whole tiles": Case(6000, 64, 5120, std=3.0, chunk=64),
    "ragged": Case(6000, 64, 5000, std=3.0, chunk=64),
    "odd columns": Case(6001, 512, 5001, std=3.0, chunk=64),
    "odd depth": Case(3000, 1000, 2001, chunk=32),
    "llama": Case(16_384, 2048, 8192, chunk=256),
}


@pytest.mark.parametrize("n_blocks", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name, n_blocks, of_blocks):
    case = CASES[name]
    check(
        case.make(),
        "hopper",
        case.chunk,
        dtype="bfloat16",
        gradient=Recompute(n_blocks),
    )
    assert of_blocks


@pytest.mark.parametrize("names", [[name] for name in OPTIONS] + [list(OPTIONS)])
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_options_and_layouts(names, layout, of_blocks):
    options = {k: v for name in names for k, v in OPTIONS[name].items()}
    if "bias" in options:  # its gradient is a sum of 16-bit derivatives, like W's
        options["bias"] = jnp.linspace(-2, 2, 1300, dtype=jnp.bfloat16)
    if "vocab_size" in options:
        options["vocab_size"] = 1000
    problem = Case(2000, 33, 1300, std=3.0).make()
    y = np.where(np.arange(2000) % 3 == 0, -1, problem.y % 1000)
    check(
        problem._replace(y=y), "hopper", 16, dtype="bfloat16", layout=layout,
        gradient=Recompute(3), **options,
    )  # fmt: skip
    assert of_blocks


def test_token_loss(of_blocks):
    check_one_pass(
        Case(2000, 64, 1300, std=3.0, chunk=16), vocab_size=1250, gradient=Recompute(3),
        where=np.arange(2000) % 3 > 0,
    )  # fmt: skip
    assert of_blocks


def test_blocks_rerun_bitwise_in_unrolled_loop(of_blocks):
    case = CASES["odd columns"]
    h, W, y = case.make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)

    def loss(h, W):
        made = jaxmem.logprobs(
            h, W, y, case.chunk, implementation="hopper", gradient=Recompute(4)
        )
        return jnp.vdot(jnp.cos(jnp.arange(case.n)), made)

    def gradients(options):
        run = jax.jit(jax.grad(loss, (0, 1)), compiler_options=options)
        return run.lower(h, W).compile()

    plain, unrolled = gradients(None), gradients(UNROLLED)
    first, again = plain(h, W), plain(h, W)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    close(unrolled(h, W), first)
    assert of_blocks


def test_blocks_error_of_hidden_gradient():
    """In the mean over all tokens, against the same sums in float32."""
    n, d, v, chunk = 16_384, 1024, 8192, 128
    h, W, y = Case(n, d, v, std=2.0).make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)
    g = cotangents(n)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def gradient(h, W, implementation, n_blocks):
        def total(h):
            stats = jaxmem.token_stats(
                h,
                W,
                y,
                chunk,
                implementation=implementation,
                gradient=Recompute(n_blocks),
            )._asdict()
            return sum(jnp.vdot(g[k], stats[k]) for k in g)

        return jax.grad(total)(h)

    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (h, W)]
        exact = np.asarray(gradient(*wide, "xla", 1), np.float64)

    def distance(n_blocks):
        made = gradient(h, W, "hopper", n_blocks)
        return np.linalg.norm(np.asarray(made, np.float64) - exact)

    assert distance(8) < 2 * distance(1) < 0.01 * np.linalg.norm(exact)


@pytest.mark.parametrize("n_blocks", [2, 4, 8])
@pytest.mark.parametrize("v", [16_384, 16_001])
def test_memory_is_the_formula_of_the_page(v, n_blocks):
    n, d, chunk = 32_768, 1024, 256
    h, W = jnp.zeros((n, d), jnp.bfloat16), jnp.zeros((v, d), jnp.bfloat16)

    def loss(h, W):
        y = jnp.zeros(n, jnp.int32)
        options = {"implementation": "hopper", "gradient": Recompute(n_blocks)}
        return jaxmem.logprobs(h, W, y, chunk, **options).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(h, W).compile()
    width = -(-v // (256 * n_blocks)) * 256
    formula = 2 * chunk * v + 4 * width * d + 8 * (chunk * v) ** 0.5 * d
    formula += 64 * n  # statistics, and the order of the rows
    assert compiled.memory_analysis().temp_size_in_bytes <= formula + 2**20
