"""Layers of several structures: their stacks, and a decoder that runs them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import remat
from jaxmem.models import config, feed_forward, layers, positions, structure
from jaxmem.models.decoder import ModelConfig
from tests.helpers import decoders

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ModelConfig(
    layers=5, hidden=16, ff=24, heads=2, kv_heads=1, head_dim=8, vocab_size=31
)


class Wide(feed_forward.DenseFeedForward):
    """A feed-forward part of another structure: it has twice the width."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(dataclasses.replace(config, ff=2 * config.ff), rngs=rngs)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(config, "FEED_FORWARDS", ("dense", "wide"))
    monkeypatch.setitem(layers.FEED_FORWARDS, "wide", Wide)


@pytest.mark.parametrize(
    ("cycle", "expected"),
    [
        (("dense",), [{"blocks": (0, 1, 2, 3, 4)}]),
        (
            ("wide", "dense"),
            [{"blocks": (0, 2), "blocks_1": (1, 3)}, {"blocks_2": (4,)}],
        ),
        (
            ("wide", "dense", "dense", "dense", "dense"),
            [{"blocks": (0,)}, {"blocks_1": (1, 2, 3, 4)}],
        ),
        (
            ("wide", "wide", "dense", "wide", "wide"),
            [{"blocks": (0, 1)}, {"blocks_1": (2,)}, {"blocks_2": (3, 4)}],
        ),
    ],
)
def test_layers_are_divided_into_stacks(cycle, expected):
    model = dataclasses.replace(SMALL, feed_forwards=cycle)
    runs = structure.runs(model)
    assert [{stack.name: stack.layers for stack in run} for run in runs] == expected
    for stack in structure.stacks(model).values():
        kinds = {cycle[layer % len(cycle)] for layer in stack.layers}
        assert {*stack.config.feed_forwards} == kinds
    assert structure.stacks(model)["blocks"] == runs[0][0]


def test_unknown_part_is_named():
    with pytest.raises(ValueError, match="feed_forwards must be of 'dense', 'wide', a"):
        dataclasses.replace(SMALL, feed_forwards=("mixed",))
    with pytest.raises(ValueError, match="mixers must be of .*, at least one"):
        dataclasses.replace(SMALL, mixers=())


@pytest.mark.slow
def test_stacks_run_in_the_order_of_the_layers():
    model = SMALL.replaced(
        {
            "feed_forwards": ("wide", "dense"),
            "pattern": ("local", "global"),
            "self_attn.window": 2,
        }
    )
    tokens = np.random.default_rng(0).integers(0, 31, (2, 6))
    places = jnp.broadcast_to(jnp.arange(6), tokens.shape)
    where = {
        layer: (stack.name, at)
        for stack in structure.stacks(model).values()
        for at, layer in enumerate(stack.layers)
    }

    @jax.jit
    def by_hand(decoder):
        rope = positions.rope_tables(places, positions.rope_frequencies(model))
        x = decoder.embed(tokens)
        for layer in range(5):
            name, at = where[layer]
            definition, weights = nnx.split(getattr(decoder, name))
            block = nnx.merge(definition, jax.tree.map(lambda w, at=at: w[at], weights))
            window = jnp.asarray(2 if layer % 2 == 0 else 6)
            sight = layers.Sight(jnp.ones((2, 6), jnp.int32), window)
            x, *_ = block.read(x, sight, rope)
        return decoder.norm(x)

    @jax.jit
    def slopes(decoder):
        def total(decoder):
            made = decoder(tokens, jnp.ones_like(tokens), places)
            return jnp.sum(made**2), made

        return jax.grad(total, has_aux=True)(decoder)

    decoder = decoders.drawn(model)
    expected = by_hand(decoder)
    for policy in ("full", remat.Policy(save=("q",), last=1)):
        of_sum, made = slopes(decoders.drawn(model, policy=policy))
        np.testing.assert_allclose(made, expected, atol=1e-5)
        assert all(jnp.abs(w).max() > 0 for w in jax.tree.leaves(of_sum.blocks_2))
    made, _ = decoders.stepwise(decoder, tokens, np.array([3, 3]), 3)
    np.testing.assert_allclose(made, expected[:, 2:], atol=1e-5)
