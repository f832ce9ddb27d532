"""Shipped reward functions, which check a completion against a column of the data.

Each has the signature of `jaxmem.data.rewards`. The column is `answer`, `pattern`,
`schema` or `tests`. If it is null, or the data have no such column, the reward is None:
records of several kinds share a run.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.base import imports, messages
from jaxmem.data.math_answers import MathAnswers
from jaxmem.data.text_numbers import NUMBER, last_number
from jaxmem.data.unit_tests import UnitTests, text_of

_MARKED = re.compile(rf"\s*+(?:\$\s*+)?({NUMBER.pattern})")  # after "####"


def _compared(
    compare: Callable[[Any, Any], float],
    completions: Sequence[Any],
    column: Sequence[Any] | None,
) -> list[float | None]:
    """Rewards of completions by their entries of a column; None for null."""
    entries = [None] * len(completions) if column is None else column
    return [
        None if entry is None else compare(completion, entry)
        for completion, entry in zip(completions, entries, strict=True)
    ]


def exact(prompts, completions, answer=None, **_) -> list[float | None]:
    """1 if the completion equals the column `answer`, ignoring outer white space."""

    def compare(completion: Any, expected: Any) -> float:
        return float(text_of(completion).strip() == str(expected).strip())

    return _compared(compare, completions, answer)


def prefix(prompts, completions, answer=None, **_) -> list[float | None]:
    """Fraction of the column `answer` that the completion starts with."""

    def compare(completion: Any, expected: Any) -> float:
        return _shared(text_of(completion).strip(), str(expected).strip())

    return _compared(compare, completions, answer)


def _shared(text: str, answer: str) -> float:
    if not answer:
        return float(not text)
    different = (
        i for i, (x, y) in enumerate(zip(text, answer, strict=False)) if x != y
    )
    return next(different, min(len(text), len(answer))) / len(answer)


def regex(prompts, completions, pattern=None, **_) -> list[float | None]:
    """1 if the column `pattern`, a regular expression, matches in the completion."""

    def compare(completion: Any, expected: str) -> float:
        return float(re.search(expected, text_of(completion), re.DOTALL) is not None)

    return _compared(compare, completions, pattern)


def number(prompts, completions, answer=None, **_) -> list[float | None]:
    """1 if the last number of the completion equals the last number of `answer`.

    Raises:
        ValueError: an answer has no number.
    """

    def compare(completion: Any, expected: Any) -> float:
        return _equal(_last(text_of(completion)), _last(str(expected)), expected)

    return _compared(compare, completions, answer)


def gsm8k(prompts, completions, answer=None, **_) -> list[float | None]:
    """1 if the completion's number after its last "####" equals that of `answer`.

    The column `answer` is GSM8K's own, whose last line is "#### 72", or the number
    alone. A completion without "####" is wrong, with any numbers.

    Raises:
        ValueError: an answer has no number.

    Reference: Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021,
    arXiv:2110.14168.
    """

    def compare(completion: Any, expected: Any) -> float:
        read = _marked if "####" in str(expected) else _last
        return _equal(_marked(text_of(completion)), read(str(expected)), expected)

    return _compared(compare, completions, answer)


def _marked(text: str) -> float | None:
    """The number after the last "####" that has something after it."""
    texts = [after for after in text.split("####")[1:] if after.strip()]
    match = _MARKED.match(texts[-1]) if texts else None
    return float(match[1].replace(",", "")) if match else None


def _last(text: str) -> float | None:
    number = last_number(text)
    return None if number is None else float(number)


def _equal(value: float | None, expected: float | None, answer: Any) -> float:
    """1 if two numbers are equal; a ValueError if the answer has none."""
    if expected is None:
        kind = "a number, or a text with a number"
        raise ValueError(messages.must_be("the column answer", kind, answer))
    return float(value is not None and math.isclose(value, expected, rel_tol=1e-9))


def json_schema(prompts, completions, schema=None, **_) -> list[float | None]:
    """1 if the completion is JSON that the column `schema` allows.

    A schema is an object or its JSON text. The completion may stand in one fence of
    three backquotes, and nothing else may be around it. References to other documents
    are not followed.

    Raises:
        ImportError: jsonschema is not installed.
        ValueError: a schema is none.
    """
    try:
        import referencing
        from jsonschema import SchemaError, validators
    except ImportError as error:
        raise ImportError(
            "task.reward='json_schema' needs jsonschema: "
            f"{imports.how_to_install('rewards')}"
        ) from error

    def compare(completion: Any, schema: Any) -> float:
        schema = _schema(schema)
        kind: Any = validators.validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"schema: {error.message}") from error
        try:
            value = json.loads(_unfenced(completion), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return 0.0
        return float(kind(schema, registry=referencing.Registry()).is_valid(value))

    return _compared(compare, completions, schema)


def _schema(entry: Any) -> dict[str, Any] | bool:
    try:
        schema = json.loads(entry) if isinstance(entry, str) else entry
    except ValueError:
        schema = None
    if not isinstance(schema, (dict, bool)):
        expected = "an object, or an object as JSON text"
        raise ValueError(messages.must_be("the column schema", expected, entry))
    return schema


def _unfenced(completion: Any) -> str:
    text = text_of(completion).strip()
    fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text, re.DOTALL)
    return fenced[1] if fenced else text


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def length(prompts, completions, completion_ids, max_new_tokens, **_) -> list[float]:
    """Minus the fraction of `sampling.max_new_tokens` that the completion takes."""
    pairs = zip(completion_ids, max_new_tokens, strict=True)
    return [-len(ids) / most for ids, most in pairs]


def overlong(prompts, completions, completion_ids, max_new_tokens, **_) -> list[float]:
    """DAPO's soft punishment of long completions, from 0 to -1 over the last fifth.

        out = -clip((n - 0.8 L) / 0.2 L, 0, 1)

    n is the number of sampled tokens, and L is `sampling.max_new_tokens`.

    Reference: Yu et al., 2025, arXiv:2503.14476 (DAPO), whose L_max is 20,480 tokens
    and whose L_cache, the fifth, is 4,096.
    """
    pairs = zip(completion_ids, max_new_tokens, strict=True)
    return [-min(max(5 * len(ids) / most - 4, 0.0), 1.0) for ids, most in pairs]


SHIPPED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (exact, prefix, regex, number, gsm8k, json_schema, length, overlong)
} | {"unit_tests": UnitTests(), "math": MathAnswers()}
