"""Cost of top k, divergences over columns and draws on "xla": GEMMs and bytes."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from tests.helpers import targets
from tests.helpers.cases import slow
from tests.helpers.programs import CPU, CUBLAS, OLD_XLA, compiled, count_gemms

pytestmark = pytest.mark.usefixtures("on_one_device")

K = 16
BESIDES = 0 if CPU else CUBLAS


def topk(chunk):
    return lambda h, W, ids, q: jaxmem.topk(h, W, K, chunk).logprobs.sum()


def topk_kl(chunk):
    return lambda h, W, ids, q: targets.topk_kl(h, W, ids, q, chunk).sum()


def sample_ids(chunk):
    return lambda h, W, ids, q: jaxmem.sample_ids(h, W, K, jax.random.key(0), chunk)


def shapes(n, d, v, dtype="float32"):
    floats = (jax.ShapeDtypeStruct(s, dtype) for s in ((n, d), (v, d)))
    ids = jax.ShapeDtypeStruct((n, K), jnp.int32)
    return *floats, ids, jax.ShapeDtypeStruct((n, K), jnp.float32)


@pytest.mark.parametrize("verb", [slow(topk), topk_kl])
def test_products_where_W_is_frozen(verb):
    made = compiled(jax.value_and_grad(verb(64)), *shapes(256, 24, 640))
    assert count_gemms(made.as_text()) == 3


@pytest.mark.full
@pytest.mark.parametrize("verb, dtype", [
    (topk, "float32"), (topk_kl, "bfloat16"), (sample_ids, "bfloat16"),
    (topk, "bfloat16"), (topk_kl, "float32"), (sample_ids, "float32"),
])  # fmt: skip
def test_memory_and_products_as_documented(verb, dtype):
    if OLD_XLA:
        pytest.skip("XLA for CPUs in jaxlib 0.10 stores more parts of a chunk's logits")
    n, d, v, chunk = 2048, 64, 8192, 128
    size = jnp.dtype(dtype).itemsize
    widened = 4 * v * d if size == 2 and CPU else 0
    more = {topk: 256 * K + v / 4, topk_kl: 192 * K, sample_ids: 512 * K + v / 2}[verb]
    forward = 4 * chunk * v + chunk * more + widened
    backward = (4 + size) * chunk * v + 192 * chunk * K + 4 * v * d + widened
    loss, operands = verb(chunk), shapes(n, d, v, dtype)
    besides = 8 * n * (d + 4 * K) + BESIDES
    cases = [(loss, forward, 1)]
    if verb is not sample_ids:
        cases.append((jax.grad(loss, (0, 1)), backward, 4))
    for fn, promised, gemms in cases:
        made = compiled(fn, *operands)
        assert count_gemms(made.as_text()) == gemms
        temp = made.memory_analysis().temp_size_in_bytes
        assert 4 * chunk * v <= temp <= 1.04 * promised + besides
        assert temp < 4 * n * v
