"""Rows and columns a launch: within the bytes that the docstrings state."""

import itertools
import math
from typing import NamedTuple

import pytest

from jaxmem.head.kernels import block_sizes
from jaxmem.head.kernels.tiles import MAX_CLUSTER_ROWS

SHAPES = list(
    itertools.product(
        (300, 8192, 20_000, 60_000, 1_000_000),  # N
        (128, 1024, 8192),  # C
        (32_000, 128_256),  # V
        (512, 4096),  # D
    )
)


def slack(columns, depth):
    """Rows come in whole clusters."""
    return MAX_CLUSTER_ROWS * (2 * columns + 4 * depth)


class Backward(NamedTuple):
    """The cut of a backward pass on 66 clusters into launches and blocks."""

    rows: int  # a launch
    once: bool  # launches of all rows follow a block of the vocabulary
    tiles: int  # of that
    launches: int


def backward(n, chunk, columns, depth, frozen=False):
    rows, once = block_sizes.backward_rows(n, chunk, columns, depth, frozen, 66)
    n_tiles = -(-columns // block_sizes.TILE)
    tiles = block_sizes.backward_tiles(n_tiles, rows, chunk, columns, depth, 66)
    return Backward(rows, once, tiles, -(-n // rows))


@pytest.mark.parametrize("frozen", [False, True])
def test_derivatives_fit_chunk_in_16_bits(frozen):
    for n, chunk, columns, depth in SHAPES:
        cut = backward(n, chunk, columns, depth, frozen)
        width = cut.tiles * block_sizes.TILE
        taken = cut.rows * min(width, columns)
        least = MAX_CLUSTER_ROWS * columns  # rows come in whole clusters
        assert taken <= max(chunk * columns, least), (n, chunk, columns)


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_takes_stated_bytes(frozen):
    for n, chunk, columns, depth in SHAPES:
        cut = backward(n, chunk, columns, depth, frozen)
        width = min(cut.tiles * block_sizes.TILE, columns)
        if cut.once:
            of_W = width if cut.launches > 1 else 0
        else:
            of_W = 0 if frozen else columns
        hidden = n if cut.once else cut.rows
        taken = 2 * cut.rows * width + 4 * (hidden + of_W) * depth
        promised = 2 * chunk * columns + (0 if frozen else 4 * columns * depth)
        a_block = 4 * cut.rows * depth if frozen or not cut.once else 0  # hidden's
        assert taken <= promised + a_block + slack(width, depth), (n, chunk, columns)


@pytest.mark.parametrize(
    ("n", "depth", "columns", "tiles"),
    [
        (8192, 4096, 128_256, 33),
        (8192, 4096, 151_936, 33),  # 66 by bytes
        (4096, 5120, 151_936, 66),
        (2048, 4096, 131_072, 132),
        (8192, 2048, 248_320, 66),
        (16_384, 2048, 248_320, 33),
        (8192, 2304, 256_000, 66),  # 9 tiles of D: 33 would be turns and a half
        (1536, 4096, 128_256, 198),
        (512, 4096, 128_256, 501),  # all
    ],
)
def test_blocks_take_whole_turns_of_the_chip(n, depth, columns, tiles):
    cut = backward(n, 1024, columns, depth)
    assert cut == (n, True, tiles, 1)


@pytest.mark.parametrize(
    ("n", "columns", "most", "tiles"),
    [
        # A tile of derivatives is 32 / 66 of a turn, one of W's gradient 16 / 66.
        (8192, 65_536, 32, 32),  # 15.5 turns and 7.8
        (8192, 50_304, 24, 24),  # 11.6 and 5.8
        (8192, 32_064, 15, 12),  # 5.8 and 2.9; 15: 7.3 and 3.6
        (8192, 17_920, 8, 8),
    ],
)
def test_partial_turn_idles_fewest_clusters(n, columns, most, tiles):
    assert 1024 * columns // (n * block_sizes.TILE) == most
    assert backward(n, 1024, columns, 4096) == (n, True, tiles, 1)


@pytest.mark.parametrize(
    ("n", "columns", "cut"),
    [
        (16_384, 151_936, (16_384, True, 33, 1)),
        # Few columns are left to all rows at once: 15 tiles, which take no whole turn.
        (32_768, 128_256, (8192, True, 33, 4)),
        (32_768, 64_000, (4096, True, 33, 8)),
        (65_536, 128_000, (8192, True, 33, 8)),
        (131_072, 128_256, (11_264, False, 33, 12)),  # W's sums are the smaller ones
        (65_536, 32_000, (5632, False, 20, 12)),
    ],
)
def test_launches_split_where_rows_leave_few_columns(n, columns, cut):
    assert backward(n, 1024, columns, 4096) == cut


def test_vocabulary_block_takes_stated_bytes():
    for n, chunk, columns, depth in SHAPES:
        for n_blocks in (2, 4, 8, 64):
            sizes = n, chunk, columns, depth, n_blocks
            rows, tiles = block_sizes.vocabulary_block(*sizes, 66)
            width = min(tiles * block_sizes.TILE, columns)
            n_tiles = -(-columns // block_sizes.TILE)
            assert tiles == -(-n_tiles // n_blocks), sizes
            side = math.isqrt(chunk * columns)
            taken = 2 * rows * width + 4 * width * depth + 8 * rows * depth
            promised = 2 * chunk * columns + 4 * columns * depth / n_blocks
            a_tile = block_sizes.TILE * (2 * rows + 4 * depth)
            least = MAX_CLUSTER_ROWS * (2 * width + 8 * depth)
            promised += 8 * side * depth + a_tile + least
            assert taken <= promised, sizes
            assert rows <= block_sizes.whole(n), sizes


@pytest.mark.parametrize(
    ("n_blocks", "cut"),
    # Hidden's gradient has 16 tiles to 256 rows: of 6144 rows they take 5.8 turns, of
    # the 7936 that fit 7.5.
    [(2, (1792, 251)), (4, (3072, 126)), (8, (6144, 63)), (16, (8448, 32))],
)
def test_vocabulary_block_rows_fill_the_chip(n_blocks, cut):
    sizes = 131_072, 1024, 128_256, 4096, n_blocks
    assert block_sizes.vocabulary_block(*sizes, 66) == cut


@pytest.mark.parametrize(("n_blocks", "once"), [(1, True), (4, True), (8, False)])
def test_block_shared_by_all_rows_within_bytes(n_blocks, once):
    sizes = 32_768, 1024, 128_256, 4096
    assert block_sizes.backward_rows(*sizes, False, 66, n_blocks)[1] == once


def test_blocks_are_never_small():
    """Each begins anew and adds to hidden's sums once: 16 tiles a cluster at D=4096."""
    for n, chunk, columns, depth in SHAPES:
        cut = backward(n, chunk, columns, depth)
        by_bytes = cut.rows * math.isqrt(chunk * columns) // 2
        enough = (
            66 * block_sizes.BUSY_DEPTH // depth * MAX_CLUSTER_ROWS * block_sizes.TILE
        )
        made = cut.rows * cut.tiles * block_sizes.TILE
        assert made >= min(enough, by_bytes, cut.rows * columns), (n, chunk, columns)


@pytest.mark.parametrize("frozen", [False, True])
def test_loss_exponentials_within_logits_bytes(frozen):
    for n, chunk, columns, depth in SHAPES:
        rows = block_sizes.loss_rows(n, chunk, depth, frozen, 66)
        sums = 0 if rows >= n or frozen else 4 * columns * depth
        promised = 6 * chunk * columns + (0 if frozen else 4 * columns * depth)
        assert 2 * rows * columns + sums <= promised + slack(columns, depth)


@pytest.mark.parametrize(
    ("depth", "rows"), [(2048, 2048), (2304, 3072), (3072, 2816), (4096, 3072)]
)
def test_rows_of_a_loss_keep_the_chip_busy(depth, rows):
    """66 clusters make tiles of hidden's gradient at once, depth / 256 to 256 rows."""
    assert block_sizes.loss_rows(20_000, 1024, depth, False, 66) == rows


def test_forward_launch_within_chunk_of_logits():
    for n, chunk, columns, depth in SHAPES:
        groups = -(-columns // 512)
        rows = block_sizes.forward_rows(n, chunk, columns, depth, groups)
        assert rows % MAX_CLUSTER_ROWS == 0 and rows <= block_sizes.MAX_ROWS
        a_row = 2 * depth + 20 * groups * 9 / 8
        taken, least = rows * a_row, MAX_CLUSTER_ROWS * a_row
        assert taken <= max(4 * chunk * columns, least) + slack(0, depth)


@pytest.mark.parametrize(
    "depth, rows, splits",
    [
        (1024, 3072, 4),
        (1024, 16384, 1),
        (2304, 3072, 3),
        (3072, 3072, 3),
        (4096, 3072, 1),
    ],
)
def test_vocabulary_parts_fill_the_chip(depth, rows, splits):
    """Only where at least a tenth of the time is saved."""
    assert block_sizes.hidden_splits(rows, depth, 66) == splits


@pytest.mark.parametrize(
    ("n", "depth", "chunk", "frozen", "rows"),
    [
        (8192, 4096, 1024, False, 4096),  # as many bytes as W's gradient
        (8192, 2880, 1024, False, 2816),
        (8192, 4096, 1024, True, 1024),
        (8192, 640, 1024, False, 1024),
        (8192, 4096, 8192, False, 8192),
        (1000, 4096, 1024, False, 1024),  # no more than there are tokens
    ],
)
def test_exponentials_reuse_gradient_memory(n, depth, chunk, frozen, rows):
    assert block_sizes.stored_rows(n, depth, chunk, frozen) == rows
