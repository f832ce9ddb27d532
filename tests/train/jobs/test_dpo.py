"""DPO: the loss against float64, runs that learn, are evaluated and resume bitwise."""

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import checkpoints
from jaxmem.data import vocabulary
from jaxmem.data.documents import DataConfig, DataError
from jaxmem.data.pairs import PairBatches, batch_of, load_pairs
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import dpo
from jaxmem.train.jobs.pair_objective import DpoConfig, pair_losses
from jaxmem.train.metrics import PreferenceMetrics
from jaxmem.train.program import DecoderProgram
from tests.helpers import runs, texts
from tests.helpers.kills import kill_before
from tests.helpers.runs import refused

pytestmark = pytest.mark.usefixtures(
    "quick_compilation", "no_picture", "programs_of_module"
)
GIN = """
data.source = "pairs.jsonl"
data.sequence_length = 16
data.batch_size = 4
data.held_out = 0.2
head.chunk = 32
dpo.beta = 0.5
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
optimizer.schedule = "constant"
optimizer.weight_decay = 0.0
run.job = "dpo"
run.steps = 8
run.accumulate = 2
run.checkpoint_every = 3
run.out_dir = "run"
eval.every = 4
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A checkpoint and forty pairs: answers of a's are preferred to answers of b's."""
    monkeypatch.chdir(tmp_path)
    model = texts.checkpoint("llama", tmp_path)
    words = [x + y for x in "cdefg" for y in "rstuvwxy"]
    write([{"prompt": w, "chosen": w + "aa", "rejected": "bbb" + w} for w in words])
    pathlib.Path("dpo.gin").write_text(GIN + f'model.checkpoint = "{model}"\n')
    return tmp_path


