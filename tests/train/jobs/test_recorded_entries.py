"""Updates from entries that the sampler, or an old pass, has recorded of each token."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.train.configuration import load
from jaxmem.train.jobs.config import SftJobConfig
from jaxmem.train.jobs.forward_passes import ForwardPasses
from jaxmem.train.jobs.grpo import job as grpo, minibatches, policy_report
from jaxmem.train.jobs.grpo.minibatches import Minibatch, TokenDraw, cut_prefixes
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_objective import GrpoConfig
from jaxmem.train.jobs.rollout.entries import RolloutEntries, bytes_of_token
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.metrics import PolicyMetrics
from tests.helpers.cases import slow
from tests.helpers.grpo import CONFIGS, SMALL, completions, curve, job_with, train
from tests.helpers.kills import kill_before
from tests.helpers.runs import changed, steps

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
K = 6  # of 14 columns
RECORDED = changed(SMALL, head=dict(gradient=("recorded", K)))
SHARED = dict(share_prompts=True, max_tokens_train=128, max_tokens_forward=128)


MIXED = {
    "feed_forwards": ("experts",),
    "experts.count": 4,
    "experts.ff": 24,
    "experts.per_token": 2,
    "embedding.scaled": False,
    "router_aux_loss_coef": 0.01,
}


# ------------------------------------------------------------------- packing


def entries_of(made, k=2):
    """Entries whose numbers name their token: 100 · row + number of the token."""
    shape = made.sampled.shape
    names = (100 * np.arange(shape[0])[:, None] + np.arange(shape[1])).astype("f4")
    columns = np.broadcast_to(names[..., None].astype("i4"), (*shape, k))
    logits = np.broadcast_to(-names[..., None], (*shape, k))
    return RecordedEntries(columns, logits, names, names + 0.5, names, names), names


@pytest.mark.parametrize("changes", [{}, SHARED], ids=["rows", "shared prompts"])
def test_entries_are_packed_with_their_tokens(changes):
    config = changed(RECORDED, grpo=changes | dict(prefix_cut=0.3))
    made, _ = completions(rows=8)
    entries, names = entries_of(made)
    read, cut = cut_prefixes(config, 1, made)
    kept = np.random.default_rng(0).random(names.shape) < 0.7
    part = Minibatch(
        read, np.ones(8), names, None, None, cut=cut,
        draw=TokenDraw(kept, np.ones_like(names)),
        entries=RolloutEntries.of_samples(entries),
    )  # fmt: skip
    part = take(part, np.array([6, 1, 3, 0]))
    kept, seen = kept[[6, 1, 3, 0]], []
    for rows, _ in part.micro_batches(config):
        live = rows.batch.labels >= 0
        # Old log-probabilities are packed by the same rules, and have the same names.
        np.testing.assert_array_equal(
            rows.entries.label_logit[live], rows.old_logprob[live]
        )
        for name in ("columns", "logits"):
            of_tokens = abs(getattr(rows.entries, name)[live])
            np.testing.assert_array_equal(
                of_tokens, np.repeat(rows.old_logprob[live][:, None], 2, axis=1)
            )
        assert (rows.entries.columns[~live] == np.iinfo(np.int32).max).all()
        assert not rows.entries.logsumexp[~live].any()
        seen += rows.old_logprob[live].tolist()
    within = np.arange(3) < read.lengths[[6, 1, 3, 0], None]
    assert sorted(seen) == sorted(names[[6, 1, 3, 0]][within & kept].tolist())


def test_entries_of_a_forward_pass_come_back():
    made, _ = completions()
    entries, names = entries_of(made)
    packed = made.pack(16, (8, 16), 0.0)
    of_samples = RolloutEntries.of_samples(entries)
    outputs = list(of_samples.micro_batches(made, packed))
    back = RolloutEntries.of_packed(made, packed, outputs)
    within = np.arange(3) < made.lengths[:, None]
    for ours, given in zip(back.recorded, entries, strict=True):
        ours = ours.reshape(given.shape)
        np.testing.assert_array_equal(ours[within], given[within])
    np.testing.assert_array_equal(back.logprobs[within], -0.5)


def test_probes_are_random_tokens_that_are_learned(monkeypatch):
    monkeypatch.setattr(minibatches, "PROBES", 8)
    made, _ = completions(rows=32)
    within = np.arange(3) < made.lengths[:, None]
    kept = within & (np.random.default_rng(0).random((32, 3)) < 0.5)
    draw = TokenDraw(kept, np.ones((32, 3), np.float32))
    part = Minibatch(made, np.ones(32), np.zeros((32, 3)), None, None, draw=draw)
    first, again, other = (part.probes(RECORDED, step, 0) for step in (1, 1, 2))
    assert first.sum() == 4  # of two updates
    assert not (first & ~kept).any()
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


# ------------------------------------------------------------------- updates


@functools.cache
def job_of(config):
    program = PolicyProgram(config)
    return job_with(program, program.compile())


def rolled_out(job, number=1):
    """A rollout's state, and its minibatch of all samples, as a step makes it."""
    state = job.initial_state()
    made = job._roll_out(number, state.params)
    old, entries = job._measure_old(number, state.params, made)
    sampled = np.asarray(made.samples.logprobs)
    from_sampler = job.config.passes.start_from_sampler
    read, cut = cut_prefixes(job.config, number, made.completions)
    return state, made, Minibatch(
        read, made.advantages, sampled if from_sampler else old.drawn_from, None,
        made.supports, rollout=sampled, cut=cut, entries=entries,
    ).drawn(job.config, number, 0)  # fmt: skip


