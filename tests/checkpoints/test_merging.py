"""Adapters in the matrices that they adapt."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import checkpoints
from jaxmem.commands import cli
from jaxmem.models.decoder import ModelConfig
from jaxmem.train import saved
from tests.helpers import decoders, texts
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENS = np.load(texts.TINY / "qwen3" / "adapter" / "expected.npz")
DTYPE = "--dtype", "float32"
SMALL = ModelConfig(
    layers=2, hidden=16, ff=24, heads=2, kv_heads=1, head_dim=8, vocab_size=40
)


@jax.jit
def logits(decoder, tokens):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, None, places))


@pytest.mark.full
def test_export_merges_adapter_into_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(texts.TINY)  # the adapter names its base as "qwen3"
    out = str(tmp_path / "merged")
    assert cli.main(["export", "qwen3/adapter", "--merge", "--out", out, *DTYPE]) == 0
    assert f"saved in {out}, for transformers to load" in capsys.readouterr().out
    merged = checkpoints.load(out, dtype="float32")
    assert not merged.config.lora_rank
    expected = TOKENS["logits"]
    made = logits(merged, TOKENS["tokens"])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(made, expected, atol=1e-4 * scale)
    assert cli.main(["export", "qwen3/adapter", "--out", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a" / "adapter_config.json").exists()
    capsys.readouterr()
    for arguments, message in (
        (["qwen3", "--merge", "--out", str(tmp_path / "b")], "has no adapter to merge"),
        (["qwen3", "--out", out], "merged exists already; name another --out"),
        ([str(tmp_path), "--out", str(tmp_path / "b")], "is not a checkpoint"),
    ):
        assert cli.main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_adapter_of_changed_base_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(texts.TINY)
    made = shutil.copytree("qwen3/adapter", tmp_path / "a")
    config = json.loads((made / "adapter_config.json").read_text())
    config["init_lora_weights"] = "pissa"
    (made / "adapter_config.json").write_text(json.dumps(config))
    arguments = ["export", str(made), "--merge", "--out", str(tmp_path / "b")]
    assert cli.main(arguments) == 2
    assert "init_lora_weights='pissa' also changes" in capsys.readouterr().err
    with (
        saved.opened("qwen3", adapter=made) as place,  # as generate, score and eval
        pytest.raises(checkpoints.CheckpointError, match="'pissa' also changes"),
    ):
        place.load()


@pytest.mark.full
@pytest.mark.parametrize("tied", [slow(True), False])
def test_merged_logits_are_those_with_adapters(tied, tmp_path):
    config = dataclasses.replace(
        SMALL, tied=tied, lora_rank=3, lora_head=True, lora_targets=("key", "down")
    )
    decoder = decoders.drawn(config)
    merged = checkpoints.merge(decoder)
    assert not merged.config.lora_rank and not merged.config.tied
    assert (merged.embed.embedding[...] == decoder.embed.embedding[...]).all()
    expected, made = (logits(x, TOKENS["tokens"]) for x in (decoder, merged))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(made, expected, atol=2e-6 * scale)
    if not tied:
        return
    # A checkpoint that was tied describes it, and becomes one that is not.
    plain = decoders.drawn(SMALL)
    text = checkpoints.Text(texts.tokenizer(), "<s>", "</s>", "<pad>")
    base = tmp_path / "base"
    checkpoints.save_new(base, plain, text=text, max_positions=16)
    checkpoints.save(tmp_path / "out", merged, like=base)
    loaded = checkpoints.load(pathlib.Path(tmp_path / "out"))
    np.testing.assert_array_equal(loaded.head.kernel[...], merged.head.kernel[...])
