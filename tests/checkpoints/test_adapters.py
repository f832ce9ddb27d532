"""LoRA adapters: PEFT's numbers, its files, and the base left alone."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.adapter_config import read_adapter_config
from jaxmem.models.decoder import Decoder
from jaxmem.models.weights import join_weights
from tests.helpers.decoders import whole as hidden_states

QWEN3 = pathlib.Path(__file__).parent / "tiny" / "qwen3"
ADAPTER, WHOLE = QWEN3 / "adapter", QWEN3 / "whole"


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def decoder():
    return checkpoints.load(
        QWEN3, dtype="float32", param_dtype="float32", adapter=ADAPTER
    )


@pytest.mark.slow
def test_numbers_are_pefts(decoder):
    expected = np.load(ADAPTER / "expected.npz")
    tokens, logits = jnp.asarray(expected["tokens"]), expected["logits"]
    scale = np.abs(logits).max()
    hidden = hidden_states(decoder, tokens)
    np.testing.assert_allclose(decoder.logits(hidden), logits, atol=1e-4 * scale)
    np.testing.assert_allclose(decoder.head(hidden), logits, atol=1e-4 * scale)
    labels = jnp.roll(tokens, -1, axis=1)
    logp = jax.nn.log_softmax(logits.astype(np.float32))
    picked = jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
    got = decoder.head.logprobs(hidden, labels)
    np.testing.assert_allclose(got, picked, atol=2e-4 * scale)
    plain = np.load(QWEN3 / "expected.npz")["logits"]
    assert np.abs(logits - plain).max() > 0.1 * scale  # the adapter does something


@pytest.fixture(scope="module")
def whole():
    """A model with an adapter of rslora, "all-linear" and modules_to_save."""
    return checkpoints.load(
        QWEN3, dtype="float32", param_dtype="float32", adapter=WHOLE
    )


@pytest.mark.full
def test_scaled_adapter_with_whole_matrices(whole, tmp_path):
    expected = np.load(WHOLE / "expected.npz")
    tokens, logits = jnp.asarray(expected["tokens"]), expected["logits"]
    assert whole.config.lora_saved == ("embed", "head")
    assert len(whole.config.lora_targets) == 7 and not whole.config.lora_head
    hidden, atol = hidden_states(whole, tokens), 1e-4 * np.abs(logits).max()
    np.testing.assert_allclose(whole.logits(hidden), logits, atol=atol)
    merged = checkpoints.merge(whole)
    again = merged.logits(hidden_states(merged, tokens))
    np.testing.assert_allclose(again, logits, atol=atol)
    # What is saved has the same matrices, and the scale of rslora as one of LoRA.
    checkpoints.save_adapter(tmp_path / "out", whole, base=str(QWEN3))
    before, after = (
        load_file(directory / "adapter_model.safetensors")
        for directory in (WHOLE, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[name])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert sorted(config["modules_to_save"]) == ["embed_tokens", "lm_head"]
    assert config["lora_alpha"] / config["r"] == pytest.approx(5 / 3**0.5)
    reloaded = checkpoints.load(
        QWEN3, dtype="float32", param_dtype="float32", adapter=tmp_path / "out"
    )
    assert reloaded.config == whole.config
    np.testing.assert_array_equal(
        reloaded.logits(hidden_states(reloaded, tokens)), whole.logits(hidden)
    )


@pytest.mark.parametrize(
    ("modules", "excluded", "targets"),
    [
        ("all-linear", None, "query key value output gate up down"),
        (r".*\.self_attn\.(q|v)_proj", None, "query value"),
        (r".*_proj|lm_head", None, "query key value output gate up down head"),
        (["self_attn.q_proj", "lm_head"], None, "query head"),
        ("all-linear", ["down_proj"], "query key value output gate up"),
        ("all-linear", r".*mlp.*", "query key value output"),
    ],
)
def test_modules_that_patterns_name(modules, excluded, targets, tmp_path):
    change = {"target_modules": modules, "exclude_modules": excluded}
    source = changed(tmp_path, change)
    model = read_adapter_config(
        checkpoints.read_config(QWEN3).model, checkpoints.read_config(QWEN3).family,
        source,
    ).model  # fmt: skip
    assert [*model.lora_targets, *["head"] * model.lora_head] == targets.split()


def changed(tmp_path, change, source=ADAPTER):
    """A copy of an adapter with another config."""
    made = pathlib.Path(shutil.copytree(source, tmp_path / "adapter"))
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps(config | change))
    return made


def test_saving_gives_the_same_adapter_back(decoder, tmp_path):
    checkpoints.save_adapter(tmp_path / "out", decoder, base="qwen3")
    before = load_file(ADAPTER / "adapter_model.safetensors")
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    extra = {name for name in before if ".lora_" not in name}
    assert before.keys() - extra == after.keys()
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[name])
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    theirs = json.loads((ADAPTER / "adapter_config.json").read_text())
    assert config.pop("target_modules").sort() == theirs["target_modules"].sort()
    for key in ("peft_type", "r", "lora_alpha", "bias", "base_model_name_or_path"):
        assert config[key] == theirs[key]
    with pytest.raises(CheckpointError, match="out exists already; name another"):
        checkpoints.save_adapter(tmp_path / "out", decoder)


@pytest.mark.full
def test_new_adapter_changes_no_logits_of_tied_head(tmp_path):
    llama = QWEN3.parent / "llama_linear"
    expected = np.load(llama / "expected.npz")
    tokens = jnp.asarray(expected["tokens"])
    plain = checkpoints.load(llama, dtype="float32", param_dtype="float32")
    changes = dict(lora_rank=2, lora_targets=("value", "up"), lora_head=True)
    model = Decoder(dataclasses.replace(plain.config, **changes), rngs=nnx.Rngs(1))
    definition, fresh = nnx.split(model)
    base = nnx.to_pure_dict(nnx.split(plain)[1])
    adapters = nnx.to_pure_dict(fresh)
    model = nnx.merge(definition, join_weights(adapters, base))
    np.testing.assert_allclose(
        model.logits(hidden_states(model, tokens)), expected["logits"], atol=1e-3
    )
    model.head.lora_b[...] = jnp.ones_like(model.head.lora_b[...])
    checkpoints.save_adapter(tmp_path / "tied", model)
    again = checkpoints.load(
        llama, dtype="float32", param_dtype="float32", adapter=tmp_path / "tied"
    )
    assert again.config == model.config
    hidden = hidden_states(model, tokens)
    np.testing.assert_array_equal(again.logits(hidden), model.logits(hidden))
    assert np.abs(model.logits(hidden) - expected["logits"]).max() > 1e-2
    with pytest.raises(CheckpointError, match="the decoder has adapters; save them"):
        checkpoints.save(tmp_path / "whole", model, like=llama)
    with pytest.raises(CheckpointError, match="no adapters to save"):
        checkpoints.save_adapter(tmp_path / "none", plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(peft_type="IA3"), "peft_type 'IA3' is not LORA"),
        (dict(use_dora=1), "use_dora must be bool or NoneType, got 1"),
        (
            dict(bias="lora_only"),
            "bias='lora_only' is not implemented; only 'none' is; load base and "
            r"adapter with PEFT, call merge_and_unload\(\).save_pretrained\(NEW\)",
        ),
        (dict(layers_to_transform=[0]), "lm_head.lora_A.weight belongs to no matrix"),
        (
            dict(layers_to_transform=[7]),
            r"must name some of q_.*lm_head in layers \[7\]",
        ),
        (dict(layers_to_transform=[True]), r"layers_to_transform=\[True\] must be num"),
        (
            dict(layers_to_transform=0, target_modules="all-linear"),
            "layers_to_transform=0 must be numbers of layers, together with a list",
        ),
        (
            dict(layers_to_transform=0, layers_pattern="("),
            r"layers_pattern '\(': missing \), unterminated",
        ),
        (dict(megatron_config={"a": 1}), "megatron_config={'a': 1} is not implemented"),
        (dict(kasa_config={"beta": 1}), "kasa_config={'beta': 1} is not implemented"),
        (
            dict(doubles=2),
            "unknown keys 'doubles': jaxmem does not implement their effect",
        ),
        (dict(use_rslora="yes"), "use_rslora must be bool or NoneType, got 'yes'"),
        (dict(alpha_pattern=[1]), r"alpha_pattern must be dict or NoneType, got \[1\]"),
        (dict(init_lora_weights="kaiming"), "init_lora_weights 'kaiming' is not known"),
        (dict(init_lora_weights=3), "init_lora_weights must be bool or str or NoneTyp"),
        (
            dict(rank_pattern={"q_proj": 2}),
            r"layers.0.self_attn.q_proj.lora_A.weight must have shape \(2, 16\)",
        ),
        (
            dict(rank_pattern={"q_proj": 0}),
            "rank_pattern: 'q_proj' must have a number ",
        ),
        (
            dict(alpha_pattern={"q_proj": "x"}),
            "alpha_pattern: 'q_proj' must have a num",
        ),
        (dict(target_modules=["c_attn"]), r"target_modules \['c_attn'\] are not impl"),
        (
            dict(target_modules=".*layers.0.*"),
            "lm_head.lora_A.weight belongs to no matrix",
        ),
        (dict(target_modules="("), r"target_modules '\(': missing \), unterminated"),
        (dict(exclude_modules=".*"), "target_modules must name some of q_proj"),
        (dict(modules_to_save=["norm"]), r"modules_to_save \['norm'\] are not impl"),
        (dict(modules_to_save=["lm_head"]), "lora_saved has 'head', which cannot have"),
        (dict(r=0), "r must be at least 1, got 0"),
        (dict(r="x"), "r must be int, got 'x'"),
        (dict(r=2.5), "r must be int, got 2.5"),
        (dict(r=10**9), r"r must be at most 2\*\*16, got 1000000000"),
        (dict(lora_alpha=None), "lora_alpha must be float, got None"),
        (dict(lora_alpha=-1), "lora_alpha must be above 0, got -1"),
        (
            dict(target_modules=[["q_proj"]]),
            r"target_modules must list names, got \['q",
        ),
        (
            dict(target_modules={"q_proj": 1}),
            "target_modules must be str or list or NoneType,",
        ),
        (dict(target_modules=[]), "target_modules must name some of q_proj"),
        (dict(peft_type=["LORA"]), r"peft_type must be str, got \['LORA'\]"),
        (dict(r=4), r"layers.0.self_attn.k_proj.lora_A.weight must have shape \(4, 16"),
    ],
)
def test_other_adapters_are_refused(change, message, tmp_path):
    source = changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.load(QWEN3, adapter=source)
    assert str(caught.value).count(str(source)) == 1


@pytest.mark.parametrize(
    ("value", "way"),
    [
        ("pissa", "merge_and_unload"),
        ("pissa_niter_4", "path_initial_model_for_weight_conversion"),
        ("OLoRA", "merge_and_unload"),
        ("loftq", "merge_and_unload"),
        ("corda", "path_initial_model_for_weight_conversion"),
        ("lora_ga", "path_initial_model_for_weight_conversion"),
    ],
)
def test_adapters_of_another_base_are_refused(value, way, tmp_path):
    source = changed(tmp_path, {"init_lora_weights": value})
    message = f"init_lora_weights='{value}' also changes matrices of the base.*{way}"
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.load(QWEN3, adapter=source)
    drawn = value == "pissa_niter_4"  # each time that PEFT loads it
    assert not (drawn and "merge_and_unload" in str(caught.value))


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"init_lora_weights": value}
            for value in (False, None, "Gaussian", "eva", "orthogonal", "mica")
        ),
        {"later": None, "lora_dropout": 0.5, "task_type": "CAUSAL_LM"},
        {"alpha_pattern": {"q_proj": 5}, "rank_pattern": {"gone": 7}},
        {"ensure_weight_tying": True},  # of a head that is not tied
    ],
)
def test_keys_that_change_no_number(change, tmp_path):
    config = checkpoints.read_config(QWEN3)
    source = changed(tmp_path, change)
    expected = read_adapter_config(config.model, config.family, ADAPTER)
    made = read_adapter_config(config.model, config.family, source)
    assert (made.model, made.modules) == (expected.model, expected.modules)


def test_unknown_key_may_be_ignored(tmp_path):
    config, source = checkpoints.read_config(QWEN3), changed(tmp_path, {"note": "x"})
    with checkpoints.ignoring_keys(["note"]):
        read_adapter_config(config.model, config.family, source)


HEAD = "base_model.model.lm_head.base_layer.weight"
TABLE = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (HEAD, (40, 16), "lm_head.base_layer.weight differs from the base's tensor"),
        (HEAD, (41, 16), r"base_layer.weight must have shape \(40, 16\)"),
        (TABLE, (40, 16), "embed_tokens.weight differs from the base's tensor, and"),
        (TABLE, (48, 16), r"embed_tokens.weight must have shape \(40, 16\)"),
        (
            "base_model.model.model.norm.weight",
            (16,),
            "model.norm.weight belongs to no ma",
        ),
        (
            HEAD.replace("base_layer", "lora_B").replace("weight", "bias"),
            (40,),
            "belongs to no",
        ),
        (
            "base_model.model.lm_head.lora_magnitude_vector",
            (40,),
            "belongs to no matrix",
        ),
        ("base_model.model.score.weight", (2, 16), "score.weight belongs to no matrix"),
    ],
)
def test_tensors_that_nothing_uses_are_refused(name, shape, message, tmp_path):
    source = changed(tmp_path, {})
    tensors = load_file(source / "adapter_model.safetensors")
    tensors[name] = np.full(shape, 0.5, np.float32)
    save_file(tensors, source / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(QWEN3, adapter=source)


def test_copies_of_the_base_in_an_adapter(tmp_path):
    source = changed(tmp_path, {})
    tensors = load_file(source / "adapter_model.safetensors")
    base = load_file(QWEN3 / "model.safetensors")
    assert HEAD in tensors  # PEFT has written it
    tensors[TABLE] = base["model.embed_tokens.weight"].astype(np.float32)
    save_file(tensors, source / "adapter_model.safetensors")
    checkpoints.load(QWEN3, adapter=source)


@pytest.mark.parametrize("missing", ["r", "lora_alpha", "peft_type"])
def test_adapter_config_without_a_key(missing, tmp_path):
    source = pathlib.Path(shutil.copytree(ADAPTER, tmp_path / "adapter"))
    config = json.loads((source / "adapter_config.json").read_text())
    del config[missing]
    (source / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"config.json: {missing} is missing"):
        checkpoints.load(QWEN3, adapter=source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"adapter_config.json: expected a JSON object, got \[1\]"),
        ("[" * 100_000, "adapter_config.json: nested deeper than 100"),
    ],
)
def test_invalid_adapter_config_is_refused(text, message, tmp_path):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(QWEN3, adapter=tmp_path)


def test_directory_without_adapter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="adapter_config.json: cannot be read"):
        checkpoints.load(QWEN3, adapter=tmp_path)
