"""The progress of a run: a bar and numbers on a terminal, else lines."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import progress
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from jaxmem.train.metrics import AnyMetrics, peak_gib

_GAP = "  "  # between the numbers of a line
# Seconds over which the bar measures the speed; steps with rollouts may take minutes.
_SPEED_SECONDS = 3600.0


def say(console: Console, line: str) -> None:
    """Print a line as it is; a full disk behind stdout does not end the run."""
    with contextlib.suppress(OSError):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Clock(progress.ProgressColumn):
    """Seconds since the start until the first step ends, then the time remaining."""

    def __init__(self):
        super().__init__()
        self._remaining = progress.TimeRemainingColumn()

    def render(self, task: progress.Task) -> Text:
        if task.fields["waiting"]:
            return Text(f"{task.elapsed or 0:.0f} s")
        return Text("left ") + self._remaining.render(task)


class _Numbers:
    """Items on as many lines as they need; no item is divided."""

    def __init__(self, items: Sequence[str]):
        self._items = items

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        del console
        line = ""
        for item in self._items:
            longer = f"{line}{_GAP}{item}" if line else item
            if line and len(longer) > options.max_width:
                yield Text(line)
                longer = item
            line = longer
        yield Text(line, no_wrap=True, overflow="ellipsis")


class _Bar(progress.Progress):
    """A bar, and numbers below it.

    Attributes:
        numbers: what is shown below the bar.
    """

    numbers: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress`."""
        yield from super().get_renderables()
        if self.numbers:
            yield _Numbers(self.numbers)


class ProgressReport:
    """A progress bar on a terminal; elsewhere, a plain line every few steps.

    Until the first step has ended, it shows what the run is waiting for, such as
    "compiling", and since how many seconds. `clock` returns seconds.

    Attributes:
        notes: items about evaluations, which a terminal shows beside a step's numbers.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        done: int,
        every: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console, self._clock = console, clock
        self._steps, self._done, self._every = steps, done, every
        self._task: progress.TaskID | None = None
        self._what = ""
        self.notes: Sequence[str] = ()
        self._bar = _Bar(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.description}"),
            _Clock(),
            console=console,
            disable=not console.is_terminal,
            get_time=clock,
            speed_estimate_period=_SPEED_SECONDS,
        )

    def __enter__(self) -> "ProgressReport":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def waiting(self, what: str) -> None:
        """Show what precedes the first step; the first call starts the clock."""
        if self._task is None:
            self._start = self._clock()
            self._task = self._bar.add_task(
                "", total=self._steps, completed=self._done, waiting=True
            )
            self._bar.start()
        if what != self._what:
            self._bar.update(self._task, description=what)
            self._print_plain(what)
        self._what = what

    def update(self, metrics: AnyMetrics) -> None:
        """Show one step."""
        line, first = metrics.line, metrics.step == self._done + 1
        if first:
            self._print_plain(f"first step after {self._clock() - self._start:.0f} s")
        assert self._task is not None, "waiting comes first"
        if self._console.is_terminal:
            self._bar.numbers = [*line.split(_GAP), *self.notes, *_rate_items(metrics)]
        self._bar.update(
            self._task, completed=metrics.step, description="", waiting=False
        )
        if first or metrics.step == self._steps or metrics.step % self._every == 0:
            self._print_plain(f"step {metrics.step}/{self._steps}  {line}")

    def say(self, line: str) -> None:
        """Print a line, beside the bar if there is one."""
        say(self._console, line)

    def _print_plain(self, line: str) -> None:
        """Print a line unless the console is a terminal, which has the bar."""
        if not self._console.is_terminal:
            say(self._console, line)


def _rate_items(metrics: AnyMetrics) -> Iterator[str]:
    """The learning rate of a step, and the device's peak memory, if it is reported."""
    rate = getattr(metrics, "learning_rate", None)
    if rate is not None:
        yield f"learning rate {rate:.1e}"
    if (peak := peak_gib()) is not None:
        yield f"peak {peak:.1f} GiB"


_SECONDS_A_LINE = 10.0  # between lines of progress, without a terminal


class Progress:
    """A progress bar on a terminal, and occasional lines elsewhere, with tokens/s.

    Args:
        noun: what is counted, in the plural.
        total: how many there are.
        done: how many earlier processes have finished.

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
        """Show that `done` items are finished, after `tokens` more tokens."""
        self.read += tokens
        now = time.perf_counter()
        speed = f"{self.read / (now - self._start):,.0f} tokens/s"
        self._bar.update(self._task, completed=done, description=speed)
        due = done == self._total or now - self._last > _SECONDS_A_LINE
        if due and not self._console.is_terminal:
            self._last = now
            line = f"{self._noun} {done:,}/{self._total:,}  {speed}"
            say(self._console, line)
