"""Files to documents: what a run trains on, or scores, read and parted.

"stdlib", a .txt or a .jsonl  ->  documents  ->  (training, held out)
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.core import json_files, messages


class DataError(ValueError):
    """The text that the configuration names cannot be used; the message says why."""


class Document(NamedTuple):
    """One text; the loss counts `text`, never `prompt`."""

    name: str
    text: str
    prompt: str = ""


def load_documents(source: str, argument: str = "data.source") -> list[Document]:
    """Read every document of `source`, in an order that is the same on every run.

    Args:
      source: `"stdlib"`, or the path of a `.txt` file (one document) or of a `.jsonl`
        file (one document a line: `{"text"}` or `{"prompt", "response"}`).
      argument: what an error calls the source.

    Returns:
      The documents, at least one.

    Raises:
      DataError: unknown source, missing file, malformed line (named by its number).
    """
    if source == "stdlib":
        return _stdlib_documents()
    path = Path(os.path.expanduser(source))
    if path.suffix not in (".txt", ".jsonl"):
        raise DataError(
            f'{argument} must be "stdlib" or the path of a .txt or .jsonl file, '
            f"got {messages.short(source)}"
        )
    if path.suffix == ".jsonl":
        documents = _jsonl_documents(path, argument)
    else:
        documents = [Document(path.name, _read_text(path, argument))]
    if not any(document.text for document in documents):
        raise DataError(f"{argument}: {path} holds no text")
    return documents


def split_documents(
    documents: Sequence[Document], held_out: float
) -> tuple[list[Document], list[Document]]:
    """Split into (training, evaluation) by content, whatever the documents' order.

    Equal documents are on one side: where the cut would part them, they are trained on.
    """
    keys = [digest(document) for document in documents]
    first_trained = sorted(keys)[int(len(documents) * held_out)]
    training, evaluation = [], []
    for document, key in zip(documents, keys, strict=True):
        (evaluation if key < first_trained else training).append(document)
    return training, evaluation


def _stdlib_documents() -> list[Document]:
    """Top-level modules as they are, and the topics behind Python's `help()`."""
    from pydoc_data.topics import topics

    directory = Path(sysconfig.get_path("stdlib"))
    modules = [Document(p.name, _read_text(p)) for p in sorted(directory.glob("*.py"))]
    if not modules:
        raise DataError(
            f'data.source "stdlib": no Python sources in {directory}; name a .txt or '
            ".jsonl file instead"
        )
    return modules + [Document(f"help({t})", topics[t]) for t in sorted(topics)]


def _read_text(path: Path, argument: str = "data.source") -> str:
    shown = messages.name(str(path))
    try:
        return json_files.read_text(path)
    except json_files.JsonError as error:
        raise DataError(f"{argument}: {shown} is {error}") from error
    except (OSError, ValueError) as error:  # such as a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{argument}: cannot read {shown}: {reason}") from error


def _jsonl_documents(path: Path, argument: str) -> list[Document]:
    # Not str.splitlines, which would also cut at U+2028 inside a JSON string.
    lines = enumerate(_read_text(path, argument).split("\n"), start=1)
    return [_jsonl_document(f"{path}:{i}", line) for i, line in lines if line.strip()]


def _jsonl_document(where: str, line: str) -> Document:
    try:
        record = json_files.parse(line)
    except json_files.JsonError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: expected a JSON object, got {messages.short(record)}"
        )
    keys = record.keys() & {"text", "prompt", "response"}
    if keys == {"text"}:
        return Document(where, _string(record, "text", where))
    if keys == {"prompt", "response"}:
        response = _string(record, "response", where)
        return Document(where, response, prompt=_string(record, "prompt", where))
    raise DataError(
        f'{where}: expected "text" alone, or "prompt" and "response"; got the keys '
        f"{messages.listing(sorted(record)) or '(none)'}"
    )


def _string(record: dict[str, Any], key: str, where: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(
            f'{where}: "{key}" must be a string, got {messages.short(value)}'
        )
    return value


def digest(document: Document) -> bytes:
    """Identify the content; the name may hold a path, which may change."""
    content = json.dumps([document.prompt, document.text])
    return hashlib.sha256(content.encode()).digest()
