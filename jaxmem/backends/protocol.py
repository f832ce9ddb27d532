"""What a backend is: a module with these functions."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from jaxmem.core.operands import Head, Logits, Rows
from jaxmem.core.sampling import Entries
from jaxmem.core.spec import Spec
from jaxmem.core.stats import Cotangents, Outputs, Stats

# What `one_pass` asks of loss_rows rows at a time: (row ids, their outputs) -> (values
# to keep of each row, cotangents of the outputs). Ids past the end come last; what
# their outputs hold has no influence, and their cotangents are 0.
OfChunk = Callable[[jax.Array, Outputs], tuple[Any, Cotangents]]


class Backend(Protocol):
    """Loops over chunks of active rows; `backends.choose` lists who implements them.

    A source is a `Head`, or the `Logits` that a caller already has.
    """

    @property
    def NAME(self) -> str:
        """What `implementation=` calls it."""
        ...

    @property
    def STORES_LOGITS(self) -> bool:
        """Whether a chunk's float32 logits are in memory, or reduced in registers."""
        ...

    @property
    def KEEPS_EXPONENTIALS(self) -> bool:
        """Whether it has `forward_and_keep`, for `residual_bytes`."""
        ...

    @property
    def ADVANTAGE(self) -> str:
        """Why it is chosen over those after it in `choose.BACKENDS`."""
        ...

    def supported(self, spec: Spec, source: Any) -> str | None:
        """None where it can run the call here, else the reason why not."""
        ...

    def unproven(self, spec: Spec, source: Any) -> str | None:
        """Why a call that can run is not known to be faster than on the next one."""
        ...

    def forward(
        self, spec: Spec, source: Any, rows: Rows, names: Sequence[str]
    ) -> dict:
        """The named fields of `Outputs` for every row, 0 where inactive."""
        ...

    def statistics(self, spec: Spec, source: Any, rows: Rows) -> Stats:
        """Of this shard's part of the vocabulary; anything where inactive."""
        ...

    def forward_and_keep(
        self, spec: Spec, source: Any, rows: Rows, names: Sequence[str]
    ) -> tuple[dict, Any]:
        """`forward`, and the exponentials of the first spec.residual_rows rows."""
        ...

    def backward(
        self, spec: Spec, source: Any, rows: Rows, saved: Outputs, cotangents, kept=None
    ) -> Head | Logits:
        """Cotangent of the source; kept is what `forward_and_keep` returned."""
        ...

    def one_pass(
        self, spec: Spec, source: Any, rows: Rows, of_chunk: OfChunk, initial: Any
    ) -> tuple[Any, Head]:
        """`backward` for cotangents that follow from each chunk's outputs.

        Returns:
            initial with of_chunk's values in the place of active rows, and the
            cotangent of the source.
        """
        ...

    def loss_rows(self, spec: Spec, source: Any) -> int:
        """How many rows `one_pass` passes to of_chunk at a time."""
        ...


class Sampler(Protocol):
    """A backend's loops for `gradient_samples`; `choose.sampler` finds them."""

    def forward(
        self, spec: Spec, source: Head, rows: Rows, names: Sequence[str]
    ) -> tuple[dict, Entries]:
        """`Backend.forward`, bit-equal, and the sampled entries of every row."""
        ...

    def backward(
        self, spec: Spec, source: Head, rows: Rows, saved: Outputs, cotangents,
        entries: Entries,
    ) -> Head:  # fmt: skip
        """Cotangent of the source from the entries alone, in the source's types."""
        ...
