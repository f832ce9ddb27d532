"""Records of JSON, CSV, Parquet and Arrow files, each with its position for errors."""

import contextlib
import csv
import gzip
import importlib
import io
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxmem.base import imports, json_files, messages

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_PACKED = (".gz", ".zst")
_WITH_OWN_PACKING = (".parquet", ".arrow")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
Source = str | tuple[str, ...]
ARROW_ROWS = 1_000  # of an .arrow file, which are read at a time
_SPACES = 2**16  # bytes within which a file must have a character other than space
_MOST_BYTES = 4 * 2**30  # of a file that is read whole, unpacked
# A record's own arrays hold messages or schemas of tools, which have one of these keys.
_OF_PARTS = frozenset(("role", "from", "function", "parameters"))


class DataError(ValueError):
    """The data that the configuration names cannot be used; the message says why."""


class RawRecord(NamedTuple):
    """One line of a .jsonl file, or one row of a table."""

    where: str  # such as "data.jsonl:3"
    fields: dict[str, Any]


def kind_of(path: Path) -> str:
    """The suffix that tells a file's format, without ".gz" or ".zst"."""
    inner = Path(path.stem).suffix
    is_packed = path.suffix in _PACKED and inner not in _WITH_OWN_PACKING
    return inner if is_packed else path.suffix


def read_records(
    path: Path, argument: str, part: int | None = None
) -> Iterator[RawRecord]:
    """Yield the records of a file, or of one part of it.

    A .json file holds an array of records, an object of which one value is such an
    array, or lines as a .jsonl file does; and a .jsonl file may hold an array, too. The
    first row of a .csv or .tsv file names its columns.

    Args:
        path: of the file.
        argument: name of the source in errors.
        part: a row group of a .parquet file, or `ARROW_ROWS` rows of an .arrow file.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object, or a row has
            other columns than the first.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        return _parquet(path, argument, part)
    if kind == ".arrow":
        return _arrow(path, argument, part)
    if kind in _SEPARATORS:
        return _table(path, argument, _SEPARATORS[kind])
    if kind == ".txt":
        raise DataError(
            f"{argument}: {messages.name(str(path))} is a text file, which has no "
            'records; name a file of lines such as {"prompt": "..."} .jsonl'
        )
    with _opened(path, argument) as file:
        start = file.read(_SPACES).decode("utf-8-sig", "ignore").lstrip()[:1]
    if start == "[" or (start == "{" and kind == ".json"):
        return _json(path, read_text(path, argument))
    return _jsonl(path, _numbered_lines(path, argument))


def read_text(path: Path, argument: str) -> str:
    """The text of a file; a DataError if it has none, or more than 4 GiB."""
    shown = messages.name(str(path))
    with _opened(path, argument) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DataError(
            f"{argument}: {shown} has more than {_MOST_BYTES // 2**30} GiB of text; "
            "write it as several files, or as a .jsonl file"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte {error.start})"
        raise DataError(f"{argument}: {shown} is {reason}") from error


@contextlib.contextmanager
def held(path: Path, argument: str, streams: bool = False) -> Iterator[None]:
    """A context that holds a file's records; a DataError names one too large for it.

    Args:
        path: of the file.
        argument: name of the source in errors.
        streams: True if `data.streaming` reads such files without holding them.
    """
    try:
        yield
    except MemoryError as error:
        remedy = "name files of fewer records"
        if streams:
            remedy += (
                ", or read .jsonl, .parquet and .arrow files by data.streaming=True"
            )
        raise DataError(
            f"{argument}: the host's memory cannot hold {messages.name(str(path))}; "
            f"{remedy}"
        ) from error


@contextlib.contextmanager
def _opened(path: Path, argument: str) -> Iterator[BinaryIO]:
    """A context with a file's bytes, unpacked; errors of reading are DataErrors."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{argument}: {messages.name(str(path))} is not a file")
        with _unpacked(path, argument) as file:
            yield file
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as error:  # a NUL in the path
        raise unreadable(path, argument, error) from error


def _unpacked(path: Path, argument: str) -> Any:
    """The bytes of a file, which is unpacked as its suffix says."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix != ".zst":
        return open(path, "rb")
    pyarrow: Any = _module("pyarrow", path, argument, "score")
    packed = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(packed)


def _module(name: str, path: Path, argument: str, extra: str) -> Any:
    """A module that a file's format needs; a DataError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{argument}: {messages.name(str(path))} needs {error.name}, which is not "
            f"installed; run: {imports.how_to_install(extra)}"
        ) from error


