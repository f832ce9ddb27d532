r"""Answers to mathematical problems, compared as mathematics by math-verify.

    text -> last \boxed{}, else last number -> math-verify, in a process -> 1 or 0

math-verify measures time by signals, which reach only the main thread of a process, and
an operation on huge integers can not be interrupted at all. Processes of their own
therefore compare; one that takes too long ends, and another one takes its place.
"""

import atexit
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import imports, messages
from jaxmem.data import math_grader
from jaxmem.data.text_numbers import last_number
from jaxmem.data.unit_tests import text_of

# Boxes and braces; a character after a backslash is neither.
_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_DELIMITERS = re.compile(r"\\[()\[\]]|\\?\$")
_MOST_PROCESSES = 4
_LONGEST = 2_000  # characters of an answer


class AnswerRewards(list[float | None]):
    """Rewards of completions, and which of these have no answer that can be read.

    Attributes:
        unparsed: booleans, one for each reward.
    """

    def __init__(self, rewards: Sequence[float | None], unparsed: Sequence[bool]):
        super().__init__(rewards)
        self.unparsed = list(unparsed)


class MathAnswers:
    r"""A reward function that compares answers with the column `answer` as mathematics.

    It is 1 for an equal one. The answer of a completion is its last \boxed{}, else its
    last number. Equal is what math-verify finds equal: 0.5 and \frac{1}{2}, sets in any
    order, x = 5 and 5. The column has LaTeX, a number, or a solution, of which the last
    \boxed{} counts, or what follows the last "####". Null gives no reward.

    A completion without an answer, with one that cannot be read as mathematics, or
    whose comparison takes more than `seconds` earns 0, and `AnswerRewards.unparsed` of
    the result is True for it.

    Args:
        seconds: maximum seconds of a comparison.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: an entry of the column cannot be read as mathematics.

    >>> from jaxmem.data.math_answers import MathAnswers
    >>> completions = [r"So it is \boxed{\frac{1}{2}}.", "It is 0.25", "I give up"]
    >>> rewards = MathAnswers()(["p"] * 3, completions, answer=["0.5"] * 3)
    >>> rewards, rewards.unparsed
    ([1.0, 0.0, 0.0], [False, False, True])
    """

    def __init__(self, seconds: float = 5.0):
        self._seconds = seconds
        self._idle: list[_Grader] = []
        self._lock = threading.Lock()

    def __call__(self, prompts, completions, answer=None, **_) -> AnswerRewards:
        """Rewards of completions; see the class."""
        column = [None] * len(completions) if answer is None else answer
        pairs = [
            None if entry is None else (_expected(entry), _answer_of(completion))
            for completion, entry in zip(completions, column, strict=True)
        ]
        outcomes = self._compare_all({pair for pair in pairs if pair and pair[1]})
        rewards: list[float | None] = []
        unparsed = []
        for pair, entry in zip(pairs, column, strict=True):
            outcome = math_grader.UNREADABLE if pair is None else outcomes.get(pair)
            if outcome == math_grader.NOT_EXPECTED:
                kind = r"mathematics that math-verify reads, as in 72 or \frac{1}{2}"
                raise ValueError(messages.must_be("the column answer", kind, entry))
            rewards.append(
                None if pair is None else float(outcome == math_grader.RIGHT)
            )
            known = math_grader.RIGHT, math_grader.WRONG
            unparsed.append(pair is not None and outcome not in known)
        return AnswerRewards(rewards, unparsed)

    def check(self) -> None:
        """Raise an ImportError unless math-verify is installed."""
        imports.require("task.reward='math'", "math", "math_verify")

    def _compare_all(
        self, pairs: set[tuple[str, str]]
    ) -> dict[tuple[str, str], str | None]:
        """Outcomes of (expected, answer); None for one that took too long."""
        if not pairs:
            return {}
        self.check()
        ordered, workers = sorted(pairs), min(_MOST_PROCESSES, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as threads:
            return dict(zip(ordered, threads.map(self._compare, ordered), strict=True))

    def _compare(self, pair: tuple[str, str]) -> str | None:
        with self._lock:
            grader = self._idle.pop() if self._idle else None
        grader = grader or _Grader()
        outcome = grader.compare(*pair, self._seconds)
        if outcome is None:
            grader.close()
            return None
        with self._lock:
            self._idle.append(grader)
        return outcome


class _Grader:
    """A process of `math_grader`."""

    def __init__(self):
        # -P: modules of this directory must not take the place of others. A session of
        # its own: Ctrl-C is for the run, which ends its step first.
        program = str(Path(math_grader.__file__))
        self._process = subprocess.Popen(
            [sys.executable, "-P", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        atexit.register(self.close)
        if self._reply() is None:
            self.close()
            raise RuntimeError(
                f"task.reward='math' needs {program}, which {sys.executable} cannot "
                "run; run it to see why"
            )

    def compare(self, expected: str, answer: str, seconds: float) -> str | None:
        """The outcome of `math_grader`; None if the process has ended instead."""
        question = {"expected": expected, "answer": answer, "seconds": seconds}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended
            return None
        return self._reply()

    def _reply(self) -> str | None:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or None

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.communicate()


def _expected(entry: Any) -> str:
    """The right answer that an entry of the column has."""
    text = str(entry)
    boxed = _last_boxed(text)
    if boxed is None:
        boxed = text.rpartition("####")[2]
    return _DELIMITERS.sub("", boxed).strip()


def _answer_of(completion: Any) -> str:
    """The answer that a completion gives; empty without one."""
    text = text_of(completion)
    boxed = _last_boxed(text)
    if boxed is None:
        return last_number(text) or ""
    boxed = _DELIMITERS.sub("", boxed).strip()
    return boxed if len(boxed) <= _LONGEST else ""


def _last_boxed(text: str) -> str | None:
    r"""The content of the \boxed{} that is closed last; None without one."""
    last = None
    opened: list[int | None] = []  # starts of contents of boxes; None for other braces
    for match in _BRACES.finditer(text):
        if match[0] == "}":
            start = opened.pop() if opened else None
            last = last if start is None else text[start : match.start()]
        elif match[0] == "{" or match[1]:
            opened.append(match.end() if match[1] else None)
    return last
