"""Quantities of whole sequences, and of groups of samples of one prompt.

Sequences are identified as in packed rows: `segment_ids [..., T]` are 1, 2, ... along
the last axis, restarting at 1 in every row, and 0 is padding. If every row holds one
sequence, its integer mask serves as segment ids. The result of an invalid id is NaN.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmem.base import messages
from jaxmem.head.maths import checks
from jaxmem.head.maths.explicit_axes import sharded_like, with_automatic_axes
from jaxmem.losses.ratios import Coefficient, as_coefficient, as_tokens, clamp, in_band

SEQUENCE_STATISTICS = ("geometric_mean", "every_token")


@with_automatic_axes(sharded_like(values=1, segment_ids=1))
def sequence_sum(
    values: ArrayLike,
    segment_ids: ArrayLike,
    *,
    num_segments: int,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Sum over each sequence's tokens: of log-probabilities, ln p of the sequence.

        out[..., s] = Σ_t [segment_ids_t = s] values_t

    Differentiable; tokens that `where` excludes add 0, even if they are NaN.

    Args:
        values: one number per token [..., T].
        segment_ids: sequence of each token in its row [..., T]; 0 is padding.
        num_segments: entries of the result, the largest id + 1.
        where: booleans that broadcast to values; False excludes a token.

    Returns:
        Array [..., num_segments]; entry 0 is padding, and 0.

    Raises:
        ValueError: shapes disagree, or an id that is not traced is ≥ num_segments.

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, ids = jnp.array([-1.0, -2.0, -4.0, 0.0]), jnp.array([1, 1, 2, 0])
    >>> jaxmem.losses.sequence_sum(lp, ids, num_segments=3)
    Array([ 0., -3., -4.], dtype=float32)
    """
    num_segments = checks.check_count("num_segments", num_segments)
    values, ids, unknown = _live_tokens(
        "values", values, segment_ids, where, num_segments - 1
    )
    if checks.is_visible(unknown) and unknown.any():
        raise ValueError(
            f"segment_ids must be in [0, {num_segments}) for num_segments="
            f"{num_segments}, got {np.asarray(segment_ids)[unknown].flat[0]}"
        )
    sums = _segment_sum(values, ids, num_segments)
    return jnp.where(unknown.any(-1, keepdims=True), jnp.nan, sums)


