"""Tokens that an update learns from, drawn in proportion to their gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.head.maths.random_streams import Stream
from jaxmem.train.jobs.grpo import minibatches
from jaxmem.train.jobs.grpo.minibatches import (
    Minibatch,
    TokenDraw,
    cut_prefixes,
    draw_tokens,
    gradient_bounds,
    keep_probabilities,
)
from jaxmem.train.jobs.grpo.policy_program import PolicyProgram
from jaxmem.train.jobs.policy_losses import POLICY_LOSSES
from jaxmem.train.jobs.policy_objective import PolicyHeadOptions, policy_loss
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.jobs.rollout.packed import RolloutSupports
from tests.helpers.cases import slow
from tests.helpers.grpo import SMALL, completions, head_and_hidden, job_with, train
from tests.helpers.runs import changed

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
HALF = changed(SMALL, grpo=dict(token_fraction=0.5))
TERMS = dict(kl_coefficient=0.1, entropy_coefficient=0.05)


def random_minibatch(rows=3, seed=0):
    """Completions of one to three tokens; the first one's advantage is 0."""
    rng = np.random.default_rng(seed)
    made, _ = completions(rows=rows, seed=seed)
    shape = made.sampled.shape
    advantages = rng.normal(size=rows).astype("f4")
    advantages[0] = 0
    old, reference = -rng.gamma(0.5, size=(2, *shape)).astype(
        "f4"
    )  # some tokens are nearly certain
    rollout = (old + 0.1 * rng.normal(size=shape)).astype("f4")
    ratio = 0.1 * rng.normal(size=rows)
    return Minibatch(
        made, advantages, old, reference, None, rollout, log_ratio=ratio.astype("f4")
    )


# -------------------------------------------------------------- probabilities


@pytest.mark.parametrize("fraction", [0.9, 0.5, 0.25, 0.01])
def test_keep_probabilities_have_the_fraction_as_mean(fraction):
    bounds = np.random.default_rng(0).gamma(0.2, size=5000)
    found = keep_probabilities(bounds, fraction)
    assert found.mean() == pytest.approx(fraction, rel=1e-9)
    assert found.min() >= fraction / 10 and found.max() <= 1
    inside = (found > 1.001 * fraction / 10) & (found < 1)
    assert inside.any()
    np.testing.assert_allclose(
        found[inside] / bounds[inside] * bounds[inside][0], found[inside][0]
    )


def test_keep_probabilities_of_few_bounds():
    bounds = np.array([0, 0, 0, 1e-30, 2.0, 0, 0, 0, 0, 0])
    few = keep_probabilities(bounds, 0.5)
    np.testing.assert_allclose(few, np.where(bounds > 0, 1, 0.05))
    np.testing.assert_array_equal(keep_probabilities(np.zeros(4), 0.3), [0.3] * 4)
    assert keep_probabilities(np.zeros(0), 0.3).shape == (0,)


def test_gradient_bounds_hold_within_a_factor():
    """1 - p <= |d(-ln p)/dz| <= sqrt(2) (1 - p), times what the loss multiplies."""
    rng, part = np.random.default_rng(1), random_minibatch()
    shape = part.rollout.shape
    z = jnp.asarray(rng.normal(size=(*shape, 9)) * rng.uniform(0, 9, (*shape, 1)))
    log_p = np.asarray(jax.nn.log_softmax(z)[..., 4])
    slope = jax.vmap(jax.vmap(jax.grad(lambda z: -jax.nn.log_softmax(z)[4])))(z)
    norm = np.linalg.norm(np.asarray(slope), axis=-1)
    part = part._replace(
        rollout=log_p.astype("f4"), advantages=np.array([-2.0, 0, 0.5], "f4")
    )
    config = changed(SMALL, grpo=dict(loss="grpo"))
    a = abs(part.advantages / part.completions.lengths)[:, None]
    bounds = gradient_bounds(config, part)
    np.testing.assert_array_equal(bounds[1], 0)
    assert (bounds <= a * norm * (1 + 1e-4)).all()
    assert (2**0.5 * bounds >= a * norm * (1 - 1e-4)).all()
    factors = rng.uniform(size=(2, *shape)).astype("f4")
    weighted = part._replace(
        correction=factors[0],
        cut=minibatches.Cut(part.completions.counts, factors[1]),
        advantages=np.repeat(part.advantages[:, None], shape[1], axis=1),
    )
    np.testing.assert_allclose(
        gradient_bounds(config, weighted), bounds * factors[0] * factors[1], rtol=1e-6
    )
    terms = dict(loss="grpo", kl_coefficient=0.3, entropy_coefficient=0.2)
    ratio = gradient_bounds(changed(config, grpo=terms), part)[[0, 2]] / bounds[[0, 2]]
    np.testing.assert_allclose(ratio, [[2.5 / 2.0] * 3, [1.0 / 0.5] * 3], rtol=1e-6)
    certain = part._replace(rollout=np.full(shape, 1e-4, "f4"))
    np.testing.assert_array_equal(gradient_bounds(config, certain), 0)


