"""The step's arithmetic, and runs that survive anything."""

import dataclasses
import functools
import json
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmem import generate, remat
from jaxmem.data.documents import Batch, DataConfig, DataError, batches, load_tokenizer
from jaxmem.models.decoder import Decoder, ModelConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.models.weights import join_weights, split_weights
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import sft, whole_step
from jaxmem.train.jobs.config import SftJobConfig
from jaxmem.train.jobs.running import with_steps
from jaxmem.train.optimizer import (
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)
from jaxmem.train.output.history import read_history
from jaxmem.train.program import DecoderProgram, TrainState
from jaxmem.train.settings import RunConfig
from tests.helpers.cases import slow
from tests.helpers.hlo import vocabulary_gemms
from tests.helpers.runs import changed, drawn, run as train, write

MODEL = ModelConfig(layers=1, hidden=16, ff=24, heads=2, kv_heads=1, head_dim=8)
DATA = DataConfig(vocab_size=320, sequence_length=32, batch_size=4, held_out=0.0)
RUN = RunConfig(steps=6, checkpoint_every=4, log_every=2, compare_heads=False)
WORDS = "the head of a model maps each hidden state to a token of its text".split()


pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)


def words(count):
    """Text of our own that is the same on every machine."""
    rng = np.random.default_rng(0)
    return [rng.choice(WORDS) + str(rng.integers(999)) for _ in range(count)]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words(4000)))
    return path


def small_config(text_file, out_dir):
    return SftJobConfig(
        data=dataclasses.replace(
            DATA, source=str(text_file), cache_dir=str(text_file.parent)
        ),
        model=MODEL,
        head=HeadConfig(chunk=32),
        optimizer=OptimizerConfig(warmup_steps=2, schedule="constant"),
        run=dataclasses.replace(RUN, out_dir=str(out_dir)),
    )


@pytest.fixture
def config(text_file, tmp_path):
    return small_config(text_file, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(text_file, tmp_path_factory, programs_of_module):
    """A run of six steps, what it returned and what it said; not to be changed."""
    config = small_config(text_file, tmp_path_factory.mktemp("finished") / "run")
    config = changed(config, run=dict(compare_heads=True))
    return config, *train(config, "run.steps = 6\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", [k for k in remat.PRESETS if k != "full"])
def test_remat_policy_changes_no_loss(name, config, finished):
    _, wanted, _ = finished
    result, _ = train(changed(config, remat=dict(policy=name)))
    assert losses(result) == pytest.approx(losses(wanted), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        dict(remat=dict(policy="none", unroll=True), head=dict(logits="materialised")),
        dict(remat=dict(policy="save_attention", save=("gate",))),
    ],
)
def test_loss_independent_of_head_loop_and_names(sections, config, finished):
    _, wanted, _ = finished
    result, _ = train(changed(config, **sections))
    assert losses(result) == pytest.approx(losses(wanted), rel=1e-5)


@pytest.mark.full
def test_utilisation_where_the_peak_is_known(config, monkeypatch):
    """6 N and attention, over the peak of all devices; here of 1 TFLOP/s."""
    monkeypatch.setattr(sft, "peak_of", lambda kind, dtype: 1e12)
    result, said = train(config)
    step = result.history[-1]
    weights = sft.SftProgram(config, 320).state_shapes.params
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
        sft.SftProgram(changed(config, remat=dict(last=1)), 320)


@pytest.mark.full
def test_policy_is_chosen_by_the_memory_limit(config, finished, monkeypatch):
    """One that takes less time, as it keeps what the limit allows."""
    _, wanted, _ = finished
    few = functools.partial(remat.fit, names=["gate"])  # of all, each is traced
    monkeypatch.setattr(remat, "fit", few)
    used, compile_verified = [], DecoderProgram.compile_verified

    def listen(program, traced):
        used.append(program.policy)
        return compile_verified(program, traced)

    monkeypatch.setattr(DecoderProgram, "compile_verified", listen)
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


