"""Recompute(blocks) of "hopper" without a GPU: interpreted, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import Recompute
from tests.helpers.cases import Case, slow
from tests.helpers.described import described
from tests.helpers.hopper import (
    assert_none_writes_into_a_slice,
    by_loss,
    by_stats,
    lowered,
    traced_in_parts,
)
from tests.helpers.interpreter import needs_pallas
from tests.helpers.one_pass import check_one_pass

pytestmark = [pytest.mark.usefixtures("on_one_device"), needs_pallas]

# Two launches of rows; two blocks, the last one of 44 columns.
CASE = Case(301, 16, 300, std=3.0, chunk=16)


@pytest.fixture
def of_blocks(monkeypatch):
    """(tiles of a block, rows of a launch) of every call of the product's kernels."""
    from jaxmem.head.kernels import products

    seen, add_block = set(), products.add_block

    def listen(blocks, W, part, *args):
        seen.add((blocks.n_tiles, len(part.hidden)))
        return add_block(blocks, W, part, *args)

    monkeypatch.setattr(products, "add_block", listen)
    return seen


@pytest.mark.slow
def test_token_loss_with_every_option(interpreted, of_blocks):
    check_one_pass(
        CASE, layout="dv", softcap=5.0, vocab_size=280, gradient=Recompute(3),
        temperature=np.linspace(0.5, 2, 301, dtype=np.float32),
        where=np.arange(301) % 3 > 0, and_none=False,
    )  # fmt: skip
    assert of_blocks == {(1, 256)}


@pytest.mark.full
def test_recompute_blocks_shared_by_all_rows(lowered_anywhere, of_blocks):
    """Few rows: W's gradient is written once anyway, and no row is rounded twice."""
    h, W, y = Case(40, 64, 300, std=2.0).make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)

    def total(h, W, **options):
        stats = jaxmem.token_stats(h, W, y, implementation="hopper", **options)
        return jnp.sum(stats.logprob + stats.entropy)

    def program(**options):
        gradients = jax.grad(functools.partial(total, **options), (0, 1))
        return str(jax.make_jaxpr(gradients)(h, W))

    assert program(gradient=Recompute(4)) == program()
    assert not of_blocks


@pytest.mark.full
@pytest.mark.parametrize("n, d, v, options", [
    slow(131_072, 4096, 128_256, {"layout": "vd"}),
    slow(20_000, 1000, 5001, {"layout": "vd", "bias": True, "vocab_size": 5000}),
    (20_000, 1000, 5001, {"layout": "dv", "bias": True, "softcap": 30.0}),
])  # fmt: skip
def test_all_kernels_lower_for_cuda(n, d, v, options, lowered_anywhere, of_blocks):
    options, bias = dict(options), None

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    if options.pop("bias", False):
        bias = shape(v)
    options |= {"implementation": "hopper", "gradient": Recompute(8)}

    def loss(h, W, y, bias):
        stats = described(jaxmem.token_stats)(h, W, y, bias=bias, **options)
        return jnp.sum(stats.logprob + stats.entropy)

    W = shape(v, d) if options["layout"] == "vd" else shape(d, v)
    operands = (shape(n, d), W, shape(n, dtype=jnp.int32), bias)
    text = lowered(jax.jit(jax.grad(loss, (0, 1))).trace(*operands))
    assert text.count("mosaic_gpu") >= 4
    assert_none_writes_into_a_slice(text, kept=False)
    assert of_blocks


@pytest.mark.full
@pytest.mark.parametrize(
    "verb, check_vma",
    [
        (by_loss, True),
        slow(by_stats, True),
        slow(by_stats, False),
        slow(by_loss, False),
    ],
)
def test_parts_of_the_vocabulary_are_typed(
    verb, check_vma, lowered_anywhere, of_blocks
):
    traced_in_blocks_and_parts(verb, check_vma)
    assert of_blocks


def traced_in_blocks_and_parts(verb, check_vma):
    options = {
        "vocab_size": 5000, "axis_name": "tensor", "implementation": "hopper",
        "gradient": Recompute(2), "chunk": 16,
    }  # fmt: skip
    total = functools.partial(verb, **options)
    return traced_in_parts(total, check_vma, shapes=[(3000, 256), (8192, 256), (3000,)])
