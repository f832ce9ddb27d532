"""The step's arithmetic, and runs that survive anything."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from jaxmem import remat
from jaxmem.data.documents import Batch, DataConfig, DataError, batches, load_tokenizer
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.head import HeadConfig
from jaxmem.models.weights import join_weights, split_weights
from jaxmem.train import jobs
from jaxmem.train.history import read_history
from jaxmem.train.jobs import sft, whole_step
from jaxmem.train.jobs.config import Config
from jaxmem.train.jobs.running import with_steps
from jaxmem.train.optimizer import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from jaxmem.train.program import TrainState, update
from jaxmem.train.settings import RunConfig
from tests.cases import slow
from tests.hlo import vocabulary_gemms

MODEL = ModelConfig(layers=1, hidden=16, ff=24, heads=2, kv_heads=1, head_dim=8)
DATA = DataConfig(vocab_size=320, sequence_length=32, batch_size=4, held_out=0.0)
RUN = RunConfig(steps=6, checkpoint_every=4, log_every=2, compare_heads=False)


pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Text of our own that is the same on every machine."""
    words = "the head of a model maps each hidden state to a token of its text".split()
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(
        " ".join(rng.choice(words) + str(rng.integers(999)) for _ in range(4000))
    )
    return path


def small_config(text_file, out_dir):
    return Config(
        data=dataclasses.replace(
            DATA, source=str(text_file), cache_dir=str(text_file.parent)
        ),
        model=MODEL,
        head=HeadConfig(chunk=32),
        optimizer=OptimizerConfig(warmup_steps=2),
        run=dataclasses.replace(RUN, out_dir=str(out_dir)),
    )


@pytest.fixture
def config(text_file, tmp_path):
    return small_config(text_file, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(text_file, tmp_path_factory):
    """A run of six steps, what it returned and what it said; not to be changed."""
    config = small_config(text_file, tmp_path_factory.mktemp("finished") / "run")
    config = changed(config, run=dict(compare_heads=True))
    return config, *train(config, "run.steps = 6\n")


def changed(config, **sections):
    """The config with some fields of some sections replaced."""
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(getattr(config, name), **fields)
            for name, fields in sections.items()
        },
    )


def train(config, text=""):
    stream = io.StringIO()
    result = jobs.train(config, text, Console(file=stream, width=120))
    return result, stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", [k for k in remat.PRESETS if k != "full"])
def test_what_is_kept_changes_no_loss(name, config, finished):
    _, wanted, _ = finished
    result, _ = train(changed(config, remat=dict(policy=name)))
    assert losses(result) == pytest.approx(losses(wanted), rel=1e-5)


@pytest.mark.parametrize(
    "sections",
    [
        dict(
            remat=dict(policy="none", unroll=True),
            head=dict(logits="materialised"),
        ),
        slow(dict(remat=dict(policy="save_attention", save=("gate",)))),
    ],
)
def test_neither_head_nor_loop_nor_more_names_change_a_loss(sections, config, finished):
    _, wanted, _ = finished
    result, _ = train(changed(config, **sections))
    assert losses(result) == pytest.approx(losses(wanted), rel=1e-5)


def test_utilisation_where_the_peak_is_known(config, monkeypatch):
    """6 N and attention, over the peak of all devices; here of 1 TFLOP/s."""
    monkeypatch.setattr(sft, "peak_of", lambda kind, dtype: 1e12)
    result, said = train(config)
    step = result.history[-1]
    weights = sft.Program(config, 320).state_shapes.params
    matrices = sum(
        leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
        if path[-1].key in ("kernel", "embedding")
    )  # fmt: skip
    model, length = config.model, config.data.sequence_length
    attention = 12 * model.layers * model.heads * model.head_dim * length
    tokens = config.data.batch_size * length * config.run.accumulate
    expected = tokens * (6 * matrices + attention) / step.seconds / 1e12
    assert step.mfu == pytest.approx(expected)
    assert f"MFU {step.mfu:.1%}" in said


def test_more_blocks_whole_than_there_are(config):
    with pytest.raises(ValueError, match="remat.last=1 must be below the 1 layers"):
        sft.Program(changed(config, remat=dict(last=1)), 320)


