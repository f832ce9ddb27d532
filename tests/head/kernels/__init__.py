"""Tests of the kernels; which of them need a newer jax."""

import jax
import pytest

needs_pallas = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason=f"needs jax 0.11 for its Mosaic GPU interpreter, this is {jax.__version__}",
)
