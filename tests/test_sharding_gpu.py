"""The head over the GPUs of one host; more of them than there are is a skip by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem
from jaxmem.head.backends import hopper
from jaxmem.planning import collectives
from tests.helpers import oracle
from tests.helpers.cases import Case
from tests.helpers.token_stats import FLOATS
from tests.helpers.tolerance import EPSILON, STATS_EPSILON, error

pytestmark = pytest.mark.gpu

N, D, V = 512, 256, 4096

SPLITS = {  # options of `parallel`, or None for jit alone; how W lies
    "vocabulary": ({"vocab": "tensor"}, P("tensor")),
    "vocabulary, parts ragged": ({"vocab": "tensor"}, P("tensor")),
    "tokens": ({"tokens": "data"}, P()),
    "W in parts of D": ({"tokens": "data", "W_fsdp": "data"}, P(None, "data")),
    "tokens by jit": (None, P()),
    "W in parts of D by jit": (None, P(None, "data")),
    "vocabulary by jit": (None, P("tensor")),
}


def mesh_of(devices, axis):
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} GPUs, jax found {len(jax.devices())}")
    sizes = (devices, 1) if axis == "data" else (1, devices)
    return jax.make_mesh(
        sizes, ("data", "tensor"), devices=jax.devices()[:devices],
        axis_types=(AxisType.Auto,) * 2,
    )  # fmt: skip


@functools.cache
def problem():
    """The second half is masked, and not a number."""
    h, W, y = Case(N, D, V, std=3.0).make()
    h, W = (x.astype(jnp.bfloat16) for x in (h, W))
    h[N // 2 :], y[N // 2 :] = np.nan, -1
    rng = np.random.default_rng(1)
    g = {k: rng.standard_normal(N).astype(np.float32) for k in FLOATS}
    return h, W, y, g


def with_gradients(verb, operands):
    vocab_size = len(operands[1]) - 3

    @jax.jit
    def both(h, W, y, g):
        def run(h, W):
            made = verb(h, jaxmem.Head(W, vocab_size=vocab_size), y)._asdict()
            return {k: made[k] for k in FLOATS}

        made, pull = jax.vjp(run, h, W)
        return made, pull(g)

    first, again = both(*operands), both(*operands)
    for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    return jax.device_get(first), both.lower(*operands).compile()


@pytest.mark.parametrize("implementation", ["xla", "hopper"])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("split", SPLITS)
def test_results_equal_on_any_number_of_devices(split, devices, implementation):
    options, weights = SPLITS[split]
    mesh = mesh_of(devices, "tensor" if "tensor" in weights else "data")
    h, W, y, g = problem()
    if "ragged" in split:
        W = W[:-8]
    vocab_size = len(W) - 3
    y = np.where(y >= 0, y % vocab_size, y)
    verb = functools.partial(jaxmem.token_stats, implementation=implementation)
    parallel = verb
    if options is not None:
        parallel = jaxmem.sharding.parallel(verb, mesh, **options)
    tokens = NamedSharding(mesh, P("data"))
    placed = jax.device_put(
        (h, W, y, g),
        (tokens, NamedSharding(mesh, weights), tokens, dict.fromkeys(g, tokens)),
    )
    alone, _ = with_gradients(verb, (h, W, y, g))
    try:
        got, compiled = with_gradients(parallel, placed)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    made, (dh, dW, _) = oracle.head(h, W, y, g, vocab_size=vocab_size)
    for k in FLOATS:
        ours, theirs = error(got[0][k], made[k]), error(alone[0][k], made[k])
        assert ours <= 2 * theirs + STATS_EPSILON, k
    for i, exact in enumerate((dh, dW)):
        ours, theirs = error(got[1][i], exact), error(alone[1][i], exact)
        assert ours <= 2 * theirs + EPSILON["bfloat16"]
    assert not got[1][0][N // 2 :].any()
    assert "all-reduce" in compiled.as_text() or "reduce-scatter" in compiled.as_text()


@pytest.mark.parametrize("implementation", ["xla", "hopper"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_groups_of_the_vocabulary_have_the_same_bits(devices, implementation):
    """Every statistic, and gradients, as of one device without a mesh."""
    mesh = mesh_of(devices, "tensor")
    if implementation == "hopper" and (reason := hopper.refuses_machine()):
        pytest.skip(reason)
    verb = functools.partial(
        jaxmem.token_stats, implementation=implementation, vocab_groups=8
    )
    split = jaxmem.sharding.parallel(verb, mesh, vocab="tensor")
    h, W, y, g = problem()
    whole, parts = (NamedSharding(mesh, spec) for spec in (P(), P("tensor")))
    y = np.where(y >= 0, y % (V - 3), y)
    given = jax.device_put((h, W, y, g), (whole, parts, whole, dict.fromkeys(g, whole)))
    alone, _ = with_gradients(verb, (h, W, y, g))
    got, _ = with_gradients(split, given)
    for a, b in zip(*map(jax.tree.leaves, (got, alone)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    plain = functools.partial(jaxmem.token_stats, implementation=implementation)
    rough, _ = with_gradients(plain, (h, W, y, g))
    exact, _ = oracle.head(h, W, y, g, vocab_size=V - 3)
    for k in FLOATS:
        theirs = error(rough[0][k], exact[k])
        assert error(got[0][k], exact[k]) <= 2 * theirs + STATS_EPSILON, k


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sampled_token_gradients_equal_one_device(devices):
    """The draws are the same; W's gradient is summed in parts of the vocabulary."""
    mesh = mesh_of(devices, "data")
    if reason := hopper.refuses_machine():
        pytest.skip(reason)
    h, W, y, g = problem()
    y = np.where(y >= 0, y % V, y)
    sampled = {"gradient": jaxmem.Sample(64), "implementation": "hopper"}
    parallel = jaxmem.sharding.parallel(jaxmem.logprobs, mesh, tokens="data")

    def gradients(verb):
        def loss(h, W):
            made = verb(h, W, y, key=jax.random.key(0), **sampled)
            return jnp.sum(made * g["logprob"])

        return jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(h, W))

    for got, want in zip(gradients(parallel), gradients(jaxmem.logprobs), strict=True):
        bound = 2 * EPSILON["bfloat16"]  # both are rounded
        assert error(got, np.asarray(want, np.float64)) <= bound


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_hiddens_gradient_is_summed_beside_a_product(devices):
    """By the compiled program's order; of 64 MiB, which NCCL sums."""
    mesh = mesh_of(devices, "tensor")
    if reason := hopper.refuses_machine():
        pytest.skip(reason)
    logprobs = functools.partial(jaxmem.logprobs, implementation="hopper")
    split = jaxmem.sharding.parallel(logprobs, mesh, vocab="tensor")
    whole, parts = (NamedSharding(mesh, spec) for spec in (P(), P("tensor")))
    run = jax.jit(jax.grad(lambda h, W, y: split(h, W, y).sum(), (0, 1)))
    compiled = run.lower(
        jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16, sharding=whole),
        jax.ShapeDtypeStruct((131_072, 2048), jnp.bfloat16, sharding=parts),
        jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=whole),
    ).compile()
    assert collectives.hidden(compiled.as_text())[0] == 1


