"""The sections of the shipped jobs, and what fits no other section."""

import dataclasses
import math
import warnings
from typing import Any

from jaxmem.base import fields
from jaxmem.base.rules import (
    Condition,
    SettingsRule,
    needs,
    refused,
    stays,
    unfit,
    unread,
    wrong,
)
from jaxmem.data.documents import DataConfig
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.positions import Branches
from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.jobs.distill_objective import DistillConfig
from jaxmem.train.jobs.forward_passes import ForwardPasses
from jaxmem.train.jobs.pair_objective import DpoConfig
from jaxmem.train.jobs.policy_losses import POLICY_LOSSES
from jaxmem.train.jobs.policy_objective import GrpoConfig
from jaxmem.train.jobs.rollout.rollouts_config import RolloutsConfig
from jaxmem.train.settings import JobConfig

_EXACT = (
    "for run.job='distill': divergences are exact and never stored; gradients are "
    'exact or ("sample", k)'
)


def _unread(section: str, kind: type, where: Condition) -> SettingsRule:
    """The rule that no key of a section has an effect where a condition is true."""
    keys = " ".join(f"{section}.{path}" for path in fields.settings(kind))
    text = "has no effect with distill.mode={distill.mode!r}; leave it out"
    return wrong(keys, text, where, if_set=True)


