"""Tile sizes of a kernel, launches of sums of rows, and limits of a Hopper GPU."""

import dataclasses

SMEM_BYTES = 232_448  # per block on a Hopper GPU, 227 KiB
N_COMPUTE = 2  # warpgroups that multiply; one more only loads
MAX_CLUSTER_ROWS = 256  # of any tiles; rows are a multiple of it
# An upper bound on the statistics, labels, bias and barriers of one block.
_SMALL_BYTES = 8_192


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One block computes a tile [2 · rows, columns] at a time, with two warpgroups.

    Attributes:
        rows: rows of the tile per warpgroup.
        columns: columns of the tile.
        depth: part of the contracted axis that one pipeline stage holds.
        stages: pipeline stages, loaded ahead of the tensor cores.
        group: column tiles that a block processes consecutively with its statistics in
            registers; the output shrinks by this factor.
        panel: row tiles that are processed for the same columns at the same time, so
            that blocks share their loads in L2.
        stored: columns of a result per store; 0 where the epilogue stores no tile.
        stored_bytes: bytes of one stored number, 4 at most.
        slots: SMEM buffers of the stores.
        cluster: blocks, each with its own rows, that load W once by multicast.
        operand_bytes: bytes of one number of the factors.
    """

    rows: int = 64
    columns: int = 256
    depth: int = 64
    stages: int = 4
    group: int = 8
    panel: int = 16
    stored: int = 0
    stored_bytes: int = 2
    slots: int = 1
    cluster: int = 1
    operand_bytes: int = 2

    def __post_init__(self):
        if self.rows != 64:
            raise ValueError(f"rows={self.rows} must be 64, the rows of one wgmma")
        if not 64 <= self.columns <= 256 or self.columns % 64:
            raise ValueError(
                f"columns={self.columns} must be 64, 128, 192 or 256: one wgmma takes "
                "256 at most, one swizzled row of memory is 64"
            )
        if self.depth % 64 or self.depth < 64:
            raise ValueError(
                f"depth={self.depth} must be a multiple of 64: 128 bytes, one swizzle"
            )
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2, to load ahead")
        if min(self.group, self.panel, self.slots) < 1:
            raise ValueError(
                f"group={self.group}, panel={self.panel}, slots={self.slots} must be "
                "at least 1"
            )
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster={self.cluster} must be 1 or 2 blocks")
        if self.stored and (self.stored % 32 or self.columns % self.stored):
            raise ValueError(
                f"stored={self.stored} must be a multiple of 32 that divides "
                f"columns={self.columns}"
            )
        if self.stored and self.slots * self.stored > self.columns:
            raise ValueError(
                f"slots={self.slots} of stored={self.stored} must hold no more than "
                f"columns={self.columns}: a tile waits for its own stores"
            )
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(
                f"{self} needs {self.smem_bytes} bytes of shared memory, a block has "
                f"{SMEM_BYTES}; take fewer stages or columns"
            )

    @property
    def block_rows(self) -> int:
        """Rows of one tile of a block."""
        return N_COMPUTE * self.rows

    @property
    def cluster_rows(self) -> int:
        """Rows of one tile of a cluster."""
        return self.cluster * self.block_rows

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one block."""
        stage = (self.block_rows + self.columns) * self.depth * self.operand_bytes
        out = self.slots * self.block_rows * self.stored * self.stored_bytes
        # Channels that 8 bits do not hold, which each warpgroup has.
        wide = (
            N_COMPUTE * (self.rows + self.columns) * 32
            if self.operand_bytes == 1
            else 0
        )
        return self.stages * stage + out + wide + _SMALL_BYTES


@dataclasses.dataclass(frozen=True)
class SampledLaunch:
    """One program sums weighted rows (`sampled_products`).

    Attributes:
        at_once: columns of a row for each thread, at most; 1, 2, 4 or 8.
        unroll: rows that are loaded before they are added; a power of two.
        sums: neighbouring columns of W for each program.
    """

    at_once: int
    unroll: int
    sums: int = 1

    def __post_init__(self):
        if self.at_once not in (1, 2, 4, 8):
            raise ValueError(f"at_once={self.at_once} must be 1, 2, 4 or 8")
        if self.unroll not in (1, 2, 4, 8, 16, 32):
            raise ValueError(
                f"unroll={self.unroll} must be a power of two and at most 32: pieces "
                "of 64 rows are whole steps"
            )
        if self.sums < 1:
            raise ValueError(f"sums={self.sums} must be at least 1")
