"""What ran, and why: every call traced inside a `with jaxmem.report()`."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a jaxmem verb, as it was traced.

    Attributes:
        verb: public name, such as "logprobs".
        shapes: operand name to shape, as given.
        implementation: backend that runs it.
        why: why that one.
        chunk: tokens whose logits may be alive at once.
        live_logits_bytes: chunk · V · 4, the float32 logits alive at once.
    """

    verb: str
    shapes: dict[str, tuple[int, ...]]
    implementation: str
    why: str
    chunk: int
    live_logits_bytes: int

    def __str__(self):
        shapes = " ".join(f"{k}{list(v)}" for k, v in self.shapes.items())
        return (
            f"{self.verb}({shapes}): {self.implementation} ({self.why}), "
            f"chunk={self.chunk}, {self.live_logits_bytes / 2**20:.1f} MiB of logits"
        )


@dataclasses.dataclass
class Report:
    """The calls seen so far, in order; prints as one line a call."""

    calls: list[Call] = dataclasses.field(default_factory=list)

    def __str__(self):
        return "\n".join(map(str, self.calls)) or "no jaxmem call was traced"


_open: contextvars.ContextVar[tuple[Report, ...]] = contextvars.ContextVar(
    "jaxmem_reports", default=()
)


@contextlib.contextmanager
def report() -> Iterator[Report]:
    """Lists each jaxmem call traced inside: shapes, implementation, why, bytes.

    A function that jax.jit has already compiled for the same shapes is not traced
    again, so it is not listed again.

    Yields:
        A `Report`, filled while the block runs.

    >>> import jax.numpy as jnp, jaxmem
    >>> with jaxmem.report() as calls:
    ...     _ = jaxmem.logprobs(jnp.ones((2, 8)), jnp.ones((4, 8)), jnp.array([0, 3]))
    >>> calls.calls[0].implementation
    'xla'
    """
    made = Report()
    token = _open.set((*_open.get(), made))
    try:
        yield made
    finally:
        _open.reset(token)


def record(call: Call) -> None:
    """Adds the call to every open report."""
    for made in _open.get():
        made.calls.append(call)
