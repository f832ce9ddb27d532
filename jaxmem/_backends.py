"""Which backend runs a call, and why."""

from jaxmem import _xla

KNOWN = {"xla": _xla}


def choose(implementation: str | None) -> tuple[str, str]:
    """(name, reason); a name given explicitly runs or raises, never falls back."""
    if implementation is None:
        return "xla", "runs on every device; no kernel for this one yet"
    if implementation not in KNOWN:
        known = ", ".join(repr(name) for name in KNOWN)
        raise ValueError(
            f"implementation must be None or one of {known}, got {implementation!r}"
        )
    return implementation, "named by the caller"
