"""A vocabulary that is no multiple of 64: kernels take W in two, without a copy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels import block_sizes, padding
from tests.cases import CASES, Case
from tests.functional.test_api import check
from tests.kernels import needs_pallas
from tests.kernels.one_pass import check_one_pass

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


# The next test combines a bias with padding, and test_hopper combines all options.
@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [330, 200])
def test_every_option_at_once(vocab_size, interpreted):
    """The last of W's columns count, or none of the last step."""
    problem = Case(70, 64, 333, std=3.0).make()
    check(
        problem._replace(y=problem.y % vocab_size), "hopper", dtype="float16",
        softcap=5.0, temperature=np.linspace(0.5, 2, 70, dtype=np.float32),
        vocab_size=vocab_size, bias=jnp.linspace(-1, 1, 333, dtype=jnp.float16),
    )  # fmt: skip


@pytest.mark.slow
def test_rows_in_blocks_and_columns_in_blocks(interpreted):
    check(Case(301, 64, 300, std=3.0).make(), "hopper", 16, dtype="bfloat16")


@pytest.mark.slow
def test_launches_of_all_rows_follow_a_block_of_columns(interpreted, monkeypatch):
    monkeypatch.setattr(block_sizes, "backward_rows", lambda *_: (256, True))
    problem = Case(300, 64, 700, std=3.0, chunk=16).make()
    problem = problem._replace(y=np.where(np.arange(300) % 3 == 0, -100, problem.y))
    bias = jnp.linspace(-1, 1, 700, dtype=jnp.bfloat16)
    check(problem, "hopper", 16, dtype="bfloat16", bias=bias)


# test_hopper has this loss, of columns and rows that do not fill their last block, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    "n, v, chunk",
    [(100, 600, 48), (300, 300, 32)],
)
def test_a_loss_of_every_statistic_in_one_pass(n, v, chunk, interpreted):
    """In one block of rows, and in several."""
    case = Case(n, 64, v, std=2.0, chunk=chunk)
    check_one_pass(case, bias=np.sin(np.arange(v, dtype=np.float32)))
