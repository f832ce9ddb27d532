"""Corrections of a sampler, and updates that measure their own old numbers."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.train.jobs.forward_passes import ForwardPasses
from jaxmem.train.jobs.grpo.minibatches import Minibatch
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_objective import (
    GrpoConfig,
    PolicyHeadOptions,
    policy_loss,
)
from jaxmem.train.jobs.rollout.nested_rows import join, take
from jaxmem.train.jobs.rollout.packed import SAME_WEIGHTS, Logprobs
from jaxmem.train.jobs.rollout.turns import SamplePrograms
from tests.helpers.grpo import (
    SMALL,
    completions,
    dense,
    head_and_hidden,
    job_with,
    random_micro_batch,
    softmax_stats,
)
from tests.helpers.runs import changed

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(correction="TIS"), r"correction must be 'tis' or .* or None, got 'TIS'"),
        (dict(correction_high=2.0), "correction_high must be None for correction=None"),
        (dict(correction="tis", correction_low=0.5),
         "correction_low must be None for correction='tis', which has no such bound"),
        (dict(correction="ratio", correction_high=2.0),
         "correction_high must be None for correction='ratio', which has no such"),
        (dict(correction="icepop", correction_low=-1.0),
         "correction_low must be 0 or more, or None, got -1.0"),
        (dict(correction="sequence_mask", correction_high=0.9),
         "correction_high must be at least correction_low=0.999, or None, got 0.9"),
        (dict(loss="sapo", clip_low=0.2), "clip_low must be None for loss='sapo', got"),
        (dict(loss="gspoo"), "loss must be one of .*'gspo', 'sapo'.*, got 'gspoo'"),
    ],
)  # fmt: skip
def test_grpo_config_refuses_contradictions(fields, message):
    with pytest.raises(ValueError, match="GrpoConfig." + message):
        GrpoConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "old", "passes"),
    [
        ({}, False, 0),
        (dict(epochs=3), False, 0),
        (dict(minibatches=4), True, 3 / 4),
        (dict(minibatches=4, epochs=2), True, 3 / 4),
        (dict(correction="tis"), False, 0),
        (dict(correction="sequence_mask"), True, 1),
        (dict(correction="ratio", minibatches=2, epochs=2), False, 0),
        (dict(correction="ratio", token_fraction=0.5, epochs=2), False, 0),
        (dict(correction="ratio", loss="gspo", minibatches=2), False, 1),
        (dict(token_fraction=0.5), False, 0),
        (dict(token_fraction=0.5, epochs=2), True, 1),
        (dict(loss="gspo"), False, 0),
        (dict(loss="gspo", minibatches=2), True, 1),
        (dict(loss="gspo", minibatches=2, epochs=2), True, 2),
    ],
)
def test_forward_passes_over_a_rollout(fields, old, passes):
    config = ForwardPasses(GrpoConfig(prompts=8, group_size=4, **fields))
    assert config.have_old_pass is old
    assert config.count == pytest.approx(passes)


# ------------------------------------------------------------------ in the loss


def weighed(config, old, rollout):
    """In float64; TRL's truncation and its mask with both bounds."""
    ratio = np.exp(old - rollout.astype(np.float64))
    low = 0.0 if config.correction_low is None else config.correction_low
    high = config.correction_high
    if config.correction == "tis":
        return np.minimum(ratio, high)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0)


