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
    n_tiles = -(-columns // blocks.TILE)
    tiles = blocks.backward_tiles(n_tiles, rows, chunk, columns, depth, 66)
    return rows, tiles * blocks.TILE, 0 if rows >= n or frozen else 4 * columns * depth


@pytest.mark.parametrize("frozen", [False, True])
def test_derivatives_take_no_more_than_a_chunk_of_16_bits(frozen):
    for n, chunk, columns, depth in SHAPES:
        rows, width, _ = backward(n, chunk, columns, depth, frozen)
        least = 2 * min(MAX_CLUSTER_ROWS * columns, rows * blocks.TILE)  # a cluster's
        whole = -(-columns // blocks.TILE) * blocks.TILE
        allowed = 2 * chunk * whole + 2 * MAX_CLUSTER_ROWS * width  # whole tiles, rows
        assert 2 * rows * width <= max(allowed, least), (n, chunk, columns)


def test_sums_take_no_more_than_those_of_W_would():
    for n, chunk, columns, depth in SHAPES:
        rows, _, sums = backward(n, chunk, columns, depth)
        taken = 4 * rows * depth + sums
        side = math.isqrt(chunk * columns)
        assert taken <= 4 * (columns + max(side, MAX_CLUSTER_ROWS)) * depth


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
    assert backward(n, 1024, columns, depth)[1] == tiles * blocks.TILE


@pytest.mark.parametrize(
    ("n", "columns", "most", "tiles"),
    [
        # A tile of derivatives is 1 / 66 of a turn for 256 tokens, one of W's gradient
        # 16 / 66. 12 of 32,768 tokens: 23.3 turns and 2.9; 15: 29.1 and 3.6.
        (32_768, 128_256, 15, 12),
        (8192, 65_536, 32, 32),  # 15.5 and 7.8
        (8192, 50_304, 24, 24),  # 11.6 and 5.8
        (8192, 32_064, 15, 12),  # 5.8 and 2.9; 15: 7.3 and 3.6
        (8192, 17_920, 8, 8),
    ],
)
def test_where_no_whole_turn_fits_clusters_wait_least(n, columns, most, tiles):
    assert 1024 * columns // (n * blocks.TILE) == most
    assert backward(n, 1024, columns, 4096)[1] == tiles * blocks.TILE


def test_all_rows_come_at_once_until_few_columns_are_left():
    of = {n: blocks.backward_rows(n, 1024, 128_256, 4096, False) for n in
          (8192, 32_768, 34_000, 65_536, 131_072)}  # fmt: skip
    assert [n for n, rows in of.items() if rows >= n] == [8192, 32_768, 34_000]
    assert of[65_536] == of[131_072] == 11_264


def test_rows_are_never_more_than_hiddens_sums_may_be():
    """Of a small vocabulary W's sums are the smaller ones."""
    assert blocks.backward_rows(65_536, 16_384, 32_000, 4096, False) < 32_000


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
