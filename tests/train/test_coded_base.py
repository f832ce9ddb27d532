"""Runs that train adapters on a base in 4 or 8 bits."""

import json

import numpy as np
import pytest

from jaxmem.checkpoints import CheckpointError
from jaxmem.commands import cli
from jaxmem.train import configuration, jobs, saved
from tests.helpers.decoders import whole as hidden_states
from tests.helpers.runs import refused

TINY = """
model.layers = 2
model.hidden = 128
model.ff = 256
model.heads = 4
model.kv_heads = 2
model.head_dim = 32
model.tied = False
model.base = "nf4"
model.lora_rank = 4
model.lora_targets = ("query", "value", "gate", "down")
data.vocab_size = 320
data.sequence_length = 32
data.batch_size = 4
data.held_out = 0.0
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 1
optimizer.schedule = "constant"
run.steps = 4
run.checkpoint_every = 2
run.compare_heads = False
"""
TABLE = "model.base_targets=('query', 'down', 'embedding')"
EXPERTS = (
    "model.feed_forwards=('experts',)", "model.experts.count=4", "model.experts.ff=256",
    "model.experts.per_token=2", "model.lora_targets=('query',)",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)


@pytest.fixture
def gin(tmp_path):
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"word{i % 97} of line {i % 13}" for i in range(4000)))
    config = tmp_path / "tiny.gin"
    paths = f"data.source = {str(text)!r}\ndata.cache_dir = {str(tmp_path)!r}\n"
    config.write_text(TINY + paths)
    return config


def losses(gin, out, *more):
    """The losses of a run's steps."""
    directory = gin.parent / out
    assert cli.main(["train", str(gin), *more, f"run.out_dir={directory}"]) == 0
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.full
def test_run_on_codes_resumes(gin, capsys):
    alone = losses(gin, "alone")
    assert alone[-1] < alone[0]
    losses(gin, "resumed", "run.steps=2")
    assert losses(gin, "resumed") == alone
    config = "run.steps=6", f"run.out_dir={gin.parent / 'resumed'}"
    assert cli.main(["train", str(gin), *config, "model.base=int8"]) == 2
    assert "model.base was 'nf4', is 'int8'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.full),
        pytest.param(EXPERTS, marks=pytest.mark.slow),
        pytest.param(("model.base=int8", TABLE), marks=pytest.mark.slow),
    ],
)
def test_run_on_codes_equals_mesh(gin, more):
    alone = losses(gin, "alone", "run.steps=2", *more)
    mesh = "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"
    sharded = losses(gin, "mesh", "run.steps=2", *mesh, *more)
    np.testing.assert_allclose(sharded, alone, rtol=1e-4)


def test_job_refuses_a_base_without_adapters(gin):
    config, _ = configuration.load(gin, ("model.lora_rank=0",))
    with pytest.raises(
        ValueError, match="model.base='nf4' codes matrices, .*lora_rank"
    ):
        jobs.job_of(config)


def test_program_refuses_codes_as_trainable(gin):
    config, _ = configuration.load(gin, ("optimizer.trainable=kernel",))
    job = jobs.job_of(config)
    with pytest.raises(ValueError, match="optimizer.trainable='kernel' names blocks/a"):
        job.make_program(job.vocabulary())


def test_layout_refuses_part_of_a_block(gin):
    config, _ = configuration.load(gin, ("mesh.tensor=4",))
    job = jobs.job_of(config)
    with pytest.raises(
        ValueError, match="tensor=4 must divide 2, an axis of .*_scales"
    ):
        job.make_program(job.vocabulary())


def test_configuration_refuses_an_unknown_base(gin):
    refused(gin, ("model.base=nf5",), "model.base must be 'nf4' or 'int8'")


def test_program_refuses_decode_base_without_base():
    named = ("sampling.decode_base=True",)
    job = jobs.job_of(configuration.load("configs/grpo_arithmetic.gin", named)[0])
    with pytest.raises(ValueError, match="decode_base=True must stay False without mo"):
        job.make_program(job.vocabulary())


@pytest.mark.full
def test_finished_run_on_random_codes_is_exported_whole(gin, monkeypatch, capsys):
    monkeypatch.chdir(gin.parent)
    losses(gin, "run", "run.steps=2")
    said = capsys.readouterr().out
    assert "run/adapter: adapters of random weights (model.checkpoint=None)" in said
    assert cli.main(["generate", "run", "word1", "--max-new-tokens", "2"]) == 0
    assert cli.main(["export", "run", "--out", "adapter"]) == 2
    assert "the adapters belong to random weights (model." in capsys.readouterr().err
    assert cli.main(["export", "run", "--merge", "--out", "whole"]) == 0
    assert "are decoded from the nf4 codes of random weights, and are" in (
        capsys.readouterr().out
    )
    with saved.opened("run") as running, saved.opened("whole") as whole:
        tokens = np.arange(8)[None]
        right, made = (
            place.load("float32").logits(hidden_states(place.load("float32"), tokens))
            for place in (running, whole)
        )
    np.testing.assert_allclose(made, right, atol=1e-4)


def test_adapter_of_random_weights_names_its_run(tmp_path):
    (tmp_path / "adapter").mkdir()
    described = tmp_path / "adapter" / "adapter_config.json"
    described.write_text('{"base_model_name_or_path": ""}')
    for directory in (tmp_path, described.parent):
        with (
            pytest.raises(
                CheckpointError, match="is empty, as in an adapter of random w"
            ),
            saved.opened(directory),
        ):
            pass
