"""Sentences on the number of times that a run trains on each record."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxmem.base import messages
from jaxmem.data import mixing
from jaxmem.train.settings import RunConfig


class SourceSize(NamedTuple):
    """A source of records that weights mix with others."""

    name: str
    rows: int  # of one pass
    items: int  # of one pass, whose numbers are in proportion to the weights
    weight: float


def sizes(config: Any, counts: Sequence[tuple[int, int]]) -> list[SourceSize]:
    """Sizes of the sources of a section with weights, from (rows, items) of each."""
    sources = zip(config.source, counts, config.weights, strict=True)
    return [
        SourceSize(messages.name(name), *count, weight)
        for name, count, weight in sources
    ]


def of_items(config: Any, sources: Sequence[int]) -> list[SourceSize] | None:
    """Sizes of sources with an item a row; None where the section has no weights."""
    if config.weights is None:
        return None
    items = mixing.items_by_source(sources, len(config.weights))
    return sizes(config, [(len(own), len(own)) for own in items])


def of_all(run: RunConfig, epoch: Callable[[], float]) -> str:
    """The line for records that come once an epoch each.

    Args:
        run: how long the run is.
        epoch: returns the micro-batches of an epoch; called where `run.steps` counts.
    """
    if run.epochs is not None:
        seen = _times_seen(run.epochs)
        return f"run.epochs={run.epochs:g}: each record is seen {seen}"
    times = run.steps * run.accumulate / epoch()
    return (
        f"run.steps={run.steps:,} is {_format_number(times)} epochs: each record is "
        f"seen {_times_seen(times)}"
    )


def of_sources(run: RunConfig, epoch: float, sources: Sequence[SourceSize]) -> str:
    """The line for sources mixed by weights, which have epochs of their own."""
    batches = run.steps * run.accumulate
    length = f"run.steps={run.steps:,}"
    if run.epochs is not None:
        batches, length = run.epochs * epoch, f"run.epochs={run.epochs:g}"
    rows = batches * sum(source.rows for source in sources) / epoch
    parts = [source.weight * source.rows / source.items for source in sources]
    counts = []
    for source, part in zip(sources, parts, strict=True):
        times = _format_number(rows * part / sum(parts) / source.rows)
        counts.append(f"{times} times in {source.name}")
    return f"{length}: each record is seen {', '.join(counts)}"


def _format_number(times: float) -> str:
    """A number with three digits or more, and without an exponent."""
    return f"{times:.3g}" if times < 999 else f"{times:,.1f}".removesuffix(".0")


def _times_seen(times: float) -> str:
    least, most = math.floor(times), math.ceil(times)
    if most == 1:
        return "once" if least == 1 else "at most once"
    return f"{most:,} times" if least == most else f"{least:,} or {most:,} times"
