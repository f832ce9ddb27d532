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
GEMMA = dict(activation="gelu", norm_offset=True, post_norms=True, embed_scale=True)
WINDOW = dict(pattern=("local", "global"), window=4)
KNOWN = {
    "llama": {},
    "llama_long": dict(rope_scaling="llama3", rope_factor=8.0, rope_original=16),
    "llama_linear": dict(rope_scaling="linear", rope_factor=4.0, tied=False),
    "qwen3": dict(qk_norm=True, activation="gelu"),
    "qwen3_window": dict(qk_norm=True, **WINDOW),
    "qwen2": dict(qkv_bias=True, tied=False, norm_eps=1e-5),
    "mistral": dict(pattern=("local",), window=4),
    "gemma2": dict(softcap=3.0, attention_softcap=2.0, **GEMMA),
    "gemma3": dict(
        qk_norm=True, local_rope_theta=50.0, attention_scale=7**-0.5, **WINDOW, **GEMMA
    ),
}
