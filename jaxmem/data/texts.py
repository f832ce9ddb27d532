"""Documents of a run, read from files and split into training and evaluation.

"stdlib", or files of records and texts  ->  documents  ->  (training, held out)
"""

import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmem.data.forms import Document as Document
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import (
    DataError as DataError,
    Source,
    held,
    kind_of,
    read_records,
    read_text,
)
from jaxmem.data.source_files import held_out_files, numbered_files

_BLANK_LINES = re.compile(r"\r?\n(?:[ \t\r]*\n)+")


def load_documents(
    source: Source,
    argument: str = "data.source",
    reader: RecordReader | None = None,
) -> list[Document]:
    """Read all documents of `source`, in the same order on every run.

    Args:
        source: `"stdlib"`, or paths, globs and folders of `.txt` files (documents are
            separated by blank lines) and of files of records (one document per record,
            of the forms of `jaxmem.data.forms`). What folders hold out is not read.
        argument: name of the source in errors.
        reader: reads records; None: one without a chat template.

    Raises:
        DataError: the source is unknown, a file is missing, or a line is malformed.
    """
    if source == "stdlib":
        return _stdlib_documents()
    paths = numbered_files(source, argument)
    reader = reader or RecordReader()
    with reader.whole_pass():
        return _read_all(paths, argument, reader)


def load_splits(
    source: Source, held_out: float, reader: RecordReader | None = None
) -> tuple[list[Document], list[Document]]:
    """Read `data.source`, and return (training, held-out) documents.

    Those of files that folders hold out are held out, or without such files a fraction
    of all, as in `split_documents`.
    """
    argument, reader = "data.source", reader or RecordReader()
    files = held_out_files(source, argument)
    if not files:
        return split_documents(load_documents(source, argument, reader), held_out)
    paths = numbered_files(source, argument)
    with reader.whole_pass():
        parts = [_read_all(part, argument, reader) for part in (paths, files)]
    return parts[0], parts[1]


def _read_all(
    paths: Sequence[tuple[int, Path]], argument: str, reader: RecordReader
) -> list[Document]:
    """The documents of numbered files."""
    documents: list[Document] = []
    for number, path in paths:
        with held(path, argument, streams=argument == "data.source"):
            documents += [
                document._replace(source=number) if number else document
                for document in _documents(path, argument, reader)
            ]
    if not any(document.text or document.ids for document in documents):
        raise DataError(
            f"{argument}: {', '.join(str(p) for _, p in paths[:3])} contains no text"
        )
    return documents


def split_documents(
    documents: Sequence[Document], held_out: float
) -> tuple[list[Document], list[Document]]:
    """Split into (training, evaluation) by content, independently of the order.

    Equal documents are never split: those at the boundary are for training.
    """
    return split(documents, [digest(document) for document in documents], held_out)


def split(items: Sequence[Any], keys: Sequence[bytes], held_out: float):
    """Split items as `split_documents` does, by keys that are equal for equal items.

    A fraction above 0 holds at least one item out, where there are two that differ.
    """
    first_trained = sorted(keys)[int(len(items) * held_out)]
    chosen = {key for key in keys if key < first_trained}
    counts = Counter(keys)
    if held_out and not chosen and len(counts) > 1:
        chosen = {min(counts, key=lambda key: (counts[key], key))}
    training, evaluation = [], []
    for item, key in zip(items, keys, strict=True):
        (evaluation if key in chosen else training).append(item)
    return training, evaluation


def split_all(
    items: Sequence[Any], keys: Sequence[bytes], held_out: float, key: str, noun: str
):
    """Split items by `split`; raise a DataError if that leaves none for evaluation."""
    training, evaluation = split(items, keys, held_out)
    if held_out and not evaluation:
        raise DataError(
            f"{key}={held_out} of the {len(items)} {noun} leaves nothing for "
            f"evaluation: only {len(set(keys))} are distinct; add {noun}"
        )
    return training, evaluation


def digest(document: Document) -> bytes:
    """Identify the content of a document, without its name, which may be a path."""
    content = [document.prompt, document.text]
    if document.counted is not None:
        content.append(str(document.counted))
    if document.ids is not None:
        content.append(str([document.ids, document.labels]))
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _stdlib_documents() -> list[Document]:
    """Source files of top-level modules, and the topics of Python's `help()`."""
    from pydoc_data.topics import topics

    directory, argument = Path(sysconfig.get_path("stdlib")), "data.source"
    modules = [
        Document(p.name, read_text(p, argument)) for p in sorted(directory.glob("*.py"))
    ]
    if not modules:
        raise DataError(
            f'data.source "stdlib": no Python sources in {directory}; name a .txt or '
            ".jsonl file instead"
        )
    return modules + [Document(f"help({t})", topics[t]) for t in sorted(topics)]


def _documents(path: Path, argument: str, reader: RecordReader) -> Iterator[Document]:
    if kind_of(path) == ".txt":
        yield from _paragraphs(str(path), read_text(path, argument))
        return
    for record in read_records(path, argument):
        yield reader.document(record)


def _paragraphs(name: str, text: str) -> Iterator[Document]:
    """Parts of a text between blank lines, each with its first line number."""
    start = 0
    for end, following in [
        *(match.span() for match in _BLANK_LINES.finditer(text)),
        (len(text), len(text)),
    ]:
        if text[start:end].strip():
            line = text.count("\n", 0, start) + 1
            yield Document(f"{name}:{line}", text[start:end])
        start = following
