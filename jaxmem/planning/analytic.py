"""Estimates a job's memory from its traced programs, if they cannot be compiled."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxmem.base import messages
from jaxmem.devices import Device
from jaxmem.head.maths import checks, eight_bits
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.training_head import HeadConfig
from jaxmem.planning import accounts, table
from jaxmem.remat import liveness
from jaxmem.train.phases import Phase, Programs, device_bytes

# XLA's temporaries over those of `liveness`: in benchmarks/results/plan_shapes.csv,
# rounded outwards. Attention by "xla" makes the upper end, as its scores are copied.
SPREAD = (0.85, 1.25)


@dataclasses.dataclass(frozen=True)
class ShapedPhase:
    """One program: bytes on one device, by its shapes."""

    name: str  # name of the program, such as "update"
    resident: dict[str, int]  # bytes by name while it runs, the runtime's among them
    temporaries: int  # most bytes alive at once beside them
    parts: dict[str, int]  # known temporaries by name, not all alive at once

    @property
    def low(self) -> int:
        """The least that it may take."""
        return sum(self.resident.values()) + int(SPREAD[0] * self.temporaries)

    @property
    def expected(self) -> int:
        """Bytes that it takes if XLA allocates as `liveness` does."""
        return sum(self.resident.values()) + self.temporaries

    @property
    def high(self) -> int:
        """The most that it may take."""
        return sum(self.resident.values()) + int(SPREAD[1] * self.temporaries)


@dataclasses.dataclass(frozen=True)
class ShapedPlan:
    """The estimate of a job on one device, only from shapes."""

    device: Device
    phases: tuple[ShapedPhase, ...]
    notes: tuple[str, ...] = ()  # further sentences for the reader

    @property
    def range(self) -> tuple[int, int]:
        """The least and the most bytes of the largest program."""
        return max(p.low for p in self.phases), max(p.high for p in self.phases)

    @property
    def expected(self) -> int:
        """Bytes of the largest program."""
        return max(phase.expected for phase in self.phases)

    @property
    def fits(self) -> bool | None:
        """True if the whole range fits, False if none of it does, None between."""
        most, (low, high) = self.device.usable, self.range
        return None if low <= most < high else high <= most

    @property
    def verdict(self) -> str:
        """A sentence that says if the job fits."""
        said = {True: "fits", False: "does not fit", None: "may fit"}[self.fits]
        low, high = map(table.gib, self.range)
        return (
            f"{said}: about {table.gib(self.expected)}, between {low} and {high} of "
            f"{table.gib(self.device.memory)} GiB per device"
        )

    def __str__(self) -> str:
        rows = [[f"GiB of one {self.device.name}", *(p.name for p in self.phases)]]
        names = dict.fromkeys(name for p in self.phases for name in p.resident)
        parts = dict.fromkeys(name for p in self.phases for name in p.parts)

        def line(name, sizes):
            cells = ["" if size is None else table.gib(size) for size in sizes]
            rows.append([name, *cells])

        for name in names:
            line(name, [phase.resident.get(name) for phase in self.phases])
        line("temporaries, about", [phase.temporaries for phase in self.phases])
        for name in parts:
            line(f"  {name}", [phase.parts.get(name) for phase in self.phases])
        line("at least", [phase.low for phase in self.phases])
        line("at most", [phase.high for phase in self.phases])
        least, most = SPREAD
        notes = "".join(f"\n\n{note}" for note in self.notes)
        return (
            f"{messages.aligned(rows)}\n\n{self.verdict}{notes}\n\n"
            "Not compiled: temporaries are the values of the traced programs that "
            "exist at the same time. XLA orders, fuses and copies by its own rules, "
            f"and takes {least} to {most} times as much."
        )

    def as_json(self) -> dict[str, Any]:
        """All numbers, for `json.dumps`."""
        low, high = self.range
        phases = [
            dataclasses.asdict(p) | {"low": p.low, "high": p.high} for p in self.phases
        ]
        return {
            "device": self.device.name, "fits": self.fits, "verdict": self.verdict,
            "low": low, "expected": self.expected, "high": high, "phases": phases,
            "notes": self.notes,
        }  # fmt: skip


def of_programs(programs: Programs, device: Device, count: int) -> ShapedPlan:
    """The estimate of a job's programs, inside of `jaxmem.devices.stand_in`.

    Temporaries of several devices are divided evenly among them.
    """
    phases = (_of_phase(phase, programs, device, count) for phase in programs.phases)
    return ShapedPlan(device, tuple(phases), programs.notes)


def _of_phase(phase: Phase, programs: Programs, device, count) -> ShapedPhase:
    shapes = {**phase.arguments, **phase.held}
    resident = {name: device_bytes(tree) for name, tree in shapes.items()}
    resident["the runtime"] = accounts.RUNTIME[device.platform]
    parts = dict(phase.parts)
    if phase is programs.backward:
        kept = liveness.stacked(phase.traced, programs.model.layers) // count
        parts.setdefault("activations kept", kept)
        tokens = phase.tokens // phase.micro_batches
        parts["the head"] = head_bytes(programs.model, programs.head, tokens)
    return ShapedPhase(
        phase.name,
        {name: size for name, size in resident.items() if size},
        liveness.peak(phase.traced) // count,
        {name: size for name, size in parts.items() if size},
    )


def head_bytes(model: ModelConfig, head: HeadConfig, tokens: int) -> int:
    """Bytes of a chunk's logits and their derivative, (8 + b)·C·V.

    If it is not fused, C is the number of all tokens of a micro-batch. A forward pass
    in 8 bits has a copy of the head besides.
    """
    assert model.vocab_size is not None
    chunk = head.chunk if head.logits == "fused" else None
    chunk = checks.check_chunk(chunk, tokens, model.vocab_size, model.hidden)
    item = jnp.dtype(model.dtype).itemsize
    logits = (8 + item) * min(tokens, chunk) * model.vocab_size
    in_8_bits = head.sample is not None and head.sample.forward == "int8"
    copy = eight_bits.copy_bytes(model.vocab_size, model.hidden) if in_8_bits else 0
    return logits + copy
