"""The fixtures of the kernels' own tests."""

from tests.kernels.conftest import interpreted, lowered_anywhere, triton_interpreted

__all__ = ["interpreted", "lowered_anywhere", "triton_interpreted"]
