"""Programs compiled for H200s that are not there: what XLA makes of the kernels.

Needs XLA's compiler for them, but no GPU: jax-cuda13-plugin and nvidia-cuda-nvcc, with
JAX_PLATFORMS=cpu, and XLA_FLAGS that leave nothing to be tried on a GPU.
"""

import csv
import functools
import importlib.util
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import devices
from jaxmem.models import refill, sampling
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.experts import grouped
from jaxmem.models.mixture import Expert
from jaxmem.models.partitioning import AXES
from jaxmem.planning import collectives
from jaxmem.train.jobs import sft
from tests.helpers import long_rows
from tests.helpers.cases import one_at_a_time, slow

FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
UNROLLED = {"xla_gpu_enable_while_loop_double_buffering": True}
QUICK_AXES = ("fsdp", "tensor")
RECORD = pathlib.Path(__file__).parents[1] / "benchmarks/results/head_h200.csv"
KERNEL = 'custom_call_target="mosaic_gpu'

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None
    or os.environ.get("JAX_PLATFORMS") != "cpu"
    or not set(FLAGS.split()) <= set(os.environ.get("XLA_FLAGS", "").split()),
    reason=f"needs jax-cuda13-plugin, JAX_PLATFORMS=cpu and XLA_FLAGS='{FLAGS}'",
)


@pytest.fixture(autouse=True)
def on_an_h200():
    """Trace and compile programs for an H200."""
    with devices.target("h200"):
        yield


def compiled(run, shapes, options=None):
    """A program, compiled for arrays of (shape, dtype)."""
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.jit(run, compiler_options=options).lower(*structs).compile()


def of_micro_batches(h, W, y, one_pass=False):
    """Each one's gradients, stacked."""

    def loss(h, W, y):
        if one_pass:
            run = functools.partial(jaxmem.token_loss, lambda stats: -stats.logprob)
            return run(h, W, y, implementation="hopper")[0]
        return jaxmem.logprobs(h, W, y, implementation="hopper").sum()

    return jax.lax.map(lambda hy: jax.grad(loss, (0, 1))(hy[0], W, hy[1]), (h, y))


def of_all(h, W, y, **options):
    """Value and gradients of the sum over stacked arrays, by `lax.map`."""

    def total(h, W):
        def one(hy):
            stats = jaxmem.token_stats(
                hy[0], W, hy[1], implementation="hopper", **options
            )
            return jnp.sum(stats.logprob + stats.entropy)

        return jnp.sum(jax.lax.map(one, (h, y)))

    return jax.grad(total, (0, 1))(h, W)


@pytest.mark.parametrize(
    "run, options",
    one_at_a_time(
        [functools.partial(of_micro_batches, one_pass=True), of_all],
        [None, UNROLLED],
    )
    + [slow(of_micro_batches, None)],
)
def test_no_kernel_writes_into_a_slice(run, options):
    shapes = ((3, 256, 256), jnp.bfloat16), ((1024, 256), jnp.bfloat16)
    text = compiled(run, (*shapes, ((3, 256), jnp.int32)), options).as_text()
    found = list(_written_in_place(text))
    assert len(found) >= 2
    for neighbours in found:
        assert not re.search(r" dynamic-(update-)?slice\(", neighbours)


def _written_in_place(text):
    """For each kernel that writes into an operand: where that comes from and goes to.

    Through bitcasts, within a computation, such as a fusion.
    """
    for computation in re.findall(r"\{\n(.*?)\n\}", text, re.DOTALL):
        lines = dict(re.findall(r"%([\w.-]+) = (.*)", computation))
        cast = {k: re.match(r"\S+ bitcast\(%([\w.-]+)\)", v) for k, v in lines.items()}

        def origin(name, cast=cast):
            return origin(cast[name][1]) if cast.get(name) else name

        for name, line in lines.items():
            place = re.search(r"output_to_operand_aliasing=\{\{\}: \((\d+),", line)
            if KERNEL not in line or not place:
                continue
            operands = re.findall(r"%([\w.-]+)", line.partition("custom-call(")[2])
            users = [
                v for k, v in lines.items()
                if name in map(origin, re.findall(r"%([\w.-]+)", v)) and not cast[k]
            ]  # fmt: skip
            yield "\n".join([lines[origin(operands[int(place[1])])], *users])