# ---------------------------------------------------------------------- draws


def test_draw_depends_on_seed_step_and_minibatch():
    part = random_minibatch(rows=400)
    draw = draw_tokens(HALF, 1, 0, part)
    count = part.completions.lengths.sum()
    assert draw.kept.sum() / count == pytest.approx(0.5, abs=0.05)
    assert not draw.kept[~part.learnable].any()
    np.testing.assert_array_equal(draw.inverse > 0, part.learnable)
    np.testing.assert_array_equal(draw.kept, draw_tokens(HALF, 1, 0, part).kept)
    for other in (
        draw_tokens(HALF, 2, 0, part),
        draw_tokens(HALF, 1, 1, part),
        draw_tokens(changed(HALF, run=dict(seed=1)), 1, 0, part),
    ):
        assert (other.kept != draw.kept).mean() > 0.1
        np.testing.assert_array_equal(other.inverse, draw.inverse)
    assert part.drawn(SMALL, 1, 0) is part and part.kept is not None
    np.testing.assert_array_equal(part.drawn(HALF, 1, 0).kept, draw.kept)


def test_tokens_are_kept_with_their_probability():
    part = random_minibatch()
    draws = [draw_tokens(HALF, step, 0, part).kept for step in range(2000)]
    probability = 1 / draw_tokens(HALF, 1, 0, part).inverse[part.learnable]
    share = np.mean(draws, axis=0)[part.learnable]
    np.testing.assert_allclose(share, probability, atol=0.05)
    assert probability.max() == 1 and probability.min() < 0.2


@pytest.mark.parametrize("terms", [{}, TERMS], ids=str)
def test_tokens_without_advantage_are_kept_for_other_terms(terms):
    """A third has an advantage; others get the rest, if they have a gradient."""
    part = random_minibatch(rows=300)
    advantages = np.where(np.arange(300) % 3, 0, 1).astype("f4")
    config = changed(HALF, grpo=dict(loss="dapo", **terms))
    inverse = draw_tokens(config, 1, 0, part._replace(advantages=advantages)).inverse
    probability = 1 / inverse[part.learnable]
    idle = np.broadcast_to(advantages[:, None] == 0, inverse.shape)[part.learnable]
    if terms:
        assert probability.mean() == pytest.approx(0.5, rel=1e-6)
        assert probability[idle].mean() > 0.2
    else:
        assert probability.mean() < 0.45
        np.testing.assert_allclose(probability[idle], 0.05, rtol=1e-6)


def test_equal_bounds_draw_uniformly(monkeypatch):
    """Bitwise the tokens and weights of one probability for all."""
    part = random_minibatch(rows=32)
    monkeypatch.setattr(minibatches, "gradient_bounds", lambda *_: 0 * part.rollout)
    drawn = part.drawn(HALF, 7, 1)
    rng = Stream.KEPT_TOKENS.generator(HALF.run.seed, 7, 1)
    kept = (rng.random(part.rollout.shape) < 0.5) & part.learnable
    np.testing.assert_array_equal(drawn.kept, kept)
    rows = zip(drawn.micro_batches(HALF), part.micro_batches(SMALL), strict=True)
    for (of_drawn, normalizer), (whole, same) in rows:
        live = of_drawn.batch.labels >= 0
        assert normalizer == same and live.any()
        wanted = whole.weights / np.float32(0.5)
        np.testing.assert_array_equal(of_drawn.weights[live], wanted[live])
        np.testing.assert_array_equal(of_drawn.inverse[live], 2)
        assert whole.inverse is None


