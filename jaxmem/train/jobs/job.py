"""The interface of a job: all that a run, a plan and a preview need to know of one."""

import abc
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import tokenizers
from rich.console import Console

from jaxmem import checkpoints
from jaxmem.base import messages, user_code
from jaxmem.base.fields import values_of
from jaxmem.base.user_code import Hooked, UserCodeError
from jaxmem.checkpoints.start_adapter import with_start
from jaxmem.data import vocabulary
from jaxmem.models import lora
from jaxmem.models.config import BASE_FIELDS
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.partitioning import MeshConfig
from jaxmem.remat import fitting
from jaxmem.train import metrics, model_factory, model_names, precision, starts
from jaxmem.train.evaluation import Evaluated
from jaxmem.train.jobs.reading import Documents, Reading, TokenRecord
from jaxmem.train.output.progress import ProgressReport
from jaxmem.train.phases import Phase, Programs, of_program
from jaxmem.train.program import DecoderProgram, fixed_weights
from jaxmem.train.settings import JobConfig, Settings
from jaxmem.train.state import resuming
from jaxmem.train.state.checkpoint import Checkpoints

JOBS: dict[str, type["Job"]] = {}  # registered jobs by name


class Job(Hooked):
    """One kind of training, and one run of it.

    A subclass is one file: run.job="my_job.py:Mine" runs its `class Mine(Job)`. With
    `class Mine(Job, name="mine")`, run.job="mine" runs it once it has been imported.
    `run.train` calls, in this order, `build`, `open`, `begin`, `compile`, then `step`
    and `evaluate` as often as there are steps, and `finish`; `close` is called last,
    also after an error. `jaxmem plan` calls `plan` and `jaxmem data` `records`.

    Attributes:
        name: the job's name in settings; by default the name of the class.
        Config: the job's sections, a `JobConfig` whose fields are dataclasses.
        Metrics: the numbers of a step, a NamedTuple like `metrics.AnyMetrics`.
        changeable: sections that may differ when a run is resumed.
        packed: True if a row may hold several documents.
        has_rollouts: True if the job heeds `run.save_rollouts` and `eval.samples`.
        chart: the field of `Metrics` that report.png shows, and its label.
        config: configuration of the run, with the sizes of its checkpoint.
        program: functions and shapes; set by `build`.
        batches: source of the data; set by `open`.
    """

    page = "docs/own_job.md"
    name: ClassVar[str]
    Config: ClassVar[type[JobConfig]]
    Metrics: ClassVar[type] = metrics.StepMetrics
    changeable: Sequence[str] = ("optimizer",)
    packed: bool = True
    has_rollouts: bool = False
    chart: ClassVar[tuple[str, str]] = ("loss", "loss (nats per token)")
    config: Any
    program: Any
    batches: Any

    def __init_subclass__(cls, name: str | None = None, **options: Any):
        """Register a job with a name; defining its class again replaces it.

        Raises:
            ValueError: another class has the name.
        """
        super().__init_subclass__(**options)
        cls.name = name or cls.__qualname__
        if name is None:
            return
        if JOBS.get(name, cls).__qualname__ != cls.__qualname__:
            raise ValueError(f"run.job={name!r} is already {JOBS[name].__qualname__}")
        JOBS[name] = cls

    def __init__(self, config: JobConfig):
        self.config = config
        self._end = float("-inf")  # time at which the last step ended
        model = self.sizes()
        changes: dict[str, Any] = {"model": model}
        if not self.has_rollouts:
            why = f"for run.job={config.run.job!r}; only run.job='grpo' has rollouts"
            config.check_stays("run.save_rollouts", False, why)
            config.check_stays("eval.samples", None, why)
        if model.base is not None and not model.lora_rank:
            raise ValueError(
                f"model.base={model.base!r} codes matrices, which no update can "
                "change: add adapters to train (model.lora_rank above 0), or leave "
                "model.base out"
            )
        if model.lora_rank and config.optimizer.trainable is None:
            changes["optimizer"] = dataclasses.replace(
                config.optimizer, trainable=lora.trainable(model.lora_saved)
            )
        self.config = dataclasses.replace(config, **changes)

    @property
    def mesh(self) -> MeshConfig:
        """The device mesh."""
        return self.config.mesh

    def sizes(self) -> ModelConfig:
        """The model, with its checkpoint's sizes, and the adapter that it starts from.

        Raises:
            ValueError: the checkpoint cannot be read, or a size differs, or a model of
                model.factory cannot have a setting.
        """
        if self.config.model.factory is not None:
            model_factory.check(self.config)
            return model_factory.with_text(self.config.model)
        copy = starts.kept(self.config.run)
        return checkpoints.with_checkpoint(with_start(self.config.model, copy))

    def model_fields(self) -> dict[str, Any]:
        """The model's settings, as older runs have them if newer ones are not set."""
        model = self.config.model
        fields = values_of(model) | {"lora_rank": model.lora_rank or 0}
        if model.adapter is None:
            del fields["adapter"]
        return fields

    def fixed(self) -> dict[str, Any]:
        """Settings, by section, that a resumed run must share with the saved one."""
        config = self.config
        model = self.model_fields()
        del model["pad_row"]  # the checkpoint's; older runs have none and go on
        if config.model.base is None:  # as in older runs, which lack these keys
            model = {k: v for k, v in model.items() if k not in BASE_FIELDS}
        fixed = self.reads.fixed() | {"model": model}
        fixed |= fixed_weights(config.optimizer, config.run.seed)
        return fixed | {"run": {"job": self.name, "seed": config.run.seed}}

    def settings(self) -> Settings:
        """The settings that checkpoints record, and resumption compares."""
        fixed, config = self.fixed(), self.config
        changeable = {
            name: values_of(getattr(config, name)) for name in self.changeable
        }
        changeable["run"] = {
            name: getattr(config.run, name) for name in ("steps", "accumulate", "seed")
        }
        changeable["head"] = {"gradient": config.head.gradient}  # others round alike
        changeable = {
            name: {k: v for k, v in fields.items() if k not in fixed.get(name, {})}
            for name, fields in changeable.items()
        }
        code = {name: user_code.digest(name, key) for key, name in config.code()}
        fixed, changeable = map(model_names.recorded_settings, (fixed, changeable))
        return Settings(fixed, changeable | {resuming.CODE: code})

    def reading(self) -> Reading:
        """The data of the job; nothing is opened yet."""
        return Documents(self.config.data, self.config.model)

    @functools.cached_property
    def reads(self) -> Any:
        """The `Reading` of this run, made once."""
        reading = self.reading()
        starts.check_template(self.config, reading.chat_template)
        return reading

    def records(self, count: int) -> Iterator[TokenRecord | str]:
        """The first records, and lines about all of them, for `jaxmem data`."""
        yield from self.reads.records(count)
        if (seen := self.reads.seen(self.config.run)) is not None:
            yield seen

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The vocabulary that the run keeps in tokenizer.json, if any."""
        return self.reads.tokenizer

    def text(self, directory: Path) -> checkpoints.Text:
        """The text files of a model without a checkpoint, for export."""
        names = vocabulary.BOS, vocabulary.EOS, vocabulary.PAD
        template = self.reads.template_text()
        return checkpoints.Text(_load_saved_tokenizer(directory), *names, template)

    def vocabulary(self) -> int:
        """Entries of the data's vocabulary, which may have to be trained."""
        assert self.tokenizer is not None
        return self.tokenizer.get_vocab_size()

    def expected_vocabulary(self) -> int:
        """Entries of the vocabulary, as far as known without the data."""
        model = self.config.model
        if model.factory is not None and model.checkpoint is not None:
            return self.vocabulary()  # of the checkpoint's tokenizer
        return model.vocab_size or self.config.data.vocab_size

    def saved_vocabulary(self, directory: Path) -> int:
        """Entries of the vocabulary of a run's directory."""
        return _load_saved_tokenizer(directory).get_vocab_size()

    @abc.abstractmethod
    def make_program(self, vocab_size: int) -> DecoderProgram:
        """Functions and shapes of a run; nothing is allocated."""

    def build(self) -> None:
        """Make `program`, for the data's vocabulary."""
        self.program = self.make_program(self.vocabulary())
        model_factory.check_rows(self.program, self.packed)

    def plan(self) -> Programs:
        """The programs of a run, inside of `jaxmem.devices.target`; no data are read.

        Raises:
            ValueError: sizes are not divisible by the mesh.
        """
        self.program = self.make_program(self.expected_vocabulary())
        self.program.choose_policy(Console(quiet=True))
        programs = of_program(self.program, self.phases())
        notes = list(self.program.lines())
        if self.config.remat.policy == "fit":
            chosen = fitting.describe(self.program.policy)
            notes.append(f"remat.policy='fit' chooses: {chosen}")
        return dataclasses.replace(programs, notes=tuple(notes))

    @abc.abstractmethod
    def phases(self) -> list[Phase]:
        """The programs of `program`, in the order in which a step runs them."""

    def scaled(self, factor: float) -> tuple[int, dict[str, Any]] | None:
        """The rows of a micro-batch with `factor` times the tokens, for `plan --fit`.

        Returns:
            The rows, and keys and values that make them; None if that cannot be.
        """
        rows = self.config.data.batch_size * factor
        parts = self.config.run.accumulate / factor
        if rows % 1 or parts % 1:
            return None
        values = {"data.batch_size": int(rows), "run.accumulate": int(parts)}
        return int(rows), values

    def open(self) -> None:
        """Open the data, before anything is compiled."""
        rows = self.program.layout.own_rows(self.config.data.batch_size)
        self.batches = self.reads.batches(rows)

    def begin(self, progress: ProgressReport, is_stopping: Callable[[], bool]) -> None:
        """Start what the steps need outside of the run's devices, such as a server.

        A run that has no step left does not call it.

        Args:
            progress: prints lines.
            is_stopping: returns True once a signal has asked the run to end.
        """
        del progress, is_stopping

    @abc.abstractmethod
    def compile(self, progress: ProgressReport) -> None:
        """Compile the programs that `step` and `evaluate` call."""

    @functools.cached_property
    def frozen(self) -> dict:
        """The frozen weights."""
        return self.program.frozen()

    def initial_state(self) -> Any:
        """The state before the first step: a NamedTuple with `params`."""
        return self.program.initial_state()

    def restored_state(
        self, checkpoints: Checkpoints, step: int
    ) -> tuple[Any, dict[str, Any]]:
        """The state after a saved step, and what `get_state` returned then."""
        return self.program.restored_state(checkpoints, step)

    @functools.cached_property
    def learning_rates(self) -> np.ndarray:
        """The learning rate of each step's first update, [run.steps].

        One program computes them all before the first step: within a step, each
        operation of a schedule would be compiled, and would wait for the device.
        """
        counts = np.arange(self.config.run.steps, dtype=np.int32)
        rates = jax.jit(jax.vmap(self.program.schedule))
        return np.asarray(rates(counts * self.program.updates))

    def warnings(self, state: Any) -> Iterator[str]:
        """Lines about the weights of the state that the first step starts from."""
        rate = float(self.learning_rates.max())
        if (line := precision.lost_updates(state.params, rate)) is not None:
            yield line

    @abc.abstractmethod
    def step(self, number: int, state: Any) -> tuple[Any, Any]:
        """Take the step of that number, from 1; the given state is consumed.

        Returns:
            The next state; and the step's `Metrics`, or a function that waits for
            and returns them, which is called after the next step has started.
        """

    def step_metrics(
        self, number: int, loss: Any, norm: Any, tokens: Any, start: float
    ) -> metrics.StepMetrics:
        """The numbers of a step that started at `start`; waits for it to end."""
        loss, norm, tokens = float(loss), float(norm), int(tokens)
        seconds = self.seconds_since(start)
        return metrics.StepMetrics(
            step=number,
            loss=loss,
            tokens=tokens,
            tokens_per_second=tokens / seconds,
            grad_norm=norm,
            learning_rate=float(self.learning_rates[number - 1]),
            seconds=seconds,
            gradient_samples=self.config.head.samples,
            backend=self.program.backend,
        )

    def seconds_since(self, start: float) -> float:
        """Seconds from `start`, or from the last step's end if later, to now."""
        end = time.perf_counter()
        seconds, self._end = end - max(start, self._end), end
        return seconds

    def holds_out(self) -> bool:
        """True if there are held-out data for `evaluate`; called after `open`."""
        return type(self).evaluate is not Job.evaluate

    def evaluate(self, state: Any, step_metrics: Any) -> Evaluated | None:
        """Score the held-out data; None without any."""
        del state, step_metrics
        return None

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data, as JSON-able values."""
        return self.batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from the position that `get_state` returned."""
        self.batches.set_state(state)

    def samples_completions(self) -> bool:
        """True if `samples` returns completions of a step."""
        return type(self).samples is not Job.samples

    def samples(self, count: int = 8) -> list[dict[str, Any]]:
        """Completions of the last step, at most `count`, evenly spaced.

        Each has `prompt`, `tokens`, `logprobs`, `reward` (or None) and `length`.
        """
        del count
        return []

    def finish(self, state: Any) -> dict[str, Any]:
        """Fields of the last evaluation, for the metrics of the last step."""
        del state
        return {}

    def close(self) -> None:
        """End what the run has begun outside of its devices, also after an error."""
        return None

    def costs(self) -> dict[str, metrics.HeadCost]:
        """Memory by `head.logits`, for run.compare_heads; {}: unknown."""
        return {}

    def summary(self, history: Sequence[Any]) -> Mapping[str, Any]:
        """Fields of summary.json."""
        return {"first_loss": history[0].loss, "last_loss": history[-1].loss}

    def closing(self, history: Sequence[Any]) -> Iterator[Any]:
        """Tables and lines that are printed at the end."""
        yield (
            f"loss {history[0].loss:.4f} -> {history[-1].loss:.4f} in {len(history)} "
            f"steps, {metrics.tokens_per_second(history):,.0f} tokens/s"
        )


