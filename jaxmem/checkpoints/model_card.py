"""README.md of a saved model: the card that its page on the Hub shows.

The last line of a card has a digest of the rest, so that a card that a user has edited
is told from ours, and is not replaced.
"""

import hashlib
import re
from pathlib import Path

from jaxmem.base import files

NAME = "README.md"
_MARK = "\n<!-- written by jaxmem; sha256 of the text above: {} -->\n"
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{64})") + r"\Z")


def write(directory: Path, text: str) -> None:
    """Write the card of a saved model; one that is there must be `is_own`."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    files.write_whole(directory / NAME, text + _MARK.format(digest))


def is_own(path: Path) -> bool:
    """True if a file is a card that `write` wrote and nobody has changed since."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    marked = _MARKED.search(text)
    if marked is None:
        return False
    above = text[: marked.start()].encode()
    return hashlib.sha256(above).hexdigest() == marked[1]