def test_masked_tokens_have_no_label_and_no_support():
    part = random_minibatch(rows=32)
    made = part.completions
    ids = np.zeros((*made.sampled.shape, 2), np.int32)
    ids[np.arange(3) >= made.lengths[:, None]] = -1
    for supports in (None, RolloutSupports.of(ids)):
        learned = part._replace(supports=supports).drawn(HALF, 1, 0)
        rows = [rows for rows, _ in learned.micro_batches(HALF)]
        live = np.concatenate([x.batch.labels.ravel() for x in rows]) >= 0
        assert live.sum() == learned.kept.sum() < made.lengths.sum()
    sizes = np.concatenate([np.diff(x.supports.offsets) for x in rows])
    np.testing.assert_array_equal(sizes > 0, live)


# ------------------------------------------------------------------- no bias


def every_draw(part, config):
    """(probability, minibatch) of every set of tokens that a draw can keep."""
    learnable = part.learnable
    bounds = gradient_bounds(config, part)[learnable]
    probability = keep_probabilities(bounds, config.grpo.token_fraction)
    inverse = np.zeros(learnable.shape, np.float32)
    inverse[learnable] = 1 / probability
    for chosen in itertools.product([False, True], repeat=len(probability)):
        kept = learnable.copy()
        kept[learnable] = chosen
        of_each = np.where(chosen, probability, 1 - probability)
        if of_each.prod():
            yield of_each.prod(), part._replace(draw=TokenDraw(kept, inverse))


def gradients_of(config):
    """The function from a minibatch to its gradients, as one vector of float64."""
    definition, weights = nnx.split(head_and_hidden()[0])
    hidden = 0.3 * np.random.default_rng(1).normal(size=(99, SMALL.model.hidden))
    call = PolicyHeadOptions(0.7, "materialised")

    @functools.partial(jax.grad, argnums=(0, 1))
    def slopes(weights, hidden, rows, normalizer):
        head, shape = nnx.merge(definition, weights), rows.batch.labels.shape
        states = hidden[: np.prod(shape)].reshape(*shape, -1)
        return policy_loss(head, states, rows, normalizer, config.grpo, call)[0]

    slopes = jax.jit(slopes)

    def run(part):
        (rows, normalizer), *more = part.micro_batches(config)
        assert not more
        leaves = jax.tree.leaves(slopes(weights, hidden, rows, normalizer))
        return np.concatenate([np.ravel(x) for x in leaves]).astype(np.float64)

    return run


@pytest.mark.parametrize(
    "grpo",
    [
        dict(loss="dr_grpo"),
        dict(loss="grpo", **TERMS),
        *(slow(dict(loss=loss, **TERMS)) for loss in POLICY_LOSSES if loss != "grpo"),
        dict(loss="dapo", prefix_cut=0.4),
        slow(dict(loss="dapo", correction="tis")),
        slow(dict(loss="dapo", correction="sequence_mask")),
        slow(dict(loss="dapo", correction="ratio")),
    ],
    ids=str,
)  # fmt: skip
def test_expected_gradient_of_draws_is_exact(grpo):
    """The sum over all sets of tokens, each by its probability, is the whole one."""
    config = changed(SMALL, grpo=dict(token_fraction=0.4, **grpo))
    part = random_minibatch()
    if config.grpo.prefix_cut:
        completions, cut = cut_prefixes(config, 3, part.completions)
        part = part._replace(completions=completions, cut=cut)
    if not config.grpo.has_reference:
        part = part._replace(reference=None)
    if config.grpo.drops_sequences:
        factors = np.array([1, 0, 0.7], "f4")[:, None] * np.ones((1, 3), "f4")
        part = part._replace(correction=factors)
    gradient = gradients_of(config)
    exact, spread, total = gradient(part), 0.0, 0.0
    mean = np.zeros_like(exact)
    for probability, drawn in every_draw(part, config):
        of_draw = gradient(drawn)
        mean += probability * of_draw
        spread += probability * np.linalg.norm(of_draw - exact)
        total += probability
    assert total == pytest.approx(1, abs=1e-9)
    size = np.linalg.norm(exact)
    assert size > 0 and spread > 0.1 * size
    assert np.linalg.norm(mean - exact) < 2e-6 * (size + spread)


