"""A measurement in a process of its own, which sends rows back as it goes.

The process that starts others uses no device itself, so that all of the memory is
theirs.
"""

import argparse
import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

MARK = "ROW "
SWEEP = [2**k for k in range(11, 18)]  # tokens


def send(row: Mapping) -> None:
    """From a worker: one row to the process that started it."""
    print(MARK + json.dumps(row), flush=True)


def said(error: BaseException) -> str:
    """An exception in one line; a compiler's may hold the whole program."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


def start(
    module: str, environment: Mapping[str, str], arguments: Sequence[str]
) -> Iterator[dict]:
    """Runs `python -m module`; its rows, as they come. Other output is passed on."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        print(f"{module} {' '.join(arguments)}: exit code {process.returncode}")


@contextlib.contextmanager
def compilation_cache() -> Iterator[dict[str, str]]:
    """Environment of jax workers: the whole device, and what one of them compiled.

    A JAX_COMPILATION_CACHE_DIR of the caller's own stays, with what is in it.
    """
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    with (
        contextlib.nullcontext(own) if own else tempfile.TemporaryDirectory() as folder
    ):
        yield {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            # Where a host has several devices, or it would find nothing of the head,
            # and a peak would be the compiler's. jaxmem keeps its programs apart.
            "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "true",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
        }


def add_shapes(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is measured; `shapes_of` reads them."""
    parser.add_argument("--shape", action="append", default=[], help="N,D,V; repeat")
    parser.add_argument(
        "--sweep", action="append", default=[], help="D,V: 2048 … 131072 tokens"
    )


def shapes_of(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """(N, D, V) of --shape and --sweep."""
    shapes = [tuple(int(x) for x in text.split(",")) for text in args.shape]
    for text in args.sweep:
        d, v = (int(x) for x in text.split(","))
        shapes += [(n, d, v) for n in SWEEP]
    return shapes or [(8192, 256, 32768)]


def value_of(text: str):
    """A number, None or True as such; any other word as text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
