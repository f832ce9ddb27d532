"""Facts of a run as a table of its report: start, command, devices, sizes and data."""

import contextlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

ABOUT = "about.json"  # written at a run's start; a key without a value is None


class Totals(NamedTuple):
    """Sums over the steps that a run has taken."""

    steps: int
    seconds: float
    tokens: int  # that were learned from


def table(about: Mapping[str, Any], started: str, totals: Totals) -> Iterator[str]:
    """Rows of HTML; none for facts that are not known or that are damaged."""
    shown = {
        "Started": _known(_start, started, totals),
        "Command": about.get("command"),
        "Git commit": about.get("commit"),
        "Devices": _known(_devices, about),
        "Parameters": _known(_parameters, about),
        "Data": _known(_data, about, totals),
        "Versions": _known(_versions, about),
    }
    rows = "".join(
        f"<tr><th>{name}</th><td>{escape(value)}</td></tr>"
        for name, value in shown.items()
        if isinstance(value, str)
    )
    if rows:
        yield "<h2>The run</h2>"
        yield f'<div class="card wide"><table class="facts">{rows}</table></div>'


def _known(describe: Any, *arguments: Any) -> str | None:
    """A description; None if about.json lacks a value for it or has a wrong one."""
    with contextlib.suppress(
        LookupError, TypeError, ValueError, AttributeError, ArithmeticError
    ):
        return describe(*arguments)
    return None


def _start(started: str, totals: Totals) -> str | None:
    minutes, seconds = divmod(round(totals.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    lasted = f"{totals.steps:,} steps took {hours:,}:{minutes:02}:{seconds:02}"
    return f"{started.strip()}; {lasted}" if started.strip() else None


def _devices(about: Mapping[str, Any]) -> str:
    mesh = ", ".join(f"{name}={count:,}" for name, count in about["mesh"].items())
    processes = about["processes"]
    of_processes = f" in {processes:,} processes" if processes > 1 else ""
    return f"{about['devices']}{of_processes}" + (f", mesh {mesh}" if mesh else "")


def _parameters(about: Mapping[str, Any]) -> str:
    every, trained = about["parameters"], about["trained"]
    share = "all" if trained == every else f"{trained:,} ({trained / every:.2%})"
    return f"{every:,}, of which {share} are trained"


def _data(about: Mapping[str, Any], totals: Totals) -> str:
    parts, data = [], about["data"]
    if data is not None:
        parts.append(f"{data['records']:,} {data['noun']}")
        if data["tokens"]:
            parts.append(f"{totals.tokens / data['tokens']:.3g} epochs")
        elif data["per_step"]:
            epochs = totals.steps * data["per_step"] / data["records"]
            parts.append(f"{epochs:.3g} epochs")
    parts.append(f"{totals.tokens:,} tokens learned from")
    return ", ".join(parts)


def _versions(about: Mapping[str, Any]) -> str:
    return f"jaxmem {about['jaxmem']}, jax {about['jax']}"
