"""Fenced blocks of Markdown, and the commands in them."""

import re
import shlex
import textwrap
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block of a Markdown file."""

    language: str
    line: int  # of its first line of text, from 1
    text: str


def blocks(text):
    """The fenced blocks, in order; one that is never closed is an error."""
    fence = re.compile(
        r"^( *)```(\w*)[^\n]*\n(.*?)^ *```[ ]*$", re.MULTILINE | re.DOTALL
    )
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) % 2 == 0, "an open block"
    return [
        Block(
            match[2], text.count("\n", 0, match.start(3)) + 1, textwrap.dedent(match[3])
        )
        for match in fence.finditer(text)
    ]


def commands(text):
    """Each command of the shell blocks as a list of words, without its environment."""
    for block in blocks(text):
        if block.language not in ("console", "bash", "sh", "shell"):
            continue
        joined = block.text.replace("\\\n", " ")
        for line in joined.splitlines():
            if block.language == "console":  # the rest is output
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = []
            for word in [*lexer, ";"]:
                if word and set(word) <= set("();<>|&"):
                    yield from filter(None, [_without_environment(words)])
                    words = []
                else:
                    words.append(word)


def _without_environment(words):
    while words and re.match(r"^\w+=", words[0]):
        words = words[1:]
    return words
