"""The backends, and which one runs a call and why."""

from jaxmem.base import messages
from jaxmem.head.backends import (
    hopper,
    hopper_blocks,
    hopper_eight_bits,
    hopper_sampled,
    xla,
    xla_blocks,
    xla_eight_bits,
    xla_sampled,
)
from jaxmem.head.backends.protocol import Backend
from jaxmem.head.maths import checks
from jaxmem.head.maths.backend_operands import CallerLogits, Factors
from jaxmem.head.maths.spec import Implementation, Spec

# The fastest first; the last one runs on every device.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="hopper",
        advantage="token_stats was measured to be faster than 'xla', in less memory",
        stores_logits=False,
        loops=hopper,
        limits=hopper,
        blocks=hopper_blocks,
        sampler=hopper_sampled,
        eight_bits=hopper_eight_bits,
    ),
    Backend(
        name="xla",
        advantage="runs on every device",
        stores_logits=True,
        loops=xla,
        blocks=xla_blocks,
        sampler=xla_sampled,
        eight_bits=xla_eight_bits,
    ),
)


def names() -> tuple[str, ...]:
    """The names that `implementation=` takes; the one for every device first."""
    return tuple(backend.name for backend in reversed(BACKENDS))


def of_machine() -> tuple[str, ...]:
    """The names of the backends that this process can run, the fastest first."""
    return tuple(backend.name for backend in BACKENDS if backend.is_of_machine())


def check(implementation: Implementation | None) -> None:
    """Raise unless the implementation is None or a known name."""
    if implementation is None:
        return
    if not isinstance(implementation, str):
        raise TypeError(
            f"implementation must be a name or None, got {checks.brief(implementation)}"
        )
    if implementation not in names():
        raise ValueError(
            f"implementation must be None or one of {', '.join(map(repr, names()))}, "
            f"got {messages.short(implementation)}"
        )


def choose(
    implementation: Implementation | None, spec: Spec, source: Factors | CallerLogits
) -> tuple[Backend, str]:
    """The backend of a call, and why; a named one runs or raises: no fallback."""
    if implementation is not None:
        return _named_backend(implementation, spec, source), "named by the caller"
    refusals = {x.name: x.refuses(spec, source) for x in BACKENDS}
    able = [backend for backend in BACKENDS if not refusals[backend.name]]
    why = [f"{name!r} does not: {said}" for name, said in refusals.items() if said]
    if not able:
        raise NotImplementedError(f"no backend runs this call: {'; '.join(why)}")
    for backend in able[:-1]:
        unproven = backend.unproven(spec, source)
        if not unproven:
            return backend, backend.advantage
        why.append(f"{backend.name!r} runs too, but {unproven}")
    return able[-1], "; ".join([able[-1].advantage, *why])


def _named_backend(implementation, spec, source):
    check(implementation)
    named = next(x for x in BACKENDS if x.name == implementation)
    if refused := named.refuses(spec, source):
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run this call: {refused}; pass "
            "implementation=None to choose a backend that can"
        )
    return named