def _room_for_answers(where: Condition) -> tuple[SettingsRule, ...]:
    """The rules that completions have room for answers that can be right."""
    return (
        refused(
            "sampling.max_new_tokens",
            "must be 1 for task.answer='last_digit', because nothing follows the digit",
            lambda config: (
                where(config)
                and config.task.is_arithmetic
                and config.task.answer == "last_digit"
                and config.sampling.max_new_tokens != 1
            ),
        ),
        refused(
            "sampling.max_new_tokens",
            "must be at least {task.answer_length}, the longest answer of "
            "task.digits={task.digits}",
            lambda config: (
                where(config)
                and config.sampling.max_new_tokens < config.task.answer_length
            ),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftJobConfig(JobConfig):
    """The sections of a supervised run."""

    data: DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoJobConfig(JobConfig):
    """The sections of a run on pairs of answers."""

    data: DataConfig
    dpo: DpoConfig

    RULES = (
        refused(
            "run.job",
            "needs model.checkpoint, because only a model that answers already can "
            "learn preferences",
            lambda config: config.model.checkpoint is None,
        ),
        stays("data.streams", 1, "for run.job='dpo'"),
        stays(
            "data.streaming",
            False,
            "for run.job='dpo', which keeps the reference of every pair in memory",
        ),
        refused(
            "head.gradient",
            "must have an exact forward pass for run.job='dpo', because its reference "
            "and evaluations are exact",
            lambda config: (
                config.head.sample is not None and config.head.sample.forward != "exact"
            ),
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillJobConfig(JobConfig):
    """The sections of a run of a student that learns from a teacher."""

    data: DataConfig
    distill: DistillConfig
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()

    RULES = (
        refused(
            "distill.mode",
            "needs distill.teacher, the directory of a checkpoint or of a finished run",
            lambda config: (
                config.distill.teacher is None
                and not (config.is_offline and config.model.checkpoint)
            ),
        ),
        stays("head.logits", "fused", _EXACT),
        stays(
            "head.gradient",
            None,
            _EXACT,
            lambda config: (
                config.head.sample is None or config.head.sample.forward != "exact"
            ),
        ),
        stays("head.vocab_groups", None, _EXACT),
        _unread("data", DataConfig, lambda config: config.is_on_policy),
        _unread("task", TaskConfig, lambda config: not config.is_on_policy),
        _unread("sampling", SamplingConfig, lambda config: not config.is_on_policy),
        needs("task.environment task.rollout task.recorded", "run.job='grpo'"),
        stays(
            "distill.loss_weight",
            0,
            "for distill.mode='on_policy': the only labels of samples are the samples "
            "themselves",
            lambda config: config.is_on_policy,
        ),
        wrong(
            "task.reward task.reward_weights task.timeout task.reward_errors "
            "task.unrewarded",
            "has no effect without distill.reward_weight; set distill.reward_weight, "
            "or leave {path} out",
            lambda config: config.distill.reward_weight is None,
            if_set=True,
        ),
        *_room_for_answers(
            lambda config: (
                config.is_on_policy and config.distill.reward_weight is not None
            )
        ),
        refused(
            "distill.completions",
            "must be at least 2 for distill.reward_weight={distill.reward_weight}: "
            "advantages compare the completions of a prompt",
            lambda config: (
                config.is_on_policy
                and config.distill.reward_weight
                and config.distill.completions < 2
            ),
        ),
        needs(
            "distill.reward_weight",
            "sampling.top_k, top_p and min_p to be None: its policy gradient is for "
            "tokens drawn from the whole vocabulary; run.job='grpo' replays truncated "
            "draws",
            lambda config: (
                not config.is_on_policy
                or not config.distill.reward_weight
                or not config.sampling.truncates
            ),
        ),
        needs(
            "distill.reward_weight",
            "distill.mode='on_policy', because rewards are for completions that the "
            "student samples",
            lambda config: config.is_on_policy,
        ),
        stays(
            "run.accumulate",
            1,
            "for distill.mode='on_policy': distill.max_tokens sets the size of a "
            "micro-batch",
            lambda config: config.is_on_policy,
        ),
        stays(
            "data.streams",
            1,
            "for distill.mode='offline', where every process reads all rows",
            lambda config: config.is_offline,
        ),
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.is_on_policy:
            return
        distill, widest = self.distill, self.row_lengths[-1]
        _check_rows("distill.row_lengths", distill.row_lengths, widest, self.longest)
        _check_slots("distill.max_tokens", distill.max_tokens, self)
        _check_divides("distill.max_tokens", distill.max_tokens, self)

    @property
    def is_offline(self) -> bool:
        """True if the student learns from a file of a teacher's columns."""
        return self.distill.mode == "offline"

    @property
    def is_on_policy(self) -> bool:
        """True if the student learns from its own samples."""
        return self.distill.mode == "on_policy"

    @property
    def samples_itself(self) -> bool:
        """True if the run's own program samples what it learns from."""
        return self.is_on_policy

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is sampled and trained on."""
        return self.task.prompt_length + self.sampling.max_new_tokens - 1

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Widths of packed rows of completions."""
        return self.distill.row_lengths or (_round_up(self.longest),)


def _check_rows(name: str, widths: Any, widest: int, longest: int) -> None:
    if widest < longest:
        raise ValueError(
            f"{name}={widths} must reach {longest}, the longest sequence (prompt and "
            "sampling.max_new_tokens, minus one)"
        )


def _check_slots(
    name: str, slots: int, config: "DistillJobConfig | GrpoJobConfig"
) -> None:
    widest = config.row_lengths[-1]
    if slots < widest:
        prompt, rest = config.task.prompt_length, config.sampling.max_new_tokens
        raise ValueError(
            f"{name}={slots} must hold a row of {widest} tokens, for prompts of at "
            f"most {prompt} and sampling.max_new_tokens={rest}"
        )


def _check_divides(
    name: str, slots: int, config: "DistillJobConfig | GrpoJobConfig"
) -> None:
    """Raise unless the mesh divides the rows of a micro-batch of so many slots."""
    widths, parts = config.row_lengths, config.mesh.data * config.mesh.fsdp

    def fits(number: int) -> bool:
        return all(number // width % parts == 0 for width in widths)

    if fits(slots):
        return
    rows = range(1, 8 * parts + 1)  # beyond those of a micro-batch
    larger = sorted({(slots // width + n) * width for width in widths for n in rows})
    value = next(filter(fits, larger), parts * math.lcm(*widths))
    width = next(width for width in widths if slots // width % parts)
    raise ValueError(
        f"{name}={slots} holds {slots // width} rows of {width} tokens, which "
        f"mesh.data={config.mesh.data} x mesh.fsdp={config.mesh.fsdp} must divide; "
        f"{name}={value} works"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoJobConfig(JobConfig):
    """The sections of a run of reinforcement learning."""

    task: TaskConfig
    sampling: SamplingConfig
    grpo: GrpoConfig
    rollouts: RolloutsConfig = RolloutsConfig()

    reads_entries = True

    RULES = (
        needs(
            "task.source",
            "model.checkpoint, a directory with a tokenizer",
            lambda config: config.model.checkpoint is not None,
        ),
        needs(
            "grpo.turn_rewards",
            "a task.environment, a task.rollout or recorded rollouts, because only "
            "conversations have turns",
            lambda config: config.task.has_turns,
        ),
        stays(
            "sampling.slots",
            None,
            "for task.recorded=True: nothing is sampled",
            lambda config: config.task.recorded,
        ),
        stays(
            "run.save_rollouts",
            False,
            "for task.recorded=True: task.source already contains the rollouts",
            lambda config: config.task.recorded,
        ),
        unfit(
            "rollouts.engine",
            "needs model.checkpoint, the model that the server serves",
            lambda config: config.model.checkpoint is None,
        ),
        *(
            stays(
                key,
                expected,
                "for rollouts.engine={rollouts.engine!r}, which samples the "
                "completions",
                lambda config: config.rollouts.engine is not None,
            )
            for key, expected in (
                ("task.recorded", False),
                ("sampling.slots", None),
                ("sampling.decode_base", False),
            )
        ),
        stays(
            "model.factory",
            None,
            "for rollouts.engine={rollouts.engine!r}, which cannot load a model of "
            "one's own",
            lambda config: config.rollouts.engine is not None,
        ),
        needs(
            "rollouts.max_staleness",
            "grpo.correction, because completions are then of older weights than those "
            'that are updated: "ratio", "tis", "mis" and "icepop" weigh each token by '
            "its own ratio",
            lambda config: config.grpo.correction is not None,
        ),
        unread(
            "grpo.max_head_error",
            'without head.gradient=("recorded", k), whose error it bounds',
            lambda config: config.head.recorded is None,
        ),
        *_room_for_answers(lambda config: True),
        stays(
            "run.accumulate",
            1,
            "in this job: grpo.max_tokens_train sets the size of a micro-batch",
        ),
        *(
            stays(
                key,
                None,
                "if sampling.top_k, top_p or min_p truncates: sums and gradients "
                "within the support are exact and need no groups",
                lambda config: config.sampling.truncates,
            )
            for key in ("head.gradient", "head.vocab_groups")
        ),
    )

    def __post_init__(self):
        super().__post_init__()
        widest = self.row_lengths[-1]
        _check_rows("grpo.row_lengths", self.grpo.row_lengths, widest, self.longest)
        self._check_branches()
        for name in ("max_tokens_train", "max_tokens_forward"):
            _check_slots(f"grpo.{name}", getattr(self.grpo, name), self)
        _check_divides("grpo.max_tokens_train", self.grpo.max_tokens_train, self)
        if self.grpo.loss in POLICY_LOSSES:
            self.check_forward_passes()

    @property
    def samples_itself(self) -> bool:
        """True if the run's own program samples the completions to learn from."""
        return not self.task.recorded and self.rollouts.engine is None

    def check_forward_passes(self) -> None:
        """Refuse micro-batches that passes without a gradient cannot have.

        A user's loss is loaded for it.
        """
        if self.passes.count or self.grpo.has_reference:
            slots = self.grpo.max_tokens_forward
            _check_divides("grpo.max_tokens_forward", slots, self)

    @property
    def passes(self) -> ForwardPasses:
        """The forward passes over a rollout.

        Its sampler records entries unless a rollout function makes transcripts of the
        samples, or a correction compares the trainer with the sampler.
        """
        if self.head.recorded is None:
            return ForwardPasses(self.grpo)
        by_sampler = (
            self.samples_itself
            and self.task.rollout is None
            and self.grpo.correction in (None, "ratio")
        )
        return ForwardPasses(self.grpo, "sampler" if by_sampler else "old pass")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        return self.task.prompt_length + self.completion_length - 1

    @property
    def completion_length(self) -> int:
        """Most tokens after a prompt."""
        return self.task.conversation_length(self.sampling.max_new_tokens)

    @property
    def branches(self) -> Branches | None:
        """Layout of rows whose blocks share a prompt; None where none is shared."""
        if not self.grpo.share_prompts:
            return None
        return Branches(
            _round_up(self.task.prompt_length - 1), _round_up(self.completion_length)
        )

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Widths of packed rows."""
        grpo, layout = self.grpo, self.branches
        if grpo.row_lengths:
            return grpo.row_lengths
        if layout is None:
            return (_round_up(self.longest),)
        room = min(grpo.max_tokens_train, grpo.max_tokens_forward) - layout.prompt
        most = max(min(grpo.group_size, room // layout.width), 1)
        sizes = sorted({max(most // 4, 1), most})
        return tuple(layout.prompt + size * layout.width for size in sizes)

    def slots_read(self, parts: int = 1) -> int:
        """Slots of all sequences of a rollout that is read in so many parts, at most.

        Shared prompts are read in each row of their group; cut sequences count at their
        mean.
        """
        layout, grpo = self.branches, self.grpo
        if layout is None:
            share = 1.0 if grpo.prefix_cut is None else (1 + grpo.prefix_cut) / 2
            cut = int((1 - share) * self.completion_length)
            return grpo.samples * (self.longest - cut)
        blocks = (self.row_lengths[-1] - layout.prompt) // layout.width
        together = -(-grpo.group_size // parts)  # completions of a prompt in a part
        rows = min(parts * -(-together // blocks), grpo.group_size)
        return grpo.prompts * rows * layout.prompt + grpo.samples * layout.width

    def _check_branches(self) -> None:
        if (layout := self.branches) is None:
            return
        if not layout.prompt:
            raise ValueError(
                "grpo.share_prompts=True needs prompts of more than one token"
            )
        prompt, width = layout
        if any((T - prompt) % width for T in self.row_lengths):
            raise ValueError(
                f"grpo.row_lengths={self.grpo.row_lengths} must be {prompt} and a "
                f"multiple of {width} each, with grpo.share_prompts: slots of a prompt "
                "and of blocks of completions"
            )


def _round_up(tokens: int) -> int:
    """The next multiple of 16."""
    return -(-tokens // 16) * 16


def __getattr__(name: str) -> Any:
    """The class of a deprecated name."""
    if name != "Config":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.Config is deprecated and will be removed in the next version: "
        "import jaxmem.train.SftJobConfig",
        DeprecationWarning,
        stacklevel=2,
    )
    return SftJobConfig
