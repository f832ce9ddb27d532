"""Multi-token prediction: shifted labels, and one token_loss for several heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxmem
from jaxmem import losses
from tests.helpers.programs import CPU, CUBLAS, compiled, count_gemms

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

H, B, T, D, V, CHUNK = 3, 2, 7, 8, 40, 16
WEIGHTS = np.array([1.0, 0.3, 0.1], np.float32)


def shifted(labels, segment_ids):
    """Labels h positions ahead, found for each position by itself."""
    want = np.full((H, *labels.shape), -1)
    for h in range(H):
        for index in np.ndindex(labels.shape):
            there = (*index[:-1], index[-1] + h)
            if there[-1] < T and segment_ids[there] == segment_ids[index]:
                want[h][index] = labels[there]
    return want


def problem():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, V, (B, T)).astype(np.int32)
    labels[0, 2] = -1
    hidden = rng.standard_normal((H, B, T, D), np.float32)
    return hidden, rng.standard_normal((V, D), np.float32), labels


def test_labels_of_rows_and_of_packed_rows():
    labels, ids = problem()[2], np.array([[1, 1, 2, 2, 2, 3, 0], [1] * 7])
    got = losses.multi_token_labels(labels, H)
    np.testing.assert_array_equal(got, shifted(labels, np.ones((B, T))))
    got = jax.jit(lambda y, ids: losses.multi_token_labels(y, H, segment_ids=ids))(
        labels, ids
    )
    np.testing.assert_array_equal(got, shifted(labels, ids))
    assert got.dtype == jnp.int32
    many = losses.multi_token_labels(labels, T + 2)
    assert (many[T:] == -1).all() and (many[T - 1, :, 0] == labels[:, -1]).all()


def test_labels_on_explicit_axes():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        labels = jax.sharding.reshard(jnp.asarray(problem()[2]), P("data"))
        got = losses.multi_token_labels(labels, H)
    assert got.sharding.spec == P(None, "data", None)


def loss_of(hidden, W, labels, where=None):
    """The sum over heads of their weight times their own mean; the docs' recipe."""
    of_heads = losses.multi_token_labels(labels, len(hidden))
    active = of_heads >= 0 if where is None else (of_heads >= 0) & where
    each = WEIGHTS[: len(hidden)] / jnp.sum(active, axis=(1, 2))
    weights = jnp.broadcast_to(each[:, None, None], of_heads.shape)
    return jaxmem.token_loss(
        lambda stats, weight: -weight * stats.logprob,
        hidden, W, of_heads, weights, where=where, normalizer=1, chunk=CHUNK,
    )[0]  # fmt: skip


def test_loss_and_gradients_against_float64():
    hidden, W, labels = problem()
    where = np.arange(T) != 4
    h, w = hidden.astype(np.float64), W.astype(np.float64)
    y = shifted(labels, np.ones((B, T)))
    z = h @ w.T
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    active = (y >= 0) & where
    chosen = np.take_along_axis(p, np.maximum(y, 0)[..., None], -1)[..., 0]
    scale = active * (WEIGHTS / active.sum((1, 2)))[:, None, None]
    want = -(scale * np.log(chosen)).sum()
    dz = scale[..., None] * (p - (np.arange(V) == y[..., None]))
    got, (dh, dW) = jax.value_and_grad(loss_of, (0, 1))(hidden, W, labels, where)
    assert abs(got - want) < 1e-6 * abs(want) + 1e-6
    np.testing.assert_allclose(dh, dz @ w, atol=1e-6)
    np.testing.assert_allclose(dW, np.einsum("hbtv,hbtd->vd", dz, h), atol=1e-6)


def test_multi_token_costs_one_head():
    """Three products in one loop, one sum for W's gradient."""

    def compile_for(heads):
        batch, steps, d, v = 4, 64, 64, 1024
        hidden = jax.ShapeDtypeStruct((heads, batch, steps, d), jnp.float32)
        W = jax.ShapeDtypeStruct((v, d), jnp.float32)
        labels = jax.ShapeDtypeStruct((batch, steps), jnp.int32)
        return compiled(jax.grad(loss_of, (0, 1)), hidden, W, labels)

    one, three = compile_for(1), compile_for(3)
    assert count_gemms(one.as_text()) == count_gemms(three.as_text()) == 3
    temp = [x.memory_analysis().temp_size_in_bytes for x in (one, three)]
    tokens, hidden, dW = 4 * 64, 4 * 4 * 64 * 64, 4 * 1024 * 64
    # Further heads add their tokens, and at most the gradient by their hidden states.
    assert temp[1] - temp[0] <= 2 * (hidden + 64 * tokens)
    assert temp[1] < 2 * dW + 4 * hidden + 8 * CHUNK * 1024 + (0 if CPU else CUBLAS)


ERRORS = [
    ({"heads": 0}, ValueError,
     "heads must be an integer, at least 1 and below 2**31, got 0"),
    ({"labels": np.float32(problem()[2])}, TypeError,
     "labels must be integers, got float32; convert them with labels.astype('int32')"),
    ({"labels": 3}, ValueError,
     "labels must have an axis of positions, got a scalar"),
    ({"segment_ids": np.ones(T, int)}, ValueError,
     "segment_ids must have the shape of labels, (2, 7), got (7,)"),
]  # fmt: skip


@pytest.mark.parametrize("changes,kind,message", ERRORS, ids=lambda x: str(x)[:30])
def test_errors(changes, kind, message):
    given = {"labels": problem()[2], "heads": H} | changes
    with pytest.raises(kind) as error:
        losses.multi_token_labels(**given)
    assert str(error.value) == message
