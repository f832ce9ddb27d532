"""config.json as it is published, and all in it that must not pass in silence."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError, read_config
from jaxmem.checkpoints.families import ropes
from jaxmem.models.decoder import ModelConfig
from jaxmem.train import configuration
from tests.helpers.architectures import (
    GEMMA2,
    GEMMA3,
    GEMMA3_4B,
    LLAMA3,
    LLAMA4,
    QWEN3,
    SCALED,
)
from tests.helpers.seeded import RECORDS

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def read(tmp_path, config, **changes):
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return read_config(tmp_path)


def shipped(tmp_path, name):
    (tmp_path / "run.gin").write_text(f'include "{CONFIGS}/model_{name}.gin"\n')
    return configuration.load(tmp_path / "run.gin")[0].model


# ------------------------------------------------------------------- read


@pytest.mark.parametrize(
    ("config", "name"),
    [(QWEN3, "qwen3_0_6b"), (LLAMA3, "llama3_8b"), (GEMMA2, "gemma2_2b")],
)
def test_published_configs_are_the_shipped_ones(config, name, tmp_path):
    made = read(tmp_path, config)
    assert dataclasses.replace(made.model, pad_row=None) == shipped(tmp_path, name)
    assert made.max_positions == config["max_position_embeddings"]
    assert (made.dtype, made.raw) == ("bfloat16", config)


QWEN3_4B = QWEN3 | {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "max_window_layers": 36,
}  # fmt: skip
QWEN3_MOE = QWEN3_4B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "max_window_layers": 48, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
    "hidden_act": "silu", "attention_bias": True, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 150000, "vocab_size": 201088, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "max_position_embeddings": 131072, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
    "router_aux_loss_coef": 0.9, "output_router_logits": False, "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16", "eos_token_id": 200002, "pad_token_id": 199999,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (QWEN3_4B, "qwen3_4b"), (QWEN3_MOE, "qwen3_30b_a3b"), (GPT_OSS, "gpt_oss_20b"),
        (LLAMA3 | {"rope_scaling": SCALED}, "llama3_1_8b"),
    ],
)  # fmt: skip
def test_configs_for_recipes_have_published_dimensions(config, name, tmp_path):
    made = read(tmp_path, config).model
    own = shipped(tmp_path, name)
    whole = {"pad_row": None, "pattern": own.pattern}  # listed by layer, or cycled
    cycled = (own.pattern * own.layers)[: own.layers]
    assert (made.pattern * made.layers)[: made.layers] == cycled
    assert made.replaced(whole) == own


def test_gemma_3_before_its_layers_were_listed(tmp_path):
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    made = read(tmp_path, GEMMA3 | sizes, vocab_size=262208).model
    assert dataclasses.replace(made, pad_row=None) == shipped(tmp_path, "gemma3_4b")


def test_text_part_of_gemma_3(tmp_path):
    made = read(tmp_path, GEMMA3_4B)
    assert made.model == shipped(tmp_path, "gemma3_4b")
    assert (made.dtype, made.max_positions, made.text_part) == ("bfloat16", 2**17, True)
    again = read(tmp_path, made.raw)  # as a checkpoint of its own
    assert (again.model, again.raw) == (made.model, made.raw)
    assert not again.text_part
    assert made.raw["architectures"] == ["Gemma3ForCausalLM"]
    assert made.raw["eos_token_id"] == [1, 106]
    text = GEMMA3_4B["text_config"] | {"torch_dtype": "float32", "eos_token_id": 1}
    assert read(tmp_path, GEMMA3_4B, text_config=text).raw == made.raw


def test_llama_3_1_scales_its_wavelengths(tmp_path):
    made = read(tmp_path, LLAMA3, rope_scaling=SCALED).model
    scaled = {"rope.scaling": "llama3", "rope.factor": 8.0, "rope.low_factor": 1.0}
    scaled |= {"rope.high_factor": 4.0, "rope.original_length": 8192}
    assert made == shipped(tmp_path, "llama3_8b").replaced(scaled)
    both = {"rope_parameters": SCALED | {"rope_theta": 500000.0}, "rope_theta": None}
    new = {k: v for k, v in (LLAMA3 | both).items() if k[:5] != "rope_" or k in both}
    del new["rope_theta"]
    assert read(tmp_path, new).model == made


def test_mistral_and_qwen_windows(tmp_path):
    mistral = LLAMA3 | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 4096,
    }
    made = read(tmp_path, mistral).model
    assert (made.pattern, made.self_attn.window) == (("local",), 4096)
    made = read(tmp_path, mistral, sliding_window=None).model
    assert (made.pattern, made.self_attn.window) == (("global",), None)
    windows = dict(use_sliding_window=True, sliding_window=64, max_window_layers=27)
    made = read(tmp_path, QWEN3, **windows).model
    assert made.pattern == ("global",) * 27 + ("local",)


def test_absent_keys_default_as_in_transformers(tmp_path):
    needed = {
        key: LLAMA3[key]
        for key in (
            "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "max_position_embeddings", "vocab_size",
        )
    }  # fmt: skip
    made = read(tmp_path, needed).model
    assert (made.kv_heads, made.head_dim, made.tied) == (32, 128, False)
    assert (made.rope.theta, made.norm.eps) == (10_000.0, 1e-6)
    assert read(tmp_path, needed, model_type="gemma2").model.tied


@pytest.mark.parametrize(
    "changes",
    [
        {"unsloth_version": "2025.7.1", "unsloth_fixed": True},
        {"is_llama_config": True, "rope_interleaved": False},
        {"transformers.js_config": {"dtype": "q4"}, "neftune_noise_alpha": 5.0},
        {"num_logits_to_keep": 0, "use_sliding_window": False},
        {"tokenizer_class": "PreTrainedTokenizerFast", "temperature": 0.6},
        {"top_k": 20, "do_sample": True, "repetition_penalty": 1.05},
        {"head_dim": None, "mlp_bias": None, "rms_norm_eps": 1e-5},
        {"num_key_value_heads": 8, "hidden_act": None, "a_new_feature": None},
    ],
)
def test_keys_that_do_nothing_are_accepted(changes, tmp_path):
    assert read(tmp_path, LLAMA3, **changes).model == read(tmp_path, LLAMA3).model


def test_heads_of_keys_of_gpt_neox(tmp_path):
    config = json.loads(str(np.load(RECORDS / "gpt_neox.npz")["config"]))
    expected = read(tmp_path, config).model
    heads = config["num_attention_heads"]
    assert read(tmp_path, config, num_key_value_heads=heads).model == expected
    with pytest.raises(CheckpointError, match="num_key_value_heads=1 is not implement"):
        read(tmp_path, config, num_key_value_heads=1)


def test_null_means_the_default(tmp_path):
    nothing = dict.fromkeys(("num_key_value_heads", "rope_theta", "rms_norm_eps"))
    made = read(tmp_path, LLAMA3, **nothing).model
    assert (made.kv_heads, made.rope.theta, made.norm.eps) == (32, 1e4, 1e-6)


def test_keys_can_be_ignored_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="--ignore-keys beta,gamma$"):
        read(tmp_path, LLAMA3, beta=1, gamma=2)
    with checkpoints.ignoring_keys(["beta", "gamma"]):
        assert read(tmp_path, LLAMA3, beta=1, gamma=2).raw["beta"] == 1
    with pytest.raises(CheckpointError, match="unknown keys 'beta'"):
        read(tmp_path, LLAMA3, beta=1)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA3, {}),
        (LLAMA3, {"rope_scaling": SCALED}),
        (LLAMA3, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (GEMMA3, {}),
    ],
)
def test_both_forms_of_rotary_parameters_agree(config, changes, tmp_path):
    made = read(tmp_path, config, **changes)
    both = ropes.in_both(made.raw)
    assert read(tmp_path, both).model == made.model
    new = {k: v for k, v in both.items() if k[:5] != "rope_" or k == "rope_parameters"}
    assert read(tmp_path, new).model == made.model
    again = ropes.in_both(new)
    old = {k: v for k, v in again.items() if k != "rope_parameters"}
    assert read(tmp_path, old).model == made.model
    assert again["rope_theta"] == config["rope_theta"]


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            LLAMA3,
            dict(architectures=["MambaForCausalLM"]),
            "architecture 'MambaForCausalLM",
        ),
        (
            LLAMA3,
            dict(model_type="mamba", architectures=[]),
            "model_type 'mamba' is not im",
        ),
        (
            LLAMA3,
            dict(model_type="qwen3"),
            "'qwen3' does not belong to LlamaForCausalLM",
        ),
        (
            LLAMA3,
            dict(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
            "short_factor is missing",
        ),
        (
            LLAMA3,
            dict(rope_scaling={"type": "proportional", "factor": 4.0}),
            "rope type 'proportional' is not implemented; known are 'default', 'lin",
        ),
        (LLAMA3, dict(rope_scaling={"type": "linear"}), "factor is missing"),
        (
            LLAMA3,
            dict(rope_scaling={"type": "linear", "factor": 2.0, "beta": 1}),
            "unknown keys 'beta'",
        ),
        (
            LLAMA3,
            dict(rope_parameters={"rope_theta": 10000.0}),
            "rope_parameters disagrees with rope_theta and rope_scaling",
        ),
        (
            LLAMA3,
            dict(rope_parameters=SCALED, rope_scaling=SCALED | {"factor": 4.0}),
            "rope_parameters disagrees with rope_theta and rope_scaling",
        ),
        (
            LLAMA3,
            dict(hidden_act="mish"),
            "hidden_act 'mish' is not implemented; known",
        ),
        (QWEN3, dict(attention_bias=True), "attention_bias=True is not implemented"),
        (QWEN3, dict(mlp_bias=True), "mlp_bias=True is not implemented; only False"),
        (QWEN3, dict(quantization_config={"bits": 4}), "={'bits': 4} does not name a"),
        (QWEN3, dict(quantization_config=4), "quantization_config must be dict or"),
        (LLAMA3, dict(num_experts=8), "unknown keys 'num_experts': jaxmem does not"),
        (LLAMA3, dict(hidden_size="4096"), "hidden_size must be int, got '4096'"),
        (LLAMA3, dict(hidden_size=None), "hidden_size must be int, got None"),
        (LLAMA3, dict(num_key_value_heads=5), "kv_heads must be a divisor of heads="),
        (
            QWEN3,
            dict(layer_types=["full_attention"]),
            "one entry for each layer, 28, got 1",
        ),
        (
            QWEN3,
            dict(layer_types=["chunked_attention"] * 28),
            "layer_types 'chunked_attention' is not implemented",
        ),
        (
            QWEN3,
            dict(layer_types=["sliding_attention"] * 28),
            "sliding_window is missing",
        ),
        (
            GEMMA2,
            dict(use_bidirectional_attention=True),
            "use_bidirectional_attention=T",
        ),
        (
            GEMMA3,
            dict(architectures=GEMMA3_4B["architectures"]),
            "'gemma3_text' does not belong to Gemma3ForConditionalGeneration",
        ),
        (
            GEMMA3_4B,
            dict(architectures=["Gemma3ForCausalLM"]),
            "'gemma3' does not belong to Gemma3ForCausalLM",
        ),
        (GEMMA3_4B, dict(text_config=None), "text_config must be dict, got None"),
        (
            GEMMA3_4B,
            dict(text_config=QWEN3),
            "'qwen3' does not belong to Gemma3ForCausalLM",
        ),
        (GEMMA3_4B, dict(audio_config={}), "unknown keys 'audio_config'"),
        (
            GEMMA3_4B,
            dict(quantization_config={"bits": 4}),
            "={'bits': 4} does not name",
        ),
        (
            GEMMA3_4B,
            dict(text_config=GEMMA3_4B["text_config"] | {"altup": 1}),
            "unknown keys 'altup'",
        ),
        (
            GEMMA3_4B,
            dict(text_config=GEMMA3 | {"tie_word_embeddings": False}),
            "tie_word_embeddings is True, and in text_config False",
        ),
        (
            GEMMA3,
            dict(rope_parameters={"full_attention": {}}),
            "rope_parameters must be for full_attention, sliding_attention, got full",
        ),
        (
            GEMMA3,
            dict(
                rope_parameters={
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                }
            ),
            "rope type 'linear' in sliding_attention is not implemented",
        ),
        (
            LLAMA4,
            dict(layer_types=["chunked_attention"] * 48),
            "layer_types must .* only in layers for which no_rope_layers has 1",
        ),
        (LLAMA4, dict(moe_layers=["1"]), r"moe_layers must be numbers of layers, got "),
        (LLAMA4, dict(router_jitter_noise=0.1), "router_jitter_noise=0.1 is not impl"),
    ],
)
def test_unimplemented_options_are_named(config, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match="config.json: .*" + message):
        read(tmp_path, config, **changes)


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    "coding, message",
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "not read quant_method 'gptq' (GPTQ); name the mo",
        ),
        ({"quant_method": "awq", "bits": 4}, "not read quant_method 'awq' (AWQ)"),
        ({"quant_method": "mxfp4"}, "not read quant_method 'mxfp4' (MXFP4)"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "not read quant_method 'fp8' (FP8)"),
        (
            {"quant_method": "compressed-tensors"},
            "not read quant_method 'compressed-tensors'",
        ),
        (
            {"quant_method": 4},
            "={'quant_method': 4} does not name a quant_method; name the",
        ),
        (
            NF4,
            "matrices are coded in bitsandbytes' 'fp4', which jaxmem does not read; ",
        ),
        (
            NF4 | {"bnb_4bit_quant_type": 4},
            "coded in bitsandbytes' 4, which jaxmem does not",
        ),
        (
            {"quant_method": "bitsandbytes"},
            "sets neither load_in_4bit nor load_in_8bit to true",
        ),
        (
            {"load_in_4bit": True, "load_in_8bit": True},
            "has both load_in_4bit and load_in_8bit; set the one that",
        ),
    ],
)
def test_other_codings_are_refused_by_name(coding, message, tmp_path):
    for config in (QWEN3, GEMMA3_4B):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read(tmp_path, config, quantization_config=coding)


@pytest.mark.parametrize(
    "coding, kind",
    [
        (None, None),
        (NF4 | {"bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ],
)
def test_read_config_names_the_coding(coding, kind, tmp_path):
    for config in (QWEN3, GEMMA3_4B):
        assert read(tmp_path, config, quantization_config=coding).coding == kind
    text = GEMMA3_4B["text_config"] | {"quantization_config": coding}
    assert read(tmp_path, GEMMA3_4B, text_config=text).coding == kind


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA3, dict(architectures=5), "architectures must be list or NoneType, got "),
        (LLAMA3, dict(architectures=[5]), "architectures must list names, got 5"),
        (GEMMA3_4B, dict(architectures=[[]]), "architectures must list names, got "),
        (QWEN3, dict(layer_types=[["a"]]), r"layer_types \['a'\] is not implemented"),
        (LLAMA3, dict(rope_scaling={"rope_type": ["x"]}), r"rope type \['x'\] is not"),
        (LLAMA3, dict(num_hidden_layers=10**7), "num_hidden_layers must be at most 10"),
        (QWEN3, dict(num_attention_heads=0), "num_attention_heads must be above 0, go"),
        (QWEN3, dict(vocab_size=10**30), "vocab_size must be at most 2,147,483,647"),
        (QWEN3, dict(hidden_size=True), "hidden_size must be int, got True"),
        (LLAMA3, dict(rms_norm_eps=1e30), r"rms_norm_eps must be in \(0, 1\), got 1e"),
        (LLAMA3, dict(rope_theta=1e300), "rope_theta must be at most 3.4e"),
        (LLAMA3, dict(rope_theta=0), "rope_theta must be above 0, got 0"),
        (GEMMA2, dict(query_pre_attn_scalar=-1), "query_pre_attn_scalar must be above"),
        (
            GEMMA2,
            dict(final_logit_softcapping=0),
            "final_logit_softcapping must be abo",
        ),
        (
            GEMMA3,
            dict(sliding_window_pattern=10**9),
            "sliding_window_pattern must be a",
        ),
        (
            GEMMA3,
            dict(sliding_window_pattern=0),
            "sliding_window_pattern must be above",
        ),
        (
            QWEN3,
            dict(use_sliding_window=True, sliding_window=8, max_window_layers=-1),
            "max_window_layers must be at least 0, got -1",
        ),
        (
            LLAMA3,
            dict(max_position_embeddings=0),
            "max_position_embeddings must be at ",
        ),
        (LLAMA3, dict(torch_dtype=5), "torch_dtype must be str or NoneType, got 5"),
        (
            GEMMA3,
            dict(rope_parameters={"full_attention": {}, "sliding_attention": 5}),
            "sliding_attention must be dict, got 5",
        ),
        (LLAMA3, dict(hidden_act="x" * 10_000), "hidden_act 'xxx.*xxx' is not implem"),
        (LLAMA3, {"x" * 10_000: 1}, "unknown keys 'xxx.*xxx': jaxmem does"),
    ],
)
def test_values_that_no_config_can_have(config, changes, message, tmp_path):
    with pytest.raises(CheckpointError, match="config.json: " + message) as raised:
        read(tmp_path, config, **changes)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper than 100"),
        ('{"a": ' + "1" * 5000 + "}", "an integer of 5,000 digits is too large"),
        ('{"rms_norm_eps": 1e999}', "the number 1e999 is too large"),
        ('{"rope_theta": Infinity}', "Infinity is not JSON"),
        (
            '{"model_type": "llama", "model_type": "x"}',
            "the key 'model_type' is there ",
        ),
    ],
)
def test_json_beyond_limits(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json: " + message):
        read_config(tmp_path)


def test_read_config_tells_how_to_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen3-0.6B"
    with pytest.raises(CheckpointError) as raised:
        read_config(name)
    said = str(raised.value)
    assert said.startswith(f"{name}: no such directory; ") and "\n" not in said
    assert said.endswith(
        f"; a model of the Hub is hf://{name}; in Python, "
        "jaxmem.checkpoints.local_directory downloads one"
    )
    with pytest.raises(CheckpointError, match="directory; in Python, jaxmem.check"):
        read_config(f"hf://{name}")
    (tmp_path / name).mkdir(parents=True)  # a directory, if an empty one
    for directory in (name, "gone", "/gone/there", "runs/sft"):
        with pytest.raises(CheckpointError, match="config.json: cannot be read: No su"):
            read_config(directory)


def test_run_directory_names_its_model(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as raised:
        read_config(tmp_path / "run")
    assert str(raised.value) == (
        f"{tmp_path}/run is a run, not a checkpoint; name the model that it has saved, "
        f"{tmp_path}/run/model"
    )


def test_unreadable_configs(tmp_path):
    with pytest.raises(CheckpointError, match="config.json: cannot be read: No such"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="config.json: expected a JSON object"):
        read_config(tmp_path)
    incomplete = {k: v for k, v in QWEN3.items() if k != "vocab_size"}
    with pytest.raises(CheckpointError, match="config.json: vocab_size is missing"):
        read(tmp_path, incomplete)
    assert ModelConfig().checkpoint is None


@pytest.mark.parametrize(
    ("family", "pad", "row"),
    [
        ("llama", 0, 0), ("llama", -1, 63), ("llama", None, None), ("gpt2", 0, None),
        ("gpt_neox", 0, None),
    ],
)  # fmt: skip
def test_pad_row_of_families_with_padding_idx(family, pad, row, tmp_path):
    if family == "llama":
        raw = LLAMA3
    else:
        raw = json.loads(str(np.load(RECORDS / f"{family}.npz")["config"]))
    read_pad = read(tmp_path, raw, vocab_size=64, pad_token_id=pad).model.pad_row
    assert read_pad == row
    given = ModelConfig(checkpoint=str(tmp_path))
    assert checkpoints.with_checkpoint(given).pad_row == row
    chosen = dataclasses.replace(given, pad_row=7)
    assert checkpoints.with_checkpoint(chosen).pad_row == 7
