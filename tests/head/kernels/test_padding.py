"""A vocabulary that is no multiple of 64: kernels take W in two, without a copy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.kernels import block_sizes, padding
from tests.helpers.cases import CASES, Case
from tests.helpers.interpreter import needs_pallas
from tests.helpers.token_stats import check

pytestmark = [needs_pallas, pytest.mark.usefixtures("on_one_device")]


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    """W is split, or the test shows nothing."""
    last, split = [], padding.split

    def listen(*args):
        last.append(split(*args)[1])
        return split(*args)

    monkeypatch.setattr(padding, "split", listen)
    yield
    assert last and not any(x is None for x in last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peaked", "a third masked"])
def test_outputs_and_gradients(name, interpreted):
    problem = dataclasses.replace(CASES[name], v=300, d=64).make()
    check(problem, "hopper", dtype="bfloat16")


@pytest.mark.slow
def test_rows_in_blocks_and_columns_in_blocks(interpreted):
    check(Case(301, 64, 300, std=3.0).make(), "hopper", 16, dtype="bfloat16")


@pytest.mark.slow
def test_launches_of_all_rows_by_column_block(interpreted, monkeypatch):
    monkeypatch.setattr(block_sizes, "backward_rows", lambda *_: (256, True))
    problem = Case(300, 64, 700, std=3.0, chunk=16).make()
    problem = problem._replace(y=np.where(np.arange(300) % 3 == 0, -100, problem.y))
    bias = jnp.linspace(-1, 1, 700, dtype=jnp.bfloat16)
    check(problem, "hopper", 16, dtype="bfloat16", bias=bias)
