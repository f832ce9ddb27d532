"""Programs of `unit_tests`: what they can reach, and what of them is left."""

import fcntl
import marshal
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from jaxmem.data import unit_tests
from jaxmem.data.unit_tests import Protections, UnitTests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="protections of Linux")
QUICK = UnitTests(seconds=5, memory_mib=256, file_mib=1)


@pytest.fixture(params=["namespaces", "landlock"])
def protected(request, monkeypatch):
    """The protections of programs: of this system, and of one without namespaces."""
    own = unit_tests.protections()
    if request.param == "namespaces":
        if not own.namespaces:
            pytest.skip("this system allows no namespaces")
        return own
    without = unit_tests._tried(namespaces=False)
    monkeypatch.setattr(unit_tests, "protections", lambda: without)
    return without


def passes(code, quick=QUICK):
    return quick(["p"], [code], tests=["pass"]) == [1]


def test_program_passes_with_either_protection(protected):
    code = "import os\nx = os.listdir(), dict(os.environ).keys() - {'HOME', 'TMPDIR'}"
    tests = [["assert x[0] == []", "assert len(x[1]) < 6", "assert 0", "assert 1"]]
    assert QUICK(["p"], [code], tests=tests) == [0.75]


def test_program_reads_no_environment_of_others(protected):
    if not (protected.namespaces or protected.landlock >= 2):
        pytest.skip("this system hides no environments without namespaces")
    code = """
import glob
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        with open(path, 'rb') as file:
            read = file.read()
    except OSError:
        continue
    assert b'SECRET' not in read, path
"""
    sleep = [sys.executable, "-c", "input()"]
    environment = {**os.environ, "SECRET": "1"}
    other = subprocess.Popen(sleep, stdin=subprocess.PIPE, env=environment)
    try:
        assert passes(code)
    finally:
        other.communicate(b"\n")


def test_program_signals_no_other_process(protected):
    if not (protected.namespaces or protected.landlock >= 6):
        pytest.skip("this system blocks no signals without namespaces")
    code = f"""
import os
for pid in {os.getpid()}, os.getppid():
    try:
        os.kill(pid or 1 << 22, 0)  # 0 is the supervisor in another namespace
    except OSError:
        continue
    raise AssertionError(pid)
"""
    assert passes(code)


LEAVES = """
import fcntl, os, time
file = open({path!r}, 'w')
fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
"""


def is_free(path):
    """True if no process holds the lock of a file, as those of `LEAVES` do."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_other_sessions_end_with_the_program(protected, tmp_path):
    """It earns what it passes, and does not wait for what it leaves."""
    path, start = str(tmp_path / "lock"), time.monotonic()
    assert passes(LEAVES.format(path=path))
    assert is_free(path) and time.monotonic() - start < 30


def test_other_sessions_end_at_the_time_limit(protected, tmp_path):
    path = str(tmp_path / "lock")
    code = LEAVES.format(path=path) + "time.sleep(60)"
    assert not passes(code, UnitTests(seconds=0.5))
    assert os.path.exists(path) and is_free(path)


TRAINER = """
import os, subprocess, sys
kept, _ = os.pipe()
command = [sys.executable, "-I", "-c", sys.argv[1], str(kept), sys.argv[2]]
subprocess.run(command, stdin=0, pass_fds=[kept])
"""


def test_program_ends_with_the_trainer(protected, tmp_path):
    path = str(tmp_path / "lock")
    job = {
        "code": LEAVES.format(path=path) + "time.sleep(60)",
        "tests": ["pass"],
        "token": "",
        "seconds": 60.0,
        "memory": 2**40,
        "processes": 9,
        "limits": {},
        "namespaces": protected.namespaces,
    }
    given = unit_tests._SUPERVISOR, unit_tests._DIRECTORY
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, *given], stdin=subprocess.PIPE
    )
    assert trainer.stdin is not None
    with trainer.stdin as stdin:
        stdin.write(marshal.dumps(job))
    _wait_until(lambda: os.path.exists(path) and not is_free(path))
    trainer.kill()
    trainer.wait()
    _wait_until(lambda: is_free(path))


def _wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("not within 30 seconds")


CHILDREN = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        kept = bytearray(os.urandom(1)) * ({mib} << 20)
        time.sleep(60)
time.sleep({seconds})
"""


@pytest.mark.parametrize(("count", "is_right"), [(4, False), (1, True)])
def test_memory_is_limited_for_all_processes_together(count, is_right, protected):
    code = CHILDREN.format(count=count, mib=95, seconds=1 if is_right else 60)
    assert passes(code, UnitTests(seconds=20, memory_mib=256)) == is_right


@pytest.mark.parametrize(("count", "is_right"), [(12, False), (4, True)])
def test_processes_are_limited(count, is_right, protected):
    code = CHILDREN.format(count=count, mib=0, seconds=0.2 if is_right else 60)
    assert passes(code, UnitTests(seconds=20, processes=8)) == is_right


def test_program_in_namespaces_signals_only_itself():
    """By signal 0, which ends no process, whatever the code under test does."""
    if not unit_tests.protections().namespaces:
        pytest.skip("this system allows no namespaces")
    assert passes("""
import os
try:
    os.kill(-1, 0)
except ProcessLookupError:
    pass
else:
    raise AssertionError
""")


def test_namespaces_have_no_network():
    if not unit_tests.protections().namespaces:
        pytest.skip("this system allows no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection({server.getsockname()!r}, 1)"
        assert not passes(code)


def test_program_that_cannot_be_confined_is_an_error():
    with pytest.raises(OSError, match="cannot be confined: Python int too large"):
        unit_tests._supervised(
            {"namespaces": False, "seconds": 9.0, "memory": 2**40, "processes": 9,
             "limits": {"AS": 2**70}, "tests": None}
        )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Protections(True, True), "other processes cannot be seen, read or signalled"),
        (Protections(True), "other processes cannot be read or signalled"),
        (Protections(landlock=7), "cannot read the environments .* cannot signal them"),
        (Protections(landlock=3), "cannot read the environments .* can signal them"),
        (Protections(), "can read the environments of other processes, can signal"),
    ],
)
def test_protections_say_what_is_in_force(found, words):
    assert found.sentence.startswith("unit_tests: ") and "\n" not in found.sentence
    assert re.search(words, found.sentence)
