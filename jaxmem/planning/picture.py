"""Draws stacked bars of memory, one per program or option, and the device's limit."""

from collections.abc import Sequence
from pathlib import Path

from jaxmem.planning.plans import Plan, PlannedPhase
from jaxmem.planning.search import Option

_GIB = 2**30


def save(path: Path, plan: Plan, options: Sequence[Option] = ()) -> None:
    """Draw a plan and its options, each option by its largest program."""
    from matplotlib.figure import Figure

    bars = {phase.name: _stack_sizes(phase) for phase in plan.phases}
    for option in options:
        largest = max(option.plan.phases, key=lambda phase: phase.total)
        bars["\n".join(option.overrides)] = _stack_sizes(largest)
    parts = list(dict.fromkeys(name for stack in bars.values() for name in stack))
    figure = Figure(figsize=(2 + 1.6 * len(bars), 5), layout="constrained")
    panel = figure.subplots()
    bottoms = [0.0] * len(bars)
    for part in parts:
        heights = [stack.get(part, 0) / _GIB for stack in bars.values()]
        panel.bar(list(bars), heights, bottom=bottoms, label=part, width=0.6)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    panel.axhline(plan.memory / _GIB, color="black", label=f"one {plan.device}")
    if plan.limit < plan.memory:
        panel.axhline(
            plan.limit / _GIB, color="black", linestyle="--", label="jax's by default"
        )
    panel.set_ylabel("GiB of one device")
    panel.tick_params(axis="x", labelsize=8)
    figure.legend(loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _stack_sizes(phase: PlannedPhase) -> dict[str, int]:
    """Bytes from bottom to top: known temporaries first, then the remaining ones."""
    by_name = dict(phase.resident)
    known = 0
    for name in ("activations kept", "keys and values"):
        part = min(phase.parts.get(name, 0), phase.account.temporary - known)
        if part:
            by_name[name], known = part, known + part
    by_name["other temporaries"] = phase.account.temporary - known
    by_name["cuDNN's workspace"] = phase.account.workspace
    by_name["the runtime"] = phase.total - sum(by_name.values())
    return {name: size for name, size in by_name.items() if size}