def gradients_of(job, state, part):
    """Sums of the gradients of a minibatch, and its checks."""
    part = part._replace(probed=part.probes(job.config, 1, 0))
    sums, _, checks = job._sum_gradients(1, 0, state, part)
    return jax.device_get(sums), checks


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(grpo=SHARED | dict(prefix_cut=0.2, token_fraction=0.7)),
        slow(dict(sampling=dict(slots=5, temperature=0.7))),
        slow(dict(model=dict(lora_rank=2, lora_head=True))),
        slow(dict(optimizer=dict(trainable="blocks"), model={"logits.softcap": 5.0})),
        dict(grpo=dict(correction="tis")),
        slow(dict(grpo=dict(entropy_coefficient=0.1, loss="gspo"))),
        slow(dict(model=MIXED, grpo=dict(replay_routing=True))),
        slow(dict(mesh=dict(data=2, tensor=2), model=dict(kv_heads=2))),
        slow(
            dict(
                mesh=dict(fsdp=2, tensor=2), model=dict(kv_heads=2),
                grpo=dict(correction="icepop"),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_first_update_is_exact_but_for_rounding(changes):
    """The weights are those that sampled: values are exact, gradients are not."""
    config = changed(RECORDED, **changes)
    job = job_of(config)
    by_sampler = config.grpo.correction is None
    assert config.passes.entries == ("sampler" if by_sampler else "old pass")
    state, _, part = rolled_out(job)
    if config.grpo.has_sequence_ratio:
        part = job._with_ratios(state.params, part, 0)
    sums, checks = gradients_of(job, state, part)
    assert checks and not any(check.rejected for check in checks)
    for check in checks:
        assert check.estimated < 1e-5
        assert check.measured < 1e-5 and check.without_estimate == 0
    assert sum(check.probed for check in checks) > 10
    exact = exact_sums(job, state, part)
    np.testing.assert_allclose(sums.loss, exact.loss, rtol=1e-4, atol=1e-6)
    for name, value in exact.metrics.items():
        if name != "forward_error":
            np.testing.assert_allclose(
                sums.metrics[name], value, rtol=1e-4, atol=1e-4, err_msg=name
            )


def exact_sums(job, state, part):
    """Sums of a minibatch by the programs with an exact forward pass."""
    sums, head = job._compiled.zeros(), job.config.head.exact_forward
    for i, (rows, normalizer) in enumerate(part.micro_batches(job.config)):
        shape = rows.batch.tokens.shape
        rows = rows._replace(entries=None, probed=None)
        rows = job.program.layout.place(rows, job.program.micro_batch(shape, head))
        numbers = job.program.micro_batch_numbers(head, 1, 0, i)
        sums, _ = job._compiled.exact_gradients[shape](
            state.params, job.frozen, sums, rows, normalizer, *numbers
        )
    return jax.device_get(sums)


def moved(state, scale=0.02):
    """The state after a step in a random direction."""
    rng = np.random.default_rng(5)

    def move(x):
        return x + scale * rng.normal(size=x.shape).astype("f4")

    return state._replace(params=jax.tree.map(move, state.params))


def flat(sums):
    leaves = jax.tree.leaves(sums.gradients)
    return np.concatenate([x.ravel() for x in leaves]).astype(np.float64)


@pytest.mark.full
def test_mean_gradient_over_records_is_exact():
    """Many old passes draw entries of one rollout; the weights have moved since."""
    config = changed(RECORDED, grpo=dict(correction="tis", max_head_error=10.0))
    exact = job_of(changed(SMALL, grpo=dict(correction="tis")))
    job = job_of(config)
    state, made, part = rolled_out(job)
    later = moved(state)
    whole, _, _ = exact._sum_gradients(1, 0, later, part._replace(entries=None))
    want, drawn = flat(jax.device_get(whole)), []
    for number in range(48):
        _, entries = job._measure_old(number, state.params, made)
        sums, checks = gradients_of(job, later, part._replace(entries=entries))
        assert not any(check.rejected for check in checks)
        drawn.append(flat(sums))
    drawn = np.array(drawn)
    spread = np.linalg.norm(drawn - want, axis=1).mean()
    error = np.linalg.norm(drawn.mean(0) - want)
    assert spread > 0.02 * np.linalg.norm(want)
    assert error < 2 * spread / 48**0.5


def test_rejected_micro_batches_take_the_exact_forward():
    """A run that rejects all of them is the run with ("sample", k)."""
    changes = dict(epochs=2, correction="ratio")
    sampled = changed(SMALL, head=dict(gradient=("sample", K)), grpo=changes)
    never = changed(RECORDED, grpo=changes | dict(max_head_error=1e-30))
    job, other = job_of(never), job_of(sampled)
    state, _, part = rolled_out(job)
    sums, checks = gradients_of(job, state, part)
    assert all(check.rejected for check in checks)
    want, _, none = other._sum_gradients(1, 0, state, part._replace(entries=None))
    assert none == []
    np.testing.assert_allclose(flat(sums), flat(jax.device_get(want)), 1e-4, 1e-6)
    np.testing.assert_allclose(sums.loss, want.loss, rtol=1e-5, atol=1e-7)
    assert sums.metrics["forward_error"] == 0


def test_undefined_estimates_are_rejected():
    """Weights that have moved far: a sum of exponentials may be below 0."""
    job = job_of(RECORDED)
    state, _, part = rolled_out(job)
    far = moved(state, 2.0)
    sums, checks = gradients_of(job, far, part)
    assert all(check.rejected for check in checks)
    assert np.isfinite(flat(sums)).all() and np.isfinite(sums.loss)


@pytest.mark.parametrize(
    ("errors", "difference", "rejected"),
    [
        ([5e-3] * 400, 0.0, False),
        ([2e-2] * 400, 0.0, True),
        ([1e-3] * 400, 2e-2, True),
        ([1e-3] * 399 + [np.inf], 9e-3, False),  # one token decides about no other
        ([1e-3] * 390 + [np.inf] * 10, 0.0, True),
        ([1e-3] * 399 + [np.nan], 0.0, True),
        ([1e-3] * 400, np.nan, True),
    ],
)
def test_mean_errors_decide_about_a_micro_batch(errors, difference, rejected):
    labels, probed = np.zeros((1, 402), np.int32), np.zeros((1, 402), bool)
    labels[:, 400:], probed[:, :4] = -1, True  # padding has no error
    values = np.full((1, 402), np.inf, np.float32)
    values[0, :400] = errors
    rows = SimpleNamespace(batch=SimpleNamespace(labels=labels), probed=probed)
    logprob = np.full((1, 402), -2.0, np.float32)
    exact = np.where(probed, logprob - np.float32(difference), 0)
    metrics = {"logprob": logprob, "exact": exact, "estimated_error": values}
    check = job_of(RECORDED).program._check(rows, jax.tree.map(jnp.asarray, metrics))
    assert bool(check.rejected) is rejected
    assert (check.tokens, check.probed) == (400, 4)
    assert check.without_estimate == np.isinf(errors).sum()


def test_run_prints_and_counts_rejections(tmp_path):
    config = changed(RECORDED, grpo=dict(max_head_error=1e-3, epochs=2))
    result, text = train(config, tmp_path / "run", steps=3)
    for step in result.history:
        assert 0 < step.head_rejected < step.head_checked == 4 * 4
        assert step.head_error > 1e-3
        line = rf"step {step.step}: {step.head_rejected} of 16 micro-batches took an"
        is_logged = step.step != 2  # the first one, and those of run.log_every
        assert bool(re.search(line + r"\s+exact forward", text)) is is_logged
        assert 0 < step.forward_error < 1 and step.head_without_estimate == 0
        assert step.mismatch_max < 1e-5 and step.gradient_samples == K
    assert result.history[0].old_seconds < 1e-2
    rejected = sum(step.head_rejected for step in result.history)
    told = result.summary
    assert (told["head_rejected"], told["head_checked"]) == (rejected, 48)
    errors = [step.head_error for step in result.history]
    assert min(errors) <= told["head_error"] <= max(errors)
    line = rf"{rejected}\s+of\s+48\s+micro-batches\s+\({rejected / 48:.0%}\)"
    assert re.search(line, text) and "raise grpo.max_head_error" in text
    page = (result.out_dir / "report.html").read_text()
    assert "Micro-batches that took an exact forward pass instead of entries" in page
    assert "Error of log-probabilities, nats" in page


def test_advice_on_entries_is_of_many_rejections():
    step = PolicyMetrics(1, *[0.0] * (len(PolicyMetrics._fields) - 1))
    without = step._replace(head_checked=None, head_rejected=None, head_error=None)
    assert set(policy_report.entries_summary([without]).values()) == {None}
    few = step._replace(head_checked=40, head_rejected=1, head_without_estimate=3)
    few = few._replace(head_error=None)
    assert policy_report.entries_summary([without, few]) == {
        "head_error": None, "head_rejected": 1, "head_checked": 40,
        "head_without_estimate": 3,
    }  # fmt: skip
    assert not [*policy_report.advice_on_entries(RECORDED, [few, without])]
    many = few._replace(head_rejected=9)
    (line,) = policy_report.advice_on_entries(RECORDED, [few, many])
    assert "10 of 80 micro-batches (12%)" in line and '("sample", 6)' in line


def test_mismatch_is_measured_at_probes():
    """A sampler whose probabilities are not the trainer's shows in the metrics."""
    job = job_of(RECORDED)
    state, made, part = rolled_out(job)
    old = grpo.Logprobs.unknown(made.completions.sampled.shape, False)
    job._take_updates(1, state, part, old)
    known = old.known.sum()
    assert 0 < known <= minibatches.PROBES / 2
    samples = made.samples._replace(logprobs=made.samples.logprobs + np.float32(0.25))
    told = grpo.rollout_metrics.agreement(old, samples)
    np.testing.assert_allclose(told["mismatch_mean"], 0.25, rtol=1e-3)


# ---------------------------------------------------------------- whole runs


@pytest.mark.full
@pytest.mark.usefixtures("programs_of_module")
@pytest.mark.parametrize("correction", [None, slow("icepop")])
def test_killed_run_resumes_bitwise(correction, tmp_path, monkeypatch):
    config = changed(
        RECORDED, grpo=dict(epochs=2, correction=correction, max_head_error=0.02)
    )
    train(config, tmp_path / "whole", checkpoint_every=None)

    def start():
        return train(config, tmp_path / "killed", checkpoint_every=2)

    kill_before(4, grpo.Grpo, monkeypatch, start)
    start()
    expected, resumed = (
        steps(tmp_path / name, PolicyMetrics) for name in ("whole", "killed")
    )
    assert resumed == expected and len(expected) == 4


@pytest.mark.full
def test_recorded_run_learns_as_the_sampled_one(tmp_path):
    """One update a rollout, whose values are exact: curves differ by draws alone."""
    made = []
    for gradient in (("sample", 8), ("recorded", 8)):
        config = changed(SMALL, head=dict(gradient=gradient), grpo=dict(minibatches=1))
        made.append(train(config, tmp_path / gradient[0])[0])
    sampled, recorded = (curve(result, "reward", "entropy") for result in made)
    np.testing.assert_allclose(recorded[0], sampled[0], rtol=1e-4)
    np.testing.assert_allclose(recorded, sampled, atol=0.15)
    assert not any(step.head_rejected for step in made[1].history)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("fields", "old", "passes"),
    [
        (dict(entries="sampler"), False, 0),
        (dict(entries="sampler", minibatches=4, epochs=2), False, 0),
        (dict(entries="sampler", loss="gspo", minibatches=2), False, 1),
        (dict(entries="old pass"), True, 1),
        (dict(entries="old pass", minibatches=4), True, 1),
        (dict(entries="old pass", correction="ratio"), True, 1),
        (dict(entries="old pass", loss="gspo", minibatches=2), True, 1.5),
    ],
)
def test_forward_passes_with_entries(fields, old, passes):
    fields = dict(fields)
    entries = fields.pop("entries")
    counted = ForwardPasses(GrpoConfig(prompts=8, group_size=4, **fields), entries)
    assert counted.have_old_pass is old
    assert counted.count == pytest.approx(passes)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sampling.top_k=3"], "head.gradient=('recorded', 4) must stay None if "
         "sampling.top_k, top_p or min_p truncates"),
        (["grpo.max_head_error=0"], "grpo.max_head_error must be above 0, got 0"),
        (["head.gradient=None", "grpo.max_head_error=0.1"],
         "grpo.max_head_error=0.1 has no effect without head.gradient=(\"recorded\""),
        (["head.gradient=('recorded', 0)"],
         'head.gradient: k of ("recorded", k) must be in [1, 2**31), got 0'),
        (["head.gradient=('recorded', 4, 'int8')"], 'for run.job="grpo", ("recorded"'),
        (["head.logits=materialised"], "needs logits='fused'"),
    ],
)  # fmt: skip
def test_settings_that_entries_cannot_have(overrides, expected):
    given = ["head.gradient=('recorded', 4)", *overrides]
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        load(CONFIGS / "grpo_arithmetic.gin", given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["recorded", "sample"])
def test_more_entries_than_columns_are_refused(method):
    message = rf"head.gradient=\('{method}', 14\) must have k from 1 to 13, less than "
    with pytest.raises(ValueError, match=message):
        PolicyProgram(changed(SMALL, head=dict(gradient=(method, 14))))


