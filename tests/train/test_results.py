"""Trainers that start from a checkpoint, and leave what others load."""

import dataclasses
import io
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tokenizers import processors

from jaxmem import checkpoints
from jaxmem.checkpoints import CheckpointError
from jaxmem.commands import cli
from jaxmem.data import documents, vocabulary
from jaxmem.models import lora
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.train import configuration, results
from jaxmem.train.jobs import job_of
from jaxmem.train.jobs.reading import Documents
from tests.helpers import texts
from tests.helpers.cases import slow
from tests.helpers.runs import train

TEXT = ["abcabc"] * 4  # all alike: so is the mean loss of any batch of them
SFT = """
data.source = "shuffled.jsonl"
data.sequence_length = 16
data.batch_size = 2
head.chunk = 8
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
optimizer.learning_rate = 1e-2
run.steps = 3
run.checkpoint_every = 3
run.compare_heads = False
"""
ADAPTED = "model.lora_rank=2", "data.batch_size=4", "optimizer.learning_rate=0.03"


pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"text": text}) + "\n" for text in TEXT]
    pathlib.Path("text.jsonl").write_text("".join(records))
    # Grain takes a millisecond an index to shuffle four, and far less to shuffle many.
    pathlib.Path("shuffled.jsonl").write_text("".join(records) * 32)
    pathlib.Path("sft.gin").write_text(SFT)
    return tmp_path


def weights_of(decoder):
    return nnx.to_pure_dict(nnx.split(decoder)[1])


@jax.jit
def mean_loss(decoder):
    """The mean loss of the text, from each document's second token to its end."""
    ids = [[1, *(texts.LETTERS.index(c) + 3 for c in text), 2] for text in TEXT]
    rows = jnp.asarray(ids)
    places = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden = decoder(rows, jnp.ones_like(rows), places)
    return -decoder.head.logprobs(hidden[:, :-1], rows[:, 1:]).mean()


# -------------------------------------------------------------------- runs


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, slow(True)])
def test_adapters_train_with_the_base_frozen(whole, directory):
    model = texts.checkpoint("qwen3", directory)
    head = "('embed', 'head')" if whole else "('embed',)"
    named = f"model.checkpoint={model}", *ADAPTED, f"model.lora_saved={head}"
    named = *named, f"model.lora_head={not whole}", "run.out_dir=run"
    result, shown = train("sft.gin", *named)
    assert result.history[-1].loss < result.history[0].loss - 0.1
    assert "saved in run/adapter" in shown
    loaded = checkpoints.load(
        model, dtype="float32", param_dtype="float32", adapter="run/adapter"
    )
    base = checkpoints.load(model, dtype="float32", param_dtype="float32")
    flat = lora.adapters_of(weights_of(loaded))
    saved = [("embed", "embedding"), ("head", "kernel")]
    for name, matrix in saved[: 1 + whole]:
        ours, theirs = (weights_of(x)[name][matrix] for x in (loaded, base))
        assert np.abs(ours - theirs).max() > 0
    if not whole:
        assert flat["head"].keys() == {"lora_a", "lora_b"}
        assert np.abs(flat["head"]["lora_b"]).max() > 0
    # One more step's loss: what was saved is what was trained.
    more, _ = train("sft.gin", *named, "run.steps=4")
    assert abs(more.history[-1].loss - mean_loss(loaded)) < 1e-4
    assert abs(more.history[0].loss - mean_loss(base)) < 1e-4


# ------------------------------------------------------------------ pieces


def test_task_words_are_checkpoint_tokens(directory):
    model = texts.checkpoint("llama", directory, letters="ab0123456789+=")
    made = vocabulary.spelling(str(model))
    words = np.array([[2, 11, 12], [1, 0, 13]])  # 0 9 + / end padding =
    ids = made.write(words)
    assert ids.tolist() == [[5, 14, 15], [2, 2, 16]] and made.size == 17
    assert made.read(ids).tolist() == [[2, 11, 12], [1, 1, 13]]
    assert made.read(np.array([3])).tolist() == [14]  # "a" is none of its words
    own = vocabulary.spelling(None)
    np.testing.assert_array_equal(own.read(own.write(words)), words)
    model = texts.checkpoint("qwen3", directory)
    with pytest.raises(CheckpointError, match="needs the token '8'"):
        vocabulary.spelling(str(model))


def test_documents_start_and_end_as_checkpoint_says(directory):
    config = documents.DataConfig(source="text.jsonl", sequence_length=16, batch_size=4)
    for start, first in ((True, 1), (False, 3)):
        name = "llama" if start else "qwen2"
        model = texts.checkpoint(name, directory, start=start)
        tokenizer = Documents(config, ModelConfig(checkpoint=str(model))).tokenizer
        batch = next(documents.batches(config, tokenizer, epochs=1))
        assert vocabulary.edges(tokenizer) == ([1] if start else [], [2])
        starts = batch.tokens[(batch.positions == 0) & (batch.segment_ids > 0)]
        assert set(starts.tolist()) <= ({first})
        assert (batch.labels == 2).sum() == len(TEXT)