def split(batch, *parts):
    """Micro-batches [K, B, T] that read those rows, and have padding for others."""

    def only(rows):
        read = np.isin(np.arange(len(batch.tokens)), [*rows])[:, None]
        labels = np.where(read, batch.labels, -1)
        return batch._replace(labels=labels, segment_ids=read * batch.segment_ids)

    return Batch(*map(np.stack, zip(*map(only, parts), strict=True)))


def keep_gradients():
    """An optimizer whose state is the last gradient, and that moves nothing."""
    return optax.GradientTransformation(
        lambda params: params,
        lambda gradient, _, params: (jax.tree.map(jnp.zeros_like, params), gradient),
    )


def model_of(**changes):
    return MODEL.replaced({"vocab_size": 50} | changes)


@functools.cache
def small_step(**changes):
    """A step of two micro-batches of eight rows, whose gradients are its state."""
    definition, params = drawn(
        lambda: Decoder(model_of(**changes), HeadConfig(chunk=8), rngs=nnx.Rngs(0))
    )
    gradients = sft.make_gradients(definition, HeadConfig())
    step = whole_step.step_of(gradients, keep_gradients())
    return jax.jit(lambda batch: step(TrainState(params, ()), {}, batch))


def test_accumulation_keeps_loss_and_gradients():
    step, batch = small_step(), random_rows(8)
    whole, expected = step(split(batch, range(8), ()))
    parts, numbers = step(split(batch, range(1, 8, 3), (0, 2, 3, 5, 6)))
    assert int(numbers["tokens"]) == (batch.labels >= 0).sum()
    np.testing.assert_allclose(numbers["loss"], expected["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7),
        parts.optimizer,
        whole.optimizer,
    )


MIXED = {
    "feed_forwards": ("experts",), "experts.count": 4, "experts.per_token": 2,
    "experts.ff": 24,
}  # fmt: skip


def test_router_loss_is_weighted_by_read_tokens():
    rows = random_rows(4)
    documents = np.ones_like(rows.tokens)
    documents[1, 5:] = 0  # padding, whose labels do not count either
    labels = np.where(documents > 0, rows.labels, -1)
    rows = rows._replace(segment_ids=documents, labels=labels)
    twice = Batch(*(np.concatenate([x, x]) for x in rows))
    step = small_step(**MIXED, router_aux_loss_coef=2.0)
    parts, numbers = step(split(twice, range(4), range(4, 8)))
    whole, expected = step(split(twice, range(8), ()))
    assert numbers["routed"].counts.sum() == 2 * 2 * (documents > 0).sum()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        (parts.optimizer, numbers["routed"]),
        (whole.optimizer, expected["routed"]),
    )
    # Without labels it is all that there is, and the loss of tokens alone is recorded.
    unlabelled = twice._replace(labels=np.full_like(twice.labels, -1))
    of_routers, numbers = step(split(unlabelled, range(4), range(4, 8)))
    assert numbers["loss"] == 0 and expected["loss"] > 1
    router = of_routers.optimizer["blocks"]["feed_forward"]["router"]["kernel"]
    assert np.abs(router).max() > 1e-3


def test_loss_is_mean_over_tokens():
    step, batch = small_step(), random_rows(8)
    means, tokens = [], []
    for i in range(8):
        _, numbers = step(split(batch, (), [i]))
        means.append(float(numbers["loss"]))
        tokens.append(int(numbers["tokens"]))
    _, numbers = step(split(batch, range(4), range(4, 8)))
    assert tokens[0] == 0 and means[0] == 0.0
    expected = np.average(means, weights=tokens)
    assert float(numbers["loss"]) == pytest.approx(expected, rel=1e-6)
    assert abs(np.mean(means) - expected) > 0.1


def test_step_without_labels_is_zero():
    after, numbers = small_step()(split(random_rows(8), (), ()))
    assert float(numbers["loss"]) == 0.0 and float(numbers["grad_norm"]) == 0.0
    assert int(numbers["tokens"]) == 0
    assert all(not leaf.any() for leaf in jax.tree.leaves(after.optimizer))


