"""A Flax NNX model of one's own is trained by every job, resumed, read and refused."""

import os
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import traverse_util
from jax.sharding import PartitionSpec

from jaxmem.checkpoints import CheckpointError
from jaxmem.commands import cli
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.whole_step import StepProgram
from jaxmem.train.program import ModelProgram
from jaxmem.train.state.checkpoint import read_params
from tests.helpers import own_models, runs, texts
from tests.helpers.cases import slow
from tests.helpers.fake_devices import fake as fake
from tests.helpers.kills import kill_before
from tests.helpers.own_models import JOBS, SIZES

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
OWN = own_models.PATH
MODULE = own_models.__name__


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    words = [a + b + c for a in "abcdef" for b in "xyzuv" for c in "lm"]
    rows = [{"text": f"{word} and {word[::-1]}"} for word in words]
    runs.write("texts.jsonl", rows)
    rows = [{"prompt": w, "chosen": w, "rejected": w[::-1]} for w in words]
    runs.write("pairs.jsonl", rows)
    runs.write("prompts.jsonl", [{"prompt": letter} for letter in "bcdefghi"])
    reward = "def score(completions, **_):\n    return [c.count('a') / 4 for c in "
    pathlib.Path("rewards.py").write_text(f"{reward}completions]\n")
    for job, lines in JOBS.items():
        lines = SIZES + lines + f'run.job = "{job}"\n'
        pathlib.Path(f"{job}.gin").write_text(lines)


def train(job, *overrides, factory=OWN):
    if factory is not None:
        overrides = (*overrides, f"model.factory={factory}")
    return runs.train(f"{job}.gin", *overrides)


def numbers(result):
    return runs.reproducible(result.history)


@pytest.mark.full
@pytest.mark.parametrize("job", ["sft", "dpo", "distill", "grpo"])
def test_jobs_train_own_model_and_resume_bitwise(job, monkeypatch):
    # Rows of pairs hold one document each, so that it may see padding there.
    factory = f"{MODULE}:SeesPadding" if job == "dpo" else OWN
    more = ("optimizer.learning_rate=2e-2", "run.steps=6") if job == "grpo" else ()
    result, said = train(job, *more, factory=factory)
    assert "run/model is not saved: " in said and "model.factory" in said
    first, last = result.history[0], result.history[-1]
    if job == "grpo":
        assert first.reward < 0.1 and last.reward > 0.9
        assert "each of up to 4 tokens" in said
    else:
        assert last.loss < first.loss and last.held_out_loss is not None

    def cut():
        return train(job, "run.out_dir=cut", *more, factory=factory)

    kill_before(4, jobs.JOBS[job], monkeypatch, cut)
    again, resumed = cut()
    assert "resuming cut at step 2" in resumed
    assert numbers(again) == numbers(result)