@with_automatic_axes(sharded_like(logprob=0, old_logprob=0, segment_ids=0))
def sequence_log_ratio(
    logprob: ArrayLike,
    old_logprob: ArrayLike,
    segment_ids: ArrayLike,
    *,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Logarithm of GSPO's sequence ratio, at each of the sequence's tokens; a constant.

        out_t = stop_gradient(mean of logprob - old_logprob over the sequence of t)

    Args:
        logprob: log-probabilities under the policy being updated [..., T], as it is
            before this update: a forward-only pass, 2NVD.
        old_logprob: under the behaviour policy, which sampled [..., T].
        segment_ids: sequence of each token in its row [..., T]; 0 is padding.
        where: booleans that broadcast to the tokens; False (a prompt's token) counts
            neither in the sum nor in the length.

    Returns:
        Array [..., T]; 0 where a token does not count.

    >>> import jax.numpy as jnp, jaxmem
    >>> new, old = jnp.array([-1.0, -2.0, -4.0]), jnp.array([-1.0, -3.0, -3.0])
    >>> jaxmem.losses.sequence_log_ratio(new, old, jnp.array([1, 1, 2]))
    Array([ 0.5,  0.5, -1. ], dtype=float32)

    Reference: Zheng et al., 2025, arXiv:2507.18071 (GSPO).
    """
    new, old = as_tokens(logprob=logprob, old_logprob=old_logprob)
    total, count = _over_sequence("logprob", new - old, segment_ids, where)
    return lax.stop_gradient(total / jnp.maximum(count, 1))


@with_automatic_axes(sharded_like(logprob=0, rollout_logprob=0, segment_ids=0))
def sequence_mask_weights(
    logprob: ArrayLike,
    rollout_logprob: ArrayLike,
    segment_ids: ArrayLike,
    *,
    low: Coefficient = 0.999,
    high: Coefficient = 1.002,
    statistic: str = "geometric_mean",
    where: ArrayLike | None = None,
) -> jax.Array:
    """Importance weights that drop whole sequences whose ratios leave a band.

        r_t = e^(logprob_t - rollout_logprob_t)
        out_t = stop_gradient(r_t if low ≤ s ≤ high else 0)

    s is the geometric mean of r over the sequence of t, whatever its length; or every
    r of the sequence has to be in the band. A dropped token counts in the loss's
    normaliser as before. With the geometric mean this is NeMo-RL's `seq-mask-tis`, and
    the default band is from its guide.

    Args:
        logprob, rollout_logprob: as in `truncated_importance_weights` [..., T].
        segment_ids, where: as in `sequence_log_ratio`.
        low: smallest s of a sequence that is kept.
        high: largest s of a sequence that is kept.
        statistic: "geometric_mean" or "every_token".

    Returns:
        A weight per token [..., T]; 0 where a token does not count.

    Raises:
        ValueError: shapes disagree, low is above high, or statistic is unknown.

    >>> import jax.numpy as jnp, jaxmem
    >>> lp, rollout = jnp.array([-1.0, -2.0, -4.0]), jnp.array([-2.0, -1.0, -3.5])
    >>> ids = jnp.array([1, 1, 2])
    >>> jaxmem.losses.sequence_mask_weights(lp, rollout, ids).round(2)
    Array([2.72, 0.37, 0.  ], dtype=float32)

    Reference: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from
    the Training-Inference Mismatch", 2025 (richardli.xyz/rl-collapse); NeMo-RL #1899.
    """
    if not (isinstance(statistic, str) and statistic in SEQUENCE_STATISTICS):
        raise ValueError(
            f"statistic must be one of {SEQUENCE_STATISTICS}, got "
            f"{messages.short(statistic)}"
        )
    lp, rollout = as_tokens(logprob=logprob, rollout_logprob=rollout_logprob)
    log_ratio = clamp(lp - rollout)
    if statistic == "geometric_mean":
        total, count = _over_sequence("logprob", log_ratio, segment_ids, where)
        kept = in_band(jnp.exp(total / jnp.maximum(count, 1)), low, high)
    else:
        strays = 1.0 - in_band(jnp.exp(log_ratio), low, high).astype(lp.dtype)
        total, count = _over_sequence("logprob", strays, segment_ids, where)
        kept = total == 0
    weights = jnp.where(kept & (count > 0), jnp.exp(log_ratio), 0)
    return lax.stop_gradient(jnp.where(jnp.isnan(total), jnp.nan, weights))


@with_automatic_axes(sharded_like(segment_ids=0))
def sequence_mean_weights(
    segment_ids: ArrayLike,
    *,
    where: ArrayLike | None = None,
    num_sequences: ArrayLike | None = None,
) -> jax.Array:
    """Weights per token that turn a sum over tokens into a mean of sequences' means.

        out_t = 1 / (tokens of the sequence of t · num_sequences)

    A loss multiplied by these weights and summed is GRPO's and GSPO's average. The
    weights are known before the pass, like the divisors of a mean over tokens (their
    number) and of Dr. GRPO's sum (sequences times the maximum completion length).

    Args:
        segment_ids, where: as in `sequence_log_ratio`.
        num_sequences: sequences of the whole step, over all micro-batches and devices;
            None for those in segment_ids.

    Returns:
        float32 [..., T], 0 where a token does not count; the sum is 1 if num_sequences
        is None, or 0 if no token counts.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.sequence_mean_weights(jnp.array([1, 1, 2, 0]))
    Array([0.25, 0.25, 0.5 , 0.  ], dtype=float32)

    Reference: Shao et al., 2024, arXiv:2402.03300 (GRPO).
    """
    ids = checks.as_array("segment_ids", segment_ids)
    ones = jnp.ones(ids.shape, jnp.float32)
    count, _ = _over_sequence("segment_ids", ones, ids, where)
    share = jnp.where(count == 0, 0, 1 / count)
    if num_sequences is None:
        sequences = jnp.round(jnp.sum(share))
    else:
        sequences = checks.as_visible_array("num_sequences", num_sequences)
        checks.check_normalizer(sequences, "num_sequences")
    return share / jnp.maximum(jnp.asarray(sequences).astype(share.dtype), 1)


@with_automatic_axes(sharded_like(rewards=0, group_ids=0))
def grpo_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike | None = None,
    *,
    num_groups: int | None = None,
    normalize_std: bool = True,
    epsilon: Coefficient = 1e-6,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Advantage of each sample relative to its prompt's group; a constant.

        out_i = (r_i - mean(r)) / (std(r) + epsilon)        over the group of i

    A group whose rewards are all equal, or that has one sample, gives exactly 0.

    Args:
        rewards: one per sequence, [..., G] with a prompt's samples along the last axis;
            or of any shape, with group_ids.
        group_ids: prompt of each sequence, of rewards' shape, in [0, num_groups); a
            negative id excludes the sequence.
        num_groups: number of prompts; needed with group_ids, and static under jit.
        normalize_std: True to divide by the standard deviation (n - 1 in its
            denominator); False for Dr. GRPO, where out_i = r_i - mean(r).
        epsilon: added to the standard deviation.
        where: booleans that broadcast to rewards; False excludes a sequence.

    Returns:
        float32 (float64 for float64 rewards) of rewards' shape; 0 for an excluded
        sequence, NaN for a traced id ≥ num_groups.

    Raises:
        ValueError: shapes disagree, group_ids is given without num_groups, or an id is
            too large.

    >>> import jax.numpy as jnp, jaxmem
    >>> two_prompts = jnp.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    >>> for group in jaxmem.losses.grpo_advantages(two_prompts):
    ...     print([round(float(x), 3) for x in group])
    [0.866, -0.866, -0.866, 0.866]
    [0.0, 0.0, 0.0, 0.0]

    Reference: Shao et al., 2024, arXiv:2402.03300 (GRPO); Liu et al., 2025,
    arXiv:2503.20783 (Dr. GRPO).
    """
    normalize_std = checks.check_flag("normalize_std", normalize_std)
    deviation, count, total = _deviations(rewards, group_ids, num_groups, where)
    epsilon = as_coefficient("epsilon", epsilon, 0, tokens=deviation.shape)
    if not normalize_std:
        return deviation
    return deviation / (_std(deviation, count, total) + epsilon)


@with_automatic_axes(sharded_like(rewards=0, group_ids=0))
def rloo_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike | None = None,
    *,
    num_groups: int | None = None,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Reward of each sample minus the mean of its prompt's others; a constant.

        out_i = r_i - Σ_{j≠i} r_j / (n - 1) = n/(n - 1) (r_i - mean(r))

    Arguments, result and errors are as in `grpo_advantages`.

    >>> import jax.numpy as jnp, jaxmem
    >>> jaxmem.losses.rloo_advantages(jnp.array([[1.0, 0.0]]))
    Array([[ 1., -1.]], dtype=float32)

    Reference: Ahmadian et al., 2024, arXiv:2402.14740 (RLOO).
    """
    deviation, count, _ = _deviations(rewards, group_ids, num_groups, where)
    return deviation * count / jnp.maximum(count - 1, 1)


@with_automatic_axes(sharded_like(rewards=0))
def reinforce_plus_plus_advantages(
    rewards: ArrayLike, *, epsilon: Coefficient = 1e-6, where: ArrayLike | None = None
) -> jax.Array:
    """Advantage of each sample relative to all samples of the batch; a constant.

        out_i = (r_i - mean(r)) / (std(r) + epsilon)        over all samples

    Unlike a group's advantages, these need one sample of a prompt; all samples of a
    prompt may be above 0. REINFORCE++ subtracts a KL term from the rewards before, and
    takes mean and std over tokens; here each sample counts once.

    Args:
        rewards: one per sequence, of any shape.
        epsilon, where: as in `grpo_advantages`.

    Returns:
        float32 (float64 for float64 rewards) of rewards' shape; 0 for an excluded
        sequence, and for all if their rewards are equal.

    >>> import jax.numpy as jnp, jaxmem
    >>> two_prompts = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    >>> for group in jaxmem.losses.reinforce_plus_plus_advantages(two_prompts):
    ...     print([round(float(x), 3) for x in group])
    [0.866, 0.866]
    [-0.866, -0.866]

    Reference: Hu et al., 2025, arXiv:2501.03262 (REINFORCE++).
    """
    deviation, count, total = _deviations(rewards, *_one_group(rewards), where)
    epsilon = as_coefficient("epsilon", epsilon, 0, tokens=deviation.shape)
    return deviation / (_std(deviation, count, total) + epsilon)


@with_automatic_axes(sharded_like(rewards=0, group_ids=0))
def batch_std_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike | None = None,
    *,
    num_groups: int | None = None,
    epsilon: Coefficient = 1e-6,
    where: ArrayLike | None = None,
) -> jax.Array:
    """Deviation from the mean of the prompt's group, by the batch's std; a constant.

        out_i = (r_i - mean(r of the group of i)) / (std(r of all samples) + epsilon)

    A prompt whose samples nearly agree is not scaled up, as it is by
    `grpo_advantages`. A group whose rewards are all equal, or that has one sample,
    gives exactly 0.

    Arguments, result and errors are as in `grpo_advantages`; an excluded sequence
    counts in neither.

    >>> import jax.numpy as jnp, jaxmem
    >>> two_prompts = jnp.array([[1.0, 0.0], [0.1, 0.0]])
    >>> for group in jaxmem.losses.batch_std_advantages(two_prompts):
    ...     print([round(float(x), 3) for x in group])
    [1.03, -1.03]
    [0.103, -0.103]

    Reference: Liu et al., "Part I: Tricks or Traps? A Deep Dive into RL for LLM
    Reasoning", 2025, arXiv:2508.08221 (Lite PPO).
    """
    deviation, *_ = _deviations(rewards, group_ids, num_groups, where)
    epsilon = as_coefficient("epsilon", epsilon, 0, tokens=deviation.shape)
    if group_ids is not None:
        live = checks.as_array("group_ids", group_ids) >= 0
        where = live if where is None else live & jnp.asarray(where)
    of_batch = _deviations(rewards, *_one_group(rewards), where)
    return deviation / (_std(*of_batch) + epsilon)


def _one_group(rewards):
    """Ids and number of groups where all sequences are one."""
    return jnp.zeros(np.shape(rewards), jnp.int32), 1


def _std(deviation, count, total):
    """Standard deviations at each sequence; 1 where all deviations of a group are 0."""
    variance = total(jnp.square(deviation)) / jnp.maximum(count - 1, 1)
    # If the variance is 0, so is the deviation; avoid 0 / 0 for any epsilon.
    return jnp.sqrt(jnp.where(variance == 0, 1, variance))


def _deviations(rewards, group_ids, num_groups, where):
    """Deviations from the group's mean, group sizes, and a sum over groups."""
    (rewards,) = as_tokens(rewards=rewards)
    ids, num_groups = _group_ids(rewards, group_ids, num_groups)
    live = ids >= 0
    if (where := checks.read_where(where, rewards.shape)) is not None:
        live = live & where
    if group_ids is not None:
        _check_groups(ids, live, num_groups)
    flat = jnp.where(live, ids, num_groups).ravel()  # the last group is discarded

    def each(reduce, x):
        return reduce(x.ravel(), flat, num_groups + 1)[flat].reshape(x.shape)

    def total(x):
        return each(jax.ops.segment_sum, jnp.where(live, x, 0))

    rewards = lax.stop_gradient(jnp.where(live, rewards, 0))
    count = total(jnp.ones_like(rewards))
    mean = total(rewards) / jnp.maximum(count, 1)
    # Equal rewards must give exactly 0, although their mean may be rounded.
    differ = each(jax.ops.segment_max, rewards) != each(jax.ops.segment_min, rewards)
    deviation = jnp.where(live & differ, rewards - mean, 0)
    unknown = live & (ids > num_groups - 1)
    return jnp.where(unknown, jnp.nan, deviation), count, total


def _group_ids(rewards, group_ids, num_groups):
    if group_ids is None:
        if rewards.ndim < 1:
            raise ValueError("rewards must be [..., G], got a scalar")
        if num_groups is not None:
            raise ValueError("num_groups goes with group_ids, which is None")
        num_groups = math.prod(rewards.shape[:-1])
        ids = jnp.arange(num_groups, dtype=jnp.int32).reshape(*rewards.shape[:-1], 1)
        return jnp.broadcast_to(ids, rewards.shape), num_groups
    ids = _integers("group_ids", group_ids, rewards.shape, "sequence")
    if num_groups is None:
        raise ValueError("num_groups must be given with group_ids: how many prompts")
    return ids, checks.check_count("num_groups", num_groups, low=0)


def _check_groups(ids, live, num_groups):
    if not (checks.is_visible(ids) and checks.is_visible(live)):
        return
    largest = np.max(np.asarray(ids), where=np.asarray(live), initial=-1)
    if largest >= num_groups:
        raise ValueError(
            f"group_ids must be below num_groups={num_groups}, got {largest}"
        )


def _over_sequence(name, values, segment_ids, where):
    """Sum over and length of each token's sequence; 0 where a token does not count."""
    length = np.shape(values)[-1] if np.ndim(values) else 0
    values, ids, unknown = _live_tokens(name, values, segment_ids, where, length)
    live = ids > 0

    def at_tokens(x):
        sums = _segment_sum(x, ids, length + 1)
        own = jnp.where(live, jnp.take_along_axis(sums, ids, axis=-1), 0)
        return jnp.where(unknown, jnp.nan, own)

    return at_tokens(values), at_tokens(live.astype(values.dtype))


def _live_tokens(name, values, segment_ids, where, largest):
    """Values and ids, both 0 where a token does not count; a mask of invalid ids."""
    (values,) = as_tokens(**{name: values})
    if values.ndim < 1:
        raise ValueError(f"{name} must be [..., T], got a scalar")
    ids = _integers("segment_ids", segment_ids, values.shape, "token")
    live = ids != 0
    if (where := checks.read_where(where, values.shape)) is not None:
        live = live & where
    unknown = live & ((ids < 0) | (ids > largest))
    live = live & ~unknown
    return jnp.where(live, values, 0), jnp.where(live, ids, 0), unknown


def _segment_sum(values, ids, num_segments):
    """[..., T] to [..., num_segments], separately for each row."""
    *rows, length = values.shape
    flat = (math.prod(rows), length)
    sums = jax.vmap(lambda v, i: jax.ops.segment_sum(v, i, num_segments))(
        values.reshape(flat), ids.reshape(flat)
    )
    return sums.reshape(*rows, num_segments)


def _integers(name, value, shape, of):
    ids = jnp.asarray(checks.as_integers(name, value))
    if ids.shape != shape:
        raise ValueError(
            f"{name} must have one entry a {of}, shape {shape}, got {ids.shape}"
        )
    if ids.dtype.itemsize < 4 or jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        # Small types cannot represent num_segments or -1; clip instead of wrapping.
        most = min(jnp.iinfo(ids.dtype).max, jnp.iinfo(jnp.int32).max)
        ids = jnp.minimum(ids, ids.dtype.type(most)).astype(jnp.int32)
    return ids
