"""Runs Python that a model wrote against unit tests, in processes with limits."""

import concurrent.futures
import dataclasses
import functools
import marshal
import os
import platform
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from jaxmem.base.fields import check
from jaxmem.base.ranges import integers, reals

# Imported, so that it is compiled once, from a path that programs do not have.
_SUPERVISOR = """
import sys
sys.path.insert(0, sys.argv[2])
import supervisor
del sys.path[0]
supervisor.main()
"""
_DIRECTORY = str(Path(__file__).parent)
_GRACE_SECONDS = 30.0  # in which a supervisor, which has its own clock, must end
_HIDES_ENVIRONMENTS, _BLOCKS_SIGNALS = 2, 6  # versions of Landlock
_PER_NAMESPACE = 5, 14  # the first Linux whose RLIMIT_NPROC counts by namespace
_SPARE_PROCESSES = 1000  # that the user may start beside a program, on an older one
# The environment of a completion's program: no tokens, no proxies.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
# A sequence of three or more backquotes or tildes, and the rest of its line.
_FENCE = re.compile(r"(^[^\S\n]*+)?(`{3,}+|~{3,}+)([^\n]*+)", re.MULTILINE)
_LANGUAGE = re.compile(r"[^\S\n]*\{?\.?([\w+#-]*)")
_PYTHON = "py", "py3", "python", "python3"


@dataclasses.dataclass(frozen=True)
class Protections:
    """The means by which this system confines the programs of `UnitTests`.

    Attributes:
        namespaces: True if programs run in namespaces of users, processes and networks.
        hides_processes: True if /proc shows a program only its own processes.
        landlock: version of Linux's Landlock that is used without namespaces, or 0.
    """

    namespaces: bool = False
    hides_processes: bool = False
    landlock: int = 0

    @property
    def sentence(self) -> str:
        """The protections that are in force, and those that are not, in words."""
        if self.namespaces:
            seen = "seen, read or" if self.hides_processes else "read or"
            return (
                "unit_tests: programs run in their own namespaces: other processes "
                f"cannot be {seen} signalled, there is no network, and all processes "
                "end with the program"
            )
        if sys.platform != "linux":
            return (
                f"unit_tests: on {platform.system()} each process of a program has "
                "its own limits; programs can use the network, signal other "
                "processes, and leave processes behind"
            )
        reads = "cannot" if self.landlock >= _HIDES_ENVIRONMENTS else "can"
        signals = "cannot" if self.landlock >= _BLOCKS_SIGNALS else "can"
        return (
            "unit_tests: this system allows no namespaces: programs end with all of "
            f"their processes, {reads} read the environments of other processes, "
            f"{signals} signal them, and can use the network"
        )


@functools.cache
def protections() -> Protections:
    """The protections that this system allows, found by trying them once.

    Raises:
        OSError: programs cannot be run at all.
    """
    if sys.platform != "linux":
        return Protections()
    try:
        return _tried(namespaces=True)
    except OSError:
        return _tried(namespaces=False)


def _tried(namespaces: bool) -> Protections:
    """The protections that an empty program has, with namespaces or without."""
    job = {"namespaces": namespaces, "seconds": 10.0, "memory": 2**40,
           "processes": 100, "limits": {}, "tests": None}  # fmt: skip
    said = _supervised(job)
    if not said:
        raise OSError("unit_tests: a test of an empty program does not end")
    return Protections(namespaces, **marshal.loads(said))