def test_loss_with_tokens_divided_by_jit():
    """As chosen by itself: by the kernels, where one device is given them."""
    mesh = mesh_of(2, "data")
    h, W, y, _ = problem()
    h, y = np.tile(h[: N // 2], (4, 1)), np.tile(y[: N // 2], 4)

    def of_token(stats):
        return -stats.logprob + 0.1 * stats.entropy

    def loss(h, W, y):
        return jaxmem.token_loss(of_token, h, W, y)[0]

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    tokens, weights = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    with jaxmem.report() as calls:
        alone = run(h, W, y)
        split = run(*jax.device_put((h, W, y), (tokens, weights, tokens)))
    chosen = "xla" if hopper.refuses_machine() else "hopper"
    assert {call.implementation for call in calls.calls} == {chosen}
    assert split[1][0].sharding.is_equivalent_to(tokens, 2)
    for got, want in zip(*map(jax.tree.leaves, (split, alone)), strict=True):
        scale = np.abs(want := np.asarray(want, float)).max()
        assert error(got / scale, want / scale) <= 2 * EPSILON["bfloat16"]


TINY = {
    "model.layers": 2, "model.hidden": 128, "model.ff": 256, "model.heads": 4,
    "model.kv_heads": 2, "model.head_dim": 64, "model.vocab_size": 1024,
    "data.sequence_length": 256, "data.batch_size": 4, "mesh.sequence": 1,
    "optimizer.learning_rate": 1e-3,
}  # fmt: skip


def losses(tmp_path, changes):
    """First and last of three steps of the trainer, forward and backward."""
    pytest.importorskip("gin", reason="the trainer needs jaxmem[train]")
    from benchmarks import results, run_long_step

    out = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
    options = [f"{k}={v}" for k, v in (TINY | changes).items()]
    run_long_step.main([*options, f"--out={out}"])
    (row,) = results.read(out)
    return [float(row[name]) for name in ("first_loss", "last_loss")]


@pytest.mark.parametrize("attention", ["xla", "cudnn"])
@pytest.mark.parametrize("axis", ["data", "fsdp", "sequence", "tensor"])
def test_steps_of_a_decoder_on_two_devices(axis, attention, tmp_path):
    """With what XLA for GPUs does to hide what is sent."""
    mesh_of(2, "data")
    changes = {"model.attention": attention}
    alone = losses(tmp_path, changes)
    assert alone[1] < alone[0] - 0.05
    # Activations are in bfloat16: 2^-9 of each, averaged over a thousand tokens.
    assert losses(tmp_path, changes | {f"mesh.{axis}": 2}) == pytest.approx(
        alone, abs=2e-2
    )
