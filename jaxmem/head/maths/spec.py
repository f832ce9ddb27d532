"""The static description of one call, which a backend compiles for."""

import dataclasses
from typing import Literal

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxmem.head.maths.gradients import Gradient, Logits
from jaxmem.head.maths.vocab_shards import Shards

Layout = Literal["vd", "dv"]
Chunk = int | None | Literal["auto"]
AxisName = str | tuple[str, ...]
Implementation = Literal["xla", "hopper"]  # `backends.choose.names()`


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """The keyword options of one call, created once by the public function.

    The public function passes the object on whole. The fields have the meanings and
    defaults that `jaxmem.logprobs` documents. Some hold arrays, so an instance is an
    ordinary argument and never a static one.
    """

    chunk: Chunk = 1024
    where: ArrayLike | None = None
    temperature: ArrayLike = 1.0
    gradient: Gradient | None = None
    key: jax.Array | None = None
    axis_name: AxisName | None = None
    vocab_groups: int | None = None
    # checked by the backends, which know the names
    implementation: Implementation | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static facts of one call; each field is read by at least one backend."""

    columns: int  # columns of W or of the logits, padding included
    vocab_size: int  # logical vocabulary; columns from here on are padding
    chunk: int  # tokens whose logits may be alive at once
    outputs: tuple[str, ...]  # fields of TokenStats that the caller receives
    compute_dtype: np.dtype  # of the GEMMs' inputs
    layout: Layout | None = None  # None: the caller already has logits
    softcap: float | None = None
    frozen_head: bool = False  # W and bias are not differentiated
    gradient_blocks: int = 1  # of the vocabulary, each with sums of W's gradient
    gradient_samples: int | None = None  # entries of a token's derivative; None: all
    forward: Logits = "exact"  # the product that makes the logits
    recomputes: bool = False  # backward recomputes logits even if W is constant
    shards: Shards | None = None  # the sharding of the vocabulary over mesh axes
    varying: frozenset[str] = frozenset()  # mesh axes along which row outputs vary
    # Mesh axes along which W is replicated, and `xla_sampled.over_tokens` sums its
    # gradient; W is typed as varying along all others.
    token_axes: tuple[str, ...] = ()
    token_parallel: bool = False  # True if jit may partition the call by tokens
    vocab_groups: int | None = None  # groups of columns, merged in a tree; None: none
    first: int = 0  # a group's first column within this device's shard
    shard_columns: int | None = None  # columns of a group's shard; None: no group

    @property
    def all_columns(self) -> int:
        """Columns of all shards, padding included."""
        in_shard = self.shard_columns or self.columns
        return in_shard * (self.shards.count if self.shards else 1)

    @property
    def is_part(self) -> bool:
        """True if the columns are a shard or a group of the vocabulary."""
        return bool(self.shards or self.shard_columns)

    @property
    def partial_hidden(self) -> bool:
        """True if hidden's cotangent is one term of a sum, which is rounded later."""
        return bool(self.shard_columns or (self.shards and self.shards.same_hidden))

    @property
    def part_varying(self) -> frozenset[str]:
        """Mesh axes along which values computed from one vocabulary shard vary."""
        return self.varying.union(self.shards.axes if self.shards else ())

    @property
    def keeps_gradient(self) -> bool:
        """True if the forward pass stores the derivative of the one output by hidden.

        The backward pass then only scales that residual by the output's cotangent, row
        by row. With W trained, the cotangent of W would need the logits again.
        """
        if not self.frozen_head or len(self.outputs) > 1:
            return False
        return not (self.gradient_samples or self.vocab_groups or self.recomputes)

    @property
    def stats_dtype(self) -> np.dtype:
        """The dtype of accumulators: float32, or float64 for float64 inputs."""
        return np.promote_types(self.compute_dtype, np.float32)
