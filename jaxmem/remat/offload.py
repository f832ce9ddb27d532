"""Moves optimizer state, or any pytree, to the host while it is not needed.

    park(tree), fetch(tree)      between phases: a trainer's state while a sampler runs
    Streamed(optimizer)          an optimizer whose state is fetched slice by slice

    optimizer = offload.Streamed(optax.adamw(1e-3))
    state = optimizer.init(params)
    params, state = optimizer.update(params, gradients, state)

Reference: Ren et al., "ZeRO-Offload", 2021, arXiv:2101.06840, which computes the update
on the host; here the device computes it.
"""

import collections
import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import devices
from jaxmem.base import ranges

_MIB = 2**20


def park(tree: Any) -> Any:
    """Move the tree's arrays to host memory that the device can read.

    The given arrays are deleted after all have been copied, and the function returns
    when the device memory is free. An array that occurs twice is moved once and stays
    shared. If this raises, the tree is unchanged.

    Args:
        tree: a pytree of jax arrays.

    Returns:
        The tree, with arrays of the memory kind "pinned_host".

    Raises:
        ValueError: a leaf is not a jax array.

    >>> from jaxmem.remat import offload
    >>> parked = offload.park({"w": jax.numpy.ones(3)})
    >>> parked["w"].sharding.memory_kind
    'pinned_host'
    >>> offload.fetch(parked)["w"].sharding.memory_kind
    'device'
    """
    return _move(tree, "pinned_host", wait=True)


def fetch(tree: Any) -> Any:
    """Move the tree's arrays back to the device; the given arrays are deleted.

    It returns while the copies are still in progress, and otherwise behaves as `park`.

    Raises:
        ValueError: a leaf is not a jax array.
    """
    return _move(tree, "device")


def _move(tree, kind, *, wait=False):
    leaves, structure = jax.tree.flatten(tree)
    for x in leaves:
        _check_array("tree", x)
    originals = {id(x): x for x in leaves if x.sharding.memory_kind != kind}
    copies = {
        i: jax.device_put(x, x.sharding.with_memory_kind(kind))
        for i, x in originals.items()
    }
    if wait:
        jax.block_until_ready(copies)
    # jax cannot donate between memory kinds, so the originals are deleted here.
    # Deleting each one after its copy would lose arrays if a later allocation failed.
    # It would not lower the peak either, because the copies are all in the other
    # memory.
    for x in originals.values():
        x.delete()
    return structure.unflatten([copies.get(id(x), x) for x in leaves])


def _check_array(name, x):
    if not isinstance(x, jax.Array):
        raise ValueError(
            f"{name} must have jax arrays at its leaves, got {type(x).__name__}: "
            "jax.device_put it first"
        )


