"""The command line; each command imports its heavy modules when it runs."""

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxmem._version import __version__
from jaxmem.base import fields, hub, imports, messages, shipped
from jaxmem.base.command_options import CommandOptions
from jaxmem.commands import flags, requests
from jaxmem.evaluate.config import EvaluateRequest
from jaxmem.generate.config import GenerateRequest
from jaxmem.planning.config import PlanRequest
from jaxmem.score.config import ScoreConfig
from jaxmem.serve.config import ServeRequest

_PACKAGE = Path(__file__).parents[1]

_USER_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
_UNREAD = 141  # 128 + SIGPIPE


class UsageError(ValueError):
    """The command names something that does not exist."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxmem`.

    Args:
        argv: the arguments after the program's name; by default those of the process.

    Returns:
        The exit status: 0, 2 after a user error, 130 when interrupted, 141 where nobody
        reads what is printed.

    Raises:
        SystemExit: the arguments cannot be parsed (2), or SIGTERM ended a run (143).
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whose encoding may have no "é"
            stream.reconfigure(errors="backslashreplace")
    arguments = _parse(argv)
    try:
        with _one_line_warnings():
            status = _run(arguments)
        error = _flush_stdout()
        return status if error is None else _fail(f"stdout: {error.strerror}")
    except KeyboardInterrupt:
        print("\njaxmem: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # such as of `| head`
        _discard_stdout()
        return _UNREAD
    except (ValueError, FloatingPointError) as error:
        if not _raised_by_us(error):
            raise
        return _fail(str(error))
    except OSError as error:
        return _fail(_describe_error(error))
    except Exception as error:
        from jaxmem.commands.bench import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        return _fail(_out_of_memory(error))
    except BaseException as error:  # of Rust, in tokenizers
        if type(error).__name__ != "PanicException":
            raise
        return _fail(f"a library failed on its input: {error}")


def _open_closed_streams() -> None:
    """Open what the shell has closed, as by `>&-`, onto nothing.

    Otherwise the next file that is opened is what libraries and children print to.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        nothing = os.open(os.devnull, os.O_RDWR)
        with contextlib.suppress(OSError):
            os.fstat(descriptor)  # it is that of a file by now, perhaps of this one
            setattr(sys, name, open(nothing, "w", closefd=False))
            continue
        os.dup2(nothing, descriptor)
        os.close(nothing)
        setattr(sys, name, open(descriptor, "w", closefd=False))


def _flush_stdout() -> OSError | None:
    """Write what was printed; the error, after which nothing is, where that fails.

    Raises:
        BrokenPipeError: nobody reads it.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_stdout()
        return error
    return None


def _describe_error(error: OSError) -> str:
    """The message of an error, with the name of stdout if writing to that failed."""
    if error.errno is None or error.filename is not None:
        return str(error)
    try:
        os.write(1, b"\n")  # stdout may hold nothing that another flush would write
    except OSError as failed:
        _discard_stdout()
        if failed.errno == error.errno:
            return f"stdout: {error.strerror}"
    return str(error)


def _discard_stdout() -> None:
    """Print to nothing from now on, since Python flushes stdout at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(messages.cut(message, 1000))


def _run(arguments: argparse.Namespace) -> int:
    """Run the command, with the keys of a config.json that are said to do nothing."""
    options = vars(arguments)
    command, keys = options.pop("command"), options.pop("ignore_keys", None)
    request = flags.read(command.request, arguments)
    if keys is None:
        return command.run(request)
    with _require_extra("--ignore-keys", "train"):
        from jaxmem import checkpoints
    with checkpoints.ignoring_keys(keys.split(",")):
        return command.run(request)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    command = arguments.command
    # argparse accepts overrides either before or after flags, but not both.
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if overrides != rest or (rest and not command.takes_settings):
        hint = ""
        if command.run is _plan:
            hint = "; jaxmem plan takes such options as overrides, for example base=nf4"
        elif command.takes_settings:
            hint = _hint_at_settings(rest)
        parser.error(f"unrecognized arguments: {messages.cut(' '.join(rest))}{hint}")
    if rest:
        arguments.overrides += rest
    if command.run is _train and arguments.file is None and arguments.keys is None:
        parser.error("train needs FILE.gin, or --keys to list the settings")
    return arguments


