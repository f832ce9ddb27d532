"""Counts of `python -m tests.counts`, and the goals that are met."""

import ast

from jaxmem.heads import nnx
from tests import counts


def test_no_isinstance_on_other_modules_configs(monkeypatch):
    row = counts._branches_on_configs()
    assert row.count == 0, row.where
    source = "def f(config):\n    return isinstance(config, (int, SomeConfig))\n"
    path = counts.PACKAGE / "made.py"
    monkeypatch.setattr(counts, "_trees", lambda: {path: ast.parse(source)})
    assert counts._branches_on_configs()[1:] == (1, 0, "jaxmem/made.py:2")
    source += "class SomeConfig:\n    pass\n"
    monkeypatch.setattr(counts, "_trees", lambda: {path: ast.parse(source)})
    assert counts._branches_on_configs().count == 0


def test_parameters_of_constructors_are_those_of_init():
    # flax's metaclass gives a class the signature (*args, **kwargs).
    assert counts._size(nnx.LMHead) > 10
    assert all(row.count <= row.goal for row in counts._parameters())


def test_lines_are_counted_by_room():
    rooms = counts.lines()
    assert {
        "jaxmem/models",
        "jaxmem/__init__.py",
        "tests",
        "benchmarks",
    } <= rooms.keys()


def test_imports_have_no_circle_or_upward_one():
    assert counts._upward().count == counts._circles().count == 0
