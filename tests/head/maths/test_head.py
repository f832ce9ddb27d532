"""A head is a tree of what is trained, and says what describes its matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmem
from tests.helpers.cases import Case

pytestmark = pytest.mark.usefixtures("quick_compilation")

H, W, Y = Case(12, 6, 16).make()
BIAS = np.linspace(-1, 1, 16, dtype=np.float32)


def make():
    return jaxmem.Head(jnp.asarray(W), jnp.asarray(BIAS), softcap=3.0, vocab_size=14)


def total(head, h=H, verb=jaxmem.logprobs):
    return verb(h, head, np.minimum(Y, 13)).sum()


@pytest.mark.slow
def test_gradient_by_head_is_a_head():
    slopes = jax.jit(jax.grad(total))(make())
    assert isinstance(slopes, jaxmem.Head)
    assert (slopes.softcap, slopes.vocab_size) == (3.0, 14)
    want = jax.grad(lambda W, b: total(jaxmem.Head(W, b, 3.0, 14)), (0, 1))(W, BIAS)
    for got, need in zip(jax.tree.leaves(slopes), want, strict=True):
        np.testing.assert_allclose(got, need, atol=1e-6)


@pytest.mark.full
def test_head_of_shardings_and_gradients_on_mesh():
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    specs = jaxmem.Head(P("tensor"), P("tensor"), softcap=3.0, vocab_size=14)
    placed = jax.device_put(
        make(), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    )
    verb = jaxmem.sharding.parallel(jaxmem.logprobs, mesh, vocab="tensor")
    slopes = jax.jit(jax.grad(lambda head: total(head, verb=verb)))(placed)
    for got, need in zip(
        jax.tree.leaves(slopes), jax.tree.leaves(jax.grad(total)(make())), strict=True
    ):
        np.testing.assert_allclose(got, need, atol=1e-6)


def test_verbs_take_no_keywords_of_head():
    for name in ("bias", "softcap", "vocab_size", "layout"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            jaxmem.logprobs(H, W, Y, **{name: None})