class Transformation(Protocol):
    """The interface of an optax gradient transformation."""

    def init(self, params: Any, /) -> Any:
        """The optimizer state for these parameters."""
        ...

    def update(self, updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        """(updates to add to params, next state) for these gradients."""
        ...


class Streamed:
    """An optimizer whose state is on the host, except for the slices in use.

    Each leaf of the parameters is sliced along its first axis. A slice's state is
    copied to the device, updated together with its rows of the parameters, and copied
    back, while the state of the next slice is being fetched.

    Args:
        optimizer: an elementwise optimizer, such as Adam: the update of an element
            depends only on that element's gradients. Apply global norms before it. It
            receives one leaf at a time, in a dict under the last key of its path.
        slice_bytes: maximum bytes of the parameters in a slice. Leaves whose rows are
            larger or sharded over devices have larger slices. A leaf's last slice may
            be shorter than the others, which compiles its update once more.

    **Memory** beyond parameters and gradients: the state of two slices, and the updated
    rows of one slice.
    """

    def __init__(self, optimizer: Transformation, *, slice_bytes: int = 128 * _MIB):
        ranges.check("slice_bytes", slice_bytes, ranges.integers(above=0))
        self._optimizer, self._slice_bytes = optimizer, slice_bytes
        self._update = jax.jit(
            self._update_slice, donate_argnums=(0, 2), static_argnums=(4, 5)
        )

    def init(self, params: Any) -> Any:
        """The initial state: the tree of params, with a list of slice states per leaf.

        The state is in float32 even if params are in 16 bits.
        """

        def init_leaf(path, leaf, shapes):
            name = _leaf_name(path)
            homes = jax.tree.map(lambda x: x.sharding, shapes[0])
            draw = jax.jit(self._init_slice, static_argnums=(2, 3), out_shardings=homes)
            return [
                draw(leaf, start, rows, name)
                for start, rows in self._slice_bounds(leaf)
            ]

        return jax.tree_util.tree_map_with_path(init_leaf, params, self.shapes(params))

    def shapes(self, params: Any, slices: Any = None) -> Any:
        """The result of `init` as `jax.ShapeDtypeStruct`s with shardings.

        Args:
            params: arrays, or their shapes.
            slices: number of slices of each leaf, in params' tree, for a state that was
                created with params in another sharding; None: as in `init`.
        """

        def leaf_shapes(path, leaf, count=None):
            name = _leaf_name(path)
            home = leaf.sharding or jax.sharding.SingleDeviceSharding(
                devices.current()[0]
            )
            cuts = self._slice_bounds(leaf, count)
            if len(cuts) > 1 and _rows_are_split(leaf):
                home = _with_rows_whole(home)  # a slice's rows may not be divisible
            leaf = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

            def parked(x):
                sharding = home if x.ndim == leaf.ndim else _replicate(home)
                host = sharding.with_memory_kind("pinned_host")
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host)

            @functools.cache  # all slices but the last have as many rows
            def slice_shapes(rows):
                draw = functools.partial(self._init_slice, rows=rows, name=name)
                return jax.tree.map(parked, jax.eval_shape(draw, leaf, 0))

            return [slice_shapes(rows) for _, rows in cuts]

        counts = () if slices is None else (slices,)
        return jax.tree_util.tree_map_with_path(leaf_shapes, params, *counts)

    def recut(self, params: Any, state: Any) -> Any:
        """Reslice a state of any slices for `update`; the state is consumed.

        The sharding of params decides how a leaf is sliced, so a state that was saved
        on one mesh may have other slices than another mesh needs.

        Args:
            params: arrays with shardings, or their shapes with shardings.
            state: the state that `init` or `update` returned, on any mesh; its arrays
                may have the shardings of `shapes(params, slices)`.

        Returns:
            The state in the slices of `init`.

        **Memory** on the device: twice the state of one leaf that is resliced.
        """

        def recut_leaf(leaf, parts, expected):
            cuts = self._slice_bounds(leaf)
            if len(parts) == len(cuts):
                return parts
            homes = jax.tree.map(lambda x: x.sharding, expected)
            again = functools.partial(_reslice, cuts=cuts, ndim=leaf.ndim)
            resliced = jax.jit(again, out_shardings=homes)(fetch(parts))
            return jax.block_until_ready(resliced)  # keep only one leaf on the device

        return jax.tree.map(recut_leaf, params, state, self.shapes(params))

    def update(self, params: Any, gradients: Any, state: Any) -> tuple[Any, Any]:
        """Apply one step to (params, state), which are consumed; gradients are not.

        Raises:
            ValueError: a leaf of params or state is not a jax array, or an array occurs
                twice; nothing is consumed then.
        """
        _check_consumable(params=params, state=state)
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        slopes = structure.flatten_up_to(gradients)
        states = structure.flatten_up_to(state)
        params = gradients = state = None  # free a leaf's memory once it is updated
        updated, under_way = [], collections.deque()
        for (path, leaf), slope, slices in zip(leaves, slopes, states, strict=True):
            name, parked = _leaf_name(path), []
            for (start, rows), part in zip(
                self._slice_bounds(leaf), slices, strict=True
            ):
                if len(under_way) == 2:  # at most one fetch and one copy back
                    jax.block_until_ready(under_way.popleft())
                leaf, part = self._update(leaf, slope, fetch(part), start, rows, name)
                parked.append(_move(part, "pinned_host"))
                under_way.append(parked[-1])
            updated.append((leaf, parked))
        jax.block_until_ready(list(under_way))
        new_params, new_state = zip(*updated, strict=True)
        return structure.unflatten(new_params), structure.unflatten(new_state)

    def _slice_bounds(self, leaf, slices=None):
        """(first row, number of rows) of each slice; only the last may be shorter.

        There are as few slices as `slice_bytes` allows, or `slices` of them.
        """
        if not leaf.ndim:
            return [(0, 1)]
        whole = leaf.shape[0]
        if not whole:  # one slice without rows holds the optimizer's counts
            return [(0, 0)]
        if slices is None and _rows_are_split(leaf):
            slices = 1  # others would be on some of the devices only
        bytes_of_row = leaf.size // whole * leaf.dtype.itemsize
        most = max(1, self._slice_bytes // max(1, bytes_of_row))
        rows = math.ceil(whole / (slices or math.ceil(whole / most)))
        return [(start, min(rows, whole - start)) for start in range(0, whole, rows)]

    def _init_slice(self, leaf, start, rows, name):
        wide = np.promote_types(leaf.dtype, np.float32)
        return self._optimizer.init({name: _slice_rows(leaf, start, rows).astype(wide)})

    def _update_slice(self, leaf, slope, state, start, rows, name):
        param, gradient = (_slice_rows(x, start, rows) for x in (leaf, slope))
        updates, state = self._optimizer.update({name: gradient}, state, {name: param})
        param = (param + updates[name]).astype(leaf.dtype)
        if not leaf.ndim:
            return param, state
        return jax.lax.dynamic_update_slice_in_dim(leaf, param, start, 0), state


def _check_consumable(**trees):
    seen = {}
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        name = path[0].key
        _check_array(name, x)
        location = name + jax.tree_util.keystr(path[1:])
        first = seen.setdefault(id(x), location)
        if first != location:
            raise ValueError(
                "params and state must contain each array once, because the update "
                f"consumes it, but {first} and {location} are the same array; leave "
                "one of them out, or jnp.copy it to train both separately"
            )


def _replicate(home):
    if isinstance(home, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())
    return home


def _with_rows_whole(home):
    if isinstance(home, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *home.spec[1:])
        return jax.sharding.NamedSharding(home.mesh, spec)
    return home


def _rows_are_split(leaf):
    home = leaf.sharding
    return home is not None and home.shard_shape(leaf.shape)[:1] < leaf.shape[:1]


def _reslice(parts, cuts, ndim):
    """Reslice the states of a leaf; values without a row axis are in every slice."""

    def slice_again(start, rows):
        return lambda first, *rest: (
            _slice_rows(jnp.concatenate([first, *rest]), start, rows)
            if first.ndim == ndim
            else first
        )

    return [jax.tree.map(slice_again(*cut), *parts) for cut in cuts]


def _slice_rows(x, start, rows):
    return jax.lax.dynamic_slice_in_dim(x, start, rows) if x.ndim else x


def _leaf_name(path):
    return str(getattr(path[-1], "key", path[-1])) if path else ""
