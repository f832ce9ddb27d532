"""Tunix's LogitStrategy from hidden states: no logits of teacher or student.

The strategy holds three functions of its user: two call a model and select tokens of
its logits, one builds one-hot labels. They run with `DeferredLogits` and `OneHot` as
arrays. The teacher's hidden states, not its logits, go from its program to the train
step. A function that does more than select and mask gets arrays, as in Tunix.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmem.integrations._distillation import (
    DeferredLogits,
    OneHot,
    cross_entropy,
    forward_kl_and_cross_entropy,
    forward_kl_of_largest,
)
from jaxmem.integrations._head import NotServed, Options
from jaxmem.integrations._replace import ReplacedCall, replacing
from jaxmem.integrations._substitutes import holding
from jaxmem.integrations._tunix_models import head_of, without_logits

_STRATEGY = "tunix.distillation.strategies.base_strategy:BaseStrategy"


@replacing(f"{_STRATEGY}.get_teacher_outputs")
def _TEACHER(call: ReplacedCall, self, teacher_model, inputs):
    _check_served(self)
    head_of(teacher_model)  # for `NotServed`
    if self in call.refused:
        raise NotServed(call.refused[self])
    try:
        return _states_of_teacher(self, teacher_model, inputs)
    except NotServed as reason:
        call.refused[self] = str(reason)
        raise


def _as_array(argument: Any) -> Any:
    return argument.array() if isinstance(argument, DeferredLogits) else argument


@replacing(f"{_STRATEGY}.get_train_loss", convert=_as_array)
def _TRAIN(call: ReplacedCall, self, student_model, teacher_output, inputs):
    if not isinstance(teacher_output, DeferredLogits):
        _check_served(self)
        raise NotServed("the teacher's output is not hidden states")
    student, labels = _student_outputs(self, student_model, inputs)
    return _loss(self, student, teacher_output.constant(), labels, call.options)


@replacing(f"{_STRATEGY}.get_eval_loss")
def _EVAL(call: ReplacedCall, self, student_model, inputs):
    _check_served(self)
    student, labels = _student_outputs(self, student_model, inputs)
    return jnp.mean(cross_entropy(student.constant(), labels, call.options)), {}


def _loss(
    strategy: Any,
    student: DeferredLogits,
    teacher: DeferredLogits,
    labels: OneHot,
    options: Options,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and the metrics of `LogitStrategy.compute_loss`, which are constants."""
    alpha, temperature, k = strategy.alpha, strategy.temperature, strategy.distill_top_k
    if k > 0:
        # What has no weight is a metric only, and needs no backward pass.
        soft, hard = (
            student if weight else student.constant() for weight in (alpha, 1 - alpha)
        )
        kl = forward_kl_of_largest(soft, teacher, k, temperature, options)
        ce = cross_entropy(hard, labels, options)
        loss = alpha * temperature**2 * jnp.mean(kl) + (1 - alpha) * jnp.mean(ce)
    else:
        weights = alpha * temperature**2, 1 - alpha
        loss, kl, ce = forward_kl_and_cross_entropy(
            student, teacher, labels, temperature, weights, options
        )
    return loss, {
        "distill/soft_loss": jnp.mean(kl * temperature**2),
        "distill/hard_loss": jnp.mean(ce),
        "distill/kl_div": jnp.mean(kl),
        "distill/teacher_loss": jnp.mean(cross_entropy(teacher, labels, options)),
    }


def _check_served(strategy: Any) -> None:
    """Raise `NotServed` for a loss that is not of logits, or not Tunix's own."""
    kind: Any = type(strategy)
    methods = "compute_loss", "compute_eval_loss", "get_student_outputs"
    own = next((k for k in kind.__mro__ if k.__name__ == "LogitStrategy"), None)
    if own is None or not own.__module__.startswith("tunix."):
        raise NotServed(f"{kind.__name__} compares other things than logits")
    if any(getattr(kind, name) is not getattr(own, name) for name in methods):
        raise NotServed(f"{kind.__name__} has its own loss of logits")