def test_weights_and_moments_are_float32(config):
    program = sft.SftProgram(changed(config, model=dict(param_dtype="bfloat16")), 320)
    shapes = program.state_shapes
    kept = {leaf.dtype for leaf in jax.tree.leaves(shapes.params)}
    moments = {leaf.dtype for leaf in jax.tree.leaves(shapes.optimizer) if leaf.ndim}
    assert kept == moments == {jnp.dtype("float32")}
    # The step must return what it accepts.
    step = whole_step.step_of(program.gradients(config.head), program.optimizer)
    returned, _ = jax.eval_shape(step, shapes, {}, program.micro_batches())
    assert jax.tree.map(lambda leaf: leaf.dtype, returned) == jax.tree.map(
        lambda leaf: leaf.dtype, shapes
    )


def test_stacked_norms_do_not_decay():
    """By a gradient of 0, whose norm is a divisor of clipping."""
    _, params = drawn(lambda: Decoder(model_of(), rngs=nnx.Rngs(0)))
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), lambda _: 0.1)
    zeros = jax.tree.map(np.zeros_like, params)
    state = jax.eval_shape(optimizer.init, params)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
    blocks = params["blocks"]
    updates = jax.jit(optimizer.update)(zeros, state, params)[0]["blocks"]
    assert blocks["attention_norm"]["scale"].ndim == 2
    assert not updates["attention_norm"]["scale"].any()
    np.testing.assert_allclose(
        updates["feed_forward"]["gate"]["kernel"],
        -0.05 * blocks["feed_forward"]["gate"]["kernel"],
        rtol=1e-5,
    )


@pytest.fixture
def partly_frozen(config):
    return changed(
        config,
        model=dict(param_dtype="bfloat16"),
        optimizer=dict(trainable="attention/|^norm"),
    )


def test_frozen_weights_have_no_moments(partly_frozen):
    program = sft.SftProgram(partly_frozen, 320)
    shapes = program.state_shapes
    assert set(shapes.params) == {"blocks", "norm"}
    assert set(shapes.params["blocks"]) == {"attention"}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes.params)} == {np.dtype("f4")}
    frozen = jax.tree.leaves(program.frozen_shapes)
    assert {leaf.dtype for leaf in frozen} == {jnp.dtype("bfloat16")}
    trained = sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
    moments = sum(leaf.size for leaf in jax.tree.leaves(shapes.optimizer) if leaf.ndim)
    assert moments == 2 * trained


@pytest.mark.slow
def test_frozen_weights_never_change(partly_frozen):
    config = partly_frozen
    sizes = sft.SftProgram(config, 320).compile_step(config.head).memory_analysis()
    # Weights and moments are donated: what is left of the output are scalars.
    assert sizes.output_size_in_bytes - sizes.alias_size_in_bytes < 400
    result, _ = train(config)
    assert losses(result)[-1] < losses(result)[0]
    more = dict(steps=8, seed=1)
    with pytest.raises(ValueError, match="run.seed was 0, is 1"):
        train(changed(config, run=more))


@pytest.mark.parametrize("trainable, products", [slow(None, 3), ("^blocks", 2)])
def test_step_has_no_product_of_the_vocabulary_twice(trainable, products, config):
    """The gradients of the head come from its forward pass, a chunk at a time."""
    optimizer = dict(trainable=trainable)
    config = changed(config, model=dict(tied=False), optimizer=optimizer)
    program = sft.SftProgram(config, 640)
    weights = program.state_shapes.params, program.frozen_shapes
    gradients = jax.jit(program.gradients(HeadConfig(chunk=16)))
    compiled = gradients.lower(*weights, program.micro_batches()).compile()
    assert vocabulary_gemms(compiled.as_text(), 640) == products


def test_weights_are_split_by_name_and_joined_again():
    _, params = drawn(lambda: Decoder(model_of(), rngs=nnx.Rngs(0)))
    for pattern, names in (("attention/query", 1), ("scale", 3), (".", 11)):
        trained, frozen = split_weights(params, pattern)
        assert len(jax.tree.leaves(trained)) == names
        joined = join_weights(trained, frozen)
        assert jax.tree.structure(joined) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, joined, params)
    with pytest.raises(ValueError, match="trainable='heads' is in no weight's name: b"):
        split_weights(params, "heads")


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
    assert rates(warmup_steps=4)[3:5] == pytest.approx([0.8, 1])
    assert 0.1 < rates(warmup_steps=4)[-2] < 0.12
    with pytest.raises(
        ValueError, match="OptimizerConfig.schedule must be 'cosine' or"
    ):
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
    with pytest.raises(ValueError, match="run.epochs must be above 0, or None"):
        changed(config, run=dict(epochs=0.0))


