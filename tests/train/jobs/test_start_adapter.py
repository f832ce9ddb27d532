"""Jobs that train an adapter further: its settings, its weights, and its reference."""

import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util
from safetensors.numpy import load_file, save_file

from jaxmem import checkpoints
from jaxmem.commands import cli
from jaxmem.models import lora
from jaxmem.train import configuration, jobs, saved, starts
from jaxmem.train.jobs.sft import Sft
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.kills import kill_before
from tests.helpers.runs import job_with, train, write

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
DATA = """
data.sequence_length = 16
data.batch_size = 2
"""
RUN = """
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
run.steps = 1
run.checkpoint_every = 1
run.compare_heads = False
run.out_dir = "run"
"""
TASK = """
run.job = "grpo"
task.source = "prompts.jsonl"
task.max_prompt_tokens = 8
sampling.max_new_tokens = 4
task.reward = "reward.py:score"
grpo.prompts = 2
grpo.group_size = 4
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
grpo.kl_coefficient = 0.1
"""
REWARD = """
def score(completions, **columns):
    return [float(len(c) + i) for i, c in enumerate(completions)]
"""
ADAPTER = "model.checkpoint=qwen3/adapter"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """The checkpoint qwen3 with PEFT's adapters, a run that left one, and data."""
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("qwen3", tmp_path)
    shutil.copytree("qwen3/adapter", "left/adapter")
    words = [x + y for x in "abc" for y in "de"]
    write("prompts.jsonl", [{"prompt": word} for word in words])
    write("texts.jsonl", [{"text": word * 3} for word in words])
    pairs = [{"prompt": w, "chosen": w[0], "rejected": w[1]} for w in words]
    write("pairs.jsonl", pairs)
    text, pair = 'data.source = "texts.jsonl"\n', 'data.source = "pairs.jsonl"\n'
    pathlib.Path("sft.gin").write_text(text + DATA + RUN)
    pathlib.Path("dpo.gin").write_text(pair + DATA + RUN + 'run.job = "dpo"\n')
    pathlib.Path("grpo.gin").write_text(RUN + TASK)
    pathlib.Path("reward.py").write_text(REWARD)
    return tmp_path


def trained_at_start(job):
    """The trained weights of a job before its first step, by path."""
    return traverse_util.flatten_dict(job.program.initial_params(), sep="/")


def loaded(adapter, **options):
    decoder = checkpoints.load("qwen3", dtype="float32", adapter=adapter, **options)
    weights = nnx.to_pure_dict(nnx.split(decoder)[1])
    return traverse_util.flatten_dict(weights, sep="/"), decoder.config


def assert_start(job, adapter, **options):
    weights, model = loaded(adapter, param_dtype="float32", **options)
    start = trained_at_start(job)
    assert {*start} == {path for path in weights if lora.is_saved(path, model)}
    for path, weight in start.items():
        np.testing.assert_array_equal(weight, weights[path])
    ours = job.config.model
    for field in ("lora_rank", "lora_alpha", "lora_targets", "lora_head", "lora_saved"):
        assert getattr(ours, field) == getattr(model, field)


@pytest.mark.parametrize(
    "named",
    [
        (ADAPTER,),
        ("model.checkpoint=left",),
        ("model.checkpoint=qwen3", "model.adapter=qwen3/adapter"),
        (ADAPTER, "model.lora_rank=3", "model.lora_alpha=5.0"),
    ],
)
def test_start_is_the_adapter(named, directory):
    job = job_with("sft.gin", *named)
    assert_start(job, "qwen3/adapter")
    assert job.config.model.checkpoint in ("qwen3", str(directory / "qwen3"))
    assert jobs.job_of(job.config).config == job.config
    said = " ".join(job.program.lines())
    assert (
        "training goes on with the adapter " in said and "(rank 3, alpha 5, of" in said
    )


def test_start_with_whole_matrices_on_a_mesh():
    mesh = "mesh.fsdp=2", "mesh.tensor=2"
    job = job_with("sft.gin", "model.checkpoint=qwen3/whole", *mesh)
    assert job.config.model.lora_saved == ("embed", "head")
    assert_start(job, "qwen3/whole")
    table = job.program.initial_params()["embed"]["embedding"]
    assert len(table.sharding.device_set) == 4


