"""Completions that are cut at random places: what is kept, and that means stay."""

import functools
import re

import jax
import numpy as np
import pytest

from jaxmem.train.jobs.grpo.minibatches import Minibatch, cut_prefixes
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_objective import GrpoConfig
from jaxmem.train.jobs.rollout.packed import Completions
from tests.helpers.grpo import SMALL, curve, job_with, train
from tests.helpers.runs import changed

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
LONG = changed(
    SMALL,
    sampling=dict(max_new_tokens=12),
    grpo=dict(kl_coefficient=0.1, loss="grpo", minibatches=1),
)
SHARED = changed(
    LONG,
    grpo=dict(
        minibatches=2, share_prompts=True, max_tokens_train=128, max_tokens_forward=128
    ),
)


def test_plan_counts_what_is_left_on_average():
    config = changed(LONG, grpo=dict(prefix_cut=0.5))
    rows, (prompt, most) = 4000, (config.task.prompt_length, 12)
    full = np.full(rows, most, np.int32)
    given = np.ones((rows, prompt), np.int32), np.full(rows, prompt)
    made = Completions.of(*given, np.ones((rows, most), np.int32), full)
    part, _ = cut_prefixes(config, 1, made)
    read = np.mean([len(row) for row in part.tokens]) * config.grpo.samples
    assert config.slots_read() == pytest.approx(read, rel=0.01)
    assert config.slots_read() < LONG.slots_read()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_mean_over_cuts_counts_tokens_once(share):
    config = changed(LONG, grpo=dict(prefix_cut=share))
    lengths = np.array([1, 2, 7, 12], np.int32).repeat(4000)
    rows = len(lengths)
    prompts, own = np.ones((rows, 4), np.int32), np.arange(12) % 5 != 3
    completions = Completions.of(
        prompts, np.full(rows, 3), np.ones((rows, 12), np.int32), lengths,
        np.tile(own, (rows, 1)),
    )  # fmt: skip
    part, cut = cut_prefixes(config, 1, completions)
    np.testing.assert_array_equal(cut.counts, completions.counts)
    assert [len(row) for row in part.tokens[:9000:3000]] == [
        2 + part.lengths[i] for i in (0, 3000, 6000)
    ]
    kept = np.arange(12) < part.lengths[:, None]
    weighted = np.where(kept, cut.inverse, 0).reshape(4, 4000, 12)
    for length, values in zip((1, 2, 7, 12), weighted, strict=True):
        least = max(1, int(np.ceil(share * length)))
        cuts = part.lengths[lengths == length]
        assert set(cuts.tolist()) == set(range(least, length + 1))
        # Each cut once: the mean over them is exactly 1 for every token.
        of_each = [values[list(cuts).index(c)] for c in range(least, length + 1)]
        expected = (np.arange(12) < length).astype(float)
        np.testing.assert_allclose(np.mean(of_each, axis=0), expected, rtol=1e-6)
        spread = values.std(axis=0) / 4000**0.5
        assert (abs(values.mean(axis=0) - expected) <= 5 * spread + 1e-6).all()


def test_kept_token_weighs_inverse_probability():
    config, lengths = changed(LONG, grpo=dict(prefix_cut=0.2)), np.array([1, 2, 7, 12])
    sampled = np.arange(48, dtype=np.int32).reshape(4, 12)  # each token once
    completions = Completions.of(
        np.ones((4, 4), np.int32), np.full(4, 3), sampled, lengths
    )
    part, cut = cut_prefixes(config, 1, completions)
    learned = Minibatch(part, np.ones(4), np.zeros((4, 12)), None, None, cut=cut)
    assert learned.token_count == pytest.approx(cut.inverse[learned.kept].sum())
    found = {}
    for rows, normalizer in learned.micro_batches(config):
        live = rows.batch.labels >= 0
        weights = rows.weights[live] / normalizer
        found |= zip(rows.batch.labels[live].tolist(), weights.tolist(), strict=True)
    kept = np.arange(12) < part.lengths[:, None]
    wanted = (cut.inverse / lengths[:, None] / 4)[kept]
    assert found == pytest.approx(dict(zip(sampled[kept], wanted, strict=True)))
    assert len(found) < lengths.sum()


@functools.cache
def job_of(**grpo):
    program = PolicyProgram(changed(SHARED, grpo=dict(prefix_cut=0.2) | grpo))
    return job_with(program, program.compile())


@pytest.mark.slow
@pytest.mark.parametrize("grpo", [{}, dict(loss="dapo", token_fraction=0.5)])
def test_expected_prefix_gradient_equals_full(grpo):
    job = job_of(**grpo)
    config, state = job.config, job.initial_state()
    made = job._roll_out(1, state.params)
    old = np.asarray(made.samples.logprobs)

    def gradient(step, whole=False):
        read, cut = cut_prefixes(config, step, made.completions)
        learned = Minibatch(
            read, made.advantages, old, old - 0.3, None, rollout=old, cut=cut
        )
        learned = learned.drawn(config, step, 0)
        if whole:
            every = np.ones(old.shape, np.float32)
            learned = learned._replace(
                completions=made.completions,
                draw=None,
                cut=cut._replace(inverse=every),
            )
        sums = job._compiled.zeros()
        for rows, normalizer in learned.micro_batches(config):
            shape = rows.batch.tokens.shape
            sums, _ = job._compiled.gradients[shape](
                state.params, job.frozen, sums, rows, normalizer
            )
        leaves = jax.tree.leaves(jax.device_get(sums.gradients))
        return np.concatenate([x.ravel() for x in leaves]).astype(np.float64)

    exact = gradient(0, whole=True)
    drawn = np.array([gradient(step) for step in range(60)])
    spread = np.linalg.norm(drawn - exact, axis=1).mean()
    error = np.linalg.norm(drawn.mean(0) - exact)
    assert spread > 0.1 * np.linalg.norm(exact)
    assert error < 1.5 * spread / np.sqrt(len(drawn))


@pytest.mark.slow  # one that replays routes reads them, too
def test_run_reads_prefixes_and_is_reproducible(tmp_path, one_program):
    config = changed(SHARED, grpo=dict(prefix_cut=0.0))
    results = [train(config, tmp_path / name)[0] for name in ("one", "two")]
    names = "reward", "loss", "grad_norm", "kl", "mismatch_max", "response_length"
    np.testing.assert_array_equal(*(curve(result, *names) for result in results))
    for step in results[0].history:
        assert step.mismatch_max < 1e-5 and step.grad_norm > 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(prefix_cut=1.0), "prefix_cut must be in [0, 1), or None, got 1.0"),
        (
            dict(loss="gspo"),
            "loss must be a different value with prefix_cut=0.5: it reads",
        ),
        (
            dict(correction="sequence_mask"),
            "correction must be a different value with pref",
        ),
        (
            dict(epochs=2),
            "epochs must be a different value with prefix_cut=0.5: all com",
        ),
    ],
)
def test_options_of_whole_completions_are_refused(given, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        GrpoConfig(**{"prefix_cut": 0.5, **given})


def test_length_dependent_rotary_is_not_cut():
    """Up to the limit, one that is cut is rotated as the whole one."""
    rope = {"rope.scaling": "dynamic", "rope.limit": 4}
    config = changed(LONG, model=rope, grpo=dict(prefix_cut=0.5))
    expected = f"grpo.prefix_cut=0.5 must be None for sequences of up to {LONG.longest}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        PolicyProgram(config)
    PolicyProgram(changed(config, model={"rope.limit": LONG.longest}))
