"""Logits of sampled entries, interpreted: every part of the depth counts once."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.cases import slow
from tests.helpers.interpreter import needs_pallas

pytestmark = [needs_pallas, pytest.mark.usefixtures("all_rows_interpreted")]


@pytest.mark.parametrize(
    "layout, d", [("vd", 448), slow("vd", 40), slow("vd", 1344), slow("dv", 448)]
)
def test_logits_of_entries(layout, d, monkeypatch):
    from jaxmem.head.kernels import sampled_logits

    n, v, slots = 6, 50, 11
    rng = np.random.default_rng(0)
    columns = rng.integers(0, v, (n, slots)).astype(np.int32)
    columns[rng.random((n, slots)) < 0.3] = v
    columns[2] = v
    columns[3, 5:] = v
    h, W = (jnp.asarray(rng.standard_normal((k, d)), jnp.bfloat16) for k in (n, v))
    want = np.einsum(
        "nd,nkd->nk", np.float64(h), np.float64(W)[np.minimum(columns, v - 1)]
    )
    given = W if layout == "vd" else W.T
    got = sampled_logits.at_entries(jnp.asarray(columns), given, h, layout)
    live = columns < v
    np.testing.assert_allclose(np.asarray(got)[live], want[live], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("depth", [128, 192, 576, 640, 2880, 4096, 5120])
def test_parts_cover_the_depth_once(depth):
    from jaxmem.head.kernels import sampled_logits

    covered = np.zeros(depth, int)
    for first, size, skipped in sampled_logits.split_depth(depth):
        covered[first + skipped : first + size] += 1
        assert first % (size // 128) == 0 and depth % (size // 128) == 0
    np.testing.assert_array_equal(covered, 1)