def test_run_leaves_everything_it_promises(finished):
    _, result, said = finished
    assert [s.step for s in result.history] == [1, 2, 3, 4, 5, 6]
    assert result.history == read_history(result.out_dir / "metrics.jsonl")
    assert {p.name for p in result.out_dir.iterdir()} == {
        "about.json", "checkpoints", "jaxmem_run.json", "metrics.jsonl", "model",
        "operative.gin",
        "report.html", "report.png", "settings.gin", "started.txt", "summary.json",
        "tensorboard", "tokenizer.json",
    }  # fmt: skip
    assert (result.out_dir / "operative.gin").read_text() == "run.steps = 6\n"
    assert "step 1/6" in said and "step 6/6" in said
    about = json.loads((result.out_dir / "about.json").read_text())
    assert about["trained"] == about["parameters"] > 0
    assert about["data"]["noun"] == "documents" and about["data"]["tokens"] > 0
    assert "fused" in said and "materialised" in said and "tokens/s" in said
    summary = json.loads((result.out_dir / "summary.json").read_text())
    assert summary["last_loss"] == result.history[-1].loss < summary["first_loss"]
    fused, materialised = result.costs["fused"], result.costs["materialised"]
    logits = 4 * 32 * 320 * 4  # rows x tokens x vocabulary x bytes
    assert fused.head.temporary < logits < materialised.head.temporary
    assert fused.step.temporary < materialised.step.temporary
    assert fused.step.peak < materialised.step.peak


@pytest.fixture
def with_held_out(config, tmp_path):
    documents = np.reshape(words(1600), (40, 40))
    path = tmp_path / "documents.jsonl"
    write(path, [{"text": " ".join(row)} for row in documents])
    return changed(config, data=dict(source=str(path), held_out=0.25))


def held_out_loss(config, **sections):
    """The held-out loss of the initial weights."""
    tokenizer = load_tokenizer(config.data)
    assert tokenizer.get_vocab_size() == 320
    params = sft.SftProgram(config, 320).initial_state().params
    other = changed(config, **sections)
    rows = batches(other.data, tokenizer, split="evaluation", epochs=1)
    return sft.SftProgram(other, 320).evaluate(params, {}, rows)


@pytest.mark.full
@pytest.mark.parametrize(
    "sections",
    [dict(data=dict(batch_size=7)), dict(head=dict(logits="materialised"))],
)
def test_held_out_text_is_scored_once(sections, with_held_out):
    scored = held_out_loss(with_held_out)
    np.testing.assert_allclose(
        held_out_loss(with_held_out, **sections), scored, rtol=1e-6
    )
    assert 0 < scored < np.log(320) + 1


@pytest.mark.slow
def test_run_ends_with_its_held_out_loss(with_held_out):
    result, said = train(with_held_out)
    found = result.summary["held_out_loss"]
    assert f"held-out loss {found:.4f}" in said
    summary = json.loads((result.out_dir / "summary.json").read_text())
    assert summary["held_out_loss"] == found
    assert 0 < found < held_out_loss(with_held_out)


def test_at_start_evaluates_the_initial_weights(with_held_out):
    config = changed(with_held_out, eval=dict(every=500, at_start=True))
    result, said = train(config)
    initial = result.summary["initial_held_out"]
    np.testing.assert_allclose(initial, held_out_loss(with_held_out), rtol=1e-6)
    assert f"before step 1 held out {initial:.4f}\n" in said
    assert result.summary["best_held_out"] < initial
    assert [s.step for s in result.history][:2] == [1, 2]
    with pytest.raises(ValueError, match="at_start=True is for evaluations during "):
        changed(config, eval=dict(every=None))


