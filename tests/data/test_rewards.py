"""Reward functions: shipped ones, users' own, and every way that one can fail."""

import asyncio
import io
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from jaxmem.base.user_code import UserCodeError
from jaxmem.data.rewards import RewardArguments, RewardError, Scorer, TrainerState
from jaxmem.data.tasks import TaskConfig

CHAT = [{"role": "assistant", "content": "so 4"}]


def questions(completions, **columns):
    count = len(completions)
    return RewardArguments(
        [f"p.jsonl:{i + 1}" for i in range(count)],
        [f"prompt {i}" for i in range(count)],
        completions,
        columns,
    )


@pytest.fixture
def own(tmp_path):
    """Writes a file of a function `score` and names it."""

    def write(body):
        path = tmp_path / "rewards.py"
        path.write_text(body)
        return f"{path}:score"

    return write


@pytest.mark.parametrize(
    ("name", "completions", "columns", "expected"),
    [
        ("exact", [" 4\n", "5", CHAT], {"answer": ["4", "4", "so 4"]}, [1, 0, 1]),
        ("exact", ["4"], {"answer": [4]}, [1]),
        ("prefix", ["12", "1x", "", "123"], {"answer": ["12"] * 4}, [1, 0.5, 0, 1]),
        ("prefix", ["", "a"], {"answer": ["", ""]}, [1, 0]),
        ("regex", ["a 4", CHAT], {"pattern": ["^4", r"\d$"]}, [0, 1]),
        ("number", ["3 or 4", "4.0", "1,000", "x"],
         {"answer": ["#### 4", 4, "1e3", "4"]}, [1, 1, 1, 0]),
        ("number", ["1,2,3", "1,2,3", "1,234,567.5", "1,2345", "12,34"],
         {"answer": ["123", "3", "1234567.5", "2345", "34"]}, [0, 1, 1, 1, 1]),
        ("length", ["a", "b"],
         {"completion_ids": [[1], [1, 2, 3]], "max_new_tokens": [4, 4]},
         [-0.25, -0.75]),
    ],
)  # fmt: skip
def test_shipped_rewards(name, completions, columns, expected):
    made = Scorer([name])(questions(completions, **columns))
    np.testing.assert_allclose(made.total, expected)


def test_functions_of_trl_s_signature_run_unchanged(own):
    name = own(
        "def score(completions, answer, **kwargs):\n"
        "    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer)]\n"
    )
    made = Scorer([name])(questions(["4", "5"], answer=["4", "4"], level=[1, 2]))
    assert made.total.tolist() == [1, 0]


def test_weights_and_functions_without_an_opinion(own):
    name = own("def score(prompts, completions, **_):\n    return [None, 2, None, 1]\n")
    made = Scorer(["exact", name], [1.0, 0.25])(
        questions(["4", "5", "4", "4"], answer=["4"] * 4)
    )
    assert made.total.tolist() == [1, 0.5, 1, 1.25]
    np.testing.assert_array_equal(made.parts[name], [np.nan, 2, np.nan, 1])


