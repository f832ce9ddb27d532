"""The best evaluation's checkpoint."""

import math

import jax.numpy as jnp
import pytest

from jaxmem.train.evaluation import keep_best
from jaxmem.train.state.checkpoint import Checkpoints

NAN = math.nan


def offer(directory, step, cost):
    def save(checkpoints, more):
        checkpoints.save(step, {"w": jnp.full(3, cost)}, {}, more)

    return keep_best(directory, step, cost, save)


def kept(directory):
    if not directory.exists():
        return None
    with Checkpoints(directory, keep=1) as checkpoints:
        return checkpoints.latest()


@pytest.mark.parametrize(
    "costs, best",
    [
        ([3.0, 2.0, 2.5], 2),
        ([3.0, NAN, 4.0], 1),
        ([3.0, NAN, 2.0], 3),
        ([3.0, -math.inf], 1),
        ([NAN, 3.0, 4.0], 2),
        ([NAN, math.inf], None),
    ],
)
def test_lowest_finite_cost_is_the_best(costs, best, tmp_path):
    directory = tmp_path / "best"
    for step, cost in enumerate(costs, start=1):
        said = offer(directory, step, cost)
        wanted = (
            f"step {step}: jaxmem does not keep an evaluation of {cost} as the best"
        )
        assert said == ("" if math.isfinite(cost) else wanted)
    assert kept(directory) == best


def test_cost_that_is_no_number_is_replaced(tmp_path):
    """As an earlier version saved it."""
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        more = {"best": {"cost": NAN, "step": 1}}
        checkpoints.save(1, {"w": jnp.ones(3)}, {}, more)
    offer(tmp_path, 2, 5.0)
    assert kept(tmp_path) == 2
