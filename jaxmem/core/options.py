"""The options of a call that the public functions share, in one object."""

import dataclasses
from typing import Literal

import jax
from jax.typing import ArrayLike

from jaxmem.core.gradients import Gradient

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