@functools.partial(nnx.jit, static_argnums=0)
def _run_teacher(forward: Callable, model: Any, inputs: dict) -> tuple[Any, Any]:
    """Hidden states, without the head, which would be copied; or an array."""
    with without_logits(model):
        output = forward(model, **inputs)
    return (
        (output.hidden, None) if isinstance(output, DeferredLogits) else (None, output)
    )


def _states_of_teacher(strategy: Any, model: Any, inputs: dict) -> DeferredLogits:
    forward = inspect.unwrap(strategy._teacher_forward_fn)
    try:
        hidden, _ = _run_teacher(forward, model, inputs)
    except NotServed:
        raise
    except Exception as error:  # a genuine one is raised again by the original
        raise _refuse_use("teacher_forward_fn", "logits", error) from error
    head = head_of(model)
    if hidden is None:
        raise NotServed("teacher_forward_fn does not return its model's logits")
    if strategy.distill_top_k > head.n_columns:
        raise NotServed(
            f"distill_top_k={strategy.distill_top_k} exceeds {head.n_columns} logits"
        )
    return DeferredLogits(jax.lax.stop_gradient(hidden), head)


def _student_outputs(
    strategy: Any, model: Any, inputs: dict
) -> tuple[DeferredLogits, OneHot]:
    """Deferred logits and labels of the strategy's functions, or raise `NotServed`."""
    head_of(model)
    try:
        with without_logits(model):
            logits = inspect.unwrap(strategy._student_forward_fn)(model, **inputs)
    except NotServed:
        raise
    except Exception as error:
        raise _refuse_use("student_forward_fn", "logits", error) from error
    if not isinstance(logits, DeferredLogits):
        raise NotServed("student_forward_fn does not return its model's logits")
    try:
        with _without_one_hot():
            labels = inspect.unwrap(strategy._labels_fn)(**inputs)
    except Exception as error:
        raise _refuse_use("labels_fn", "jax.nn.one_hot(...)", error) from error
    if not isinstance(labels, OneHot):
        raise NotServed(
            "labels_fn does not return jax.nn.one_hot(...), or that times a mask"
        )
    if labels.shape != logits.shape:
        raise NotServed(f"labels have the shape {labels.shape}, logits {logits.shape}")
    return logits, labels


def _refuse_use(function: str, what: str, error: Exception) -> NotServed:
    message = (str(error).splitlines() or [""])[0]
    return NotServed(
        f"{function} does more with {what} than select tokens and mask them "
        f"({type(error).__name__}: {message})"
    )


def _without_one_hot() -> contextlib.AbstractContextManager:
    """Inside, `jax.nn.one_hot` along the last axis returns `OneHot`."""

    def one_hot(
        original: Callable,
        x: Any,
        num_classes: int,
        *,
        dtype: Any = None,
        axis: Any = -1,
    ) -> Any:
        if axis != -1:
            return original(x, num_classes, dtype=dtype, axis=axis)
        ids = jnp.asarray(x)
        return OneHot(ids, jnp.ones(ids.shape, dtype or float), num_classes)

    return holding(jax.nn, "one_hot", one_hot)


def _is_logits(x: Any) -> bool:
    return isinstance(x, DeferredLogits)


@replacing("tunix.sft.sharding_utils:shard_input")
def _SHARD(call: ReplacedCall, input_data, data_sharding_axis):
    """Shard a batch, but not the teacher's head in it, which has its sharding."""
    leaves, tree = jax.tree.flatten(input_data, is_leaf=_is_logits)
    states = [x.hidden if _is_logits(x) else x for x in leaves]
    batch = call.original(tree.unflatten(states), data_sharding_axis)
    sharded = tree.flatten_up_to(batch)
    return tree.unflatten(
        DeferredLogits(new, old.head) if _is_logits(old) else new
        for old, new in zip(leaves, sharded, strict=True)
    )


DISTILLATION = (_TEACHER, _TRAIN, _EVAL, _SHARD)