def test_async_functions_are_awaited_together():
    together = []

    async def slow(prompts, completions, **_):
        together.append("start")
        await asyncio.sleep(0.01)
        together.append("end")
        return [1.0] * len(prompts)

    scorer = Scorer(["exact", "prefix"])
    scorer._functions = {"a": slow, "b": slow}
    assert scorer(questions(["x", "y"])).total.tolist() == [2, 2]
    assert together == ["start", "start", "end", "end"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1]", "prompt 'prompt 0' (p.jsonl:1): returned 1 rewards for 2 comp"),
        ("return 1.0", "returned 1.0, not a list of 2 rewards"),
        (
            "return [0, float('nan')]",
            "prompt 'prompt 1' (p.jsonl:2): returned nan, whi",
        ),
        (
            "return [0, 'high']",
            "(p.jsonl:2): returned 'high', which is not a finite numb",
        ),
        (
            "return [None] * 2",
            "prompt 'prompt 0' (p.jsonl:1): returned no reward (None); task.unrewar",
        ),
        (
            "return [1 / (c != 'b') for c in completions]",
            "prompt 'prompt 1' (p.jsonl:2): raised (line 3) ZeroDivisionError: ",
        ),
        (
            "import time; time.sleep(9)",
            "(p.jsonl:1): took longer than task.timeout=0.2",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_failing_reward_is_named_with_its_prompt(kind, body, message, own):
    if kind == "async def":
        body = body.replace(
            "import time; time.sleep(9)", "import asyncio; await asyncio.sleep(9)"
        )
    name = own(f"\n{kind} score(prompts, completions, **_):\n    {body}\n")
    start = time.monotonic()
    with pytest.raises(RewardError) as raised:
        Scorer([name], timeout=0.2, unrewarded="raise")(questions(["a", "b"]))
    said = str(raised.value)
    assert said.startswith(f"reward {name}, prompt ") and message in said
    assert "\n" not in said and time.monotonic() - start < 5


def test_uncallable_reward_shows_no_internal_line(own):
    """Also where its file has the name of the module that calls it."""
    name = own("def score(answers):\n    return []\n")
    assert name.endswith("rewards.py:score")
    with pytest.raises(RewardError, match=r"\): raised TypeError: score\(\) got an un"):
        Scorer([name])(questions(["a"]))


def test_function_of_a_module_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "judges.py").write_text("def score(**_):\n\n    return [1 / 0]\n")
    with pytest.raises(RewardError, match=r"\): raised \(line 3\) ZeroDivisionError: "):
        Scorer(["judges:score"])(questions(["a"]))


def test_rewards_without_timeout_in_main_thread(own):
    name = own(
        "import threading\ndef score(completions, **_):\n"
        "    return [threading.current_thread() is threading.main_thread()]\n"
    )
    assert Scorer([name])(questions(["a"])).total.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exat", "task.reward must be one of 'exact', 'prefix', .*, got 'exat'"),
        ("absent.py:score", "task.reward: cannot import absent.py: no such file"),
        ("json:score", "task.reward: json has no 'score'"),
    ],
)
def test_missing_reward_function_is_named(name, message):
    with pytest.raises(UserCodeError, match=message):
        Scorer([name])


# -------------------------------------------- guests that behave badly

BODIES = {
    "sys.exit(0)": "raised (line 4) SystemExit: 0",
    "raise BaseException('enough')": "raised (line 4) BaseException: enough",
    "raise KeyboardInterrupt": "raised (line 4) KeyboardInterrupt: KeyboardInterrupt",
    "raise GeneratorExit": "raised (line 4) GeneratorExit: GeneratorExit",
    r"raise ValueError('\x1b[2J\x1b[31mred\r')": (
        r"raised (line 4) ValueError: \x1b[2J\x1b[31mred"
    ),
    "os.chdir('/')": "changed the working directory; use absolute paths instead",
    "sys.stdout.close()": "closed sys.stdout",
    "sys.stderr.close()": "closed sys.stderr",
    "return [1e308]": (
        "returned 1e+308; advantages are computed in float32, for rewards of at most "
        "1e+18"
    ),
    "return [-3e38]": (
        "returned -3e+38; advantages are computed in float32, for rewards of at most "
        "1e+18"
    ),
}
KINDS = {"in the main thread": None, "in a thread": 30.0, "async": None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BODIES)
def test_whatever_a_function_does_is_an_error_of_it(kind, body, own, capfd):
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # as in a run
    streams, directory = (sys.stdout, sys.stderr), os.getcwd()
    is_async = "async " if kind == "async" else ""
    name = own(
        f"import os, sys\n\n{is_async}def score(**_):\n    {body}\n    return [1]\n"
    )
    try:
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        with pytest.raises(RewardError) as caught:
            Scorer([name], timeout=KINDS[kind])(questions(["x"]))
        assert not sys.stdout.closed and not sys.stderr.closed
    finally:
        sys.stdout, sys.stderr = streams
        signal.signal(signal.SIGINT, handler)
    assert str(caught.value) == (
        f"reward {name}, prompt 'prompt 0' (p.jsonl:1): {BODIES[body]}"
    )
    assert os.getcwd() == directory
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_where_nothing_defers_it_is_the_user_s(own):
    name = own("def score(**_):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        Scorer([name])(questions(["x"]))


def test_weights_making_rewards_infinite_are_refused(own):
    name = own("def score(**_):\n    return [1e18]\n")
    assert Scorer([name])(questions(["x"])).total == np.float32(1e18)
    with pytest.raises(
        RewardError, match=r"gave, with task.reward_weights, -4e\+18; adv"
    ):
        Scorer([name], weights=[-4.0])(questions(["x"]))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_search_for_failing_prompt_has_timeout(kind, own):
    """The function raises for all prompts together, and hangs for one alone."""
    sleep = "await asyncio.sleep(60)" if kind == "async def" else "time.sleep(60)"
    name = own(
        f"import asyncio, time\n{kind} score(completions, **_):\n"
        f"    if len(completions) == 1:\n        {sleep}\n    return [1 / 0]\n"
    )
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"raised \(line 5\) ZeroDivisionError: div"):
        Scorer([name], timeout=0.2)(questions(["a", "b"]))
    assert time.monotonic() - start < 10


