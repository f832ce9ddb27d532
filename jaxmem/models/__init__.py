"""A decoder-only transformer: config, layers, KV cache, LoRA adapters, sampling."""

from jaxmem import _imports

_imports.require(__name__, "train", "flax", "optax")

__getattr__, __dir__ = _imports.lazy(
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
