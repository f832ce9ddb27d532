"""Adapters of joined and transposed matrices and of experts: PEFT's numbers and files.

adapters/ holds what make_adapters.py recorded. With a directory in the variable
EXPORTS, what is saved stays there, for make_adapters.py --exports to compare.
"""

import functools
import json
import os
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxmem import checkpoints
from jaxmem.models.config import TARGETS as ALL_TARGETS, ModelConfig
from tests.helpers import decoders, seeded
from tests.helpers.cases import full, slow
from tests.helpers.records import forward, record

pytestmark = pytest.mark.usefixtures("quick_compilation")

NAMES = sorted(path.stem for path in seeded.ADAPTERS.glob("*.npz"))
FULL = ("gpt_oss",)
TARGETS = {
    "gemma4_experts": ("gate", "up"),
    "gpt2": ("query", "key", "value", "output", "up"),
    "gpt_neox": ("query", "key", "value", "up"),
    "gpt_oss": ("query", "key", "value", "output", "gate", "up", "down"),
    "mixtral": ("down",),
    "phi3": ("query", "key", "value", "output", "gate", "up", "down"),
    "qwen3_5": ("query", "output"),
}


@functools.cache
def adapter(name):
    return dict(np.load(seeded.ADAPTERS / f"{name}.npz"))


@pytest.fixture
def saved(tmp_path):
    """Directories of a checkpoint, and of PEFT's adapter of it."""

    def save(name):
        base = seeded.write(record(name), tmp_path / name)
        return base, seeded.write_adapter(adapter(name), tmp_path / "adapter")

    return save


@jax.jit
def logits(decoder, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(decoder, tokens, jnp.ones_like(tokens), places)


@pytest.mark.parametrize("name", [(full if n in FULL else slow)(n) for n in NAMES])
def test_numbers_and_files_are_pefts(name, saved, tmp_path):
    base, source = saved(name)
    decoder = checkpoints.load(base, adapter=source)
    assert decoder.config.lora_targets == TARGETS[name]
    expected, places = adapter(name)["logits"], record(name)["places"]
    tokens = jnp.asarray(record(name)["tokens"], jnp.int32)
    atol = 1e-5 * np.abs(expected).max()
    made = logits(decoder, tokens)
    np.testing.assert_allclose(made[:, places], expected, rtol=0, atol=atol)
    assert np.abs(expected - record(name)["logits"]).max() > 100 * atol
    kept = os.environ.get("EXPORTS")
    out = (pathlib.Path(kept) if kept else tmp_path / "out") / name
    checkpoints.save_adapter(out, decoder, base=str(base))
    again = checkpoints.load(base, adapter=out)
    assert again.config == decoder.config
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, decoder)))
    merged = checkpoints.merge(decoder)
    assert_merged(merged, decoder)
    checkpoints.save(tmp_path / "whole", merged, like=base)
    whole = checkpoints.load(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (whole, merged)))


def assert_merged(merged, decoder):
    """Each adapted weight is W + alpha / rank · A B in float64, to float32's rounding.

    Logits would say less: those of the merged weights differ from the recorded ones by
    rounding in all layers, as much as on the processor at hand.
    """
    given, got = (
        flatten_dict(nnx.to_pure_dict(nnx.split(x)[1]), sep="/")
        for x in (decoder, merged)
    )
    adapted = [x.removesuffix("lora_a") for x in given if x.endswith("/lora_a")]
    assert adapted and len(got) == len(given) - 2 * len(adapted)
    factor = decoder.config.lora_alpha / decoder.config.lora_rank
    for path in adapted:
        A, B, W = (np.float64(given[path + x]) for x in ("lora_a", "lora_b", "kernel"))
        size = np.abs(W) + factor * np.abs(A) @ np.abs(B)
        error = np.abs(got[path + "kernel"] - (W + factor * A @ B))
        rounding = np.finfo(np.float32).eps * (A.shape[-1] + 2) / 2
        assert (error <= rounding * size).all(), path


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "phi3",
            {"rank_pattern": {"qkv_proj": 6}},
            r"layers.0.self_attn.qkv_proj.lora_A.weight must have shape \(6, 64\)",
        ),
        (
            "gpt_oss",
            {"target_parameters": ["mlp.experts.gate_up_proj_bias"]},
            r"target_parameters \['mlp.experts.gate_up_proj_bias'\] are not implemente",
        ),
        (
            "gpt_oss",
            {"target_parameters": ["layers.0.mlp.experts.down_proj"]},
            "experts.base_layer.lora_A.weight belongs to no matrix that can",
        ),
        (
            "gpt_oss",
            {"target_parameters": None},
            "experts.* belongs to no matrix that can",
        ),
        ("phi3", {"fan_in_fan_out": True}, "fan_in_fan_out=True is not implemented"),
    ],
)
def test_inconsistent_adapter_config_is_refused(name, change, message, saved):
    base, source = saved(name)
    config = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(checkpoints.CheckpointError, match=message):
        checkpoints.load(base, adapter=source)


