"""Cost of log-probabilities of given ids on "xla": GEMMs, bytes, columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.backends import choose
from jaxmem.head.maths.backend_operands import Ragged, TokenRows
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.support_rule import RaggedSupportRule
from tests.helpers.cases import slow
from tests.helpers.described import described
from tests.helpers.programs import CPU, CUBLAS, OLD_XLA, compiled, count_gemms
from tests.helpers.selected import total

pytestmark = pytest.mark.usefixtures("on_one_device")


def shapes(n, d, v, k, dtype="float32"):
    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    floats = (jax.ShapeDtypeStruct(s, dtype) for s in ((n, d), (v, d)))
    return *floats, integers(n), integers(n, k)


def temporary(fn, *operands):
    return compiled(fn, *operands).memory_analysis().temp_size_in_bytes


def test_gemms_of_selected_ids_where_W_is_frozen():
    frozen = jax.value_and_grad(total("selected", 64))
    assert count_gemms(compiled(frozen, *shapes(256, 24, 640, 8)).as_text()) == 3


@pytest.mark.full
def test_support_makes_nothing_of_vocabulary_width():
    """No logits, and of W only what its gradient is."""
    loss = total("support", 64)
    operands = shapes(256, 24, 640, 8)
    text = compiled(jax.value_and_grad(loss, (0, 1)), *operands).as_text()
    assert "f32[64,640]" not in text and "f32[640,24]" in text
    frozen = compiled(jax.value_and_grad(loss), *operands)
    flops = frozen.cost_analysis()["flops"]
    assert flops < 2 * 64 * 640 * 24  # one chunk's logits alone


BESIDES = 0 if CPU else CUBLAS
SCALED = {"softcap": 5.0, "temperature": 0.7}


@pytest.mark.parametrize("dtype, options", [
    ("bfloat16", {"bias": np.zeros(8192, np.float32)}), slow("bfloat16", {}),
    slow("float32", {}), slow("bfloat16", SCALED), slow("float32", SCALED),
], ids=lambda x: x if isinstance(x, str) else " ".join(x))  # fmt: skip
def test_memory_and_gemms_of_selected_ids(dtype, options):
    n, d, v, k, chunk = 2048, 64, 8192, 8, 128
    size = jnp.dtype(dtype).itemsize
    widened = 4 * v * d if size == 2 and CPU else 0
    forward = (8 if OLD_XLA and options else 4) * chunk * v + widened
    backward = (4 + size) * chunk * v + 4 * v * d + widened
    if "bias" in options:
        backward += 2 * chunk * v
    loss, operands = total("selected", chunk, **options), shapes(n, d, v, k, dtype)
    besides = 8 * n * (d + k) + 64 * (n + chunk * k) + BESIDES
    for fn, promised, gemms in (
        (loss, forward, 1), (jax.grad(loss, (0, 1)), backward, 4)
    ):  # fmt: skip
        made = compiled(fn, *operands)
        assert count_gemms(made.as_text()) == gemms
        temp = made.memory_analysis().temp_size_in_bytes
        assert 4 * chunk * v <= temp <= 1.04 * promised + besides
        assert temp < 4 * n * v


@pytest.mark.parametrize(
    "dtype,layout", [("float32", "vd"), ("float32", "dv"), ("bfloat16", "vd")]
)
@pytest.mark.slow
def test_support_memory_as_documented(dtype, layout):
    if OLD_XLA and dtype == "bfloat16":
        pytest.skip("XLA for CPUs in jaxlib 0.10 widens W whole to take columns of it")
    n, d, v, k, chunk = 2048, 128, 1024, 32, 64
    size = 4 if CPU else jnp.dtype(dtype).itemsize
    loss = total("support", chunk, layout=layout)
    h, W, y, ids = shapes(n, d, v, k, dtype)
    W = W if layout == "vd" else jax.ShapeDtypeStruct((d, v), dtype)
    besides = 8 * n * (d + k) + 64 * (n + chunk * k) + BESIDES
    columns = chunk * k * d
    for fn, promised in (
        (loss, size * columns),
        (jax.grad(loss), size * columns),
        (jax.grad(loss, (0, 1)), (4 + size) * columns + 4 * v * d),
    ):
        temp = temporary(fn, h, W, y, ids)
        assert columns <= temp <= 1.04 * promised + besides


def ragged(chunk, max_ids):
    def run(h, W, y, ids, offsets):
        options = {"offsets": offsets, "max_ids": max_ids}
        return described(jaxmem.support_logprobs)(h, W, y, ids, chunk, **options).sum()

    return run


def ragged_shapes(n, d, v, capacity):
    h, W, y, _ = shapes(n, d, v, 1)
    integers = (jax.ShapeDtypeStruct((m,), jnp.int32) for m in (capacity, n + 1))
    return h, W, y, *integers


@pytest.mark.parametrize("gradients", [0, 1, 2])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.slow
def test_ragged_support_memory_as_documented(chunk, gradients):
    """Nothing of [tokens, max_ids], either."""
    n, d, v, max_ids, capacity = 2048, 128, 1024, 64, 2**15
    entries = min(chunk * max_ids, capacity // 16)
    operands = ragged_shapes(n, d, v, capacity)
    besides = 8 * n * d + 64 * (n + entries) + 8 * capacity + BESIDES
    loss = ragged(chunk, max_ids)
    fn, promised = (
        (loss, 8 * entries * d),
        (jax.grad(loss), 8 * entries * d),
        (jax.grad(loss, (0, 1)), 16 * entries * d + 4 * v * d),
    )[gradients]
    temp = temporary(fn, *operands)
    assert entries * d <= temp <= 1.04 * promised + besides
    assert temp < 4 * n * max_ids * d / 8


@pytest.mark.full
def test_ragged_supports_cost_what_their_ids_do():
    """64 tokens have 1 to 64 ids; the cost is the loops' trips times their entries."""
    n, max_ids = 64, 256
    offsets = jnp.cumsum(jnp.arange(n + 1))
    spec = Spec(1, 1, 16, (), np.dtype("float32"))
    rows = TokenRows(jnp.zeros(n, jnp.int32), jnp.ones(n, bool), None)
    given = Ragged(offsets[:-1], jnp.diff(offsets), jnp.zeros(offsets[-1], jnp.int32))
    rule = RaggedSupportRule(spec, choose.BACKENDS[-1], max_ids)
    covered, computed = jnp.zeros(n, int), 0
    for tokens, active, columns_of in rule._groups(rows, given):
        width = columns_of(jnp.arange(n)).shape[1]
        assert tokens * width <= 4096
        assert (given.counts[active] <= width).all()
        covered += active
        computed += width * int(active.sum())
    assert (covered == 1).all()
    assert computed <= 2 * int(offsets[-1])
    assert int(offsets[-1]) < n * max_ids / 7