@pytest.mark.parametrize(
    ("correction", "line"),
    [(None, "the sampler records"), ("icepop", "an old pass over each rollout record")],
)
def test_program_says_who_records_entries(correction, line):
    config = changed(RECORDED, grpo=dict(correction=correction))
    lines = [*PolicyProgram(config).lines()]
    assert sum(line in one for one in lines) == 1
    plain = [*PolicyProgram(changed(config, head=dict(gradient=None))).lines()]
    assert len(plain) == len(lines) - 1


def test_jobs_without_rollouts_refuse_entries():
    head = dataclasses.replace(SMALL.head, gradient=("recorded", 4))
    assert head.samples == head.recorded == 4 and head.sample is None
    assert head.exact_forward.gradient == ("sample", 4)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OwnConfig(SftJobConfig):
        RULES = ()

    config, _ = load(CONFIGS / "sft_stdlib.gin", [])
    sections = {name: getattr(config, name) for name in SftJobConfig.sections()}
    for kind in (SftJobConfig, OwnConfig):
        with pytest.raises(ValueError, match=re.escape("needs run.job='grpo', where ")):
            kind(**sections | {"head": head})


def test_plan_counts_entries():
    program = PolicyProgram(RECORDED)
    (phase,) = program.rollout_phases({})
    assert phase.parts["recorded entries"] == 32 * 3 * (8 * K + 16)
    assert bytes_of_token(128) == 1040
    old = PolicyProgram(changed(RECORDED, grpo=dict(correction="tis")))
    assert "recorded entries" not in old.rollout_phases({})[0].parts