@pytest.mark.parametrize("slots", [slow(None), 16])
def test_number_of_iterations_is_known_to_the_host(slots):
    """It would wait for the GPU in each iteration of a loop, and the GPU for it."""

    def gradients(h, W, y, key):
        options = {"gradient": jaxmem.Sample(slots), "key": key} if slots else {}

        def loss(h, W):
            return jaxmem.token_loss(
                lambda stats: -stats.logprob, h, W, y, chunk=256,
                implementation="hopper", **options,
            )[0]  # fmt: skip

        return jax.grad(loss, (0, 1))(h, W)

    shapes = ((4096, 256), jnp.bfloat16), ((1024, 256), jnp.bfloat16)
    key = jax.eval_shape(lambda: jax.random.key(0))
    text = compiled(
        gradients, (*shapes, ((4096,), jnp.int32), (key.shape, key.dtype))
    ).as_text()
    loops = re.findall(r" while\(.*", text)
    assert loops
    assert all("known_trip_count" in loop for loop in loops)


@pytest.mark.parametrize("shape", [(8192, 4096, 151936), slow((8192, 4096, 50257))])
def test_memory_is_what_the_record_says(shape):
    n, d, v = shape

    def gradients(h, W, y):
        def loss(h, W):
            stats = jaxmem.token_stats(h, W, y, implementation="hopper")
            return jnp.sum(stats.logprob + stats.entropy)

        return jax.grad(loss, (0, 1))(h, W)

    shapes = ((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32)
    analysis = compiled(gradients, shapes).memory_analysis()
    with RECORD.open() as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["n"], row["d"], row["v"]) == tuple(map(str, shape))
            and row["path"] == "token_stats"
        )
    measured = float(row["forward_backward_temp_mib"]) * 2**20
    assert analysis.temp_size_in_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("n_blocks", [4, slow(8)])
