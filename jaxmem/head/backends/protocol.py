"""A backend: the loops that it must have, and those for what it can do besides."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from jaxmem.head.maths.backend_operands import CallerLogits, Factors, TokenRows
from jaxmem.head.maths.column_sampling import Entries, SparseDerivative
from jaxmem.head.maths.eight_bits import EightBits
from jaxmem.head.maths.row_stats import Cotangents, Outputs, Stats
from jaxmem.head.maths.spec import Spec

# Called by `one_pass` for loss_rows rows at a time: (row ids, their outputs) -> (values
# per row, cotangents of the outputs). Ids past the end come last; their outputs have no
# influence, and their cotangents are 0.
OfChunk = Callable[[jax.Array, Outputs], tuple[Any, Cotangents]]


class Loops(Protocol):
    """Loops over chunks of active rows: a module with these functions.

    A source is `Factors`, or `CallerLogits` where the caller has the logits.
    """

    def forward(
        self, spec: Spec, source: Any, rows: TokenRows, names: Sequence[str]
    ) -> dict:
        """The named fields of `Outputs` for every row; 0 where inactive."""
        ...

    def statistics(self, spec: Spec, source: Any, rows: TokenRows) -> Stats:
        """Statistics over this device's shard of the vocabulary.

        They are undefined for inactive rows.
        """
        ...

    def backward(
        self, spec: Spec, source: Any, rows: TokenRows, saved: Outputs, cotangents
    ) -> Factors | CallerLogits:
        """Cotangent of the source."""
        ...

    def one_pass(
        self, spec: Spec, source: Any, rows: TokenRows, of_chunk: OfChunk, initial: Any
    ) -> tuple[Any, Factors]:
        """`backward`, with cotangents computed by `of_chunk` from each chunk's outputs.

        The result is `initial`, the values of inactive rows, with of_chunk's for active
        ones, and the cotangent of the source.
        """
        ...

    def loss_rows(self, spec: Spec, source: Any) -> int:
        """Number of rows that `one_pass` passes to of_chunk at a time."""
        ...


class Limits(Protocol):
    """The calls that a backend cannot run, or had better leave to the next one."""

    def refuses_call(self, spec: Spec, source: Any) -> str | None:
        """The reason why no machine can run the call; None if one can."""
        ...

    def refuses_machine(self) -> str | None:
        """The reason why this process cannot run it; None if it can."""
        ...

    def unproven(self, spec: Spec, source: Any) -> str | None:
        """The reason why the next backend may be faster for a call; None otherwise."""
        ...


class RecomputeLoops(Protocol):
    """A backend's loops for `gradient=Recompute(blocks)`."""

    def backward(
        self, spec: Spec, source: Factors, rows: TokenRows, saved: Outputs, cotangents
    ) -> Factors:
        """`Loops.backward`, with sums of W's gradient for a block at a time."""
        ...


class SampleLoops(Protocol):
    """A backend's loops for `gradient=Sample(k)`."""

    def forward(
        self, spec: Spec, source: Factors, rows: TokenRows, names: Sequence[str]
    ) -> tuple[dict, Entries]:
        """`Loops.forward`, bitwise equal, and the sampled entries of every row."""
        ...

    def backward(
        self, spec: Spec, source: Factors, rows: TokenRows, saved: Outputs, cotangents,
        entries: Entries,
    ) -> Factors:  # fmt: skip
        """Cotangent of the source from the entries only, in the source's dtypes."""
        ...

    def gradient(
        self, spec: Spec, source: Factors, rows: TokenRows, dz: SparseDerivative
    ) -> Factors:
        """Cotangent of the source from the derivative by h Wᵀ at sampled entries."""
        ...


class EightBitSampler(Protocol):
    """Loops for `gradient=Sample(k, forward="int8")`, beside `SampleLoops`."""

    def forward(
        self, spec: Spec, source: Factors, rows: TokenRows, names: Sequence[str],
        shared: EightBits,
    ) -> tuple[dict, Entries]:  # fmt: skip
        """Outputs by name, `eight_bits.ERROR` among them, and entries of every row."""
        ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of the head's loops; `choose.BACKENDS` lists them all.

    Attributes:
        name: its name for `implementation=`.
        advantage: why it is preferred to those after it in `choose.BACKENDS`.
        stores_logits: True if a chunk's float32 logits are in memory, False if they are
            reduced in registers.
        loops: the loops that every call needs.
        limits: the calls that it refuses; None if it runs every call on every machine.
        blocks: the loops for `gradient=Recompute(blocks)`; None if it has none.
        sampler: the loops for `gradient=Sample(k)`.
        eight_bits: the loops for its forward="int8", beside the sampler.
    """

    name: str
    advantage: str
    stores_logits: bool
    loops: Loops
    limits: Limits | None = None
    blocks: RecomputeLoops | None = None
    sampler: SampleLoops | None = None
    eight_bits: EightBitSampler | None = None

    def refuses(self, spec: Spec, source: Any) -> str | None:
        """The reason why it cannot run the call in this process; None if it can."""
        if spec.gradient_blocks > 1 and self.blocks is None:
            return "it has no loops for several blocks of Recompute"
        if spec.gradient_samples:
            if self.sampler is None:
                return "it has no loops for Sample"
            if spec.forward == "int8" and self.eight_bits is None:
                return "it has no loops for forward='int8'"
        if self.limits is None:
            return None
        return self.limits.refuses_call(spec, source) or self.limits.refuses_machine()

    def is_of_machine(self) -> bool:
        """True if this process can run it; it may refuse calls nevertheless."""
        return self.limits is None or self.limits.refuses_machine() is None

    def unproven(self, spec: Spec, source: Any) -> str | None:
        """The reason to prefer the next backend for a call; None if there is none."""
        return None if self.limits is None else self.limits.unproven(spec, source)
