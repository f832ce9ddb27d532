"""Optimizers of optax by name, with a learning-rate schedule."""

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxmem.base.fields import Must, check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import needs, unread

_DECAY = reals(0, below=1)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of optax with a schedule that starts with a linear warmup."""

    learning_rate: Annotated[
        float, reals(above=0), "peak learning rate, reached after the warmup"
    ] = 3e-3
    warmup_steps: Annotated[
        int | None,
        integers(0),
        "steps during which the learning rate rises linearly, fewer than run.steps. "
        "None: optimizer.warmup_fraction of run.steps",
    ] = None
    final_fraction: Annotated[
        float,
        reals(0, 1),
        "learning rate after the last step, as a fraction of the peak",
    ] = 0.1
    b1: Annotated[
        float,
        _DECAY,
        'decay of the mean of the gradients; for "sgd" and "muon", the momentum',
    ] = 0.9
    b2: Annotated[
        float,
        _DECAY,
        'decay of the mean of the squared gradients; for "lion", its second decay',
    ] = 0.95
    eps: Annotated[
        float, reals(above=0), "number that is added to the root of the mean square"
    ] = 1e-8
    weight_decay: Annotated[
        float, reals(0), "weight decay per unit of learning rate, of matrices only"
    ] = 0.1
    clip_norm: Annotated[
        float | None,
        reals(above=0),
        "maximum global norm of the gradient; a larger gradient is scaled down. None: "
        "no clipping",
    ] = 1.0
    trainable: Annotated[
        str | None,
        Must("a regular expression", _is_pattern),
        "regular expression that is searched in the names of weights, such as "
        '"blocks/attention/query/kernel". Weights that do not match are frozen: they '
        "have no gradient and no moments. Trained weights are stored in float32 "
        "regardless of model.param_dtype, because 16 bits would lose small updates. "
        "None: train all weights",
    ] = None
    offload: Annotated[
        bool,
        "keep the optimizer's moments on the host, and fetch them slice by slice for "
        "the update",
    ] = False
    schedule: Annotated[
        Literal["cosine", "constant", "linear", "wsd"],
        'learning rate after the warmup: "cosine" and "linear" decay to '
        'final_fraction, "constant" does not decay, and "wsd" decays linearly in the '
        "last decay_fraction of the steps",
    ] = "cosine"
    warmup_fraction: Annotated[
        float,
        reals(0, 1),
        "warmup as a fraction of run.steps, if optimizer.warmup_steps is None",
    ] = 0.1
    decay_fraction: Annotated[
        float, reals(0, 1), 'for the schedule "wsd": decay as a fraction of run.steps'
    ] = 0.2
    name: Annotated[
        Literal["adamw", "muon", "adafactor", "lion", "sgd"],
        'optimizer. "muon" orthogonalises the updates of the blocks\' matrices and '
        'leaves the other weights to AdamW; "adafactor" keeps the mean squares of a '
        "matrix by row and by column",
    ] = "adamw"

    RULES = (
        *(
            unread(
                setting,
                "with optimizer.name={name!r}; leave it out",
                lambda config, setting=setting: setting not in _READ[config.name],
            )
            for setting in ("b1", "b2", "eps")
        ),
        needs(
            "offload",
            "an elementwise optimizer, but optimizer.name={name!r} reads whole "
            "matrices; set adamw, lion or sgd",
            lambda config: config.name not in ("muon", "adafactor"),
        ),
    )

    def __post_init__(self):
        check(self)


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """Warmup steps of a run of `steps` steps, which is longer."""
    if config.warmup_steps is None:
        return min(round(config.warmup_fraction * steps), steps - 1)
    if config.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} must be below "
            f"run.steps={steps}; or leave it out, so that optimizer.warmup_fraction "
            "applies"
        )
    return config.warmup_steps


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warmup to the peak, followed by `optimizer.schedule`; never 0 at first."""
    warmup, peak = warmup_steps(config, steps), config.learning_rate
    start, final = peak / (warmup + 1), peak * config.final_fraction
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(start, peak, warmup, steps, final)
    parts = [optax.linear_schedule(start, peak, warmup), optax.constant_schedule(peak)]
    if config.schedule == "constant":  # one program, however many steps
        return optax.join_schedules(parts, [warmup])
    stable = {
        "linear": warmup,
        "wsd": max(warmup, steps - round(config.decay_fraction * steps)),
    }[config.schedule]
    parts.append(optax.linear_schedule(peak, final, max(steps - stable, 1)))
    return optax.join_schedules(parts, [warmup, stable])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clipping by the global norm, if configured, followed by `update_rule`."""
    return optax.chain(_make_clipping(config), update_rule(config, schedule))


def _make_clipping(config: OptimizerConfig) -> optax.GradientTransformation:
    # The state has one structure in both cases, so a resumed run may change clip_norm.
    if config.clip_norm is None:
        return optax.identity()
    return optax.clip_by_global_norm(config.clip_norm)


def clip(config: OptimizerConfig, gradients: Any) -> tuple[Any, jax.Array]:
    """The clipped gradients, as in `make_optimizer`, and their norm before clipping."""
    clipped, _ = _make_clipping(config).update(gradients, optax.EmptyState())
    return clipped, optax.tree.norm(gradients)


def update_rule(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer `optimizer.name`, without weight decay of norms and biases."""
    return _RULES[config.name](config, schedule)


