"""Layers of several structures: their stacks, and a decoder that runs them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import remat
from jaxmem.models import config, feed_forward, layers, structure
from jaxmem.models.decoder import ModelConfig
from tests import decoders

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ModelConfig(
    layers=5, hidden=16, ff=24, heads=2, kv_heads=1, head_dim=8, vocab_size=31
)


class Wide(feed_forward.FeedForward):
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


def test_an_unknown_part_is_named():
    with pytest.raises(ValueError, match="feed_forwards must be of 'dense', 'wide', a"):
        dataclasses.replace(SMALL, feed_forwards=("mixed",))
    with pytest.raises(ValueError, match="mixers must be of .*, at least one"):
        dataclasses.replace(SMALL, mixers=())


@pytest.mark.parametrize("policy", ["full", remat.Policy(save=("q",), last=1)])
def test_stacks_run_in_the_order_of_the_layers(policy):
    cycle = ("wide", "dense")
    pattern = dict(pattern=("local", "global"), window=2)
    model = dataclasses.replace(SMALL, feed_forwards=cycle, **pattern)
    decoder = decoders.drawn(model, policy=policy)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 6))
    places = jnp.broadcast_to(jnp.arange(6), tokens.shape)
    sight = layers.Sight(jnp.ones((2, 6), jnp.int32), jnp.asarray(2))

    def by_hand(decoder):
        from jaxmem.models import positions

        frequencies = positions.rope_frequencies(model)
        tables = positions.rope_tables(places, frequencies)
        x = decoder.embed(tokens)
        for layer in range(5):
            (name, at) = {
                i: (stack.name, n)
                for stack in structure.stacks(model).values()
                for n, i in enumerate(stack.layers)
            }[layer]
            definition, weights = nnx.split(getattr(decoder, name))
            block = nnx.merge(definition, jax.tree.map(lambda w, at=at: w[at], weights))
            seen = sight._replace(window=jnp.asarray(2 if layer % 2 == 0 else 6))
            x = block(x, seen, tables)
        return decoder.norm(x)

    @jax.jit
    def whole(decoder):
        def total(decoder):
            made = decoder(tokens, jnp.ones_like(tokens), places)
            return jnp.sum(made**2), made

        of_sum, made = jax.grad(total, has_aux=True)(decoder)
        return made, of_sum

    expected = jax.jit(by_hand)(decoder)
    made, of_sum = whole(decoder)
    np.testing.assert_allclose(made, expected, atol=1e-5)
    assert all(jnp.abs(w).max() > 0 for w in jax.tree.leaves(of_sum.blocks_2))
    if policy == "full":  # no other is read by what follows
        made, _ = decoders.stepwise(decoder, tokens, np.array([3, 3]), 3)
        np.testing.assert_allclose(made, expected[:, 2:], atol=1e-5)
