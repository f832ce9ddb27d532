"""`jaxmem.report`: lists which implementation ran each traced call, and why."""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any

from jaxmem.head.maths.gradients import Logits

# Calls with so few tokens or channels take longer in 8 bits than in 16: W's copy and
# the correction of kept entries outweigh the faster product.
_FEW_TOKENS, _FEW_CHANNELS = 1024, 640


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One traced call of a public function.

    Attributes:
        verb: name of the public function, such as "logprobs".
        shapes: operand name to shape, as passed by the caller.
        implementation: the backend that runs the call, and `why` it was chosen.
        chunk: tokens whose logits, or their derivative in "hopper", may be alive at
            once; None of a call without logits.
        live_logits_bytes: of float32 logits; 0 in "hopper", which stores none.
        gradient_samples: entries of each token's derivative; None for exact gradients.
        forward: the product that logits are made by.
        is_sole_backend: True if no other backend has the function.
    """

    verb: str
    shapes: dict[str, tuple[int, ...]]
    implementation: str
    why: str
    chunk: int | None = None
    live_logits_bytes: int = 0
    gradient_samples: int | None = None
    forward: Logits = "exact"
    is_sole_backend: bool = False

    def __str__(self):
        shapes = " ".join(f"{k}{list(v)}" for k, v in self.shapes.items())
        line = f"{self.verb}({shapes}): {self.implementation} ({self.why})"
        if self.chunk is None:
            return line
        stored = f"{self.live_logits_bytes / 2**20:.1f} MiB of logits"
        slower = ""
        if self.forward == "int8" and self._is_small:
            slower = (
                ", which take longer than exact ones for at most "
                f"{_FEW_TOKENS:,} tokens or {_FEW_CHANNELS} channels"
            )
        sampled = f", gradients sampled: {self.gradient_samples} entries a token"
        return (
            f"{line}, chunk={self.chunk}, "
            f"{stored if self.live_logits_bytes else 'no logits'}"
            f"{sampled if self.gradient_samples else ''}"
            f"{_LOGITS[self.forward]}{slower}"
        )

    @property
    def _is_small(self) -> bool:
        """True if the tokens or the channels of `hidden` are few."""
        *tokens, channels = self.shapes["hidden"]
        return math.prod(tokens) <= _FEW_TOKENS or channels <= _FEW_CHANNELS


_LOGITS: dict[Logits, str] = {
    "exact": "", "int8": ", logits in int8", "recorded": ", logits of these alone",
}  # fmt: skip

# jax.jit does not retrace a function that it has compiled for the same shapes.
_NOTHING_TRACED = (
    "no jaxmem call was traced in any thread while this block was open: none was made, "
    "or jax.jit had compiled it before this block. Open the block around the first "
    "call, or call jax.clear_caches() before it; wait in it for other threads' calls"
)


@dataclasses.dataclass
class Report:
    """The calls traced so far, in order; prints as one line per call."""

    calls: list[TracedCall] = dataclasses.field(default_factory=list)

    def __str__(self):
        return "\n".join(map(str, self.calls)) or _NOTHING_TRACED


# Of the whole process: trainers trace in threads, which inherit no context.
_lock = threading.Lock()
_open: list[Report] = []


@contextlib.contextmanager
def report() -> Iterator[Report]:
    """List each jaxmem call traced inside: shapes, implementation, why, bytes.

    The calls of all threads of the process are listed, while the block is open. A
    function that jax.jit has already compiled for the same shapes is not traced again,
    so its calls are not listed. Open the block around its first call, or call
    `jax.clear_caches()` first.

    Yields:
        A `Report`, filled while the block runs.

    >>> import jax.numpy as jnp, jaxmem
    >>> with jaxmem.report() as calls:
    ...     _ = jaxmem.logprobs(jnp.ones((2, 8)), jnp.ones((4, 8)), jnp.array([0, 3]))
    >>> calls.calls[0].implementation
    'xla'
    """
    new = Report()
    with _lock:
        _open.append(new)
    try:
        yield new
    finally:
        with _lock:  # by identity: reports of the same calls are equal
            _open[:] = [opened for opened in _open if opened is not new]


def record(*fields: Any) -> None:
    """Add a `TracedCall` of these fields to every open report."""
    call = TracedCall(*fields)
    with _lock:
        for opened in _open:
            opened.calls.append(call)
