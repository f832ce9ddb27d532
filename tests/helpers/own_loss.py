"""Losses and advantages of one's own, by the names of a gin file.

grpo.loss = "own_loss.py:soft_clip"
grpo.advantage = "own_loss.py:ranks"
dpo.loss = "own_loss.py:hinge"
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import losses
from jaxmem.train.jobs.policy_losses import PolicyLoss


def reinforce(logprob, advantages):
    """A loss per token: the mean is over tokens, and nothing is reported as clipped."""
    return losses.policy_gradient(logprob, advantages)


def _soft_clip(logprob, old_logprob, advantages, entropy, clip_low=0.2, clip_high=0.4):
    ratio = jnp.exp(logprob - jax.lax.stop_gradient(old_logprob))
    softly = jax.nn.sigmoid((ratio - 1) / jnp.where(ratio > 1, clip_high, clip_low))
    return -softly * advantages - 0.01 * entropy


# As GRPO: the mean of the sequences' means, grpo.clip_low and the clips' report.
soft_clip = PolicyLoss(_soft_clip, average="sequences", clips=True, advantage="rloo")


def ranks(rewards):
    """Advantages in [-1, 1] of rewards [prompts, samples], NaN where there is none."""
    others = rewards[:, :, None], rewards[:, None, :]
    wins = np.greater(*others).sum(2) - np.less(*others).sum(2)
    return wins / max(rewards.shape[1] - 1, 1)


def hinge(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    """A loss per pair, of the log-probabilities of both answers."""
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)
    return jax.nn.relu(1 - beta * margin)
