"""State on the host: where it is, what comes back, and what an update makes of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxmem.remat import offload
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPES = {"blocks": {"kernel": (6, 4, 8), "scale": (6, 8)}, "embed": (10, 4), "t": ()}


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def adamw():
    def decays(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key != "scale", params
        )

    return optax.adamw(optax.linear_schedule(0.1, 0.0, 5), mask=decays)


def kinds(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state)}


def assert_close(got, want, epsilon):
    def close(a, b):
        a, b = np.float32(a), np.float32(b)
        np.testing.assert_allclose(a, b, rtol=epsilon, atol=epsilon / 10)

    jax.tree.map(close, got, want)


def test_there_and_back():
    here = tree(0)
    parked = offload.park(here)
    assert kinds(parked) == {"pinned_host"}
    assert all(x.is_deleted() for x in jax.tree.leaves(here))
    back = offload.fetch(parked)
    assert kinds(back) == {"device"}
    assert all(x.is_deleted() for x in jax.tree.leaves(parked))
    jax.tree.map(np.testing.assert_array_equal, back, tree(0))


def test_other_leaves_are_not_parked():
    with pytest.raises(
        ValueError, match="jax arrays at its leaves, got ndarray: jax.d"
    ):
        offload.park({"w": np.ones(3)})


@pytest.mark.parametrize("move", [offload.park, offload.fetch])
def test_tree_that_cannot_be_moved_is_left_as_it_is(move):
    other = {offload.park: offload.fetch, offload.fetch: offload.park}[move]
    first, gone = other({"a": jnp.ones(3)})["a"], other({"w": jnp.ones(3)})["w"]
    gone.delete()
    for last, error in ((3, ValueError), (gone, RuntimeError)):
        with pytest.raises(error):
            move({"a": first, "z": last})
        np.testing.assert_array_equal(first, 1)


def test_array_that_a_tree_has_twice_is_moved_once():
    given = jnp.arange(3.0)
    parked = offload.park({"embed": given, "head": given})
    assert given.is_deleted() and kinds(parked) == {"pinned_host"}
    assert parked["embed"] is parked["head"]
    back = offload.fetch(parked)
    assert parked["embed"].is_deleted() and kinds(back) == {"device"}
    assert back["embed"] is back["head"]
    np.testing.assert_array_equal(back["head"], np.arange(3))


def test_sharded_tree_keeps_its_sharding():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    parked = offload.park(jax.device_put(jnp.arange(8.0), rows))
    assert parked.sharding == rows.with_memory_kind("pinned_host")
    assert offload.fetch(parked).sharding == rows.with_memory_kind("device")


@pytest.mark.full
@pytest.mark.parametrize(
    "slice_bytes, dtype",
    [
        (256, jnp.float32),
        (2**20, jnp.float32),
        slow(256, jnp.bfloat16),
        slow(1, jnp.float32),
        slow(1, jnp.bfloat16),
        slow(2**20, jnp.bfloat16),
    ],
)
def test_update_equals_that_of_state_on_device(slice_bytes, dtype):
    wanted, optimizer = tree(0, dtype), adamw()
    state = optimizer.init(optax.tree.cast(wanted, jnp.float32))
    streamed = offload.Streamed(adamw(), slice_bytes=slice_bytes)
    params = tree(0, dtype)
    parked = streamed.init(params)
    step = jax.jit(optimizer.update)
    for seed in (1, 2, 3):
        gradients = tree(seed)
        updates, state = step(gradients, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        params, parked = streamed.update(params, gradients, parked)
        assert kinds(parked) == {"pinned_host"} and kinds(params) == {"device"}
        assert_close(params, wanted, 4 * float(jnp.finfo(dtype).eps))


def test_slices_have_requested_size_and_shapes():
    params = tree(0)
    streamed = offload.Streamed(adamw(), slice_bytes=2 * 4 * 8 * 4)
    state, shapes = (
        streamed.init(params),
        streamed.shapes(jax.eval_shape(lambda: tree(0))),
    )
    lengths = {"kernel": 3, "scale": 1}
    assert {k: len(state["blocks"][k]) for k in lengths} == lengths
    assert len(state["embed"]) == len(state["t"]) == 1
    described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), shapes)


def lengths(slices):
    return [state[0].mu["w"].shape[0] for state in slices]


def test_last_slice_may_be_shorter():
    streamed = offload.Streamed(optax.adam(0.1), slice_bytes=500 * 8 * 4)
    rows = {2000: [500] * 4, 2003: [401] * 4 + [399], 501: [251, 250]}
    for n, expected in rows.items():
        shapes = streamed.shapes({"w": jax.ShapeDtypeStruct((n, 8), jnp.float32)})
        assert lengths(shapes["w"]) == expected


@pytest.mark.full
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16])
def test_slices_of_several_lengths_change_no_bit(dtype):
    """No step rounds these numbers: code for an array's end may round apart."""

    def run(rows):
        rng = np.random.default_rng(0)

        def draw():
            return {"w": jnp.asarray(rng.integers(-4, 5, (11, 5)), dtype)}

        row_bytes = 5 * jnp.dtype(dtype).itemsize
        halves = optax.sgd(0.5, momentum=0.5)
        streamed = offload.Streamed(halves, slice_bytes=rows * row_bytes)
        params, shapes = draw(), streamed.shapes(draw())
        state = streamed.init(params)
        for _ in range(3):
            params, state = streamed.update(params, draw(), state)
        described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
        assert described == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.sharding), shapes
        )
        momentum = [s[0].trace["w"] for s in state["w"]]
        return len(momentum), np.asarray(params["w"]), np.concatenate(momentum)

    (slices, *got), (whole, *wanted) = run(4), run(11)
    assert (slices, whole) == (3, 1)
    for a, b in zip(got, wanted, strict=True):
        assert np.unique(a.astype(np.float32)).size > 10
        assert a.tobytes() == b.tobytes()