def test_edges_of_a_vocabulary_without_letters():
    tokenizer = vocabulary.of_words()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "<eos>"], special_tokens=[("<eos>", 1)]
    )
    assert vocabulary.edges(tokenizer) == ([], [1])


def test_prompts_uncounted_without_document_start(directory):
    record = {"prompt": "ab", "response": "c"}
    pathlib.Path("text.jsonl").write_text(json.dumps(record) + "\n")
    config = documents.DataConfig(source="text.jsonl", sequence_length=8, batch_size=1)
    for start in (True, False):
        name = "llama" if start else "qwen2"
        model = texts.checkpoint(name, directory, start=start)
        tokenizer = vocabulary.of_checkpoint(str(model))
        batch = next(documents.batches(config, tokenizer, epochs=1))
        counted = batch.labels[batch.labels >= 0]
        assert counted.tolist() == [5, 2]  # c and the end


def test_checkpoint_sizes_and_adapters_freeze_rest(directory):
    model = texts.checkpoint("gemma3", directory)
    config, _ = configuration.load(
        "sft.gin", [f"model.checkpoint={model}", "model.dtype=bfloat16",
                    "model.lora_rank=2"]
    )  # fmt: skip
    made = job_of(config).config
    assert (made.model.self_attn.window, made.model.dtype) == (3, "bfloat16")
    assert made.optimizer.trainable == lora.trainable(())
    assert job_of(made).config == made
    given = dataclasses.replace(config.optimizer, trainable="norm")
    config = dataclasses.replace(config, optimizer=given)
    assert job_of(config).config.optimizer.trainable == "norm"
    other = dataclasses.replace(config.model, hidden=32)
    with pytest.raises(
        ValueError, match="model.hidden=32 differs from the checkpoint's"
    ):
        job_of(dataclasses.replace(config, model=other))


def test_sizes_that_differ_from_a_checkpoint_are_named_at_once(directory):
    overrides = (
        f"model.checkpoint={texts.checkpoint('llama', directory)}",
        "data.source=x",
    )
    config, _ = configuration.load("sft_stdlib.gin", overrides)
    with pytest.raises(ValueError) as caught:
        job_of(config)
    said = str(caught.value)
    assert said.startswith("model.hidden=128 differs from the checkpoint's 16, model.")
    removals = said.partition(": add ")[2].split()
    assert len(removals) > 3 and "model.hidden=None" in removals
    config, _ = configuration.load("sft_stdlib.gin", [*overrides, *removals])
    assert job_of(config).config.model.hidden == 16


def test_checkpoint_without_an_end_cannot_be_trained(directory):
    model = texts.checkpoint("llama", directory)
    (model / "tokenizer_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(
        CheckpointError, match="training needs the token that ends a sequence"
    ):
        vocabulary.of_checkpoint(str(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_rank=-1), "lora_rank must be at least 0"),
        (dict(lora_rank=2, lora_alpha=0.0), "lora_alpha must be above 0"),
        (dict(lora_rank=2, lora_targets=("q",)), "lora_targets must be among .*'q'"),
        (dict(lora_rank=2, lora_targets=()), "lora_targets must name a matrix"),
        (dict(lora_head=True), "lora_head needs a lora_rank above 0"),
        (dict(lora_saved=("head",), tied=False), "lora_saved needs a lora_rank above"),
        (dict(lora_rank=1, lora_saved=("head",)), "lora_saved is for a head with its"),
        (dict(lora_rank=1, lora_saved=("x",)), "lora_saved must be among embed, head"),
    ],
)
def test_impossible_adapters_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"ModelConfig.{message}"):
        ModelConfig(**changes)


def test_command_names_fault_of_checkpoint(directory, capsys):
    assert cli.main(["train", "sft.gin", "model.checkpoint=nowhere"]) == 2
    assert "nowhere/config.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "alone"), [("gemma3", True), ("gemma3_images", False)]
)
def test_adapter_says_what_loads_it(name, alone, tmp_path):
    model = checkpoints.with_checkpoint(
        ModelConfig(checkpoint=str(texts.TINY / name), lora_rank=1)
    )
    shapes = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(shapes)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    console = Console(file=io.StringIO(), width=1000)
    overrides = "model.checkpoint=unread", "data.source=unread"
    config, _ = configuration.load("sft_lora", overrides)
    job = job_of(dataclasses.replace(config, model=model))
    results.leave(tmp_path, nnx.merge(definition, zeros), console, job)
    said = console.file.getvalue()
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert f"saved in {tmp_path}/adapter, for PEFT to load" in said
    assert ("together with the text part of the checkpoint" not in said) == alone


@pytest.mark.slow
def test_checkpoint_goes_to_a_mesh_in_parts(directory):
    model = texts.checkpoint("qwen3", directory)
    named = f"model.checkpoint={model}", *ADAPTED
    alone, _ = train("sft.gin", *named, "run.out_dir=a")
    mesh = "mesh.fsdp=2", "mesh.tensor=2"
    parts, shown = train("sft.gin", *named, "run.out_dir=b", *mesh)
    for one, other in zip(alone.history, parts.history, strict=True):
        assert abs(one.loss - other.loss) < 1e-4
    assert "saved in b/adapter" in shown