def test_function_that_is_named_twice_is_refused():
    names = "exact", "number", "exact"
    with pytest.raises(ValueError, match=r"TaskConfig.reward must be functions that"):
        TaskConfig(source="p.jsonl", reward=names)


@pytest.mark.parametrize("timeout", [None, 9.0])
@pytest.mark.parametrize("form", ["def", "async def"])
def test_timeout_of_the_function_s_own_is_its_error(timeout, form, own):
    name = own(f"{form} score(**_):\n    raise TimeoutError('slow server')\n")
    with pytest.raises(RewardError, match=r"raised \(line 2\) TimeoutError: slow serv"):
        Scorer([name], timeout=timeout)(questions(["x"]))


# ------------------------------------------------- the event loop of async functions

JUDGE = """
import asyncio
gate = asyncio.Semaphore(1)

async def one(completion):
    async with gate:
        await asyncio.sleep(0)
        return len(completion)

async def score(completions, **_):
    return await asyncio.gather(*map(one, completions))
"""


def test_async_rewards_keep_their_event_loop(own):
    scorer = Scorer([own(JUDGE)])
    for _ in range(3):
        assert scorer(questions(["a", "bc"])).total.tolist() == [1, 2]


def test_async_functions_are_awaited_where_a_loop_runs(own):
    async def notebook():
        return scorer(questions(["a", "bc"])).total.tolist()

    scorer = Scorer([own(JUDGE)])
    assert asyncio.run(notebook()) == asyncio.run(notebook()) == [1, 2]


