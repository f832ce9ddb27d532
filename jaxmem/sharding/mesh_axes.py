"""The mesh axes that shard tokens, the vocabulary and the depth D of W."""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh, PartitionSpec


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Mesh axes by what they shard; an empty tuple shards nothing."""

    mesh: Mesh | AbstractMesh
    vocab: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]  # for each axis of the tokens, from the first
    W_fsdp: tuple[str, ...]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard tokens, in order."""
        return sum(self.tokens, ())

    def parts(self, axes: tuple[str, ...]) -> int:
        """The number of shards along the axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def read_plan(mesh, vocab, tokens, W_fsdp):
    """Check the names of the mesh axes: they exist, and none shards one array twice."""
    if tokens is None:
        tokens = ()
    elif not isinstance(tokens, PartitionSpec):
        tokens = (tokens,)
    of_tokens = tuple(_names(mesh, "tokens", axes) for axes in tokens)
    plan = MeshAxes(
        mesh, _names(mesh, "vocab", vocab), of_tokens, _names(mesh, "W_fsdp", W_fsdp)
    )
    for axis in (used := plan.vocab + plan.token_axes):
        if used.count(axis) > 1:
            raise ValueError(
                f"vocab and tokens must split along different mesh axes, got {axis!r} "
                "twice"
            )
    if len(set(plan.W_fsdp)) < len(plan.W_fsdp):
        raise ValueError(f"W_fsdp must name a mesh axis once, got {W_fsdp!r}")
    for axis in plan.W_fsdp:
        if axis not in plan.token_axes:
            raise ValueError(
                f"W_fsdp must name mesh axes that split tokens too, got {axis!r}, and "
                f"tokens={plan.token_axes}"
            )
    return plan


def _names(mesh, argument, axes) -> tuple[str, ...]:
    axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got "
            f"{axes!r}"
        )
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f"{argument} must name axes of the mesh, {tuple(mesh.axis_names)}, got "
                f"{axis!r}"
            )
    return axes
