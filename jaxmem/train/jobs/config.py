"""What each job is configured by: one field for each section of a gin file."""

import dataclasses

from jaxmem.data.documents import DataConfig
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.decoder import HeadConfig, ModelConfig
from jaxmem.models.partitioning import MeshConfig
from jaxmem.models.sampling import SamplingConfig
from jaxmem.train.evaluation import EvalConfig
from jaxmem.train.jobs.policy import GrpoConfig
from jaxmem.train.jobs.preferences import DpoConfig
from jaxmem.train.loop import RunConfig
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """A supervised run; each field is one section of a gin file."""

    data: DataConfig
    model: ModelConfig
    head: HeadConfig
    optimizer: OptimizerConfig
    run: RunConfig
    mesh: MeshConfig = MeshConfig()
    remat: RematConfig = RematConfig()
    eval: EvalConfig = EvalConfig()


@dataclasses.dataclass(frozen=True)
class DpoJobConfig:
    """A run on pairs of answers; likewise."""

    data: DataConfig
    dpo: DpoConfig
    model: ModelConfig
    head: HeadConfig
    optimizer: OptimizerConfig
    run: RunConfig
    mesh: MeshConfig = MeshConfig()
    remat: RematConfig = RematConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self):
        """Refuse what the job cannot do."""
        if self.model.checkpoint is None:
            raise ValueError(
                "run.job='dpo' needs model.checkpoint: what is preferred is learned by "
                "a model that answers already"
            )
        if self.data.streams != 1:
            raise ValueError(
                f"data.streams={self.data.streams} must stay 1 for run.job='dpo'"
            )
        if self.data.streaming:
            raise ValueError(
                "data.streaming=True must stay False for run.job='dpo', which keeps "
                "every pair's reference in memory"
            )
        if self.head.gradient_samples is not None:
            raise ValueError(
                f"head.gradient_samples={self.head.gradient_samples} must stay None "
                "for run.job='dpo', which takes exact gradients"
            )


@dataclasses.dataclass(frozen=True)
class GrpoJobConfig:
    """A run of reinforcement learning; likewise."""

    task: TaskConfig
    sampling: SamplingConfig
    grpo: GrpoConfig
    model: ModelConfig
    head: HeadConfig
    optimizer: OptimizerConfig
    run: RunConfig
    mesh: MeshConfig = MeshConfig()
    remat: RematConfig = RematConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self):
        """Refuse what fits no other section, by the names of both."""
        slots, answer = self.sampling.max_new_tokens, self.task.answer_length
        if not self.task.is_arithmetic and self.model.checkpoint is None:
            raise ValueError(
                f"task.source={self.task.source!r} needs model.checkpoint, a directory "
                "with a tokenizer"
            )
        ends_at_once = self.task.is_arithmetic and self.task.answer == "last_digit"
        if ends_at_once and slots != 1:
            raise ValueError(
                f"sampling.max_new_tokens={slots} must be 1 for task.answer="
                "'last_digit': nothing follows it"
            )
        if slots < answer:
            raise ValueError(
                f"sampling.max_new_tokens={slots} must be at least {answer}, the "
                f"longest answer of task.digits={self.task.digits}"
            )
        if self.run.accumulate != 1:
            raise ValueError(
                f"run.accumulate={self.run.accumulate} must stay 1 in this job: "
                "grpo.max_tokens_train says how much a micro-batch holds"
            )
        if self.sampling.truncates and self.head.gradient_samples is not None:
            raise ValueError(
                f"head.gradient_samples={self.head.gradient_samples} must stay None "
                "where sampling.top_k, top_p or min_p truncates: the gradient within "
                "the support is exact"
            )
        widest = self.row_lengths[-1]
        if widest < self.longest:
            raise ValueError(
                f"grpo.row_lengths={self.grpo.row_lengths} must reach {self.longest}, "
                "the longest sequence: prompt and sampling.max_new_tokens, less one"
            )
        for name in ("max_tokens_train", "max_tokens_forward"):
            if getattr(self.grpo, name) < widest:
                raise ValueError(
                    f"grpo.{name}={getattr(self.grpo, name)} must hold a row of "
                    f"{widest} tokens"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        return self.task.prompt_length + self.sampling.max_new_tokens - 1

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Widths of packed rows."""
        return self.grpo.row_lengths or (-(-self.longest // 16) * 16,)
