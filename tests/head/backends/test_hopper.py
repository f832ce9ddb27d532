"""Backend "hopper" without a GPU: lowering for CUDA, and the interpreter of kernels."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmem
from jaxmem.head.backends import hopper, xla
from jaxmem.head.kernels import block_sizes
from jaxmem.head.maths import partition
from tests.helpers.cases import Case, full, slow
from tests.helpers.described import described
from tests.helpers.hopper import (
    assert_none_writes_into_a_slice,
    by_loss,
    by_stats,
    in_parts,
    lowered,
    traced_in_parts,
)
from tests.helpers.interpreter import needs_pallas
from tests.helpers.one_pass import (
    BY_ROWS,
    ONE_PASS,
    check_by_rows,
    check_one_pass,
    close,
)
from tests.helpers.token_stats import check

pytestmark = pytest.mark.usefixtures("on_one_device")

spreads = partition.is_possible  # as it is outside of these tests


@pytest.mark.slow
@needs_pallas
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_launches_of_all_rows_by_column_block(layout, interpreted, monkeypatch):
    """Two of 256 rows: the second with none that is active, two blocks of 256 and 44
    columns; or with some, one block and every option."""
    monkeypatch.setattr(block_sizes, "backward_rows", lambda *_: (256, True))
    problem, options, dtype = Case(300, 33, 300, std=3.0).make(), {}, "bfloat16"
    masked = np.arange(300) % 3 == 0
    if layout == "dv":
        monkeypatch.setattr(block_sizes, "backward_tiles", lambda n_tiles, *_: n_tiles)
        masked, dtype = np.arange(300) < 10, "float16"
        options = {"softcap": 5.0, "vocab_size": 280}
        options["temperature"] = np.linspace(0.5, 2, 300, dtype=np.float32)
    problem = problem._replace(y=np.where(masked, -100, problem.y % 280))
    bias = jnp.linspace(-1, 1, 300, dtype=dtype)
    check(problem, "hopper", 16, dtype=dtype, layout=layout, bias=bias, **options)


@pytest.mark.slow
@needs_pallas
@pytest.mark.parametrize("beside", [True, False])
def test_sum_after_the_loop_changes_no_bit(beside, interpreted, monkeypatch):
    """As over several shards: the last of three blocks comes after the loop, and leaves
    multiprocessors to the sum, unless it is too long for that."""
    from jaxmem.head.kernels import products

    monkeypatch.setattr(products, "MAX_SUM_TILES", 1 if beside else 0)
    h, W, y = Case(40, 16, 600, std=3.0).make()
    h, W = jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16)

    def total(h, W):
        stats = jaxmem.token_stats(h, W, y, chunk=16, implementation="hopper")
        return jnp.sum(stats.logprob + stats.entropy)

    want = jax.jit(jax.grad(total, (0, 1)))(h, W)
    one_loop = products.gradients

    def apart(blocks, *args):
        *args, overlaps = args
        assert not overlaps and blocks.env.n_tiles == 3 and blocks.n_tiles == 1
        has_room = products.has_room(blocks.env, blocks.n_tiles)
        return one_loop(blocks, *args, has_room)

    launches, to_W = [], products.to_W

    def listen(launch, *args):
        launches.append(launch.n_blocks)
        return to_W(launch, *args)

    monkeypatch.setattr(products, "gradients", apart)
    monkeypatch.setattr(products, "to_W", listen)
    monkeypatch.setattr(products, "SUM_BLOCKS", 1)
    jax.clear_caches()  # of what was traced without a sum
    got = jax.jit(jax.grad(total, (0, 1)))(h, W)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    n = hopper.n_blocks()
    assert launches == ([n, n - 1] if beside else [n])


@pytest.mark.full
@needs_pallas
def test_hidden_gradient_in_parts_of_the_vocabulary(interpreted, monkeypatch):
    """The last part is shorter than others."""
    monkeypatch.setattr(block_sizes, "hidden_splits", lambda *_: 3)
    check_one_pass(**ONE_PASS["several blocks, every option"])


@pytest.mark.full
@needs_pallas
@pytest.mark.parametrize("name, by_rows", [
    ("fitting", {True}), ("far above", {False}), ("label alone", {False}),
    ("nothing in a block", {True, False}), ("transposed", {True}),
    ("large weights", {False}),
])  # fmt: skip
def test_token_loss_by_rows(name, by_rows, interpreted, monkeypatch):
    """Exponentials are the derivative themselves only where they fit the reference."""
    from jaxmem.head.kernels import kept

    seen, original = set(), kept.derivative

    def listen(*operands, skip):
        jax.debug.callback(lambda skip: seen.add(bool(skip)), skip)
        return original(*operands, skip=skip)

    monkeypatch.setattr(kept, "derivative", listen)
    check_by_rows(**BY_ROWS[name])
    jax.effects_barrier()
    assert seen == by_rows


@pytest.mark.full
@needs_pallas
def test_token_loss_by_rows_lowers_over_tokens(lowered_anywhere, monkeypatch):
    """Arrays of rows are typed as varying over the devices that share the tokens."""
    from jaxmem.head.kernels import kept

    calls, original = [], kept.by_rows
    monkeypatch.setattr(kept, "by_rows", lambda *of: calls.append(of) or original(*of))
    devices, n = jax.devices(), len(jax.devices())
    mesh = jax.make_mesh((n,), ("data",), (AxisType.Auto,), devices=devices)

    def total(h, W, y):
        loss, _ = jaxmem.token_loss(
            lambda stats: -stats.logprob, h, W, y, normalizer=1, implementation="hopper"
        )
        return jax.lax.psum(loss, "data")

    run = jax.shard_map(
        jax.value_and_grad(total, (0, 1)), mesh=mesh,
        in_specs=(P("data"), P(), P("data")), out_specs=(P(), (P("data"), P())),
    )  # fmt: skip
    operands = ((n * 256, 128), jnp.bfloat16), ((5120, 128), jnp.bfloat16)
    structs = [jax.ShapeDtypeStruct(*of) for of in (*operands, ((n * 256,), jnp.int32))]
    lowered(jax.jit(run).trace(*structs))
    assert calls


EVERY_OPTION = {"bias": True, "temperature": 0.7, "vocab_size": 50000}
LOWERED = [
    (300, 1000, 50257, EVERY_OPTION | {"softcap": 30.0}, ("vd", "dv")),
    (8192, 4096, 151936, {}, ("vd", "dv")),
    (1000, 2304, 256000, {"softcap": 30.0}, ("dv", "vd")),
]


def first_is_quick(cases):
    first, *others = cases
    return [first, *(slow(*case) for case in others)]


@needs_pallas
@pytest.mark.parametrize(
    "n, d, v, options, layouts, one_pass",
    first_is_quick((*case, one) for one in (True, False) for case in LOWERED),
)
def test_all_kernels_lower_for_cuda(
    n, d, v, options, layouts, one_pass, lowered_anywhere
):
    """Every two of shape, layout and verb meet; that verb and layout which parts of a
    vocabulary have, below, are lowered there."""
    layout = layouts[one_pass]

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    options = dict(options, layout=layout, implementation="hopper")
    bias = shape(v) if options.pop("bias", False) else None

    def of_stats(stats):
        return stats.logprob + stats.entropy

    def loss(h, W, y, bias):
        if one_pass:
            return described(jaxmem.token_loss)(
                of_stats, h, W, y, bias=bias, **options
            )[0]
        return of_stats(
            described(jaxmem.token_stats)(h, W, y, bias=bias, **options)
        ).sum()

    W = shape(v, d) if layout == "vd" else shape(d, v)
    operands = (shape(n, d), W, shape(n, dtype=jnp.int32), bias)
    text = lowered(jax.jit(jax.grad(loss, (0, 1))).trace(*operands))
    # Statistics, the logits' derivative, and the two products made of that.
    assert text.count("mosaic_gpu") >= 4
    assert_none_writes_into_a_slice(text, kept=one_pass)


def frozen(h, W, y, **options):
    return described(jaxmem.logprobs)(h, jax.lax.stop_gradient(W), y, **options).sum()


@pytest.mark.slow
@needs_pallas
@pytest.mark.parametrize("verb", [by_stats, by_loss])
def test_vocab_groups_partly_filled_by_shards(verb, interpreted):
    """W and its gradient are float32. One part: the interpreter has one memory."""
    h, W, y = Case(40, 64, 320, std=2.0).make()
    h, y = jnp.asarray(h, jnp.bfloat16), y % 250
    options = {"vocab_groups": 2, "axis_name": "tensor", "implementation": "hopper"}
    got = in_parts(functools.partial(verb, vocab_size=250, **options))(h, W, y)
    W = jnp.asarray(W, jnp.bfloat16).astype(jnp.float32)
    want = jax.jit(jax.value_and_grad(functools.partial(verb, vocab_size=250), (0, 1)))(
        h.astype(jnp.float32), W, y
    )
    assert got[1][1].dtype == jnp.float32
    jax.tree.map(close, got, want)


@needs_pallas
@pytest.mark.parametrize("verb, check_vma", [
    (by_loss, True), (frozen, False), slow(by_stats, False), slow(by_loss, False),
    slow(frozen, True),
])  # fmt: skip
def test_parts_of_the_vocabulary_are_typed(verb, check_vma, lowered_anywhere):
    """Tracing the call checks the mesh axes over which each value varies."""
    options = {"vocab_size": 5000, "axis_name": "tensor", "implementation": "hopper"}
    assert traced_in_parts(functools.partial(verb, **options), check_vma)


KERNELS = ("core_map", "mpmd_map", "pallas_call")


def kernels_of(jaxpr):
    """The text of each launch of a kernel: its grid, operands' shapes and code."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in KERNELS:
            yield str(equation.params), [str(x.aval) for x in equation.invars]
        else:
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
            ):
                inner = getattr(inner, "jaxpr", inner)
                yield from kernels_of(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.full
@needs_pallas
def test_vocab_groups_same_kernels_on_any_mesh(lowered_anywhere):
    """All meshes run one code for one shape; more devices launch it fewer times."""
    options = {"axis_name": "tensor", "implementation": "hopper", "vocab_groups": 2}
    total = functools.partial(by_stats, vocab_size=5000, **options)
    launches = []
    for n_devices in (1, 2):
        jaxpr = traced_in_parts(total, n_devices=n_devices).jaxpr.jaxpr
        launches.append([str(launch) for launch in kernels_of(jaxpr)])
    assert len(launches[0]) > len(launches[1]) >= 4
    assert set(launches[0]) == set(launches[1])


@needs_pallas
@pytest.mark.parametrize(
    "n_devices, room",
    [(2, True), full(2, False), slow(1, True), slow(1, False), slow(4, True)],
)
def test_several_shards_sum_beside_a_product(
    n_devices, room, lowered_anywhere, monkeypatch, request
):
    """Otherwise after it; XLA is told so."""
    from jaxmem.head.kernels import products

    if n_devices > len(jax.devices()):
        pytest.skip(f"needs {n_devices} devices")
    told, one_loop = [], products.gradients

    def listen(*args):
        told.append(args[-1])
        return one_loop(*args)

    monkeypatch.setattr(products, "gradients", listen)
    if not room:
        monkeypatch.setattr(products, "MAX_SUM_TILES", 0)
    jax.clear_caches()  # of what was traced with room; and then of what was without
    request.addfinalizer(jax.clear_caches)
    traced = traced_in_parts(
        functools.partial(by_loss, axis_name="tensor", implementation="hopper"),
        n_devices=n_devices,
    )
    beside = room and n_devices > 1
    assert told and set(told) == {beside}
    # Barriers of one array are those of kernels that write in place.
    pattern = r"= (psum)|:\S+ \S+ = (optimization_barrier)"
    ordered = ["".join(pair) for pair in re.findall(pattern, str(traced.jaxpr))]
    last = [k for k, _ in itertools.groupby(ordered)][-2:]
    assert last == ["psum", "optimization_barrier"][:: 1 if beside else -1]


HEAD = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine without")
def test_hopper_without_the_chip_is_refused():
    with pytest.raises(NotImplementedError, match="'hopper' cannot run.*it needs"):
        jaxmem.logprobs(*HEAD, np.zeros(4, int), implementation="hopper")
    with jaxmem.report() as calls:
        jaxmem.logprobs(*HEAD, np.zeros(4, int))
    assert calls.calls[0].implementation == "xla"
    assert "'hopper' does not: it needs" in calls.calls[0].why


def test_calls_that_it_refuses_anywhere(lowered_anywhere):
    h, W = HEAD
    with pytest.raises(NotImplementedError, match="hidden is float32"):
        jaxmem.logprobs(
            h.astype("float32"), W, np.zeros(4, int), implementation="hopper"
        )
    with pytest.raises(NotImplementedError, match="has logits already"):
        jaxmem.logprobs_from_logits(h, np.zeros(4, int), implementation="hopper")


@pytest.mark.full
@needs_pallas
def test_choose_by_measured_limits(lowered_anywhere, monkeypatch):
    """No kernel runs, nor is any traced."""
    monkeypatch.setattr(hopper, "forward", xla.forward)
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def chosen(n, d, v, w_dtype=jnp.bfloat16, **options):
        shapes = [(n, d), (v, d), (n,)]
        types = jnp.bfloat16, w_dtype, jnp.int32
        with jaxmem.report() as calls:
            jax.eval_shape(
                functools.partial(jaxmem.logprobs, **options),
                *(map(jax.ShapeDtypeStruct, shapes, types)),
            )
        return calls.calls[0].implementation, calls.calls[0].why

    assert chosen(8192, 4096, 151936)[0] == "hopper"
    assert chosen(8192, 4096, 50257)[0] == "hopper"
    assert chosen(8192, 4096, 151936, chunk=128)[0] == "hopper"
    assert chosen(8192, 4096, 151936, jnp.float32)[0] == "hopper"
    assert chosen(256, 4096, 151936)[0] == "hopper"
    assert chosen(1024, 1000, 50257)[0] == "hopper"
    assert "chunks of 128" in chosen(8192, 4096, 151936, chunk=64)[1]
    assert "below 256 tokens" in chosen(255, 4096, 151936)[1]
    assert "unless it is named" in chosen(8192, 4096, 151936, vocab_groups=8)[1]
    assert chosen(256, 4096, 50257)[0] == "hopper"
    assert "(50257, 1000) would be padded" in chosen(1023, 1000, 50257)[1]
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    monkeypatch.setattr(partition, "is_possible", spreads)
    assert chosen(512, 4096, 151936)[0] == "hopper"  # of which each device takes half
    assert "below 256 tokens a device" in chosen(511, 4096, 151936)[1]
    mesh = jax.make_mesh((1, 1), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    inside = []
    for by_hand in ({"data", "other"}, {"data"}):
        split_by_hand = jax.shard_map(
            lambda: inside.append(chosen(4096, 4096, 151936)), mesh=mesh, in_specs=(),
            out_specs=P(), axis_names=by_hand,
        )  # fmt: skip
        jax.eval_shape(split_by_hand)
    assert inside[0][0] == "hopper"
    assert "XLA cannot split" in inside[1][1]


@needs_pallas
def test_report_counts_no_logits(lowered_anywhere):
    """They are reduced in registers; traced only, no kernel runs."""
    shapes, types = [(512, 64), (1024, 64), (512,)], (*[jnp.bfloat16] * 2, jnp.int32)
    with jaxmem.report() as calls:
        jax.eval_shape(
            functools.partial(jaxmem.logprobs, implementation="hopper"),
            *map(jax.ShapeDtypeStruct, shapes, types),
        )
    assert calls.calls[0].live_logits_bytes == 0
    assert str(calls).endswith("chunk=512, no logits")