def job_named(name: str) -> type[Job]:
    """The job of a value of `run.job`: a registered name, or a class of a file.

    Raises:
        UserCodeError: there is none, or it lacks what a job must have.
    """
    job = user_code.load(name, "run.job", JOBS, f"a subclass of {_JOB}", _is_job)
    problem = user_code.missing_hooks(job) or _find_config_problem(job)
    if problem:
        raise UserCodeError(f"run.job: {name} {problem}")
    return job


_JOB = "jaxmem.train.jobs.Job"


def _is_job(loaded: Any) -> bool:
    return inspect.isclass(loaded) and issubclass(loaded, Job) and loaded is not Job


def _find_config_problem(job: type[Job]) -> str | None:
    """The fault of the class of a job's sections; None if it can be used."""
    config = getattr(job, "Config", None)
    if not (inspect.isclass(config) and issubclass(config, JobConfig)):
        expected = "a subclass of jaxmem.train.jobs.JobConfig"
        return f"has the wrong sections: {messages.must_be('Config', expected, config)}"
    try:
        sections = config.sections()
    except Exception as error:  # an annotation that Python cannot evaluate
        raised = user_code.described(error, config)
        return f"has the wrong sections: annotations of {config.__name__}:{raised}"
    fields = {field.name for field in dataclasses.fields(config)}
    for section, kind in sections.items():
        if section not in fields:
            return (
                f"has the wrong sections: {config.__name__} must be decorated by "
                "@dataclasses.dataclass(frozen=True, kw_only=True)"
            )
        if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
            expected = messages.must_be(section, "a dataclass", kind)
            return f"has the wrong sections: {config.__name__}.{expected}"
    return None


def job_of(config: JobConfig) -> Job:
    """The job that `config.run.job` names.

    Raises:
        ValueError: there is none of that name, or it has other sections.
    """
    job = job_named(config.run.job)
    if type(config) is not job.Config:
        # Also of a file that has changed since the configuration was loaded.
        raise ValueError(
            f"run.job={config.run.job!r} takes a {job.Config.__name__}, got a "
            f"{type(config).__name__}; load the configuration again"
        )
    return job(config)


def _load_saved_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise checkpoints.CheckpointError(f"{path}: missing")
    return tokenizers.Tokenizer.from_file(str(path))