@pytest.mark.parametrize(
    ("correction", "loss", "logits", "same_weights"),
    [
        ("tis", "grpo", "fused", False),
        ("mis", "cispo", "materialised", True),
        ("icepop", "sapo", "fused", True),
    ],
)
def test_correction_multiplies_the_surrogate(correction, loss, logits, same_weights):
    low = 0.8 if correction == "icepop" else None
    config = GrpoConfig(
        loss=loss, correction=correction, correction_low=low, correction_high=1.5,
        kl_coefficient=0.1, entropy_coefficient=0.05,
    )  # fmt: skip
    made, (head, hidden) = random_micro_batch(), head_and_hidden()
    z = np.asarray(head(hidden)) / 0.7
    lp, live = softmax_stats(z, made.batch.labels)[0], made.batch.labels >= 0
    old = lp if same_weights else made.old_logprob
    noise = np.random.default_rng(5).normal(scale=0.5, size=lp.shape)
    made = made._replace(
        old_logprob=np.full_like(lp, SAME_WEIGHTS) if same_weights else old,
        rollout_logprob=(old + noise).astype("f4"),
    )
    call = PolicyHeadOptions(0.7, logits)
    got, _ = jax.jit(lambda made: policy_loss(head, hidden, made, 7.0, config, call))(
        made
    )
    weights = weighed(config, old, made.rollout_logprob)
    assert 0 < (weights[live] == 0).sum() < live.sum() or correction == "tis"
    plain = made._replace(old_logprob=old, advantages=made.advantages * weights)
    want, _ = dense(config, z, plain, 7.0)
    np.testing.assert_allclose(got, want, rtol=3e-5)


def test_own_old_logprobs_give_ratio_one():
    """As numbers that are equal to the policy's own, and constants."""
    config, made = GrpoConfig(loss="dapo"), random_micro_batch()
    made = made._replace(ref_logprob=None)
    head, hidden = head_and_hidden()
    lp = softmax_stats(np.asarray(head(hidden)) / 0.7, made.batch.labels)[0]

    @jax.jit
    def run(old):
        def loss(hidden):
            rows = made._replace(old_logprob=old)
            return policy_loss(
                head, hidden, rows, 7.0, config, PolicyHeadOptions(0.7, "fused")
            )

        return jax.value_and_grad(loss, has_aux=True)(hidden)

    (value, told), slope = run(np.full_like(made.weights, SAME_WEIGHTS))
    (want, _), expected = run(lp.astype("f4"))
    live = made.batch.labels >= 0
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(slope, expected, atol=1e-6)
    np.testing.assert_allclose(told["logprob"], np.where(live, lp, 0), atol=1e-5)
    exact = -np.sum(np.where(live, made.weights * made.advantages, 0)) / 7
    np.testing.assert_allclose(value, exact, rtol=1e-5)


def test_policy_loss_of_nan_old_logprob_is_nan():
    config, made = GrpoConfig(), random_micro_batch()
    made = made._replace(ref_logprob=None, old_logprob=made.old_logprob * np.nan)
    head, hidden = head_and_hidden()
    value, _ = policy_loss(
        head, hidden, made, 7.0, config, PolicyHeadOptions(0.7, "fused")
    )
    assert np.isnan(value)


def test_take_of_dropped_sequences_and_ratios():
    made, _ = completions()
    shape, count = made.sampled.shape, len(made.lengths)
    dropping = np.ones(shape, "f4")
    dropping[1] = 0
    learned = Minibatch(
        made, np.arange(1.0, count + 1, dtype="f4"), np.zeros(shape, "f4"), None, None,
        rollout=np.full(shape, -2.0, "f4"), correction=dropping,
        log_ratio=np.arange(count, dtype="f4"),
    )  # fmt: skip
    part = take(learned, np.array([1, 3]))
    config = changed(SMALL, grpo=dict(correction="tis"))
    (rows, normalizer), *more = part.micro_batches(config)
    assert not more and normalizer == 2
    live = rows.batch.labels >= 0
    assert live.sum() == made.lengths[[1, 3]].sum()
    assert sorted(set(rows.advantages[live])) == [0, 4]
    assert set(rows.rollout_logprob[live]) == {-2}
    of_kept = live & (rows.advantages == 4)
    assert set(rows.sequence_log_ratio[of_kept]) == {3}


# ---------------------------------------------------------------- in a whole step


