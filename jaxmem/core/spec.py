"""The static facts of one call."""

import dataclasses

import numpy as np

from jaxmem.core.options import Layout
from jaxmem.core.shards import Shards


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static facts of one call; a field is here only if a backend reads it."""

    columns: int  # of W or of the logits, padding included
    vocab_size: int  # logical; columns from here on are padding
    chunk: int  # tokens whose logits may be alive at once
    outputs: tuple[str, ...]  # fields of TokenStats that the caller gets
    compute_dtype: np.dtype  # of the GEMMs' inputs
    layout: Layout | None = None  # None: the caller already has logits
    softcap: float | None = None
    frozen_head: bool = False  # W and bias are constants
    residual_rows: int = 0  # tokens whose exponentials are kept for the derivative
    gradient_samples: int | None = None  # entries of a token's derivative; None: all
    shards: Shards | None = None  # of a vocabulary of which columns is one part
    varying: frozenset[str] = frozenset()  # mesh axes that a row's results differ along
    spread: bool = False  # jit may split the program: devices share the tokens out

    @property
    def part_varying(self) -> frozenset[str]:
        """Mesh axes that what is made of a part of the vocabulary differs along."""
        return self.varying.union(self.shards.axes if self.shards else ())

    @property
    def keeps_gradient(self) -> bool:
        """Whether the forward pass is to keep the one output's derivative by hidden.

        It then only waits to be scaled by that output's cotangent, row by row; with W
        trained, its cotangent would need the logits again.
        """
        return self.frozen_head and len(self.outputs) == 1 and not self.gradient_samples

    @property
    def stats_dtype(self) -> np.dtype:
        """Accumulation and statistics: float32, or float64 for float64 inputs."""
        return np.promote_types(self.compute_dtype, np.float32)
