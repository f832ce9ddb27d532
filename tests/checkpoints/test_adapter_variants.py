"""PEFT's adapters of several ranks and scales, of some layers, of DoRA, and in shards.

adapters/variants/ holds what make_adapters.py recorded of them. With a directory in the
variable EXPORTS, what is saved stays there, for make_adapters.py --exports to compare.
"""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.checkpoints.adapter_config import read_adapter_config
from jaxmem.commands import cli
from tests.helpers import seeded
from tests.helpers.records import forward, record

pytestmark = pytest.mark.usefixtures("quick_compilation")

VARIANTS = seeded.ADAPTERS / "variants"
NAMES = sorted(path.stem for path in VARIANTS.glob("*.npz"))
PLAIN = [name for name in NAMES if not name.endswith("-dora")]
QUICK = "phi3-ranks", "phi3-dora"


def variant(name):
    return dict(np.load(VARIANTS / f"{name}.npz"))


@pytest.fixture
def saved(tmp_path):
    """Directories of a checkpoint, and of PEFT's adapter of it."""

    def save(name):
        base_name = name.partition("-")[0]
        base = seeded.write(record(base_name), tmp_path / base_name)
        return base, seeded.write_adapter(variant(name), tmp_path / "adapter")

    return save


@jax.jit
def logits(decoder, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return forward(decoder, tokens, jnp.ones_like(tokens), places)


def assert_pefts(decoder, name):
    """The decoder has the logits that PEFT computed, which are not the base's."""
    of_base = record(name.partition("-")[0])
    expected, places = variant(name)["logits"], of_base["places"]
    tokens, largest = jnp.asarray(of_base["tokens"], jnp.int32), np.abs(expected).max()
    atol = 2 * variant(name)["error"] + 4 * np.finfo(np.float32).eps * largest
    made = logits(decoder, tokens)[:, places]
    np.testing.assert_allclose(made, expected, rtol=0, atol=atol)
    assert np.abs(expected - of_base["logits"]).max() > 100 * atol


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in NAMES],
)
def test_numbers_are_pefts(name, saved):
    base, source = saved(name)
    assert_pefts(checkpoints.load(base, adapter=source), name)


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN)
def test_saved_variant_is_plain(name, saved, tmp_path):
    base, source = saved(name)
    kept = os.environ.get("EXPORTS")
    out = (pathlib.Path(kept) if kept else tmp_path / "out") / name
    decoder = checkpoints.load(base, adapter=source)
    checkpoints.save_adapter(out, decoder, base=str(base))
    again = checkpoints.load(base, adapter=out)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (again, decoder)))
    assert again.config == decoder.config
    assert_pefts(checkpoints.merge(decoder), name)


def test_ranks_and_factors_of_modules(saved):
    base, source = saved("phi3-ranks")
    described = checkpoints.read_config(base)
    adapter = read_adapter_config(described.model, described.family, source)
    # The scale of most modules is the decoder's: 1 / 4 of qkv_proj.
    assert (adapter.model.lora_rank, adapter.model.lora_alpha) == (5, 1 / 4 * 5)
    ranks = {x.partition(".")[2]: m.rank for x, m in adapter.modules.items()}
    assert ranks["layers.1.mlp.down_proj"] == 2 and ranks["layers.0.mlp.down_proj"] == 3
    assert ranks["layers.0.self_attn.qkv_proj"] == 4
    factors = {x.partition(".")[2]: m.factor for x, m in adapter.modules.items()}
    np.testing.assert_allclose(factors["layers.2.self_attn.o_proj"], 2 / 5 * 4)
    assert factors["layers.0.self_attn.qkv_proj"] == 1


@pytest.mark.full
def test_export_merges_dora(saved, tmp_path, capsys):
    base, source = saved("mistral-dora")
    (base / "tokenizer.json").write_text("{}")
    config = json.loads((source / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (source / "adapter_config.json").write_text(json.dumps(config))
    out = str(tmp_path / "out")
    assert cli.main(["export", str(source), "--out", out]) == 2
    assert "is a DoRA adapter, which jaxmem merges" in capsys.readouterr().err
    assert cli.main(["export", str(source), "--merge", "--out", out]) == 0
    assert_pefts(checkpoints.load(out), "mistral-dora")


def test_dora_without_norms_is_refused(saved):
    base, source = saved("mistral-modules")
    config = json.loads((source / "adapter_config.json").read_text())
    changed = json.dumps(config | {"use_dora": True})
    (source / "adapter_config.json").write_text(changed)
    with pytest.raises(CheckpointError, match="lora_magnitude_vector is missing"):
        checkpoints.load(base, adapter=source)


def test_dora_of_codes_is_refused(saved):
    base, source = saved("mistral-dora")
    with pytest.raises(CheckpointError, match="use_dora=True is not implemented for a"):
        checkpoints.load(base, adapter=source, base="int8")


def test_adapter_in_shards(saved):
    base, source = saved("mistral-modules")
    whole = source / "adapter_model.safetensors"
    tensors, shards = load_file(whole), {}
    for number, name in enumerate(sorted(tensors)):
        shards[name] = f"adapter_model-0000{number % 2 + 1}-of-00002.safetensors"
    for file in set(shards.values()):
        held = {name: tensors[name] for name, at in shards.items() if at == file}
        save_file(held, source / file)
    index = source / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.warns(
        UserWarning, match="adapter_model.safetensors: jaxmem reads this file only"
    ):
        expected = checkpoints.load(base, adapter=source)
    whole.unlink()
    again = checkpoints.load(base, adapter=source)
    jax.tree.map(
        np.testing.assert_array_equal, *map(jax.tree.leaves, (again, expected))
    )
    (source / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing; adapter_model.safetensors.ind"):
        checkpoints.load(base, adapter=source)


def test_pickled_adapter_is_refused(saved):
    base, source = saved("mistral-modules")
    (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    message = "does not read adapter_model.bin, because unpickling .* save_pretrained"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(base, adapter=source)


def test_layers_keep_no_adapter_of_others(saved):
    base, source = saved("phi3-layers")
    decoder = checkpoints.load(base, adapter=source)
    b = np.asarray(decoder.blocks.attention.query.lora_b[...])
    assert [bool(np.any(layer)) for layer in b] == [True, False, True]
    assert dataclasses.asdict(decoder.config)["lora_rank"] == 3
