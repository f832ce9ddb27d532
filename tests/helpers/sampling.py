"""Small decoders, prompts, and runs of the sampler."""

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

LAYERS_OF_ATTENTION = {
    "layers": 3,
    "pattern": ("local", "chunked", "chunked"),
    "self_attn.window": 3,
    "mixers": ("attention", "attention", "reuse"),
}
OTHER_PARTS = {
    "layers": 2,
    "mixers": ("delta", "latent"),
    "feed_forwards": ("dense", "experts"),
    "delta.heads": 2,
    "delta.key_dim": 6,
    "delta.value_dim": 4,
    "latent.kv_rank": 6,
    "latent.rope_head_dim": 4,
    "latent.query_rank": 5,
    "experts.count": 3,
    "experts.per_token": 2,
    "experts.ff": 8,
    "experts.shared_ff": 4,
}
# Rows that pass so many tokens are read again.
LONG = {
    "rope.scaling": "listed",
    "rope.short_factors": (1.0,) * 4,
    "rope.long_factors": (9.0,) * 4,
    "rope.limit": 7,
}
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
    return decoders.drawn(SMALL.replaced(changes))


@functools.cache
def sampler(**settings):
    config = SamplingConfig(**settings)

    @jax.jit
    def run(model, prompts, lengths, key):
        if model.config.experts.count is None:
            return sample(model, prompts, lengths, key, config, eos_id=EOS, pad_id=PAD)
        made = Sampler(config, (EOS,), PAD, records=True)
        return made.complete(model, prompts, lengths, key)

    return run


def run(model, prompts=PROMPTS, lengths=LENGTHS, seed=0, **settings):
    settings = {"max_new_tokens": 12, "temperature": 1.0, **settings}
    made = sampler(**settings)(model, prompts, lengths, jax.random.key(seed))
    return jax.device_get(made)
