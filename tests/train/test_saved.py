"""The model of a run: what it ended with, or its newest checkpoint."""

import io
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.commands import cli
from jaxmem.train import configuration, jobs, saved
from jaxmem.train.state import checkpoint
from tests.helpers import texts

pytestmark = pytest.mark.usefixtures("quick_compilation")

GIN = """
data.source = "{source}"
data.sequence_length = 16
data.batch_size = 2
data.vocab_size = 270
model.layers = 2
model.hidden = 16
model.ff = 24
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
optimizer.warmup_steps = 0
run.steps = 2
run.compare_heads = False
run.out_dir = "{out_dir}"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run from random weights; not to be changed."""
    directory = tmp_path_factory.mktemp("saved")
    source, out_dir = directory / "text.txt", directory / "run"
    source.write_text("\n\n".join(f"text of number {i}" for i in range(40)))
    path = directory / "run.gin"
    path.write_text(GIN.format(source=source, out_dir=out_dir))
    config, text = configuration.load(path)
    jobs.train(config, text, Console(file=io.StringIO()))
    return out_dir


def weights(decoder):
    return nnx.to_pure_dict(nnx.split(decoder)[1])


def loaded(path):
    with saved.opened(path) as place:
        return place, place.load(), checkpoints.load_vocabulary(place.directory)


@pytest.mark.full
def test_run_from_random_weights_leaves_a_model(run):
    names = {path.name for path in (run / "model").iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    place, decoder, vocabulary = loaded(run)
    assert place.directory == run / "model" and place.decoder is None
    assert vocabulary.start == (1,) and vocabulary.eos == 2
    assert checkpoints.read_config(run / "model").max_positions == 16


@pytest.mark.full
def test_unfinished_run_is_read_from_checkpoint(run, tmp_path):
    going_on = pathlib.Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(going_on / "model")
    before = sorted(p for p in going_on.rglob("*"))
    place, decoder, vocabulary = loaded(going_on)
    assert place.decoder is decoder and "checkpoints/2" in str(place.files[0])
    ended = loaded(run)
    jax.tree.map(np.testing.assert_array_equal, weights(decoder), weights(ended[1]))
    assert vocabulary[1:] == ended[2][1:]
    assert sorted(p for p in going_on.rglob("*")) == before  # nothing is changed
    out = tmp_path / "out"
    assert cli.main(["export", str(going_on), "--out", str(out)]) == 0
    exported = checkpoints.load(out)
    jax.tree.map(np.testing.assert_array_equal, weights(exported), weights(decoder))
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (out / name).read_text() == (run / "model" / name).read_text()
    # With an older model beside it, a newer checkpoint counts.
    shutil.copytree(run / "model", going_on / "model")
    os.utime(going_on / "model" / "config.json", (0, 0))
    assert loaded(going_on)[0].decoder is not None


@pytest.mark.full
def test_damaged_checkpoint_is_named(run, tmp_path):
    damaged = pathlib.Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(damaged / "model")
    files = (damaged / "checkpoints" / "2" / "state").rglob("*")
    largest = max(files, key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(
        checkpoint.RunCheckpointError, match="checkpoints/2 cannot be used"
    ):
        loaded(damaged)


def test_adapter_beside_an_adapter_is_refused(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with (
        pytest.raises(
            CheckpointError, match="--adapter is for a checkpoint, and .* is"
        ),
        saved.opened(tmp_path / "adapter", tmp_path / "another"),
    ):
        pass


def test_adapter_names_its_base(tmp_path):
    (tmp_path / "adapter").mkdir()
    described = tmp_path / "adapter" / "adapter_config.json"
    described.write_text('{"base_model_name_or_path": "nowhere"}')
    with pytest.raises(CheckpointError, match="'nowhere' is not the directory of a"):
        loaded(tmp_path)


def test_load_codes_what_is_in_16_bits(tmp_path):
    with saved.opened(texts.checkpoint("llama", tmp_path)) as place:
        decoder = place.load(base="int8")
    assert decoder.config.base == "int8"
    running = saved.Saved(tmp_path, decoder=decoder)
    assert running.load(base="int8") is decoder
    with pytest.raises(CheckpointError, match="--base=nf4 is for a checkpoint or an"):
        running.load(base="nf4")
