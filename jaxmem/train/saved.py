"""Finds the model in a directory: of a checkpoint, an adapter, or a run."""

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem import checkpoints
from jaxmem.base import hub, messages, user_code
from jaxmem.checkpoints import CheckpointError, base_record
from jaxmem.models.decoder import Decoder
from jaxmem.models.own_model import LanguageModel
from jaxmem.models.partitioning import MeshConfig
from jaxmem.train import configuration, known_architecture, model_names, results
from jaxmem.train.jobs.job import Job, job_of
from jaxmem.train.memory import RematConfig
from jaxmem.train.program import ModelProgram
from jaxmem.train.settings import JobConfig
from jaxmem.train.state import checkpoint

_ADAPTER = "adapter_config.json"
_OPERATIVE = "operative.gin"


@dataclasses.dataclass(frozen=True)
class Code:
    """The user's permission to run the code of a run's model."""

    factory: str | None = None  # a `model.factory` that replaces the run's
    trusted: bool = False  # True if any code that the run names may be run

    def checked(self, config: JobConfig, directory: Path) -> JobConfig:
        """The configuration of a run, whose factory may be run.

        Raises:
            CheckpointError: only the run names its factory, or it has none for the one
                that the user names.
        """
        factory = config.model.factory
        if factory is None:
            self.check_unused(directory)
        elif self.factory is not None:
            return config.replaced({"model.factory": self.factory})
        else:
            self.check(directory, "model.factory", factory)
        return config

    def check(self, directory: Path, key: str, name: str) -> None:
        """Raise a CheckpointError unless the code that a run's key names may be run."""
        if self.trusted or (key == "model.factory" and name == self.factory):
            return
        advice = "allow the code of the run with --trust-code"
        if key == "model.factory":
            advice = (
                f"name your own code with --factory {messages.name(name)}, or allow "
                "the code of the run with --trust-code"
            )
        raise CheckpointError(
            f"{directory / _OPERATIVE}: {key}={messages.short(name)} would run "
            f"{messages.cut(user_code.location(name))}: {advice}"
        )

    def check_unused(self, directory: Path) -> None:
        """Raise a CheckpointError if the user names a factory, for other models."""
        if self.factory is not None:
            raise CheckpointError(
                f"--factory={self.factory} is for a run with model.factory, and "
                f"{directory} has none"
            )


OF_USER = Code()  # permits none of the code that a directory names


class Saved(NamedTuple):
    """A model in a directory; valid while `opened` is."""

    # has config.json and the tokenizer and, unless there is a decoder, the weights
    directory: Path
    adapter: Path | None = None  # directory of a LoRA adapter
    decoder: LanguageModel | None = None  # model of a run that has not ended
    chat_template: str | None = None  # path of one that replaces the directory's
    files: tuple[Path, ...] = ()  # files that the decoder was read from
    end_of_turn: str | None = None  # token that ends turns, of conversations
    unknown: str | None = None  # reason why config.json cannot name the architecture

    @property
    def is_drawn(self) -> bool:
        """True if no file has the frozen weights: a run drew them from its seed."""
        return self.decoder is not None and self.decoder.config.checkpoint is None

    def load(self, dtype: str | None = None, base: str | None = None) -> LanguageModel:
        """The decoder, with its adapter; `base` codes matrices that are in 16 bits.

        Raises:
            CheckpointError: the decoder belongs to a run, which has its own base.
        """
        if self.decoder is not None:
            own = self.decoder.config.base
            if base not in (None, own):
                raise CheckpointError(
                    f"--base={base} is for a checkpoint or an adapter; this model "
                    f"belongs to a run with model.base={own!r}; leave --base out"
                )
            return self.decoder
        options: dict[str, Any] = {} if base is None else {"base": base}
        return checkpoints.load(
            self.directory, dtype=dtype, param_dtype=dtype, adapter=self.adapter,
            **options,
        )  # fmt: skip


@contextlib.contextmanager
def opened(
    path: str | Path,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    code: Code = OF_USER,
) -> Iterator[Saved]:
    """Find the model in a directory.

    The model of a run is its result, `model` or `adapter`, or its newest checkpoint if
    that is newer, or if the adapter's base is random weights. The directory is not
    changed.

    Args:
        path: directory of a checkpoint, an adapter in PEFT's layout, or a run; or a
            model of the Hub, as `hub.parse` reads it.
        adapter: such a directory, or model of the Hub, of an adapter to add to a
            checkpoint.
        dtype: compute dtype of a decoder that is read from a run's checkpoint.
        code: permission to run the code of a run's model.

    Raises:
        CheckpointError: there is no model in the directory, or only code that the user
            does not name makes it.
        HubError: the Hub cannot serve a model that is named.
    """
    directory = Path(os.path.expanduser(hub.local_directory(path)))
    if adapter is not None:
        adapter = hub.local_directory(adapter)
    step = checkpoint.newest(directory / "checkpoints")
    result = next(filter(Path.exists, _result_files(directory)), None)
    if result is not None and not _lacks_something(directory, step, result):
        code.check_unused(directory)
        yield _open_files(result.parent, adapter)
    elif step is None:
        raise CheckpointError(_describe_missing_model(directory))
    else:
        with _open_run(directory, step, dtype, code) as saved:
            if adapter is not None:
                raise CheckpointError(
                    f"--adapter is for a checkpoint, and {directory} is a run"
                )
            yield saved