def _hint_at_settings(words: Sequence[str]) -> str:
    """Say how a setting is written that was given as a flag; "" if no word is one."""
    flag = next((word for word in words if word.startswith("--")), "")
    name, _, value = flag[2:].partition("=")
    if not name:
        return ""
    if "." in name and value:
        return f"; settings have no dashes: {name}={messages.cut(value)}"
    try:
        from jaxmem.train import peers  # slow to import
    except ModuleNotFoundError:  # without the extra "train"
        key = None
    else:
        key = peers.find_key(name.replace("-", "_"))
    if key is None:
        return "; settings have no dashes: section.field=value"
    following = words[words.index(flag) + 1 :]
    if not value and following and not following[0].startswith("-"):
        value = following[0]
    said = f"; settings have no dashes: {name} is {key}"
    return said + (f", as in {key}={messages.cut(value)}" if value else "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxmem", description="Language-model training in JAX that fits in memory."
    )
    parser.add_argument("--version", action="version", version=f"jaxmem {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        command.add(commands, name)
    return parser


def _data(request: requests.DataRequest) -> int:
    path = _find_config(request.file)
    with _require_extra("reading data", "train"):
        from rich.console import Console

        from jaxmem.train import configuration, jobs, model_names, preview
    config, _ = configuration.load(path, request.overrides)
    config = model_names.with_directories(config, hub.TEXT)
    preview.show(jobs.job_of(config), request.show, Console())
    return 0


def _generate(request: GenerateRequest) -> int:
    with _require_extra("generating", "train"):
        from jaxmem.generate import command
    command.run(request)
    return 0


def _serve(request: ServeRequest) -> int:
    with _require_extra("serving", "train"):
        from jaxmem.serve import command
    command.run(request)
    return 0


def _export(request: requests.ExportRequest) -> int:
    with _require_extra("exporting", "train"):
        from jaxmem.train import export, saved
    code = saved.Code(request.factory, request.trust_code)
    options: dict[str, Any] = {"merge": request.merge, "base": request.base}
    options |= {"dtype": request.dtype, "code": code}
    path, repository = request.path, request.push
    if repository is None:
        if request.out is None or request.private:
            raise UsageError("export needs --out or --push; --private needs --push")
        print(export.export(path, request.out, **options))
        return 0
    hub.check_push(repository)
    with export.directory(request.out) as out:
        lines = export.export(path, out, name=repository, **options)
        if request.out is None:  # the directory is removed: leave its name out
            lines = lines.partition("\n")[2]
        if lines:
            print(lines)
        print(export.push(path, out, repository, request.private))
    return 0


def _score(request: ScoreConfig) -> int:
    with _require_extra("scoring", "score"):
        from jaxmem.score import score
    with _require_extra(f"writing {request.out}", "score"):
        score(request)
    return 0


def _eval(request: EvaluateRequest) -> int:
    with _require_extra("evaluating", "eval"):
        from jaxmem.evaluate import command
    command.run(request)
    return 0


def _plan(request: PlanRequest) -> int:
    import jax

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # hide XLA's slow-compile notes
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # do not occupy a GPU of this machine
    path = Path(request.file)
    if path.suffix != ".gin":
        path = Path(hub.local_directory(request.file, hub.TEXT))
    if not path.is_dir():
        path = _find_config(request.file)
    with _require_extra("planning", "train"):
        from jaxmem.planning import command
    return command.run(dataclasses.replace(request, file=str(path)))


def _doctor(request: requests.DoctorRequest) -> int:
    from jaxmem.commands import doctor

    return doctor.run(as_json=request.as_json)


def _bench(request: requests.BenchRequest) -> int:
    import jax

    from jaxmem.commands import bench

    on_cpu = jax.default_backend() == "cpu"
    shape = request.shape or (bench.SHAPE_ON_CPU if on_cpu else bench.SHAPE_ON_GPU)
    if request.tune:
        lines = bench.tune(
            shape, request.kernel, request.repetitions,
            request.out or Path("tuned.json"),
        )  # fmt: skip
        for line in lines:
            print(line, flush=True)
        return 0
    if request.kernel or request.out:
        raise UsageError("--kernel and --out are for --tune")
    dtype = request.dtype or ("float32" if on_cpu else "bfloat16")
    device = jax.devices()[0].device_kind
    print(f"N, D, V = {shape}, {dtype}, on {device}, jax {jax.__version__}", flush=True)
    rows = bench.measure(shape, dtype, request.chunk, request.repetitions)
    print(bench.table(rows))
    return 0


def _train(request: requests.TrainRequest) -> int:
    path = None if request.file is None else _find_config(request.file)
    with _require_extra("training", "train"):
        from jaxmem.base import processes
        from jaxmem.train import configuration, jobs, keys
    if request.keys is not None:
        described = request.keys or None, path, request.overrides
        print(*configuration.describe_keys(*described), sep="\n")
        return 0
    assert path is not None
    config, operative_text = configuration.load(path, request.overrides)
    cluster = request.coordinator, request.processes, request.process_id
    if request.cluster or any(value is not None for value in cluster):
        processes.start(*cluster, heartbeat=request.heartbeat)
    try:
        with processes.together():
            if processes.is_first():
                _print_log(f"# {' '.join([str(path), *request.overrides])}")
                if request.verbose:
                    about = "# settings that differ from the defaults"
                    _print_log(f"{about}\n{keys.differing(config)}")
            jobs.train(config, operative_text)
    finally:  # also where a signal has ended the run
        with contextlib.suppress(BrokenPipeError):
            if (error := _flush_stdout()) is not None:
                why = f"the log on stdout is not complete: {error.strerror}"
                print(f"jaxmem: {why}", file=sys.stderr)
    return 0


def _print_log(text: str) -> None:
    """Print lines of a run's log; a full disk behind stdout does not end the run."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"jaxmem: stdout: {error.strerror}; the run goes on", file=sys.stderr)


class _Command(NamedTuple):
    """A command whose flags are the fields of its request."""

    request: type[CommandOptions]
    run: Callable[[Any], int]
    help: str
    description: str
    reads_models: bool = True

    @property
    def takes_settings(self) -> bool:
        """True if settings are arguments, as in run.steps=200."""
        return any(x.path == "overrides" for x in fields.fields(self.request))

    def add(self, commands: Any, name: str) -> None:
        """Add the command to the parser."""
        parser = commands.add_parser(name, help=self.help, description=self.description)
        flags.add_flags(parser, self.request)
        if self.reads_models:
            parser.add_argument(
                "--ignore-keys", metavar="KEY,…", help="keys of config.json to ignore"
            )
        parser.set_defaults(command=self)


_COMMANDS = {
    "train": _Command(
        requests.TrainRequest,
        _train,
        "train a language model, or resume the run in run.out_dir",
        "Train a language model with the settings of a gin file.  Run the same command "
        "again to resume from the newest checkpoint in run.out_dir.  SIGTERM and "
        "Ctrl-C end a run after the current step, which is saved.",
    ),
    "data": _Command(
        requests.DataRequest,
        _data,
        "show training records as tokens, and which tokens the loss counts",
        "Print the first records of a job's data as tokens, and statistics of all "
        "records. Tokens that the loss counts are green. Nothing is trained.",
    ),
    "generate": _Command(
        GenerateRequest,
        _generate,
        "complete prompts with a run, a checkpoint or an adapter",
        "Complete one prompt, a file of prompts, or the turns of a conversation. If a "
        "command with --in is interrupted, run it again to continue.",
    ),
    "serve": _Command(
        ServeRequest,
        _serve,
        "serve a run, a checkpoint or an adapter over HTTP, by routes of vLLM",
        "Answer requests for completions over HTTP, with jaxmem's own sampler and the "
        "routes of vLLM that trainers use. The address is printed as soon as requests "
        "are answered. SIGTERM and Ctrl-C end the server.",
    ),
    "export": _Command(
        requests.ExportRequest,
        _export,
        "save a run's model for transformers, with or without merged adapters",
        "Save the model of a run, or of its newest checkpoint if the run has not "
        "ended, as a directory that transformers (or PEFT) loads.",
    ),
    "score": _Command(
        ScoreConfig,
        _score,
        "write log-probabilities and entropies of texts under a model",
        "Score every token of texts, or of the responses in conversations, under a "
        "model. If the command is interrupted, run it again to continue.",
    ),
    "eval": _Command(
        EvaluateRequest,
        _eval,
        "evaluate a run, a checkpoint or an adapter on benchmarks of lm-eval",
        "Evaluate a model on tasks of lm-evaluation-harness. The results go to --out, "
        "or to eval.json in the directory of a run, where report.html shows them.",
    ),
    "plan": _Command(
        PlanRequest,
        _plan,
        "estimate memory and time on devices that you need not have",
        "Compile a job's programs for GPUs or TPUs, on any machine, and print the "
        "memory and time that they take.  Exit status: 0 if the job fits, 1 if it "
        "does not.",
    ),
    "doctor": _Command(
        requests.DoctorRequest,
        _doctor,
        "show what jax finds on this machine, and known problems",
        "Print versions, devices, the head's backend and known problems of this "
        "machine.  Exit status: 0 if nothing is wrong, 1 otherwise.",
        reads_models=False,
    ),
    "bench": _Command(
        requests.BenchRequest,
        _bench,
        "measure time and memory of the head on this machine",
        "Compare the time and memory of jaxmem's head with a head that stores the "
        "logits, and with the bare matrix product. With --tune, measure tile sizes and "
        "launch options of the Hopper kernels instead, and write the best ones to a "
        "table.",
        reads_models=False,
    ),
}


@contextlib.contextmanager
def _require_extra(what: str, extra: str) -> Iterator[None]:
    """Name the extra to install, where a module that is not ours is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "jaxmem":
            raise
        raise UsageError(
            f"{what} needs {error.name!r}, which is not installed; run: "
            f"{imports.how_to_install(extra)}"
        ) from error


def _find_config(name: str) -> Path:
    """Return the named file, or else the shipped config of that name."""
    if os.path.exists(name):
        return Path(name)
    path = shipped.find(name)
    if path is not None:
        print(
            f"jaxmem: {name} is not in this directory; using the shipped {path}",
            file=sys.stderr,
        )
        return path
    configs = shipped.names()
    known = f"; shipped configs: {', '.join(configs)}" if configs else ""
    raise UsageError(f"no such file: {name}{shipped.suggestion(name) or known}")


def _raised_by_us(error: Exception) -> bool:
    """True if an error is a message for the user, False for a bug with a traceback."""
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(origin).is_relative_to(_PACKAGE)


def _out_of_memory(error: Exception) -> str:
    reason = messages.cut(str(error).partition("\n")[0]).rstrip(".")
    reason = f" ({reason})" if reason else ""
    if isinstance(error, MemoryError):
        return (
            f"out of host memory{reason}: name fewer records, read them with "
            "data.streaming=True, or lower the model's sizes"
        )
    return (
        f"out of device memory{reason}: lower the model's sizes, data.batch_size, "
        "data.sequence_length, head.chunk or --max-tokens, or set remat.policy='full'; "
        f"`jaxmem plan CONFIG --device {_this_device()} --fit` prints what takes "
        "the memory and which values fit"
    )


def _this_device() -> str:
    """The name that `jaxmem plan` has for this process's device; "h200" if none."""
    import jax

    from jaxmem import devices

    try:
        found = devices.of_kind(jax.devices()[0].device_kind)
    except RuntimeError:
        found = None
    return "h200" if found is None else found.name


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Print warnings without the file and the source line that raised them."""
    original = warnings.formatwarning

    def format_warning(message, *location, **source) -> str:
        return f"jaxmem: warning: {message}\n"

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = original


def _fail(message: str) -> int:
    print(f"jaxmem: error: {message}", file=sys.stderr)
    return _USER_ERROR
