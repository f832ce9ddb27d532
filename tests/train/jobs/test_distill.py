"""Distillation: gradients against float64, students that learn and resume bitwise."""

import collections
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx, traverse_util
from safetensors.numpy import load_file, save_file

import jaxmem
from jaxmem import checkpoints
from jaxmem.commands import cli
from jaxmem.data import teacher_files
from jaxmem.data.documents import Batch, DataConfig
from jaxmem.data.records import DataError
from jaxmem.heads.nnx import LMHead
from jaxmem.score import document_scores
from jaxmem.train import configuration, jobs, saved
from jaxmem.train.jobs.distill import job as distill, sources
from jaxmem.train.jobs.distill.program import DistillProgram, TeacherStates
from jaxmem.train.jobs.distill_objective import DistillConfig, Targets, distill_loss
from jaxmem.train.jobs.policy_objective import PolicyHeadOptions
from jaxmem.train.jobs.running import with_steps
from jaxmem.train.metrics import DistillMetrics
from jaxmem.train.output.history import read_history
from jaxmem.train.program import DecoderProgram
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.kills import kill_before
from tests.helpers.runs import drawn, refused, write

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
GIN = """
data.source = "data.jsonl"
data.sequence_length = 16
data.batch_size = 4
data.held_out = 0.2
model.layers = 1
model.hidden = 24
model.ff = 24
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
head.chunk = 32
optimizer.learning_rate = 2e-2
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
optimizer.weight_decay = 0.0
run.job = "distill"
run.steps = 8
run.accumulate = 2
run.checkpoint_every = 3
run.out_dir = "run"
eval.every = 4
"""
TWO_STEPS = "run.steps=2", "eval.every=None"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A teacher of three layers, ninety texts, and a student of one layer."""
    monkeypatch.chdir(tmp_path)
    prepare()
    return tmp_path


def prepare():
    texts.checkpoint("llama", pathlib.Path())
    words = [a + b + c for a in "abcdef" for b in "xyzuv" for c in "lmn"]
    write("data.jsonl", [{"text": f"{word} and {word[::-1]}"} for word in words])
    pathlib.Path("distill.gin").write_text(GIN + 'distill.teacher = "llama"\n')


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """The directory of a run of two steps, which is not to be changed."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("student"))
        prepare()
        train(*TWO_STEPS)
        return pathlib.Path("run").absolute()


train = functools.partial(runs.train, "distill.gin")
steps = functools.partial(runs.steps, kind=DistillMetrics)


def killed_and_resumed(monkeypatch, *overrides):
    """A run that is killed before step 6, and goes on from step 3."""

    def cut():
        return train("run.out_dir=cut", *overrides)

    kill_before(6, distill.Distill, monkeypatch, cut)
    assert len(steps("cut")) == 5
    assert "resuming cut at step 3" in cut()[1]


# ---------------------------------------------------------------- gradients


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def divergence(z, y, config):
    """The divergence of dense logits, and its derivative by the student's z."""
    p, q = softmax(z / config.temperature), softmax(y / config.temperature)
    b = config.beta
    if config.divergence == "forward_kl":
        value, slope = (q * np.log(q / p)).sum(-1), -q / p
    elif config.divergence == "reverse_kl":
        value, slope = (p * np.log(p / q)).sum(-1), np.log(p / q) + 1
    else:
        m = b * q + (1 - b) * p
        of_q, of_p = q * np.log(q / m), p * np.log(p / m)
        value, slope = (b * of_q + (1 - b) * of_p).sum(-1), (1 - b) * np.log(p / m)
    dz = p * (slope - (p * slope).sum(-1, keepdims=True)) / config.temperature
    return value, dz


def dense(hidden, head):
    return np.asarray(hidden, np.float64) @ np.asarray(head.kernel[...], np.float64)


def flat(weights):
    return traverse_util.flatten_dict(weights, sep="/")


def test_teacher_base_codes_the_teacher_alone():
    named = "distill.teacher_dtype=float32", "distill.teacher_base=int8"
    job = jobs.job_of(configuration.load("distill.gin", named)[0])
    program = DistillProgram(job.config, 40)
    taught = program.teacher.initial_params()
    up = taught["blocks"]["feed_forward"]["up"]
    assert up["kernel_codes"].dtype == np.int8 and "kernel" not in up
    batch = Batch(*(np.ones((1, 8), np.int32),) * 4)
    states = program.teacher.trace_states((1, 8)).lower().compile()(taught, batch)
    assert np.isfinite(states).all()
    assert job.fixed()["distill"]["teacher_base"] == "int8"
    assert program.model_config.base is None


