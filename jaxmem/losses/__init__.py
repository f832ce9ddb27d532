"""Losses of tokens and sequences as plain functions of log-probabilities.

Token losses take arrays of one shape and return a loss per token of that shape, in
float32 (float64 for float64 arrays). They can be used inside `jaxmem.token_loss`, where
loss and gradient come from one pass over the vocabulary (6NVD), or on the results of
`jaxmem.logprobs` and `jaxmem.token_stats` (8NVD). All are to be minimised. The caller's
mask or weights must remove the losses of masked tokens.

**Averaging** is not an option of a loss. It needs a number that is known before the
pass: multiply by a weight per token, or divide the sum by a count over the whole step
and all its micro-batches. A mean over tokens (DAPO) divides by the number of unmasked
tokens; a mean over the means of sequences (GRPO, GSPO) uses `sequence_mean_weights`;
Dr. GRPO divides by the number of sequences times the maximum completion length.

**Losses that couple tokens** (`gspo` by its sequence's ratio, `dpo`, `ipo`, `simpo` and
`orpo` by a pair of sequences) need log-probabilities before any token's loss is known.
Either a forward-only pass (2NVD) fixes the coupling, followed by `token_loss` (6NVD);
or `logprobs` is differentiated directly (8NVD as well, with one pass over the trunk
instead of two). Any such loss of log-probabilities `lp` becomes one for `token_loss` by
its slopes,

    slope = jax.grad(loss)(lp)        out = slope · stats.logprob

which has the gradient of `loss`, but not its value.

Probability ratios are e^δ with δ clamped to ±20: nothing overflows. Beyond the clamp,
and where a loss clips a ratio, the gradient is exactly 0.
"""

from jaxmem.base import imports
from jaxmem.losses.multi_token import multi_token_labels as multi_token_labels
from jaxmem.losses.policy import (
    cispo as cispo,
    dapo as dapo,
    dr_grpo as dr_grpo,
    entropy_bonus as entropy_bonus,
    grpo as grpo,
    gspo as gspo,
    policy_gradient as policy_gradient,
    ppo_clip as ppo_clip,
    sapo as sapo,
)
from jaxmem.losses.preferences import (
    dpo as dpo,
    ipo as ipo,
    orpo as orpo,
    simpo as simpo,
)
from jaxmem.losses.ratios import (
    icepop_weights as icepop_weights,
    kl_k1 as kl_k1,
    kl_k2 as kl_k2,
    kl_k3 as kl_k3,
    kl_low_variance as kl_low_variance,
    masked_importance_weights as masked_importance_weights,
    truncated_importance_weights as truncated_importance_weights,
)
from jaxmem.losses.sequences import (
    batch_std_advantages as batch_std_advantages,
    grpo_advantages as grpo_advantages,
    reinforce_plus_plus_advantages as reinforce_plus_plus_advantages,
    rloo_advantages as rloo_advantages,
    sequence_log_ratio as sequence_log_ratio,
    sequence_mask_weights as sequence_mask_weights,
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

__dir__ = imports.public_dir(__name__)
