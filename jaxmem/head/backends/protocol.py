"""A backend: the loops that it must have, and those for what it can do besides."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jaxmem.head.maths.backend_operands import CallerLogits, Factors, TokenRows
from jaxmem.head.maths.block_sums import BlockSums, Density, Masses, PairSums
from jaxmem.head.maths.column_sampling import Entries, SparseDerivative
from jaxmem.head.maths.divergence_terms import Arithmetic
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
        self, spec: Spec, source: Any, rows: TokenRows, of_chunk: OfChunk, initial: Any,
        names: Sequence[str],
    ) -> tuple[Any, Factors]:  # fmt: skip
        """`backward`, with cotangents computed by `of_chunk` from each chunk's outputs.

        They are those of the named outputs. The result is `initial`, the values of
        inactive rows, with of_chunk's for active ones, and the cotangent of the source.
        """
        ...

    def loss_rows(self, spec: Spec, source: Any) -> int:
        """Number of rows that `one_pass` passes to of_chunk at a time."""
        ...


class ScaledHead(NamedTuple):
    """A head with what scales the logits of its rows: operands of `ColumnLoops`."""

    spec: Spec
    source: Factors
    rows: TokenRows


class ColumnGroup(NamedTuple):
    """Rows of which `ColumnLoops` compute the logits in few columns only."""

    chunk: int  # rows at a time
    active: jax.Array  # bool [N]
    # row ids [C] -> their columns, int32 [C, K]; past the end where one is absent
    columns: Callable[[jax.Array], jax.Array]


class ByLogits(NamedTuple):
    """A derivative by logits, which differs in some columns."""

    everywhere: jax.Array  # [C, V], or [C, K] by those of a `ColumnGroup`
    ids: jax.Array | None = None  # int32 [C, K], of these; None for none
    at_ids: jax.Array | None = None  # the derivative there


class ColumnLoops(Protocol):
    """Loops over chunks of scaled logits, for rules that read single columns.

    A rule's function of a chunk is called with (row ids, *logits): those of each head
    [C, V], or, with groups, those of the one head in the groups' columns [C, K], -inf
    where one is absent. Ids past the end come last; the results of their rows have no
    influence, and their derivatives are 0. The first head has the active rows. Logits
    are scaled; derivatives are by those before softcap and temperature, as
    `maths.scaling.unscale` gives them.
    """

    def forward(
        self,
        heads: Sequence[ScaledHead],
        of_chunk: Callable[..., Any],
        initial: Any,
        groups: Sequence[ColumnGroup] | None = None,
    ) -> Any:
        """`initial`, the results of inactive rows, with of_chunk's for active ones."""
        ...

    def backward(
        self,
        heads: Sequence[ScaledHead],
        of_chunk: Callable[..., ByLogits],
        groups: Sequence[ColumnGroup] | None = None,
    ) -> Factors:
        """Cotangent of the first head's source, in its dtypes, from of_chunk's."""
        ...

    def one_pass(
        self,
        heads: Sequence[ScaledHead],
        of_chunk: Callable[..., tuple[Any, ByLogits]],
        initial: Any,
    ) -> tuple[Any, Factors]:
        """`forward` and `backward` of the same logits; of_chunk returns both.

        Hidden's cotangent has hidden's dtype, W's and the bias's that of statistics.
        """
        ...


class RowReductions(Protocol):
    """Reductions of float32 logits in memory, each of which reads their rows once.

    Blocks are of BLOCK neighbouring columns of one head, or of PAIR_BLOCK columns of
    two heads.
    """

    BLOCK: int
    PAIR_BLOCK: int
    ARITHMETIC: Arithmetic  # that the functions of `sums` and `pair_sums` are to use

    def is_of_machine(self) -> bool:
        """True if this process can run them."""
        ...

    def supports(self, columns: int, dtype: Any) -> bool:
        """True if `sums` and `pair_sums` take rows of this length and type."""
        ...

    def supports_blocks(self, columns: int, dtype: Any, k: int = 1) -> bool:
        """True if `block_sums` takes such rows, and `top_k` finds k entries of each."""
        ...

    def block_sums(self, z: jax.Array) -> BlockSums:
        """Sums of the blocks of logits [C, V]."""
        ...

    def top_k(
        self, z: jax.Array, blocks: BlockSums, k: int
    ) -> tuple[jax.Array, jax.Array]:
        """The k largest of rows and their columns, largest first, equal in order."""
        ...

    def pair_sums(
        self, terms: Callable[..., Sequence[jax.Array]], z: jax.Array, y: jax.Array
    ) -> PairSums:
        """Sums of the blocks of two heads' logits, and of terms of w, v and ln(w/v).

        w = e^(z - max z) and v = e^(y - max y), with the maxima of the block.
        """
        ...

    def sums(
        self,
        terms: Callable[..., Sequence[jax.Array]],
        tiles: tuple[jax.Array, ...],
        rows: tuple[jax.Array, ...],
    ) -> list[jax.Array]:
        """Sums over V, [C] each, of terms of tiles [C, V] and numbers of rows [C]."""
        ...

    def select(
        self, spec: Spec, density: Density, masses: Masses, starts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Columns that `maths.column_sampling` keeps, and their weights, [C, K]."""
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
    """A backend's loops for `gradient=Sample(k)` and `gradient=Recorded(entries)`."""

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

    def logits_at(
        self, spec: Spec, source: Factors, rows: TokenRows, columns: jax.Array
    ) -> jax.Array:
        """Products h Wᵀ of active rows in some columns of each, [N, n].

        Columns are of this shard of the vocabulary; the results of those that do not
        exist are undefined.
        """
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
        columns: the loops of functions that read single columns of the logits; None if
            it has none of these functions.
        reductions: of logits in memory; where None, XLA reads them once for each sum.
    """

    name: str
    advantage: str
    stores_logits: bool
    loops: Loops
    limits: Limits | None = None
    blocks: RecomputeLoops | None = None
    sampler: SampleLoops | None = None
    eight_bits: EightBitSampler | None = None
    columns: ColumnLoops | None = None
    reductions: RowReductions | None = None

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


def sampler_of(backend: Backend) -> SampleLoops:
    """The sampler of a backend that was chosen for a call with `Sample(k)`."""
    assert backend.sampler is not None, f"{backend.name!r} has no sampler"
    return backend.sampler


def columns_of(backend: Backend) -> ColumnLoops:
    """The loops of a backend that was chosen for a call that reads single columns."""
    assert backend.columns is not None, f"{backend.name!r} has no loops over columns"
    return backend.columns