def test_vocabulary_blocks_save_memory_of_many_tokens(n_blocks):
    n, d, v, chunk = 131_072, 4096, 128_256, 1024

    def gradients(h, W, y):
        def loss(h, W):
            gradient = jaxmem.Recompute(n_blocks)
            options = {"implementation": "hopper", "gradient": gradient}
            stats = jaxmem.token_stats(h, W, y, chunk, **options)
            return jnp.sum(stats.logprob + stats.entropy)

        return jax.grad(loss, (0, 1))(h, W)

    shapes = ((n, d), jnp.bfloat16), ((v, d), jnp.bfloat16), ((n,), jnp.int32)
    taken = compiled(gradients, shapes).memory_analysis().temp_size_in_bytes
    columns = -(-v // (256 * n_blocks)) * 256
    formula = 2 * chunk * v + 4 * columns * d + 8 * d * (chunk * v) ** 0.5
    assert taken <= formula + 64 * n  # statistics, and the order of the rows
    assert taken < 0.8 * 2**30


@pytest.mark.parametrize("axis", [x if x in QUICK_AXES else slow(x) for x in AXES])
def test_training_steps_on_two(axis):
    config = long_rows.config_of(long_rows.MODEL, axis)
    with devices.target("h200", 2):
        program = sft.SftProgram(config, config.model.vocab_size, packed=False)
        text = program.compile_step(config.head).as_text()
    assert text.count(KERNEL) >= 4


def test_refill_never_transposes_the_cache():
    """A prefill in another layout would have the whole cache transposed each time.

    jax 0.12 chooses another one for it, unlike 0.11.2.
    """
    config = ModelConfig(
        layers=2, hidden=256, ff=256, heads=4, kv_heads=2, head_dim=128,
        vocab_size=512, dtype="bfloat16",
    )  # fmt: skip
    rows, slots, width, most = 64, 32, 128, 1024

    def draw(keys, steps, logits, none):
        tokens = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return sampling.SampledTokens(tokens, ~none, jnp.zeros(len(steps)), None), none

    def run(weights, ids, lengths):
        model = sampling.prepared(nnx.merge(definition, weights))
        prompts = refill.RefillPrompts(ids, lengths, jnp.arange(rows))
        nothing = jnp.zeros((rows, most), jnp.int32)
        nothing = sampling.SampledTokens(nothing, nothing > 0, nothing * 1.0, None)
        return refill.Refill(
            nnx.split(model), prompts, slots, most, draw, unroll=True
        ).run(nothing)

    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    definition, weights = nnx.split(model)
    ids, lengths = (
        jax.ShapeDtypeStruct(x, jnp.int32) for x in [(rows, width), (rows,)]
    )
    run = jax.jit(run, compiler_options=sampling.COMPILER_OPTIONS)
    text = run.lower(weights, ids, lengths).compile().as_text()
    cache = rf"= bf16\[{config.layers},{slots},2,{width + most},128\]\S+ "
    assert re.search(cache + r"dynamic-update-slice\(", text)
    assert not re.search(cache + r"transpose\(", text)


@pytest.mark.parametrize(
    "split, kinds", [("t", {"all-gather"}), ("v", {"all-gather", "all-reduce"})]
)
def test_sampled_gradients_are_sent_beside_a_kernel(split, kinds):
    """W's of tokens, computed first, and hidden's of a vocabulary, of 16 MiB each."""
    n, d, v = 2048, 2048, 8192
    with devices.target("h200", 2) as there:
        mesh = jax.make_mesh(
            (2, 1) if split == "t" else (1, 2), ("t", "v"), devices=there,
            axis_types=(AxisType.Auto,) * 2,
        )  # fmt: skip
        axes = {"tokens": "t", "vocab": "v"}
        verb = jaxmem.sharding.parallel(jaxmem.logprobs, mesh, **axes)

        def loss(h, W, y, key):
            key = jax.random.wrap_key_data(key)
            made = verb(
                h, W, y, gradient=jaxmem.Sample(64), key=key, implementation="hopper"
            )
            return jnp.sum(made)

        def of(shape, dtype, *spec):
            placed = NamedSharding(mesh, PartitionSpec(*spec))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

        given = (
            of((n, d), jnp.bfloat16, "t"), of((v, d), jnp.bfloat16, "v"),
            of((n,), jnp.int32, "t"), of((2,), jnp.uint32),
        )  # fmt: skip
        program = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile()
    assert {c.kind for c in collectives.of(program)} == kinds
    assert collectives.hidden(program.as_text())[0] >= 1


def test_experts_store_routed_multiply_trained():
    tokens, groups, chosen, hidden, ff = 2048, 16, 4, 512, 256
    run = Expert("bfloat16", "silu", None, False, 1.0, False)

    def loss(weights, x, scale, choice):
        out = grouped.apply(run, weights, x, choice, scale)
        return jnp.sum(out * out)

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = {
        name: {"kernel": of((groups, hidden, ff))} for name in ("gate", "up")
    } | {"down": {"kernel": of((groups, ff, hidden))}}  # fmt: skip
    places = tokens, chosen
    given = (
        weights,
        of((tokens, hidden)),
        of(places, jnp.float32),
        of(places, jnp.int32),
    )
    routed = tokens * chosen + groups * 128
    results = 4 * tokens * hidden
    for what, launches, wide in (
        (loss, 2, (1, 2)), (jax.grad(loss, (1, 2)), 4, (2, 4)),
        (jax.grad(loss, (0, 1, 2)), 6, (2, 4)),
    ):  # fmt: skip
        program = jax.jit(what).lower(*given).compile()
        assert program.as_text().count(KERNEL) == launches
        taken = program.memory_analysis().temp_size_in_bytes
        sorted_rows = 2 * routed * (wide[0] * hidden + wide[1] * ff)
        assert taken <= sorted_rows + results + 64 * routed
