"""Runs one program against its tests in a confined process; a script of its own.

    unit_tests.py -> supervisor (empty environment) -> program (confined)

The trainer writes a job, marshalled, to stdin. The argument is the descriptor of a pipe
that is closed when the trainer gives the job up, or dies. The supervisor ends the
program and all of its descendants, whatever sessions they have made, and writes what
the program reported. It imports nothing of this package, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import sys
import time
import types

TYPE_CHECKING = False  # to import `typing` would take longer than the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

_POLL_SECONDS = 0.05  # between looks at what the descendants take together
_LONGEST_REPORT = 4096
_NEW_MOUNTS, _NEW_IPC, _NEW_USER = 0x0002_0000, 0x0800_0000, 0x1000_0000
_NEW_PIDS, _NEW_NETWORK = 0x2000_0000, 0x4000_0000
_PARENT_DEATH_SIGNAL, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 36, 38
_READ_ONLY_PROC = 1 | 2 | 4 | 8  # MS_RDONLY, NOSUID, NODEV, NOEXEC
_CAPABILITY_VERSION = 0x2008_0522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock
_REFER = 1 << 13  # links and renames between directories, which are denied by default
_SCOPED = 3  # abstract sockets and signals
_SCOPES_FROM, _NETWORK_FROM = 6, 4  # versions of Landlock with these fields

_is_linux = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run the job of stdin, write the report of its program to stdout, and exit."""
    job, lifeline = marshal.load(sys.stdin.buffer), int(sys.argv[1])
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    if job["namespaces"]:
        _unshare_all()
    if _is_linux:
        _prctl(_SUBREAPER, 1)
        _prctl(_DUMPABLE, 0)  # the program must not write into this process
    pipes = [os.pipe() for _ in range(2)]
    (reported, report), (prepared, prepare) = pipes
    pid = os.fork()
    if not pid:
        for descriptor in (lifeline, woken, wake, reported, prepared):
            os.close(descriptor)
        _run(job, report, prepare)
    os.close(report)
    os.close(prepare)
    try:
        ended = _watch(pid, job, (lifeline, woken))
    finally:
        _end_all(pid)
    if problem := _received(prepared):
        raise OSError(f"a program cannot be confined: {problem.decode()}")
    if ended:
        os.write(1, _received(reported))
    os._exit(0)  # which takes less time than an exit


def _received(descriptor: int) -> bytes:
    """The bytes in a pipe; none where a process that could not be ended holds it."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, _LONGEST_REPORT)
    except BlockingIOError:
        return b""


def _watch(pid: int, job: dict[str, Any], descriptors: tuple[int, int]) -> bool:
    """Wait for a program; False if it exceeds a limit, or its job is given up."""
    lifeline, woken = descriptors
    end = time.monotonic() + job["seconds"]
    while True:
        left = end - time.monotonic()
        ready, *_ = select.select(
            descriptors, [], [], max(min(left, _POLL_SECONDS), 0.0)
        )
        if woken in ready:
            os.read(woken, 4096)
        if any(ended == pid for ended in _reaped()):
            return True
        if lifeline in ready or left <= 0 or _exceeds(pid, job):
            return False


def _reaped() -> Iterator[int]:
    """Yield the children that have ended, of which some were orphans."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid


def _end_all(pid: int) -> None:
    """Kill a program and its descendants, and wait for them.

    The kernel ends a namespace of processes with its first one. Without a namespace,
    orphans become children of this process, which is their subreaper.
    """
    if not _is_linux:
        _kill(-pid)
    while True:
        for child in _descendants(os.getpid()) if _is_linux else [pid]:
            _kill(child)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


# ------------------------------------------------- limits of all processes together


def _exceeds(pid: int, job: dict[str, Any]) -> bool:
    """True if the descendants are too many, or take too much memory together."""
    if not _is_linux:
        return False
    pids = _descendants(os.getpid())
    if len(pids) > job["processes"]:
        return True
    if sum(map(_resident, pids)) <= job["memory"]:
        return False
    return sum(map(_proportional, pids)) > job["memory"]  # pages that are shared, once


def _descendants(pid: int) -> list[int]:
    pids, parents = [], [pid]
    while parents:
        children = [child for parent in parents for child in _children(parent)]
        pids += children
        parents = children
    return pids


