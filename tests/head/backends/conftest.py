"""The fixtures of the kernels' own tests."""

from tests.head.kernels.conftest import interpreted, lowered_anywhere

__all__ = ["interpreted", "lowered_anywhere"]
