"""MaxText's distillation from hidden states: no logits of teacher or student.

MaxText's forward functions return logits among other outputs, and its strategy compares
them. Here the outputs have `DeferredLogits`, and labels are `OneHot`. The rest of the
loss (features, load balancing, counts, weights that depend on the step) is computed by
MaxText's own `compute_loss`, from a vocabulary of one token, whose terms are 0.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.integrations._distillation import (
    DeferredLogits,
    OneHot,
    cross_entropy,
    forward_kl,
    forward_kl_and_cross_entropy,
    forward_kl_of_top,
)
from jaxmem.integrations._head import NotServed, Options
from jaxmem.integrations._maxtext_models import (
    final_states,
    head_of,
    stopped_before_head,
)
from jaxmem.integrations._replace import (
    ReplacedCall,
    Replacement,
    Tally,
    or_original,
    replacing,
)

_STRATEGY = (
    "maxtext.trainers.post_train.distillation.distillation_utils:"
    "CombinedDistillationStrategy"
)


# Optional: MaxText trains without Tunix, which its distillation imports.
def _method(name: str, **options: Any) -> Callable[[Callable], Replacement]:
    return replacing(f"{_STRATEGY}.{name}", optional=True, **options)


@_method(
    "__init__",
    parameters=tuple(
        "self student_forward_fn teacher_forward_fn pad_id temperature alpha "
        "beta_feature layer_indices feature_loss_fn feature_loss_type "
        "cosine_distance_axis vocab_size alpha_end alpha_schedule temperature_end "
        "temperature_schedule beta_end beta_schedule max_steps".split()
    ),
)
def _INIT(call: ReplacedCall, self, *args, **kwargs):
    call.original(self, *args, **kwargs)
    for name in ("student_forward_fn", "teacher_forward_fn"):
        setattr(self, name, _forward(self, getattr(self, name), call.tally))


def _forward(strategy: Any, forward: Callable, tally: Tally) -> Callable:
    """A strategy's forward function, whose output has `DeferredLogits`."""

    @or_original(forward, tally)
    def forward_fn(model, *args, **kwargs):
        _check_own(strategy)
        if getattr(model.config, "mtp_num_layers", 0) > 0:
            raise NotServed("multi-token prediction has its own head")
        head = head_of(model)
        with stopped_before_head(model.decoder) as calls:
            output = forward(model, *args, **kwargs)
        (call,) = calls
        if output.logits is not call.placeholder:
            raise NotServed("a forward function does more with logits than return them")
        hidden = final_states(model, call.states, call.deterministic)
        return output.replace(logits=DeferredLogits(hidden, head))

    return forward_fn


def _check_own(strategy: Any) -> None:
    """Raise `NotServed` if a strategy's methods are not these replacements."""
    names = "create_labels", "compute_loss", "compute_eval_loss"
    methods = [getattr(type(strategy), name) for name in names]
    if not all("jaxmem_original" in vars(method) for method in methods):
        kind = type(strategy).__name__
        raise NotServed(f"{kind} has its own labels or loss, or apply() is undone")


@_method("create_labels")
def _LABELS(call: ReplacedCall, self, targets, targets_segmentation=None, **kwargs):
    _check_own(self)
    counts = targets != self.pad_id
    if targets_segmentation is not None:
        counts &= targets_segmentation != 0
    weights = counts.astype(jnp.float32)
    return OneHot(jnp.asarray(targets), weights, self.vocab_size)


def _as_array(argument: Any) -> Any:
    """An argument of MaxText's own loss: logits, or labels, as arrays."""
    if isinstance(getattr(argument, "logits", None), DeferredLogits):
        return argument.replace(logits=argument.logits.array())
    return argument.array() if isinstance(argument, OneHot) else argument


def _perplexity(call: ReplacedCall, loss: jax.Array) -> jax.Array:
    cap = vars(inspect.getmodule(call.original))["_PPL_CE_CAP"]
    return jnp.exp(jnp.minimum(loss, cap))