def test_start_of_several_ranks_and_layers():
    path = pathlib.Path("qwen3/adapter/adapter_config.json")
    config = json.loads(path.read_text())
    modules = ["q_proj", "v_proj", "lm_head"]
    config |= {"layers_to_transform": [1], "layers_pattern": "layers"}
    config |= {"rank_pattern": {"v_proj": 5}, "target_modules": modules[:2]}
    path.write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    start, made = "base_model.model.model.layers.1.self_attn.{}.lora_{}.weight", {}
    for name, rank in (("q_proj", 3), ("v_proj", 5)):
        base = load_file("qwen3/model.safetensors")
        out = base[f"model.layers.1.self_attn.{name}.weight"].shape[0]
        made[start.format(name, "A")] = rng.normal(size=(rank, 16)).astype("f4")
        made[start.format(name, "B")] = rng.normal(size=(out, rank)).astype("f4")
    save_file(made, "qwen3/adapter/adapter_model.safetensors")
    job = job_with("sft.gin", ADAPTER)
    assert_start(job, "qwen3/adapter")
    assert job.config.model.lora_rank == 5


@pytest.mark.parametrize("recorded", [False, True])
def test_start_on_codes(recorded):
    """The codes are chosen by the job, or recorded beside the adapter."""
    named = () if recorded else ("model.base=int8",)
    if recorded:
        record = {"base": "int8", "base_targets": ["up", "down"]}
        pathlib.Path("qwen3/adapter/base.json").write_text(json.dumps(record))
    job = job_with("sft.gin", ADAPTER, *named)
    assert job.config.model.base == "int8"
    assert_start(job, "qwen3/adapter", **({} if recorded else {"base": "int8"}))
    frozen = traverse_util.flatten_dict(job.program.frozen(), sep="/")
    assert any(path.endswith("_codes") for path in frozen)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (
            (ADAPTER, "model.lora_rank=8", "model.lora_targets=('query',)"),
            "model.lora_rank=8 differs from 3, model.lora_targets=('query',) differs "
            "from ('query', 'key', 'value', 'output', 'gate', 'up', 'down') of the "
            "adapter qwen3/adapter: leave these settings to the adapter "
            "(model.lora_rank=None model.lora_targets=None), or merge it and start "
            "from NEW: jaxmem export qwen3/adapter --merge --out NEW",
        ),
        ((ADAPTER, "model.lora_rank=0"), "model.lora_rank=0 differs from 3 of the"),
        ((ADAPTER, "model.lora_alpha=6.0"), "model.lora_alpha=6.0 differs from 5.0 of"),
        (
            (ADAPTER, "model.adapter=left"),
            "model.checkpoint='qwen3/adapter' is an adapter, and model.adapter='left' ",
        ),
        (
            ("model.checkpoint=qwen3", "model.adapter=nowhere"),
            "model.adapter='nowhere': name an adapter (a directory with adap",
        ),
        (
            (ADAPTER, "model.factory=own.py:make"),
            "model.adapter must be left out",
        ),
    ],
)
def test_impossible_starts_are_refused(named, message, capsys):
    if "factory" in named[-1]:
        named = "model.checkpoint=qwen3", "model.adapter=left", named[-1]
        message = "model.adapter='left' is for jaxmem's decoder"
    assert cli.main(["train", "sft.gin", *named]) == 2
    assert message in capsys.readouterr().err


def test_adapter_without_checkpoint_is_refused():
    runs.refused("sft.gin", ("model.adapter=left",), "model.adapter must be left out")


def test_start_without_its_base_is_refused(capsys):
    shutil.move("qwen3", "moved")
    assert cli.main(["train", "sft.gin", "model.checkpoint=left"]) == 2
    said = capsys.readouterr().err
    assert "name it by model.checkpoint, with model.adapter=left" in said
    named = "model.checkpoint=moved", "model.adapter=left"
    assert job_with("sft.gin", *named).config.model.lora_rank == 3


def test_start_of_dora_is_refused(capsys):
    path = pathlib.Path("qwen3/adapter/adapter_config.json")
    config = json.loads(path.read_text()) | {"use_dora": True}
    path.write_text(json.dumps(config))
    assert cli.main(["train", "sft.gin", ADAPTER]) == 2
    assert "is a DoRA adapter, which jaxmem cannot train" in capsys.readouterr().err


