"""Runs Python that a model wrote against unit tests, in processes with limits."""

import concurrent.futures
import dataclasses
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.base.fields import check_numbers
from jaxmem.base.ranges import integers, reals

_RANGES = {
    "seconds": reals(above=0),
    "memory_mib": integers(64, limit=2**20),
    "file_mib": integers(0, limit=2**20),
}
# What the program of a completion may see of the environment: no tokens, no proxies.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
# The limits are set by the process itself, as Python cannot fork safely beside threads.
# The token, without which no report counts, is read before the completion runs, whose
# stdin is empty, and is no global that it could import.
_HARNESS = """
import json, os, resource, sys, types
seconds, memory, files = map(int, sys.argv[1:])
for name, most in (("CPU", seconds), ("AS", memory), ("FSIZE", files),
                   ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
def run(code, tests, token):
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 0)
    # Dataclasses and pickle look the module of a class up.
    module = sys.modules["solution"] = types.ModuleType("solution")
    exec(compile(code, "<completion>", "exec"), vars(module))
    passed = 0
    for i, test in enumerate(tests):
        try:
            exec(compile(test, f"<test {i}>", "exec"), vars(module))
        except Exception:
            continue
        passed += 1
    os.write(report, f"{token} {passed}".encode())
    os._exit(0)
run(*json.loads(sys.stdin.read()))
"""
# A sequence of three or more backquotes or tildes, and the rest of its line.
_FENCE = re.compile(r"(^[^\S\n]*+)?(`{3,}+|~{3,}+)([^\n]*+)", re.MULTILINE)
_LANGUAGE = re.compile(r"[^\S\n]*\{?\.?([\w+#-]*)")
_PYTHON = "py", "py3", "python", "python3"


@dataclasses.dataclass(frozen=True)
class UnitTests:
    """A reward function: the share of the column `tests` that a completion passes.

    The column holds Python source, or a list of sources, such as MBPP's `test_list`;
    each is executed after the completion, and passes unless it raises. The program is
    the body of the completion's last Markdown fence whose language is python, py,
    python3 or py3; else of the last one without a language; else all of it.

    Each completion runs in a process of its own with limits, in an empty directory and
    without the environment. That stops mistakes, endless loops and early exits, which
    earn 0. It is no sandbox: the process can read what its user can read and use the
    network. Run training in a container if that matters. Nor does it stop forgery:
    tests run in the process of the completion, which can change what they call, or look
    into the harness for what makes a report count.

    Attributes:
        seconds: most time of a completion and its tests together.
        memory_mib: most address space.
        file_mib: largest file that can be written.

    >>> code = "def double(x): return 2 * x"
    >>> UnitTests()(["p"], [code], tests=[["assert double(2) == 4", "assert 0"]])
    [0.5]
    """

    seconds: float = 10.0
    memory_mib: int = 1024
    file_mib: int = 16

    def __post_init__(self):
        check_numbers(self, _RANGES)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        tests: Sequence[Any],
        **_: Any,
    ) -> list[float]:
        """See `jaxmem.data.rewards`."""
        jobs = [
            (program_of(completion), [given] if isinstance(given, str) else list(given))
            for completion, given in zip(completions, tests, strict=True)
        ]
        for _code, given in jobs:
            if not given or not all(isinstance(test, str) for test in given):
                raise ValueError("tests must be Python source, or a list of sources")
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda job: self._share_passed(*job), jobs))

    def _share_passed(self, code: str, tests: list[str]) -> float:
        token = secrets.token_hex(16)
        given = json.dumps([code, tests, token])
        limits = (max(round(self.seconds), 1), self.memory_mib << 20,
                  self.file_mib << 20)  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="jaxmem_tests_") as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _HARNESS, *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            )
            try:
                said, _ = process.communicate(given.encode(), self.seconds)
            except subprocess.TimeoutExpired:
                said = b""
            finally:
                _end(process)
        reports = {f"{token} {n}".encode(): n for n in range(len(tests) + 1)}
        return reports.get(said, 0) / len(tests)


def _end(process: subprocess.Popen) -> None:
    """Kill a process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def text_of(completion: Any) -> str:
    """A completion's text, whether it is a string or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


def program_of(completion: Any) -> str:
    """The program of a completion: its last fence of Python, or all of its text."""
    text = re.sub(r"\r\n?", "\n", text_of(completion))
    fences = [fence for fence in _fences(text) if fence[1].strip()]
    for words in (_PYTHON, ("",)):  # a fence without a tag is often what was printed
        for word, body in reversed(fences):
            if word in words:
                return body
    return text


def _fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the body of each fence.

    Models write fences that CommonMark does not accept: an opening one may end a line
    of text, a closing one may end a line of the body or be followed by text, and a
    fence that names a language also closes the one before it.
    """
    opened: tuple[str, str, str, int] | None = None  # indent, mark, language, start
    for match in _FENCE.finditer(text):
        indent, mark, rest = match.groups()
        found = _LANGUAGE.match(rest)
        word = found[1].lower() if found else ""
        alone = rest.strip().lower() == word
        if opened is not None:
            outer, opening, language, start = opened
            ends_line, most = alone and not word, len(outer) + 3
            closes = ends_line if indent is None else len(indent) <= most
            if not (closes and mark.startswith(opening)):
                continue
            yield language, _unindented(text[start : match.start()], outer)
            opened = None
            if not (alone and word):
                continue
        in_line = alone and word in ("", *_PYTHON)
        opens = in_line if indent is None else "`" not in rest
        if opens:
            opened = indent or "", mark, word, match.end() + 1
    if opened is not None:
        yield opened[2], _unindented(text[opened[3] :], opened[0])


def _unindented(body: str, indent: str) -> str:
    return re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", body, flags=re.MULTILINE)