def _children(pid: int) -> list[int]:
    """The children of each thread of a process, which may end meanwhile."""
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return [child for child, parent in _parents() if parent == pid]
    paths = [
        f"/proc/{pid}/task/{name}/children" for name in _listed(f"/proc/{pid}/task")
    ]
    return [int(child) for path in paths for child in _text(path).split()]


def _parents() -> Iterator[tuple[int, int]]:
    """Yield all processes with their parents, for kernels that do not list children."""
    for name in filter(str.isdecimal, _listed("/proc")):
        # The name of the program, in parentheses, may have spaces.
        fields = _text(f"/proc/{name}/stat").rpartition(")")[2].split()
        if fields:
            yield int(name), int(fields[1])


def _resident(pid: int) -> int:
    """Bytes in memory; pages that processes share count for each."""
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * resource.getpagesize() if fields else 0


def _proportional(pid: int) -> int:
    """Bytes in memory; a page that n processes share counts as 1/n."""
    for line in _text(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


# ------------------------------------------------------------------ the program


def _run(job: dict[str, Any], report: int, prepare: int) -> None:
    """Confine this process and run the job in it; never return."""
    try:
        in_force = _prepared(job)
    except Exception as error:  # of the system, not of the program
        os.write(prepare, str(error).encode())
        os._exit(1)
    os.close(prepare)
    if job["tests"] is None:
        os.write(report, marshal.dumps(in_force))
    else:
        _test(job["code"], job["tests"], job["token"], report)
    os._exit(0)


def _prepared(job: dict[str, Any]) -> dict[str, Any]:
    """Detach and confine this process; return the protections in force."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    in_force = _confine(job["namespaces"]) if _is_linux else {}
    for name, most in job["limits"].items():
        _limit(getattr(resource, f"RLIMIT_{name}", None), most)
    with open(os.__file__):  # imports would fail, where only privileges can read it
        return in_force


def _test(code: str, tests: Iterable[str], token: str, report: int) -> None:
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


def _limit(kind: int | None, most: int) -> None:
    if kind is None:  # not on this system
        return
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    try:
        resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):  # macOS has no limit of address space
        if _is_linux:
            raise


# ------------------------------------------------------------ confinement by Linux


def _unshare_all() -> None:
    """Enter namespaces in which children have no other processes and no network."""
    user, group = os.getuid(), os.getgid()
    spaces = _NEW_USER | _NEW_PIDS | _NEW_NETWORK | _NEW_IPC
    _check(_libc.unshare(spaces))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _confine(namespaces: bool) -> dict[str, Any]:
    """Give up power over other processes; return the protections in force."""
    _prctl(_DUMPABLE, 1)
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    _prctl(_NO_NEW_PRIVILEGES, 1)
    hides_processes = namespaces and _hide_processes()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))
    landlock = 0 if namespaces else _landlock()
    return {"hides_processes": hides_processes, "landlock": landlock}


def _hide_processes() -> bool:
    """Mount the processes of the namespace at /proc, or nothing; True if one works."""
    _check(_libc.unshare(_NEW_MOUNTS))
    return any(
        not _libc.mount(b"none", b"/proc", kind, _READ_ONLY_PROC, None)
        for kind in (b"proc", b"tmpfs")
    )


def _landlock() -> int:
    """Deny access to processes outside, and signals to them; Landlock's version or 0.

    Nothing else is denied: renames between directories are allowed again.
    """
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 2:
        return 0
    scoped = _SCOPED if version >= _SCOPES_FROM else 0
    fields = (ctypes.c_uint64 * 3)(_REFER, 0, scoped)
    size = 24 if scoped else 16 if version >= _NETWORK_FROM else 8
    ruleset = _libc.syscall(_CREATE_RULESET, fields, ctypes.c_size_t(size), 0)
    _check(ruleset)
    root = os.open("/", os.O_PATH)
    rule = _REFER.to_bytes(8, sys.byteorder) + root.to_bytes(4, sys.byteorder)
    _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(root)
    os.close(ruleset)
    return version


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))))


def _check(returned: int) -> None:
    """Raise the error of a function of libc that has failed."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