def test_numbers_are_known_once_they_are_measured():
    old = Logprobs.unknown((3, 2), True)
    assert (old.drawn_from == SAME_WEIGHTS).all() and not old.known.any()
    known = np.array([[True, False]])
    old.put(np.array([1]), Logprobs(-np.ones((1, 2)), -2 * np.ones((1, 2)), known))
    assert old.drawn_from[1].tolist() == [-1, SAME_WEIGHTS]
    assert old.whole[1].tolist() == [-2, 0]
    assert old.known.sum() == 1


def steps_of(job):
    """The state after two steps from the start, and what they told."""
    job.open()
    state, told = job.initial_state(), []
    for number in (1, 2):
        state, metrics = job.step(number, state)
        told.append(metrics)
    return jax.device_get(state.params), told


TIMES = "seconds", "second", "peak"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        dict(minibatches=2, epochs=2, correction="tis"),
        dict(minibatches=1),  # as in `long_job`, without a forward pass
        dict(minibatches=1, epochs=2),
        dict(minibatches=2, loss="sapo", correction="icepop"),
        dict(minibatches=2, epochs=2, loss="gspo"),
        dict(minibatches=2, loss="cispo", kl_coefficient=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampling", [{}, dict(top_k=5)], ids=str)
def test_update_measuring_own_tokens_changes_nothing(fields, sampling, monkeypatch):
    """Within rounding: the passes pack other rows."""
    program = PolicyProgram(changed(SMALL, grpo=fields, sampling=sampling))
    with monkeypatch.context() as patch:  # the old pass, which measures all of them
        patch.setattr(ForwardPasses, "read_own_old", False)
        patch.setattr(ForwardPasses, "have_old_pass", True)
        compiled = program.compile()
        want, expected = steps_of(job_with(program, compiled))
    if not program.config.passes.count:
        compiled = compiled._replace(logprobs={})
    ours, told = steps_of(job_with(program, compiled))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), ours, want
    )
    for got, wanted in zip(told, expected, strict=True):
        assert got.grad_norm > 0 and got.mismatch_max < 1e-5
        for name, value in wanted._asdict().items():
            if isinstance(value, float) and not any(t in name for t in TIMES):
                other = getattr(got, name)
                np.testing.assert_allclose(other, value, 1e-4, 2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_ratio_to_sampler_equals_old_pass(loss):
    """Within rounding: the sampler is the trainer, token by token."""
    jobs = [long_job(minibatches=2, loss=loss, correction=x) for x in (None, "ratio")]
    (want, expected), (ours, told) = map(steps_of, jobs)
    assert [bool(job._compiled.logprobs) for job in jobs] == [True, loss == "gspo"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), ours, want
    )
    for got, wanted in zip(told, expected, strict=True):
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3) and got.loss
        assert got.mismatch_max < 1e-5 and got.dropped is None


@pytest.mark.full
def test_ratio_is_to_the_sampler_s_own_numbers(monkeypatch):
    """One that gives its tokens too little: their ratios are above the clip."""
    job = long_job(long_job(), correction="ratio")
    job.open()
    _, told = job.step(1, job.initial_state())
    job.open()
    sampled = job.rollouts.sampled

    def shifted(*given):
        made = sampled(*given)
        samples = made.samples._replace(logprobs=made.samples.logprobs - 1)
        return made._replace(samples=samples)

    monkeypatch.setattr(job.rollouts, "sampled", shifted)
    _, clipped = job.step(1, job.initial_state())
    assert 2 * told.clip_fraction < 0.1 < clipped.clip_fraction
    assert clipped.mismatch_mean > 0.9


MASKED = dict(correction="sequence_mask")


@functools.cache
def long_job(like=None, **grpo):
    """Two tokens a completion, which few end in; with the programs of a job `like` it.

    They are the same, whatever is decided outside of them.
    """
    config = changed(SMALL, grpo=dict(minibatches=1) | grpo)
    program = PolicyProgram(config)
    return job_with(program, like._compiled if like else program.compile())


