"""Rows and columns a launch: within the bytes that the docstrings state."""

import itertools
import math

import pytest

from jaxmem.kernels import blocks
from jaxmem.kernels.tiles import MAX_CLUSTER_ROWS

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


def backward(n, chunk, columns, depth, frozen=False):
    """(rows, columns, bytes of W's sums) of a block."""
    rows = blocks.backward_rows(n, chunk, columns, depth, frozen)
    sums = blocks.sums_bytes(columns, depth)
    n_tiles = -(-columns // blocks.TILE)
    spare = sums if rows >= n and not frozen else 0
    tiles = blocks.backward_tiles(n_tiles, rows, chunk, columns, depth, spare, 66)
    return rows, tiles * blocks.TILE, 0 if rows >= n or frozen else sums


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_pass_takes_the_bytes_it_says(frozen):
    for n, chunk, columns, depth in SHAPES:
        rows, width, sums = backward(n, chunk, columns, depth, frozen)
        width = min(width, columns)
        taken = 2 * rows * width + 4 * min(rows, n) * depth + sums
        promised = 2 * chunk * columns
        promised += 0 if frozen else blocks.sums_bytes(columns, depth)
        a_block = 4 * rows * depth if sums or frozen else 0  # hidden's, of its rows
        assert taken <= promised + a_block + slack(width, depth), (n, chunk, columns)


def test_a_block_makes_at_most_half_as_many_derivatives_more():
    for n, chunk, columns, depth in SHAPES:
        rows, width, _ = backward(n, chunk, columns, depth)
        most = max(chunk * columns, rows * math.isqrt(chunk * columns))
        assert rows * min(width, columns) <= 1.5 * most + rows * blocks.TILE


@pytest.mark.parametrize(
    ("n", "depth", "columns", "tiles"),
    [
        (8192, 4096, 128_256, 33),
        (8192, 4096, 151_936, 33),  # 66 by bytes
        (4096, 5120, 151_936, 66),
        (2048, 4096, 131_072, 132),
        (8192, 2048, 248_320, 66),
        (8192, 4096, 65_536, 33),  # 32 by bytes, and nothing holds sums of W
        (8192, 4096, 32_768, 33),  # 22
        (8192, 4096, 16_384, 16),  # 33 would be more than half as much again
        (16_384, 2048, 248_320, 33),
        (8192, 2304, 256_000, 66),  # 9 tiles of D: 33 would be turns and a half
        (1536, 4096, 128_256, 198),
        (512, 4096, 128_256, 501),  # all
    ],
)
def test_blocks_take_whole_turns_of_the_chip(n, depth, columns, tiles):
    assert backward(n, 1024, columns, depth)[1] == tiles * blocks.TILE


def test_blocks_are_alike_where_no_whole_turn_fits():
    """Frozen: of 70 tiles bytes allow 17 a block, and 33 make a turn."""
    assert backward(8192, 1024, 17_920, 4096, frozen=True)[1] == 14 * blocks.TILE


def test_all_rows_come_at_once_until_their_bytes_are_more_than_sums_of_W():
    of = {n: blocks.backward_rows(n, 1024, 128_256, 4096, False) for n in
          (8192, 32_768, 60_000, 65_536, 131_072)}  # fmt: skip
    assert [n for n, rows in of.items() if rows >= n] == [8192, 32_768, 60_000]
    assert of[65_536] == of[131_072] == 11_264


def test_blocks_are_never_small():
    """Each begins anew and adds to hidden's sums once: 16 tiles a cluster at D=4096."""
    for n, chunk, columns, depth in SHAPES:
        rows, width, _ = backward(n, chunk, columns, depth)
        by_bytes = rows * math.isqrt(chunk * columns) // 2
        enough = 66 * blocks.BUSY_DEPTH // depth * MAX_CLUSTER_ROWS * blocks.TILE
        assert rows * width >= min(enough, by_bytes, rows * columns)


@pytest.mark.parametrize("frozen", [False, True])
def test_exponentials_of_a_loss_take_no_more_than_logits_would(frozen):
    for n, chunk, columns, depth in SHAPES:
        rows = blocks.loss_rows(n, chunk, depth, frozen, 66)
        sums = 0 if rows >= n or frozen else 4 * columns * depth
        promised = 6 * chunk * columns + (0 if frozen else 4 * columns * depth)
        assert 2 * rows * columns + sums <= promised + slack(columns, depth)


@pytest.mark.parametrize(
    ("depth", "rows"), [(2048, 2048), (2304, 3072), (3072, 2816), (4096, 3072)]
)
def test_rows_of_a_loss_keep_the_chip_busy(depth, rows):
    """66 clusters make tiles of hidden's gradient at once, depth / 256 to 256 rows."""
    assert blocks.loss_rows(20_000, 1024, depth, False, 66) == rows


def test_a_forward_launch_takes_no_more_than_a_chunk_of_logits():
    for n, chunk, columns, depth in SHAPES:
        groups = -(-columns // 1024)
        rows = blocks.forward_rows(n, chunk, columns, depth, groups)
        assert rows % MAX_CLUSTER_ROWS == 0 and rows <= blocks.MAX_ROWS
        taken = rows * (2 * depth + 40 * groups)
        least = MAX_CLUSTER_ROWS * (2 * depth + 40 * groups)
        assert taken <= max(4 * chunk * columns, least) + slack(0, depth)
