"""A run's output for its steps, on a terminal and elsewhere."""

import io

from rich.console import Console

from jaxmem.train.output.progress import ProgressReport
from tests.helpers.adding import step_metrics


def report(terminal=False, **options):
    """A report whose clock advances by hand, and what it has written."""
    stream, now = io.StringIO(), [100.0]
    console = Console(file=stream, width=100, force_terminal=terminal)
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