def test_epochs_shorter_than_eval_every_are_evaluated_at_their_ends(with_held_out):
    config = changed(with_held_out, run=dict(epochs=2.0), eval=dict(every=500))
    counted = with_steps(jobs.job_of(config)).config
    assert counted.eval.every == counted.run.steps // 2
    job = jobs.job_of(changed(config, eval=dict(every=1)))
    assert with_steps(job).config.eval.every == 1
    assert with_steps(jobs.job_of(with_held_out)).config.eval.every is None


@pytest.mark.full
def test_train_without_a_text_leaves_one_and_a_generator(with_held_out):
    config = changed(with_held_out, run=dict(epochs=2.0), eval=dict(every=500))
    result, said = train(config)
    steps = len(result.history)
    evaluated = [s.step for s in result.history if s.held_out_loss is not None]
    assert evaluated == [steps // 2, steps]
    shown = f"evaluated every {steps // 2} steps, not every 500"
    assert f"an epoch has fewer steps than eval.every: {shown}" in said
    assert "trains little" not in said
    saved, _ = configuration.load(result.out_dir / "operative.gin")
    assert saved == config
    assert result.model == result.out_dir / "model"
    options = generate.GenerateConfig(max_new_tokens=2, temperature=0)
    (completion,) = result.generator(options)(["the head of"])
    assert len(completion.ids) <= 2


@pytest.mark.full
def test_epochs_of_few_steps_are_said_to_train_little(config):
    result, said = train(changed(config, run=dict(epochs=0.05)))
    steps = len(result.history)
    assert 1 < steps < 20
    few = f"{steps} steps in all, which trains little: raise run.epochs, or lower data."
    assert few in said


def test_nothing_held_out_is_said_before_first_step(config):
    config = changed(config, data=dict(held_out=0.5))  # of one document
    with pytest.raises(DataError, match="is one document, which "):
        train(config)
    assert not (pathlib.Path(config.run.out_dir) / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["model", "summary.json"])
def test_missing_results_of_a_complete_run_are_written_again(name, finished, tmp_path):
    config, first, _ = finished
    shutil.copytree(first.out_dir, tmp_path / "run")
    path = tmp_path / "run" / name
    path.rename(tmp_path / name)
    _, said = train(changed(config, run=dict(out_dir=str(tmp_path / "run"))))
    assert "run: all steps are done; writing the results that are missing\n" in said
    assert path.exists() and "saved in" in said
    _, said = train(changed(config, run=dict(out_dir=str(tmp_path / "run"))))
    assert said.endswith("another run.out_dir\n") and len(said.splitlines()) == 1


def test_finished_run_continues_with_another_head(finished, tmp_path):
    config, first, _ = finished
    shutil.copytree(first.out_dir, tmp_path / "run")
    run = dict(steps=8, out_dir=str(tmp_path / "run"), compare_heads=False)
    longer = changed(config, run=run, head=dict(logits="materialised"))
    result, said = train(longer)
    assert "at step 6 of" in said
    assert losses(result)[:6] == losses(first) and len(result.history) == 8
    assert train(longer)[0].history == result.history  # nothing left to do


# The run that is killed has such a pass, and its errors are held against float64.
@pytest.mark.slow
def test_forward_pass_in_8_bits_tells_its_error(config):
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


def test_run_in_8_bits_needs_bfloat16(config):
    head = dict(gradient=("sample", 8, "int8"))
    with pytest.raises(NotImplementedError, match="needs bfloat16 hidden states"):
        train(changed(config, model=dict(hidden=32), head=head))


@pytest.mark.full
def test_micro_batches_have_own_draws():
    definition, params = drawn(lambda: Decoder(model_of(), rngs=nnx.Rngs(0)))
    head = HeadConfig(gradient=("sample", 2))
    gradients = jax.jit(sft.make_gradients(definition, head, seed=3))
    rows = random_rows(8)
    twice = split(rows, range(8), range(8))

    def W(batch, number):
        made, _ = gradients(params, {}, batch, np.uint32(number))
        return np.asarray(made["norm"]["scale"])

    once = [W(split(rows, range(8), ()), number) for number in (1, 1, 2)]
    np.testing.assert_array_equal(once[0], once[1])
    assert np.any(once[0] != once[2])
    # Two equal micro-batches: were their draws the same, the mean would be either's.
    assert np.any(np.abs(W(twice, 1) - once[0]) > 1e-6)


def test_resume_refuses_another_model_or_data(finished):
    config, first, _ = finished
    with pytest.raises(ValueError, match="model.hidden was 16, is 32"):
        train(changed(config, model=dict(hidden=32)))
    with pytest.raises(ValueError, match="data.batch_size was 4, is 2; .*data.seed"):
        train(changed(config, data=dict(batch_size=2, seed=1)))
    assert read_history(first.out_dir / "metrics.jsonl") == first.history


def test_other_text_is_refused_before_files_change(finished, tmp_path):
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


@pytest.mark.slow
def test_run_resumes_without_clipping(finished, tmp_path):
    config, first, _ = finished
    assert config.optimizer.clip_norm is not None
    shutil.copytree(first.out_dir, tmp_path / "run")
    run = dict(steps=7, out_dir=str(tmp_path / "run"), compare_heads=False)
    longer = changed(config, optimizer=dict(clip_norm=None), run=run)
    result, said = train(longer)
    assert "at step 6 of" in said and len(result.history) == 7


def test_resume_refuses_another_backend(finished, monkeypatch):
    config, first, _ = finished
    assert first.history[-1].backend == "xla"
    monkeypatch.setattr(DecoderProgram, "backend", property(lambda _: "hopper"))
    with pytest.raises(ValueError, match="^head.implementation was 'xla' in run"):
        train(changed(config, run=dict(steps=7)))


def test_vocabulary_below_the_tokenizer_s_is_refused(config):
    with pytest.raises(
        ValueError, match="model.vocab_size=300 is below .* 320 entries"
    ):
        train(changed(config, model=dict(vocab_size=300)))


def test_warmup_as_long_as_the_run_is_refused(config):
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

PROGRAM = """
import pickle, sys
from jaxmem.train import jobs
jobs.train(pickle.load(sys.stdin.buffer))
"""


def start(config, out_dir, checkpoint_every):
    run = dict(out_dir=str(out_dir), checkpoint_every=checkpoint_every)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path),
            # This process finds its program again.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        },
    )
    with process.stdin as given:
        given.write(pickle.dumps(changed(config, run=run)))
    return process


