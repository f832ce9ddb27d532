"""Operations, bytes and times of a traced program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem
from jaxmem import devices
from jaxmem.head.backends import hopper
from jaxmem.models.experts import grouped
from jaxmem.models.kernels import cached_attention
from jaxmem.models.mixture import Expert
from jaxmem.planning import accounts, roofline
from jaxmem.train.phases import Phase
from tests.helpers.interpreter import needs_pallas

NOTHING = accounts.Account(0, 0, 0)
N, D, V = 64, 32, 192
HIDDEN, W = (
    jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((N, D), (V, D))
)  # fmt: skip
LABELS = jax.ShapeDtypeStruct((N,), jnp.int32)


def estimate(fn, *args, turns=1):
    with devices.target("h200"):
        return roofline.of(
            Phase("", lambda: jax.jit(fn).trace(*args), turns=turns), NOTHING
        )


def test_roofline_of_one_product(fake):
    made = estimate(lambda h, W: h @ W.T, HIDDEN, W)
    (product,) = made.products
    assert product.operations == 2 * N * D * V
    assert product.bytes == 2 * (N * D + V * D + N * V)
    device = devices.find("h200")
    bound = max(2 * N * D * V / device.products, product.bytes / device.bandwidth)
    assert made.seconds == pytest.approx(bound)
    least, most = roofline.EFFICIENCY
    assert (made.low, made.high) == pytest.approx((bound / most, bound / least))


def test_roofline_without_products_is_bytes_moved(fake):
    """As the optimizer's update; beside products that take longer it is no bound."""
    size = 4 * N * D
    state = accounts.Account(arguments=3 * size, results=2 * size, temporary=0)
    with devices.target("h200"):
        update = Phase("", lambda: jax.jit(lambda x: x + 1).trace(HIDDEN))
        made = roofline.of(update, state)
        products = Phase("", lambda: jax.jit(lambda h, W: h @ W.T).trace(HIDDEN, W))
        small = accounts.Account(arguments=1, results=1, temporary=0)
        beside = roofline.of(products, small)
    assert not made.products and made.bytes == 5 * size
    assert made.seconds == 5 * size / devices.find("h200").bandwidth
    least, most = roofline.EFFICIENCY
    assert (made.low, made.high) == (made.seconds / most, made.seconds / least)
    (product,) = beside.products
    assert (beside.seconds, beside.bytes) == (product.seconds, product.bytes)


def test_loops_count_each_turn(fake):
    def run(h, w):
        return lax.scan(lambda h, _: (h @ w, None), h, None, length=5)[0]

    square = jax.ShapeDtypeStruct((D, D), jnp.bfloat16)
    (product,) = estimate(run, HIDDEN, square).products
    assert (product.times, product.operations) == (5, 5 * 2 * N * D * D)


def test_roofline_of_loop_without_known_end(fake):
    def run(h, w, steps):
        return lax.while_loop(
            lambda state: state[0] < steps,
            lambda state: (state[0] + 1, state[1] @ w), (0, h),
        )[1]  # fmt: skip

    square = jax.ShapeDtypeStruct((D, D), jnp.bfloat16)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    assert estimate(run, HIDDEN, square, steps, turns=7).products[0].times == 7


@pytest.mark.parametrize("passes", [1, 4])
def test_roofline_of_head_sums_its_passes(fake, passes):
    """Chunks of a loop count as if all rows were active."""

    def run(h, W, y):
        return jaxmem.logprobs(h, W, y, chunk=16, implementation="xla").sum()

    fn = run if passes == 1 else jax.grad(run, (0, 1))
    made = estimate(fn, HIDDEN, W, LABELS)
    assert made.operations == passes * 2 * N * D * V


def test_roofline_adds_communication_to_upper_end(fake):
    found = accounts.collectives.Collective("all-gather", "bf16[8]", 900, 2, 3, False)
    sent = accounts.Account(0, 0, 0, collectives=(found,))
    with devices.target("h200", 2):
        phase = Phase("", lambda: jax.jit(lambda h, W: h @ W.T).trace(HIDDEN, W))
        made = roofline.of(phase, sent)
        far = roofline.of(phase, sent, hosts=2)
    assert made.sent == 3 * 450
    assert made.sending == pytest.approx(1350 / devices.find("h200").link)
    assert far.sending > made.sending
    assert made.high - made.seconds / roofline.EFFICIENCY[0] == pytest.approx(
        made.sending
    )


@needs_pallas
def test_kernels_of_experts_cost_what_full_tiles_do(fake, monkeypatch):
    monkeypatch.setattr(hopper, "refuses_machine", lambda: None)
    tokens, groups, chosen, hidden, ff = 64, 4, 2, 128, 64
    up, down = (
        {"kernel": jax.ShapeDtypeStruct((groups, *shape), jnp.bfloat16)}
        for shape in ((hidden, ff), (ff, hidden))
    )
    x, choice, scale = (
        jax.ShapeDtypeStruct(*of)
        for of in (
            ((tokens, hidden), jnp.bfloat16), ((tokens, chosen), jnp.int32),
            ((tokens, chosen), jnp.float32),
        )
    )  # fmt: skip
    run = Expert("bfloat16", "silu", None, False, 1.0, False)

    def forward(weights, x, choice, scale):
        return grouped.apply(run, weights, x, choice, scale).sum()

    weights = {"gate": up, "up": up, "down": down}
    once = 2 * 128 * groups * hidden * ff  # as many tiles as there may be
    made = estimate(forward, weights, x, choice, scale)
    assert made.operations == 3 * once
    assert {product.name for product in made.products} == {
        "experts kernel bf16[512,128] x bf16[4,128,64]",
        "experts kernel bf16[512,64] x bf16[4,64,128]",
    }
    made = estimate(jax.grad(forward, (0, 1, 3)), weights, x, choice, scale)
    assert made.operations == (3 + 2 + 6) * once + once  # one whose result is not used


@needs_pallas
def test_kernel_of_cached_attention_reads_one_layer(fake):
    rows, kv_heads, group, width, layers, slots = 3, 2, 4, 64, 5, 128
    query, new, cached = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in (
            (rows, kv_heads, group, width), (rows, kv_heads, width),
            (layers, rows, kv_heads, slots, width),
        )
    )  # fmt: skip
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    seen = jax.ShapeDtypeStruct((rows, slots), jnp.bool_)

    def attend(query, new, cached, layer, seen):
        location = cached_attention.Place(layer, seen)
        return cached_attention.attend(
            query, (new, new), (cached, cached), location, scale=1.0
        )

    made = estimate(attend, query, new, cached, layer, seen)
    (product,) = made.products
    assert product.name == "attention kernel bf16[6,4,64] x bf16[30,128,64]"
    assert product.operations == 2 * (2 * rows * kv_heads * group * slots * width)
    cache = 2 * 2 * rows * kv_heads * slots * width
    assert product.bytes == cache + 2 * 2 * rows * kv_heads * group * width
