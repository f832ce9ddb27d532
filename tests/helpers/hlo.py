"""The texts of programs, and what they say of matrix products."""

import re

import jax


def shapes_of(text):
    """Shape of every value in an HLO text, by name."""
    return dict(re.findall(r"%?([\w.-]+) = \w+\[([\d,]*)\]", text))


def vocabulary_gemms(text, size):
    """Matrix products with an operand or a result as large as the vocabulary."""
    shapes, count = shapes_of(text), 0
    for name, operands in re.findall(r"%?([\w.-]+) = [^\n]*? dot\(([^)]*)\)", text):
        names = [name, *re.findall(r"%([\w.-]+)", operands)]
        count += any(str(size) in shapes.get(n, "").split(",") for n in names)
    return count


def lowered_for_an_h200(run, *operands, **more):
    """The text of a function's program, lowered for a GPU that is not there."""
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(*operands, **more)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
