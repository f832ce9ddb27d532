"""Meshes of devices, and collectives of programs over them."""

import dataclasses
import functools
import re
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmem

# What the mesh looks like, the axes of the tokens, those of the vocabulary.
MESHES = {
    "1x8": ({"data": 1, "tensor": 8}, "data", "tensor"),
    "2x4": ({"data": 2, "tensor": 4}, "data", "tensor"),
    "4x2": ({"data": 4, "tensor": 2}, "data", "tensor"),
    "8x1": ({"data": 8, "tensor": 1}, "data", "tensor"),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, ("data", "fsdp"), "tensor"),
    "vocabulary over two axes": ({"data": 2, "tensor": 2, "expert": 2}, "data",
     ("tensor", "expert")),
}  # fmt: skip
SEQUENCES = P(("data", "fsdp"), "sequence")

# The mesh, and how parallel splits over it.
PLANS = {
    "1x8": ((1, 8), ("data", "tensor"), {"tokens": "data"}),
    "2x4": ((2, 4), ("data", "tensor"), {"tokens": "data"}),
    "4x2": ((4, 2), ("data", "tensor"), {"tokens": P(None, "data")}),
    "fewer tokens than devices": ((8, 1), ("data", "tensor"), {"tokens": "data"}),
    "W in parts of D": (
        (2, 2, 2),
        ("data", "fsdp", "tensor"),
        {"tokens": ("data", "fsdp"), "W_fsdp": "fsdp"},
    ),
    "sequences": (
        (1, 2, 2, 2),
        ("data", "fsdp", "sequence", "tensor"),
        {"tokens": SEQUENCES, "W_fsdp": ("fsdp", "sequence")},
    ),
}


def parallel(verb, name, kind=AxisType.Auto, **changes):
    sizes, axes, options = PLANS[name]
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(axes)
    mesh = jax.make_mesh(sizes, axes, axis_types=kinds)
    options = {"vocab": "tensor"} | options | changes
    return jaxmem.sharding.parallel(verb, mesh, **options)


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """The functions of `jaxmem` over the mesh of a plan."""

    plan: str
    kind: Any = AxisType.Auto
    changes: tuple = ()

    def __getattr__(self, name):
        verb = getattr(jaxmem, name)
        return parallel(verb, self.plan, self.kind, **dict(self.changes))


# What these programs compute is a trifle beside what compiling them well takes.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def mesh_of(shape):
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


@dataclasses.dataclass(frozen=True)
class ByHand:
    """The functions of `jaxmem` with axis_name, inside a `jax.shard_map`."""

    mesh: str
    check_vma: bool = True

    def __getattr__(self, function):
        shape, tokens, vocabulary = MESHES[self.mesh]

        def is_head(x):
            return isinstance(x, jaxmem.Head)

        def spec_of(x):
            if not is_head(x):
                return P(tokens)
            W = P(vocabulary) if x.layout == "vd" else P(None, vocabulary)
            bias = None if x.bias is None else P(vocabulary)
            return dataclasses.replace(x, W=W, bias=bias)

        def call(*args, **options):
            leaves, tree = jax.tree.flatten((args, options), is_leaf=is_head)
            split = [is_head(x) or getattr(x, "ndim", 0) > 0 for x in leaves]
            arrays = [x for x, is_array in zip(leaves, split, strict=True) if is_array]

            def run(*parts):
                parts = iter(parts)
                pairs = zip(leaves, split, strict=True)
                made = [next(parts) if is_array else x for x, is_array in pairs]
                args, options = tree.unflatten(made)
                return getattr(jaxmem, function)(*args, axis_name=vocabulary, **options)

            return jax.shard_map(
                run, mesh=mesh_of(shape), in_specs=tuple(map(spec_of, arrays)),
                out_specs=P(tokens), check_vma=self.check_vma,
            )(*arrays)  # fmt: skip

        return call


@dataclasses.dataclass(frozen=True)
class InParts:
    """The functions of `jaxmem` of arrays that lie in parts over a mesh, for `jax.jit`.

    `tokens` are the mesh axes of each array's first axes; `W` those of W [V, D].
    """

    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    tokens: P
    W: P

    def __getattr__(self, function):
        kinds = (AxisType.Auto,) * len(self.axes)
        mesh = jax.make_mesh(self.sizes, self.axes, axis_types=kinds)

        def is_head(x):
            return isinstance(x, jaxmem.Head)

        def put(x, spec):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        def place(x):
            if is_head(x):
                by_row = (*self.W, None, None)[:2]
                W = P(*(by_row if x.layout == "vd" else by_row[::-1]))
                return dataclasses.replace(x, W=put(x.W, W))
            is_of_tokens = getattr(x, "ndim", 0) >= len(self.tokens)
            return put(x, self.tokens) if is_of_tokens else x

        def call(*args, **options):
            args, options = jax.tree.map(place, (args, options), is_leaf=is_head)
            return getattr(jaxmem, function)(*args, **options)

        return call


COLLECTIVE = re.compile(
    r"%(\w+)[\w.-]* = (\S+?)(?:{[\d,]*})? "
    r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
)


def collectives(fn, *operands):
    """(what jax calls it, its result) of each in the compiled program, in order."""
    return COLLECTIVE.findall(jax.jit(fn).lower(*operands).compile().as_text())
