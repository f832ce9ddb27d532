"""Environments: their answers, and every way in which one can fail."""

import contextlib
import math
import sys
import threading
import time

import pytest

from jaxmem.base.user_code import UserCodeError
from jaxmem.data import event_loop
from jaxmem.data.calculator import Calculator
from jaxmem.data.environments import Environments, Turn
from jaxmem.data.rewards import RewardError

RECORD = {"prompt": "12*34=", "answer": 408}
BODY = """
class Own:
    def reset(self, record):
        self.record = record
        {reset}

    def step(self, said):
        {step}
"""


@pytest.fixture
def own(tmp_path):
    """Writes a class of two bodies and names it."""

    def write(reset="return 'a'", step="return 'b', 1, True"):
        path = tmp_path / "envs.py"
        path.write_text(BODY.format(reset=reset, step=step))
        return f"{path}:Own"

    return write


@pytest.fixture
def opened():
    """Makes environments that stay open until the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(name, count=2, **options):
            environments = Environments(name, **options)
            where = [f"p.jsonl:{i + 1}" for i in range(count)]
            made = environments.opened([RECORD] * count, where)
            return environments, stack.enter_context(made)

        yield make


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("12*34", "408"), ("(1+2)*-3", "-9"), ("7/2", "3.5"), ("7//2", "3"),
        ("1/0", "?"), ("2**9", "?"), ("1+", "?"), ("9" * 60, "9" * 60),
    ],
)  # fmt: skip
def test_calculator(question, value):
    calculator = Calculator()
    assert calculator.reset(RECORD) == "12*34="
    assert calculator.step(["12*34=", f"[{question}]"]) == (f"{value}=", 0.0, False)
    assert calculator.step(["12*34=", " 408\n"]) == ("", 1.0, True)
    assert calculator.step(["12*34=", "409"]) == ("", 0.0, True)


def test_conversations_of_strings(opened):
    environments, (one, two) = opened("calculator")
    assert one.prompt == "12*34=" and not one.has_messages
    one.complete("[12*34]")
    two.complete("7")
    answered, ended = environments.step([one, two])
    assert answered == Turn("408=", 0.0, False) and ended == Turn("", 0.0, True)
    one.hear(answered.reply)
    one.complete("408")
    assert one.said == ["12*34=", "[12*34]", "408=", "408"]
    assert environments.step([one]) == [Turn("", 1.0, True)]


def test_conversations_of_messages(own, opened):
    name = own(
        "return [{'role': 'user', 'content': record['prompt']}]",
        "return [{'role': 'tool', 'content': said[-1]['content'] * 2}], 0.5, 0",
    )
    environments, (one,) = opened(name, 1)
    one.complete("x")
    (turn,) = environments.step([one])
    one.hear(turn.reply)
    assert [m["role"] for m in one.said] == ["user", "assistant", "tool"]
    assert one.said[-1]["content"] == "xx" and turn[1:] == (0.5, False)
    assert one.prompt == one.said[:1]


def test_conversations_have_own_object_and_record(own, opened):
    name = own(
        "record['seen'] = self.seen = []; return 'a'",
        "self.seen.append(1); said.clear(); return str(len(self.seen)), 0, False",
    )
    environments, made = opened(name, 3)
    for _ in range(2):
        turns = environments.step(made)
    assert [turn.reply for turn in turns] == ["2"] * 3 and "seen" not in RECORD
    assert [conversation.said for conversation in made] == [["a"]] * 3


def test_slow_ones_wait_together(own, opened):
    name = own(step="import time; time.sleep(0.3); return 'b', 0, True")
    environments, made = opened(name, 20)
    start = time.monotonic()
    assert len(environments.step(made)) == 20
    assert time.monotonic() - start < 3


FAILURES = [
    ("return 1 / 0", r"step raised \(line 8\) ZeroDivisionError: division by zero"),
    ("raise SystemExit", r"step raised \(line 8\) SystemExit: SystemExit"),
    ("import time; time.sleep(60)", "step took longer than task.timeout=0.5 s"),
    ("return 'b'", r"step returned 'b', not a tuple \(reply, reward, done\)"),
    ("return 'b', 1", r"step returned \('b', 1\), not a tuple"),
    ("return 3, 1, True", "step replied 3, which must be a string, as the prompt is"),
    ("return [], 1, True", r"step replied \[\], which must be a string"),
    ("return 'b', 'high', True", "step gave the reward 'high', which is not a fin"),
    ("return 'b', float('nan'), True", "step gave the reward nan, which is not a fin"),
    ("return 'b', -2e18, True",
     r"step gave the reward -2e\+18; advantages .* for rewards of at most 1e\+18"),
    ("import numpy; return 'b', 1, numpy.ones(2)",
     r"step returned a tuple whose done must be True or False, got array\(\[1"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "message"), FAILURES)
def test_environment_that_fails_is_named_or_ends(step, message, own, opened):
    name = own(step=step)
    environments, made = opened(name, timeout=0.5)
    with pytest.raises(RewardError, match=r"^environment .*:Own \(p.jsonl:1\): "
                       + message) as raised:  # fmt: skip
        environments.step(made)
    assert "\n" not in str(raised.value)
    environments, made = opened(name, timeout=0.5, on_error="end")
    with pytest.warns(UserWarning, match=rf"^environment .* {message}"):
        assert environments.step(made) == [Turn("", 0.0, True)] * 2
    environments, made = opened(name, timeout=0.5, on_error="mask")
    with pytest.warns(UserWarning, match=rf"^environment .* {message}"):
        assert all(math.isnan(t.reward) and t.done for t in environments.step(made))


def test_conversations_that_failures_end_are_counted(own, opened):
    name = own(step="return ('b', 0, True) if said[-1] == 'right' else 1 / 0")
    environments, conversations = opened(name, 12, on_error="end")
    with pytest.warns(UserWarning) as caught:
        environments.step(conversations)
    assert [str(warning.message).partition("; ")[2] for warning in caught] == [
        f"conversations ended by failures of this kind so far: {n}" for n in (1, 10)
    ]
    assert all(
        "step raised (line 8) Zero" in str(warning.message) for warning in caught
    )
    conversations[0].complete("right")
    assert environments.step(conversations[:1]) == [
        Turn("b", 0.0, True)
    ]  # nothing to say


@pytest.mark.parametrize(
    ("reset", "message"),
    [
        ("raise KeyError('a')", r"reset raised \(line 5\) KeyError: 'a'"),
        ("return ''", "reset returned '', which is not a string or a list of messages"),
        ("return [3]", r"reset returned \[3\], which is not a string or a list"),
        ("return None", "reset returned None, which is not"),
        ("import numpy; return numpy.arange(2)",
         r"p.jsonl:1\): reset returned array\(\[0, 1\]\), which is not a string or"),
    ],
)  # fmt: skip
def test_reset_result_is_checked(reset, message, own, opened):
    for on_error in ("raise", "end"):
        with pytest.raises(RewardError, match=message):
            opened(own(reset), on_error=on_error)


def test_classes_that_are_none(own, tmp_path):
    with pytest.raises(UserCodeError, match="must be one of 'calculator', or"):
        Environments("calculater")
    with pytest.raises(UserCodeError, match="environment: cannot import absent.py"):
        Environments("absent.py:Own")
    with pytest.raises(RewardError, match="task.environment: .* has no method 'reset'"):
        Environments("pathlib:Path")


# ------------------------------------------------------------- from open to close


COUNTED = """
import threading, time
lock = threading.Lock()
now, most = dict(objects=0, calls=0), dict(objects=0, calls=0)
opened, closed = [], []