def test_one_rank_for_joined_matrices_is_refused(saved, tmp_path):
    base, source = saved("mixtral")
    config = json.loads((source / "adapter_config.json").read_text())
    name = "base_model.model.model.layers.{}.mlp.experts.lora_{}.weight"
    config |= {
        "r": 3, "target_parameters": ["experts.gate_up_proj"],
        "rank_pattern": {"experts.gate_up_proj": 6},
        "alpha_pattern": {"experts.gate_up_proj": 10},
    }  # fmt: skip
    made = {
        name.format(layer, kind): np.ones(shape, np.float32)
        for layer in range(3)
        for kind, shape in (("A", (24, 64)), ("B", (192, 24)))
    }
    (source / "adapter_config.json").write_text(json.dumps(config))
    save_file(made, source / "adapter_model.safetensors")
    with pytest.raises(
        checkpoints.CheckpointError, match="has rank 6 for 2 joined mat"
    ):
        checkpoints.load(base, adapter=source)


def test_save_adapter_warns_of_peft_placement(tmp_path):
    base = seeded.write(record("qwen3_next"), tmp_path / "base")
    model = checkpoints.read_config(base).model
    changes = {"lora_rank": 2, "lora_targets": ("down",), "dtype": "float32"}
    decoder = decoders.drawn(model.replaced(changes))
    with pytest.warns(
        UserWarning, match="shared_expert.down_proj' in .* as adapters of exp"
    ):
        checkpoints.save_adapter(tmp_path / "out", decoder, base=str(base))
    again = checkpoints.load(base, adapter=tmp_path / "out")
    assert again.config.lora_targets == ("down",)


@pytest.mark.parametrize("target", ["down", slow("gate"), slow("up")])
def test_save_adapter_without_base_names_experts(target, tmp_path):
    base = seeded.write(record("qwen3_moe"), tmp_path / "base")
    model = checkpoints.read_config(base).model
    changes = {"lora_rank": 2, "lora_targets": (target,), "dtype": "float32"}
    decoder = decoders.drawn(model.replaced(changes))
    checkpoints.save_adapter(tmp_path / "out", decoder)
    checkpoints.save_adapter(tmp_path / "named", decoder, base=str(base))
    out, named = (tmp_path / x / "adapter_model.safetensors" for x in ("out", "named"))
    assert out.read_bytes() == named.read_bytes()
    read = ("down",) if target == "down" else ("gate", "up")  # PEFT joins these two
    assert checkpoints.load(base, adapter=out.parent).config.lora_targets == read


EXPERTS = {"experts.count": 4, "experts.per_token": 2, "experts.ff": 8}
OF_EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@pytest.mark.parametrize(
    ("switches", "modules", "parameters"),
    [
        ({}, {"gate_proj", "up_proj", "down_proj"}, set()),
        ({"feed_forwards": ("experts",), **EXPERTS}, set(), OF_EXPERTS),
        (
            {
                "feed_forwards": ("dense_and_experts",),
                "self_attn.gate": True,
                **EXPERTS,
            },
            {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
            OF_EXPERTS,
        ),
    ],
)
def test_save_adapter_without_base_names_all_matrices(
    switches, modules, parameters, tmp_path
):
    model = ModelConfig(
        vocab_size=32, hidden=16, ff=16, layers=1, heads=2, kv_heads=1, head_dim=8,
        lora_rank=2, lora_targets=ALL_TARGETS,
    ).replaced(switches)  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*PEFT 0.21 reads the adapters")
        checkpoints.save_adapter(tmp_path / "out", decoders.drawn(model))
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {*said["target_modules"]} == attention | modules
    assert {*(said["target_parameters"] or ())} == parameters
