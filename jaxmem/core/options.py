"""The options that every public function of a head takes, in one object."""

import dataclasses
from typing import Literal

import jax
from jax.typing import ArrayLike

from jaxmem.core.gradients import Gradient

Layout = Literal["vd", "dv"]
Chunk = int | None | Literal["auto"]
AxisName = str | tuple[str, ...]
Implementation = str  # one of `backends.choose.names()`


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The keyword options of one call, created once by the public function.

    The public function passes the object on whole. The fields have the meanings and
    defaults that `jaxmem.logprobs` documents. Some hold arrays, so an instance is an
    ordinary argument and never a static one.
    """

    chunk: Chunk = 1024
    where: ArrayLike | None = None
    temperature: ArrayLike = 1.0
    softcap: float | None = None
    bias: ArrayLike | None = None
    vocab_size: int | None = None
    layout: Layout | None = None
    gradient: Gradient | None = None
    key: jax.Array | None = None
    axis_name: AxisName | None = None
    vocab_groups: int | None = None
    implementation: Implementation | None = (
        None  # checked by the backends, which know the names
    )