@_method("compute_loss", convert=_as_array)
def _TRAIN(call: ReplacedCall, self, student_output, teacher_output, labels, step=None):
    ids = getattr(teacher_output, "top_k_indices", None)
    student, teacher = student_output.logits, teacher_output.logits
    _check_served(student, labels, None if ids is not None else teacher)
    none = jnp.zeros((*student.shape[:-1], 1), jnp.float32)
    rest, metrics = call.original(
        self, student_output.replace(logits=none),
        teacher_output.replace(logits=none, top_k_indices=None),
        labels.counted[..., None], step,
    )  # fmt: skip
    temperature, alpha = (
        metrics[f"distill/{name}"][0] for name in ("temperature", "alpha")
    )
    settings = labels, (temperature, alpha), call.options
    if ids is None:
        total, sums = _terms(student, teacher, *settings)
    else:
        total, sums = _terms_of_columns(student, (teacher, ids), *settings)
    count = metrics["distill/soft_loss"][1]
    metrics |= {f"distill/{name}": (total, count) for name, total in sums.items()}
    for model, loss in (("student", "hard_loss"), ("teacher", "teacher_loss")):
        perplexity = _perplexity(call, sums[loss] / jnp.maximum(count, 1))
        weight = metrics[f"distill/{model}_perplexity"][1]
        metrics[f"distill/{model}_perplexity"] = perplexity, weight
    loss = rest + total / jnp.maximum(count, 1)
    metrics["distill/total_loss"] = loss, metrics["distill/total_loss"][1]
    return loss, metrics


@_method("compute_eval_loss", convert=_as_array)
def _EVAL(call: ReplacedCall, self, student_output, labels):
    student = student_output.logits
    _check_served(student, labels)
    total = jnp.sum(cross_entropy(student, labels, call.options))
    count = jnp.sum((labels.counted != 0).astype(jnp.float32))
    loss = total / jnp.maximum(count, 1)
    perplexity = _perplexity(call, loss), jnp.ones((), jnp.float32)
    return loss, {
        "eval/hard_loss": (total, count), "eval/student_perplexity": perplexity
    }  # fmt: skip


def _terms(
    student: DeferredLogits,
    teacher: DeferredLogits,
    labels: OneHot,
    settings: tuple[jax.Array, jax.Array],
    options: Options,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss, and the sums by metrics' names, of MaxText's terms of logits.

    Settings are temperature and alpha. Both results are sums over the tokens; only the
    loss has a gradient.
    """
    temperature, alpha = settings
    where, weights = labels.counted != 0, (alpha * temperature**2, 1 - alpha)
    mean, kl, ce = forward_kl_and_cross_entropy(
        student, teacher, labels, temperature, weights, options, where
    )
    of_one = forward_kl(student.constant(), teacher, 1.0, options, where)
    return mean * jnp.maximum(jnp.sum(where), 1), {
        "soft_loss": jnp.sum(kl) * temperature**2,
        "hard_loss": jnp.sum(ce),
        "teacher_loss": jnp.sum(cross_entropy(teacher, labels, options)),
        "kl_div_at_T": jnp.sum(kl),
        "kl_div_T1": jnp.sum(of_one),
    }


def _terms_of_columns(
    student: DeferredLogits,
    teacher: tuple[jax.Array, jax.Array],
    labels: OneHot,
    settings: tuple[jax.Array, jax.Array],
    options: Options,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`_terms`, of a teacher whose logits of some columns alone are known."""
    (values, ids), (temperature, alpha) = teacher, settings
    where, zero = labels.counted != 0, jnp.zeros((), jnp.float32)
    kl = forward_kl_of_top(student, values, ids, temperature, options, where)
    soft, hard = jnp.sum(kl), jnp.sum(cross_entropy(student, labels, options))
    return alpha * temperature**2 * soft + (1 - alpha) * hard, {
        "soft_loss": soft * temperature**2,
        "hard_loss": hard,
        "teacher_loss": zero,
        "kl_div_at_T": soft,
        "kl_div_T1": zero,
    }


def _check_served(student: Any, labels: Any, teacher: Any = None) -> None:
    """Raise `NotServed` unless logits and labels are of the functions replaced here."""
    if not isinstance(labels, OneHot):
        raise NotServed("labels are not made by create_labels")
    if not isinstance(student, DeferredLogits):
        raise NotServed("the student's forward function returns logits")
    if isinstance(teacher, jax.Array):
        raise NotServed("the teacher's forward function returns logits")


DISTILLATION = (_INIT, _LABELS, _TRAIN, _EVAL)