@pytest.mark.parametrize("verb", ["selected", "support"])
@pytest.mark.slow
def test_memory_of_many_ids_grows_linearly(verb):
    """Nothing of [chunk, K, K]."""
    n, d, v, chunk = 512, 8, 2048, 64
    few, many = (
        temporary(jax.grad(total(verb, chunk), (0, 1)), *shapes(n, d, v, k))
        for k in (64, 512)
    )
    assert many - few <= 448 * (64 * chunk + 8 * chunk * d + 16 * n)


def test_support_auto_chunk_counts_columns():
    operands = shapes(4096, 64, 1024, 128)
    with jaxmem.report() as calls:
        jax.eval_shape(total("support", "auto"), *operands)
        jax.eval_shape(total("selected", 64), *operands)
    support, selected = calls.calls
    assert support.chunk == 4096  # 128 MiB of columns
    assert support.live_logits_bytes == 4 * 4096 * 128
    assert selected.shapes == {
        "hidden": (4096, 64),
        "W": (1024, 64),
        "ids": (4096, 128),
    }
    assert selected.live_logits_bytes == 4 * 64 * 1024
    with jaxmem.report() as calls:
        jax.eval_shape(total("support", "auto"), *shapes(4096, 2048, 1024, 1024))
    assert calls.calls[0].chunk == 128  # 1 GiB
