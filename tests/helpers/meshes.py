"""Meshes of devices, and collectives of programs over them."""

import functools
import re

import jax
from jax.sharding import AxisType, PartitionSpec as P

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
# What these programs compute is a trifle beside what compiling them well takes.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def mesh_of(shape):
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


COLLECTIVE = re.compile(
    r"%(\w+)[\w.-]* = (\S+?)(?:{[\d,]*})? "
    r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
)


def collectives(fn, *operands):
    """(what jax calls it, its result) of each in the compiled program, in order."""
    return COLLECTIVE.findall(jax.jit(fn).lower(*operands).compile().as_text())


def sharded_by(split, call, name, **options):
    """The call over a mesh; of its six operands, those at `split` by the vocabulary."""
    shape, tokens, vocabulary = MESHES[name]
    specs = [P(vocabulary if i in split else tokens) for i in range(6)]
    return jax.shard_map(
        functools.partial(call, axis_name=vocabulary),
        mesh=mesh_of(shape),
        in_specs=tuple(specs),
        out_specs=P(tokens),
        **options,
    )
