"""The backends, and which one runs a call and why."""

import dataclasses

from jaxmem.base import messages
from jaxmem.head.backends import (
    hopper,
    hopper_blocks,
    hopper_eight_bits,
    hopper_rows,
    hopper_sampled,
    xla,
    xla_blocks,
    xla_columns,
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
        reductions=hopper_rows,
    ),
    Backend(
        name="xla",
        advantage="runs on every device",
        stores_logits=True,
        loops=xla,
        blocks=xla_blocks,
        sampler=xla_sampled,
        eight_bits=xla_eight_bits,
        columns=xla_columns,
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
    return _first_able(BACKENDS, spec, source)


def check_columns(verb: str, implementation: Implementation | None) -> None:
    """Raise unless a verb that reads single columns can have this implementation."""
    check(implementation)
    if implementation not in (None, *(x.name for x in with_columns())):
        raise NotImplementedError(
            f"implementation={implementation!r} has no {verb}: its kernels reduce one "
            "head's logits to the statistics of token_stats and keep no row of them; "
            "pass implementation=None"
        )


def choose_columns(
    implementation: Implementation | None, spec: Spec, source: Factors
) -> tuple[Backend, str]:
    """`choose`, for a verb that reads single columns of the logits.

    If the caller names no backend, others lend what they have: reductions of logits in
    memory, and sums of sampled entries.
    """
    if implementation is not None:
        return _named_backend(implementation, spec, source), "named by the caller"
    backend, why = _first_able(with_columns(), spec, source)
    all_reductions = [x.reductions for x in (backend, *BACKENDS) if x.reductions]
    able = (x for x in all_reductions if x.is_of_machine())
    reductions = next(able, None)
    sampler = backend.sampler
    if spec.gradient_samples:
        sampler = choose(None, spec, source)[0].sampler
    return dataclasses.replace(backend, reductions=reductions, sampler=sampler), why


def with_columns() -> list[Backend]:
    """The backends of verbs that read single columns, the fastest first."""
    return [backend for backend in BACKENDS if backend.columns is not None]


def _first_able(backends, spec, source):
    """The first of these backends that can run the call, and why."""
    refusals = {x.name: x.refuses(spec, source) for x in backends}
    able = [backend for backend in backends if not refusals[backend.name]]
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
