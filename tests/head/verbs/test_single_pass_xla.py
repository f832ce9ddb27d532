"""Programs that token_loss compiles to: GEMMs, buffers, bytes."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem
from tests.helpers.cases import slow
from tests.helpers.programs import (
    CPU,
    CUBLAS,
    OLD_XLA,
    PERCENT,
    SIZES,
    compiled,
    count_gemms,
    shapes,
)
from tests.helpers.token_losses import nll, ppo

pytestmark = pytest.mark.usefixtures("on_one_device")

F32 = jnp.float32
ROWS = jax.ShapeDtypeStruct((256,), F32)
SHAPES = *shapes(256, 24, 640), ROWS, ROWS


def loss_of(loss_fn, chunk):
    return lambda *operands: jaxmem.token_loss(loss_fn, *operands, chunk=chunk)[0]


@pytest.mark.parametrize("loss_fn", [ppo, nll])
@pytest.mark.slow
def test_gemms_where_one_operand_is_frozen(loss_fn):
    """z and dH, and no buffer of W's size; z and dW."""
    loss = loss_of(loss_fn, 64)
    texts = [compiled(jax.value_and_grad(loss, i), *SHAPES).as_text() for i in (0, 1)]
    assert [count_gemms(text) for text in texts] == [2, 2]
    made = re.findall(r"= f32\[640,24\]\S* (\w+)\(", texts[0])
    assert set(made) <= {"parameter", "get-tuple-element"}


@pytest.mark.slow
def test_unused_output_costs_nothing():
    """Not even where a metric reads it."""

    def with_metric(stats, *_):
        return -stats.logprob, {"square": stats.sum_pi_squared}

    def stopped(stats, *_):
        return -stats.logprob + lax.stop_gradient(stats.entropy)

    def multiplications(loss_fn):
        grad = jax.grad(loss_of(loss_fn, 64), (0, 1))
        text = compiled(grad, *SHAPES).as_text()
        return len(re.findall(r"f32\[64,640\]\S* multiply\(", text))

    want = multiplications(nll)
    assert multiplications(with_metric) == multiplications(stopped) == want
    assert multiplications(ppo) > want


@pytest.mark.parametrize("size, dtype", [
    slow(SIZES[1], F32), (SIZES[4], jnp.bfloat16), slow(SIZES[4], F32),
    slow(SIZES[1], jnp.bfloat16),
], ids=str)  # fmt: skip
def test_memory_and_gemms_are_what_the_page_says(size, dtype):
    n, d, v, chunk = size
    operands = *shapes(n, d, v, dtype), *[jax.ShapeDtypeStruct((n,), F32)] * 2
    loss, sixteen_bit = loss_of(ppo, chunk), dtype != F32
    besides = 72 * n + 12 * chunk * d + (0 if CPU else CUBLAS)
    # XLA for CPUs in jaxlib 0.10 widens 16-bit arrays whole.
    besides += 4 * (2 * n + v) * d if OLD_XLA and sixteen_bit else 0
    chunks = (4 + 2 * sixteen_bit) * chunk * v
    for fn, promised, gemms in (
        (loss, 4 * chunk * v, 1),
        (jax.value_and_grad(loss, (0, 1)), chunks + 4 * v * d, 3),  # z, dH and dW
        (jax.value_and_grad(loss), chunks, 2),
    ):
        made = compiled(fn, *operands)
        assert count_gemms(made.as_text()) == gemms
        temp = made.memory_analysis().temp_size_in_bytes
        assert 4 * chunk * v <= temp <= PERCENT * promised + besides