def test_start_with_another_template_names_it(capsys):
    path = pathlib.Path("qwen3/adapter/chat_template.jinja")
    path.write_text("{{ messages[0].content }}")
    assert cli.main(["train", "sft.gin", ADAPTER]) == 2
    message = "choose one of them: data.chat_template=qwen3/adapter/chat_template.jinja"
    assert message in capsys.readouterr().err
    job = jobs.job_of(
        configuration.load("sft.gin", (ADAPTER, f"data.chat_template={path}"))[0]
    )
    assert job.reads.chat_template == str(path)
    shutil.copy(path, "qwen3")  # the base has the same
    assert job_with("sft.gin", ADAPTER).reads.chat_template is None


def spoil(adapter="qwen3/adapter"):
    """Remove an adapter, as a run that is resumed finds its start."""
    shutil.rmtree(adapter)


@pytest.mark.full
def test_sft_resumes_without_its_start(tmp_path, monkeypatch):
    more = ADAPTER, "run.steps=4"
    train("sft.gin", *more, "run.out_dir=once")
    kill_before(3, Sft, monkeypatch, lambda: train("sft.gin", *more))
    spoil()
    with saved.opened("run") as source:  # the run's copy suffices
        assert source.load().config.lora_rank == 3
    train("sft.gin", *more)
    assert runs.steps("run") == runs.steps("once")
    ours, theirs = (loaded(f"{name}/adapter")[0] for name in ("run", "once"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    config = json.loads(pathlib.Path("run/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "qwen3")
    assert cli.main(["train", "sft.gin", "model.checkpoint=left", "run.steps=5"]) == 2


@pytest.mark.full
def test_dpo_reference_is_the_start():
    result, _ = train("dpo.gin", ADAPTER, "run.steps=2")
    first = result.history[0]
    assert abs(first.loss - math.log(2)) < 1e-6 and first.margin == 0
    spoil()
    pathlib.Path("run/reference.npz").unlink()  # it is scored again, by the copy
    again, _ = train("dpo.gin", ADAPTER, "run.steps=3")
    shutil.rmtree("run")
    shutil.copytree("left/adapter", "qwen3/adapter")
    once, _ = train("dpo.gin", ADAPTER, "run.steps=3")
    assert runs.reproducible(again.history) == runs.reproducible(once.history)


@pytest.mark.full
def test_dpo_scores_a_changed_start_again():
    job = job_with("dpo.gin", ADAPTER)
    before = starts.digest(job.config)
    tensors = load_file("qwen3/adapter/adapter_model.safetensors")
    name = min(name for name in tensors if ".lora_B" in name)
    tensors[name] = tensors[name] + 1
    save_file(tensors, "qwen3/adapter/adapter_model.safetensors")
    assert starts.digest(job.config) != before


@pytest.mark.full
def test_grpo_kl_is_to_the_start():
    result, _ = train("grpo.gin", ADAPTER, "run.steps=2")
    first, second = result.history
    assert abs(first.kl) < 1e-6 < second.kl


def test_adapter_as_a_teacher_is_refused(capsys):
    text = 'data.source = "texts.jsonl"\ndistill.teacher = "left"\n'
    pathlib.Path("distill.gin").write_text(text + DATA + RUN + 'run.job = "distill"\n')
    assert cli.main(["train", "distill.gin", "model.checkpoint=qwen3"]) == 2
    assert "distill.teacher='left': an adapter; merge it" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("mode", ["text", slow("on_policy")])
def test_distillation_starts_from_the_adapter(mode):
    """A student that is its teacher with an adapter is merged into the teacher."""
    merged = checkpoints.merge(checkpoints.load("qwen3", adapter="qwen3/adapter"))
    checkpoints.save("teacher", merged, like="qwen3")
    more = 'run.job = "distill"\ndistill.teacher = "teacher"\n'
    more += f'distill.mode = "{mode}"\n'
    if mode == "text":
        more += 'data.source = "texts.jsonl"\n'
        pathlib.Path("distill.gin").write_text(DATA + RUN + more)
    else:
        pathlib.Path("distill.gin").write_text(
            RUN
            + TASK.partition("task.reward")[0].replace('run.job = "grpo"\n', "")
            + more
            + "distill.prompts = 2\ndistill.max_tokens = 64\n"
        )
    result, _ = train("distill.gin", ADAPTER, "model.dtype=float32")
    assert result.history[0].divergence < 1e-3  # of bfloat16, in which it is merged