def test_coded_teacher_keeps_its_codes():
    coded = texts.coded_checkpoint("qwen3_nf4", pathlib.Path())
    overrides = [f"distill.teacher={coded}"]
    job = jobs.job_of(configuration.load("distill.gin", overrides)[0])
    taught = DistillProgram(job.config, 40).teacher.initial_params()
    up = taught["blocks"]["feed_forward"]["up"]
    assert up["kernel_codes"].dtype == np.uint8 and "kernel" not in up
    message = "distill.teacher_base='int8' differs .*'qwen3_nf4', which has"
    with pytest.raises(ValueError, match=message):
        overrides.append("distill.teacher_base=int8")
        jobs.job_of(configuration.load("distill.gin", overrides)[0])


@pytest.mark.parametrize(
    "overrides",
    [
        slow(["distill.divergence=forward_kl", "distill.temperature=1.7"]),
        slow(["distill.divergence=reverse_kl", "distill.loss_weight=0.3"]),
        [
            "distill.divergence=jsd",
            "distill.beta=0.2",
            "distill.temperature=0.6",
            "distill.loss_weight=0.3",
        ],
    ],
)
def test_step_gradient_equals_dense_float64(overrides):
    named = ["model.tied=False", "model.vocab_size=40", "distill.teacher_dtype=float32"]
    config, _ = configuration.load("distill.gin", [*overrides, *named])
    config = jobs.job_of(config).config
    program = DistillProgram(config, 40)
    rng = np.random.default_rng(0)
    shape = 4, 16
    batch = Batch(
        tokens=rng.integers(3, 40, shape, np.int32),
        labels=np.where(rng.random(shape) < 0.2, -1, rng.integers(3, 40, shape)).astype(
            np.int32
        ),
        segment_ids=np.ones(shape, np.int32),
        positions=np.tile(np.arange(16, dtype=np.int32), (4, 1)),
    )
    params = drawn(program.new_model)[1]
    # Sharper than initial weights, so that the divergences are not close to zero.
    params["head"]["kernel"] = params["head"]["kernel"] * 40
    taught = program.teacher.initial_params()
    states = program.teacher.trace_states(shape).lower().compile()(taught, batch)
    target = TeacherStates(states, program.teacher.head_weights(taught))
    counted = program._trace_count(shape).lower().compile()(batch)
    student, teacher = program.model(params, {}), program.teacher.model(taught, {})
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), program.sums())
    gradients = program.trace_gradients(shape).lower().compile()
    sums, _ = gradients(params, {}, zeros, batch, target, counted, None)

    live = batch.labels >= 0
    definition, weights = nnx.split(student)

    given = batch.tokens, batch.segment_ids, batch.positions

    @jax.jit
    def trunks(weights, slope):
        run = functools.partial(nnx.merge, definition)
        hidden, pull = jax.vjp(lambda w: run(w)(*given), weights)
        return hidden, pull(slope)[0], teacher(*given)

    weights = nnx.to_pure_dict(weights)
    hidden, _, of_teacher = trunks(weights, np.zeros((*shape, 24), np.float32))
    z, y = dense(hidden, student.head), dense(of_teacher, teacher.head)
    values, dz = divergence(z, y, config.distill)
    weight, p = config.distill.loss_weight, softmax(z)
    ce = -np.log(np.take_along_axis(p, np.maximum(batch.labels, 0)[..., None], -1))
    dz += weight * (p - np.eye(40)[batch.labels])
    dz = np.where(live[..., None], dz, 0) / live.sum()
    assert int(counted.learned) == live.sum() and int(counted.read) == live.size
    loss = (values + weight * ce[..., 0])[live].mean()
    assert values[live].mean() > 0.05
    np.testing.assert_allclose(sums.loss, loss, rtol=2e-5)
    np.testing.assert_allclose(sums.metrics["ce"], ce[live].sum(), rtol=2e-5)
    entropy = -(p * np.log(p)).sum(-1)[live].sum()
    np.testing.assert_allclose(sums.metrics["entropy"], entropy, rtol=2e-5)

    W, made = np.asarray(params["head"]["kernel"], "f8"), flat(sums.gradients)
    expected = flat(trunks(weights, (dz @ W.T).astype(np.float32))[1])
    expected["head/kernel"] = np.einsum("btd,btv->dv", np.asarray(hidden, "f8"), dz)
    assert made.keys() == expected.keys()
    for name, slope in made.items():
        scale = np.abs(expected[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(slope, expected[name], atol=2e-5 * scale)


# --------------------------------------------------------------------- text


def test_distill_run_learns_and_resumes_bitwise(monkeypatch):
    result, said = train()
    first, last = result.history[0], result.history[-1]
    assert last.divergence < 0.9 * first.divergence
    assert last.loss == pytest.approx(last.divergence, rel=1e-5)
    held_out = {s.step: s.held_out_divergence for s in result.history}
    assert [n for n, x in held_out.items() if x is not None] == [4, 8]
    assert held_out[8] < held_out[4] and last.held_out_loss == held_out[8]
    assert last.held_out_ce > 0 and last.entropy > 0 and last.tokens > 0
    assert "saved in run/model" in said and "step 8/8  divergence" in said
    summary = json.loads(pathlib.Path("run/summary.json").read_text())
    assert summary["held_out_divergence"] == held_out[8]
    page = pathlib.Path("run/report.html").read_text()
    assert "Divergence from the teacher" in page and "Cross-entropy, nats" in page

    killed_and_resumed(monkeypatch)
    assert steps("cut") == steps("run")


@pytest.mark.slow
def test_gradients_are_sampled_by_seed_and_step(two_steps, monkeypatch):
    never = "eval.every=None", "head.gradient=('sample', 16)"
    sampled, _ = train(*never)
    exact = read_history(two_steps / "metrics.jsonl", DistillMetrics)
    first, of_exact = sampled.history[0], exact[0]
    assert first.loss == of_exact.loss  # divergences stay exact
    assert first.grad_norm != of_exact.grad_norm
    assert first.grad_norm == pytest.approx(of_exact.grad_norm, rel=0.5)
    assert sampled.history[-1].divergence < first.divergence
    killed_and_resumed(monkeypatch, *never)
    assert steps("cut") == steps("run")


@pytest.mark.full
def test_student_reads_text_as_its_teacher_does(two_steps):
    shutil.copytree(two_steps, "run")
    student, teacher = (checkpoints.load_vocabulary(d) for d in ("run/model", "llama"))
    assert student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()
    assert student[1:] == teacher[1:]
    assert checkpoints.load("run/model").config.vocab_size == 40
    # So does one that has not ended.
    (pathlib.Path("run/model/config.json")).unlink()
    with saved.opened("run") as place:
        assert checkpoints.load_vocabulary(place.directory)[1:] == teacher[1:]
        assert place.load().config.hidden == 24


# Supervised training adds the same loss to a step.
@pytest.mark.slow
def test_router_loss_is_recorded_and_learned():
    mixed = [
        "model.feed_forwards=('experts',)", "model.experts.count=4",
        "model.experts.ff=24", "model.experts.per_token=2",
        "model.router.renormalised=True",
    ]  # fmt: skip
    made = []
    for factor in (0, 5):
        out = f"run.out_dir=run{factor}", f"model.router_aux_loss_coef={factor}"
        result, _ = train(*TWO_STEPS, *mixed, *out, "run.checkpoint_every=None")
        made.append([step._asdict() for step in result.history])
    assert made[0][0]["loss"] == made[1][0]["loss"]
    assert made[0][0]["routers"] == made[1][0]["routers"]
    assert made[0][0]["grad_norm"] < made[1][0]["grad_norm"]
    assert made[0][1]["routers"] != made[1][1]["routers"]


# ---------------------------------------------------------------- on policy

ON_POLICY = """
task.source = "prompts.jsonl"
task.max_prompt_tokens = 12
task.held_out = 0.25
sampling.max_new_tokens = 6
distill.mode = "on_policy"
distill.divergence = "reverse_kl"
distill.prompts = 8
distill.completions = 2
distill.max_tokens = 64
model.layers = 1
model.hidden = 24
model.ff = 24
model.heads = 2
model.kv_heads = 1
model.head_dim = 8
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.weight_decay = 0.0
run.job = "distill"
run.steps = 16
run.checkpoint_every = 3
run.out_dir = "run"
eval.every = 8
eval.prompts = 10
"""


@pytest.fixture
def prompts(directory):
    """Forty prompts, instead of the texts."""
    words = [a + b for a in "abcde" for b in "stuvwxyz"]
    write("prompts.jsonl", [{"prompt": f"say {word}"} for word in words])
    pathlib.Path("distill.gin").write_text(ON_POLICY + 'distill.teacher = "llama"\n')


def test_epoch_has_each_prompt_once(prompts):
    config, _ = configuration.load("distill.gin", ["run.epochs=2", "task.held_out=0"])
    assert with_steps(jobs.job_of(config)).config.run.steps == 10


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distill.loss_weight=0.5"], "distill.loss_weight=0.5 must stay 0 for dis"),
        (["data.batch_size=2"], "data.batch_size has no effect with distill.mode='"),
        (["task.reward=number"],
         "task.reward has no effect without distill.reward_weight"),
        (["run.accumulate=2"], "run.accumulate=2 must stay 1 for distill.mode='on_"),
        (
            ["distill.max_tokens=31"],
            "distill.max_tokens=31 must hold a row of 32 tokens, for prompts of at "
            "most 12 and sampling.max_new_tokens=6",
        ),
        (["distill.row_lengths=(16,)"], "distill.row_lengths=(16,) must reach 17, the"),
        (["distill.row_lengths=(32, 16)"], "distill.row_lengths must be increasing"),
        (["distill.prompts=0"], "distill.prompts must be at least 1, got 0"),
        (["distill.mode=text"], "task.source has no effect with distill.mode='text'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_on_policy(prompts, overrides, message):
    refused("distill.gin", overrides, message)


# ------------------------------------------------------------------ offline


@functools.cache
def columns_of(data, options, columns_at_once):
    """A file of the teacher's columns of data.jsonl, which decide it all three."""
    words = ["score", "llama", "data.jsonl", "--eos", "--max-tokens=64"]
    assert cli.main([*words, "--dtype=float32", "--out=scored.parquet", *options]) == 0
    return pathlib.Path("scored.parquet").read_bytes()


def scored(*options, out="teacher.parquet"):
    data = pathlib.Path("data.jsonl").read_text()
    made = columns_of(data, options, document_scores._COLUMNS_AT_ONCE)
    pathlib.Path(out).write_bytes(made)
    return out


OFFLINE = "distill.mode=offline", "data.source=teacher.parquet"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "streamed"),
    [
        slow(["--top-k=6"], []),
        slow(["--top-k=6"], ["data.streaming=True", "data.shuffle_window=16"]),
        (["--sample-ids=12"], []),
    ],
)
def test_student_learns_from_a_file_and_resumes(options, streamed, monkeypatch):
    monkeypatch.setattr(document_scores, "_COLUMNS_AT_ONCE", 1000)
    scored(*options)
    given = [*OFFLINE, *streamed]
    result, _ = train(*given)
    first, last = result.history[0], result.history[-1]
    assert last.divergence < first.divergence - 0.03
    held_out = {s.step: s.held_out_divergence for s in result.history}
    assert held_out[8] < held_out[4] + 1e-3 * (options != ["--top-k=6"])
    if options == ["--top-k=6"]:  # what is saved is the same of drawn ids
        killed_and_resumed(monkeypatch, *given)
        assert steps("cut") == steps("run")


@pytest.mark.full
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_all_columns_equal_dense_float64_divergence(name):
    config = DistillConfig(divergence=name, beta=0.2, temperature=1.6)
    rng = np.random.default_rng(0)
    head = LMHead(8, 20, rngs=nnx.Rngs(0))
    hidden = rng.normal(size=(2, 5, 8)).astype("f4") * 5
    y = 2 * rng.normal(size=(2, 5, 20))
    ids = np.argsort(rng.normal(size=y.shape)).astype(np.int32)
    logprobs = np.log(softmax(y / config.temperature))
    columns = jaxmem.Columns(ids, np.take_along_axis(logprobs, ids, -1).astype("f4"))
    where = rng.random((2, 5)) < 0.8
    targets, call = Targets(np.where(where, 0, -1)), PolicyHeadOptions(1.0, "fused")
    loss, observed = distill_loss(
        config, head, hidden, targets, columns, np.float32(where.sum()), call
    )
    got = observed["divergence"]
    np.testing.assert_allclose(loss, got.sum() / where.sum(), rtol=1e-6)
    expected, _ = divergence(dense(hidden, head), y, config)
    assert expected.min() > 0.05
    np.testing.assert_allclose(got, np.where(where, expected, 0), rtol=2e-5)


def count(*columns):
    """Counts of each token's numbers."""
    rows = zip(*columns, strict=True)
    return collections.Counter(tuple(np.hstack(row).tolist()) for row in rows)


def test_columns_stand_where_their_tokens_do():
    rows = [{"prompt": "ab", "response": "cde" * n} for n in range(1, 9)]
    write("data.jsonl", rows)
    file = teacher_files.read(scored("--top-k=2"))
    config = DataConfig(source="", sequence_length=8, batch_size=2)
    seen = collections.Counter()
    labels = np.concatenate([ids[n:] for ids, n in file.documents])
    known = count(labels, file.ids, file.logprobs)
    for batch, ids, logprobs in teacher_files.Examples(file, config, epochs=1):
        live = batch.labels >= 0
        assert (ids[~live] == -1).all() and (ids[live] >= 0).all()
        seen += count(batch.labels[live], ids[live], logprobs[live])
    assert seen == known and seen.total() == sum(3 * n + 1 for n in range(1, 9))
    # The first column of a response is that of the same context in each document.
    first = np.cumsum([0, *(len(ids) - n for ids, n in file.documents)])[:-1]
    assert (file.ids[first] == file.ids[0]).all()


def test_file_of_columns_has_epochs_and_preview(capsys):
    scored("--top-k=2")
    overrides = [*OFFLINE, "run.epochs=1", "data.held_out=0", "run.accumulate=1"]
    config, _ = configuration.load("distill.gin", overrides)
    made = with_steps(jobs.job_of(config)).config.run.steps
    assert 20 < made < 40  # 90 texts of 13 tokens in rows of 16, four a step
    assert cli.main(["data", "distill.gin", *OFFLINE]) == 0
    assert "90 documents; the file has a teacher's 2 most likely ids" in (
        capsys.readouterr().out
    )
    streamed = [*overrides, "data.streaming=True"]
    config, _ = configuration.load("distill.gin", streamed)
    assert with_steps(jobs.job_of(config)).config.run.steps == made
    assert cli.main(["data", "distill.gin", *streamed]) == 0
    assert "90 documents of the first row group; the" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        (["--top-k=2"], ["distill.temperature=2.0"], "jaxmem score --temperature 1"),
        (["--sample-ids=2"], ["distill.divergence=jsd"], "distill.divergence='jsd' ne"),
        slow([], [], "has no column 'prompt_ids'; write it by: jaxmem score TEACHER"),
        (["--top-k=2"], ["data.source=data.jsonl"], "data.jsonl must be a .parquet f"),
        (["--top-k=2"], ["data.streams=2"], "data.streams=2 must stay 1 for distill"),
        (
            ["--top-k=2"],
            ["distill.teacher=other/llama"],
            "of the file's teacher differs",
        ),
    ],
)
def test_file_that_cannot_be_used_is_named(options, overrides, message):
    if "distill.teacher=other/llama" in overrides:
        tokens_of("other", letters=texts.LETTERS[::-1])
    scored(*options)
    given = dict(x.split("=", 1) for x in (*OFFLINE, *overrides))
    with pytest.raises(ValueError) as raised:
        train(*(f"{key}={value}" for key, value in given.items()))
    assert message in str(raised.value) and "\n" not in str(raised.value)


