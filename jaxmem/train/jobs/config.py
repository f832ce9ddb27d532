"""The sections of the shipped jobs, and what fits no other section."""

import dataclasses
import math
import warnings
from typing import Any

from jaxmem.data.documents import DataConfig
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.positions import Branches
from jaxmem.models.sampling import SamplingConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.jobs.distill_objective import DistillConfig
from jaxmem.train.jobs.pair_objective import DpoConfig
from jaxmem.train.jobs.policy_losses import POLICY_LOSSES
from jaxmem.train.jobs.policy_objective import GrpoConfig
from jaxmem.train.jobs.rollout.rollouts_config import RolloutsConfig
from jaxmem.train.settings import JobConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftJobConfig(JobConfig):
    """The sections of a supervised run."""

    data: DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoJobConfig(JobConfig):
    """The sections of a run on pairs of answers."""

    data: DataConfig
    dpo: DpoConfig

    def __post_init__(self):
        if self.model.checkpoint is None:
            raise ValueError(
                "run.job='dpo' needs model.checkpoint, because only a model that "
                "answers already can learn preferences"
            )
        self.check_stays("data.streams", 1, "for run.job='dpo'")
        why = "for run.job='dpo', which keeps the reference of every pair in memory"
        self.check_stays("data.streaming", False, why)
        sample = self.head.sample
        if sample is not None and sample.forward != "exact":
            raise ValueError(
                f"head.gradient={self.head.gradient} must have an exact forward pass "
                "for run.job='dpo', because its reference and evaluations are exact"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillJobConfig(JobConfig):
    """The sections of a run of a student that learns from a teacher."""

    data: DataConfig
    distill: DistillConfig
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()

    def __post_init__(self):
        offline = self.distill.mode == "offline"
        if self.distill.teacher is None and not (offline and self.model.checkpoint):
            raise ValueError(
                f"distill.mode={self.distill.mode!r} needs distill.teacher, the "
                "directory of a checkpoint or of a finished run"
            )
        self._check_head()
        unread = {"data": DataConfig()}
        if not self.is_on_policy:
            unread = {"task": TaskConfig(), "sampling": SamplingConfig()}
        for section, default in unread.items():
            name = _first_differing(getattr(self, section), default)
            if name is not None:
                raise ValueError(
                    f"{section}.{name} has no effect with "
                    f"distill.mode={self.distill.mode!r}; leave it out"
                )
        if self.is_on_policy:
            self._check_rollouts()
        elif (weight := self.distill.reward_weight) is not None:
            raise ValueError(
                f"distill.reward_weight={weight} needs distill.mode='on_policy', "
                "because rewards are for completions that the student samples"
            )
        if offline:
            why = "for distill.mode='offline', where every process reads all rows"
            self.check_stays("data.streams", 1, why)

    def _check_head(self) -> None:
        head = self.head
        sampled = head.sample is not None and head.sample.forward == "exact"
        usable = HeadConfig(
            chunk=head.chunk,
            implementation=head.implementation,
            gradient=head.gradient if sampled else None,
        )
        for field in dataclasses.fields(head):
            self.check_stays(
                f"head.{field.name}",
                getattr(usable, field.name),
                "for run.job='distill': divergences are exact and never stored; "
                'gradients are exact or ("sample", k)',
            )

    def _check_rollouts(self) -> None:
        distill = self.distill
        for name in ("environment", "rollout", "recorded"):
            if value := getattr(self.task, name):
                raise ValueError(f"task.{name}={value!r} needs run.job='grpo'")
        mode = "for distill.mode='on_policy'"
        why = f"{mode}: the only labels of samples are the samples themselves"
        self.check_stays("distill.loss_weight", 0, why)
        self._check_rewards()
        why = f"{mode}: distill.max_tokens sets the size of a micro-batch"
        self.check_stays("run.accumulate", 1, why)
        widest = self.row_lengths[-1]
        _check_rows("distill.row_lengths", distill.row_lengths, widest, self.longest)
        _check_slots("distill.max_tokens", distill.max_tokens, self)
        _check_divides("distill.max_tokens", distill.max_tokens, self)

    def _check_rewards(self) -> None:
        distill, task, sampling = self.distill, self.task, self.sampling
        if distill.reward_weight is None:
            for name in (
                "reward", "reward_weights", "timeout", "reward_errors", "unrewarded"
            ):  # fmt: skip
                if getattr(task, name) != getattr(TaskConfig(), name):
                    raise ValueError(
                        f"task.{name} has no effect without distill.reward_weight; "
                        f"set distill.reward_weight, or leave task.{name} out"
                    )
            return
        _check_answers(task, sampling)
        if not distill.reward_weight:
            return
        setting = f"distill.reward_weight={distill.reward_weight}"
        if distill.completions < 2:
            raise ValueError(
                f"distill.completions={distill.completions} must be at least 2 for "
                f"{setting}: advantages compare the completions of a prompt"
            )
        if sampling.truncates:
            raise ValueError(
                f"{setting} needs sampling.top_k, top_p and min_p to be None: its "
                "policy gradient is for tokens drawn from the whole vocabulary; "
                "run.job='grpo' replays truncated draws"
            )

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


def _first_differing(section: Any, default: Any) -> str | None:
    """The first field of a section that differs from its default."""
    fields = (field.name for field in dataclasses.fields(section))
    return next((n for n in fields if getattr(section, n) != getattr(default, n)), None)


def _check_answers(task: TaskConfig, sampling: SamplingConfig) -> None:
    """Raise unless completions have room for answers that can be right."""
    slots, answer = sampling.max_new_tokens, task.answer_length
    if task.is_arithmetic and task.answer == "last_digit" and slots != 1:
        raise ValueError(
            f"sampling.max_new_tokens={slots} must be 1 for task.answer='last_digit', "
            "because nothing follows the digit"
        )
    if slots < answer:
        raise ValueError(
            f"sampling.max_new_tokens={slots} must be at least {answer}, the "
            f"longest answer of task.digits={task.digits}"
        )


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

    def __post_init__(self):
        if not self.task.is_arithmetic and self.model.checkpoint is None:
            raise ValueError(
                f"task.source={self.task.source!r} needs model.checkpoint, a directory "
                "with a tokenizer"
            )
        has_turns = self.task.is_dialogue or self.task.recorded
        if self.grpo.turn_rewards and not has_turns:
            raise ValueError(
                "grpo.turn_rewards=True needs a task.environment, a task.rollout or "
                "recorded rollouts, because only conversations have turns"
            )
        if self.task.recorded:
            reason = "for task.recorded=True"
            self.check_stays("sampling.slots", None, f"{reason}: nothing is sampled")
            why = "task.source already contains the rollouts"
            self.check_stays("run.save_rollouts", False, f"{reason}: {why}")
        if self.rollouts.engine is not None:
            self._check_engine()
        _check_answers(self.task, self.sampling)
        why = "in this job: grpo.max_tokens_train sets the size of a micro-batch"
        self.check_stays("run.accumulate", 1, why)
        for key in ("head.gradient", "head.vocab_groups"):
            if self.sampling.truncates:
                self.check_stays(
                    key,
                    None,
                    "if sampling.top_k, top_p or min_p truncates: sums and gradients "
                    "within the support are exact and need no groups",
                )
        widest = self.row_lengths[-1]
        _check_rows("grpo.row_lengths", self.grpo.row_lengths, widest, self.longest)
        self._check_branches()
        for name in ("max_tokens_train", "max_tokens_forward"):
            _check_slots(f"grpo.{name}", getattr(self.grpo, name), self)
        _check_divides("grpo.max_tokens_train", self.grpo.max_tokens_train, self)
        if self.grpo.loss in POLICY_LOSSES:
            self.check_forward_passes()

    def _check_engine(self) -> None:
        """Refuse settings that rollouts of an engine cannot have."""
        rollouts, named = self.rollouts, f"rollouts.engine={self.rollouts.engine!r}"
        if self.model.checkpoint is None:
            raise ValueError(
                f"{named} needs model.checkpoint, the model that the server serves"
            )
        why = f"for {named}, which samples the completions"
        self.check_stays("task.recorded", False, why)
        self.check_stays("sampling.slots", None, why)
        self.check_stays("sampling.decode_base", False, why)
        why = f"for {named}, which cannot load a model of one's own"
        self.check_stays("model.factory", None, why)
        if rollouts.max_staleness and self.grpo.correction is None:
            raise ValueError(
                f"rollouts.max_staleness={rollouts.max_staleness} needs "
                "grpo.correction, because completions are then of older weights than "
                'those that are updated: "ratio", "tis", "mis" and "icepop" weigh '
                "each token by its own ratio"
            )

    @property
    def samples_itself(self) -> bool:
        """True if the run's own program samples the completions to learn from."""
        return not self.task.recorded and self.rollouts.engine is None

    def check_forward_passes(self) -> None:
        """Refuse micro-batches that passes without a gradient cannot have.

        A user's loss is loaded for it.
        """
        if self.grpo.forward_passes or self.grpo.has_reference:
            slots = self.grpo.max_tokens_forward
            _check_divides("grpo.max_tokens_forward", slots, self)

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
