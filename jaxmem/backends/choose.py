"""Chooses the backend of a call, and states the reason."""

from jaxmem.backends import (
    hopper,
    hopper_blocks,
    hopper_sampled,
    xla,
    xla_blocks,
    xla_sampled,
)
from jaxmem.backends.protocol import Backend, Blocked, Sampler
from jaxmem.core import checks, messages
from jaxmem.core.operands import Head, Logits
from jaxmem.core.options import Implementation
from jaxmem.core.spec import Spec

# The fastest first; the last one runs every call on every device.
BACKENDS: tuple[Backend, ...] = (hopper, xla)
KNOWN: dict[str, Backend] = {backend.NAME: backend for backend in reversed(BACKENDS)}

_SAMPLERS: dict[str, Sampler] = {hopper.NAME: hopper_sampled, xla.NAME: xla_sampled}
_BLOCKED: dict[str, Blocked] = {hopper.NAME: hopper_blocks, xla.NAME: xla_blocks}


def blocked(backend: Backend) -> Blocked:
    """The backend's loops for `gradient_blocks`."""
    return _BLOCKED[backend.NAME]


def sampler(backend: Backend) -> Sampler:
    """The backend's loops for `gradient_samples`."""
    return _SAMPLERS[backend.NAME]


def check(implementation: Implementation | None) -> None:
    """Raise unless the implementation is None or a known name."""
    checks.check_implementation(implementation)
    if implementation is not None and implementation not in KNOWN:
        known = ", ".join(repr(name) for name in KNOWN)
        raise ValueError(
            f"implementation must be None or one of {known}, got "
            f"{messages.short(implementation)}"
        )


def choose(
    implementation: Implementation | None, spec: Spec, source: Head | Logits
) -> tuple[Backend, str]:
    """The backend of a call; a named one runs or raises, and never falls back.

    Args:
        implementation: given by the caller.
        spec: static facts of the call.
        source: head or logits.

    Returns:
        The backend, and why it was chosen.

    Raises:
        NotImplementedError: the named backend, or none, can run the call.
    """
    if spec.residual_rows:
        return _keeper(implementation, spec, source)
    if implementation is not None:
        return _named(implementation, spec, source), "named by the caller"
    why = []
    for backend in BACKENDS:
        refusal = backend.supported(spec, source)
        unproven = None if refusal else backend.unproven(spec, source)
        if refusal:
            why.append(f"runs on every device; {backend.NAME!r} does not: {refusal}")
        elif unproven:
            why.append(f"{backend.NAME!r} runs too, but {unproven}")
        else:
            return backend, "; ".join(why) or backend.ADVANTAGE
    raise NotImplementedError(f"no backend runs this call: {'; '.join(why)}")


def _named(implementation, spec, source):
    backend = KNOWN[implementation]
    refusal = backend.supported(spec, source)
    if refusal:
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run this call: {refusal}; pass "
            "implementation=None for what can"
        )
    return backend


def _keeper(implementation, spec, source):
    """The only backend that keeps exponentials, for residual_bytes."""
    (keeper,) = (backend for backend in BACKENDS if backend.KEEPS_EXPONENTIALS)
    if implementation == keeper.NAME:
        return _named(implementation, spec, source), "named by the caller"
    refusal = keeper.supported(spec, source) if implementation is None else None
    if implementation is not None or refusal:
        raise NotImplementedError(
            f"residual_bytes needs implementation={keeper.NAME!r}, which alone keeps "
            f"exponentials{f': {refusal}' if refusal else ''}; pass residual_bytes=0"
        )
    return keeper, "alone keeps exponentials for residual_bytes"