def test_a_policy_is_chosen_by_the_memory_limit(config, finished, monkeypatch):
    """One that takes less time, as it keeps what the limit allows."""
    _, wanted, _ = finished
    few = functools.partial(remat.fit, names=["gate"])  # of all, each is traced
    monkeypatch.setattr(remat, "fit", few)
    used, compile_step = [], sft.Program.compile_step

    def listen(program, *head):
        used.append(program.policy)
        return compile_step(program, *head)

    monkeypatch.setattr(sft.Program, "compile_step", listen)
    result, said = train(changed(config, remat=dict(policy="fit", memory_limit=1.0)))
    assert losses(result) == pytest.approx(losses(wanted), rel=1e-5)
    assert re.search(r"^save gate .* chosen$", said, re.MULTILINE), said
    assert used == [remat.Policy(save=("gate",))]


def losses(result):
    return [s.loss for s in result.history]


# -------------------------------------------------------------------- step


def random_rows(rows, length=16, seed=0):
    """Rows whose counts of labels differ widely; one has none."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, (rows, length)).astype(np.int32)
    counted = np.arange(length) < np.linspace(0, length, rows).astype(int)[:, None]
    labels = np.where(counted, np.roll(tokens, -1, axis=1), -1).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return Batch(tokens, labels, np.ones_like(tokens), positions)


def split(batch, count):
    return Batch(*(a.reshape(count, -1, a.shape[-1]) for a in batch))


def keep_gradients():
    """An optimizer whose state is the last gradient, and that moves nothing."""
    return optax.GradientTransformation(
        lambda params: params,
        lambda gradient, _, params: (jax.tree.map(jnp.zeros_like, params), gradient),
    )


def adamw():
    return make_optimizer(OptimizerConfig(), lambda _: 3e-3)


@functools.cache
def small_step(make, **changes):
    model = dataclasses.replace(MODEL, vocab_size=50, **changes)
    decoder = Decoder(model, HeadConfig(chunk=8), rngs=nnx.Rngs(0))
    definition, weights = nnx.split(decoder)
    params, optimizer = nnx.to_pure_dict(weights), make()
    step = whole_step.step_of(sft.make_gradients(definition, HeadConfig()), optimizer)
    run = jax.jit(lambda state, batch: step(state, {}, batch))
    return run, TrainState(params, optimizer.init(params))


@pytest.mark.parametrize("count", [slow(2), 8])
def test_accumulation_does_not_change_loss_or_gradients(count):
    step, state = small_step(keep_gradients)
    batch = random_rows(8)
    whole, expected = step(state, split(batch, 1))
    parts, numbers = step(state, split(batch, count))
    assert int(numbers["tokens"]) == (batch.labels >= 0).sum()
    np.testing.assert_allclose(numbers["loss"], expected["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7),
        parts.optimizer,
        whole.optimizer,
    )


MIXED = {
    "feed_forwards": ("experts",), "experts": 4, "experts_per_token": 2,
    "expert_ff": 24,
}  # fmt: skip


def test_the_loss_of_routers_counts_by_the_tokens_that_are_read():
    rows = random_rows(2)
    documents = np.ones_like(rows.tokens)
    documents[1, 5:] = 0  # padding, whose labels do not count either
    labels = np.where(documents > 0, rows.labels, -1)
    rows = rows._replace(segment_ids=documents, labels=labels)
    twice = Batch(*(np.concatenate([x, x]) for x in rows))
    made = {}
    for factor in (0.0, 2.0):
        step, state = small_step(keep_gradients, **MIXED, router_aux_loss_coef=factor)
        parts, numbers = step(state, split(twice, 2))
        made[factor] = parts.optimizer, numbers["loss"]
        assert numbers["routed"].counts.sum() == 2 * 2 * (documents > 0).sum()
    whole, expected = step(state, split(twice, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        (parts.optimizer, numbers["routed"]),
        (whole.optimizer, expected["routed"]),
    )
    assert made[0.0][1] == made[2.0][1]  # the loss of tokens alone is recorded
    routers = [
        of["blocks"]["feed_forward"]["router"]["kernel"] for of, _ in made.values()
    ]
    assert np.abs(routers[1] - routers[0]).max() > 1e-3


def test_the_loss_is_the_mean_over_tokens_not_over_micro_batches():
    step, state = small_step(keep_gradients)
    batch = random_rows(8)
    row = np.arange(8)[:, None]
    means, tokens = [], []
    for i in range(8):
        labels = np.where(row == i, batch.labels, -1)
        _, numbers = step(state, split(batch._replace(labels=labels), 8))
        means.append(float(numbers["loss"]))
        tokens.append(int(numbers["tokens"]))
    _, numbers = step(state, split(batch, 8))
    assert tokens[0] == 0 and means[0] == 0.0
    expected = np.average(means, weights=tokens)
    assert float(numbers["loss"]) == pytest.approx(expected, rel=1e-6)
    assert abs(np.mean(means) - expected) > 0.1


def test_a_step_without_labels_has_loss_zero_and_no_gradient():
    masked = split(random_rows(8)._replace(labels=np.full((8, 16), -1, np.int32)), 8)
    step, state = small_step(keep_gradients)
    after, numbers = step(state, masked)
    assert float(numbers["loss"]) == 0.0 and float(numbers["grad_norm"]) == 0.0
    assert int(numbers["tokens"]) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(after.optimizer))
    step, state = small_step(adamw)
    after, _ = step(state, masked)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_moments_are_float32_whatever_the_parameters(config):
    program = sft.Program(changed(config, model=dict(param_dtype="bfloat16")), 50)
    shapes = program.state_shapes
    kept = {leaf.dtype for leaf in jax.tree.leaves(shapes.params)}
    moments = {leaf.dtype for leaf in jax.tree.leaves(shapes.optimizer) if leaf.ndim}
    assert kept == {jnp.dtype("bfloat16")} and moments == {jnp.dtype("float32")}
    # The step must return what it accepts.
    step, _ = small_step(adamw, param_dtype="bfloat16")
    returned, _ = jax.eval_shape(step, shapes, split(random_rows(8), 2))
    assert jax.tree.map(lambda leaf: leaf.dtype, returned) == jax.tree.map(
        lambda leaf: leaf.dtype, shapes
    )


def test_norms_do_not_decay_though_stacking_gave_them_two_axes():
    _, state = small_step(adamw)
    optimizer = make_optimizer(
        OptimizerConfig(weight_decay=0.5, clip_norm=None), lambda _: 0.1
    )
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    updates, _ = optimizer.update(zeros, optimizer.init(state.params), state.params)
    blocks = state.params["blocks"]
    assert blocks["attention_norm"]["scale"].ndim == 2
    assert not updates["blocks"]["attention_norm"]["scale"].any()
    gate = blocks["feed_forward"]["gate"]["kernel"]
    np.testing.assert_allclose(
        updates["blocks"]["feed_forward"]["gate"]["kernel"], -0.05 * gate, rtol=1e-5
    )


def test_frozen_weights_have_no_gradient_no_moments_and_never_change(config, tmp_path):
    config = changed(
        config,
        model=dict(param_dtype="bfloat16"),
        optimizer=dict(trainable="attention/|^norm"),
        run=dict(compare_heads=False),
    )
    program = sft.Program(config, 320)
    shapes = program.state_shapes
    assert set(shapes.params) == {"blocks", "norm"}
    assert set(shapes.params["blocks"]) == {"attention"}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes.params)} == {np.dtype("f4")}
    frozen = jax.tree.leaves(program.frozen_shapes)
    assert {leaf.dtype for leaf in frozen} == {jnp.dtype("bfloat16")}
    trained = sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
    moments = sum(leaf.size for leaf in jax.tree.leaves(shapes.optimizer) if leaf.ndim)
    assert moments == 2 * trained
    sizes = program.compile_step(config.head).memory_analysis()
    # Weights and moments are donated: what is left of the output are scalars.
    assert sizes.output_size_in_bytes - sizes.alias_size_in_bytes < 400
    result, _ = train(config)
    assert losses(result)[-1] < losses(result)[0]
    more = dict(steps=8, seed=1)
    with pytest.raises(ValueError, match="run.seed was 0, is 1"):
        train(changed(config, run=more))


@pytest.mark.parametrize("trainable, products", [(None, 3), ("^blocks", 2)])
def test_a_step_has_no_product_of_the_vocabulary_twice(trainable, products, config):
    """The gradients of the head come from its forward pass, a chunk at a time."""
    optimizer = dict(trainable=trainable)
    config = changed(config, model=dict(tied=False), optimizer=optimizer)
    compiled = sft.Program(config, 640).compile_step(HeadConfig(chunk=16))
    assert vocabulary_gemms(compiled.as_text(), 640) == products


def test_weights_are_split_by_name_and_joined_again():
    _, state = small_step(adamw)
    for pattern, names in (("attention/query", 1), ("scale", 3), (".", 11)):
        trained, frozen = split_weights(state.params, pattern)
        assert len(jax.tree.leaves(trained)) == names
        joined = join_weights(trained, frozen)
        assert jax.tree.structure(joined) == jax.tree.structure(state.params)
        jax.tree.map(np.testing.assert_array_equal, joined, state.params)
    with pytest.raises(ValueError, match="trainable='heads' is in no weight's name: b"):
        split_weights(state.params, "heads")


def test_the_learning_rate_warms_up_then_decays():
    rates = [
        float(learning_rate_schedule(OptimizerConfig(1.0, warmup_steps=4), 20)(i))
        for i in range(20)
    ]
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0.1 < rates[-1] < 0.12


# -------------------------------------------------------------------- runs


def rates(steps=20, **changes):
    schedule = learning_rate_schedule(OptimizerConfig(1.0, **changes), steps)
    return [float(schedule(i)) for i in range(steps + 1)]


def test_schedules_by_name():
    warmed = [0.2, 0.4, 0.6, 0.8, 1.0]
    for name in ("constant", "linear", "wsd", "cosine"):
        made = rates(warmup_fraction=0.2, schedule=name, final_fraction=0.5)
        np.testing.assert_allclose(made[:5], warmed, rtol=1e-6)
        assert made[4:] == sorted(made[4:], reverse=True)
        assert made[-1] == pytest.approx(1 if name == "constant" else 0.5)
    made = rates(warmup_fraction=0.0, schedule="wsd", final_fraction=0.0)
    np.testing.assert_allclose(made[:17], 1)
    np.testing.assert_allclose(made[16:], [1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    assert rates(1, warmup_fraction=1.0)[0] == 1.0  # one step has no warmup
    assert rates(10)[:2] == [0.5, 1.0]
    with pytest.raises(ValueError, match="OptimizerConfig.schedule must be one of"):
        OptimizerConfig(schedule="step")


def test_epochs_decide_the_steps(config):
    tokenizer = load_tokenizer(config.data)
    count = sum(1 for _ in batches(config.data, tokenizer, epochs=1))
    for epochs, accumulate in ((2, 1), (0.5, 1), (1, 3)):
        run = dict(epochs=epochs, accumulate=accumulate, steps=1)
        made = with_steps(jobs.job_of(changed(config, run=run))).config.run
        assert made.steps == -(-epochs * count // accumulate)
    job = jobs.job_of(config)
    assert with_steps(job) is job
    with pytest.raises(ValueError, match="RunConfig.epochs must be above 0, or None"):
        changed(config, run=dict(epochs=0.0))


def test_a_run_leaves_everything_it_promises(finished):
    _, result, said = finished
    assert [s.step for s in result.history] == [1, 2, 3, 4, 5, 6]
    assert result.history == read_history(result.out_dir / "metrics.jsonl")
    assert {p.name for p in result.out_dir.iterdir()} == {
        "checkpoints", "metrics.jsonl", "model", "operative.gin", "report.html",
        "report.png", "settings.gin", "started.txt", "summary.json", "tensorboard",
        "tokenizer.json",
    }  # fmt: skip
    assert (result.out_dir / "operative.gin").read_text() == "run.steps = 6\n"
    assert "step 1/6" in said and "step 6/6" in said
    assert "fused" in said and "materialised" in said and "tokens/s" in said
    summary = json.loads((result.out_dir / "summary.json").read_text())
    assert summary["last_loss"] == result.history[-1].loss < summary["first_loss"]
    fused, materialised = result.costs["fused"], result.costs["materialised"]
    logits = 4 * 32 * 320 * 4  # rows x tokens x vocabulary x bytes
    assert fused.head.temporary < logits < materialised.head.temporary
    assert fused.step.temporary < materialised.step.temporary
    assert fused.step.peak < materialised.step.peak


@pytest.mark.usefixtures("one_program")
def test_held_out_text_is_scored_once_whatever_the_batches(config, tmp_path):
    words = "a state of the model maps to each token of its text".split()
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(words, 40)) for _ in range(40)]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    source = dict(source=str(path), held_out=0.25, vocab_size=280)
    config = changed(config, data=source)
    result, said = train(config)
    assert f"held-out loss {result.summary['held_out_loss']:.4f}" in said
    summary = json.loads((result.out_dir / "summary.json").read_text())
    assert summary["held_out_loss"] == result.summary["held_out_loss"]
    tokenizer = load_tokenizer(config.data)
    scored = []
    for changes in (dict(data={}), dict(data=dict(batch_size=3)),
                    dict(head=dict(logits="materialised"))):  # fmt: skip
        other = changed(config, **changes)
        program = sft.Program(other, tokenizer.get_vocab_size())
        rows = batches(other.data, tokenizer, split="evaluation", epochs=1)
        params = program.initial_state().params
        scored.append(program.evaluate(params, {}, rows))
    np.testing.assert_allclose(scored, scored[0], rtol=1e-6)
    assert 0 < result.summary["held_out_loss"] < scored[0] < np.log(280) + 1


def test_that_nothing_is_held_out_is_said_before_the_first_step(config):
    config = changed(config, data=dict(held_out=0.5))  # of one document
    with pytest.raises(DataError, match="is one document, and a "):
        train(config)
    assert not (pathlib.Path(config.run.out_dir) / "metrics.jsonl").exists()


@pytest.mark.usefixtures("one_program")
def test_a_finished_run_can_be_continued_with_another_head(finished, tmp_path):
    config, first, _ = finished
    shutil.copytree(first.out_dir, tmp_path / "run")
    run = dict(steps=8, out_dir=str(tmp_path / "run"), compare_heads=False)
    longer = changed(config, run=run, head=dict(logits="materialised"))
    result, said = train(longer)
    assert "after step 6" in said
    assert losses(result)[:6] == losses(first) and len(result.history) == 8
    assert train(longer)[0].history == result.history  # nothing left to do


# The run that is killed has such a pass, and its errors are held against float64.
@pytest.mark.slow
def test_a_forward_pass_in_8_bits_tells_its_error(config):
    model = dict(hidden=32, dtype="bfloat16")
    history = {}
    for name, gradient in ("exact", None), ("int8", ("sample", 8, "int8")):
        given = changed(config, model=model, head=dict(gradient=gradient))
        history[name] = train(given)[0].history
        shutil.rmtree(given.run.out_dir)
    assert [s.forward_error for s in history["exact"]] == [None] * 6
    assert all(0 < s.forward_error < 1e-2 for s in history["int8"])
    # The same weights and rows: the loss has no other error than that.
    first = [steps[0].loss for steps in history.values()]
    assert 0 < abs(first[0] - first[1]) < 1e-2
    assert abs(history["int8"][-1].loss - history["exact"][-1].loss) < 0.05


def test_a_run_in_8_bits_needs_bfloat16(config):
    head = dict(gradient=("sample", 8, "int8"))
    with pytest.raises(NotImplementedError, match="needs bfloat16 hidden states"):
        train(changed(config, model=dict(hidden=32), head=head))


def test_every_micro_batch_of_every_step_has_draws_of_its_own():
    model = dataclasses.replace(MODEL, vocab_size=50)
    definition, weights = nnx.split(Decoder(model, rngs=nnx.Rngs(0)))
    head, params = HeadConfig(gradient=("sample", 2)), nnx.to_pure_dict(weights)
    gradients = jax.jit(sft.make_gradients(definition, head, seed=3))
    rows = random_rows(2)
    twice = Batch(*(np.stack([x, x]) for x in rows))

    def W(batch, number):
        made, _ = gradients(params, {}, batch, np.uint32(number))
        return np.asarray(made["norm"]["scale"])

    once = [W(split(rows, 1), number) for number in (1, 1, 2)]
    np.testing.assert_array_equal(once[0], once[1])
    assert np.any(once[0] != once[2])
    # Two equal micro-batches: were their draws the same, the mean would be either's.
    assert np.any(np.abs(W(twice, 1) - once[0]) > 1e-6)


def test_resuming_with_another_model_or_other_data_is_refused(finished):
    config, first, _ = finished
    with pytest.raises(ValueError, match="model.hidden was 16, is 32"):
        train(changed(config, model=dict(hidden=32)))
    with pytest.raises(ValueError, match="data.batch_size was 4, is 2; .*data.seed"):
        train(changed(config, data=dict(batch_size=2, seed=1)))
    assert read_history(first.out_dir / "metrics.jsonl") == first.history


def test_other_text_is_refused_before_a_file_of_the_run_changes(finished, tmp_path):
    config, first, _ = finished
    shutil.copytree(first.out_dir, tmp_path / "run")
    source = pathlib.Path(config.data.source)
    text = source.read_text()
    other = changed(config, run=dict(steps=8, out_dir=str(tmp_path / "run")))
    try:
        source.write_text(text.replace("token", "letter"))
        with pytest.raises(DataError, match="belongs to other data"):
            train(other, "run.steps = 8\n")
    finally:
        source.write_text(text)
    for name in ("tokenizer.json", "operative.gin"):
        was, now = (path / name for path in (first.out_dir, tmp_path / "run"))
        assert was.read_text() == now.read_text()


def test_a_run_resumes_without_clipping(finished, tmp_path):
    config, first, _ = finished
    assert config.optimizer.clip_norm is not None
    shutil.copytree(first.out_dir, tmp_path / "run")
    run = dict(steps=7, out_dir=str(tmp_path / "run"), compare_heads=False)
    longer = changed(config, optimizer=dict(clip_norm=None), run=run)
    result, said = train(longer)
    assert "after step 6" in said and len(result.history) == 7


def test_another_backend_than_the_checkpoint_s_is_refused(finished, monkeypatch):
    config, first, _ = finished
    assert first.history[-1].backend == "xla"
    monkeypatch.setattr(sft.Program, "backend", "hopper")
    with pytest.raises(ValueError, match="^head.implementation was 'xla' in run"):
        train(changed(config, run=dict(steps=7)))


def test_a_gradient_that_is_not_finite_leaves_no_checkpoint(config, monkeypatch):
    def not_finite(*given):
        return update(*given)[0], jnp.float32(jnp.inf)

    monkeypatch.setattr(whole_step, "update", not_finite)
    config = changed(config, run=dict(checkpoint_every=1))
    with pytest.raises(FloatingPointError, match="gradient's norm of step 1 is inf"):
        train(config)
    assert not list((pathlib.Path(config.run.out_dir) / "checkpoints").glob("1"))


def test_a_loss_that_is_not_finite_stops_the_run(config, monkeypatch):
    monkeypatch.setattr(sft, "head_loss", lambda *_: (jnp.float32(jnp.nan), {}))
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        train(config)


def test_a_vocabulary_below_the_tokenizer_s_is_refused(config):
    with pytest.raises(
        ValueError, match="model.vocab_size=300 is below .* 320 entries"
    ):
        train(changed(config, model=dict(vocab_size=300)))


def test_a_warmup_as_long_as_the_run_is_refused(config):
    with pytest.raises(ValueError, match="warmup_steps=6 must be below run.steps=6"):
        train(changed(config, optimizer=dict(warmup_steps=6)))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (RunConfig, dict(steps=0), "steps must be at least 1, got 0"),
        (RunConfig, dict(accumulate=-1), "accumulate must be at least 1, got -1"),
        (RunConfig, dict(seed=-1), "seed must be in .*got -1"),
        (OptimizerConfig, dict(learning_rate=0.0), "learning_rate must be above 0"),
        (OptimizerConfig, dict(b2=1.0), "b2 must be in .*got 1.0"),
        (OptimizerConfig, dict(clip_norm=0.0), "clip_norm must be above 0, or None"),
        (OptimizerConfig, dict(trainable="("), "trainable must be a regular expressio"),
    ],
)
def test_impossible_settings_are_refused_by_name(kind, changes, message):
    with pytest.raises(ValueError, match=f"{kind.__name__}.{message}"):
        kind(**changes)


# ------------------------------------------------------------------- kills

PROGRAM = textwrap.dedent(
    """
    import sys
    from jaxmem.train import jobs
    from jaxmem.train.jobs.config import Config
    from jaxmem.data.documents import DataConfig
    from jaxmem.models.decoder import ModelConfig
    from jaxmem.models.head import HeadConfig
    from jaxmem.train.evaluation import EvalConfig
    from jaxmem.train.memory import RematConfig
    from jaxmem.models.partitioning import MeshConfig
    from jaxmem.train.optimizer import OptimizerConfig
    from jaxmem.train.settings import RunConfig

    jobs.train(eval(sys.stdin.read()))
    """
)


def start(config, out_dir, checkpoint_every):
    run = dict(out_dir=str(out_dir), checkpoint_every=checkpoint_every)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
    )
    process.stdin.write(repr(changed(config, run=run)))
    process.stdin.close()
    return process


def finish(process):
    with process.stderr as errors:
        said = errors.read()
    assert process.wait() == 0, said


def kill_after(process, metrics_file, step):
    """SIGKILL as soon as the step is written, wherever the process is then."""
    while process.poll() is None:
        if metrics_file.exists() and metrics_file.read_text().count("\n") >= step:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    with process.stderr as errors:
        said = errors.read()
    assert process.wait() == -signal.SIGKILL, said


def of_steps(out_dir):
    path = out_dir / "metrics.jsonl"
    return [(s.step, s.loss, s.grad_norm, s.tokens) for s in read_history(path)]


@pytest.mark.usefixtures("one_program")
def test_killed_a_run_takes_bitwise_the_steps_of_one_never_stopped(config, tmp_path):
    head = dict(gradient=("sample", 8, "int8"))  # draws follow from the step's number
    model = dict(hidden=32, dtype="bfloat16")
    config = changed(config, run=dict(steps=20, accumulate=2), head=head, model=model)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kill_after(start(config, killed, 5), killed / "metrics.jsonl", 7)
    assert 7 <= len(of_steps(killed)) < 20
    for out_dir in (killed, whole):
        run = dict(out_dir=str(out_dir), checkpoint_every=100)
        _, said = train(changed(config, run=run))
        assert ("resuming" in said) == (out_dir == killed)
    assert of_steps(killed) == of_steps(whole)
    told = read_history(whole / "metrics.jsonl")
    assert all(0 < step.forward_error < 1e-2 for step in told)


@pytest.mark.slow
def test_killed_twice_a_run_takes_bitwise_the_steps_of_one_never_stopped(
    config, tmp_path
):
    head = dict(gradient=("sample", 8))  # whose draws follow from the step's number
    config = changed(config, run=dict(steps=40, accumulate=2), head=head)
    finish(start(config, tmp_path / "whole", 100))
    killed = tmp_path / "killed"
    # First between checkpoints; then saving after each step, most likely in a save.
    kill_after(start(config, killed, 5), killed / "metrics.jsonl", 13)
    written = len(read_history(killed / "metrics.jsonl"))
    saved = max(int(p.name) for p in (killed / "checkpoints").glob("[0-9]*[0-9]"))
    assert saved % 5 == 0 and saved <= written < 40
    kill_after(start(config, killed, 1), killed / "metrics.jsonl", written + 4)
    finish(start(config, killed, 7))
    resumed = of_steps(killed)
    assert [step for step, *_ in resumed] == list(range(1, 41))
    assert resumed == of_steps(tmp_path / "whole")
