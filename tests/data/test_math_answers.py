"""Answers that math-verify compares: boxes, numbers, limits, and what is counted."""

import importlib.util
import time

import numpy as np
import pytest

from jaxmem.base import user_code
from jaxmem.data import math_answers
from jaxmem.data.math_answers import MathAnswers
from jaxmem.data.rewards import RewardArguments, RewardError, Scorer
from jaxmem.data.verifiers import SHIPPED

# Imported by the tests alone: it brings SymPy.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="it comes with extra math"
)
EQUAL = [
    (r"#### \boxed{72}", "72"),
    (r"So $x = \boxed{\frac{1}{2}}$.", 0.5),
    (r"\boxed{\frac{\sqrt{3}}{3}}", r"$\frac{1}{\sqrt{3}}$"),
    (r"\boxed{(2, 1)}", r"\left( 2, 1 \right)"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"\boxed{2}, perhaps \boxed{3", "2"),  # cut off
    (r"\boxed{\boxed{2}}", "2"),
    (r"\boxed{$5$}", 5),
    ("it is 1,234", "1234"),
    ("72", "48/2 = <<48/2=24>>24\n#### 72"),
    ("72", r"and therefore $\boxed{72}$."),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    ([{"role": "assistant", "content": r"\boxed{7}"}], "7"),
]
WRONG = [(r"\boxed{(1, 2)}", "(2, 1)"), ("3 or 4", "3"), (r"\boxed{6} not 5", "5")]
UNREADABLE = [("I give up", "5"), (r"\boxed{)(}", "5"), (r"\boxed{}, or 5", "5")]


def test_answers_are_compared_as_mathematics():
    cases = [*EQUAL, *WRONG, *UNREADABLE]
    column = [answer for _, answer in cases]
    out = SHIPPED["math"](["p"] * len(cases), [text for text, _ in cases], column)
    assert out == [1.0] * len(EQUAL) + [0.0] * (len(WRONG) + len(UNREADABLE))
    assert out.unparsed == [False] * (len(EQUAL) + len(WRONG)) + [True] * 3


def test_null_and_absent_answers_give_no_reward():
    out = MathAnswers()(["p"] * 2, ["5", "6"], answer=[None, None])
    assert out == [None, None] and out.unparsed == [False, False]
    assert MathAnswers()(["p"], ["5"]) == [None]


@pytest.mark.full
def test_late_comparison_is_unparsed_and_others_go_on():
    """Python cannot interrupt the operation, and a signal's handler would not run."""
    reward = MathAnswers(seconds=1.0)
    start = time.monotonic()
    texts = [r"\boxed{10^{10^{10^{10}}} - 1}", r"\boxed{5}"]
    out = reward(["p"] * 2, texts, answer=["5", "5"])
    assert out == [0.0, 1.0] and out.unparsed == [True, False]
    assert time.monotonic() - start < 60


def test_reward_with_timeout_runs_in_a_thread():
    scorer = Scorer(["math"], timeout=60.0)
    arguments = RewardArguments(["a", "b"], ["p"] * 2, ["5", "?"], {"answer": [5, 5]})
    scored = scorer(arguments)
    assert scored.total.tolist() == [1, 0]
    assert scored.unparsed.tolist() == [False, True]
    assert Scorer(["number"])(arguments).unparsed is None


@pytest.mark.parametrize("answer", ["", r"\frac{1}{", ")("])
def test_right_answer_that_cannot_be_read_is_named(answer):
    scorer = Scorer(["math"])
    arguments = RewardArguments(
        ["a.jsonl:1", "a.jsonl:2"], ["p", "q"], ["5", "5"], {"answer": ["5", answer]}
    )
    said = r"reward math, prompt 'q' \(a.jsonl:2\): raised.* the column answer must be "
    with pytest.raises(RewardError, match=said):
        scorer(arguments)
    masked = Scorer(["math"], on_error="mask")
    with pytest.warns(UserWarning, match="the column answer must be mathematics"):
        scored = masked(arguments)
    np.testing.assert_array_equal(scored.total, [1, np.nan])
    assert scored.unparsed.tolist() == [False, False]


def test_missing_library_is_named_before_the_first_step(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"'math' needs math_verify, .*\[math\]"):
        Scorer(["math"]).check({"a.jsonl": [{"answer": 5}]})


def test_box_of_many_braces_is_found_in_linear_time():
    assert math_answers._last_boxed("\\boxed{" * 10**5 + "5}") == "5"
    assert math_answers._last_boxed(r"} \{ \boxed{a \} b} }") == r"a \} b"


def test_math_is_a_shipped_name():
    assert user_code.load("math", "task.reward", SHIPPED) is SHIPPED["math"]