def _result_files(directory: Path) -> Iterator[Path]:
    """Files that show that there is a model, in order of precedence."""
    yield directory / "config.json"
    yield directory / _ADAPTER
    yield directory / "model" / "config.json"
    yield directory / "adapter" / _ADAPTER


def _lacks_something(directory: Path, step: int | None, result: Path) -> bool:
    """True if a run's checkpoint has what its result lacks: later steps, or a base."""
    if step is None or result.parent == directory:
        return False
    is_adapter = result.name == _ADAPTER
    if is_adapter and not base_record.BaseName.recorded(result.parent).name:
        return True
    saved = directory / "checkpoints" / str(step)
    return saved.stat().st_mtime > result.stat().st_mtime


def _describe_missing_model(directory: Path) -> str:
    if not directory.is_dir():
        hint = hub.hint(str(directory))
        return f"{directory}: no such checkpoint, adapter or run (run.out_dir){hint}"
    if any((directory / name).exists() for name in ("metrics.jsonl", "operative.gin")):
        return (
            f"{directory}: this run has not saved a checkpoint (run.checkpoint_every) "
            "or its final model yet"
        )
    return (
        f"{directory} is not a checkpoint (with config.json), an adapter (with "
        f"{_ADAPTER}) or a run (with checkpoints/, model/ or adapter/)"
    )


def _open_files(directory: Path, adapter: str | Path | None) -> Saved:
    if not (directory / _ADAPTER).exists():
        if adapter is None:
            return Saved(directory)
        return _with_adapter(directory, Path(adapter).expanduser())
    if adapter is not None:
        raise CheckpointError(
            f"--adapter is for a checkpoint, and {directory} is an adapter; merge it "
            f"first: jaxmem export {directory} --merge --out NEW"
        )
    advice = f"name the checkpoint, with --adapter {directory}"
    return _with_adapter(base_record.directory_of(directory, advice), directory)


def _with_adapter(base: Path, adapter: Path) -> Saved:
    """A checkpoint with an adapter, whose own chat template replaces the base's."""
    checkpoints.check_tokens(adapter, base)
    template = adapter / "chat_template.jinja"
    return Saved(base, adapter, None, str(template) if template.exists() else None)


@contextlib.contextmanager
def _open_run(
    directory: Path, step: int, dtype: str | None, code: Code
) -> Iterator[Saved]:
    with user_code.checked(functools.partial(code.check, directory)):
        job = _load_job(directory, dtype, code)
        decoder = _read_decoder(directory, step, job)
    state = directory / "checkpoints" / str(step)
    files = tuple(sorted(p for p in state.rglob("*") if p.is_file()))
    template, source = job.reads.chat_template, job.config.model.checkpoint
    if source is not None:
        ends = directory / results.END_OF_TURN
        end = ends.read_text("utf-8").rstrip("\n") if ends.exists() else None
        yield Saved(Path(source), None, decoder, template, files, end)
        return
    with tempfile.TemporaryDirectory() as texts:
        unknown = known_architecture.reason_without(decoder.config)
        if isinstance(decoder, Decoder) and unknown is None:
            decoder, described = checkpoints.as_known(decoder, job.reads.longest)
            text = job.text(directory)
            checkpoints.write_text_files(Path(texts), described, text, "float32")
        else:
            results.write_text(Path(texts), decoder, job, directory)
        yield Saved(Path(texts), None, decoder, template, files, unknown=unknown)


def _load_job(directory: Path, dtype: str | None, code: Code) -> Job:
    """The job of a run, on one device."""
    config = code.checked(configuration.load(directory / _OPERATIVE)[0], directory)
    config = config.replaced({"run.out_dir": str(directory)})  # it may have moved
    config = job_of(model_names.with_directories(config)).config
    model = dataclasses.replace(config.model, dtype=dtype or config.model.dtype)
    return job_of(
        dataclasses.replace(config, model=model, mesh=MeshConfig(), remat=RematConfig())
    )


def _read_decoder(directory: Path, step: int, job: Job) -> LanguageModel:
    size = job.saved_vocabulary(directory)
    program = ModelProgram(job.config, size, lambda _: 0.0)
    like = program.state_shapes.params
    params = checkpoint.read_params(directory / "checkpoints", step, like)
    return program.model(params, program.frozen())
