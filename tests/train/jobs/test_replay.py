"""Ratios under truncated sampling, means of metrics, and the head's backend."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem import packing
from jaxmem.data.documents import Batch
from jaxmem.models.sampling import Samples, truncate
from jaxmem.train.configuration import load
from jaxmem.train.jobs import rollout_metrics
from jaxmem.train.jobs.grpo.minibatches import Minibatch
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_objective import (
    GrpoConfig,
    PolicyBatch,
    PolicyHeadOptions,
    policy_loss,
)
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.jobs.rollout.packed import Logprobs, RolloutSupports
from tests.helpers.cases import slow
from tests.helpers.grpo import (
    CONFIGS,
    SMALL,
    completions,
    head_and_hidden,
    job_with,
    softmax_stats,
    train,
)
from tests.helpers.runs import changed

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")

V = 14
# Its supports are cut to three ids of those that are likely enough.
CUT = dict(top_p=0.9, min_p=0.1, temperature=0.7, support=3)


# ------------------------------------------------------------------ supports


def test_supports_of_packed_tokens():
    """Each micro-batch's, for the tokens that are learned from."""
    rng = np.random.default_rng(0)
    made, _ = completions(rows=6)
    dense = rng.integers(0, 99, (6, 3, 4)).astype(np.int32)
    dense[np.arange(4) >= rng.integers(1, 5, (6, 3, 1))] = -1
    dense[np.arange(3) >= made.lengths[:, None]] = -1
    supports = RolloutSupports.of(dense)
    np.testing.assert_array_equal(supports.sizes, (dense >= 0).sum(-1))
    chosen, kept = np.array([4, 1, 3]), rng.random((3, 3)) < 0.6
    part = take(made, chosen)
    packed = part.pack(16, (8, 16), 0.0)
    rows = list(supports[chosen].micro_batches(part, packed, kept))
    for found, micro_batch in zip(rows, packed.micro_batches, strict=True):
        assert found.ids.shape == (4 * micro_batch.sequence.size,)
    found = [
        packing.csr_to_support(*found, 4).reshape(*micro_batch.sequence.shape, 4)
        for found, micro_batch in zip(rows, packed.micro_batches, strict=True)
    ]
    want = np.where(kept[..., None], dense[chosen], -1)
    for ids, first, length, wanted in zip(
        packed.unpack(found), part.first, part.lengths, want, strict=True
    ):
        np.testing.assert_array_equal(ids[first : first + length], wanted[:length])
        assert (ids[:first] == -1).all()


# ------------------------------------------------------------ loss within them


CONFIG = GrpoConfig(kl_coefficient=0.1)


