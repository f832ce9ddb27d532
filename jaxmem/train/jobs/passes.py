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
    """Sources of a section that has weights, of their rows and items."""
    sources = zip(config.source, counts, config.weights, strict=True)
    return [
        SourceSize(messages.name(name), *count, weight)
        for name, count, weight in sources
    ]


def of_items(config: Any, sources: Sequence[int]) -> list[SourceSize] | None:
    """Sources of which each item is a row; None where the section has no weights."""
    if config.weights is None:
        return None
    items = mixing.of_sources(sources, len(config.weights))
    return sizes(config, [(len(own), len(own)) for own in items])


def of_all(run: RunConfig, epoch: Callable[[], float]) -> str:
    """The line for records of which each comes once an epoch.

    Args:
        run: how long the run is.
        epoch: returns the micro-batches of an epoch; called where `run.steps` counts.
    """
    if run.epochs is not None:
        return f"run.epochs={run.epochs:g}: each record is seen {_often(run.epochs)}"
    times = run.steps * run.accumulate / epoch()
    return (
        f"run.steps={run.steps:,} is {_number(times)} epochs: each record is seen "
        f"{_often(times)}"
    )


def of_sources(run: RunConfig, epoch: float, sources: Sequence[SourceSize]) -> str:
    """The line for sources by weights, of which each has epochs of its own."""
    batches = run.steps * run.accumulate
    said = f"run.steps={run.steps:,}"
    if run.epochs is not None:
        batches, said = run.epochs * epoch, f"run.epochs={run.epochs:g}"
    taken = batches * sum(source.rows for source in sources) / epoch  # rows
    parts = [source.weight * source.rows / source.items for source in sources]
    each = [
        f"of {source.name} {_number(taken * part / sum(parts) / source.rows)} times"
        for source, part in zip(sources, parts, strict=True)
    ]
    return f"{said}: records are seen by their source, {', '.join(each)}"


def _number(times: float) -> str:
    """Three digits or more, without an exponent where there are many."""
    return f"{times:.3g}" if times < 999 else f"{times:,.1f}".removesuffix(".0")


def _often(times: float) -> str:
    least, most = math.floor(times), math.ceil(times)
    if most == 1:
        return "once" if least == 1 else "at most once"
    return f"{most:,} times" if least == most else f"{least:,} or {most:,} times"
