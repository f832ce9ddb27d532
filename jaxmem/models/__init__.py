"""A decoder-only transformer: config, layers, KV cache, LoRA adapters, sampling."""

import typing

from jaxmem.base import imports

imports.require(__name__, "train", "flax", "optax")

if typing.TYPE_CHECKING:
    from jaxmem.models import (
        config as config,
        decoder as decoder,
        kv_cache as kv_cache,
        layers as layers,
        lora as lora,
        partitioning as partitioning,
        positions as positions,
        sampling as sampling,
        ulysses as ulysses,
        weights as weights,
    )
else:
    __getattr__, __dir__ = imports.lazy(
        __name__,
        "config",
        "decoder",
        "kv_cache",
        "layers",
        "lora",
        "partitioning",
        "positions",
        "sampling",
        "ulysses",
        "weights",
    )
