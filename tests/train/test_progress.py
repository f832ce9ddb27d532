"""A run's output for its steps, on a terminal and elsewhere."""

import io
import re

import pytest
from rich.console import Console

from jaxmem.train.output import progress
from jaxmem.train.output.progress import ProgressReport
from tests.helpers.adding import step_metrics


def report(terminal=False, width=100, **options):
    """A report whose clock advances by hand, and what it has written."""
    stream, now = io.StringIO(), [100.0]
    console = Console(
        file=stream, width=width, force_terminal=terminal, color_system=None
    )
    made = ProgressReport(
        console, **{"steps": 8, "done": 1, "every": 3} | options, clock=lambda: now[0]
    )
    return made, stream, now


def test_plain_progress_shows_first_last_and_thirds():
    made, stream, now = report()
    with made:
        made.waiting("compiling")
        now[0] += 12.4
        made.waiting("compiling")
        for step in range(2, 9):
            made.update(step_metrics(step))
    said = stream.getvalue().splitlines()
    assert said[:3] == [
        "compiling",
        "first step after 12 s",
        "step 2/8  loss 2.5000  100 tokens/s",
    ]
    assert [line.split()[1] for line in said[2:]] == ["2/8", "3/8", "6/8", "8/8"]


def test_plain_lines_are_not_wrapped():
    made, stream, _ = report(width=30)
    made.waiting("compiling and some more words of what it waits for")
    assert stream.getvalue().count("\n") == 1


LINES = {
    60: [
        "loss 2.5000  100 tokens/s  held out 1.8312",
        "best 1.7200, step 1  learning rate 1.0e-03  peak 41.3 GiB",
    ],
    80: [
        "loss 2.5000  100 tokens/s  held out 1.8312  best 1.7200, step 1",
        "learning rate 1.0e-03  peak 41.3 GiB",
    ],
    120: [
        "loss 2.5000  100 tokens/s  held out 1.8312  best 1.7200, step 1  "
        "learning rate 1.0e-03  peak 41.3 GiB"
    ],
}


@pytest.mark.parametrize("width", LINES)
def test_terminal_shows_numbers_below_the_bar(width, monkeypatch):
    monkeypatch.setattr(progress, "peak_gib", lambda: 41.27)
    made, stream, now = report(terminal=True, width=width, done=0, steps=300)
    with made:
        made.waiting("compiling")
        made.notes = ["held out 1.8312", "best 1.7200, step 1"]
        for step in range(1, 4):
            now[0] += 120  # a step with a rollout
            made.update(step_metrics(step))
        stream.seek(0)
        stream.truncate()
        made._bar.refresh()
        shown = re.sub("\x1b\\[[^a-zA-Z]*[a-zA-Z]|\r", "", stream.getvalue())
    bar, *numbers = shown.splitlines()
    assert "3/300" in bar and "left 9:54:00" in bar and len(bar) <= width
    assert numbers == LINES[width]


def test_terminal_bar_counts_seconds_of_first_step():
    made, stream, now = report(terminal=True, done=0, steps=2)

    def shown():
        stream.seek(0)
        stream.truncate()
        made._bar.refresh()
        return stream.getvalue()

    with made:
        made.waiting("scoring the reference")
        assert "0/2" in shown() and "scoring the reference" in shown()
        made.waiting("compiling")
        now[0] += 75
        assert "compiling" in shown() and "75 s" in shown()
        made.update(step_metrics(1))
        assert "1/2" in shown() and "loss 2.5000" in shown()
        assert "compiling" not in shown() and "75 s" not in shown()
        made.update(step_metrics(2))
    assert "2/2" in stream.getvalue()
