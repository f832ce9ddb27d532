"""Verbs on meshes with explicit axes, along which the types of arrays are split.

jax would ask of every operation inside a verb how its result is sharded. So a verb runs
with these axes automatic, as on any other mesh, and only its results get types again.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def with_automatic_axes(
    form: Callable[[PartitionSpec], Any] = lambda tokens: tokens, **sources: int
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Decorates a function of arrays that is to see no explicit axes.

    Its results are sharded along the explicit axes as its arguments are: each axis of
    the tokens as in the first of `sources` that shards it. Gradients are sharded as
    what they are gradients of.

    Args:
        form: from the tokens' PartitionSpec to those of the results, a tree prefix.
        sources: arguments with an axis for each of the result's, and how many further
            axes come after these.
    """

    def decorate(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args, **kwargs):
            if not (mesh := _explicit_mesh((args, kwargs))):
                return function(*args, **kwargs)
            call = signature.bind(*args, **kwargs)
            leaves, tree = jax.tree.flatten(call.arguments)
            places = [i for i, x in enumerate(leaves) if is_typed(x)]

            def automatic(*arrays):
                given = tree.unflatten(_replaced(leaves, places, arrays))
                of_call = inspect.BoundArguments(signature, given)
                return function(*of_call.args, **of_call.kwargs)

            tokens = _merged(*(_spec(call, *source) for source in sources.items()))
            return jax.sharding.auto_axes(
                automatic,
                axes=explicit_axes(mesh),
                out_sharding=jax.tree.map(
                    lambda spec: NamedSharding(mesh, spec), form(tokens)
                ),
            )(*(jnp.asarray(leaves[i]) for i in places))

        return run

    return decorate


def explicit_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """Names of the mesh's explicit axes."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in types if kind == AxisType.Explicit)


def automatic(x: jax.Array) -> jax.Array:
    """An array as `with_automatic_axes` gives it to its function, called within it."""
    return jax.sharding.reshard(x, PartitionSpec()) if is_typed(x) else x


def _explicit_mesh(tree) -> AbstractMesh | None:
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


def _spec(call, name, after):
    """What shards each axis of an argument, but for so many axes at its end."""
    value = call.arguments.get(name)
    if not _is_array(value):
        return ()
    spec, ndim = tuple(_type(value).spec), jnp.ndim(value)
    return (*spec, *(None,) * (ndim - len(spec)))[: max(ndim - after, 0)]


def _merged(*specs) -> PartitionSpec:
    """For each axis the first spec that shards it, along axes not used before it."""
    made, used = [], set()
    for entries in itertools.zip_longest(*specs):
        names = [(x,) if isinstance(x, str) else tuple(x or ()) for x in entries]
        free = (x for x in names if x and not used & set(x))
        made.append(next(free, None))
        used.update(made[-1] or ())
    return PartitionSpec(*made)


def _replaced(leaves, places, arrays):
    new = dict(zip(places, arrays, strict=True))
    return [new.get(i, x) for i, x in enumerate(leaves)]
