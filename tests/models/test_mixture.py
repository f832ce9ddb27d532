"""Experts: routing against float64, tiles against every expert for every row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models import balance
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.experts import grouped, grouped_loop, grouped_rows, routing
from jaxmem.models.partitioning import Layout, MeshConfig
from jaxmem.planning import roofline
from jaxmem.remat import cost
from jaxmem.train import mfu
from tests.helpers import decoders
from tests.helpers.cases import slow

SMALL = ModelConfig().replaced(
    {
        "layers": 2,
        "hidden": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "vocab_size": 31,
        "feed_forwards": ("experts",),
        "experts.count": 6,
        "experts.per_token": 2,
        "experts.ff": 24,
    }
)


def expert(rows, weights, x, scale):
    (up,) = rows.products(x, weights["up"])
    wide = jax.nn.silu(up + rows.own(weights["bias"])) * scale[:, None]
    return rows.products(wide.astype(x.dtype), weights["down"])[0]


def operands(rows, groups, chosen, hidden=16, ff=24):
    rng = np.random.default_rng(0)
    shapes = {"up": (hidden, ff), "bias": (ff,), "down": (ff, hidden)}
    weights = {
        name: rng.normal(size=(groups, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    order = rng.permuted(np.tile(np.arange(groups), (rows, 1)), axis=1)
    x, scale = rng.normal(size=(rows, hidden)), rng.uniform(size=(rows, chosen))
    made = weights, x, order[:, :chosen], scale
    types = {"f": np.float32, "i": np.int32}
    return jax.tree.map(lambda x: jnp.asarray(x, types[x.dtype.kind]), made)


def everywhere(weights, x, choice, scale):
    ones = jnp.ones(len(x))
    run = functools.partial(expert, grouped_loop.Alike())
    every = jnp.moveaxis(jax.vmap(run, (0, None, None))(weights, x, ones), 0, 1)
    chosen = jnp.take_along_axis(every, choice[..., None], axis=1)
    return jnp.sum(scale[..., None] * chosen, axis=1)


@pytest.mark.parametrize(
    ("rows", "groups", "chosen", "uneven"),
    [(50, 7, 3, True), slow(1, 7, 1, False), slow(300, 2, 2, False)],
)
def test_only_the_chosen_groups_count(rows, groups, chosen, uneven):
    weights, x, choice, scale = operands(rows, groups, chosen)
    if uneven:  # most rows go to three groups, and none to others
        choice = choice.at[:45].set(jnp.array([4, 6, 0]))
        choice = choice.at[45:].set(jnp.array([4, 6, 1]))

    def gradients(function):
        def loss(weights, x, scale):
            return jnp.sum(jnp.sin(function(weights, x, choice, scale)))

        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(weights, x, scale)

    ours = gradients(functools.partial(grouped.apply, expert))
    theirs = gradients(everywhere)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max() + 1e-7)


def test_tiles_hold_each_row_once_by_group():
    choice = operands(200, 5, 2)[2]
    found = jax.jit(grouped_rows.tiles, static_argnums=(1, 2))(choice, 5, 64)
    rows, count = np.asarray(found.rows), int(found.first[-1])
    size = len(rows) // len(found.groups)
    is_row = rows < choice.size
    assert sorted(rows[is_row]) == list(range(choice.size))
    assert not is_row[count * size :].any() and len(np.unique(rows[:size])) == size
    of_rows = np.asarray(choice).reshape(-1)[rows[is_row]]
    np.testing.assert_array_equal(of_rows, np.repeat(found.groups, size)[is_row])


def products(run, *arrays):
    """Operations of a program, each loop over tiles run as often as tiles can be."""
    jaxpr = jax.make_jaxpr(run)(*arrays).jaxpr
    turns = roofline._count_chunks
    return sum(n * cost.operations(e) for e, n in cost.equations(jaxpr, turns))


@pytest.mark.full
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("groups", [8, 64])
def test_expert_work_and_memory_of_routed_rows(groups):
    rows, chosen = 1024, 2
    arrays = operands(rows, groups, chosen, 32, 48)

    def forward(weights, x, choice, scale):
        return grouped.apply(expert, weights, x, choice, scale)

    def backward(weights, x, choice, scale):
        def loss(x):
            return jnp.sum(forward(weights, x, choice, scale) ** 2)

        return jax.grad(loss)(x)

    size = grouped_loop.tile_rows(rows * chosen, groups)
    routed = rows * chosen + groups * size  # each group may have one tile in part
    once = 2 * 2 * 32 * 48
    assert rows * chosen * once <= products(forward, *arrays) <= routed * once
    # Less than one array of an expert's width for every row, wherever it is from.
    tiled = 4 * (size * (6 * 48 + 8 * 32) + 6 * 32 * 48)
    for run in (forward, backward):
        found = jax.jit(run).lower(*arrays).compile().memory_analysis()
        assert found.temp_size_in_bytes <= 2 * 4 * rows * 32 + tiled + 24 * routed
    trained = products(jax.grad(lambda *a: jnp.sum(forward(*a))), *arrays)
    frozen = products(backward, *arrays)
    assert trained - frozen == pytest.approx(products(forward, *arrays))


def test_plan_counts_experts_of_routed_tokens():
    # Two layers of Qwen3-30B-A3B, traced alone.
    config = ModelConfig().replaced(
        {
            "layers": 2,
            "hidden": 2048,
            "ff": 6144,
            "heads": 32,
            "kv_heads": 4,
            "head_dim": 128,
            "vocab_size": 151_936,
            "qk_norm.enabled": True,
            "tied": False,
            "feed_forwards": ("experts",),
            "experts.count": 128,
            "experts.per_token": 8,
            "experts.ff": 768,
            "dtype": "bfloat16",
        }
    )
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(decoder)
    weights, length = nnx.to_pure_dict(state), 4096
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def hidden(weights, tokens):
        return nnx.merge(definition, weights)(tokens, None, jnp.arange(length)[None])

    counted = products(hidden, weights, tokens)
    del weights["head"]  # a third of a step's operations are those of its forward pass
    expected = length * mfu.flops_per_token(config, weights, {}, length) / 3
    assert 1 <= counted / expected <= 1.3  # tiles that are not full


def scores(logits, kind):
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        {"router.renormalised": True, "router.scale": 2.5},
        {"router.scores": "chosen"},
        {
            "router.scores": "sigmoid", "router.groups": 4, "router.groups_kept": 2,
            "router.group_best": 2, "router.correction": True,
        },
        slow({"router.groups": 2, "router.renormalised": True}),
    ],
)  # fmt: skip
def test_routing(changes):
    config = SMALL.replaced({"experts.count": 8, "experts.per_token": 3, **changes})
    rng = np.random.default_rng(0)
    logits, correction = rng.normal(size=(20, 8)), rng.normal(size=8)
    correction = correction if config.router.correction else None
    choose = jax.jit(routing.choose, static_argnums=2)
    got, weights = jax.device_get(choose(logits.astype("f4"), correction, config))
    groups = config.router.groups
    for row, chosen, own in zip(logits, got, weights, strict=True):
        every = scores(row, config.router.scores)
        ranks = every if correction is None else every + correction
        best = np.sort(ranks.reshape(groups, -1))[:, -config.router.group_best :].sum(1)
        kept = np.argsort(-best)[: config.router.groups_kept]
        inside = np.isin(np.arange(8) // (8 // groups), kept)
        expected = np.argsort(-np.where(inside, ranks, -9.0), kind="stable")[:3]
        np.testing.assert_array_equal(chosen, expected)
        wanted = every[expected]
        if config.router.renormalised or config.router.scores == "chosen":
            wanted = wanted / wanted.sum()
        np.testing.assert_allclose(own, config.router.scale * wanted, rtol=1e-5)


def test_router_metrics_of_expert_layers_only():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [1, 1, 1]]))
    chosen = jnp.array([[[0], [0], [2]]])
    choice = balance.Choice(logits[None], chosen, jnp.array([[[0], [1], [2]]]))
    config = SMALL.replaced(
        {
            "layers": 3,
            "feed_forwards": ("dense", "experts", "experts"),
            "experts.count": 3,
            "experts.per_token": 1,
        }
    )
    where, routed = jnp.array([[True, True, False]]), balance.nothing(config)
    assert routed is not None
    routed = balance.add(routed, jnp.int32(1), choice, where, True)
    routed = balance.add(routed, jnp.int32(2), choice, jnp.ones((1, 3), bool), True)
    said = balance.report(routed, 1)
    entropy, even = 1.5 * np.log(2), np.log(3)
    assert said["load"] == pytest.approx((3 + 2) / 2)  # of 2 tokens, and of 3
    assert said["load_worst"] == pytest.approx(3)
    mean = (2 * entropy + even) / 3
    assert said["entropy"] == pytest.approx((entropy + mean) / 2, rel=1e-6)
    assert said["entropy_worst"] == pytest.approx(entropy, rel=1e-6)
    shares = np.array([2.0 + 1 / 3, 1 + 1 / 3, 1 + 1 / 3]) / 5
    assert said["loss"] == pytest.approx(3 * (4 / 5 * shares[0] + 1 / 5 * shares[2]))
    assert balance.rerouted(routed) == pytest.approx(2 / 5)
    assert balance.report(balance.nothing(config), 1) == {}


@functools.partial(jax.jit, static_argnums=0)
def slopes(definition, weights, tokens):
    def loss(weights):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        decoder = nnx.merge(definition, weights)
        documents = jnp.ones_like(tokens).at[1, 5:].set(0)
        hidden, routed = decoder.routed(tokens, documents, places)
        value = jnp.sum(jnp.where(documents[..., None] > 0, jnp.sin(hidden), 0))
        return balance.with_loss(value, routed, decoder.config, 0.5), routed

    return jax.grad(loss, has_aux=True)(weights)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "experts.bias": True,
            "experts.shared_ff": 8,
            "experts.shared_gate": True,
            "router.bias": True,
            "lora_rank": 4,
            "lora_targets": ("gate", "down"),
        },
        {"feed_forwards": ("dense", "experts"), "experts.gate_limit": 1.0},
    ],
)
def test_experts_on_mesh_equal_one_device(changes):
    changes |= {"kv_heads": 2, "vocab_size": 32, "router_aux_loss_coef": 3.0}
    config = SMALL.replaced(changes)
    definition, state = nnx.split(decoders.drawn(config))
    weights, rng = nnx.to_pure_dict(state), np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 32, (4, 8)), jnp.int32)
    alone, routed = slopes(definition, weights, tokens)
    layout = Layout(MeshConfig(fsdp=2, tensor=2))
    with layout.context():
        made = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        definition = nnx.split(made)[0]
        to = layout.of_weights(jax.eval_shape(lambda: weights))
        there = jax.tree.map(lambda w, s: jax.device_put(w, s.sharding), weights, to)
        on_mesh, routed_there = slopes(definition, there, tokens)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), routed_there, routed
    )
    for path, one in jax.tree_util.tree_leaves_with_path(alone):
        other = functools.reduce(lambda tree, key: tree[key.key], path, on_mesh)
        bound = 1e-5 * np.abs(one).max()
        np.testing.assert_allclose(other, one, rtol=0, atol=bound, err_msg=str(path))
    kernel = there["blocks_1" if "dense" in config.feed_forwards else "blocks"]
    kernel = kernel["feed_forward"]["experts"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"experts.count": None},
            "experts.count must be given where feed_forwards has 'experts'",
        ),
        ({"feed_forwards": ("dense",)}, "and only there, got 6"),
        ({"experts.per_token": 7}, "experts.per_token must be at most 6, the experts"),
        (
            {"router.groups": 4},
            "router.groups must be a divisor of experts.count, got 4",
        ),
        ({"router.groups": 3, "experts.per_token": 3}, "at most 2, the experts of"),
        (
            {"experts.shared_gate": True},
            "experts.shared_ff must be given with experts.shared_gate, got None",
        ),
        ({"mlp.gated": False}, "mlp.gated must be True, as experts have a gate"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef must be at least 0"),
    ],
)
def test_invalid_experts_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        SMALL.replaced(changes)
