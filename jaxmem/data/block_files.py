"""Files in blocks that are read one at a time, for data that do not fit in memory.

A block is 1 MiB of a .jsonl file, with the lines that start in it, a row group of a
.parquet file, or 1,000 rows of an .arrow file. The sizes of the files alone tell which
bytes belong to which block.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxmem.base import json_files, messages
from jaxmem.data import packed
from jaxmem.data.config import DataConfig
from jaxmem.data.records import (
    ARROW_ROWS,
    DataError,
    RawRecord,
    Source,
    opened_arrow,
    opened_parquet,
    parse_line,
    read_records,
    unreadable,
)
from jaxmem.data.source_files import held_out_files, numbered_files

BLOCK_BYTES = 2**20
_TABLES = ".parquet", ".arrow"  # whose parts are blocks
_SAMPLE_BYTES = 2**12  # of each block, that identify a file
# The work is Python's: threads would only contend for the interpreter's lock.
IN_THIS_THREAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class FileBlock(NamedTuple):
    """A part of a file."""

    path: Path
    number: int  # of the part, from 0


class _Version(NamedTuple):
    """The state of a file when it was opened first; another one is another file."""

    size: int  # bytes
    modified: int  # nanoseconds
    inode: int

    @classmethod
    def of(cls, path: Path) -> "_Version":
        described = path.stat()
        return cls(described.st_size, described.st_mtime_ns, described.st_ino)


class FileBlocks(Sequence[FileBlock]):
    """The blocks of a source's files, in memory that does not grow with the files.

    Raises:
        DataError: a file has another format or cannot be read, or all are empty; or,
            when a block is read, its file has changed.
    """

    def __init__(self, source: Source, argument: str, held_out: bool = False):
        if source == "stdlib":
            raise DataError(
                f"{argument}='stdlib' fits in memory: leave out data.streaming"
            )
        numbered = numbered_files(source, argument, held_out)
        self._argument, self._paths = argument, [path for _, path in numbered]
        self._sources = [number for number, _ in numbered]
        self._versions = {path: self._version(path) for path in self._paths}
        self._samples: dict[Path, bytes] = {}
        counts = [self._count(path) for path in self._paths]
        self._stops = list(itertools.accumulate(counts))
        if not self._stops[-1]:
            shown = ", ".join(map(str, self._paths[:3]))
            raise DataError(f"{argument}: {shown} contains no text")

    def _count(self, path: Path) -> int:
        if path.suffix == ".parquet":
            with opened_parquet(path, self._argument) as file:
                return file.num_row_groups
        if path.suffix == ".arrow":
            return -(-len(opened_arrow(path, self._argument)) // ARROW_ROWS)
        if path.suffix != ".jsonl":
            raise DataError(
                f"{self._argument}: data.streaming reads .jsonl, .parquet and .arrow "
                f"files, got {messages.name(str(path))}"
            )
        return -(-self._versions[path].size // BLOCK_BYTES)

    def _version(self, path: Path) -> _Version:
        try:
            return _Version.of(path)
        except (OSError, ValueError) as error:
            raise unreadable(path, self._argument, error) from None

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index):  # an integer; slices are of no use
        file = bisect.bisect_right(self._stops, index)
        first = self._stops[file - 1] if file else 0
        return FileBlock(self._paths[file], int(index) - first)

    def source(self, index: int) -> int:
        """The number of the source's entry that has a block."""
        return self._sources[bisect.bisect_right(self._stops, index)]

    def records(self, index: int) -> Iterator[RawRecord]:
        """Yield the records of a block."""
        path, number = self[index]
        with self.unchanged(index):
            if path.suffix in _TABLES:
                yield from read_records(path, self._argument, number)
            else:
                yield from _lines(path, number * BLOCK_BYTES)

    @contextlib.contextmanager
    def unchanged(self, index: int) -> Iterator[None]:
        """A context that reads a block, before and after which its file is compared.

        Raises:
            DataError: the file was cut, replaced or removed since it was opened first.
        """
        path = self[index].path
        self._check(path)
        yield
        self._check(path)

    def _check(self, path: Path) -> None:
        old, new = self._versions[path], self._version(path)
        if new == old:
            return
        # Some network file systems give a file another inode at times.
        if new._replace(inode=old.inode) == old and path in self._samples:
            if _sample(path) == self._samples[path]:
                self._versions[path] = new
                return
        change = "it was replaced or rewritten"
        if new.size != old.size:
            change = f"it had {old.size:,} bytes and has {new.size:,}"
        raise DataError(
            f"{self._argument}: {messages.name(str(path))} changed while it was read: "
            f"{change}; restore it and resume, or start a new run (run.out_dir)"
        )

    def split(self, held_out: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the blocks that are trained on, and of those held out."""
        order = np.random.default_rng(0).permutation(len(self))
        count = int(len(self) * held_out)
        if held_out and len(self) > 1:
            count = max(count, 1)
        return order[count:], order[:count]

    def fingerprints(self) -> dict[str, str]:
        """Identify each file by its size and some KiB of every block; in order."""
        digests = {}
        for path in self._paths:
            try:
                self._samples[path] = _sample(path)
            except OSError as error:
                raise unreadable(path, self._argument, error) from None
            self._check(path)
            identity = b"%d:" % self._versions[path].size + self._samples[path]
            digests[str(path)] = hashlib.sha256(identity).hexdigest()[:24]
        return digests


def _sample(path: Path) -> bytes:
    """The digest of the first bytes of each block of a file, and of its last ones."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start in (*range(0, size, BLOCK_BYTES), max(size - _SAMPLE_BYTES, 0)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def opened_split(
    config: DataConfig, split: str, stream: int | None = None
) -> tuple[FileBlocks, np.ndarray]:
    """Blocks of `data.source`, and the numbers of those of a split.

    What folders hold out has blocks of its own.
    """
    argument = "data.source"
    held_out = held_out_files(config.source, argument)
    if split == "evaluation" and held_out:
        blocks = FileBlocks(config.source, argument, held_out=True)
        return blocks, np.arange(len(blocks))
    if held_out:  # in the place of a fraction
        config = dataclasses.replace(config, held_out=0.0)
    blocks = FileBlocks(config.source, argument)
    return blocks, blocks_of_split(blocks, config, split, stream)


