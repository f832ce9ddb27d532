"""First columns of a vocabulary's shards and groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmem.head.maths.backend_operands import TokenRows, first_column, part_labels
from jaxmem.head.maths.spec import Spec
from jaxmem.head.maths.vocab_shards import Shards

WHOLE = Spec(
    columns=24, vocab_size=48, chunk=4, outputs=("logprob",),
    compute_dtype=np.dtype("float32"),
)  # fmt: skip
GROUP = dataclasses.replace(WHOLE, columns=8, first=16, shard_columns=24)


@pytest.mark.parametrize("spec, want", [(WHOLE, 0), (GROUP, 16)])
def test_on_one_device(spec, want):
    assert int(first_column(spec)) == want
    labels = np.array([3, 17], np.int32)
    rows = TokenRows(jnp.asarray(labels), jnp.ones(2, bool), None)
    got = part_labels(spec, rows, jnp.arange(2))
    np.testing.assert_array_equal(got, labels - want)


@pytest.mark.parametrize("spec, want", [(WHOLE, [0, 24]), (GROUP, [16, 40])])
def test_on_shards(spec, want):
    spec = dataclasses.replace(spec, shards=Shards(("x",), 2))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    first = jax.shard_map(
        lambda: first_column(spec)[None], mesh=mesh, in_specs=(), out_specs=P("x")
    )
    np.testing.assert_array_equal(jax.jit(first)(), want)
