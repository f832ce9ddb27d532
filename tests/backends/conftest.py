"""The fixtures of the kernels' own tests."""

from tests.kernels.conftest import interpreted, lowered_anywhere

__all__ = ["interpreted", "lowered_anywhere"]
