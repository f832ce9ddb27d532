"""Damage to saved states, and what is said of it."""

import os

from jaxmem.base import checksums


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(step):
    return max(
        (p for p in (step / "state").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )


def remove(path):
    for child in path.iterdir() if path.is_dir() else ():
        remove(child)
    path.rmdir() if path.is_dir() else path.unlink()


def emptied(step):
    for child in step.iterdir():
        remove(child)


DAMAGES = {
    "an empty folder": (emptied, "config and data and state missing"),
    "no data": (lambda step: remove(step / "data"), "data missing"),
    "no state": (lambda step: remove(step / "state"), "state missing"),
    "no array": (lambda step: largest(step).unlink(), "is missing"),
    "a flipped byte": (lambda step: flip(largest(step)), "differs from its checksum"),
    "cut short": (lambda step: os.truncate(largest(step), 9), "differs from its check"),
    "bad JSON": (
        lambda step: (step / "data" / "metadata").write_text("{"),
        "data/metadata differs from its checksum",
    ),
    "zeros": (
        lambda step: (step / "config" / "metadata").write_bytes(bytes(30)),
        "config/metadata differs from its checksum",
    ),
    "bad checksums": (
        lambda step: os.truncate(step / checksums.NAME, 70),
        "SHA256SUMS cannot be read",
    ),
}
