"""Decoders from random weights as architectures that others know."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.architectures import parse_config
from jaxmem.data import vocabulary
from tests.checkpoints.configurations import CONFIGURATIONS
from tests.helpers import decoders, texts
from tests.helpers.architectures import GEMMA, KNOWN, SMALL
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("name", KNOWN)
def test_description_reads_back_as_the_model(name, tmp_path):
    model = SMALL.replaced(KNOWN[name])
    described = checkpoints.describe(model, 64)
    (tmp_path / "config.json").write_text(json.dumps(described))
    read = checkpoints.read_config(tmp_path)
    assert read.raw["model_type"].startswith(name.partition("_")[0])
    assert read.max_positions == 64
    kinds = [model.pattern[i % len(model.pattern)] for i in range(3)]
    assert [read.model.pattern[i % len(read.model.pattern)] for i in range(3)] == kinds
    assert read.model.score_scale == pytest.approx(model.score_scale, rel=1e-12)
    same = {
        "pattern": model.pattern,
        "self_attn.scale": model.self_attn.scale,
        "rope.local_theta": model.rope.local_theta,
    }
    assert read.model.replaced(same) == model


@pytest.mark.parametrize("name", ["llama4", "llama4_every"])
def test_describe_names_chunked_attention(name):
    kind, raw = CONFIGURATIONS[name]
    raw = {"model_type": kind} | raw
    model = parse_config(pathlib.Path("config.json"), raw).model
    described = checkpoints.describe(model, 64)
    assert described["attention_chunk_size"] == raw["attention_chunk_size"]
    kinds = [layer.partition("_")[0] for layer in described["layer_types"]]
    assert [kind == "chunked" for kind in model.by_layer("pattern")] == [
        kind == "chunked" for kind in kinds
    ]


def test_describe_keeps_the_size_of_a_table_of_positions():
    kind, raw = CONFIGURATIONS["gpt2"]
    raw = {"model_type": kind} | raw
    model = parse_config(pathlib.Path("config.json"), raw).model
    described = checkpoints.describe(model, 8)  # trained with shorter rows
    assert described["n_positions"] == model.embedding.positions == 32


EXPERTS = {
    "feed_forwards": ("experts",),
    "experts.count": 4,
    "experts.per_token": 2,
    "experts.ff": 8,
    "router.renormalised": True,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits.softcap": 3.0}, "LlamaForCausalLM cannot have logits.softcap=3.0"),
        ({"self_attn.scale": 0.3}, "LlamaForCausalLM cannot have self_attn.scale="),
        (
            {"qk_norm.enabled": True, "self_attn.qkv_bias": True},
            "Qwen3ForCausalLM cannot have self_attn.qkv_bias=",
        ),
        ({**GEMMA, "self_attn.scale": 0.3}, "Gemma2.* cannot have self_attn.scale="),
        (
            {"pattern": ("chunked", "unrotated"), "self_attn.window": 8},
            r"cannot have pattern=\('chunked', 'unrotated', 'chunked'\)",
        ),
        (EXPERTS, "Qwen3MoeForCausalLM cannot have qk_norm.enabled=False"),
    ],
)
def test_describe_refuses_other_models(changes, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.describe(SMALL.replaced(changes), 64)


@pytest.mark.parametrize("factor", [0.0, 0.02])
def test_describe_router_loss_factor(factor):
    changes = EXPERTS | {"qk_norm.enabled": True, "router_aux_loss_coef": factor}
    made = checkpoints.describe(SMALL.replaced(changes), 64)
    assert made["architectures"] == ["Qwen3MoeForCausalLM"]
    assert made.get("router_aux_loss_coef", 0.0) == factor


def test_save_new_writes_a_checkpoint(tmp_path):
    decoder = decoders.drawn(SMALL)
    names = "<s>", "</s>", "<pad>"
    text = checkpoints.Text(texts.tokenizer(start=False), *names, "{{ messages }}")
    checkpoints.save_new(tmp_path / "out", decoder, text=text, max_positions=64)
    loaded = checkpoints.load(tmp_path / "out")
    assert loaded.config.tied and loaded.config.dtype == "float32"
    for old, new in zip(
        nnx.to_flat_state(nnx.state(decoder)),
        nnx.to_flat_state(nnx.state(loaded)),
        strict=True,
    ):
        assert old[0] == new[0] and (old[1][...] == new[1][...]).all()
    _, start, eos, _ = checkpoints.load_vocabulary(tmp_path / "out")
    assert (start, eos) == ((1,), 2) and checkpoints.end_ids(tmp_path / "out") == (2,)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with pytest.raises(CheckpointError, match="out exists already; name another"):
        checkpoints.save_new(tmp_path / "out", decoder, text=text, max_positions=64)


@pytest.mark.parametrize("tied", [True, slow(False)])
def test_scaled_embeddings_become_the_embeddings(tied, tmp_path):
    config = SMALL.replaced({"embedding.scaled": True, "tied": tied, "layers": 1})
    decoder = decoders.drawn(config)
    text = checkpoints.Text(texts.tokenizer(), "<s>", "</s>", "<pad>")
    checkpoints.save_new(tmp_path / "out", decoder, text=text, max_positions=64)
    loaded = checkpoints.load(tmp_path / "out")
    assert not loaded.config.embedding.scaled and not loaded.config.tied
    tokens, places = jnp.array([[5, 6, 7]]), jnp.arange(3)[None]

    def logits(decoder):
        return decoder.logits(decoder(tokens, None, places))

    made, expected = jax.jit(logits)(loaded), jax.jit(logits)(decoder)
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-5)


def test_end_ids_include_every_eos(tmp_path):
    model = texts.checkpoint("qwen3", tmp_path)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 5, 99]}')
    assert checkpoints.end_ids(model) == (2, 5)  # the model has 40 tokens


def test_arithmetic_vocabulary_is_characters():
    tokenizer = vocabulary.of_words()
    again = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    assert again.encode("3+8=").ids == [5, 12, 10, 13]
    assert again.decode([3, 3, 1]) == "11"
