"""A conversation on the terminal."""

import sys
from typing import Any

from jaxmem.data.records import DataError
from jaxmem.generate.completions import Generator, unreached

_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(generator: Generator, system: str | None = None) -> None:
    """Answer each line of standard input, with the conversation so far, until it ends.

    Args:
        generator: model and options.
        system: a message that precedes the conversation, or None.

    Raises:
        DataError: the model has no chat template.
    """
    generator.model.reader.template()
    start = [] if system is None else [{"role": "system", "content": system}]
    turns: list[dict[str, Any]] = [*start]
    _note(_HELP)
    number = 0
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            turns = [*start]
        elif line:
            turns = _answer(generator, turns, line, number)
            number += 1


def _read_line() -> str | None:
    """A line of input; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(
    generator: Generator, turns: list[dict[str, Any]], line: str, number: int
) -> list[dict[str, Any]]:
    """The conversation with a question and its answer; `turns` after an error."""
    asked = [*turns, {"role": "user", "content": line}]
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        print(piece, end="", flush=True)

    try:
        prompt = generator.prompt(asked, "the conversation", number)
    except DataError as error:
        _note(f"{error}; {_HELP}")
        return turns
    try:
        (completion,) = generator.complete([prompt], show)
    except KeyboardInterrupt:
        print()
    else:
        print()
        if note := unreached(generator.config.stop, [completion.finish]):
            _note(note)
    return [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _note(line: str) -> None:
    print(f"jaxmem: {line}", file=sys.stderr)