@dataclasses.dataclass(frozen=True)
class UnitTests:
    """A reward function: the share of the column `tests` that a completion passes.

    The column holds Python source, or a list of sources, such as MBPP's `test_list`;
    each is executed after the completion, and passes unless it raises. Null gives no
    reward. The program is the body of the completion's last Markdown fence whose
    language is python, py, python3 or py3; else of the last one without a language;
    else all of it.

    Each completion runs in a process of its own with limits, in an empty directory and
    with an empty environment, as a child of a supervisor with an empty environment.
    What exceeds a limit earns 0, and all of its processes are ended. Where Linux allows
    namespaces, programs see no other process and no network; `protections` says what
    is in force. It is no sandbox for files: the process can read and write what its
    user can. Run training in a container if that matters. Nor does it stop forgery:
    tests run in the process of the completion, which can change what they call, or look
    into the frames that call it for what makes a report count.

    Attributes:
        seconds: most time of a completion and its tests together.
        memory_mib: most address space of a process, and most memory of all processes
            of a completion together, which is measured every 50 ms (on Linux).
        file_mib: largest file that can be written.
        processes: most processes of a completion, and most threads where Linux counts
            them by namespace.

    >>> code = "def double(x): return 2 * x"
    >>> UnitTests()(["p"], [code], tests=[["assert double(2) == 4", "assert 0"]])
    [0.5]
    """

    seconds: Annotated[float, reals(above=0)] = 10.0
    memory_mib: Annotated[int, integers(64, limit=2**20)] = 1024
    file_mib: Annotated[int, integers(0, limit=2**20)] = 16
    processes: Annotated[int, integers(1, limit=2**20)] = 64

    def __post_init__(self):
        check(self)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        tests: Sequence[Any] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """See `jaxmem.data.rewards`."""
        columns = [None] * len(completions) if tests is None else tests
        jobs = [
            None if entry is None else (program_of(completion), sources_of(entry))
            for completion, entry in zip(completions, columns, strict=True)
        ]
        limits = self._limits() if any(jobs) else {}

        def share(job: tuple[str, list[str]] | None) -> float | None:
            return None if job is None else self._share_passed(*job, limits)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(share, jobs))

    def _limits(self) -> dict[str, int]:
        """Limits of a process, by the names of Python's `resource`."""
        limits = {
            "CPU": max(round(self.seconds), 1),
            "AS": self.memory_mib << 20,
            "FSIZE": self.file_mib << 20,
            "NOFILE": 64,
            "CORE": 0,
        }
        if _counts_by_namespace():
            limits["NPROC"] = self.processes + 1  # and the supervisor
        elif sys.platform == "linux":
            limits["NPROC"] = _threads_of_user() + _SPARE_PROCESSES
        return limits

    def _share_passed(
        self, code: str, tests: list[str], limits: dict[str, int]
    ) -> float:
        token = secrets.token_hex(16)
        said = _supervised(
            {
                "code": code,
                "tests": tests,
                "token": token,
                "seconds": self.seconds,
                "memory": self.memory_mib << 20,
                "processes": self.processes,
                "limits": limits,
                "namespaces": protections().namespaces,
            }
        )
        reports = {f"{token} {n}".encode(): n for n in range(len(tests) + 1)}
        return reports.get(said, 0) / len(tests)


def sources_of(entry: Any) -> list[str]:
    """The tests of an entry of the column.

    Raises:
        ValueError: it is no source, no list of sources, or one of them is blank.
    """
    tests = [entry] if isinstance(entry, str) else entry
    tests = list(tests) if isinstance(tests, Iterable) else []
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise ValueError(
            "tests must be Python source that is not blank, or a list of such "
            "sources; null means a record without tests"
        )
    return tests


def _supervised(job: dict[str, Any]) -> bytes:
    """Run a job of `supervisor` in a new directory; return its program's report.

    Raises:
        OSError: the supervisor fails.
    """
    with tempfile.TemporaryDirectory(prefix="jaxmem_tests_") as folder:
        kept, lifeline = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _SUPERVISOR, str(kept), _DIRECTORY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
                start_new_session=True,
                pass_fds=(kept,),
            )
            with process:
                marshalled = marshal.dumps(job)
                try:
                    limit = job["seconds"] + _GRACE_SECONDS
                    said, errors = process.communicate(marshalled, limit)
                except BaseException:
                    process.kill()
                    raise
        finally:
            os.close(kept)
            os.close(lifeline)
    if process.returncode > 0:
        raise OSError(errors.decode(errors="replace").strip().rpartition("\n")[2])
    return b"" if process.returncode else said  # a program has killed it


def _counts_by_namespace() -> bool:
    """True if the processes of a namespace are counted apart from the user's others."""
    if not protections().namespaces:
        return False
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return release is not None and tuple(map(int, release.groups())) >= _PER_NAMESPACE


def _threads_of_user() -> int:
    """Threads of the user of this process, which Linux counts as processes."""
    count, user = 0, os.getuid()
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        except OSError:  # the process has ended
            continue
        if int(fields["Uid"].split()[0]) == user:
            count += int(fields.get("Threads", 0))
    return count


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


class _Fence(NamedTuple):
    """An opening fence of Markdown."""

    indent: str
    mark: str  # three or more backquotes or tildes
    language: str
    start: int  # position of the body

    def body(self, text: str, stop: int) -> str:
        """The body up to a position, without the fence's indent."""
        spaces = rf"^[ \t]{{0,{len(self.indent)}}}"
        return re.sub(spaces, "", text[self.start : stop], flags=re.MULTILINE)


def _fences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the body of each fence.

    Models write fences that CommonMark does not accept: an opening one may end a line
    of text, a closing one may end a line of the body or be followed by text, and a
    fence that names a language also closes the one before it.
    """
    opened: _Fence | None = None
    for match in _FENCE.finditer(text):
        indent, mark, rest = match.groups()
        language = _LANGUAGE.match(rest)
        word = language[1].lower() if language else ""
        alone = rest.strip().lower() == word
        if opened is not None:
            ends_line, most = alone and not word, len(opened.indent) + 3
            closes = ends_line if indent is None else len(indent) <= most
            if not (closes and mark.startswith(opened.mark)):
                continue
            yield opened.language, opened.body(text, match.start())
            opened = None
            if not (alone and word):
                continue
        in_line = alone and word in ("", *_PYTHON)
        opens = in_line if indent is None else "`" not in rest
        if opens:
            opened = _Fence(indent or "", mark, word, match.end() + 1)
    if opened is not None:
        yield opened.language, opened.body(text, len(text))