@pytest.mark.full
@pytest.mark.parametrize("own_tokenizer", [True, slow(False)])
def test_run_starts_from_weights_of_another(own_tokenizer):
    # A name of its own: programs are shared by config, and read the vocabulary there.
    run = "own_run" if own_tokenizer else "llama_run"
    tokenizer = () if own_tokenizer else ("model.checkpoint=llama",)
    train("sft", "run.steps=2", "model.layers=2", f"run.out_dir={run}", *tokenizer)
    overrides = f"model.checkpoint={run}", "model.layers=2", f"model.factory={OWN}"
    config, _ = configuration.load("grpo.gin", overrides)
    job = jobs.job_of(config)
    asked = job.reads.task.ask(0, 1)
    ids, text = asked.ids[0, : asked.lengths[0]].tolist(), f"{run}/tokenizer.json"
    if own_tokenizer:
        said = tokenizers.Tokenizer.from_file(text).decode(ids)
        assert said == asked.items[0].prompt and job.vocabulary() == 280
    program = job.make_program(job.vocabulary())
    last = read_params(pathlib.Path(run, "checkpoints"), 2, program.state_shapes.params)
    for ours, theirs in zip(
        jax.tree.leaves(program.initial_params()), jax.tree.leaves(last), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    for change in ("model.layers=1", "model.layers=3", "model.hidden=8"):
        config, _ = configuration.load("grpo.gin", (*overrides[::2], change))
        other = jobs.job_of(config).make_program(job.vocabulary())
        with pytest.raises(OSError, match="2 and the model differ in params/body/"):
            other.initial_params()


@pytest.mark.parametrize("job, name", [slow("sft", "Ours"), slow("grpo", "OursCached")])
def test_decoder_behind_protocol_takes_same_steps(job, name):
    built_in, _ = train(job, "remat.policy=none", factory=None)
    behind, _ = train(
        job, "remat.policy=none", "run.out_dir=own", factory=f"{MODULE}:{name}"
    )
    assert numbers(behind) == numbers(built_in)


# Conversations compare both, and a job above says the cost.
@pytest.mark.slow
def test_sampling_without_cache_equals_cached():
    cached, said = train("grpo", factory=f"{MODULE}:RecurrentCached")
    assert "recompute" not in said
    again, said = train("grpo", "run.out_dir=again", factory=f"{MODULE}:Recurrent")
    (line,) = [line for line in said.splitlines() if "recompute" in line]
    assert "each of up to 4 tokens" in line
    for ours, theirs in zip(again.history, cached.history, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-4, atol=1e-6)
        assert ours.reward == theirs.reward


@pytest.mark.parametrize(
    "factory, message",
    [
        ("nowhere.py:Model", "cannot import nowhere.py: no such file"),
        (OWN.replace("Model", "Modell"), "has no 'Modell'"),
        (f"{MODULE}:NUMBER", "NUMBER must be a function, got"),
        ("Model", 'must be "file.py:name"'),
        (f"{MODULE}:takes_nothing", r"must take \(config, rngs\)"),
        (f"{MODULE}:returns_nothing", "must return an nnx.Module, got NoneType"),
        (f"{MODULE}:raises", r"raised \(line \d+\) KeyError: 'width'"),
        (f"{MODULE}:NoHead", "NoHead has no method 'head_weight'"),
        (f"{MODULE}:Fails", r"raised \(line \d+\) RuntimeError: no kernel for this"),
        (f"{MODULE}:Flat", r"must return \[B, T, D\], got \(1, 16\)"),
        (f"{MODULE}:Narrow", r"with D = 4, as hidden_states returns.* got \(280, 16\)"),
        (f"{MODULE}:Foreign", "is not among its parameters"),
        (f"{MODULE}:NoParam", "must return an nnx.Param of the model"),
        (f"{MODULE}:Drops", "drop/rngs/count is an nnx.RngCount"),
        (f"{MODULE}:Numbered", "blocks/0/.* has a number for a name"),
        (f"{MODULE}:Small", "has 3 entries, and the data's vocabulary 280"),
        (f"{MODULE}:Half", "has only 'prefill'"),
        slow(f"{MODULE}:SeesOthers", "lets a document see another document of its row"),
        (f"{MODULE}:SeesPadding", "lets a document see another document of its row"),
        (f"{MODULE}:SeesWhatFollows", "lets a token see later tokens"),
    ],
)
def test_bad_factory_is_refused_before_compiling(factory, message, monkeypatch):
    monkeypatch.setattr(StepProgram, "trace_step", None)
    with pytest.raises(ValueError, match=message) as error:
        train("sft", factory=factory)
    assert "model.factory" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "job, override, message",
    [
        ("sft", "remat.policy=offload_block", "remat.policy='offload_block' is for"),
        ("sft", "model.lora_rank=2", "model.lora_rank=2 is for jaxmem's decoder"),
        ("sft", "optimizer.name=muon", "optimizer.name='muon' is for jaxmem's decoder"),
        ("grpo", "grpo.share_prompts=True", "model.factory=.*leave it False"),
        ("grpo", "sampling.slots=4", "sampling.slots=4 .*model.factory"),
    ],
)
def test_options_of_decoder_are_refused_by_name(job, override, message):
    with pytest.raises(ValueError, match=message):
        train(job, override)


@pytest.mark.full
def test_another_factory_does_not_resume_the_run():
    train("sft", "run.steps=2")
    with pytest.raises(ValueError, match="model.factory was .*Model.*, is .*Recurrent"):
        train("sft", factory=f"{MODULE}:Recurrent")


