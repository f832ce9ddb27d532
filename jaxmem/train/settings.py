"""The sections that every job has, and the settings that its checkpoints record."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from jaxmem.base import fields, user_code
from jaxmem.base.fields import Must, check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import needs, unfit
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.partitioning import MeshConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.train.evaluation import EvalConfig
from jaxmem.train.memory import RematConfig
from jaxmem.train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The job of a run, its length, and the files that it saves."""

    job: Annotated[
        str,
        user_code.Named(),
        'kind of training: "sft" (supervised), "dpo" (pairs of answers), "grpo" '
        '(reinforcement learning), "distill" (a student learns from a teacher), or '
        'your own job, "file.py:Class" or "package.module:Class"',
    ] = "sft"
    steps: Annotated[
        int,
        integers(1),
        'number of optimizer steps; for the job "grpo", number of rollouts',
    ] = 60
    accumulate: Annotated[
        int, integers(1), "micro-batches (of data.batch_size rows) per optimizer step"
    ] = 1
    seed: Annotated[
        int,
        integers(0, below=2**31),
        "seed of initial weights and of sampled completions",
    ] = 0
    out_dir: Annotated[
        str,
        Must("a directory of a mounted file system", lambda path: "://" not in path),
        "directory of the run. If it contains a run, that run is resumed. Files that "
        "do not belong to a run are never replaced",
    ] = "runs/sft"
    checkpoint_every: Annotated[
        int | None,
        integers(1),
        "steps between checkpoints; the last step is always saved. None: no "
        "checkpoints",
    ] = 20
    keep: Annotated[
        int, integers(1), "number of checkpoints to keep, the newest ones"
    ] = 2
    log_every: Annotated[
        int,
        integers(1),
        "steps between printed progress lines; a terminal shows a progress bar instead",
    ] = 10
    compare_heads: Annotated[
        bool,
        "at the end, compile fused and materialised head, and print the memory of both",
    ] = True
    epochs: Annotated[
        float | None,
        reals(above=0),
        "passes over the data; they determine the number of steps. None: run.steps "
        "determines it",
    ] = None
    save_rollouts: Annotated[
        bool,
        'job "grpo": write all completions of each step to out_dir/rollouts, with '
        "tokens, log-probabilities and rewards, also of groups that are not learned "
        "from",
    ] = False
    wandb: Annotated[
        str | None,
        Must("the name of a project, or None", lambda name: name != ""),
        "project of Weights & Biases to which metrics are sent too. "
        "WANDB_MODE=offline keeps them in out_dir/wandb, for `wandb sync`",
    ] = None
    wandb_samples: Annotated[
        int | None,
        integers(1),
        "number of completions in a table of Weights & Biases, at each step that is a "
        "multiple of run.log_every, for jobs that sample. None: no table",
    ] = None
    push: Annotated[
        str | None,
        "model of the Hub, OWNER/NAME, to which the result is uploaded at the end. "
        "None: no upload",
    ] = None
    push_private: Annotated[bool, "if run.push creates a model, make it private"] = (
        False
    )

    RULES = (
        needs(
            "wandb_samples",
            "run.wandb, the project that gets the table",
            lambda config: config.wandb is not None,
        ),
    )

    def __post_init__(self):
        check(self)


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

    reads_entries = False  # True: the loss takes head.gradient=("recorded", k)

    RULES = (
        unfit(
            "head.gradient",
            "needs run.job='grpo', where the entries of each token are recorded; use "
            '("sample", k) here',
            lambda config: (
                config.head.recorded is not None and not config.reads_entries
            ),
        ),
    )

    def __post_init__(self):
        """Refuse what a section cannot have, and what breaks one of `RULES`."""
        check(self, name="")

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
        value = fields.value_of(self, key)
        if value != expected:
            raise ValueError(f"{key}={value!r} must stay {expected!r} {why}")

    def replaced(self, values: Mapping[str, Any]) -> Any:
        """The config with other values, by key: {"run.steps": 10}."""
        return fields.build(type(self), values, self, name="")


class Settings(NamedTuple):
    """The settings that checkpoints record, by section and field."""

    fixed: Mapping[str, Mapping]  # must not change when a run is resumed
    changeable: Mapping[str, Mapping]  # may change; changes are printed
    length_key: str = "run.steps"  # the key that decides the number of steps
