"""The command line: parse, load, train, print; every heavy import waits its turn."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from jaxmem._version import __version__

_PACKAGE = Path(__file__).parent
# In an installed package, then in a checkout.
_SHIPPED_CONFIGS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")

_USER_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class UsageError(ValueError):
    """The command asks for something that is not there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxmem`.

    Args:
      argv: the arguments after the program's name; those of the process by default.

    Returns:
      The exit status: 0, 2 after an error of the user's, 130 when interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        print("\njaxmem: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, FloatingPointError) as error:
        if not _raised_by_us(error):
            raise
        return _fail(str(error))
    except OSError as error:
        return _fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxmem", description="Language-model training in JAX that fits in memory."
    )
    parser.add_argument("--version", action="version", version=f"jaxmem {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        help="train a language model, or resume the run in run.out_dir",
        description="Train a language model as a gin file says.  Run the same command "
        "again to resume from the newest checkpoint in run.out_dir.",
    )
    train.add_argument(
        "file", metavar="FILE.gin", help="a path, or the name of a shipped config"
    )
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="section.field=value",
        help="applied after the file, as in run.steps=200 data.source=notes.txt",
    )
    train.set_defaults(command=_train)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    path = _find_config(arguments.file)
    try:
        from jaxmem.train import config as configuration
        from jaxmem.train import grpo, sft
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "jaxmem":
            raise
        raise UsageError(
            f"training needs {error.name!r}, which is not installed; run: "
            "pip install 'jaxmem[train]'"
        ) from error
    config, operative_text = configuration.load(path, arguments.overrides)
    print(f"# {path}", *arguments.overrides)
    print(operative_text, flush=True)
    try:
        if isinstance(config, configuration.Config):
            sft.train(config, operative_text)
        else:
            grpo.train(config, operative_text)
    except KeyboardInterrupt:
        print(
            "\njaxmem: interrupted; run the same command again to continue from the "
            f"last checkpoint in {config.run.out_dir}",
            file=sys.stderr,
        )
        return _INTERRUPTED
    return 0


def _find_config(name: str) -> Path:
    """Return the file named, else the shipped one of that name."""
    if os.path.exists(name):
        return Path(name)
    shipped = {path.name: path for d in _SHIPPED_CONFIGS for path in d.glob("*.gin")}
    # "configs/x.gin" and "x.gin" name a shipped config; "elsewhere/x.gin" does not.
    if Path(name).parent.as_posix() in (".", "configs") and Path(name).name in shipped:
        path = shipped[Path(name).name]
        print(f"jaxmem: no {name} here; using the shipped {path}", file=sys.stderr)
        return path
    known = f"; shipped configs: {', '.join(sorted(shipped))}" if shipped else ""
    raise UsageError(f"no such file: {name}{known}")


def _raised_by_us(error: Exception) -> bool:
    """Tell a message meant for the user from a bug, which keeps its traceback."""
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(origin).is_relative_to(_PACKAGE)


def _fail(message: str) -> int:
    print(f"jaxmem: error: {message}", file=sys.stderr)
    return _USER_ERROR