# ------------------------------------------------------------------- errors


def tokens_of(directory, **options):
    """A checkpoint beside the teacher's, with another tokenizer."""
    pathlib.Path(directory).mkdir()
    return str(texts.checkpoint("llama", pathlib.Path(directory), **options))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distill.teacher=None"], "distill.mode='text' needs distill.teacher"),
        (["distill.mode=texts"], "distill.mode must be 'text' or 'on_policy' or "),
        (["distill.beta=1.0"], "distill.beta must be in (0, 1), got 1.0"),
        (["distill.divergence=kl"], "distill.divergence must be 'forward_kl' or "),
        (["distill.temperature=0.0"], "distill.temperature must be above 0, got 0.0"),
        (["distill.loss_weight=-1.0"], "distill.loss_weight must be at least 0"),
        (["head.logits=materialised"], "head.logits='materialised' "),
        (["head.gradient=('sample', 8, 'int8')"],
         "head.gradient=('sample', 8, 'int8') must stay None for"),
        (["dpo.beta=1.0"], "dpo.beta is of the job 'dpo', but run.job is 'distill'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(overrides, message):
    refused("distill.gin", overrides, message)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distill.teacher=nowhere"], "distill.teacher='nowhere' must be a check"),
        (["model.vocab_size=50"],
         "has a vocabulary of 40 entries, and model.vocab_size is 50: both must"),
        (["model.checkpoint=other/llama"],
         "model.checkpoint='other/llama': token ' ' has the id 29, not 13"),
    ],
)  # fmt: skip
def test_teacher_that_cannot_be_used_is_named(overrides, message):
    if "model.checkpoint=other/llama" in overrides:
        tokens_of("other", letters=texts.LETTERS[::-1])
        gin = pathlib.Path("distill.gin")
        lines = gin.read_text().splitlines()
        sized = [x for x in lines if not x.startswith("model.")]
        gin.write_text("\n".join(sized))
    with pytest.raises(ValueError) as raised:
        train(*overrides)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def padded(name, rows):
    """A checkpoint with rows of its vocabulary that no token has; large ones."""
    directory = pathlib.Path(name)
    config = json.loads((directory / "config.json").read_text())
    made = pathlib.Path(shutil.copytree(directory, f"{name}_padded"))
    (made / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    weights = load_file(made / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        matrix = weights[key]
        more = np.full((rows - len(matrix), matrix.shape[1]), 3, matrix.dtype)
        weights[key] = np.concatenate([matrix, more])
    save_file(weights, made / "model.safetensors")
    return str(made)


def without_sizes():
    """The config of a student that has a checkpoint."""
    gin = pathlib.Path("distill.gin")
    sized = ("model.", "distill.teacher =")
    lines = [x for x in gin.read_text().splitlines() if not x.startswith(sized)]
    gin.write_text("\n".join(lines))


def of_checkpoints(student, teacher, *more):
    without_sizes()
    return (
        f"model.checkpoint={student}", f"distill.teacher={teacher}",
        "model.param_dtype=float32", "model.dtype=float32",
        "distill.teacher_dtype=float32", *TWO_STEPS, *more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("larger", ["llama", "qwen3"])
def test_vocabularies_padded_to_different_sizes(larger):
    """The smaller one serves; the other's further rows change nothing."""
    texts.checkpoint("qwen3", pathlib.Path())
    pairs, losses = [("qwen3", "llama")], []
    made = padded(larger, 56)
    pairs.append(tuple(made if name == larger else name for name in pairs[0]))
    for i, pair in enumerate(pairs):
        train(*of_checkpoints(*pair, f"run.out_dir=run{i}"))
        losses.append([step["loss"] for step in steps(f"run{i}")])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_on_policy_student_with_more_rows(prompts):
    texts.checkpoint("qwen3", pathlib.Path())
    student = padded("qwen3", 48)
    without_sizes()
    with pytest.raises(ValueError, match="may sample ids beyond the 40 entries of dis"):
        train(f"model.checkpoint={student}", "distill.teacher=llama")


def test_teacher_ids_beyond_student_rows_are_named():
    ids = np.array([[3, 39], [40, 47], [47, 1]], np.int32)
    file = teacher_files.TeacherFile([], ids, None, 1.0, "")
    teacher_files.check_ids(file, 48, "teacher.parquet")
    with pytest.raises(DataError) as raised:
        teacher_files.check_ids(file, 40, "teacher.parquet")
    assert str(raised.value).startswith(
        "data.source='teacher.parquet': 2 of the teacher's ids are beyond the "
        "student's 40 entries, such as 40: "
    )


def test_teacher_ids_late_in_stream_are_named():
    config, _ = configuration.load("distill.gin", ["data.streaming=True"])
    source = object.__new__(sources.File)
    source._rows, source._config = 40, config.data
    source._file = teacher_files.TeacherFile([], np.zeros((0, 2)), None, 1.0, "")
    example = teacher_files.TeacherBatch(None, np.array([[[3, -1], [40, 2]]]), None)
    with pytest.raises(DataError, match="1 of the teacher's ids are beyond the stude"):
        source._make_example(example)


@pytest.mark.full
def test_resumed_run_keeps_teacher_and_backend(two_steps, monkeypatch):
    shutil.copytree(two_steps, "run")
    longer, other = ["run.steps=3", "eval.every=None"], tokens_of("other")
    with pytest.raises(ValueError, match="distill.teacher"):
        train(*longer, f"distill.teacher={other}")
    assert {step["backend"] for step in steps()} == {"xla"}
    monkeypatch.setattr(DecoderProgram, "backend", property(lambda _: "hopper"))
    with pytest.raises(ValueError, match="^head.implementation was 'xla' in run"):
        train(*longer)
