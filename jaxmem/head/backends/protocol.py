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

    A source is a `Factors`, or `CallerLogits` given by the caller.
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
    """What a backend cannot run, or had better leave to the next one."""

    def refuses_call(self, spec: Spec, source: Any) -> str | None:
        """Why it cannot run the call on any machine; None if it can."""
        ...

    def refuses_machine(self) -> str | None:
        """Why it cannot run in this process; None if it can."""
        ...

    def unproven(self, spec: Spec, source: Any) -> str | None:
        """Why a call that it can run is not known to be faster than on the next one."""
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
    """What runs a call; `choose.BACKENDS` lists them.

    Attributes:
        name: its name for `implementation=`.
        advantage: why it is preferred to those after it in `choose.BACKENDS`.
        stores_logits: whether a chunk's float32 logits are in memory, or reduced in
            registers.
        loops: those that every call needs.
        limits: of what it runs; None: it runs every call on every machine.
        blocks: those for `gradient=Recompute(blocks)`; None: it has none.
        sampler: those for `gradient=Sample(k)`.
        eight_bits: those for its forward="int8", beside the sampler.
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
        """Why it cannot run the call here; None if it can."""
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

    def unproven(self, spec: Spec, source: Any) -> str | None:
        """Why the next backend is preferred for a call that it can run; or None."""
        return None if self.limits is None else self.limits.unproven(spec, source)