write = functools.partial(runs.write, "pairs.jsonl")
train = functools.partial(runs.train, "dpo.gin")
steps = functools.partial(runs.steps, kind=PreferenceMetrics)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "ipo_mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_loss_equals_papers(loss, smoothing):
    rng = np.random.default_rng(0)
    lp, ref = rng.normal(size=(2, 5, 2)) * 4
    config = DpoConfig(loss=loss, beta=0.3, label_smoothing=smoothing)
    h = (lp - ref) @ [1, -1]
    if loss == "sigmoid":
        each = [np.log1p(np.exp(-0.3 * sign * h)) for sign in (1, -1)]
    else:
        each = [(sign * h - 1 / 0.6) ** 2 for sign in (1, -1)]
    expected = (1 - smoothing) * each[0] + smoothing * each[1]
    made, told = pair_losses(config, jnp.asarray(lp, "f4"), jnp.asarray(ref, "f4"))
    np.testing.assert_allclose(made, expected, rtol=2e-5)
    np.testing.assert_allclose(told["margin"], 0.3 * h, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(told["accuracy"], h > 0)


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_pair_losses_of_means_read_no_reference(loss):
    rng = np.random.default_rng(1)
    lp = -rng.exponential(size=(5, 2))
    config = DpoConfig(loss=loss, beta=1.5)
    reference = np.full((5, 2), np.nan, "f4")
    made, _ = pair_losses(config, jnp.asarray(lp, "f4"), jnp.asarray(reference))
    if loss == "simpo":
        expected = np.log1p(np.exp(0.5 - 1.5 * (lp @ [1, -1])))
    else:
        odds = np.exp(lp) / (1 - np.exp(lp))
        expected = -lp[:, 0] + 1.5 * np.log1p(odds[:, 1] / odds[:, 0])
    np.testing.assert_allclose(made, expected, rtol=2e-5)
    assert config.pair_loss.averages


PATIENCE = "eval.every=1", "eval.patience=2", "eval.min_delta=1e3"


@pytest.mark.full
def test_patience_counts_evaluations_of_held_out_pairs():
    result, said = train(*PATIENCE, "run.checkpoint_every=8")
    assert [s.step for s in result.history] == [1, 2, 3]  # the first improves on none
    assert all(s.held_out_loss is not None for s in result.history)
    assert result.ended_by == result.summary["ended_by"] == "eval.patience"
    assert "stopped after step 3 of 8 by eval.patience=2: the last 2 eval" in said
    losses = [s.held_out_loss for s in result.history]
    assert result.summary["best_held_out"] == min(losses)
    assert losses[result.summary["best_step"] - 1] == min(losses)
    again, said = train(*PATIENCE, "run.checkpoint_every=8")
    assert again.history == result.history and again.summary == result.summary
    assert "run is complete (step 3 of 8): eval.patience=2: the last 2 evalu" in said


def test_patience_without_held_out_pairs_is_refused():
    with pytest.raises(ValueError, match="^eval.patience=2 has nothing to evaluate"):
        train(*PATIENCE, "data.held_out=0")
    assert not pathlib.Path("run/metrics.jsonl").exists()


@pytest.mark.full
def test_simpo_runs_no_reference(monkeypatch):
    def no_reference(self, pairs):
        raise AssertionError("a reference is scored")

    monkeypatch.setattr(dpo.Dpo, "_score_reference", no_reference)
    few = "dpo.beta=None", "dpo.loss=simpo", "run.steps=4", "run.checkpoint_every=2"
    result, said = train(*few)
    first, last = result.history[0], result.history[-1]
    assert last.loss < first.loss and last.margin > first.margin
    assert last.held_out_accuracy is not None and "reference" not in said
    assert not pathlib.Path("run/reference.npz").exists()
    # Rewards are beta times the mean log-probability of a token, which is negative.
    assert first.chosen_reward < 0 and first.rejected_reward < 0
    kill_before(4, dpo.Dpo, monkeypatch, lambda: train(*few, "run.out_dir=cut"))
    train(*few, "run.out_dir=cut")
    assert steps("cut") == steps("run")


def test_phases_with_reference_where_read():
    phases = {}
    for loss in ("simpo", "sigmoid"):
        for held_out in (0.0, 0.2):
            overrides = [f"dpo.loss={loss}", f"data.held_out={held_out}"]
            job = jobs.job_of(configuration.load("dpo.gin", overrides)[0])
            job.program = job.make_program(40)
            phases[loss, held_out] = [phase.name for phase in job.phases()]
    step = phases["simpo", 0.0]
    assert len(step) == 1 and "reference" not in step
    assert phases == {
        ("simpo", 0.0): step, ("simpo", 0.2): ["held out", *step],
        ("sigmoid", 0.0): ["reference", *step], ("sigmoid", 0.2): ["reference", *step],
    }  # fmt: skip


def test_settings_record_default_beta():
    """It has recorded dpo.beta, which was 0.1 where it was not set."""
    config, _ = configuration.load("dpo.gin", ["dpo.beta=None"])
    job = jobs.job_of(config)
    recorded = job.settings().changeable["dpo"]
    assert recorded["beta"] == 0.1 and recorded["loss"] == "sigmoid"


def test_pairs_longer_than_row_refused_or_counted():
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write([pair, pair | {"chosen": "b" * 20}, pair | {"rejected": "d"}])
    config, _ = configuration.load("dpo.gin", ["data.held_out=0.0"])
    with pytest.raises(DataError, match="pairs.jsonl:2: the pair has 23 tokens, and 1"):
        list(jobs.job_of(config).reads.records(1))
    config, _ = configuration.load("dpo.gin", ["data.held_out=0.0",
                                               "dpo.drop_long=True"])  # fmt: skip
    reads = jobs.job_of(config).reads
    said = [line for line in reads.records(1) if isinstance(line, str)]
    assert said[-2:] == [
        "read as pairs of answers, 3 records",
        "pairs longer than a row are left out: 1 (first pairs.jsonl:2)",
    ]
    assert len(reads.pairs[0]) == 2


@pytest.mark.full
def test_ipo_of_means_uses_logprobs_per_token():
    """Answers of different lengths: their sums, over the numbers of their tokens."""
    pairs = jobs.job_of(configuration.load("dpo.gin")[0]).reads.pairs[0][:4]
    lengths = [
        [int((labels >= 0).sum()) for _, labels in (pair.chosen, pair.rejected)]
        for pair in pairs
    ]
    assert all(chosen != rejected for chosen, rejected in lengths)
    sums, means = (log_probabilities(loss, pairs) for loss in ("ipo", "ipo_mean"))
    np.testing.assert_allclose(means, sums / np.array(lengths), rtol=1e-5)


def log_probabilities(loss, pairs):
    config, _ = configuration.load("dpo.gin", [f"dpo.loss={loss}"])
    job = jobs.job_of(config)
    job.build()
    program = job.program
    batch = batch_of(pairs, np.zeros((len(pairs), 2)), job.config.data)
    return program.logprobs(program.initial_params(), program.frozen(), batch)


def test_dpo_run_learns_and_resumes_bitwise(monkeypatch):
    sampled = 'head.gradient=("sample", 4)'  # whose draws follow from seed and step
    result, said = train(sampled)
    first, last = result.history[0], result.history[-1]
    # Before the first update the policy is the reference, and its numbers are exact.
    assert first.loss == pytest.approx(np.log(2), abs=1e-5)
    assert abs(first.margin) < 1e-5
    assert last.loss < first.loss - 0.1 and last.accuracy == 1 and last.margin > 0.2
    held_out = {s.step: s.held_out_accuracy for s in result.history}
    assert held_out[8] == 1 and held_out[3] is None and held_out[4] is not None
    assert "saved in run/model" in said and "margin" in said
    assert checkpoints.load("run/model").config.vocab_size == 40
    assert [p.name for p in pathlib.Path("run/best").iterdir() if p.name.isdigit()]
    summary = json.loads(pathlib.Path("run/summary.json").read_text())
    assert summary["held_out_accuracy"] == 1 and summary["last_margin"] == last.margin

    kill_before(6, dpo.Dpo, monkeypatch, lambda: train(sampled, "run.out_dir=cut"))
    scored = pathlib.Path("cut/reference.npz").stat().st_mtime_ns
    _, said = train(sampled, "run.out_dir=cut")
    assert "resuming cut at step 3" in said
    assert pathlib.Path("cut/reference.npz").stat().st_mtime_ns == scored
    assert steps("cut") == steps("run")

    monkeypatch.setattr(DecoderProgram, "backend", property(lambda _: "hopper"))
    with pytest.raises(ValueError, match="^head.implementation was 'xla' in run"):
        train(sampled, "run.steps=9")


def load(**changes):
    config = DataConfig(
        **{"source": "pairs.jsonl", "sequence_length": 16, "batch_size": 2} | changes
    )
    return load_pairs(config, vocabulary.of_checkpoint("llama"))[0], config


def test_rows_count_answer_tokens_only():
    write([{"prompt": "ab", "chosen": "c", "rejected": "de"}] * 2)
    pairs, config = load()
    batch = batch_of(pairs, np.array([[-1.0, -2.0]] * 2, "f4"), config)
    assert batch.tokens[0, :6].tolist() == [1, 3, 4, 5, 2, 0]
    assert batch.labels[0, :6].tolist() == [-1, -1, 5, 2, -1, -1]
    assert batch.labels[1, :6].tolist() == [-1, -1, 6, 7, 2, -1]
    assert batch.segment_ids[0].sum() == 5 and batch.positions[0, :5].tolist() == [
        0, 1, 2, 3, 4
    ]  # fmt: skip
    assert batch.reference.sum(-1).tolist() == [-1, -2, -1, -2]


def test_epoch_has_pairs_once_and_resumes_anywhere():
    pairs, config = load()
    numbers = np.arange(2 * len(pairs), dtype="f4").reshape(-1, 2)
    batches = PairBatches(pairs, numbers, config)
    seen, states = [], []
    for _ in range(len(pairs)):  # two epochs of twenty micro-batches
        states.append(json.loads(json.dumps(batches.get_state())))
        seen.append(next(batches).reference[::2, 0].tolist())
    for epoch in (seen[:20], seen[20:]):
        assert sorted(x for row in epoch for x in row) == numbers[:, 0].tolist()
    assert seen[:20] != seen[20:]
    batches.set_state(states[13])
    assert next(batches).reference[::2, 0].tolist() == seen[13]
    others = PairBatches(pairs[1:], numbers[1:], config)
    with pytest.raises(DataError, match="belongs to other pairs than data.source con"):
        others.set_state(states[0])


def test_pairs_without_shuffling_keep_file_order():
    pairs, config = load(shuffle=False)
    numbers = np.arange(2 * len(pairs), dtype="f4").reshape(-1, 2)
    batches = PairBatches(pairs, numbers, config)
    taken = [x for _ in pairs for x in next(batches).reference[:, 0].tolist()]
    assert taken == [*range(2 * len(pairs))] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, 'pairs.jsonl:2: expected "chosen" and "rejected"; got the'),
        ({"chosen": "a", "rejected": "a"}, ":2: chosen and rejected are equal"),
        ({"chosen": "a", "rejected": 3},
         '"rejected" must be a list of messages, got 3'),
        ({"chosen": [], "rejected": [1]}, '"chosen" must be a list of messages, got'),
        ({"chosen": "a" * 15, "rejected": "b"},
         ":2: the pair has 17 tokens, and 1 of 2 pairs are longer than data.seq"),
    ],
)  # fmt: skip
def test_pair_that_cannot_be_used_is_named(row, message):
    write([{"chosen": "a", "rejected": "b"}, row])
    with pytest.raises(DataError) as raised:
        load()
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_conversations_share_their_start(tmp_path):
    pytest.importorskip("jinja2")
    from jaxmem.data.chat import ChatTemplate
    from jaxmem.data.record_reader import RecordReader

    ask = {"role": "user", "content": "a"}
    answers = [{"role": "assistant", "content": c} for c in "bc"]
    write([{"chosen": [ask, answers[0]], "rejected": [ask, answers[1]]}])
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}", {}, "", ["</s>"]
    )
    config = DataConfig(source="pairs.jsonl", sequence_length=16)
    tokenizer = vocabulary.of_checkpoint("llama")
    ((pair,), _) = load_pairs(config, tokenizer, RecordReader(lambda: template))
    assert pair.chosen[0].tolist() == [3, 2, 4, 2]
    assert pair.rejected[1].tolist() == [-1, 5, 2, -1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.checkpoint=None"], "run.job='dpo' needs model.checkpoint"),
        (["data.streaming=True"], "data.streaming=True must stay False for run.job="),
        (['head.gradient=("sample", 4, "int8")'],
         "must have an exact forward pass for run.job='dpo'"),
        (["dpo.beta=0.0"], "dpo.beta must be above 0"),
        (["dpo.label_smoothing=0.5"], "dpo.label_smoothing must be"),
        (["dpo.loss=hinge"], "dpo.loss must be one of 'sigmoid', 'ipo', 'ipo_mean', "),
        (["dpo.gamma=0.5"], "dpo.gamma must be None for loss='sigmoid', which has no"),
        (["dpo.loss=simpo", "dpo.gamma=-1"], "dpo.gamma must be at least 0"),
        (["grpo.prompts=1"], "grpo.prompts is of the job 'grpo', but run.job is 'dpo'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(overrides, message):
    refused("dpo.gin", overrides, message)


# Supervised training adds the same loss to a step.
@pytest.mark.slow
def test_router_loss_is_recorded_and_learned(tmp_path):
    model = texts.checkpoint("mixtral", tmp_path)
    made = []
    for factor in (0, 5):
        result, _ = train(
            f"model.checkpoint={model}", f"model.router_aux_loss_coef={factor}",
            "run.steps=2", f"run.out_dir=run{factor}", "run.checkpoint_every=None",
        )  # fmt: skip
        made.append([step._asdict() for step in result.history])
    assert made[0][0]["loss"] == made[1][0]["loss"]
    assert made[0][0]["routers"] == made[1][0]["routers"]
    assert made[0][1]["routers"]["loss"] > made[1][1]["routers"]["loss"] >= 2
    assert made[0][0]["grad_norm"] != made[1][0]["grad_norm"]
