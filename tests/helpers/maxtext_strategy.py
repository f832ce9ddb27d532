"""A stand-in of MaxText's `distillation_utils`, which computes with logits."""

import jax
import jax.numpy as jnp
from flax import struct

_PPL_CE_CAP = 20.0


@struct.dataclass
class DistillationForwardOutput:
    logits: jax.Array
    out_projection_activations: jax.Array | None = None
    moe_lb_loss: jax.Array | None = None
    top_k_indices: jax.Array | None = None


class CombinedDistillationStrategy:
    def __init__(
        self, student_forward_fn, teacher_forward_fn, pad_id=0, temperature=2.0,
        alpha=0.5, beta_feature=0.0, layer_indices=None, feature_loss_fn=None,
        feature_loss_type="cosine", cosine_distance_axis=-1, vocab_size=0,
        alpha_end=None, alpha_schedule="constant", temperature_end=None,
        temperature_schedule="constant", beta_end=None, beta_schedule="constant",
        max_steps=1,
    ):  # fmt: skip
        self.student_forward_fn = student_forward_fn
        self.teacher_forward_fn = teacher_forward_fn
        self.pad_id, self.vocab_size, self.beta_feature = (
            pad_id, vocab_size, beta_feature
        )  # fmt: skip
        self.temperature, self.alpha, self.max_steps = temperature, alpha, max_steps

    def create_labels(self, targets, targets_segmentation=None, **kwargs):
        mask = targets != self.pad_id
        if targets_segmentation is not None:
            mask = mask & (targets_segmentation != 0)
        return jax.nn.one_hot(targets, self.vocab_size) * mask[..., None]

    def compute_loss(self, student_output, teacher_output, labels, step=None):
        # As if alpha were scheduled.
        alpha = self.alpha * (1 - (0.0 if step is None else step) / self.max_steps)
        s, t = student_output.logits, teacher_output.logits
        mask = jnp.any(labels != 0, axis=-1).astype(jnp.float32)
        count, one = jnp.sum(mask), jnp.ones(())
        ids = teacher_output.top_k_indices
        near = s if ids is None else jnp.take_along_axis(s, ids, axis=-1)
        soft = jnp.sum(kl_of(near, t, self.temperature) * mask)
        hard = jnp.sum(entropy_of(s, labels) * mask)
        zero = jnp.zeros(())
        teacher = zero if ids is not None else jnp.sum(entropy_of(t, labels) * mask)
        of_one = zero if ids is not None else jnp.sum(kl_of(s, t, 1.0) * mask)
        n = jnp.maximum(count, 1)
        loss = alpha * soft * self.temperature**2 / n + (1 - alpha) * hard / n
        if self.beta_feature > 0:
            features = student_output.out_projection_activations
            loss += self.beta_feature * jnp.sum(features**2 * mask[..., None]) / n
        if student_output.moe_lb_loss is not None:
            loss += student_output.moe_lb_loss
        sums = dict(
            soft_loss=soft * self.temperature**2, hard_loss=hard, teacher_loss=teacher,
            kl_div_at_T=soft, kl_div_T1=of_one,
        )  # fmt: skip
        values = dict(
            total_loss=loss, alpha=alpha, temperature=jnp.asarray(self.temperature),
            student_perplexity=jnp.exp(jnp.minimum(hard / n, _PPL_CE_CAP)),
            teacher_perplexity=jnp.exp(jnp.minimum(teacher / n, _PPL_CE_CAP)),
        )  # fmt: skip
        pairs = {name: (x, count) for name, x in sums.items()}
        pairs |= {name: (x, one) for name, x in values.items()}
        return loss, {f"distill/{name}": pair for name, pair in pairs.items()}

    def compute_eval_loss(self, student_output, labels):
        mask = jnp.any(labels != 0, axis=-1).astype(jnp.float32)
        total = jnp.sum(entropy_of(student_output.logits, labels) * mask)
        loss, count = total / jnp.maximum(jnp.sum(mask), 1), jnp.sum(mask)
        perplexity = jnp.exp(jnp.minimum(loss, _PPL_CE_CAP))
        return loss, {
            "eval/hard_loss": (total, count),
            "eval/student_perplexity": (perplexity, jnp.ones(())),
        }


def entropy_of(logits, labels):
    return -jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1)


def kl_of(student, teacher, temperature):
    log_p = jax.nn.log_softmax(student / temperature)
    log_q = jax.nn.log_softmax(teacher / temperature)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
