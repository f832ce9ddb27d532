"""The sections that every job has, and the settings that its checkpoints record."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxmem.base import user_code
from jaxmem.base.fields import check_field, check_numbers
from jaxmem.base.ranges import integers, reals
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.partitioning import MeshConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.evaluation import EvalConfig
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig

_RANGES = {
    **dict.fromkeys(("steps", "accumulate", "keep", "log_every"), integers(1)),
    **dict.fromkeys(("checkpoint_every", "wandb_samples"), integers(1)),
    "epochs": reals(above=0),
    "seed": integers(0, below=2**31),
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The job of a run, its length, and the files that it saves."""

    # kind of training: "sft" (supervised), "dpo" (pairs of answers), "grpo"
    # (reinforcement learning), "distill" (a student learns from a teacher), or your own
    # job, "file.py:Class" or "package.module:Class"
    job: str = user_code.field("sft")
    steps: int = 60  # number of optimizer steps; for the job "grpo", number of rollouts
    accumulate: int = 1  # micro-batches (of data.batch_size rows) per optimizer step
    seed: int = 0  # seed of initial weights and of sampled completions
    # directory of the run. If it contains a run, that run is resumed. Files that do not
    # belong to a run are never replaced
    out_dir: str = "runs/sft"
    # steps between checkpoints; the last step is always saved. None: no checkpoints
    checkpoint_every: int | None = 20
    keep: int = 2  # number of checkpoints to keep, the newest ones
    # steps between printed progress lines; a terminal shows a progress bar instead
    log_every: int = 10
    # at the end, compile fused and materialised head, and print the memory of both
    compare_heads: bool = True
    # passes over the data; they determine the number of steps. None: run.steps
    # determines it
    epochs: float | None = None
    # job "grpo": write all completions of each step to out_dir/rollouts, with tokens,
    # log-probabilities and rewards, also of groups that are not learned from
    save_rollouts: bool = False
    # project of Weights & Biases to which metrics are sent too. WANDB_MODE=offline
    # keeps them in out_dir/wandb, for `wandb sync`
    wandb: str | None = None
    # number of completions in a table of Weights & Biases, at each step that is a
    # multiple of run.log_every, for jobs that sample. None: no table
    wandb_samples: int | None = None
    # model of the Hub, OWNER/NAME, to which the result is uploaded at the end. None: no
    # upload
    push: str | None = None
    push_private: bool = False  # if run.push creates a model, make it private

    def __post_init__(self):
        check_numbers(self, _RANGES)
        local = "://" not in self.out_dir
        check_field(self, "out_dir", local, "a directory of a mounted file system")
        check_field(self, "wandb", self.wandb != "", "the name of a project, or None")
        if self.wandb_samples is not None and self.wandb is None:
            raise ValueError(
                f"run.wandb_samples={self.wandb_samples} needs run.wandb, the project "
                "that gets the table"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The sections of every job; a job's own class adds those that only it has."""

    model: ModelConfig
    head: HeadConfig
    optimizer: OptimizerConfig
    run: RunConfig
    mesh: MeshConfig = MeshConfig()
    remat: RematConfig = RematConfig()
    eval: EvalConfig = EvalConfig()

    @classmethod
    def sections(cls) -> dict[str, type]:
        """The dataclass of each section, the job's own ones first."""
        types = typing.get_type_hints(cls)
        return {name: types[name] for name in cls.__annotations__} | types

    def code(self) -> Iterator[tuple[str, str]]:
        """Yield (key, name) of the user's code that keys name, as in task.reward."""
        for section in self.sections():
            yield from user_code.names_in(section, getattr(self, section))

    def check_stays(self, key: str, expected: Any, why: str) -> None:
        """Raise a ValueError unless a setting has the value that others need."""
        section, _, field = key.partition(".")
        value = getattr(getattr(self, section), field)
        if value != expected:
            raise ValueError(f"{key}={value!r} must stay {expected!r} {why}")

    def replaced(self, values: Mapping[str, Any]) -> Any:
        """The config with other values, by key: {"run.steps": 10}."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, field = key.partition(".")
            sections.setdefault(section, {})[field] = value
        changed = {
            name: dataclasses.replace(getattr(self, name), **fields)
            for name, fields in sections.items()
        }
        return dataclasses.replace(self, **changed)


class Settings(NamedTuple):
    """The settings that checkpoints record, by section and field."""

    fixed: Mapping[str, Mapping]  # must not change when a run is resumed
    changeable: Mapping[str, Mapping]  # may change; changes are printed
    length_key: str = "run.steps"  # the key that decides the number of steps
