"""Training steps over two GPUs, with the head's kernels; fewer are a skip by name."""

import functools

import jax
import numpy as np
import pytest

import jaxmem
from benchmarks.run_long_step import batch_of
from jaxmem.models.partitioning import AXES
from jaxmem.train.jobs import sft
from tests.helpers.long_rows import MODEL, config_of

pytestmark = pytest.mark.gpu

EXPERTS = MODEL.replaced(
    {
        "feed_forwards": ("experts",),
        "experts.count": 8,
        "experts.per_token": 2,
        "experts.ff": 256,
    }
)


@functools.cache
def losses(model, axis=None):
    config = config_of(model, axis)
    program = sft.SftProgram(config, MODEL.vocab_size, packed=False)
    with jaxmem.report() as report:
        step = program.compile_step(config.head)
    assert {call.implementation for call in report.calls} == {"hopper"}
    state, frozen = program.initial_state(), program.frozen()
    batch = program.layout.place(batch_of(config, MODEL.vocab_size))
    made = []
    for _ in range(3):
        state, told = step(state, frozen, batch)
        made.append(float(told["loss"]))
    return made


@pytest.mark.parametrize(
    ("model", "axis"),
    [*((MODEL, axis) for axis in AXES), (EXPERTS, "fsdp"), (EXPERTS, "tensor")],
)
def test_steps_equal_one_gpu(model, axis):
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 GPUs, jax found {len(jax.devices())}")
    np.testing.assert_allclose(losses(model, axis), losses(model), rtol=2e-3)