def _decay_mask(params: Any) -> Any:
    # Select by name: stacking over layers gives a norm's scale two axes.
    without = "scale", "bias", "correction", "layer_scale", "router_scale"
    without += "expert_scale", "delta_shift", "delta_log_speed"
    return jax.tree_util.tree_map_with_path(
        lambda path, w: w.ndim > 1 and path[-1].key not in without, params
    )


def _make_adamw(config: OptimizerConfig, schedule: optax.Schedule):
    return optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decay_mask,
    )


def _make_lion(config: OptimizerConfig, schedule: optax.Schedule):
    decay = config.weight_decay
    return optax.lion(
        schedule, config.b1, config.b2, weight_decay=decay, mask=_decay_mask
    )


def _make_sgd(config: OptimizerConfig, schedule: optax.Schedule):
    return optax.chain(
        optax.trace(config.b1),
        _add_decay(config),
        optax.scale_by_learning_rate(schedule),
    )


def _make_adafactor(config: OptimizerConfig, schedule: optax.Schedule):
    rule = optax.adafactor(None)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Moments take the type of the weights that it is given.
        wide = optax.tree.cast(params, jnp.float32)
        return rule.update(updates, state, wide)

    # optax's own weight decay would not follow the learning rate.
    return optax.chain(
        optax.GradientTransformation(rule.init, update), optax.scale(-1.0),
        _add_decay(config), optax.scale_by_learning_rate(schedule),
    )  # fmt: skip


def _add_decay(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.add_decayed_weights(config.weight_decay, _decay_mask)


def _make_muon(config: OptimizerConfig, schedule: optax.Schedule):
    muon = optax.contrib.muon(
        schedule,
        beta=config.b1,
        weight_decay=config.weight_decay,
        weight_decay_mask=_decay_mask,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(_last_axes, params),
        # One learning rate serves both: root mean squares are those of AdamW
        # (https://arxiv.org/abs/2502.16982).
        consistent_rms=0.2,
    )
    rules: dict[Any, Any] = {"muon": muon, "adamw": _make_adamw(config, schedule)}
    return optax.partition(rules, _rule_of_weights)


def _last_axes(weight: Any) -> optax.contrib.MuonDimensionNumbers:
    return optax.contrib.MuonDimensionNumbers(weight.ndim - 2, weight.ndim - 1)


def _rule_of_weights(params: Any) -> Any:
    """The name of each weight's rule: Muon for blocks' matrices, AdamW for the rest."""

    def rule(path: Any, _: Any) -> str:
        is_matrix = path[0].key == "blocks" and path[-1].key in _MATRICES
        return "muon" if is_matrix else "adamw"

    return jax.tree_util.tree_map_with_path(rule, params)


_MATRICES = ("kernel", "lora_a", "lora_b")
_RULES: dict[str, Callable] = {
    "adamw": _make_adamw,
    "muon": _make_muon,
    "adafactor": _make_adafactor,
    "lion": _make_lion,
    "sgd": _make_sgd,
}
_READ = {  # of b1, b2 and eps
    "adamw": ("b1", "b2", "eps"),
    "muon": ("b1", "b2", "eps"),
    "adafactor": (),
    "lion": ("b1", "b2"),
    "sgd": ("b1",),
}
