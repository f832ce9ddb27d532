"""Which backend runs a call, and why."""

from jaxmem import _repr, _xla
from jaxmem._spec import Spec
from jaxmem.kernels import hopper

KNOWN = {"xla": _xla, "hopper": hopper}


def check(implementation: str | None) -> None:
    """None or a name that exists."""
    if implementation is not None and implementation not in KNOWN:
        known = ", ".join(repr(name) for name in KNOWN)
        raise ValueError(
            f"implementation must be None or one of {known}, got "
            f"{_repr.short(implementation)}"
        )


def choose(
    implementation: str | None, spec: Spec, source: _xla.Head | _xla.Logits
) -> tuple[str, str]:
    """(name, reason); a name given explicitly runs or raises, never falls back."""
    refusal = None if implementation == "xla" else hopper.supported(spec, source)
    if implementation == "hopper":
        if refusal:
            raise NotImplementedError(
                f"implementation='hopper' cannot run this call: {refusal}; pass "
                "implementation=None for what can"
            )
        return implementation, "named by the caller"
    if spec.residual_rows:
        if implementation == "xla" or refusal:
            raise NotImplementedError(
                "residual_bytes needs implementation='hopper', which alone keeps "
                f"exponentials{f': {refusal}' if refusal else ''}; pass "
                "residual_bytes=0"
            )
        return "hopper", "alone keeps exponentials for residual_bytes"
    if implementation == "xla":
        return implementation, "named by the caller"
    if refusal:
        return "xla", f"runs on every device; 'hopper' does not: {refusal}"
    unproven = hopper.unproven(spec, source)
    if unproven:
        return "xla", f"'hopper' runs too, but {unproven}"
    return (
        "hopper",
        "its token_stats measured faster than that of 'xla', in less memory",
    )