def add(name, count):
    with lock:
        now[name] += count
        most[name] = max(most[name], now[name])

class Counted:
    def __init__(self):
        add("objects", 1)
        opened.append(self)

    def reset(self, record):
        add("calls", 1)
        time.sleep(record.get("seconds", 0.01))
        add("calls", -1)
        if record.get("fails"):
            raise OSError("no container")
        return record["prompt"]

    def step(self, said):
        if said[-1] == "fail":
            raise OSError("no network")
        return "b", 1, said[-1] == "end"

    def close(self):
        add("objects", -1)
        closed.append(self)
"""


@pytest.fixture
def counted(tmp_path):
    """Environments of a class that counts its objects and calls, and its module."""

    def make(**options):
        path = tmp_path / "counted.py"
        path.write_text(COUNTED)
        environments = Environments(f"{path}:Counted", **options)
        return environments, sys.modules[environments._class.__module__]

    return make


def records(count, **fields):
    where = [f"p.jsonl:{i + 1}" for i in range(count)]
    return [{"prompt": str(i)} | fields for i in range(count)], where


def test_prompts_are_read_with_few_environments_open(counted):
    environments, module = counted(workers=4)
    before = threading.active_count()
    rows, where = records(30)
    assert environments.prompts(rows, where) == [str(i) for i in range(30)]
    assert len(module.opened) == len(module.closed) == 30
    assert module.most["objects"] <= 4 and module.most["calls"] <= 4
    assert threading.active_count() <= before + 1
    rows[6]["fails"] = True
    with pytest.raises(RewardError, match=r"\(p.jsonl:7\): reset raised .* no contain"):
        environments.prompts(rows, where)
    assert set(module.opened) == set(module.closed)


def test_timeout_counts_for_each_call(counted):
    environments, module = counted(workers=2, timeout=0.5)
    rows, where = records(12, seconds=0.1)
    with environments.opened(rows, where) as made:  # two at a time, in 0.6 s
        assert [conversation.prompt for conversation in made] == list(
            map(str, range(12))
        )
    rows[5]["seconds"] = 2
    with pytest.raises(RewardError, match=r":6\): reset took longer than task.timeout"):
        environments.prompts(rows, where)
    assert set(module.opened) == set(module.closed)


@pytest.mark.parametrize("raised", [RewardError, KeyboardInterrupt])
def test_environments_are_closed_at_any_end(raised, counted):
    environments, module = counted()
    with pytest.raises(raised), environments.opened(*records(4)) as made:
        for conversation, text in zip(
            made, ("end", "more", "fail", "end"), strict=True
        ):
            conversation.complete(text)
        environments.step(made[:2])
        environments.close(made[:1])
        assert len(module.closed) == 1
        if raised is RewardError:
            environments.step(made[1:])  # one of which fails
        raise KeyboardInterrupt
    assert sorted(map(id, module.closed)) == sorted(map(id, module.opened))


def test_environment_made_too_late_is_closed(counted):
    environments, module = counted(timeout=0.1)
    init = environments._class.__init__

    def late(self):
        time.sleep(0.3)
        init(self)

    environments._class.__init__ = late
    with pytest.raises(RewardError, match="reset took longer than task.timeout=0.1 s"):
        environments.prompts(*records(1))
    deadline = time.monotonic() + 5
    while not module.closed and time.monotonic() < deadline:
        time.sleep(0.02)
    assert module.closed == module.opened


def test_close_that_fails_is_a_warning(own, opened):
    name = own()
    with open(name.partition(":")[0], "a") as file:
        file.write("\n    def close(self):\n        1 / 0\n")
    environments, made = opened(name)
    with pytest.warns(UserWarning, match=r"close raised .* possibly left open by"):
        environments.close(made)
    environments.close(made)  # which are closed


def test_failed_start_can_be_left_out(counted):
    environments, module = counted(on_error="mask")
    rows, where = records(3)
    rows[1]["fails"] = True
    with (
        pytest.warns(
            UserWarning, match="no container; conversations left out because of fai"
        ),
        environments.opened(rows, where) as made,
    ):
        for conversation in made:
            conversation.complete("end")
        turns = environments.step(made)
    assert [math.isnan(turn.reward) for turn in turns] == [False, True, False]
    assert all(turn.done for turn in turns)
    assert set(module.opened) == set(module.closed)


# --------------------------------------------------------------- other signatures


ASYNC = """
import asyncio
gate = asyncio.Semaphore(1)
loops, closed = set(), []

class Own:
    async def reset(self, record):
        async with gate:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
        return "a", {"seed": 3}

    async def step(self, said):
        async with gate:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(60 if said[-1] == "late" else 0)
        return "b", 0.5, said[-1] == "won", said[-1] == "over", {"info": 1}

    async def close(self):
        closed.append(asyncio.get_running_loop())
"""


def test_async_methods_and_the_values_of_gymnasium(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(ASYNC)
    environments = Environments(f"{path}:Own", timeout=5)
    module = sys.modules[environments._class.__module__]
    with environments.opened(*records(3)) as made:
        for conversation, text in zip(made, ("on", "won", "over"), strict=True):
            assert conversation.prompt == "a"
            conversation.complete(text)
        turns = environments.step(made)
    assert turns == [Turn("b", 0.5, done) for done in (False, True, True)]
    with environments.opened(*records(1)) as (one,):
        environments._timeout = 0.3
        one.complete("late")
        with pytest.raises(RewardError, match="step took longer than task.timeout"):
            environments.step([one])
    assert {*module.closed} == module.loops and len(module.closed) == 4
    assert len(module.loops) == 1  # of the run
    event_loop.close()
