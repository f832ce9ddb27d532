"""The fixtures of the kernels' own tests."""

from tests.helpers.interpreter import interpreted, lowered_anywhere, rows_interpreted

__all__ = ["interpreted", "lowered_anywhere", "rows_interpreted"]