def _numbered_lines(path: Path, argument: str) -> Iterator[tuple[int, str]]:
    """The lines of a file, of at most 256 MiB each, with their numbers from 1."""
    # Not str.splitlines, which also splits at U+2028 inside a JSON string.
    with _opened(path, argument) as file:
        lines = iter(lambda: file.readline(json_files.MAX_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > json_files.MAX_BYTES:
                most = json_files.MAX_BYTES // 2**20
                raise DataError(f"{path}:{number}: a line longer than {most} MiB")
            try:
                coding = "utf-8-sig" if number == 1 else "utf-8"
                yield number, line.removesuffix(b"\n").decode(coding)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not UTF-8 text (byte {error.start} of the line)"
                ) from error


def unreadable(path: Path, argument: str, error: Exception) -> DataError:
    """The error for a file that cannot be read."""
    shown = messages.name(str(path))
    return DataError(f"{argument}: cannot read {shown}: {messages.reason(error)}")


def _jsonl(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[RawRecord]:
    for number, line in lines:
        if line.strip():
            where = f"{path}:{number}"
            yield RawRecord(where, parse_line(where, line))


def _json(path: Path, text: str) -> Iterator[RawRecord]:
    """Records of an array, of the only array of an object, or of lines after all."""
    try:
        value = json_files.parse(text)
    except json_files.JsonError as error:
        first, _, rest = text.strip().partition("\n")
        try:
            lines = not rest or isinstance(json_files.parse(first), dict)
        except json_files.JsonError:
            lines = False
        if not lines:
            raise DataError(f"{path}: {error}") from error
        yield from _jsonl(path, enumerate(text.split("\n"), start=1))
        return
    arrays = [value]
    if isinstance(value, dict):
        tables = [
            v
            for v in value.values()
            if isinstance(v, list) and v and all(isinstance(x, dict) for x in v)
        ]
        is_record = not tables or any(not _OF_PARTS.isdisjoint(v[0]) for v in tables)
        arrays = [[value]] if is_record else tables
    if len(arrays) > 1:
        raise DataError(
            f"{path}: has {len(arrays)} arrays of records; write each to its own file"
        )
    for number, fields in enumerate(arrays[0], start=1):
        where = f"{path}: record {number}"
        if not isinstance(fields, dict):
            raise DataError(
                f"{where}: expected an object, got {messages.short(fields)}"
            )
        yield RawRecord(where, fields)


def parse_line(where: str, line: str) -> dict[str, Any]:
    """Return the object of a line of a .jsonl file; a DataError names the line."""
    try:
        record = json_files.parse(line)
    except json_files.JsonError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: expected a JSON object, got {messages.short(record)}"
        )
    return record


def _parquet(path: Path, argument: str, row_group: int | None) -> Iterator[RawRecord]:
    group = "" if row_group is None else f"row group {row_group + 1}, "
    groups = None if row_group is None else [row_group]
    with opened_parquet(path, argument) as file:
        batches = file.iter_batches(row_groups=groups)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            fields = {key: without_nulls(value) for key, value in row.items()}
            yield RawRecord(f"{path}: {group}row {number}", fields)


@contextlib.contextmanager
def opened_parquet(path: Path, argument: str) -> Iterator[Any]:
    """A context with a Parquet file; errors of reading it are DataErrors."""
    if not path.is_file():
        raise unreadable(path, argument, FileNotFoundError("No such file"))
    pyarrow: Any = _module("pyarrow", path, argument, "score")
    parquet: Any = _module("pyarrow.parquet", path, argument, "score")
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, (DataError, MemoryError)):
            raise
        raise unreadable(path, argument, error) from error


def _arrow(path: Path, argument: str, part: int | None) -> Iterator[RawRecord]:
    rows = opened_arrow(path, argument)
    start, stop = 0, len(rows)
    if part is not None:
        start, stop = part * ARROW_ROWS, min((part + 1) * ARROW_ROWS, stop)
    for first in range(start, stop, ARROW_ROWS):
        columns = rows[first : min(first + ARROW_ROWS, stop)]
        for number, values in enumerate(
            zip(*columns.values(), strict=True), start=first + 1
        ):
            fields = dict(zip(columns, map(without_nulls, values), strict=True))
            yield RawRecord(f"{path}: row {number}", fields)


def opened_arrow(path: Path, argument: str) -> Any:
    """The rows of an .arrow file as a `datasets.Dataset`, which maps it to memory."""
    if not path.is_file():
        raise unreadable(path, argument, FileNotFoundError("No such file"))
    datasets: Any = _module("datasets", path, argument, "remote")
    try:
        return datasets.Dataset.from_file(str(path))
    except Exception as error:  # of datasets or pyarrow, of many types
        raise unreadable(path, argument, error) from error


def _table(path: Path, argument: str, separator: str) -> Iterator[RawRecord]:
    """Records of a table of text, of which an empty cell is null."""
    lines = (line + "\n" for _, line in _numbered_lines(path, argument))
    csv.field_size_limit(json_files.MAX_BYTES)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}:{start}: {messages.reason(error)}") from error
        if header is None:
            header = _checked_header(f"{path}:{start}", row)
        elif row:  # else the line is blank
            where = f"{path}:{start}"
            if len(row) != len(header):
                raise DataError(
                    f"{where}: the row has {len(row)} cells, but the header has "
                    f"{len(header)}; put a cell with {separator!r} or a quote in "
                    "quotes"
                )
            fields = {k: v or None for k, v in zip(header, row, strict=True)}
            yield RawRecord(where, fields)


def _checked_header(where: str, names: list[str]) -> list[str]:
    """The columns' names; a DataError unless each has one of its own."""
    if not all(names) or len(set(names)) < len(names):
        raise DataError(
            f"{where}: the first row must name the columns, each by a different name, "
            f"got {messages.listing(names) or 'an empty line'}"
        )
    return names


def without_nulls(value: Any) -> Any:
    """Remove keys whose value is null: Parquet gives each row the keys of all rows."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