@pytest.mark.full
def test_weights_are_named_and_frozen_by_path():
    result, _ = train("sft", "optimizer.trainable=blocks/0/up")
    assert result.history[-1].loss < result.history[0].loss
    config, _ = configuration.load(
        "sft.gin", [f"model.factory={OWN}", "optimizer.trainable=blocks/0/up"]
    )
    program = ModelProgram(config, 280)
    (names,) = program.state_shapes.params["body"]["blocks"]["0"].values()
    assert set(names) == {"kernel", "bias"} and program.head_is_frozen


@pytest.mark.slow
@pytest.mark.parametrize(
    "job, mesh",
    [
        ("sft", {"fsdp": 2, "tensor": 2}),
        ("sft", {"data": 2, "sequence": 2}),
        ("grpo", {"fsdp": 2, "tensor": 2}),
    ],
)
def test_own_model_equal_on_a_mesh(job, mesh):
    once = "run.steps=2", "eval.every=None", "data.held_out=0"
    once = once if job == "sft" else once[:1]
    alone, _ = train(job, *once, factory=f"{MODULE}:Sharded")
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    on_mesh, _ = train(
        job, *once, "run.out_dir=mesh", *sizes, factory=f"{MODULE}:Sharded"
    )
    for ours, theirs in zip(on_mesh.history, alone.history, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-4, atol=1e-6)


def test_partition_specs_are_those_of_the_parameters():
    mesh = "mesh.fsdp=2", "mesh.tensor=2", f"model.factory={MODULE}:Sharded"
    program = ModelProgram(configuration.load("sft.gin", mesh)[0], 280)
    weights = program.state_shapes.params["body"]
    moments = program.state_shapes.optimizer[1][0].mu["body"]
    for tree in (weights, moments):
        spec = tree["embed"]["embedding"].sharding.spec
        assert spec == PartitionSpec("tensor", ("fsdp", "sequence"))
        assert tree["places"]["embedding"].sharding.spec == PartitionSpec()
    config, _ = configuration.load("sft.gin", [*mesh[:2], mesh[2] + "Unknown"])
    with pytest.raises(ValueError, match="body/places/embedding is sharded over 'tp'"):
        ModelProgram(config, 280)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "grpo"])
def test_it_is_planned(job, fake, capsys):
    given = [f"{job}.gin", "--device", "h200", f"model.factory={OWN}"]
    assert cli.main(["plan", *given]) in (0, 1)
    said = capsys.readouterr().out
    assert "trained weights" in said
    assert ("recompute" in said) == (job == "grpo")


def test_own_model_data_are_shown(capsys):
    assert cli.main(["data", "sft.gin", "--show", "1", f"model.factory={OWN}"]) == 0
    assert "documents, " in capsys.readouterr().out


def test_run_is_generated_from_scored_and_exported(capsys):
    pathlib.Path("sft.gin").write_text(
        pathlib.Path("sft.gin").read_text() + f'model.factory = "{OWN}"\n'
    )
    few = "run.steps=2", "data.held_out=0", "eval.every=None"
    assert cli.main(["train", "sft.gin", *few]) == 0
    code = ["--factory", OWN]
    assert cli.main(["generate", "run", "axl", "--max-new-tokens", "4", *code]) == 0
    assert "recompute" in capsys.readouterr().err
    assert cli.main(["score", "run", "texts.jsonl", "--eos", *code]) == 0
    assert len(pathlib.Path("scores.jsonl").read_text().splitlines()) == 60
    assert cli.main(["export", "run", "--out", "model", "--trust-code"]) == 0
    assert "by their paths" in capsys.readouterr().out
    given = "model.checkpoint=model", f"model.factory={OWN}"
    config, _ = configuration.load("sft.gin", given)
    program = jobs.job_of(config).make_program(jobs.job_of(config).vocabulary())
    newest = max(map(int, os.listdir("run/checkpoints")))
    last = read_params(
        pathlib.Path("run/checkpoints"), newest, program.state_shapes.params
    )
    read = program.initial_params()
    for ours, theirs in zip(*map(jax.tree.leaves, (read, last)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    file = pathlib.Path("model/model.safetensors")
    held = safetensors.numpy.load_file(file)
    assert held.keys() == {*traverse_util.flatten_dict(last["body"], sep="/")}
    safetensors.numpy.save_file(held | {"more": np.ones(2)}, file)
    with pytest.raises(
        CheckpointError, match="tensor more is not part of the model that"
    ):
        type(program)(program.config, 280).initial_params()