def blocks_of_split(
    blocks: FileBlocks, config: DataConfig, split: str, stream: int | None = None
) -> np.ndarray:
    """The numbers of a split's blocks; for a stream, every `config.streams`-th one."""
    numbers = blocks.split(config.held_out)[split == "evaluation"]
    if not config.shuffle:
        numbers = np.sort(numbers)
    if stream is not None:
        numbers = numbers[stream :: config.streams]
    if not len(numbers):
        raise DataError(
            f"data.held_out={config.held_out} and data.streams={config.streams} of "
            f"the {len(blocks)} blocks (1 MiB, or a row group) of {config.source!r} "
            f"leave no block for {split}; change them, or set data.streaming=False"
        )
    return numbers


class _Read(grain.experimental.FlatMapTransform):
    """The number of a block to its pieces."""

    def __init__(self, read: Callable[[int], Iterable[Any]]):
        self._read = read

    def flat_map(self, element: int) -> list[Any]:
        return list(self._read(element))


def packed_rows(
    numbers: np.ndarray,
    blocks: FileBlocks,
    read: Callable[[int], Iterable[dict[str, np.ndarray]]],
    config: DataConfig,
    epochs: int | None,
    columns: Sequence[str] = (),
) -> packed.Sources:
    """Packed rows of the pieces of blocks.

    Blocks come in another order each epoch, and pieces are shuffled in a window; with
    `config.shuffle=False` both keep the order of the files.

    Args:
        numbers: of the blocks.
        blocks: all blocks of the source.
        read: returns the pieces of a block, by its number.
        config: layout of the rows, and seed.
        epochs: passes over the blocks; None never ends.
        columns: as in `packed.Epochs`.
    """

    def shuffled(items: np.ndarray) -> Callable[[int], grain.IterDataset]:
        own: list[int] = numbers[items].tolist()

        def of_epoch(epoch: int) -> grain.IterDataset:
            seed = config.seed + epoch
            order = grain.MapDataset.source(own)
            if config.shuffle:
                order = order.shuffle(seed=seed)
            pieces = grain.experimental.FlatMapIterDataset(
                order.to_iter_dataset(IN_THIS_THREAD), _Read(read)
            )
            if not config.shuffle:
                return pieces
            return grain.experimental.WindowShuffleIterDataset(
                pieces, window_size=config.shuffle_window, seed=seed
            )

        return of_epoch

    sources = [blocks.source(number) for number in numbers.tolist()]
    return packed.rows_by_source(sources, shuffled, config, epochs, columns)


def _lines(path: Path, start: int) -> Iterator[RawRecord]:
    """Records of the lines that start in the block at byte `start`."""
    with open(path, "rb") as file:
        if start:  # the line with the byte before belongs to the block before
            file.seek(start - 1)
            while (rest := file.readline(BLOCK_BYTES)) and rest[-1:] != b"\n":
                if file.tell() >= start + BLOCK_BYTES:
                    return  # no line starts in the block
        while (offset := file.tell()) < start + BLOCK_BYTES:
            where = f"{path}: line at byte {offset:,}"
            line = file.readline(json_files.MAX_BYTES + 1)
            if len(line) > json_files.MAX_BYTES:
                most = json_files.MAX_BYTES // 2**20
                raise DataError(f"{where}: longer than {most} MiB")
            if not line:
                return
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8" if offset else "utf-8-sig")
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8 ({error.reason})") from error
            yield RawRecord(where, parse_line(where, text))
