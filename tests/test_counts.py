"""What `python -m tests.counts` counts, and the goals that are met."""

import ast
import sys

import jax

from tests import counts


def test_no_branch_on_a_config_of_another_module(monkeypatch):
    row = counts._branches_on_configs()
    assert row.count == 0, row.where
    source = "def f(config):\n    return isinstance(config, (int, SomeConfig))\n"
    path = counts.PACKAGE / "made.py"
    monkeypatch.setattr(counts, "_trees", lambda: {path: ast.parse(source)})
    assert counts._branches_on_configs()[1:] == (1, 0, "jaxmem/made.py:2")
    source += "class SomeConfig:\n    pass\n"
    monkeypatch.setattr(counts, "_trees", lambda: {path: ast.parse(source)})
    assert counts._branches_on_configs().count == 0


def test_a_call_enters_functions_and_lines_of_the_package_once(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # as outside of these tests
    rows = list(counts._entered())
    functions, lines, of_both, lines_of_both = (row.count for row in rows)
    assert 10 < functions < of_both < lines_of_both and functions < lines
    if sys.version_info >= (3, 12):  # before, a comprehension is a function
        assert all(row.count <= row.goal for row in rows), rows


def test_nothing_is_imported_upward_or_in_a_circle():
    assert counts._upward().count == counts._circles().count == 0
