"""Rows and columns a launch: within the bytes that the docstrings state."""

import itertools

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


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_pass_takes_the_bytes_it_says(frozen):
    for n, chunk, columns, depth in SHAPES:
        rows = blocks.backward_rows(n, chunk, columns, depth, frozen)
        width = min(blocks.backward_columns(rows, chunk, columns), columns)
        sums = 0 if rows >= n or frozen else 4 * columns * depth
        taken = 2 * rows * width + 4 * min(rows, n) * depth + sums
        promised = 2 * chunk * columns + (0 if frozen else 4 * columns * depth)
        a_block = 4 * rows * depth if sums or frozen else 0  # hidden's, of its rows
        assert taken <= promised + a_block + slack(width, depth), (n, chunk, columns)


def test_all_rows_come_at_once_until_their_bytes_are_more_than_sums_of_W():
    of = {n: blocks.backward_rows(n, 1024, 128_256, 4096, False) for n in
          (8192, 32_768, 60_000, 65_536, 131_072)}  # fmt: skip
    assert [n for n, rows in of.items() if rows >= n] == [8192, 32_768, 60_000]
    assert of[65_536] == of[131_072] == 11_264


def test_columns_of_a_block_are_never_few():
    """A product that adds few columns to hidden's sums at a time is slow."""
    for n, chunk, columns, depth in SHAPES:
        rows = blocks.backward_rows(n, chunk, columns, depth, False)
        width = blocks.backward_columns(rows, chunk, columns)
        assert width**2 >= 0.99 * chunk * columns


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
