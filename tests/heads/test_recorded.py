"""Recorded entries of Flax heads: the functions with the head's own weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.heads import linen as linen_heads, nnx as nnx_heads

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

D, V, K = 8, 30, 6
HIDDEN = jax.random.normal(jax.random.key(0), (2, 3, D))
LABELS = jnp.array([[1, 2, -1], [4, 29, 0]])
KEY = jax.random.key(5)


def nnx_head():
    from flax import nnx

    head = nnx_heads.LMHead(D, V, rngs=nnx.Rngs(0), softcap=5.0)
    kernel, bias = jnp.asarray(head.kernel), jnp.asarray(head.bias)
    return head, jaxmem.Head(kernel, bias, softcap=5.0, layout="dv")


def linen_head():
    head = linen_heads.LMHead(V, softcap=5.0)
    variables = head.init(jax.random.key(1), HIDDEN)
    params = variables["params"]
    described = jaxmem.Head(params["kernel"], params["bias"], 5.0, layout="dv")
    return head.bind(variables), described


@pytest.mark.parametrize("make", [nnx_head, linen_head])
def test_methods_are_the_functions(make):
    head, described = make()
    entries = head.record_entries(HIDDEN, LABELS, K, KEY, temperature=0.8)
    want = jaxmem.record_entries(HIDDEN, described, LABELS, K, KEY, temperature=0.8)
    jax.tree.map(np.testing.assert_array_equal, entries, want)
    options = {"gradient": jaxmem.Recorded(entries), "temperature": 0.8}
    moved = HIDDEN * 1.02
    got = head.token_stats(moved, LABELS, **options)
    expected = jaxmem.token_stats(moved, described, LABELS, **options)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    loss = head.loss(moved, LABELS, gradient=jaxmem.Recorded(want))
    assert np.isfinite(loss) and loss.shape == ()


def test_entries_are_of_a_call_and_not_of_a_head():
    from flax import nnx

    head, _ = nnx_head()
    gradient = jaxmem.Recorded(head.record_entries(HIDDEN, LABELS, K, KEY))
    with pytest.raises(ValueError, match="entries are of one call's tokens"):
        nnx_heads.LMHead(D, V, rngs=nnx.Rngs(0), gradient=gradient)
    with pytest.raises(ValueError, match="entries are of one call's tokens"):
        linen_heads.LMHead(V, gradient=gradient)