def kill_after(process, metrics_file, step):
    """SIGKILL as soon as the step is written, wherever the process is then."""
    while process.poll() is None:
        if metrics_file.exists() and metrics_file.read_text().count("\n") >= step:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002 if metrics_file.exists() else 0.05)
    with process.stderr as errors:
        said = errors.read()
    assert process.wait() == -signal.SIGKILL, said


def of_steps(out_dir):
    path = out_dir / "metrics.jsonl"
    return [(s.step, s.loss, s.grad_norm, s.tokens) for s in read_history(path)]


@pytest.mark.full
def test_killed_run_with_every_draw_resumes_bitwise(config, tmp_path):
    """Draws follow from the step's number."""
    config = changed(
        config, run=dict(accumulate=2), head=dict(gradient=("sample", 8, "int8")),
        model=dict(hidden=32, dtype="bfloat16"),
    )  # fmt: skip
    told = check_resumption(config, tmp_path)
    assert all(0 < step.forward_error < 1e-2 for step in told)


def test_killed_run_resumes_bitwise(config, tmp_path):
    """By the program of the finished run."""
    check_resumption(config, tmp_path)


def check_resumption(config, tmp_path):
    """A run killed by SIGKILL writes the steps of the whole one."""
    config = changed(config, run=dict(steps=20))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kill_after(start(config, killed, 5), killed / "metrics.jsonl", 7)
    assert 7 <= len(of_steps(killed)) < 20
    for out_dir in (killed, whole):
        run = dict(out_dir=str(out_dir), checkpoint_every=100)
        _, said = train(changed(config, run=run))
        assert ("resuming" in said) == (out_dir == killed)
    assert of_steps(killed) == of_steps(whole)
    return read_history(whole / "metrics.jsonl")
