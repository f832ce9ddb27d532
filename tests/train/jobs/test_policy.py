"""Clips of a policy's ratios, where the loss says which are possible."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.train.jobs.policy_losses import POLICY_LOSSES
from jaxmem.train.jobs.policy_objective import GrpoConfig


def test_cispo_may_have_no_lower_bound():
    config = GrpoConfig(loss="cispo", clip_low=10.0, clip_high=0.2)
    assert config.clips == (10.0, 0.2)
    log_ratio = jnp.array([-15.0, -1.0, 0.0, 1.0])
    loss = POLICY_LOSSES["cispo"]
    clipped = loss.clipped(log_ratio, jnp.ones(4), config.clips)
    np.testing.assert_array_equal(clipped, [0, 0, 0, 1])


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_other_losses_have_one(loss):
    message = r"GrpoConfig.clip_low must be in \[0, 1\], or None, got 10.0"
    with pytest.raises(ValueError, match=message):
        GrpoConfig(loss=loss, clip_low=10.0)
    message = "GrpoConfig.clip_low must be 0 or more, or None, got -1.0"
    with pytest.raises(ValueError, match=message):
        GrpoConfig(loss="cispo", clip_low=-1.0)