@functools.cache
def sampler():
    program = PolicyProgram(changed(SMALL, grpo=dict(minibatches=1)))
    return SimpleNamespace(sample=SamplePrograms.of(program))


def sampling_job(**grpo):
    """A job that only samples: nothing that learns is compiled."""
    program = PolicyProgram(changed(SMALL, grpo=dict(minibatches=1) | grpo))
    return job_with(program, sampler())


def masked_job(**grpo):
    """A job that measures its samples again, with the programs of one other."""
    return long_job(long_job(**MASKED), **MASKED, **grpo)


@pytest.mark.full
def test_groups_that_tell_nothing_change_nothing(monkeypatch):
    job = long_job()
    job.open()
    grade, state = job.task.grade, job.initial_state()

    def graded(batch, made):
        return grade(batch, made)._replace(rewards=np.zeros(32, np.float32))

    monkeypatch.setattr(job.task, "grade", graded)
    for number in (1, 2):
        before = jax.device_get(state.params)
        state, step = job.step(number, state)
        assert (step.reward, step.degenerate) == (0, 1)
        assert (step.loss, step.grad_norm, step.clip_fraction) == (0, 0, 0)
        assert step.entropy > 2
        jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_truncated_completions_only_normalise():
    job = sampling_job(mask_truncated=True)
    made = job._roll_out(1, job.initial_state().params)
    last = made.completions.lengths[:, None] - 1
    ends = np.take_along_axis(made.completions.sampled, last, 1)[:, 0]
    is_end = np.isin(ends, job.program.ends.eos_ids)
    np.testing.assert_array_equal(made.truncated, ~is_end)
    assert made.truncated.any() and not made.truncated.all()
    learned = Minibatch(
        made.completions, made.advantages, np.zeros(last.shape) + 0 * made.learned,
        None, None, learned=made.learned,
    )  # fmt: skip
    batches, normalizers = zip(*learned.micro_batches(job.config), strict=True)
    assert set(normalizers) == {len(made.truncated)}
    total = sum((rows.batch.labels >= 0).sum() for rows in batches)
    assert total == made.completions.lengths[~made.truncated].sum() > 0


@pytest.mark.full
def test_step_without_truncated_completions_tells_their_share():
    job = long_job(long_job(), mask_truncated=True)
    state = job.initial_state()
    made = job._roll_out(1, state.params)
    job.open()
    _, told = job.step(1, state)
    assert told.truncated == pytest.approx(made.truncated.mean())
    assert told.mismatch_max < 1e-5


@pytest.mark.full
def test_step_of_masked_completions_measures_nothing(monkeypatch):
    job = long_job(long_job(**MASKED), mask_truncated=True)
    job.open()
    sampled = job.rollouts.sampled

    def truncated(*given):
        made = sampled(*given)
        return made._replace(truncated=np.ones_like(made.truncated))

    monkeypatch.setattr(job.rollouts, "sampled", truncated)
    _, metrics = job.step(1, job.initial_state())
    assert (metrics.truncated, metrics.loss, metrics.grad_norm) == (1, 0, 0)
    assert "entropy" not in metrics.line
    names = "entropy sum_pi_squared clip_fraction mismatch_mean mismatch_p50"
    for name in (*names.split(), "mismatch_max", "ratios_inside_strict"):
        assert getattr(metrics, name) is None


@pytest.mark.full
def test_sequences_outside_the_band_change_nothing():
    """A band without 1 drops all of them."""
    band = dict(correction_low=1.5, correction_high=2.0)
    job = masked_job(**band)
    state = job.initial_state()
    before = jax.device_get(state.params)
    state, told = job.step(1, state)
    assert told.dropped == 1 and told.grad_norm == 0
    assert any(np.any(x != 0) for x in jax.tree.leaves(before))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


@pytest.mark.full
def test_own_samples_are_inside_every_band():
    job = long_job(**MASKED)
    _, told = job.step(1, job.initial_state())
    assert told.dropped == 0 and told.grad_norm > 0
    assert told.ratios_inside_strict == told.ratios_inside_1_01 == 1
    assert jnp.isfinite(told.loss)


