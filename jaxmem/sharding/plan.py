"""Which axes of a mesh split tokens, the vocabulary and W's depth."""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which mesh axes split what; an empty tuple splits nothing."""

    mesh: Mesh | AbstractMesh
    vocab: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...]  # of each axis of tokens, from the first one on
    W_fsdp: tuple[str, ...]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that split tokens, in order."""
        return sum(self.tokens, ())

    def parts(self, axes: tuple[str, ...]) -> int:
        """How many parts the axes make."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def read_plan(mesh, vocab, tokens, W_fsdp):
    """Names, all there and none used twice for the same array."""
    if tokens is None:
        tokens = ()
    elif not isinstance(tokens, PartitionSpec):
        tokens = (tokens,)
    of_tokens = tuple(_names(mesh, "tokens", axes) for axes in tokens)
    plan = Plan(
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
