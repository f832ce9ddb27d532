"""Makes adapters/: PEFT's adapters of all kinds, and their logits.

Run with torch, transformers and peft (2.13, 5.24 and 0.21 wrote those that are
committed), from the root of the repository:

    python -m tests.checkpoints.make_adapters [NAME...]
    python -m tests.checkpoints.make_adapters --exports DIRECTORY

Each NAME.npz is of the checkpoint of that name in families/; variants/ has those whose
names go on after a "-", of other kinds than plain LoRA. It has `config` and
`tensors` (JSON: adapter_config.json, and each tensor's shape), from which seeded.py
draws the weights again, and `logits` of the record's tokens at its places. Those
of variants are in float64, and `error` is that of PEFT in float32. --exports
compares adapters that jaxmem saved (tests/checkpoints/test_joined_adapters.py with the
variable EXPORTS; likewise test_adapter_variants.py).
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import peft
import safetensors.numpy
import torch
import transformers as tf

from tests.helpers import seeded

_ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
_EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
ADAPTERS = {
    "phi3": dict(target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "gpt2": dict(target_modules=["c_attn", "attn.c_proj", "c_fc"], fan_in_fan_out=True),
    "gpt_neox": dict(target_modules=["query_key_value", "dense_h_to_4h"]),
    "qwen3_5": dict(target_modules=["q_proj", "o_proj"]),
    "gpt_oss": dict(target_modules=_ATTENTION, target_parameters=_EXPERTS),
    "mixtral": dict(target_modules=[], target_parameters=["experts.down_proj"]),
    "gemma4_experts": dict(
        target_modules=["gate_proj", "up_proj"],
        target_parameters=["experts.gate_up_proj"],
    ),
}
VARIANTS = {
    "phi3-ranks": dict(
        target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        rank_pattern={"o_proj": 5, "layers.1.mlp.down_proj": 2, "qkv_proj": 4},
        alpha_pattern={"o_proj": 2, "gate_up_proj": 0.5}, lora_alpha=1,
    ),
    "mistral-ranks": dict(
        target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=True,
        rank_pattern={"v_proj": 7}, alpha_pattern={"up_proj": 9},
    ),
    "mistral-modules": dict(target_modules=r".*layers\.[02]\..*(q|down)_proj"),
    "phi3-layers": dict(
        target_modules=["qkv_proj", "down_proj"], layers_to_transform=[0, 2],
        layers_pattern="layers",
    ),
    "gpt2-layers": dict(
        target_modules=["c_attn", "c_fc"], layers_to_transform=1, fan_in_fan_out=True
    ),
    "phi3-dora": dict(
        target_modules=["qkv_proj", "o_proj", "down_proj"], use_dora=True,
        layers_to_transform=[1], alpha_pattern={"o_proj": 2},
    ),
    "gpt2-dora": dict(target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True),
    "mistral-dora": dict(target_modules=["q_proj", "up_proj"], use_dora=True),
}  # fmt: skip


def logits(model, record):
    tokens = torch.from_numpy(record["tokens"].astype(int))
    with torch.no_grad():
        return model.eval()(tokens).logits.numpy()[:, record["places"]]


def base(name, directory):
    record = np.load(seeded.RECORDS / f"{name}.npz")
    path = seeded.write(record, pathlib.Path(directory) / name)
    model = tf.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    return model, record


def write(name, options, directory):
    folder, of_base = seeded.ADAPTERS, name.partition("-")[0]
    folder = folder / "variants" if of_base != name else folder
    model, record = base(of_base, directory)
    options = {k: list(x) if isinstance(x, tuple) else x for k, x in options.items()}
    options = dict(r=3, lora_alpha=5, task_type="CAUSAL_LM") | options
    config = peft.LoraConfig(**options)
    path = pathlib.Path(directory) / "adapter"
    peft.get_peft_model(model, config).save_pretrained(path)
    said = json.loads((path / "adapter_config.json").read_text())
    said["base_model_name_or_path"] = of_base
    held = safetensors.numpy.load_file(path / "adapter_model.safetensors")
    made = {
        "config": json.dumps(said),
        "tensors": json.dumps({key: list(x.shape) for key, x in held.items()}),
    }
    seeded.write_adapter(made, path)
    model = peft.PeftModel.from_pretrained(base(of_base, directory)[0], path)
    made["logits"] = logits(model, record).astype(np.float32)
    if of_base != name:
        single, exact = made["logits"], logits(model.double(), record)
        made |= {"logits": exact, "error": np.abs(single - exact).max()}
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **made)
    print(name, (folder / f"{name}.npz").stat().st_size, flush=True)


def compare(exports):
    for path in sorted(pathlib.Path(exports).iterdir()):
        with tempfile.TemporaryDirectory() as directory:
            model, record = base(path.name.partition("-")[0], directory)
            made = logits(peft.PeftModel.from_pretrained(model, path), record)
        (recorded,) = seeded.ADAPTERS.rglob(f"{path.name}.npz")
        expected = np.load(recorded)["logits"]
        error = np.abs(made - expected).max() / np.abs(expected).max()
        print(f"{path.name}: {error:.1e}", flush=True)
        assert error <= 1e-5, path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="of adapters; all")
    parser.add_argument("--exports")
    given = parser.parse_args()
    if given.exports:
        return compare(given.exports)
    seeded.ADAPTERS.mkdir(exist_ok=True)
    for name, options in (ADAPTERS | VARIANTS).items():
        if given.names and name not in given.names:
            continue
        with tempfile.TemporaryDirectory() as directory:
            write(name, options, directory)


if __name__ == "__main__":
    main()
