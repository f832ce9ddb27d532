"""Groups of the vocabulary, merged: every group counts once, in an order of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.head.maths import row_stats
from jaxmem.head.maths.row_stats import Stats
from tests.helpers.interpreter import needs_pallas

pytestmark = needs_pallas
MASK_VALUE = -(2.0**100)  # a masked logit


def statistics(n_groups, n_rows=40):
    """`Stats` of a few logits a group; one has the label, and one is masked."""
    z = 5 * np.random.default_rng(0).standard_normal((n_groups, n_rows, 16))
    row_max = z.max(-1)
    shifted = z - row_max[..., None]
    exps = np.exp(shifted)
    stats = Stats(
        row_max, exps[..., 1:].sum(-1), (exps * shifted).sum(-1), (exps**2).sum(-1),
        np.where(np.arange(n_groups)[:, None] == n_groups // 2, z[..., 0], MASK_VALUE),
    )  # fmt: skip
    masked = np.arange(n_groups)[:, None] == n_groups - 1 if n_groups > 2 else False
    nothing = MASK_VALUE, 0.0, 0.0, 0.0, MASK_VALUE
    return Stats(*(np.where(masked, x, y) for x, y in zip(nothing, stats, strict=True)))


@pytest.mark.full
@pytest.mark.parametrize("n_groups", [1, 2, 7, 8, 9, 63, 64, 65, 513])
def test_merging_loses_no_group(n_groups):
    from jaxmem.head.kernels import forward, logits

    assert logits.MASK_VALUE == MASK_VALUE
    stats = statistics(n_groups)
    with jax.enable_x64(True):
        groups = (Stats(*(x[i] for x in stats)) for i in range(n_groups))
        want = functools.reduce(row_stats.merge, groups)
        got = forward._merge_groups(jnp.stack([*map(jnp.float64, stats)], 1))
    for name, a, b in zip(Stats._fields, got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=name)


@pytest.mark.slow
def test_merging_groups_is_batch_invariant():
    """One program for any number of rows, in which no row sees another."""
    from jaxmem.head.kernels import forward

    (rows,) = jax.export.symbolic_shape("rows")
    shapes = jax.ShapeDtypeStruct((65, len(Stats._fields), rows), jnp.float32)
    # What depended on the number of rows could not be traced without it.
    jaxpr = jax.make_jaxpr(forward._merge_groups)(shapes)
    assert {out.shape for out in jaxpr.out_avals} == {(rows,)}

    stats = statistics(65)
    with jax.enable_x64(True):
        beside_nan = jnp.stack([jnp.insert(x, 8, np.nan, 1) for x in stats], 1)
        want = forward._merge_groups(jnp.stack([*map(jnp.asarray, stats)], 1))
        got = forward._merge_groups(beside_nan)
    for a, b in zip(got, want, strict=True):
        assert np.isnan(a[8])
        np.testing.assert_allclose(np.delete(a, 8), b, rtol=1e-12)
