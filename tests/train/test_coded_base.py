"""Runs that train adapters on a base in 4 or 8 bits."""

import json

import numpy as np
import pytest

from jaxmem.commands import cli
from jaxmem.train import configuration, jobs
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
    "model.feed_forwards=('experts',)", "model.experts=4", "model.expert_ff=256",
    "model.experts_per_token=2", "model.lora_targets=('query',)",
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
    assert 'model.base was "nf4", is "int8"' in capsys.readouterr().err


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
