"""Small decoders, prompts, and runs of the sampler."""

import dataclasses
import functools

import jax
import numpy as np

from jaxmem.models.decoder import ModelConfig
from jaxmem.models.sampling import (
    Sampler,
    SamplingConfig,
    sample,
)
from tests.helpers import decoders

LAYERS_OF_ATTENTION = dict(
    layers=3, pattern=("local", "chunked", "chunked"), window=3,
    mixers=("attention", "attention", "reuse"),
)  # fmt: skip
OTHER_PARTS = dict(
    layers=2, mixers=("delta", "latent"), feed_forwards=("dense", "experts"),
    delta_heads=2, delta_key_dim=6, delta_value_dim=4, latent=6, rotated_width=4,
    query_latent=5, experts=3, experts_per_token=2, expert_ff=8, shared_ff=4,
)  # fmt: skip
# Rows that pass so many tokens are read again.
LONG = dict(
    rope_scaling="listed", rope_factors=(1.0,) * 4, rope_long_factors=(9.0,) * 4,
    rope_limit=7,
)  # fmt: skip
SMALL = ModelConfig(
    layers=1,
    hidden=32,
    ff=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=7,
    tied=False,
)
PROMPTS = np.random.default_rng(0).integers(0, 7, (5, 4), np.int32)
LENGTHS = np.array([2, 4, 1, 3, 4], np.int32)
EOS, PAD = 3, 0


@functools.cache
def decoder(**changes):
    return decoders.drawn(dataclasses.replace(SMALL, **changes))


@functools.cache
def sampler(**settings):
    config = SamplingConfig(**settings)

    @jax.jit
    def run(model, prompts, lengths, key):
        if model.config.experts is None:
            return sample(model, prompts, lengths, key, config, eos_id=EOS, pad_id=PAD)
        made = Sampler(config, (EOS,), PAD, records=True)
        return made.complete(model, prompts, lengths, key)

    return run


def run(model, prompts=PROMPTS, lengths=LENGTHS, seed=0, **settings):
    settings = {"max_new_tokens": 12, "temperature": 1.0, **settings}
    made = sampler(**settings)(model, prompts, lengths, jax.random.key(seed))
    return jax.device_get(made)
