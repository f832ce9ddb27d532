"""Numbers that an option takes, and errors about all others."""

from fractions import Fraction

import numpy as np
import pytest

from jaxmem.base import messages
from jaxmem.base.ranges import integers, reals


@pytest.mark.parametrize(
    ("numbers", "value"),
    [
        (integers(), -(2**63) + 1), (integers(1, 18), 18), (integers(1), np.int8(1)),
        (integers(0, below=2**31), 2**31 - 1), (integers(above=0, limit=9), 9),
        (reals(), 0), (reals(above=0), 1e-30), (reals(0, 1), 1), (reals(0), -0.0),
        (reals(0, below=1), np.float32(0.5)), (reals(), 3e38),
    ],
)  # fmt: skip
def test_numbers_in_range(numbers, value):
    assert numbers.problem(value) is None


@pytest.mark.parametrize(
    ("numbers", "value", "problem"),
    [
        (integers(), True, "must be an integer"),
        (integers(), np.True_, "must be an integer"),
        (integers(), 1.0, "must be an integer"),
        (integers(), "1", "must be an integer"),
        (integers(), None, "must be an integer"),
        (integers(), 2**63, "must be at most 9,223,372,036,854,775,807 in size"),
        (integers(1), 0, "must be at least 1"),
        (integers(1, 18), 10**5000, "must be from 1 to 18"),
        (integers(0, below=2**31), 2**31, "must be in [0, 2**31)"),
        (integers(above=0, limit=10_000), 0, "must be above 0"),
        (integers(above=0, limit=10_000), 10**7, "must be at most 10,000"),
        (reals(), True, "must be a number"),
        (reals(), 1j, "must be a number"),
        (reals(), Fraction(1, 2), "must be a number"),
        (reals(), float("inf"), "must be finite"),
        (reals(), float("nan"), "must be finite"),
        (reals(), np.float16("inf"), "must be finite"),
        (reals(above=0), 0, "must be above 0"),
        (reals(0, below=1), 1.0, "must be in [0, 1)"),
        (reals(above=0, high=1), 0.0, "must be in (0, 1]"),
        (reals(), 1e39, "must be at most 3.4e+38 in size"),
        (reals(above=0), 10**400, "must be at most 3.4e+38"),
        (reals(), 1e-60, "must be 0 or at least 1.18e-38 in size (float32)"),
    ],
    ids=messages.short,
)
def test_others(numbers, value, problem):
    assert numbers.problem(value) == problem


def test_repr_is_the_range_in_words():
    assert repr(integers(1)) == "<integers at least 1>"
    assert repr(reals(0, below=1)) == "<numbers in [0, 1)>"
    assert repr(reals()) == "<numbers>"
