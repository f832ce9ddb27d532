"""Meshes with explicit axes, along which the types of arrays say how they are sharded.

jax would ask of every operation inside a verb how its result is sharded. So the verb
runs with these axes automatic, as on any other mesh, and its results get such types
again. In a `jax.shard_map` that binds only some axes, gradients are to be taken inside:
jax cannot pass what the backward pass needs out of it and in again.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def with_automatic_axes(
    result: Callable[[Mapping[str, Any]], Any],
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Decorates a function of arrays such that it sees no explicit axes.

    Gradients are sharded as what they are gradients of, as jax has it.

    Args:
        result: from the function's arguments by name to the PartitionSpecs, along the
            explicit axes, of what it returns: a tree prefix.
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
    """function of the call's arguments, those of the mesh without explicit axes."""
    leaves, tree = jax.tree.flatten(call.arguments)
    places = [i for i, x in enumerate(leaves) if is_typed(x)]

    def run(*arrays):
        given = dict(zip(places, arrays, strict=True))
        given = tree.unflatten([given.get(i, x) for i, x in enumerate(leaves)])
        automatic = inspect.BoundArguments(call.signature, given)
        return function(*automatic.args, **automatic.kwargs)

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(
        run, axes=explicit_axes(mesh), out_sharding=shardings
    )(*(_unmarked(jnp.asarray(leaves[i])) for i in places))


def sharded_like(**sources: int) -> Callable[[Mapping[str, Any]], PartitionSpec]:
    """A result for `with_automatic_axes`, each axis as in the first source to shard it.

    Args:
        sources: names of arguments, and how many of their axes come after the result's.
    """
    return lambda arguments: merged(
        *(spec_of(arguments.get(name), after) for name, after in sources.items())
    )


def spec_of(x: Any, after: int = 0) -> tuple:
    """What shards each axis of x, but for so many at its end; () if x is no array."""
    if not _is_array(x):
        return ()
    spec, ndim = _type(x).spec.partitions, jnp.ndim(x)
    return (*spec, *(None,) * (ndim - len(spec)))[: max(ndim - after, 0)]


def merged(*specs: tuple) -> PartitionSpec:
    """For each axis what first shards it, if that shards no axis before it."""
    made, used = [], set()
    for entries in itertools.zip_longest(*specs):
        names = [(x,) if isinstance(x, str) else tuple(x or ()) for x in entries]
        free = (x for x in names if x and not used & set(x))
        made.append(next(free, None))
        used.update(made[-1] or ())
    return PartitionSpec(*made)


def _unmarked(x):
    """x not `reduced` by its type, which asks for parts of a gradient yet to be summed.

    XLA's partitioner fails on such parts of what the verbs return.
    """
    sharding = _type(x)
    if not sharding.spec.reduced:
        return x
    spec = PartitionSpec(*sharding.spec.partitions)
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def explicit_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Names of the mesh's explicit axes."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in types if kind == AxisType.Explicit)


def automatic(x: jax.Array) -> jax.Array:
    """An array as `with_automatic_axes` gives it to its function, called within it."""
    return jax.sharding.reshard(x, PartitionSpec()) if is_typed(x) else x


def _explicit_mesh(tree) -> Mesh | AbstractMesh | None:
    """The context's mesh, or that of an array, if it has explicit axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if explicit_axes(mesh):
        return mesh
    typed = filter(is_typed, jax.tree.leaves(tree))
    return next((_type(x).mesh for x in typed), None)


def is_typed(x) -> bool:
    """Whether x is an array of a mesh that has explicit axes."""
    return _is_array(x) and bool(explicit_axes(_type(x).mesh))


def _is_array(x):
    """An array, or what wraps one, such as an nnx.Variable."""
    return isinstance(x, jax.Array) or hasattr(x, "__jax_array__")


def _type(x) -> NamedSharding:
    return jax.typeof(jnp.asarray(x)).sharding
