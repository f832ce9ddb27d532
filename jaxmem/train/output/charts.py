"""Line charts and bars as inline SVG, which needs no library and no network."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 360, 190  # of the viewBox; the page scales it
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 22
_MOST = 400  # points of a line; more are averaged


class Line(NamedTuple):
    """One series of a chart."""

    name: str
    points: Points  # (step, value), finite
    marked: bool = False  # each point has a dot


def chart(title: str, lines: Sequence[Line]) -> str:
    """Lines over steps as SVG: at least one, each of at least one point."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ticks = _axis_ticks(min(ys), max(ys))
    low, high = min(*ys, ticks[0]), max(*ys, ticks[-1])
    first, last = min(xs), max(xs)
    margin = 1 if first == last else 0  # a single step stands in the middle
    frame = _Frame(first - margin, last + margin, low, high)
    parts = [f"<title>{escape(title)}</title>", *_draw_value_axis(frame, ticks)]
    parts += _draw_step_axis(first, last)
    for number, line in enumerate(lines):
        parts += _draw_line(frame, line, number)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


class _Frame(NamedTuple):
    """The range of both axes."""

    left: float
    right: float
    low: float
    high: float

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        """Coordinates of a point in the viewBox."""
        across = (x - self.left) / (self.right - self.left)
        up = (y - self.low) / (self.high - self.low)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )


def _axis_ticks(low: float, high: float) -> list[float]:
    """About five round numbers that cover [low, high], which may be one point."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) * 0.1
        low, high = low - margin, high + margin or 1.0
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def _draw_value_axis(frame: _Frame, ticks: Sequence[float]) -> list[str]:
    parts = []
    for tick in ticks:
        _, y = frame.pixel(frame.left, tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text class="end" x="{_LEFT - 5}" y="{y + 3.5:.1f}">'
            f"{number(tick)}</text>"
        )
    return parts


def _draw_step_axis(first: float, last: float) -> list[str]:
    middle, y = (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6
    named = "step" if first != last else f"step {int(first):,}"
    parts = [f'<text class="middle" x="{middle}" y="{y}">{named}</text>']
    if first != last:
        parts += [
            f'<text x="{_LEFT}" y="{y}">{int(first):,}</text>',
            f'<text class="end" x="{_WIDTH - _RIGHT}" y="{y}">{int(last):,}</text>',
        ]
    return parts


def _draw_line(frame: _Frame, line: Line, number: int) -> list[str]:
    pixels = [frame.pixel(x, y) for x, y in thinned(line.points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    parts = [f'<polyline class="s{number}" points="{path}"/>']
    if line.marked or len(pixels) == 1:
        parts += [
            f'<circle class="d{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
            for x, y in pixels
        ]
    return parts


def legend(lines: Sequence[Line]) -> str:
    """Names of the lines in their colours; "" for a single one."""
    if len(lines) < 2:
        return ""
    return "".join(
        f' <span class="t{number}">{escape(line.name)}</span>'
        for number, line in enumerate(lines)
    )


def thinned(points: Points) -> list[tuple[float, float]]:
    """The points, or where there are more than a chart shows, means of neighbours."""
    if len(points) <= _MOST:
        return list(points)
    groups = np.array_split(np.asarray(points, np.float64), _MOST)
    return [tuple(group.mean(axis=0).tolist()) for group in groups]


def number(value: float) -> str:
    """A number in at most about six characters."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def bars(sizes: Mapping[str, float], unit: str) -> str:
    """Horizontal bars with their values, as rows of a table."""
    largest = max(sizes.values(), default=0) or 1
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td class="bar"><div style="width:'
        f'{100 * size / largest:.1f}%"></div></td><td class="right">{number(size)} '
        f"{escape(unit)}</td></tr>"
        for name, size in sizes.items()
    )
    return f'<table class="bars">{rows}</table>'