def test_leaves_without_rows():
    def params():
        return {"empty": jnp.zeros((0, 4)), "w": jnp.ones((3, 4))}

    streamed, given = offload.Streamed(optax.adam(0.1)), params()
    state = streamed.init(given)
    made, state = streamed.update(given, params(), state)
    assert made["empty"].shape == state["empty"][0][0].mu["empty"].shape == (0, 4)
    assert kinds(state) == {"pinned_host"}
    np.testing.assert_allclose(made["w"], 0.9, rtol=1e-5)


def test_rows_over_devices_are_not_cut():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    streamed = offload.Streamed(optax.adam(0.1), slice_bytes=1)
    params = {"w": jax.device_put(jnp.ones((4, 2)), rows)}
    state = streamed.init(params)
    assert len(state["w"]) == 1
    assert state["w"][0][0].mu["w"].sharding == rows.with_memory_kind("pinned_host")
    params, state = streamed.update(params, jax.tree.map(jnp.ones_like, params), state)
    np.testing.assert_allclose(params["w"], 0.9, rtol=1e-5)


def test_update_donates_state_but_not_gradients():
    streamed, params, gradients = offload.Streamed(adamw()), tree(0), tree(1)
    state = streamed.init(params)
    streamed.update(params, gradients, state)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(gradients))


def test_array_that_is_there_twice_is_not_consumed():
    streamed, w = offload.Streamed(optax.adam(0.1)), jnp.ones((3, 2))
    tied = {"a": jnp.ones(2), "embed": w, "head": w}
    state = streamed.init(tied)
    message = (
        "params and state must contain each array once, because the update consumes "
        "it, but {} and {} are the same array; leave one of them out, or jnp.copy it "
        "to train both separately"
    )
    message = message.format("params['embed']", "params['head']")
    with pytest.raises(ValueError, match=re.escape(message)):
        streamed.update(tied, jax.tree.map(jnp.ones_like, tied), state)
    copied = {**tied, "head": jnp.copy(w)}
    twice = {**state, "head": state["embed"]}
    with pytest.raises(
        ValueError, match=r"state\['embed'\]\[0\].* and state\['head'\]"
    ):
        streamed.update(copied, jax.tree.map(jnp.ones_like, copied), twice)
    assert not any(x.is_deleted() for x in jax.tree.leaves((tied, copied, state)))


def test_state_of_other_arrays_is_not_consumed():
    streamed, params = offload.Streamed(optax.adam(0.1)), tree(0)
    state = streamed.init(params)
    wrong = {**state, "t": jax.tree.map(np.asarray, state["t"])}
    with pytest.raises(ValueError, match="state must have jax arrays .* got ndarray"):
        streamed.update(params, tree(1), wrong)
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))


ROWS_SPLIT, ROWS_WHOLE = P("x", "y"), P(None, "y")


@pytest.mark.full
@pytest.mark.parametrize(
    "there, here",
    [
        (ROWS_WHOLE, ROWS_SPLIT),
        (ROWS_SPLIT, None),
        slow(ROWS_SPLIT, ROWS_WHOLE),
        slow(None, ROWS_SPLIT),
        slow(ROWS_WHOLE, None),
        slow(None, ROWS_WHOLE),
        *(slow(x, x) for x in (ROWS_SPLIT, ROWS_WHOLE, None)),
    ],
)
def test_state_of_other_mesh_is_resliced(there, here):
    """And continues as it would have there; its slices' rows do not divide by x."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    streamed = offload.Streamed(adamw(), slice_bytes=3 * 4 * 4)

    def placed(spec, tree=None):
        tree = tree or {"embed": jnp.arange(40.0).reshape(10, 4), "t": jnp.ones(())}
        home = spec and {
            "embed": NamedSharding(mesh, spec),
            "t": NamedSharding(mesh, P()),
        }
        return jax.device_put(tree, home)

    def stepped(params, state):
        gradients = jax.tree.map(jnp.cos, params)
        return streamed.update(params, gradients, state)

    params, state = stepped(placed(there), streamed.init(placed(there)))
    saved = jax.device_get((params, state))
    wanted = jax.device_get(stepped(params, state))

    params = placed(here, saved[0])
    slices = {k: len(saved[1][k]) for k in saved[1]}
    assert slices == {"embed": 1 if there == ROWS_SPLIT else 4, "t": 1}
    homes = jax.tree.map(lambda x: x.sharding, streamed.shapes(params, slices))
    state = streamed.recut(params, jax.device_put(saved[1], homes))
    expected = streamed.shapes(params)
    described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), expected)
    got = jax.device_get(stepped(params, state))
    assert_close(got[0], wanted[0], 1e-6)
    whole = [
        np.concatenate([part[0].mu["embed"] for part in x[1]["embed"]])
        for x in (got, wanted)
    ]
    np.testing.assert_allclose(*whole, rtol=1e-6)


def test_optimizer_without_moments():
    streamed, params = offload.Streamed(optax.sgd(0.5)), tree(0)
    state = streamed.init(params)
    made, _ = streamed.update(params, jax.tree.map(jnp.ones_like, tree(0)), state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b - 0.5), made, tree(0))


def test_slices_of_nothing():
    with pytest.raises(ValueError, match="slice_bytes must be above 0, got 0"):
        offload.Streamed(adamw(), slice_bytes=0)