# --------------------------------------------------------- groups that tell nothing


def test_uninformative_groups_are_resampled():
    """Rewards by the number of the prompt: only every third group differs."""
    job = sampling_job(resample=4)
    grade, prompts, group = job.task.grade, 8, 4
    asked = []

    def graded(batch, made):
        numbers = np.arange(len(asked) * prompts, (len(asked) + 1) * prompts)
        asked.append(batch)
        rewards = np.zeros((prompts, group), np.float32)
        rewards[numbers % 3 == 0, 0] = 1 + numbers[numbers % 3 == 0]
        return grade(batch, made)._replace(rewards=rewards.ravel())

    job.open()
    job.task.grade, state = graded, job.initial_state()
    try:
        made = job._roll_out(1, state.params)
    finally:
        job.task.grade = grade
    # Numbers 0, 3, ... 21 tell something: the eighth is in the third rollout.
    assert len(asked) == 3 == made.sampled["resampled"] + 1 and job.rollouts.next == 24
    firsts = made.graded.rewards.reshape(prompts, group)[:, 0]
    np.testing.assert_array_equal(firsts, 1 + 3 * np.arange(8))
    whole = join(asked)
    rows = (3 * np.arange(8)[:, None] * group + np.arange(group)).ravel()
    np.testing.assert_array_equal(made.prompts.ids, whole.ids[rows])
    np.testing.assert_array_equal(made.prompts.items.answers, whole.items.answers[rows])
    for i, tokens in enumerate(made.completions.tokens):
        length = made.prompts.lengths[i]
        np.testing.assert_array_equal(tokens[:length], made.prompts.ids[i, :length])
        said = made.completions.sampled[i, : made.completions.lengths[i]]
        np.testing.assert_array_equal(tokens[length:], said[:-1])
    # Each attempt drew other tokens for other prompts.
    assert (advantages := made.advantages.reshape(prompts, group)).any(1).all()
    assert np.allclose(advantages.sum(1), 0, atol=1e-5)


def test_resampling_fills_groups_within_attempts():
    job = sampling_job(resample=2)
    grade = job.task.grade

    def graded(batch, made):
        rewards = np.zeros(len(batch.lengths), np.float32)
        rewards[5] = 1  # of the second group
        return grade(batch, made)._replace(rewards=rewards)

    job.open()
    job.task.grade, state = graded, job.initial_state()
    try:
        made = job._roll_out(1, state.params)
    finally:
        job.task.grade = grade
    assert made.sampled["resampled"] == 2 and job.rollouts.next == 24
    tells = made.graded.rewards.reshape(8, 4).any(1)
    # Three tell something; the first others fill up, in the order of the prompts.
    assert tells.tolist() == [False, True, False, False, False, False, True, True]
    # The means are of all that was sampled; those of what is kept stand beside them.
    assert made.sampled["reward"] == pytest.approx(1 / 32)
    assert made.sampled["kept"]["reward"] == pytest.approx(3 / 32)
    assert made.sampled["degenerate"] == 7 / 8
    assert made.sampled["kept"]["degenerate"] == 5 / 8
    lengths = made.completions.counts.mean()
    assert made.sampled["kept"]["response_length"] == pytest.approx(lengths)


def test_rollout_without_resampling_is_unchanged():
    job, other = sampling_job(), sampling_job(resample=2)
    for one in (job, other):
        one.open()
    a, b = (
        one.rollouts.sampled(1, 0, (one.initial_state().params, one.frozen))
        for one in (job, other)
    )
    np.testing.assert_array_equal(a.samples.tokens, b.samples.tokens)
    other.rollouts.next = -other.config.grpo.prompts  # the same prompts again
    c = other.rollouts.sampled(1, 1, (other.initial_state().params, other.frozen))
    assert (a.samples.tokens != c.samples.tokens).any()
