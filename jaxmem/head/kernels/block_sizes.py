"""Rows and columns per launch, by a budget of bytes.

All are integers that are known when a program is traced: N rows, a chunk C, V columns,
D depth.
"""

import math

from jaxmem.head.kernels.tiles import MAX_CLUSTER_ROWS

ROW_BLOCK, PAIR_BLOCK = 64, 128  # columns of a block of one head's logits, and of two
TILE = 256  # columns of a product's tile, as in `tuned.DEFAULTS`
# Of one forward launch; 16,384 are 1% slower and take twice the bytes.
MAX_ROWS = 8_192
# Tiles of a block per cluster, times D: enough to keep it busy.
BUSY_DEPTH = 65_536
# Time to read and write 256 x 256 float32 sums, 0.11 us on an H200, relative to that of
# a 256 x 256 x 256 product by a cluster, 3.3 us: N=32768 D=4096 V=128256 took 4.6 ms
# longer with 63 blocks than with 42.
SUMS = 1 / 30
MAX_LAUNCHES = 8  # in sequence, each compiled
MAX_SPLITS = 4
WORTH = 1.1  # parts of the vocabulary must save a tenth of the time of one product
NEAR = 1.01  # if two times differ by less, fewer bytes are preferred


def whole(n_rows: int) -> int:
    """n_rows, rounded up to a multiple that any tiles divide."""
    return -(-max(n_rows, 1) // MAX_CLUSTER_ROWS) * MAX_CLUSTER_ROWS


def forward_rows(n_rows: int, chunk: int, columns: int, depth: int, groups: int) -> int:
    """Rows per launch, with no more bytes for statistics than the logits of "xla".

    Each row has five statistics for each of the groups of columns.
    """
    of_groups = 4 * 5 * groups
    a_row = 2 * depth + of_groups + of_groups // 8  # and an eighth of it when merged
    fitting = 4 * chunk * columns // a_row
    return whole(min(n_rows, max(fitting, MAX_CLUSTER_ROWS), MAX_ROWS))


def stored_rows(n_rows: int, depth: int, chunk: int, frozen: bool) -> int:
    """Rows per launch that stores exponentials of all columns in 16 bits.

    A launch has at least the rows of a chunk. If W has a gradient, XLA stores the
    exponentials in its buffer, which has room for D rows.
    """
    room = 0 if frozen else depth // MAX_CLUSTER_ROWS * MAX_CLUSTER_ROWS
    return whole(min(n_rows, max(chunk, room)))


def backward_rows(
    n_rows: int, chunk: int, columns: int, depth: int, apart: bool, clusters: int,
    n_blocks: int = 1,
) -> tuple[int, bool]:  # fmt: skip
    """(rows per launch, True if all rows share each block of the vocabulary).

    Blocks of R rows and K columns move 8 D (N V / K + N V / R) bytes of float32 sums,
    which is least for R = K. If each block of columns is computed for all rows, in
    several launches, sums take 4 N D bytes for hidden and 4 K D for W, otherwise 4 V D
    for W, by n_blocks. This is done for up to V rows, unless they must stay `apart`, if
    it takes no more than 2 C V + 4 V D with derivatives. For a shard of the vocabulary,
    C is multiplied by the number of shards. On an H200, D=4096, C=1024, GEMMs with
    gradients and MiB, of one launch for all rows with few columns, and of blocks of
    rows:

        N      V
        32768  128256    4.27,   706    4.24, 2269
        32768   64000    4.52,   626    4.40, 1187
        65536  128000    4.40, 1252     4.22, 2265

    In four launches, as chosen below, the first takes 4.18 and 902, and with C=4096,
    which allows one launch and 33 tiles, 4.08 and 1042 (head_h200.csv, another card);
    the last, in eight launches, takes the time of blocks of rows, and 1672 MiB.
    """
    side = _square_side(chunk, columns)
    if n_rows <= side:
        return whole(n_rows), True
    sizes = {n: whole(-(-n_rows // n)) for n in range(1, MAX_LAUNCHES + 1)}
    sizes = {n: rows for n, rows in sizes.items() if rows * TILE <= chunk * columns}
    n_tiles, depth_tiles = -(-columns // TILE), -(-depth // TILE)

    def cost(launches, rows):
        """(time, bytes) of all launches."""
        tiles = backward_tiles(n_tiles, rows, chunk, columns, depth, clusters)
        time = _backward_time(n_tiles, tiles, rows, depth, clusters)
        time += SUMS * n_tiles * depth_tiles if launches > 1 else 0
        hidden_rows = n_rows if tiles < n_tiles else 0
        W_columns = tiles * TILE if launches > 1 else 0
        size = 2 * rows * tiles * TILE + 4 * depth * (hidden_rows + W_columns)
        return launches * time, size

    costs = {n: cost(n, rows) for n, rows in sizes.items()}
    limit = 2 * chunk * columns + 4 * columns * depth // n_blocks
    costs = {n: (time, size) for n, (time, size) in costs.items() if size <= limit}
    if apart or n_rows > columns or not costs:
        return max(side // MAX_CLUSTER_ROWS, 1) * MAX_CLUSTER_ROWS, False
    longest = NEAR * min(time for time, _ in costs.values())
    choices = [n for n, (time, _) in costs.items() if time <= longest]
    return sizes[min(choices, key=lambda n: costs[n][1])], True


def vocabulary_block(
    n_rows: int, chunk: int, columns: int, depth: int, n_blocks: int, clusters: int
) -> tuple[int, int]:
    """Rows per launch and tiles of the vocabulary, if W's sums are of one block of it.

    Derivatives take 2 C V bytes at most, and the rows are no more than make a square of
    those, because they take 8 D each. Of these, the rows that take the least time.
    """
    n_tiles, depth_tiles = -(-columns // TILE), -(-depth // TILE)
    tiles = -(-n_tiles // n_blocks)
    max_rows = min(chunk * columns // (tiles * TILE), _square_side(chunk, columns))
    max_rows = max(min(max_rows, whole(n_rows)) // MAX_CLUSTER_ROWS, 1)

    def time_a_row(rows):
        sums = SUMS * tiles * depth_tiles
        return (_backward_time(tiles, tiles, rows, depth, clusters) + sums) / rows

    sizes = range(MAX_CLUSTER_ROWS, (max_rows + 1) * MAX_CLUSTER_ROWS, MAX_CLUSTER_ROWS)
    longest = NEAR * min(map(time_a_row, sizes))
    return next(rows for rows in sizes if time_a_row(rows) <= longest), tiles


def backward_tiles(
    n_tiles: int, rows: int, chunk: int, columns: int, depth: int, clusters: int
) -> int:
    """Tiles per block of the vocabulary, whose derivatives take 2 C V bytes.

    Clusters compute one tile at a time, so the tiles are a multiple of the number of
    clusters, and none idles at the end of a block. There are no more than keep each
    cluster busy for `BUSY_DEPTH`, because more take bytes and save no time. On an H200,
    ms with gradients and MiB:

        N, D, V                 tiles
        8192, 4096, 151936      33: 61.3, 261   66: 61.2, 393    48: 62.4, 321
        4096, 5120, 151936      33: 38.8, 146   66: 38.3, 212   132: 38.1, 344
        8192, 2048, 248320      33: 51.1, 197   66: 50.5, 329    99: 50.3, 461
        2048, 4096, 131072      33: 13.6,  65  132: 13.4, 164   231: 13.4, 263

    If not even one such multiple fits, it is the number that takes the least time by
    `_backward_time`.
    """
    max_tiles = min(max(chunk * columns // (rows * TILE), 1), n_tiles)
    if max_tiles == n_tiles:
        return n_tiles
    row_tiles, depth_tiles = rows // MAX_CLUSTER_ROWS, -(-depth // TILE)
    # The fewest for which derivatives and W's gradient occupy all clusters.
    turn = clusters // math.gcd(clusters, row_tiles, depth_tiles)
    if turn <= max_tiles:
        busy = -(-BUSY_DEPTH * clusters // (row_tiles * turn * depth))
        return min(min(max_tiles // turn, busy) * turn, n_tiles)
    return min(
        range(1, max_tiles + 1),
        key=lambda t: _backward_time(n_tiles, t, rows, depth, clusters),
    )


def _backward_time(n_tiles, tiles, rows, depth, clusters):
    """Time of a backward pass in blocks of tiles, in products of 256 x 256 x 256."""
    row_tiles, depth_tiles = rows // MAX_CLUSTER_ROWS, -(-depth // TILE)

    def turns(n):
        return -(-n // clusters)

    def block_time(tiles):
        dz = turns(row_tiles * tiles) * depth_tiles
        dh = turns(row_tiles * depth_tiles) * tiles
        dW = turns(tiles * depth_tiles) * row_tiles
        return dz + dh + dW + SUMS * row_tiles * depth_tiles

    n_whole, last_tiles = divmod(n_tiles, tiles)
    return n_whole * block_time(tiles) + (block_time(last_tiles) if last_tiles else 0)


def hidden_splits(n_rows: int, depth: int, clusters: int) -> int:
    """Parts of the vocabulary over which hidden's gradient is summed by itself.

    Hidden's gradient of a launch has few tiles if D is small. With parts, clusters that
    would have none compute some, for 4 D bytes of sums per row and part.
    """
    tiles = -(-n_rows // MAX_CLUSTER_ROWS) * -(-depth // TILE)

    def turns(splits):
        return -(-tiles * splits // clusters) / splits

    sizes = range(1, MAX_SPLITS + 1)
    return next(n for n in sizes if turns(n) <= WORTH * min(map(turns, sizes)))


def _square_side(chunk, columns):
    """Rows, and columns, of a square of 2 C V bytes of derivatives."""
    return math.isqrt(chunk * columns)


def loss_rows(n_rows: int, chunk: int, depth: int, frozen: bool, clusters: int) -> int:
    """Rows whose exponentials `one_pass` stores at once, in no more bytes than "xla".

    "xla" has logits of a chunk, their derivatives and float32 sums of W's gradient,
    which a frozen W does not have: 6 C V + 4 V D. If the exponentials of all rows, 2 N
    V, fit in that, no sums are needed. Otherwise two to three chunks, so that hidden's
    gradient occupies all clusters: on an H200 with N=16384 D=2048 V=248320, 3.40 GEMMs
    with 2,048 rows, which 64 of its 66 clusters compute at once, and 3.63 with 3,072,
    which take two turns; with D=2304 N=8192 V=256000 both take two turns, 4.08 and
    3.61.
    """
    kept = 3 * chunk
    if n_rows <= kept + (0 if frozen else 2 * depth):
        return whole(n_rows)
    tiles = -(-depth // TILE)  # of hidden's gradient per cluster's rows

    def rows_a_turn(rows):
        return rows / -(-rows // MAX_CLUSTER_ROWS * tiles // clusters)

    sizes = range(whole(2 * chunk), whole(kept) + 1, MAX_CLUSTER_ROWS)
    return max(sizes, key=lambda rows: (rows_a_turn(rows), rows))
