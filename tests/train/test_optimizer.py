"""Optimizers by name, held against optax called directly."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.commands import cli
from jaxmem.models.partitioning import Layout, MeshConfig
from jaxmem.train.optimizer import OptimizerConfig, make_optimizer

NAMES = ("adamw", "muon", "adafactor", "lion", "sgd")
RATE, DECAY, STEPS = 0.02, 0.1, 3
TINY = """
data.vocab_size = 320
data.sequence_length = 32
data.batch_size = 4
data.held_out = 0.0
model.layers = 1
model.hidden = 16
model.ff = 24
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
optimizer.warmup_steps = 1
optimizer.schedule = "constant"
run.compare_heads = False
run.checkpoint_every = 2
run.steps = 4
"""

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)


def weights(seed):
    """Two stacked blocks, and what stands outside of them."""
    draw = np.random.default_rng(seed).standard_normal
    arrays = {
        "blocks": {
            "attention": {"query": {"kernel": draw((2, 6, 4)), "bias": draw((2, 4))}},
            "norm": {"scale": draw((2, 6))},
        },
        "embed": {"embedding": draw((9, 6))},
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)


def steps_of(optimizer, params):
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for seed in range(1, STEPS + 1):
        updates, state = update(weights(seed), state, params)
        params = optax.apply_updates(params, updates)
    return params


def decays(params):
    names = {"scale": False, "bias": False, "kernel": True, "embedding": True}
    return jax.tree_util.tree_map_with_path(lambda path, _: names[path[-1].key], params)


EXPECTED = {
    "adamw": lambda: optax.adamw(RATE, 0.9, 0.95, weight_decay=DECAY, mask=decays),
    "lion": lambda: optax.lion(RATE, 0.9, 0.95, weight_decay=DECAY, mask=decays),
    "sgd": lambda: optax.sgd(RATE, momentum=0.9),
    "adafactor": lambda: optax.adafactor(RATE),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_named_optimizer_equals_optax(name):
    decay = DECAY if name in ("adamw", "lion") else 0.0
    config = OptimizerConfig(
        RATE, name=name, weight_decay=decay, clip_norm=None, schedule="constant"
    )
    made = steps_of(make_optimizer(config, optax.constant_schedule(RATE)), weights(0))
    wanted = steps_of(EXPECTED[name](), weights(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), made, wanted)


@pytest.mark.full
@pytest.mark.parametrize("name", ["sgd", "adafactor"])
def test_weight_decay_scales_with_learning_rate(name):
    made = []
    for decay in (0.0, DECAY):
        config = OptimizerConfig(RATE, name=name, weight_decay=decay, clip_norm=None)
        optimizer = make_optimizer(config, optax.constant_schedule(RATE))
        params = weights(0)
        updates, _ = optimizer.update(weights(1), optimizer.init(params), params)
        made.append(updates)
    jax.tree.map(
        lambda with_, without, p, is_decayed: np.testing.assert_allclose(
            with_ - without, -RATE * DECAY * p * is_decayed, atol=1e-7
        ),
        made[1], made[0], weights(0), decays(weights(0)),
    )  # fmt: skip


@pytest.mark.full
def test_muon_updates_matrices_and_adamw_the_rest():
    config = OptimizerConfig(RATE, name="muon", weight_decay=DECAY, clip_norm=None)
    made = steps_of(make_optimizer(config, optax.constant_schedule(RATE)), weights(0))
    query = made["blocks"]["attention"]["query"]
    for layer in range(2):
        muon = optax.contrib.muon(
            RATE, beta=0.9, weight_decay=DECAY, consistent_rms=0.2
        )
        alone = weights(0)["blocks"]["attention"]["query"]["kernel"][layer]
        state, update = muon.init(alone), jax.jit(muon.update)
        for seed in range(1, STEPS + 1):
            slope = weights(seed)["blocks"]["attention"]["query"]["kernel"][layer]
            updates, state = update(slope, state, alone)
            alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(query["kernel"][layer], alone, rtol=2e-5, atol=1e-6)
    others = steps_of(EXPECTED["adamw"](), weights(0))
    for place in (("embed", "embedding"), ("blocks", "norm", "scale")):
        a, b = made, others
        for key in place:
            a, b = a[key], b[key]
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_moments_of_16_bit_weights_are_float32(name):
    optimizer = make_optimizer(OptimizerConfig(name=name), optax.constant_schedule(1))
    params = {"blocks": {"up": {"kernel": jnp.zeros((2, 256, 512), jnp.bfloat16)}}}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    state = jax.eval_shape(optimizer.init, wide)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert after == state
    assert jax.tree.leaves(updates)[0].shape == (2, 256, 512)


def test_factored_moments_take_less_memory():
    shapes = {"blocks": {"up": {"kernel": jnp.zeros((2, 256, 512))}}}

    def bytes_of(name):
        optimizer = make_optimizer(
            OptimizerConfig(name=name), optax.constant_schedule(1)
        )
        leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, shapes))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    size = 4 * 2 * 256 * 512
    assert bytes_of("adamw") == pytest.approx(2 * size, rel=0.01)
    assert bytes_of("adafactor") < 0.01 * size
    for name in ("muon", "lion", "sgd"):
        assert bytes_of(name) == pytest.approx(size, rel=0.01)


def test_moments_lie_on_a_mesh_like_their_weights():
    layout = Layout(MeshConfig(fsdp=2, tensor=2))
    params = {"blocks": {"up": {"kernel": jnp.zeros((2, 256, 512))}}}
    for name in NAMES:
        optimizer = make_optimizer(
            OptimizerConfig(name=name), optax.constant_schedule(1)
        )
        moments = layout.of_moments(jax.eval_shape(optimizer.init, params), params)
        split = [
            x for x in jax.tree.leaves(moments) if not x.sharding.is_fully_replicated
        ]
        assert all(x.shape == (2, 256, 512) for x in split)
        assert len(split) == {"adamw": 2, "adafactor": 0}.get(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor", "lion", "sgd"])
def test_named_optimizer_resumes_and_equals_mesh(name, tmp_path, capsys):
    """Four steps, on four devices the same, and resumed after two of them."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"word{i % 97} of line {i % 13}" for i in range(4000)))
    rate = {"sgd": 0.3, "adafactor": 0.05}.get(name, 3e-3)
    config = tmp_path / "tiny.gin"
    config.write_text(
        TINY + f"data.source = {str(text)!r}\ndata.cache_dir = {str(tmp_path)!r}\n"
        f"optimizer.name = {name!r}\noptimizer.learning_rate = {rate}\n"
    )

    def run(out, *more):
        more = [*more, f"run.out_dir={tmp_path / out}"]
        status = cli.main(["train", str(config), *more])
        lines = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
        return status, [json.loads(line)["loss"] for line in lines]

    _, alone = run("alone")
    assert alone[-1] < alone[0]
    _, sharded = run("mesh", "mesh.fsdp=2", "mesh.tensor=2")
    np.testing.assert_allclose(sharded, alone, rtol=1e-4)
    run("resumed", "run.steps=2")
    _, resumed = run("resumed")
    assert resumed == alone
    status, _ = run("resumed", "run.steps=6", "optimizer.name=adamw")
    assert status == 2 and f"optimizer.name was {name!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(name="adam"), "name must be 'adamw' or 'muon' or"),
        (dict(name="sgd", b2=0.9), "b2=0.9 has no effect with optimizer.name='s"),
        (dict(name="adafactor", eps=1e-6), "eps=1e-06 has no effect"),
        (dict(name="muon", offload=True), "reads whole matrices"),
        (dict(name="adafactor", offload=True), "set adamw, lion or sgd"),
    ],
)
def test_optimizer_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)
