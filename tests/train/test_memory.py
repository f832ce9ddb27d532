"""The config's `remat` section: what it refuses, and the policy it starts with."""

import pytest

from jaxmem import remat
from jaxmem.train.memory import RematConfig


def test_names_kept_besides_a_preset():
    made = RematConfig("save_attention", save=("gate",), last=2).start
    assert made == remat.PRESETS["save_attention"] | remat.Policy(["gate"], last=2)
    assert RematConfig("none", unroll=True).start is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(policy="dots_and_norms"),
         "policy must be one of 'none'.*got 'dots_and_n"),
        (dict(save=("gates",)), "save has names that no block uses: gates"),
        (dict(policy="none", save=("gate",)),
         "save=.*keeps all blocks whole: leave it"),
        (dict(policy="fit", memory_limit=1.0, save=("up",)), "save=.*chooses it"),
        (dict(policy="none", last=1), "last=1 cannot be combined with policy='none'"),
        (dict(policy="offload_block", unroll=True),
         "unroll=True cannot be combined with policy='offload_block', which offloads"),
        (dict(policy="fit", memory_limit=1.0, unroll=True),
         "unroll=True cannot be combined with policy='fit', which may offload"),
    ],
)  # fmt: skip
def test_impossible_sections_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RematConfig(**fields)