def test_search_for_the_prompt_uses_the_same_loop(tmp_path, monkeypatch):
    (tmp_path / "looped.py").write_text(
        "import asyncio\nloops = set()\nasync def score(completions, **_):\n"
        "    loops.add(asyncio.get_running_loop())\n"
        "    return [1 / (c != 'x') for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    scorer = Scorer(["looped:score"])
    scorer(questions(["a", "b"]))
    with pytest.raises(RewardError, match=r"prompt 'prompt 1' \(p.jsonl:2\): raised"):
        scorer(questions(["a", "x"]))
    assert len(sys.modules["looped"].loops) == 1


def test_plain_functions_run_beside_async_ones():
    """The async function ends only after the plain one, which needs it to run."""
    started, released = threading.Event(), threading.Event()

    async def judge(completions, **_):
        started.set()
        while not released.is_set():
            await asyncio.sleep(0.001)
        return [1.0]

    def plain(completions, **_):
        assert started.wait(9)
        released.set()
        return [2.0]

    scorer = Scorer(["exact", "prefix"], timeout=20.0)
    scorer._functions = {"judge": judge, "plain": plain}
    made = scorer(questions(["x"]))
    assert list(made.parts) == ["judge", "plain"] and made.total.tolist() == [3]


# ------------------------------------------------- completions without a reward


def test_unrewarded_completion_has_no_total(own):
    made = Scorer([own("def score(**_):\n    return [None, 2]\n")])(
        questions(["a", "b"])
    )
    assert made.total.dtype == np.float32 and not made.failed.any()
    np.testing.assert_array_equal(made.total, [np.nan, 2])


def test_nan_of_a_function_is_an_error_of_it(own):
    name = own("def score(**_):\n    return [float('nan'), 2]\n")
    scorer = Scorer([name], on_error="mask")
    with pytest.raises(RewardError, match="returned nan, which is not a finite number"):
        scorer(questions(["a", "b"]))


@pytest.mark.parametrize("timeout", [None, 9.0])
@pytest.mark.parametrize("form", ["def", "async def"])
def test_failure_is_left_out_and_counted(form, timeout, own):
    """Also where another function rewards the completion: its sum would be less."""
    name = own(
        f"{form} score(completions, **_):\n"
        "    return [None if c == 'n' else 1 / (c != 'x') for c in completions]\n"
    )
    scorer = Scorer(["exact", name], timeout=timeout, on_error="mask")
    asked = questions(["a", "x", "n", "x"], answer=["a", "x", "n", "y"])
    with pytest.warns(UserWarning, match=r"prompt 1' .*ZeroDivisionError.* so far: 1"):
        made = scorer(asked)
    np.testing.assert_array_equal(made.total, [2, np.nan, 1, np.nan])
    np.testing.assert_array_equal(made.parts[name], [1, np.nan, np.nan, np.nan])
    assert made.failed.tolist() == [False, True, False, True]
    for _ in range(3):
        scorer(asked)  # no warning before the tenth
    with pytest.warns(UserWarning, match="so far: 10"):
        scorer(asked)


@pytest.mark.parametrize("form", ["def", "async def"])
def test_call_that_takes_too_long_is_left_out(form, own):
    sleep = "await asyncio.sleep(60)" if form == "async def" else "time.sleep(60)"
    name = own(
        f"import asyncio, time\n{form} score(completions, **_):\n"
        f"    if 'slow' in completions: {sleep}\n    return [1.0] * len(completions)\n"
    )
    scorer = Scorer([name], timeout=0.05, on_error="mask")
    with pytest.warns(UserWarning, match=r"took longer than task.timeout=0.05 s; "):
        made = scorer(questions(["a", "slow"]))
    assert made.failed.all() and np.isnan(made.total).all()
    assert scorer(questions(["a", "b"])).total.tolist() == [1, 1]


@pytest.mark.parametrize("form", ["def", "async def"])
def test_a_completion_that_takes_too_long_alone_is_the_last_one_asked(form, own):
    """Otherwise a function that hangs would take the timeout of each completion."""
    sleep = "await asyncio.sleep(60)" if form == "async def" else "time.sleep(60)"
    name = own(
        f"import asyncio, time\n{form} score(completions, **_):\n"
        "    if len(completions) > 1: raise OSError('too many')\n"
        f"    if 'slow' in completions: {sleep}\n    return [1]\n"
    )
    scorer = Scorer([name], timeout=0.2, on_error="mask")
    with pytest.warns(UserWarning, match="prompt 1' .* took longer .* so far: 3"):
        made = scorer(questions(["a", "slow", "b", "c"]))
    assert made.failed.tolist() == [False, True, True, True]
    np.testing.assert_array_equal(made.total, [1, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("body", ["sys.exit(0)", "os.chdir('/')", "return [1, 2, 3]"])
def test_other_errors_than_failures_stay_errors(body, own):
    name = own(f"import os, sys\ndef score(**_):\n    {body}\n    return [1]\n")
    with pytest.raises(RewardError):
        Scorer([name], on_error="mask")(questions(["x"]))


@pytest.mark.parametrize("body", ["return [None]", "raise OSError('no judge')"])
@pytest.mark.filterwarnings("ignore:reward ")
def test_three_calls_without_any_reward_are_an_error(body, own):
    name = own(
        "def score(completions, **_):\n    if completions == ['good']: return [1]\n"
        f"    {body}\n"
    )
    scorer = Scorer([name], on_error="mask")
    for completion in ("bad", "bad", "good", "bad", "bad"):
        scorer(questions([completion]))
    with pytest.raises(RewardError, match=f"^reward {name}.*no completion of the last"):
        scorer(questions(["bad"]))


# ------------------------------------------------------- arguments and returned arrays


@pytest.mark.parametrize(
    "kind", ["np.array", "jnp.array", "torch.tensor", "torch.nn.Parameter", "tuple"]
)
def test_arrays_are_taken_as_rewards(kind, own):
    modules = {"np": "numpy as np", "jnp": "jax.numpy as jnp", "torch": "torch"}
    module = modules.get(kind.partition(".")[0], "os")
    if module == "torch":
        pytest.importorskip("torch")
    wrapped = "torch.tensor([0.5, 2.0])" if "Parameter" in kind else "[0.5, 2.0]"
    name = own(f"import {module}\ndef score(**_):\n    return {kind}({wrapped})\n")
    assert Scorer([name])(questions(["a", "b"])).total.tolist() == [0.5, 2]
    with pytest.raises(RewardError, match="returned 2 rewards for 3 completions"):
        Scorer([name])(questions(["a", "b", "c"]))


@pytest.mark.parametrize(
    "body", ["jnp.array(1.0)", "b'ab'", "jnp.ones((2, 1))", "jnp.array([1, jnp.nan])"]
)
def test_arrays_of_other_shapes_are_refused(body, own):
    name = own(f"import jax.numpy as jnp\ndef score(**_):\n    return {body}\n")
    with pytest.raises(
        RewardError, match=r"not a list of 2 rewards|not a finite number"
    ):
        Scorer([name])(questions(["a", "b"]))


@pytest.mark.parametrize("form", ["def", "async def"])
def test_trainer_state_for_rewards_that_name_it(form, own):
    name = own(
        f"{form} score(completions, trainer_state, **columns):\n"
        "    assert all(isinstance(c, list) for c in columns.values())\n"
        "    return [trainer_state.global_step / trainer_state.max_steps]\n"
    )
    other = "def score(completions, **columns):\n    return [len(columns)]\n"
    asked = questions(["a"])._replace(trainer_state=TrainerState(3, 4))
    assert Scorer([name])(asked).total.tolist() == [0.75]
    assert Scorer([own(other)])(asked).total.tolist() == [1]  # prompts alone


def test_check_names_a_column_that_a_function_requires(own):
    name = own("def score(completions, level, hint=None, **_):\n    return [1]\n")
    scorer = Scorer([name, "exact"])
    scorer.check({"p.jsonl": [{"level": None, "answer": "4"}]})
    with pytest.raises(RewardError, match=r"score requires the argument 'level', whi"):
        scorer.check({"p.jsonl": [{"answer": "4"}]})


def test_check_leaves_functions_that_wrap_others_alone(own):
    name = own(
        "import functools\ndef inner(completions, judge): return [judge]\n"
        "@functools.wraps(inner)\ndef score(**_): return inner(_, 1)\n"
    )
    Scorer([name]).check({"p.jsonl": [{}]})


def test_check_names_a_column_without_any_value():
    scorer = Scorer(["gsm8k", "overlong"])
    scorer.check({"a.jsonl": [{"answer": None}, {"answer": "4"}]})
    for records in ([{"answer": None}], [{"answers": "4"}]):
        with pytest.raises(RewardError, match="gsm8k reads the column 'answer', which"):
            scorer.check({"a.jsonl": records})


def test_check_names_a_source_that_no_function_rewards(own):
    math, code, none = {"answer": "4"}, {"tests": "x"}, {"answer": None, "test": "x"}
    scorer = Scorer(["gsm8k", "unit_tests"])
    scorer.check({"math.jsonl": [math, none], "code.jsonl": [code]})
    entries = {"all.jsonl": [math, code], "code.jsonl": [none]}
    with pytest.raises(RewardError, match=r"no record of code.jsonl .*answer, tests"):
        scorer.check(entries)
    Scorer(["gsm8k", "unit_tests", "length"]).check(entries)  # which rewards all


def test_lines_say_how_programs_are_confined():
    assert Scorer(["exact"]).lines() == []
    (line,) = Scorer(["exact", "unit_tests"]).lines()
    assert line.startswith("unit_tests: ")


@pytest.mark.parametrize("tests", [5, [], ["assert 1", " "], ["assert 1", 5]])
def test_check_names_tests_that_cannot_run(tests):
    entries = {
        "code.jsonl": [{"tests": ["assert 1"]}, {"tests": None}, {"tests": tests}]
    }
    with pytest.raises(RewardError) as caught:
        Scorer(["unit_tests"]).check(entries)
    assert str(caught.value).startswith(
        f"task.source: a record of code.jsonl has the tests {tests!r}: tests must be"
    )
