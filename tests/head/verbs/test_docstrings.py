"""Docstrings of the functions: short, and every argument is named."""

import inspect
import re

import pytest

from jaxmem import head, losses

FUNCTIONS = [
    value
    for module in (head, losses)
    for value in vars(module).values()
    if inspect.isfunction(value) and value.__module__.startswith(module.__name__)
    if inspect.signature(value).parameters
]


def test_there_are_functions():
    assert len(FUNCTIONS) > 30


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_docstring_is_short_and_names_arguments(function):
    """Arguments that several functions share are named in one sentence."""
    text = inspect.getdoc(function) or ""
    assert len(text.splitlines()) <= 60
    _, _, rest = text.partition("\nArgs:\n")
    if not rest:  # all arguments are those of another function
        assert re.search(r"[Aa]rguments[^.]*\s(those of|as in)\s", text)
        return
    described = rest.partition("\nReturns:\n")[0]
    names = set(re.findall(r"\w+", described))
    assert set(inspect.signature(function).parameters) <= names
