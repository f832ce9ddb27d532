"""Old names of configuration keys, which are read for one minor version.

A row of `RENAMED` is read by the version that it names and by those before it. The run
prints the new key. From the next minor version on, the old key is an error that names
the new one.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmem._version import __version__

_MOST_KEYS = 5  # that a message lists


@dataclasses.dataclass(frozen=True)
class Renamed:
    """The new name of a key."""

    key: str
    version: str  # minor version that renames it, and is the last one to read both

    @property
    def is_read(self) -> bool:
        """True if this version of jaxmem reads the old key."""
        return _minor(__version__) <= _minor(self.version)


RENAMED: dict[str, Renamed] = {}  # by the old key


def current(key: str) -> str:
    """The new name of an old key that is still read; other keys are unchanged."""
    renamed = RENAMED.get(key)
    return renamed.key if renamed is not None and renamed.is_read else key


def answer(key: str) -> str | None:
    """The answer to a key that is no longer read; None for other keys."""
    renamed = RENAMED.get(key)
    if renamed is None:
        return None
    return f"since version {renamed.version} it is {renamed.key}"


def note(source: str, old: Iterable[str]) -> str:
    """A line about old keys in a file, an override or a call; "" without any."""
    keys = [*dict.fromkeys(old)]
    if not keys:
        return ""
    pairs = [f"{key} is now {RENAMED[key].key}" for key in keys[:_MOST_KEYS]]
    if len(keys) > _MOST_KEYS:
        pairs.append(f"{len(keys) - _MOST_KEYS} more keys have new names")
    last = max((RENAMED[key].version for key in keys), key=_minor)
    return f"{source}: {', '.join(pairs)}; old names are read up to version {last}"


def settings(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Saved settings, by section and path, with the new names of their keys."""
    renamed: dict[str, dict[str, Any]] = {section: {} for section in saved}
    for section, values in saved.items():
        for path, value in values.items():
            key = current(f"{section}.{path}")
            new_section, _, new_path = key.partition(".")
            renamed.setdefault(new_section, {})[new_path] = value
    return renamed


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
