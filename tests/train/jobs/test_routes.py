"""Experts that a sampler chose, which training takes again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models import route_records, sampling
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.weights import merge_module, split_module
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.grpo.policy_report import phases_of
from tests.helpers.cases import slow
from tests.helpers.grpo import SMALL, train
from tests.helpers.runs import changed, drawn

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")

MIXED = {
    "layers": 3,
    "feed_forwards": ("dense", "experts", "experts"),
    "experts.count": 6,
    "experts.ff": 24,
    "experts.per_token": 2,
    "embedding.scaled": False,
}
SIZES = ModelConfig(
    hidden=16, ff=24, heads=2, kv_heads=1, head_dim=8, vocab_size=31
).replaced(MIXED)
REPLAY = changed(SMALL, model=MIXED, grpo=dict(replay_routing=True))


def packed(samples, prompts, lengths):
    """Tokens that were read [B, T], documents, positions, and their routes."""
    rows = [
        np.concatenate([p[:n], s[: m - 1]])
        for p, n, s, m in zip(
            prompts, lengths, samples.tokens, samples.lengths, strict=True
        )
    ]
    width = max(map(len, rows))
    tokens = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    live = np.arange(width) < np.array([[len(row)] for row in rows])
    places = np.tile(np.arange(width), (len(rows), 1))
    return tokens, live.astype(np.int32), places, samples.routes[:, :width]


@pytest.mark.slow
def test_sampler_records_what_its_routers_choose():
    """A forward pass over all tokens chooses the same; others change results."""
    decoder = nnx.merge(*drawn(lambda: Decoder(SIZES, rngs=nnx.Rngs(0))))
    config = sampling.SamplingConfig(max_new_tokens=6)
    prompts = np.random.default_rng(1).integers(0, 31, (4, 5), np.int32)
    lengths = np.array([5, 3, 1, 4], np.int32)

    @jax.jit
    def draw(decoder, key):
        made = sampling.Sampler(config, (9, 10, 11), 0, records=True)
        return made.complete(decoder, prompts, lengths, key)

    samples = jax.device_get(draw(decoder, jax.random.key(2)))
    assert samples.lengths.min() < 6 <= samples.lengths.max()
    tokens, segments, places, found = packed(samples, prompts, lengths)
    assert found.shape[2:] == (2, 2) and found.dtype == np.uint8

    @jax.jit
    def read(decoder, chosen):
        return decoder(tokens, segments, places, None, chosen)

    width = tokens.shape[1]
    own = jax.jit(
        lambda decoder: decoder.prefill(tokens, segments.sum(1), width, records=True)
    )(decoder)[1].routes
    live = segments[..., None, None] > 0
    np.testing.assert_array_equal(np.where(live, own, 0), np.where(live, found, 0))
    given, free, others = (read(decoder, x) for x in (found, None, (found + 1) % 6))
    np.testing.assert_allclose(given[segments > 0], free[segments > 0], atol=1e-5)
    assert np.abs(others - free)[segments > 0].max() > 1e-3


@pytest.mark.full
def test_gradients_reach_given_experts():
    """By finite differences, where the router itself would choose other experts."""
    decoder = nnx.merge(*drawn(lambda: Decoder(SIZES, rngs=nnx.Rngs(0))))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 7), np.int32)
    places, ones = np.tile(np.arange(7), (2, 1)), np.ones((2, 7), np.int32)
    definition, weights = split_module(decoder)
    rest = {k: v for k, v in weights["blocks_1"]["feed_forward"].items()}
    kernel = rest.pop("router")["kernel"]
    given = np.random.default_rng(1).permuted(
        np.tile(np.arange(6, dtype=np.uint8), (2, 7, 2, 1)), axis=-1
    )[..., :2]

    @jax.jit
    def loss(kernel):
        feed_forward = {**rest, "router": {"kernel": kernel}}
        blocks = {**weights["blocks_1"], "feed_forward": feed_forward}
        made = merge_module(definition, {**weights, "blocks_1": blocks})
        with jax.default_matmul_precision("highest"):
            return jnp.sum(jnp.sin(made(tokens, ones, places, None, given)))

    slope = jax.grad(loss)(kernel)
    assert np.abs(slope).min(axis=(0, 1)).max() > 0
    way = jax.random.normal(jax.random.key(5), kernel.shape)
    step = (loss(kernel + 1e-2 * way) - loss(kernel - 1e-2 * way)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(slope, way), step, rtol=2e-2)


def test_sampler_reads_routers_as_they_are_stored():
    sizes = dataclasses.replace(SIZES, dtype="bfloat16", param_dtype="float32")
    decoder = nnx.merge(*drawn(lambda: Decoder(sizes, rngs=nnx.Rngs(0))))
    made = nnx.merge(*decoder.in_compute_type())
    router = made.blocks_1.feed_forward.router.kernel[...]
    np.testing.assert_array_equal(router, decoder.blocks_1.feed_forward.router.kernel)
    assert made.blocks.feed_forward.up.kernel[...].dtype == jnp.bfloat16


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "sections"),
    [
        (
            dict(share_prompts=True, prefix_cut=0.2, row_lengths=(32,)),
            dict(model=dict(layers=2, feed_forwards=("experts",))),
        ),
        slow(dict(prefix_cut=0.5, kl_coefficient=0.1), dict(sampling=dict(slots=8))),
        slow(dict(resample=1, correction="sequence_mask"), dict(mesh=dict(data=2))),
        slow(dict(token_fraction=0.6), dict(sampling=dict(top_k=5))),
    ],
)
def test_equal_routers_choose_recorded_experts(settings, sections, tmp_path):
    """So that each token's experts are its own, wherever it is packed."""
    config = changed(REPLAY, grpo=dict(minibatches=1, **settings), **sections)
    result, _ = train(config, tmp_path, steps=2)
    for step in result.history:
        assert step.rerouted == 0 and step.mismatch_max < 1e-5
        assert step.routers["load_worst"] >= step.routers["load"] >= 1


@pytest.mark.slow
def test_updates_use_recorded_experts(tmp_path, monkeypatch):
    """With a sampler of another router, replay leaves the rest of the mismatch."""
    find = sampling.prepared

    def disturbed(decoder):
        made = find(decoder)
        router = made.blocks_1.feed_forward.router
        router.kernel[...] = -router.kernel[...]
        return made

    monkeypatch.setattr(sampling, "prepared", disturbed)
    told = {}
    for replays in (False, True):
        config = changed(REPLAY, grpo=dict(replay_routing=replays))
        result, _ = train(config, tmp_path / str(replays), steps=2)
        told[replays] = result.history[0]
    assert told[True].rerouted > 0.5 and told[False].rerouted is None
    assert told[True].mismatch_mean < told[False].mismatch_mean


def test_plan_names_what_is_recorded():
    program = PolicyProgram(REPLAY)
    rollout = next(p for p in phases_of(program) if p.name == "rollout")
    assert rollout.parts["routes"] == 32 * 8 * 2 * 2
    of_update = program.micro_batch((2, 16), REPLAY.head).routes
    assert of_update.shape == (2, 16, 2, 2) and of_update.dtype == np.uint8
    assert route_records.dtype(SIZES.replaced({"experts.count": 257})) == np.uint16


def test_replay_without_routes_is_refused():
    replays = dict(replay_routing=True)
    with pytest.raises(ValueError, match="stay False for a model without experts"):
        PolicyProgram(changed(SMALL, grpo=replays))
