"""Environments: their answers, and every way in which one can fail."""

import time

import pytest

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


def opened(name, count=2, **options):
    environments = Environments(name, **options)
    where = [f"p.jsonl:{i + 1}" for i in range(count)]
    return environments, environments.open([RECORD] * count, where)


@pytest.mark.parametrize(
    ("question", "value"),
    [
        ("12*34", "408"), ("(1+2)*-3", "-9"), ("7/2", "3.5"), ("7//2", "3"),
        ("1/0", "?"), ("2**9", "?"), ("1+", "?"), ("9" * 60, "9" * 60),
    ],
)  # fmt: skip
def test_the_calculator(question, value):
    calculator = Calculator()
    assert calculator.reset(RECORD) == "12*34="
    assert calculator.step(["12*34=", f"[{question}]"]) == (f"{value}=", 0.0, False)
    assert calculator.step(["12*34=", " 408\n"]) == ("", 1.0, True)
    assert calculator.step(["12*34=", "409"]) == ("", 0.0, True)


def test_conversations_of_strings():
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


def test_conversations_of_messages(own):
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


def test_every_conversation_has_an_object_and_a_record_of_its_own(own):
    name = own(
        "record['seen'] = self.seen = []; return 'a'",
        "self.seen.append(1); return str(len(self.seen)), 0, False",
    )
    environments, made = opened(name, 3)
    for _ in range(2):
        turns = environments.step(made)
    assert [turn.reply for turn in turns] == ["2"] * 3 and "seen" not in RECORD


def test_slow_ones_wait_together(own):
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
    ("return 'b', 'high', True", "step gave the reward 'high', which is no finite num"),
    ("return 'b', float('nan'), True", "step gave the reward nan, which is no finite"),
    ("return 'b', -2e18, True",
     r"step gave the reward -2e\+18; advantages .* for rewards of at most 1e\+18"),
    ("import numpy; return 'b', 1, numpy.ones(2)",
     r"step returned a tuple whose done must be True or False, got array\(\[1"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "message"), FAILURES)
def test_an_environment_that_fails_is_named_or_ends(step, message, own):
    name = own(step=step)
    environments, made = opened(name, timeout=0.5)
    with pytest.raises(RewardError, match=r"^environment .*:Own \(p.jsonl:1\): "
                       + message) as raised:  # fmt: skip
        environments.step(made)
    assert "\n" not in str(raised.value)
    environments, made = opened(name, timeout=0.5, on_error="end")
    with pytest.warns(UserWarning, match=rf"^environment .* {message}"):
        assert environments.step(made) == [Turn("", 0.0, True)] * 2


def test_conversations_that_failures_end_are_counted(own):
    name = own(step="return ('b', 0, True) if said[-1] == 'right' else 1 / 0")
    environments, conversations = opened(name, 12, on_error="end")
    with pytest.warns(UserWarning) as caught:
        environments.step(conversations)
    assert [str(warning.message).partition("; ")[2] for warning in caught] == [
        f"conversations ended by such failures so far: {n}" for n in (1, 10)
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
        ("return ''", "reset returned '', neither a string nor a list of messages"),
        ("return [3]", r"reset returned \[3\], neither a string nor a list of mess"),
        ("return None", "reset returned None, neither"),
        ("import numpy; return numpy.arange(2)",
         r"p.jsonl:1\): reset returned array\(\[0, 1\]\), neither a string nor a list"),
    ],
)  # fmt: skip
def test_a_beginning_that_is_none(reset, message, own):
    for on_error in ("raise", "end"):
        with pytest.raises(RewardError, match=message):
            opened(own(reset), on_error=on_error)


def test_classes_that_are_none(own, tmp_path):
    with pytest.raises(RewardError, match="task.environment must be one of 'calcul"):
        Environments("calculater")
    with pytest.raises(RewardError, match="task.environment: cannot import absent.py"):
        Environments("absent.py:Own")
    with pytest.raises(RewardError, match="task.environment: .* has no method 'reset'"):
        Environments("pathlib:Path")
