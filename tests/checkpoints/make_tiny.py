"""Makes tiny/: random checkpoints of every architecture, and what torch makes of them.

Run with torch, transformers and peft (2.13, 5.23 and 0.21 wrote those that are
committed):

    python tests/checkpoints/make_tiny.py

Each directory has what `save_pretrained` writes (weights in bfloat16) and expected.npz:
tokens [B, T], logits of the same weights in float64 [B, T, V], and `bfloat16`: logits
that were made in that type.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import peft
import torch
import transformers as tf

TINY = pathlib.Path(__file__).parent / "tiny"
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 3}
LOCAL, GLOBAL = "sliding_attention", "full_attention"

# Caps, windows and scales are small, so that every one of them changes the logits.
MODELS = {
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2_window": (
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1
        ),
    ),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, head_dim=8)),
    "llama": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**SIZES, head_dim=8, rope_parameters=LLAMA3),
    ),
    "llama_linear": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**SIZES, rope_parameters=LINEAR, tie_word_embeddings=True),
    ),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**SIZES, sliding_window=3)),
    "gemma2": (
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config(
            **SIZES, **GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=4.0
        ),
    ),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig(
            **SIZES,
            **GEMMA,
            layer_types=[LOCAL, GLOBAL, LOCAL],
            rope_parameters={
                LOCAL: {"rope_type": "default", "rope_theta": 50.0},
                GLOBAL: LINEAR,
            },
        ),
    ),
}
MODELS["gemma3_images"] = (
    tf.Gemma3ForConditionalGeneration,
    tf.Gemma3Config(
        text_config=MODELS["gemma3"][1].to_dict(),
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 4,
            "patch_size": 2,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        boi_token_index=36,
        eoi_token_index=37,
        image_token_index=38,
        attn_implementation="eager",
    ),
)
SHARDED = {"mistral": "6KB"}  # the largest file


def randomise(model, seed):
    """Norms near what they start as, everything else large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        start = weight.data if "norm" in name else 0.0
        weight.data = (start + 0.3 * noise).to(torch.bfloat16)


def expected(model):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 40, (2, 12)))
    with torch.no_grad():
        logits = model.double()(tokens).logits
    return {"tokens": tokens.numpy(), "logits": logits.numpy()}


def in_bfloat16(kind, directory, tokens):
    model = kind.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


ADAPTERS = {
    "adapter": dict(
        target_modules="q_proj k_proj v_proj o_proj gate_proj up_proj down_proj "
        "lm_head".split()
    ),
    "whole": dict(
        target_modules="all-linear", use_rslora=True,
        modules_to_save=["embed_tokens", "lm_head"],
    ),
}  # fmt: skip


def adapt(directory, name, seed=100):
    """A PEFT adapter, and the logits with it."""
    config = peft.LoraConfig(r=3, lora_alpha=5, **ADAPTERS[name])
    base = tf.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    )
    model = peft.get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter, weight in model.named_parameters():
        if "lora_" in parameter or "modules_to_save" in parameter:
            weight.data = 0.3 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(directory / name)
    np.savez_compressed(directory / name / "expected.npz", **expected(model))
    (directory / name / "README.md").unlink()
    said = directory / name / "adapter_config.json"
    config = json.loads(said.read_text()) | {"base_model_name_or_path": directory.name}
    said.write_text(json.dumps(config, indent=2) + "\n")


def main():
    shutil.rmtree(TINY, ignore_errors=True)
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        model = kind(config).eval()
        randomise(model, seed)
        model.tie_weights()
        directory = TINY / name
        model.save_pretrained(directory, max_shard_size=SHARDED.get(name, "1GB"))
        made = expected(model)
        made["bfloat16"] = in_bfloat16(kind, directory, made["tokens"])
        np.savez_compressed(directory / "expected.npz", **made)
        (directory / "generation_config.json").unlink()
        if name == "qwen3":
            for name in ADAPTERS:
                adapt(directory, name)
        print(name, sum(file.stat().st_size for file in directory.iterdir()))


if __name__ == "__main__":
    sys.exit(main())
