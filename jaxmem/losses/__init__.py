"""Losses of tokens and sequences as plain functions of log-probabilities.

Functions of tokens take arrays of one shape and return a loss a token of that shape,
float32 (float64 for float64 arrays), so that they go into `jaxmem.token_loss`, where
loss and gradient come from one pass over the vocabulary (6NVD), or onto the results of
`jaxmem.logprobs` and `jaxmem.token_stats` (8NVD). They are to be minimised. What a
masked token adds is for the caller's mask or weights to leave out.

**How to average** is no option of a loss but a number known before the pass: multiply
by a weight a token, or divide the sum by a count, of the whole step and over all its
micro-batches. A mean over tokens (DAPO) divides by the tokens that count; a mean over
sequences of their means (GRPO, GSPO) has `sequence_mean_weights`; Dr. GRPO divides by
the number of sequences times the longest answer allowed.

**Losses that couple tokens** (`gspo` by its sequence's ratio, `dpo` and `ipo` by a pair
of sequences) need log-probabilities before any token's loss is known: a forward-only
pass (2NVD) fixes the coupling, then `token_loss` (6NVD); or `logprobs`, differentiated
as it stands (8NVD as well, with one pass over the trunk instead of two). Any such loss
of log-probabilities `lp` becomes one for `token_loss` by its slopes,

    slope = jax.grad(loss)(lp)        out = slope · stats.logprob

which has the gradient of `loss`, though not its value.

Ratios of probabilities are e^δ with δ clamped to ±20: nothing overflows, and past the
clamp, as where a ratio is clipped, the gradient is exactly 0.
"""

from jaxmem.losses.policy import (
    cispo as cispo,
    dapo as dapo,
    dr_grpo as dr_grpo,
    entropy_bonus as entropy_bonus,
    grpo as grpo,
    gspo as gspo,
    policy_gradient as policy_gradient,
    ppo_clip as ppo_clip,
)
from jaxmem.losses.preferences import dpo as dpo, ipo as ipo
from jaxmem.losses.ratios import (
    kl_k1 as kl_k1,
    kl_k2 as kl_k2,
    kl_k3 as kl_k3,
    kl_low_variance as kl_low_variance,
    truncated_importance_weights as truncated_importance_weights,
)
from jaxmem.losses.sequences import (
    grpo_advantages as grpo_advantages,
    rloo_advantages as rloo_advantages,
    sequence_log_ratio as sequence_log_ratio,
    sequence_mean_weights as sequence_mean_weights,
    sequence_sum as sequence_sum,
)
from jaxmem.losses.supervised import (
    cross_entropy as cross_entropy,
    label_smoothing as label_smoothing,
    mean_logit as mean_logit,
    sft as sft,
    z_loss as z_loss,
)
