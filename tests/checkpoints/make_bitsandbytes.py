"""Makes bitsandbytes/: checkpoints that transformers wrote with bitsandbytes.

Run with torch, transformers, accelerate and bitsandbytes (2.15, 5.24, 1.15 and 0.50
wrote those that are committed); no GPU is needed:

    python tests/checkpoints/make_bitsandbytes.py

Each directory has what `save_pretrained` writes, and expected.npz: tokens [B, T],
logits [B, T, V] in float64 of the decoded weights, and by the name of each coded tensor
every 37th weight of it, in row-major order, as bitsandbytes decodes it.
"""

import pathlib
import shutil
import sys
import tempfile

import bitsandbytes as bnb
import numpy as np
import torch
import transformers as tf

OUT = pathlib.Path(__file__).parent / "bitsandbytes"
STRIDE = 37  # visits every position of a block, because it divides no power of two
SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
# With 320 blocks in a matrix, double quantisation has more than one group of scales.
MODELS = {
    "llama_double": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(**SIZES, intermediate_size=320),
        NF4 | {"bnb_4bit_use_double_quant": True},
    ),
    "qwen3_nf4": (
        tf.Qwen3ForCausalLM,
        tf.Qwen3Config(**SIZES, intermediate_size=64),
        NF4 | {"llm_int8_skip_modules": ["lm_head", "k_proj"]},
    ),
    "qwen3_int8": (
        tf.Qwen3ForCausalLM,
        tf.Qwen3Config(**SIZES | {"num_hidden_layers": 1}, intermediate_size=64),
        {"load_in_8bit": True},
    ),
}


def randomise(model, seed):
    """Norms near what they start as, everything else large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        start = weight.data if "norm" in name else 0.0
        weight.data = (start + 0.1 * noise).to(torch.bfloat16)


def decoded(module):
    """The weight [out, in] that a module of bitsandbytes computes with; None: plain."""
    if isinstance(module, bnb.nn.Linear4bit):
        state = module.weight.quant_state
        return bnb.functional.dequantize_4bit(module.weight.data, state)
    if isinstance(module, bnb.nn.Linear8bitLt):
        return bnb.functional.int8_vectorwise_dequant(
            module.weight.data, module.weight.SCB
        ).to(torch.bfloat16)
    return None


def expected(model, plain):
    """Tokens, logits, and parts of the decoded weights, which `plain` then has."""
    recorded = {}
    for name, module in model.named_modules():
        weight = decoded(module)
        if weight is not None:
            plain.get_submodule(name).weight.data = weight
            recorded[f"{name}.weight"] = weight.flatten()[::STRIDE].float().numpy()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 40, (2, 12)))
    with torch.no_grad():
        logits = plain.double()(tokens).logits
    return recorded | {"tokens": tokens.numpy(), "logits": logits.numpy()}


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    for seed, (name, (kind, config, coding)) in enumerate(MODELS.items()):
        plain = kind(config).eval()
        randomise(plain, seed)
        directory = OUT / name
        with tempfile.TemporaryDirectory() as uncoded:
            plain.save_pretrained(uncoded)
            model = kind.from_pretrained(
                uncoded,
                dtype=torch.bfloat16,
                device_map="cpu",
                quantization_config=tf.BitsAndBytesConfig(**coding),
            )
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        np.savez_compressed(directory / "expected.npz", **expected(model, plain))
        print(name, sum(file.stat().st_size for file in directory.iterdir()))


if __name__ == "__main__":
    sys.exit(main())
