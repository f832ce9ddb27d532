"""The loss of a student's tokens: divergence from its teacher, and other terms.

    loss = Σ_t (D(student_t, teacher_t) + loss_weight · CE_t + reward_weight · P_t)
           / tokens

D is a divergence of the two softmaxes over the whole vocabulary, from the hidden states
of both models and without either's logits. P is the policy gradient of completions that
the student has sampled.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxmem.base.fields import Must, check
from jaxmem.base.ranges import integers, reals
from jaxmem.head.verbs.column_targets import Columns, Drawn
from jaxmem.head.verbs.kinds import JSD, ForwardKL, ReverseKL
from jaxmem.head.verbs.teacher import Teacher
from jaxmem.heads.nnx import LMHead
from jaxmem.train.jobs.policy_objective import ROW_LENGTHS, PolicyHeadOptions

MODES = ("text", "on_policy", "offline")


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """The data of a student, its teacher, and the terms of its loss."""

    mode: Annotated[
        Literal["text", "on_policy", "offline"],
        'tokens that the student learns from. "text": the data\'s tokens. '
        '"on_policy": completions that the student samples. "offline": data.source is '
        "a .parquet file that `jaxmem score` wrote for a teacher",
    ] = "text"
    teacher: Annotated[
        str | None,
        Must("a directory, or None", lambda name: name != ""),
        "directory of the teacher's checkpoint, which has the student's vocabulary, "
        "or a model of the Hub, or the directory of a run that saved model/. In mode "
        '"offline", only its tokenizer is read, and None is possible if the student '
        "has model.checkpoint",
    ] = None
    teacher_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        "dtype of the teacher's weights and activations. None: as they are stored",
    ] = None
    teacher_base: Annotated[
        Literal["nf4", "int8"] | None,
        "codes of the teacher's matrices, as in model.base. None: as its checkpoint "
        "stores them",
    ] = None
    divergence: Annotated[
        Literal["forward_kl", "reverse_kl", "jsd"],
        '"forward_kl": KL(teacher ‖ student). "reverse_kl": KL(student ‖ teacher). '
        '"jsd": both models\' divergences from their mixture',
    ] = "forward_kl"
    beta: Annotated[
        float,
        reals(above=0, below=1),
        'weight of the teacher in the mixture of "jsd", in (0, 1)',
    ] = 0.5
    temperature: Annotated[
        float, reals(above=0), "divisor of both models' logits in the divergence"
    ] = 1.0
    loss_weight: Annotated[
        float, reals(0), "weight of the cross-entropy of the data's tokens"
    ] = 0.0
    reward_weight: Annotated[
        float | None,
        reals(0),
        'mode "on_policy": weight of the policy gradient of task.reward. 0: rewards '
        "are recorded but not learned from. None: there are no rewards",
    ] = None
    tail: Annotated[
        bool,
        'mode "offline": the probability outside the file\'s columns counts as one '
        "more outcome",
    ] = True
    prompts: Annotated[
        int, integers(1), 'mode "on_policy": number of prompts per step'
    ] = 32
    completions: Annotated[
        int, integers(1), 'mode "on_policy": number of completions per prompt'
    ] = 1
    max_tokens: Annotated[
        int,
        integers(1),
        'mode "on_policy": maximum token positions, padding included, of a micro-batch',
    ] = 2048
    row_lengths: Annotated[
        tuple[int, ...] | None,
        ROW_LENGTHS,
        'mode "on_policy": lengths of packed rows, increasing; jax compiles a program '
        "for each. None: the longest possible sequence, rounded up to 16",
    ] = None

    def __post_init__(self):
        """Refuse impossible values, by name."""
        check(self)

    @property
    def samples(self) -> int:
        """Completions of a step."""
        return self.prompts * self.completions


class Targets(NamedTuple):
    """Labels of the tokens of a micro-batch, and advantages where there are rewards."""

    labels: ArrayLike  # [B, T] the next tokens; negative where none is learned
    advantages: Any = None  # [B, T] of each token's completion; None without rewards


def of_file(config: DistillConfig, ids: Any, logprobs: Any) -> Columns | Drawn:
    """A file's columns of a teacher: ids [B, T, K], drawn ones without logprobs."""
    return Drawn(ids) if logprobs is None else Columns(ids, logprobs, config.tail)


def distill_loss(
    config: DistillConfig,
    head: LMHead,
    hidden: jax.Array,
    targets: Targets,
    teacher: Teacher | Columns | Drawn,
    normalizer: jax.Array,
    call: PolicyHeadOptions,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of one micro-batch of hidden states [B, T, D], and metrics of its tokens.

    The normalizer counts the tokens of the whole step; 0 counts as 1. The temperature
    of `call` is the sampler's; a second pass draws by another key. With the float32
    scalar come `divergence`, `ce` and `entropy` [B, T], the last two at temperature 1.
    """
    labels, advantages = targets
    reward_weight = config.reward_weight or 0.0
    learned = () if advantages is None or not reward_weight else (advantages,)
    # The statistics of the same logits serve the other terms at temperature 1.
    joint = learned if call.temperature == 1 else ()

    def loss_fn(stats, divergence, *advantages):
        loss = divergence - config.loss_weight * stats.logprob
        if advantages:
            loss += reward_weight * _policy_gradient(stats, *advantages)[0]
        return loss, {"divergence": divergence} | _metrics_of(stats)

    kinds = {"forward_kl": ForwardKL(teacher), "reverse_kl": ReverseKL(teacher)}
    kinds["jsd"] = JSD(teacher, config.beta)
    loss, observed = head.divergence_loss(
        loss_fn, hidden, labels, kinds[config.divergence],
        *joint, temperature=config.temperature,
        statistics_temperature=None if config.temperature == 1 else 1.0,
        normalizer=normalizer, gradient=call.sample, key=call.key,
    )  # fmt: skip
    if learned and not joint:
        key = None if call.key is None else jax.random.fold_in(call.key, 1)
        policy, _ = head.token_loss(
            _policy_gradient, hidden, labels, *learned, temperature=call.temperature,
            normalizer=normalizer, gradient=call.sample, key=key,
        )  # fmt: skip
        loss += reward_weight * policy
    return loss, observed


def _metrics_of(stats):
    return {"ce": -stats.logprob, "entropy": stats.entropy}


def _policy_gradient(stats, advantages):
    """-A p / p_old, where p_old is p: an update follows its samples at once."""
    ratio = jnp.exp(stats.logprob - jax.lax.stop_gradient(stats.logprob))
    return -advantages * ratio, _metrics_of(stats)
