"""Formats a plan as lines of text."""

import collections
from typing import Any

from jaxmem.base.messages import aligned

_GIB = 2**30
_MANY = 6  # products that are listed


def gib(size: float) -> str:
    """Bytes in GiB, with two decimals."""
    return f"{size / _GIB:.2f}"


def text(plan: Any) -> str:
    """The whole `Plan`: memory, verdict, work, communication, notes."""
    parts = [_memory_table(plan), plan.verdict]
    if plan.restored:
        parts.append(f"A checkpoint restores {gib(plan.restored)} GiB to a device.")
    if plan.on_host:
        parts.append(f"State on the host: {gib(plan.on_host)} GiB per device.")
    parts += filter(None, [_work_table(plan), _product_table(plan)])
    return "\n\n".join([*parts, *plan.notes])


def _memory_table(plan) -> str:
    phases = plan.phases
    names = dict.fromkeys(name for phase in phases for name in phase.resident)
    rows = [[f"GiB of one {plan.device}", *(phase.name for phase in phases)]]
    for name in names:
        rows.append(
            [name, *(_format_size(phase.resident.get(name)) for phase in phases)]
        )
    rows.append(
        ["temporaries", *(_format_size(phase.account.temporary) for phase in phases)]
    )
    for name in dict.fromkeys(name for phase in phases for name in phase.parts):
        rows.append(
            [f"  {name}", *(_format_size(phase.parts.get(name)) for phase in phases)]
        )
    for name, read in {
        "cuDNN's workspace": lambda phase: phase.account.workspace,
        "the runtime": _runtime_bytes,
        "total": lambda phase: phase.total,
        "on the host": lambda phase: phase.account.host,
    }.items():
        sizes = [read(phase) for phase in phases]
        if any(sizes):
            rows.append([name, *map(_format_size, sizes)])
    return aligned(rows)


def _runtime_bytes(phase):
    known = sum(phase.resident.values()) + phase.account.temporary
    return phase.total - known - phase.account.workspace


def _format_size(size) -> str:
    return "" if size is None else gib(size)


def _work_table(plan) -> str:
    rows = [
        [
            "one run, estimated",
            "runs",
            "TFLOP",
            "GB",
            "sent GB",
            "collectives",
            "seconds",
        ]
    ]
    for phase in plan.phases:
        estimate = phase.estimate
        rows.append(
            [
                phase.name, f"{phase.runs:.3g}", f"{estimate.operations / 1e12:.2f}",
                f"{estimate.bytes / 1e9:.2f}", f"{estimate.sent / 1e9:.2f}",
                _count_kinds(phase.account.collectives),
                _format_range(estimate.low, estimate.high),
            ]
        )  # fmt: skip
    low, high = plan.seconds
    lines = [aligned(rows)]
    if high:
        line = f"A step: {_format_range(low, high)} s"
        if plan.tokens:
            line += f", {plan.tokens / high:,.0f} to {plan.tokens / low:,.0f} tokens/s"
        lines.append(
            f"{line}, estimated from matrix products at the device's peak rates, in "
            "the range that H200s reached."
        )
    return "\n".join(lines)


def _count_kinds(collectives) -> str:
    counts = collections.Counter()
    for collective in collectives:
        counts[collective.kind] += max(collective.times, 1)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def _format_range(low: float, high: float) -> str:
    return f"{low:.3g} to {high:.3g}"


def _product_table(plan) -> str:
    entries = [
        (phase.runs * product.seconds, phase.name, product, phase.runs)
        for phase in plan.phases
        for product in phase.estimate.products
    ]
    entries.sort(key=lambda entry: -entry[0])
    whole = sum(entry[0] for entry in entries)
    if not whole:
        return ""
    rows = [["products of a step", "in", "times", "TFLOP", "GB", "of the bound"]]
    for seconds, name, product, runs in entries[:_MANY]:
        rows.append(
            [
                product.name, name, f"{runs * product.times:.0f}",
                f"{runs * product.operations / 1e12:.2f}",
                f"{runs * product.bytes / 1e9:.1f}", f"{seconds / whole:.0%}",
            ]
        )  # fmt: skip
    return aligned(rows)
