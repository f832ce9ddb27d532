"""Bytes and matrix products of the functions' programs on "xla", as documented."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from jaxmem.head.backends import choose
from jaxmem.head.maths.backend_operands import Ragged, TokenRows
from jaxmem.head.maths.spec import Spec
from jaxmem.head.verbs.support_rule import RaggedSupportRule
from tests.helpers.cases import slow
from tests.helpers.programs import (
    BF16,
    CPU,
    CUBLAS,
    F32,
    OLD_XLA,
    PERCENT,
    compiled,
    count_gemms,
)
from tests.helpers.token_losses import nll, ppo

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V, CHUNK, K = 2048, 64, 8192, 128, 16
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """A loss, and what its programs take.

    Attributes:
        loss: of the operands.
        operands: their shapes and types.
        least: bytes of one chunk, which any program has.
        bytes: promised for the loss; with gradients of hidden and W; of hidden alone.
            None is not promised.
        products: their number in each; None is not counted.
        besides: bytes of what has a size of the tokens.
    """

    loss: Callable
    operands: tuple
    least: float
    bytes: tuple
    products: tuple = (None, None, None)
    besides: float = 0

    @property
    def programs(self):
        gradients = (jax.value_and_grad(self.loss, x) for x in ((0, 1), 0))
        return self.loss, *gradients


def array(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def factors(n=N, d=D, v=V, dtype=F32):
    """hidden and W."""
    return array((n, d), dtype), array((v, d), dtype)


def widened(dtype, v=V, d=D):
    """Bytes of a float32 copy of W, which XLA makes for products on a CPU."""
    return 4 * v * d if dtype == BF16 and CPU else 0


def size_of(dtype):
    return jnp.dtype(dtype).itemsize


LABELS, IDS, LOG_Q = array((N,), jnp.int32), array((N, K), jnp.int32), array((N, K))


def of_token_loss(dtype, n, d, v, chunk):
    def loss(h, W, y, *per_token):
        return jaxmem.token_loss(ppo, h, W, y, *per_token, chunk=chunk)[0]

    operands = *factors(n, d, v, dtype), array((n,), jnp.int32), *[array((n,))] * 2
    chunks = (4 + 2 * (dtype == BF16)) * chunk * v
    besides = 72 * n + 12 * chunk * d
    # XLA for CPUs in jaxlib 0.10 widens 16-bit arrays whole.
    besides += 4 * (2 * n + v) * d if OLD_XLA and dtype == BF16 else 0
    promised = 4 * chunk * v, chunks + 4 * v * d, chunks
    return Cost(loss, operands, 4 * chunk * v, promised, (1, 3, 2), besides)


def of_frozen_logprobs(dtype, n, d, v, chunk):
    def loss(h, W, y):
        return jaxmem.logprobs(h, W, y, chunk).sum()

    size = size_of(dtype)
    promised = (8 if CPU else 4 + size) * chunk * v + size * d * n
    besides = 72 * n + 12 * chunk * d
    besides += 4 * (2 * n + v) * d if OLD_XLA and dtype == BF16 else 0
    operands = *factors(n, d, v, dtype), array((n,), jnp.int32)
    return Cost(loss, operands, 4 * chunk * v, (None, None, promised),
                (None, None, 2), besides)  # fmt: skip


def of_two_heads(kind, dtype):
    def loss(h, W, teacher_h, teacher_W):
        target = kind(jaxmem.Teacher(teacher_h, teacher_W))
        return jaxmem.divergence(h, W, target, CHUNK).sum()

    wide, held = 2 * widened(dtype), (8 + size_of(dtype)) * CHUNK * V
    promised = 8 * CHUNK * V + wide, held + 4 * V * D + wide, held + wide
    return Cost(loss, factors(dtype=dtype) * 2, 4 * CHUNK * V, promised, (2, 6, 3),
                64 * N + 16 * N * D)  # fmt: skip


def with_divergence(stats, divergence):
    return divergence - stats.logprob


def of_loss_of_two_heads(kind, of_stats):
    def loss(h, W, teacher_h, teacher_W):
        target = kind(jaxmem.Teacher(teacher_h, teacher_W))
        return jaxmem.divergence_loss(
            with_divergence, h, W, jnp.zeros(N, int), target, chunk=CHUNK,
            statistics_temperature=of_stats,
        )[0]  # fmt: skip

    promised = None, (12 + (4 if of_stats else 0)) * CHUNK * V + 4 * V * D, None
    return Cost(loss, factors() * 2, 4 * CHUNK * V, promised, (2, 4, None),
                64 * N + 16 * N * D)  # fmt: skip


def of_loss_of_columns(of_stats, drawn=False):
    def loss(h, W, ids, log_q):
        of = jaxmem.Drawn(ids) if drawn else jaxmem.Columns(ids, log_q)
        return jaxmem.divergence_loss(
            with_divergence, h, W, jnp.zeros(N, int), jaxmem.ForwardKL(of), chunk=CHUNK,
            statistics_temperature=of_stats,
        )[0]  # fmt: skip

    promised = (8 + (4 if of_stats else 0)) * CHUNK * V + 4 * V * D + 192 * CHUNK * K
    return Cost(loss, (*factors(), IDS, LOG_Q), 4 * CHUNK * V, (None, promised, None),
                (1, 3, 2), N * (64 + 16 * D + 32 * K))  # fmt: skip


def topk(h, W, ids, log_q):
    return jaxmem.topk(h, W, K, CHUNK).logprobs.sum()


def of_columns(h, W, ids, log_q):
    target = jaxmem.ForwardKL(jaxmem.Columns(ids, log_q))
    return jaxmem.divergence(h, W, target, CHUNK).sum()


def sample_ids(h, W, ids, log_q):
    return jaxmem.sample_ids(h, W, K, KEY, CHUNK)


def of_rows(loss, dtype):
    """Functions of sorted or given columns."""
    more = {topk: 256 * K + V / 4, of_columns: 192 * K, sample_ids: 512 * K + V / 2}
    forward = 4 * CHUNK * V + CHUNK * more[loss] + widened(dtype)
    backward = (4 + size_of(dtype)) * CHUNK * V + 192 * CHUNK * K + 4 * V * D
    backward += widened(dtype)
    products = 1, 4, 3
    if loss is sample_ids:  # it has no gradient
        backward, products = None, (1, None, None)
    return Cost(loss, (*factors(dtype=dtype), IDS, LOG_Q), 4 * CHUNK * V,
                (forward, backward, None), products, 8 * N * (D + 4 * K))  # fmt: skip


SCALED = {
    "": {},
    "bias": {"bias": np.zeros(V, np.float32)},
    "softcap": {"softcap": 5.0},
}


def of_selected(dtype, scaled=""):
    """With a temperature, too, where logits have a softcap."""

    def loss(h, W, ids):
        head, warmth = (
            jaxmem.Head(W, **SCALED[scaled]),
            0.7 if scaled == "softcap" else 1,
        )
        options = {"chunk": CHUNK, "temperature": warmth}
        return jaxmem.selected_logprobs(h, head, ids, **options).sum()

    wide = widened(dtype)
    forward = (8 if OLD_XLA and scaled else 4) * CHUNK * V + wide
    backward = (4 + size_of(dtype)) * CHUNK * V + 4 * V * D + wide
    backward += 2 * CHUNK * V if scaled == "bias" else 0
    besides = 8 * N * (D + K) + 64 * (N + CHUNK * K)
    return Cost(loss, (*factors(dtype=dtype), IDS), 4 * CHUNK * V,
                (forward, backward, None), (1, 4, 3), besides)  # fmt: skip


def of_support(dtype, layout):
    d, v, k, chunk = 128, 1024, 32, 64

    def loss(h, W, y, ids):
        head = jaxmem.Head(W, layout=layout)
        return jaxmem.support_logprobs(h, head, y, ids, chunk).sum()

    size, columns = 4 if CPU else size_of(dtype), chunk * k * d
    h, W = factors(N, d, v, dtype)
    W = W if layout == "vd" else array((d, v), dtype)
    promised = size * columns, (4 + size) * columns + 4 * v * d, size * columns
    return Cost(loss, (h, W, LABELS, array((N, k), jnp.int32)), columns, promised,
                besides=8 * N * (d + k) + 64 * (N + chunk * k))  # fmt: skip


def of_ragged_support(chunk):
    """Nothing of [tokens, max_ids], either."""
    d, v, max_ids, capacity = 128, 1024, 64, 2**15

    def loss(h, W, y, ids, offsets):
        options = {"offsets": offsets, "max_ids": max_ids}
        return jaxmem.support_logprobs(h, W, y, ids, chunk, **options).sum()

    entries = min(chunk * max_ids, capacity // 16)
    integers = array((capacity,), jnp.int32), array((N + 1,), jnp.int32)
    promised = 8 * entries * d, 16 * entries * d + 4 * v * d, 8 * entries * d
    assert 1.04 * promised[1] < 4 * N * max_ids * d / 8
    return Cost(loss, (*factors(N, d, v), LABELS, *integers), entries * d, promised,
                besides=8 * N * d + 64 * (N + entries) + 8 * capacity)  # fmt: skip


def sampled(name, h, W, y, **options):
    """A loss of one of four functions."""
    if name == "divergence":
        return jaxmem.divergence(
            h, W, jaxmem.JSD(jaxmem.Teacher(h, W)), **options
        ).sum()
    if name == "token_loss":
        return jaxmem.token_loss(smooth, h, W, y, **options)[0]
    operands = (h, W) if name == "entropy" else (h, W, y)
    return getattr(jaxmem, name)(*operands, **options).sum()


def smooth(stats):
    return 0.3 * stats.entropy + 0.1 * stats.logsumexp**2 - stats.logprob


def of_samples(name, n):
    d, chunk = 32, 64
    options = {"gradient": jaxmem.Sample(K), "key": KEY, "chunk": chunk}
    held = {"logprobs": 1, "divergence": 4}.get(name, 3)
    forward = 4 * chunk * V * (held + 2 / 16) + 512 * chunk * K
    entries, backward = 8 * n * K, 24 * n * (K + 1) + 4 * min(2**22, V * d)
    promised = forward + entries + backward
    return Cost(functools.partial(sampled, name, **options),
                (*factors(n, d, V), array((n,), jnp.int32)), 4 * chunk * V,
                (None, promised, None), besides=0.06 * promised + 2**18)  # fmt: skip


def case(make, *arguments, marks=()):
    words = (getattr(x, "__name__", str(x)) for x in arguments)
    name = " ".join((make.__name__.removeprefix("of_"), *words))
    return pytest.param(functools.partial(make, *arguments), marks=marks, id=name)


in_full = functools.partial(case, marks=pytest.mark.full)
once_a_day = functools.partial(case, marks=pytest.mark.slow)
SMALL, WIDE, TALL = (4096, 64, 4096, 128), (4096, 256, 8192, 512), (2048, 32, 50304, 64)
COSTS = [
    case(of_token_loss, BF16, *WIDE), once_a_day(of_token_loss, F32, *WIDE),
    once_a_day(of_token_loss, F32, *SMALL), once_a_day(of_token_loss, BF16, *SMALL),
    case(of_frozen_logprobs, F32, *TALL), once_a_day(of_frozen_logprobs, BF16, *TALL),
    *(once_a_day(of_frozen_logprobs, dtype, *SMALL) for dtype in (F32, BF16)),
    case(of_two_heads, jaxmem.JSD, F32), once_a_day(of_two_heads, jaxmem.JSD, BF16),
    *(once_a_day(of_two_heads, jaxmem.ReverseKL, dtype) for dtype in (F32, BF16)),
    case(of_loss_of_two_heads, jaxmem.JSD, 0.5),
    once_a_day(of_loss_of_two_heads, jaxmem.JSD, None),
    *(once_a_day(of_loss_of_two_heads, kind, of_stats)
      for kind in (jaxmem.ReverseKL, jaxmem.ForwardKL) for of_stats in (None, 0.5)),
    in_full(of_loss_of_columns, None), in_full(of_loss_of_columns, 0.5),
    once_a_day(of_loss_of_columns, None, True),
    *(in_full(of_rows, loss, dtype)
      for loss in (topk, of_columns, sample_ids) for dtype in (F32, BF16)),
    in_full(of_selected, BF16, "bias"), *(once_a_day(of_selected, dtype, scaled)
      for dtype in (F32, BF16) for scaled in ("", "softcap")),
    *(once_a_day(of_support, *x) for x in ((F32, "vd"), (F32, "dv"), (BF16, "vd"))),
    *(once_a_day(of_ragged_support, chunk) for chunk in (4, 64)),
    case(of_samples, "divergence", 256), once_a_day(of_samples, "logprobs", 256),
    *(once_a_day(of_samples, *x)
      for x in (("logprobs", 1024), ("entropy", 256), ("token_loss", 256))),
]  # fmt: skip


@pytest.mark.parametrize("make", COSTS)
def test_memory_and_products_as_documented(make):
    if OLD_XLA and (make.func is of_rows or make.args == (BF16, "vd")):
        pytest.skip(
            "XLA for CPUs in jaxlib 0.10 stores more of a chunk, or W in float32"
        )
    cost = make()
    besides = cost.besides + (0 if CPU else CUBLAS)
    for fn, promised, products in zip(
        cost.programs, cost.bytes, cost.products, strict=True
    ):
        if promised is None and products is None:
            continue
        program = compiled(fn, *cost.operands)
        if products is not None:
            assert count_gemms(program.as_text()) == products
        if promised is not None:
            temp = program.memory_analysis().temp_size_in_bytes
            assert cost.least <= temp <= PERCENT * promised + besides


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selected_logprobs", "support_logprobs"])
def test_memory_of_many_ids_grows_linearly(name):
    """Nothing of [chunk, K, K]."""
    n, d, v, chunk = 512, 8, 2048, 64

    def temporary(k):
        def loss(h, W, y, ids):
            operands = (h, W, ids) if name == "selected_logprobs" else (h, W, y, ids)
            return getattr(jaxmem, name)(*operands, chunk=chunk).sum()

        operands = *factors(n, d, v), array((n,), jnp.int32), array((n, k), jnp.int32)
        program = compiled(jax.grad(loss, (0, 1)), *operands)
        return program.memory_analysis().temp_size_in_bytes

    more = 448 * (64 * chunk + 8 * chunk * d + 16 * n)
    assert temporary(512) - temporary(64) <= more


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tokens():
    def temporary(n):
        def loss(h, W, teacher_h, teacher_W):
            target = jaxmem.JSD(jaxmem.Teacher(teacher_h, teacher_W))
            return jaxmem.divergence(h, W, target, 128).sum()

        program = compiled(jax.grad(loss, (0, 1)), *factors(n, 32, V) * 2)
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(32 * 1024) - temporary(1024) <= 31 * 1024 * (64 + 16 * 32)


# Products and buffers of small programs: D and V tell every buffer apart.

SMALLEST = *factors(256, 24, 640), array((256,), jnp.int32)
ROWS = *SMALLEST, array((256,)), array((256,))
OF_W = r"= f32\[640,24\]\S* (\w+)\("


def gemms_of(fn, *operands):
    return count_gemms(compiled(fn, *operands).as_text())


def logprobs(h, W, y):
    return jaxmem.logprobs(h, W, y, 64).sum()


def entropy(h, W, y):
    return jaxmem.entropy(h, W, 64, where=y >= 0).sum()


def token_stats(h, W, y):
    return sum(jnp.cos(x).sum() for x in jaxmem.token_stats(h, W, y, 64)[:4])


def token_loss(h, W, y, *per_token, loss_fn=nll):
    return jaxmem.token_loss(loss_fn, h, W, y, *per_token, chunk=64)[0]


def test_gemms_of_the_least_memory():
    def loss(h, W, teacher_h, teacher_W):
        target = jaxmem.ReverseKL(jaxmem.Teacher(teacher_h, teacher_W))
        again = jaxmem.Recompute()
        return jaxmem.divergence(h, W, target, 64, gradient=again).sum()

    assert gemms_of(jax.value_and_grad(loss), *factors(256, 24, 640) * 2) == 5


def test_two_gemms_forward_and_none_backward():
    def forward(h, W, y):
        return jaxmem.logprobs(h, W, y, 64)

    def pulled(h, W, y):
        return jax.vjp(lambda h: forward(h, W, y), h)

    assert gemms_of(forward, *SMALLEST) == 1
    assert gemms_of(pulled, *SMALLEST) == 2
    _, pull = jax.eval_shape(pulled, *SMALLEST)
    assert gemms_of(lambda pull, g: pull(g), pull, jnp.zeros(256)) == 0


@pytest.mark.parametrize("loss, gemms", [
    (logprobs, 2), slow(entropy, 2), slow(token_stats, 3), slow(token_loss, 2),
])  # fmt: skip
def test_no_buffer_of_the_weights_size_where_frozen(loss, gemms):
    text = compiled(jax.value_and_grad(loss), *SMALLEST).as_text()
    assert set(re.findall(OF_W, text)) <= {"parameter", "get-tuple-element"}
    assert count_gemms(text) == gemms


@pytest.mark.parametrize("loss, gemms", [slow(token_stats, 3), (token_loss, 2)])
def test_gemms_where_weights_are_stopped(loss, gemms):
    def stopped(h, W, y):
        return loss(h, lax.stop_gradient(W), y)

    assert gemms_of(jax.value_and_grad(stopped, (0, 1)), *SMALLEST) == gemms


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [ppo, nll])
def test_gemms_where_hidden_is_frozen(loss_fn):
    """z and dW."""
    loss = functools.partial(token_loss, loss_fn=loss_fn)
    assert gemms_of(jax.value_and_grad(loss, 1), *ROWS) == 2


@pytest.mark.slow
def test_unused_output_costs_nothing():
    """Not even where a metric reads it."""

    def with_metric(stats, *_):
        return -stats.logprob, {"square": stats.sum_pi_squared}

    def stopped(stats, *_):
        return -stats.logprob + lax.stop_gradient(stats.entropy)

    def multiplications(loss_fn):
        loss = functools.partial(token_loss, loss_fn=loss_fn)
        text = compiled(jax.grad(loss, (0, 1)), *ROWS).as_text()
        return len(re.findall(r"f32\[64,640\]\S* multiply\(", text))

    want = multiplications(nll)
    assert multiplications(with_metric) == multiplications(stopped) == want
    assert multiplications(ppo) > want


def test_statistics_share_the_largest_logit():
    cost = of_loss_of_two_heads(jaxmem.ReverseKL, None)
    text = str(jax.make_jaxpr(jax.grad(cost.loss, (0, 1)))(*cost.operands))
    assert text.count("= reduce_max[") == 2  # one per head


@pytest.mark.full
def test_support_makes_nothing_of_vocabulary_width():
    """No logits, and of W only what its gradient is."""

    def loss(h, W, y, ids):
        return jaxmem.support_logprobs(h, W, y, ids, 64).sum()

    operands = *SMALLEST, array((256, 8), jnp.int32)
    text = compiled(jax.value_and_grad(loss, (0, 1)), *operands).as_text()
    assert "f32[64,640]" not in text and "f32[640,24]" in text
    frozen = compiled(jax.value_and_grad(loss), *operands)
    flops = frozen.cost_analysis()["flops"]
    assert flops < 2 * 64 * 640 * 24  # one chunk's logits alone


@pytest.mark.full
def test_ragged_supports_cost_what_their_ids_do():
    """64 tokens have 1 to 64 ids; the cost is the loops' trips times their entries."""
    n, max_ids = 64, 256
    offsets = jnp.cumsum(jnp.arange(n + 1))
    spec = Spec(1, 1, 16, (), np.dtype("float32"))
    rows = TokenRows(jnp.zeros(n, jnp.int32), jnp.ones(n, bool), None)
    ids = jnp.zeros(offsets[-1], jnp.int32)
    ragged = Ragged(offsets[:-1], jnp.diff(offsets), ids)
    rule = RaggedSupportRule(spec, choose.BACKENDS[-1], max_ids)
    covered, computed = jnp.zeros(n, int), 0
    for tokens, active, columns_of in rule._groups(rows, ragged):
        width = columns_of(jnp.arange(n)).shape[1]
        assert tokens * width <= 4096
        assert (ragged.counts[active] <= width).all()
        covered += active
        computed += width * int(active.sum())
    assert (covered == 1).all()
    assert computed <= 2 * int(offsets[-1])
    assert int(offsets[-1]) < n * max_ids / 7


def test_support_auto_chunk_counts_columns():
    def chunk_of(n, d, v, k):
        operands = *factors(n, d, v), array((n,), jnp.int32), array((n, k), jnp.int32)
        with jaxmem.report() as calls:
            jax.eval_shape(
                functools.partial(jaxmem.support_logprobs, chunk="auto"), *operands
            )
        (call,) = calls.calls
        assert call.live_logits_bytes == 4 * call.chunk * k
        return call.chunk

    assert chunk_of(4096, 64, 1024, 128) == 4096  # 128 MiB of columns
    assert chunk_of(4096, 2048, 1024, 1024) == 128  # 1 GiB
