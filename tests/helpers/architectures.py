"""Published config.json files, and tiny configs of each architecture."""

import json
import pathlib

from jaxmem.models.decoder import ModelConfig

# config.json of published models, and of Llama 3.1 its rope_scaling.
CHECKPOINTS = pathlib.Path(__file__).parents[1] / "checkpoints"
PUBLISHED = json.loads((CHECKPOINTS / "published.json").read_text())
LLAMA4, QWEN3, LLAMA3 = (PUBLISHED[x] for x in ("llama4", "qwen3", "llama3"))
GEMMA2, GEMMA3, GEMMA3_4B = (PUBLISHED[x] for x in ("gemma2", "gemma3", "gemma3_4b"))
SCALED = PUBLISHED["scaled"]
SMALL = ModelConfig(
    layers=3, hidden=32, ff=48, heads=4, kv_heads=2, head_dim=10, vocab_size=40
)
GEMMA = {
    "mlp.activation": "gelu",
    "norm.offset": True,
    "norm.post": True,
    "embedding.scaled": True,
}
WINDOW = {"pattern": ("local", "global"), "self_attn.window": 4}
KNOWN = {
    "llama": {},
    "llama_long": {
        "rope.scaling": "llama3",
        "rope.factor": 8.0,
        "rope.original_length": 16,
    },
    "llama_linear": {"rope.scaling": "linear", "rope.factor": 4.0, "tied": False},
    "qwen3": {"qk_norm.enabled": True, "mlp.activation": "gelu"},
    "qwen3_window": {"qk_norm.enabled": True, **WINDOW},
    "qwen2": {"self_attn.qkv_bias": True, "tied": False, "norm.eps": 1e-5},
    "mistral": {"pattern": ("local",), "self_attn.window": 4},
    "gemma2": {"logits.softcap": 3.0, "self_attn.softcap": 2.0, **GEMMA},
    "gemma3": {
        "qk_norm.enabled": True,
        "rope.local_theta": 50.0,
        "self_attn.scale": 7**-0.5,
        **WINDOW,
        **GEMMA,
    },
}
