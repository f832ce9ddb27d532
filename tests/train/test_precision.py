"""Trained weights have float32 masters, in every job and whatever they start from."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from jaxmem.commands import cli
from jaxmem.train import configuration, jobs, precision
from jaxmem.train.output.history import read_history
from jaxmem.train.phases import device_bytes, weights_of
from jaxmem.train.state.checkpoint import read_params
from tests.helpers import runs, texts

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
OWN = "tests.helpers.own_models:InBfloat16"
SFT = {
    "model.lora_rank": 0, "model.checkpoint": "llama", "data.source": "texts.jsonl",
    "data.sequence_length": 16, "data.batch_size": 4, "run.accumulate": 2,
    "run.steps": 3, "run.checkpoint_every": 2, "run.out_dir": "run",
    "optimizer.learning_rate": 1e-5, "optimizer.warmup_fraction": 0.0,
}  # fmt: skip
JOBS = {
    "sft_lora.gin": ("data.source=texts.jsonl",),
    "dpo_lora.gin": ("data.source=pairs.jsonl",),
    "grpo_checkpoint.gin": ("task.source=prompts.jsonl", "task.reward=exact"),
    "distill_on_policy.gin": ("task.source=prompts.jsonl", "distill.teacher=llama"),
}


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    words = [a + b + c for a in "abcdef" for b in "xyzuv" for c in "lm"]
    runs.write("texts.jsonl", [{"text": f"{word} and {word[::-1]}"} for word in words])
    rows = [{"prompt": w, "chosen": w, "rejected": w[::-1]} for w in words]
    runs.write("pairs.jsonl", rows)
    runs.write("prompts.jsonl", [{"prompt": x, "answer": x} for x in "bcdefghi"])


def given(changes):
    overrides = [f"{key}={value}" for key, value in (SFT | changes).items()]
    return str(CONFIGS / "sft_lora.gin"), overrides


def train(changes=None):
    """The output of a run; its files are in its directory."""
    gin, overrides = given(changes or {})
    return runs.train(gin, *overrides)[1]


def job_of(changes=None):
    return jobs.job_of(configuration.load(*given(changes or {}))[0])


def kinds(weights):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(weights)}


def saved_params(directory="run", step=3):
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(directory, "checkpoints", str(step), "state").resolve()
        return checkpointer.restore(path)["params"]


def losses(directory="run"):
    return [x.loss for x in read_history(pathlib.Path(directory, "metrics.jsonl"))]


def test_described_names_the_base_of_codes():
    def arrays(kind, *names):
        return {name: jax.ShapeDtypeStruct((4, 64), kind) for name in names}

    coded = arrays("uint8", "kernel_codes", "kernel_scales")
    coded |= arrays("float32", "kernel_scale_scales", "kernel_scale_offset")
    table = arrays("int8", "embedding_codes") | arrays("float32", "embedding_scales")
    frozen = {"query": coded, "embed": table, "head": arrays("bfloat16", "kernel")}
    line = precision.described(arrays("float32", "lora_a"), frozen, "bfloat16")
    assert line == (
        "256 weights are trained in float32, 1,024 are frozen in bfloat16 and int8 and "
        "nf4; computed in bfloat16"
    )


@pytest.mark.full
def test_bfloat16_checkpoint_trains_as_float32():
    said = train()
    wide = train({"run.out_dir": "wide", "model.param_dtype": "float32"})
    assert "9,456 weights are trained in float32; computed in bfloat16" in said
    assert "below the spacing" not in said
    assert losses() == losses("wide")
    ours, theirs = saved_params(), saved_params("wide")
    assert kinds(ours) == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    # Only embeddings of tokens that no text has, whose gradients round to 0, stay.
    job = job_of()
    start = job.make_program(job.vocabulary()).initial_params()
    moved = jax.tree.map(lambda a, b: (np.asarray(a) != b).mean(), start, ours)
    assert min(jax.tree.leaves(moved["blocks"])) > 0.99
    assert moved["norm"]["scale"] == 1.0
    # The model that is left is rounded once, and the run says so.
    line = "saved in run/model, for transformers to load"
    assert f"{line}; weights are in bfloat16 there" in said
    assert f"{line.replace('run', 'wide')}\n" in wide
    left, exact = (
        safetensors.numpy.load_file(f"{name}/model/model.safetensors")
        for name in ("run", "wide")
    )
    for name, array in left.items():
        np.testing.assert_array_equal(array, exact[name].astype(jnp.bfloat16))


@pytest.mark.parametrize("gin", JOBS)
def test_jobs_train_masters_and_freeze_as_told(gin):
    given = *JOBS[gin], "model.checkpoint=llama", "model.param_dtype=bfloat16"
    for trainable in ("None", "'.*'", "'blocks/attention/'"):
        more = [f"optimizer.trainable={trainable}", "model.lora_rank=0"]
        job = jobs.job_of(configuration.load(CONFIGS / gin, [*given, *more])[0])
        program = job.make_program(40)
        shapes = weights_of(program)["trained weights"]  # of a plan
        assert kinds(shapes) == {"float32"}
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert device_bytes(shapes) == 4 * count
        assert kinds(program.state_shapes.optimizer) <= {"float32", "int32"}
        part = trainable == "'blocks/attention/'"
        assert kinds(program.frozen_shapes) == ({"bfloat16"} if part else set())
        if gin == "distill_on_policy.gin":  # which nothing is added to
            assert kinds(program.teacher.state_shapes.params) == {"bfloat16"}


@pytest.mark.full
def test_16_bit_trained_weights_resume_in_float32(monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(
            "jaxmem.train.program.split_weights", lambda weights, _: (weights, {})
        )
        train({"run.steps": 2})
    assert kinds(saved_params(step=2)) == {"bfloat16"}
    said = train()
    assert "resuming run at step 2" in said
    line = (
        "9,456 trained weights were saved in bfloat16 and are trained "
        "further in float32"
    )
    assert line in said
    assert kinds(saved_params()) == {"float32"}
    said = train({"run.steps": 4})
    assert "were saved in" not in said


@pytest.mark.full
def test_16_bit_module_is_trained_in_float32(capsys):
    own = {"model.factory": OWN, "model.hidden": 16}
    said = train(own)
    assert "are trained in float32; computed in bfloat16" in said
    params = saved_params()
    assert kinds(params) == {"float32"}
    job = job_of(own)
    program = job.make_program(job.vocabulary())
    assert str(program.model_config.dtype) == "bfloat16"
    start = program.initial_params()
    assert kinds(start) == {"float32"}
    moved = jax.tree.map(lambda a, b: (np.asarray(a) != b).mean(), start, params)
    assert min(jax.tree.leaves(moved["body"]["mix"])) > 0.9
    tokens = jnp.zeros((1, 4), jnp.int32)
    hidden = program.model(start, {})(tokens, tokens + 1, tokens)
    assert hidden.dtype == jnp.bfloat16
    # What is exported and read again has the same bits.
    assert cli.main(["export", "run", "--out", "model", "--trust-code"]) == 0
    job = job_of(own | {"model.checkpoint": "model"})
    read = job.make_program(job.vocabulary()).initial_params()
    jax.tree.map(np.testing.assert_array_equal, read, params)
    last = read_params(pathlib.Path("run/checkpoints"), 3, start)
    jax.tree.map(np.testing.assert_array_equal, last, params)


@pytest.mark.full
def test_run_warns_of_learning_rate_moving_nothing():
    said = train({"run.steps": 1, "optimizer.learning_rate": 1e-9})
    line = "the largest learning rate, 1e-09, is below the spacing of float32 at the"
    assert line in said.replace("\n", " ")


def test_job_warns_of_learning_rate_moving_nothing():
    job = job_of({"optimizer.learning_rate": 1e-9})
    job.program = job.make_program(job.vocabulary())
    (line,) = job.warnings(job.initial_state())
    assert line.startswith("the largest learning rate, 1e-09, is below the spacing of")


def test_lost_updates_names_unmoved_arrays():
    weights = {
        "small": jnp.full((4,), 1e-4, jnp.bfloat16),
        "large": jnp.full((4,), 0.3, jnp.bfloat16),
        "wide": jnp.full((4,), 0.3, jnp.float32),
        "new": jnp.zeros((4,), jnp.float32),
    }
    assert precision.lost_updates(weights, 1e-2) is None
    line = precision.lost_updates(weights, 1e-5)
    assert "learning rate, 1e-05, is below the spacing of bfloat16 at" in line
    assert "most weights of large: " in line and "\n" not in line
    line = precision.lost_updates(weights, 1e-9)
    assert "of bfloat16 and float32 at" in line
    assert "most weights of large, and 2 more: " in line
