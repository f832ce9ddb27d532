"""Meshes with explicit axes, where array types state how arrays are sharded.

On such a mesh jax would ask every operation inside a verb how its result is sharded.
The verb therefore runs with these axes automatic, and its results receive explicit
shardings again. Inside a `jax.shard_map` that binds only some axes, take gradients
inside of it: jax cannot pass residuals out of the `shard_map` and in again.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def with_automatic_axes(
    result: Callable[[Mapping[str, Any]], Any],
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Decorate a function of arrays so that all mesh axes are automatic inside it.

    Each gradient is sharded like the array that it is a gradient of, as jax requires.
    `result` maps the function's arguments by name to a tree prefix of the
    PartitionSpecs of its results along the explicit axes.
    """

    def decorate(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            mesh = _explicit_mesh((args, kwargs))
            if mesh is None:
                return function(*args, **kwargs)
            call = signature.bind(*args, **kwargs)
            return _run_automatic(function, mesh, call, result(call.arguments))

        return run

    return decorate


def _run_automatic(function, mesh, call, specs) -> Any:
    """Call the function with the mesh's explicit axes turned into automatic ones."""
    leaves, tree = jax.tree.flatten(call.arguments, is_leaf=_is_no_tree)
    indices = [i for i, x in enumerate(leaves) if mesh_of(x)]

    def run(*arrays):
        by_index = dict(zip(indices, arrays, strict=True))
        values = [by_index.get(i, x) for i, x in enumerate(leaves)]
        automatic = inspect.BoundArguments(call.signature, tree.unflatten(values))
        return function(*automatic.args, **automatic.kwargs)

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(
        run, axes=explicit_axes(mesh), out_sharding=shardings
    )(*(_reshard_reduced(jnp.asarray(leaves[i])) for i in indices))


def sharded_like(**sources: int) -> Callable[[Mapping[str, Any]], PartitionSpec]:
    """A `result` for `with_automatic_axes`: each axis as the first source to shard it.

    Sources are names of arguments, with the number of trailing axes that the result
    lacks.
    """
    return lambda arguments: merged(
        *(spec_of(arguments.get(name), after) for name, after in sources.items())
    )


def spec_of(x: Any, after: int = 0) -> tuple:
    """The spec of x's axes except the last `after` ones; () if none is explicit."""
    if mesh_of(x) is None:
        return ()
    spec, ndim = _sharding_of(x).spec.partitions, jnp.ndim(x)
    return (*spec, *(None,) * (ndim - len(spec)))[: max(ndim - after, 0)]


def merged(*specs: tuple) -> PartitionSpec:
    """For each axis the first entry that shards it, unless an earlier axis uses it."""
    axes, used = [], set()
    for entries in itertools.zip_longest(*specs):
        names = [(x,) if isinstance(x, str) else tuple(x or ()) for x in entries]
        free = (x for x in names if x and not used & set(x))
        axes.append(next(free, None))
        used.update(axes[-1] or ())
    return PartitionSpec(*axes)


def _reshard_reduced(x):
    """Reshard x if its type is `reduced`, which requests unreduced cotangents.

    XLA's partitioner fails on unreduced values of what the verbs return.
    """
    sharding = _sharding_of(x)
    if not sharding.spec.reduced:
        return x
    spec = PartitionSpec(*sharding.spec.partitions)
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def explicit_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Names of the mesh's explicit axes."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in types if kind == AxisType.Explicit)


def automatic(x: jax.Array) -> jax.Array:
    """The array as a function decorated by `with_automatic_axes` receives it.

    Call it inside such a function.
    """
    return jax.sharding.reshard(x, PartitionSpec()) if mesh_of(x) else x


def _explicit_mesh(tree) -> Mesh | AbstractMesh | None:
    """The mesh with explicit axes, from the context or from an array; else None."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return mesh
    meshes = map(mesh_of, jax.tree.leaves(tree, is_leaf=_is_no_tree))
    return next(filter(None, meshes), None)


def mesh_of(x) -> AbstractMesh | None:
    """The mesh with explicit axes that an array is on; None for anything else.

    An array may be wrapped, as an nnx.Variable does.
    """
    if not isinstance(x, jax.Array) and not hasattr(x, "__jax_array__"):
        return None
    mesh = jax.typeof(jnp.asarray(x)).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def _is_no_tree(x):
    """A list becomes an array, and may be nested too deeply to be flattened."""
    return isinstance(x, list | Iterator)


def _sharding_of(x) -> NamedSharding:
    return jax.typeof(jnp.asarray(x)).sharding
