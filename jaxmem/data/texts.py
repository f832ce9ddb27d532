"""Documents of a run, read from files and split into training and evaluation.

"stdlib", or .txt, .jsonl and .parquet files  ->  documents  ->  (training, held out)
"""

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.core import messages
from jaxmem.data.chat import Message, Span, Templates
from jaxmem.data.records import (
    DataError as DataError,
    Record,
    Source,
    find_files,
    read_records,
    read_text,
    string,
)

_COLUMNS = ("text", "prompt", "response", "completion", "messages", "chosen")
_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")


class Document(NamedTuple):
    """One text; the loss counts `text`, never `prompt`.

    In a text that a chat template rendered, special tokens are spelled out, and
    `counted` are the spans of characters that the loss counts.
    """

    name: str
    text: str
    prompt: str = ""
    counted: tuple[Span, ...] | None = None


def load_documents(
    source: Source,
    argument: str = "data.source",
    template: Templates | None = None,
) -> list[Document]:
    """Read all documents of `source`, in the same order on every run.

    Args:
        source: `"stdlib"`, or paths and globs of `.txt` files (documents are separated
            by blank lines) and of `.jsonl` and `.parquet` files (one document per
            record: `text`, `prompt` and `response` or `completion`, or `messages`).
        argument: name of the source in errors.
        template: returns the template that renders `messages`.

    Returns:
        The documents, at least one.

    Raises:
        DataError: the source is unknown, a file is missing, or a line is malformed.
    """
    if source == "stdlib":
        return _stdlib_documents()
    paths = find_files(source, argument)
    documents = [d for p in paths for d in _documents(p, argument, template)]
    if not any(document.text for document in documents):
        raise DataError(f"{argument}: {', '.join(map(str, paths[:3]))} holds no text")
    return documents


def split_documents(
    documents: Sequence[Document], held_out: float
) -> tuple[list[Document], list[Document]]:
    """Split into (training, evaluation) by content, independently of the order.

    Equal documents are never split: those at the boundary are for training.

    Args:
        documents: to be split.
        held_out: fraction for evaluation.

    Returns:
        Both lists.
    """
    return split(documents, [digest(document) for document in documents], held_out)


def split(items: Sequence[Any], keys: Sequence[bytes], held_out: float):
    """Split items as `split_documents` does, by keys that are equal for equal items.

    Args:
        items: to be split.
        keys: one per item.
        held_out: fraction for evaluation.

    Returns:
        Both lists.
    """
    first_trained = sorted(keys)[int(len(items) * held_out)]
    training, evaluation = [], []
    for item, key in zip(items, keys, strict=True):
        (evaluation if key < first_trained else training).append(item)
    return training, evaluation


def digest(document: Document) -> bytes:
    """Identify the content of a document, without its name, which may be a path."""
    content = [document.prompt, document.text]
    if document.counted is not None:
        content.append(str(document.counted))
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


def _documents(
    path: Path, argument: str, template: Templates | None
) -> Iterator[Document]:
    if path.suffix == ".txt":
        yield from _paragraphs(path.name, read_text(path, argument))
        return
    for record in read_records(path, argument):
        yield document_of(record, template)


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


# ------------------------------------------------------------------- records


def document_of(record: Record, template: Templates | None) -> Document:
    """Return the document of a record of supervised training.

    Args:
        record: of a file.
        template: returns the template that renders `messages`.

    Returns:
        The document.

    Raises:
        DataError: the record has none of the known sets of columns.
    """
    keys = set(record.fields) & set(_COLUMNS)
    if keys == {"text"}:
        return Document(record.where, string(record, "text"))
    if keys == {"messages"}:
        return conversation(record, conversation_of(record, "messages"), 0, template)
    for answer in ("response", "completion"):
        if keys == {"prompt", answer}:
            return answered(record, "prompt", answer, template)
    hint = ""
    if "chosen" in keys:
        hint = "; pairs of chosen and rejected answers are for run.job='dpo'"
    raise DataError(
        f'{record.where}: expected "text" alone, or "prompt" and "response", "prompt" '
        'and "completion", or "messages"; got the keys '
        f"{messages.listing(sorted(record.fields)) or '(none)'}{hint}"
    )


def answered(
    record: Record, prompt: str, answer: str, template: Templates | None
) -> Document:
    """Return the document of a prompt and its answer: two strings or conversations."""
    if isinstance(record.fields[prompt], list):
        before = conversation_of(record, prompt)
        after = conversation_of(record, answer)
        return conversation(record, [*before, *after], len(before), template)
    text = string(record, answer)
    return Document(record.where, text, prompt=string(record, prompt))


def conversation(
    record: Record,
    turns: Sequence[Message],
    first: int,
    template: Templates | None,
) -> Document:
    """Render messages; the loss counts assistant turns from message `first` on."""
    where = record.where
    if template is None:
        raise DataError(
            f"{where}: messages are rendered by a checkpoint's chat template; set "
            "model.checkpoint"
        )
    if not any(turn["role"] == "assistant" for turn in turns[first:]):
        raise DataError(f"{where}: no message has the role 'assistant'")
    chat_template = template()
    try:
        text, counted = chat_template.render_counted(turns, first)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not any(start < stop for start, stop in counted):
        raise DataError(f"{where}: the chat template writes no assistant turn")
    return Document(where, text, counted=counted)


def conversation_of(record: Record, key: str) -> list[Message]:
    """Return the messages of a field, checked.

    Args:
        record: of a file.
        key: name of the field.

    Returns:
        The messages.

    Raises:
        DataError: it is not a list of objects with a role.
    """
    where, turns = record.where, record.fields[key]
    if not isinstance(turns, list) or not turns:
        raise DataError(
            f'{where}: "{key}" must be a list of messages, got {messages.short(turns)}'
        )
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise DataError(
                f'{where}: "{key}"[{i}] must be an object with "role" and "content", '
                f"got {messages.short(turn)}"
            )
    return turns
