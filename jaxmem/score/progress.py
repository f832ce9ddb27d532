"""Progress of a command over many inputs, with its speed."""

import time

from rich import progress
from rich.console import Console

_SECONDS_A_LINE = 10.0  # between lines of progress, without a terminal


class Progress:
    """A progress bar on a terminal, and occasional lines elsewhere, with tokens/s.

    The noun is plural; earlier processes have finished `done` of the total.

    Attributes:
        read: tokens that this process has processed.
    """

    def __init__(self, console: Console, noun: str, total: int, done: int):
        self._console, self._noun, self._total, self.read = console, noun, total, 0
        self._start = self._last = time.perf_counter()
        self._bar = progress.Progress(
            progress.TextColumn(noun),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.description}"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, tokens: int) -> None:
        """Report the number of finished ones, and newly processed tokens."""
        self.read += tokens
        now = time.perf_counter()
        speed = f"{self.read / (now - self._start):,.0f} tokens/s"
        self._bar.update(self._task, completed=done, description=speed)
        due = done == self._total or now - self._last > _SECONDS_A_LINE
        if due and not self._console.is_terminal:
            self._last = now
            line = f"{self._noun} {done:,}/{self._total:,}  {speed}"
            self._console.print(line, highlight=False)
