"""Utilisation: what counts as a model's own products, and whose peak is known."""

import dataclasses

import jax
import pytest
from flax import nnx

from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.weights import split_weights
from jaxmem.train import mfu

QWEN3 = ModelConfig().replaced(
    {
        "layers": 28,
        "hidden": 1024,
        "ff": 3072,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
        "qk_norm.enabled": True,
        "vocab_size": 151_936,
    }
)
MATRICES = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072)


def flops(config, trainable=None, length=4096):
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    weights = nnx.to_pure_dict(nnx.split(decoder)[1])
    parts = jax.eval_shape(lambda w: split_weights(w, trainable), weights)
    return mfu.flops_per_token(config, *parts, length)


def test_flops_of_qwen3_0_6b():
    head, attention = 151_936 * 1024, 12 * 28 * 16 * 128 * 4096
    assert flops(QWEN3) == 6 * (MATRICES + head) + attention
    untied = dataclasses.replace(QWEN3, tied=False)
    assert flops(untied) == flops(QWEN3)  # the look-up in a table of its own is free


def test_local_layers_see_their_window_alone():
    changes = {"pattern": ("local", "global"), "self_attn.window": 1024}
    local = QWEN3.replaced(changes)
    assert flops(QWEN3) - flops(local) == 12 * 14 * 16 * 128 * (4096 - 1024)
    assert flops(QWEN3, length=512) == flops(local, length=512)


def test_frozen_matrices_have_no_gradient():
    adapted = dataclasses.replace(QWEN3, lora_rank=8, lora_targets=("query",))
    adapters = 28 * 8 * (1024 + 2048)
    frozen = 2 * (MATRICES + 151_936 * 1024)
    assert flops(adapted, "/lora_") == flops(QWEN3) - frozen + 6 * adapters


def test_token_multiplies_its_routed_experts():
    sparse = {"experts.count": 128, "experts.per_token": 8, "experts.ff": 768}
    mixed = QWEN3.replaced({"feed_forwards": ("experts",)} | sparse)
    router, chosen = 128 * 1024, 8 * 3 * 768 * 1024
    more = 28 * (router + chosen - 3 * 3072 * 1024)
    assert flops(mixed) == flops(QWEN3) + 6 * more


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H200", "float16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA GeForce GTX 1080", "bfloat16", None),
    ],
)
def test_peaks(kind, dtype, peak):
    assert mfu.peak_of(kind, dtype) == peak


def test_processor_has_no_known_peak():
    if jax.default_backend() == "cpu":
        assert mfu.peak_of(jax.devices()[0].device_kind, "bfloat16") is None
