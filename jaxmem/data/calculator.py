"""A shipped environment: sums that a model solves with a calculator."""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

_CALL = re.compile(r"\[([0-9+\-*/(). ]{1,64})\]")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class Calculator:
    """Answers "[12*34]" with its value, and rewards a right last line.

    A record has `prompt`, a string such as "12*34=", and `answer`. The model may ask
    once or several times; a completion without brackets is its answer, and ends the
    conversation: 1 if it is the record's `answer`, but for outer white space, else 0.
    A question that is no arithmetic is answered by "?".

    >>> calculator = Calculator()
    >>> calculator.reset({"prompt": "12*34=", "answer": "408"})
    '12*34='
    >>> calculator.step(["12*34=", "[12*34]"])
    ('408=', 0.0, False)
    >>> calculator.step(["12*34=", "[12*34]", "408=", "408"])
    ('', 1.0, True)
    """

    def reset(self, record: dict[str, Any]) -> str:
        """Return the prompt."""
        self._answer = str(record["answer"]).strip()
        return record["prompt"]

    def step(self, said: list[str]) -> tuple[str, float, bool]:
        """Compute what is asked, or grade the answer."""
        call = _CALL.search(said[-1])
        if call is None:
            return "", float(said[-1].strip() == self._answer), True
        return f"{_value(call[1])}=", 0.0, False


def _value(text: str) -> str:
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return "?"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("no arithmetic")