@pytest.mark.parametrize("masked", ["turns", "own", "learned"])
def test_expected_gradient_of_masked_draws_is_exact(masked):
    config = changed(SMALL, grpo=dict(token_fraction=0.3, loss="dapo"))
    part = random_minibatch()._replace(reference=None)
    rng, shape = np.random.default_rng(5), part.rollout.shape
    if masked == "turns":
        part = part._replace(advantages=rng.normal(size=shape).astype("f4"))
    mask = np.tile(np.array([True, False, True]), (3, 1))
    if masked == "own":
        part = part._replace(completions=part.completions._replace(own=mask))
    if masked == "learned":
        part = part._replace(learned=mask)
    gradient = gradients_of(config)
    draws = list(every_draw(part, config))
    assert len(draws) > 3
    mean = sum(probability * gradient(drawn) for probability, drawn in draws)
    exact = gradient(part)
    np.testing.assert_allclose(mean, exact, atol=2e-6 * np.linalg.norm(exact))


# ----------------------------------------------------------------------- runs


@functools.cache
def job_of(**sampling):
    grpo = dict(kl_coefficient=0.1, token_fraction=0.5)
    program = PolicyProgram(changed(SMALL, grpo=grpo, sampling=sampling))
    return job_with(program, program.compile())


CUT = dict(top_p=0.9, min_p=0.1, temperature=0.7, support=3)


@pytest.mark.full
@pytest.mark.parametrize("sampling", [slow({}), CUT], ids=str)
def test_mean_sums_of_draws_are_those_of_all_tokens(sampling):
    """Gradients and metrics; as near as their spread says, and nearer than one draw."""
    job = job_of(**sampling)
    state, config = job.initial_state(), job.config
    made = job._roll_out(1, state.params)
    sampled = np.asarray(made.samples.logprobs)
    learned = Minibatch(
        made.completions, made.advantages, sampled, sampled - 0.3, made.supports,
        rollout=sampled,
    )  # fmt: skip

    def sums_of(part):
        sums = job._compiled.zeros()
        for rows, normalizer in part.micro_batches(config):
            sums, _ = job._compiled.gradients[rows.batch.tokens.shape](
                state.params, job.frozen, sums, rows, normalizer
            )
        sums = jax.device_get(sums)
        leaves = jax.tree.leaves(sums.gradients)
        gradient = np.concatenate([x.ravel() for x in leaves]).astype(np.float64)
        metrics = sums.metrics | {"loss": sums.loss, "tokens": part.token_count}
        return gradient, np.array([*metrics.values()], np.float64)

    ones = np.ones(sampled.shape, np.float32)
    exact = sums_of(learned._replace(draw=TokenDraw(learned.learnable, ones)))
    drawn = [sums_of(learned.drawn(config, step, 0)) for step in range(60)]
    # The few metrics move together, so that the error of their mean varies more.
    for want, found, limit in zip(
        exact, zip(*drawn, strict=True), (1.5, 3), strict=True
    ):
        spread = np.linalg.norm(np.array(found) - want, axis=1).mean()
        error = np.linalg.norm(np.mean(found, axis=0) - want)
        assert spread > 0.02 * np.linalg.norm(want)
        assert error < limit * spread / np.sqrt(len(found))


@pytest.mark.full
def test_run_tells_the_share_of_tokens(tmp_path):
    result, _ = train(HALF, tmp_path / "run")
    for step in result.history:
        assert 0.05 < step.token_share < 0.7
        assert 1 < step.token_weight_max <= 20.001
        assert np.log(14) / 2 < step.entropy <= np.log(14)


def test_take_of_a_draw():
    part = random_minibatch(rows=6).drawn(HALF, 1, 0)
    rows = np.array([4, 1])
    found = take(part, rows)
    np.testing.assert_array_equal(found.kept, part.kept[rows])
    np.testing.assert_array_equal(found.inverse, part.inverse[rows])