@functools.cache
def truncated_micro_batch(shape=(3, 8)):
    """Tokens with supports of one id to all, and old numbers that clip some ratios."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, V, shape).astype(np.int32)
    drawn = np.argsort(rng.random((*shape, V)))  # ids in some order
    support = np.where(np.arange(V) < rng.integers(1, V + 1, (*shape, 1)), drawn, -1)
    support[..., 0] = np.where((support == labels[..., None]).any(-1),
                               support[..., 0], labels)  # fmt: skip
    labels[rng.random(shape) < 0.4] = -1
    ones, places = (
        np.ones(shape, np.int32),
        np.tile(np.arange(8, dtype=np.int32), (3, 1)),
    )
    floats = rng.normal(size=(4, *shape)).astype("f4")
    return PolicyBatch(
        Batch(labels, labels, ones, places),
        *(-1 + 0.5 * floats[0], floats[1], abs(floats[2]), -1 + 0.5 * floats[3]),
        packing.support_to_csr(support),
    )


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def wanted(weights, hidden, entropy_coefficient):
    module = nnx.merge(nnx.split(head_and_hidden()[0])[0], weights)
    return dense_loss(
        module(hidden) / 0.7, truncated_micro_batch(), 7, entropy_coefficient
    )


def dense_loss(z, made, normalizer, entropy_coefficient):
    """The loss with an explicit mask over all logits; differentiable, materialised."""
    labels = made.batch.labels
    ids = packing.csr_to_support(*made.supports).reshape(*labels.shape, -1)
    within = (ids[..., None] == np.arange(V)).any(-2)
    log_p = jax.nn.log_softmax(jnp.where(within, z, -jnp.inf))
    whole = jax.nn.log_softmax(z)
    lp = jnp.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
    live = labels >= 0
    lp = jnp.where(live, lp, made.old_logprob)
    (low, high), A = CONFIG.clips, made.advantages
    ratio = jnp.exp(lp - made.old_logprob)
    loss = -jnp.minimum(ratio * A, jnp.clip(ratio, 1 - low, 1 + high) * A)
    delta = made.ref_logprob - lp
    loss += CONFIG.kl_coefficient * (jnp.exp(delta) - delta - 1)
    entropy = -jnp.sum(jnp.exp(whole) * whole, -1)
    loss -= entropy_coefficient * entropy
    return jnp.sum(jnp.where(live, made.weights * loss, 0)) / normalizer


@pytest.mark.full
@pytest.mark.parametrize(
    ("entropy", "logits"),
    [
        (0.05, "fused"),
        slow(0.0, "materialised"),
        slow(0.0, "fused"),
        slow(0.05, "materialised"),
    ],
)
def test_ratios_are_those_within_the_support(entropy, logits):
    config = dataclasses.replace(CONFIG, entropy_coefficient=entropy)
    made, call = truncated_micro_batch(), PolicyHeadOptions(0.7, logits, max_ids=V)
    head, hidden = head_and_hidden()
    definition, weights = nnx.split(head)

    def ours(weights, hidden):
        module = nnx.merge(definition, weights)
        return policy_loss(module, hidden, made, jnp.float32(7), config, call)

    (value, told), slopes = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(
        weights, hidden
    )
    want, expected = wanted(weights, hidden, entropy)
    np.testing.assert_allclose(value, want, rtol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), slopes, expected
    )
    assert 0 < told["clip_fraction"].sum() < (made.batch.labels >= 0).sum()
    entropy = softmax_stats(np.asarray(head(hidden)) / 0.7, made.batch.labels)[1]
    live = made.batch.labels >= 0
    np.testing.assert_allclose(told["entropy"], np.where(live, entropy, 0), rtol=1e-5)


# ------------------------------------------------------------------- a rollout


@functools.cache
def job_of(**sampling):
    config = changed(SMALL, grpo=dict(kl_coefficient=0.1), sampling=sampling)
    program = PolicyProgram(config)
    return job_with(program, program.compile())


@pytest.mark.full
@pytest.mark.parametrize("sampling", [dict(top_p=0.8, support=14), CUT], ids=str)
def test_first_ratios_are_one_within_support(sampling):
    """Ratios of the trainer's probabilities to the sampler's are 1 in every pass."""
    job = job_of(**sampling)
    state, compiled = job.initial_state(), job._compiled
    made = job._roll_out(1, state.params)
    live, drawn = np.asarray(made.samples.mask), np.asarray(made.samples.logprobs)
    old = job._measure_logprobs(compiled.logprobs, state.params, made)
    reference = job._measure_logprobs(compiled.reference, state.params, made)
    assert old.whole is not None and reference.whole is None
    for found in (old.drawn_from, reference.drawn_from):
        np.testing.assert_allclose(found[live], drawn[live], atol=2e-6)
    assert np.mean((old.whole - drawn)[live] < np.log(0.9)) > 0.5
    # An update whose old numbers are the sampler's: nothing is clipped, and the loss is
    # the mean of -A, each token's ratio being 1; the reference is at no distance.
    learned = Minibatch(made.completions, made.advantages, drawn, drawn, made.supports)
    sums = compiled.zeros()
    for rows, normalizer in learned.micro_batches(job.config):
        sums, _ = compiled.gradients[rows.batch.tokens.shape](
            state.params, job.frozen, sums, rows, normalizer
        )
    assert sums.metrics["clip_fraction"] == 0
    assert 0 <= sums.metrics["kl"] < 1e-9
    assert float(sums.loss) == pytest.approx(-made.advantages.mean(), abs=1e-5)
    told = rollout_metrics.agreement(old, made.samples)
    assert told["ratios_inside_1_1"] == 1 and told["unreplayed_inside_1_1"] < 0.5
    assert told["ratios_outside_1_25"] == told["ratios_outside_2"] == 0


@pytest.mark.slow
def test_supports_are_those_that_the_sampler_drew_from():
    """The sampler's own truncation of the trainer's logits, token by token."""
    job = job_of(**CUT)
    state, config = job.initial_state(), job.config
    made = job._roll_out(1, state.params)
    model = job.program.model(state.params, job.frozen)
    tokens, completions = made.completions.tokens, made.completions
    for i in range(0, len(tokens), 5):
        ids = tokens[i][None]
        positions = np.arange(ids.shape[1])[None]
        z = model.head(model(ids, np.ones_like(ids), positions))[0]
        first, length = completions.first[i], completions.lengths[i]
        want = truncate(z[first : first + length], config.sampling)[1]
        found = packing.csr_to_support(*made.supports.csr, CUT["support"])
        found = found[made.supports.numbers[i, :length]]
        np.testing.assert_array_equal(np.sort(found), np.sort(want))
        labels = completions.sampled[i, :length, None]
        assert (found == labels).any(-1).all()


def test_limit_that_cuts_supports_is_told():
    config = changed(SMALL, sampling=dict(top_p=0.99, support=3))
    tight = RolloutSupports.of(
        np.array([[[1, 2, 3], [4, -1, -1]], [[5, 6, 7], [-1, -1, -1]]])
    )
    told = rollout_metrics.of_supports(tight, config, V)
    assert told == {"support_mean": 7 / 3, "support_full": 2 / 3}
    told = rollout_metrics.of_supports(
        tight, changed(config, sampling=dict(top_k=3)), V
    )
    assert told["support_full"] is None  # there is nothing to cut
    assert rollout_metrics.of_supports(tight, config, 3)["support_full"] is None
    assert rollout_metrics.of_supports(None, config, V) == {}


@pytest.mark.full
def test_run_says_once_that_its_limit_cuts(capsys):
    job = job_of(**CUT)
    state = job.initial_state()
    for number in (1, 2):
        state, told = job.step(number, state)
        assert told.support_full > 0.9
    said = capsys.readouterr().out
    assert (
        said.count("of the tokens have supports of sampling.support=3 ids; larger") == 1
    )


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory, programs_of_module):
    config = changed(
        SMALL,
        sampling=CUT,
        grpo=dict(kl_coefficient=0.1, epochs=2, token_fraction=0.5),
        run=dict(steps=4, checkpoint_every=1),
    )
    out_dir = tmp_path_factory.mktemp("nucleus") / "run"
    return config, *train(config, out_dir)


@pytest.mark.full
def test_metrics_before_and_after_the_replay(finished):
    _, result, _ = finished
    for step in result.history:
        assert step.mismatch_max < 1e-5 and step.ratios_inside_1_1 == 1
        assert step.unreplayed_inside_1_1 < 0.5
        assert step.mismatch_p50 <= step.mismatch_p95 <= step.mismatch_p99
        assert step.ratios_outside_1_25 == step.ratios_outside_2 == 0
        assert 1 < step.support_mean <= 3 and step.support_full > 0.5
        assert step.backend == "xla"
        assert np.log(V) / 2 < step.entropy <= np.log(V)  # a mean over half the tokens
    line = json.loads((result.out_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert line["backend"] == "xla" and line["unreplayed_inside_1_1"] < 0.5


def test_replay_without_truncation_is_refused():
    logprobs, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    samples = Samples(mask, mask, logprobs, None, mask)
    off = logprobs + np.log(np.float32([[1.05, 1.3, 2.1], [0.95, 0.7, 0.4]]))
    told = rollout_metrics.agreement(Logprobs(off, None, mask), samples)
    assert told["unreplayed_inside_1_1"] is None
    assert told["ratios_inside_1_1"] == pytest.approx(2 / 6)
    assert told["ratios_outside_1_25"] == pytest.approx(4 / 6)
    assert told["ratios_outside_2"] == pytest.approx(2 / 6)


# ------------------------------------------------------------------- metrics


def test_means_are_over_learned_tokens():
    updates = [
        rollout_metrics.Update(1.0, 2.0, {"entropy": 6.0}, 3),
        rollout_metrics.Update(2.0, 4.0, {"entropy": 4.0}, 1),
        rollout_metrics.Update(0.0, 0.0, {"entropy": 0.0}, 0),
    ]
    told = rollout_metrics.of_updates(updates)
    assert told == {"loss": 1.0, "grad_norm": 2.0, "kl": None, "entropy": 2.5}
    told = rollout_metrics.of_updates(updates[2:])
    assert told == {"loss": 0.0, "grad_norm": 0.0, "kl": None, "entropy": None}


def test_unmeasured_metrics_are_null():
    logprobs, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    samples = Samples(mask, mask, logprobs, None, mask)
    old = Logprobs.unknown(logprobs.shape, truncates=False)
    told = rollout_metrics.agreement(old, samples)
    assert len(told) == 11 and set(told.values()) == {None}
    assert rollout_metrics.dropped(logprobs, old, samples) == {"dropped": None}
    old.known[0, 0], old.drawn_from[0, 0] = True, 0.0
    told = rollout_metrics.agreement(old, samples)
    assert told["mismatch_max"] == 0 and told["ratios_inside_strict"] == 1
    assert rollout_metrics.dropped(logprobs, old, samples) == {"dropped": 1}


# ------------------------------------------------------------------- backend


def test_backend_that_cannot_run_here_is_named(tmp_path):
    config = changed(SMALL, head=dict(implementation="hopper"))
    message = "^head.implementation: implementation='hopper' cannot run this call"
    with pytest.raises(ValueError, match=message):
        train(config, tmp_path / "run")


# ----------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["grpo.token_fraction=0.0"], "grpo.token_fraction must be in (0, 1], got 0.0"),
        (["grpo.token_fraction=1.5"], "grpo.token_fraction must be in (0, 1], got 1.5"),
        (["grpo.token_fraction=nan"], "grpo.token_fraction must be"),
        (["head.implementation=cuda"], "head.implementation must be 'xla', "),
        (["head.implementation=xla", "head.logits=materialised"],
         "head.implementation='xla' needs logits='fused'"),
        (["head.gradient=('sample', 4)", "sampling.top_k=3"],
         "head.gradient=('sample', 4) must stay None if sampling.top_k, top_p "),
        (["head.vocab_groups=8", "sampling.top_k=3"],
         "head.vocab_groups=8 must stay None if sampling.top_k, top_p or "),
    ],
)  # fmt: skip
def test_replay_config_errors_are_one_line(overrides, expected):
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        load(CONFIGS / "grpo_arithmetic.gin", overrides)
    assert "\n" not in str(caught.value)
