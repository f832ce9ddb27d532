"""The steps of a run on the disk: a line of metrics.jsonl and a TensorBoard event each.

Writing them must not end a run, nor hold it up: what a full disk does not take waits in
memory for the next attempt.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, overload

from jaxmem.train import files, tensorboard
from jaxmem.train.metrics import AnyMetrics, PolicyMetrics, StepMetrics

_Metrics = TypeVar("_Metrics", StepMetrics, PolicyMetrics)


@overload
def read_history(path: Path) -> list[StepMetrics]: ...
@overload
def read_history(
    path: Path, kind: type[_Metrics], unwritten: Iterable[bytes] = ()
) -> list[_Metrics]: ...
def read_history(
    path: Path, kind: Any = StepMetrics, unwritten: Iterable[bytes] = ()
) -> list:
    """The steps of a metrics file, in order; at least one.

    Args:
      path: of the file.
      kind: of the job's steps.
      unwritten: lines that it should hold, but could not be written.

    Raises:
      ValueError: a line is no step of that kind, or there is none.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = (content + b"".join(unwritten)).splitlines()
    if not lines:
        raise ValueError(f"{path} holds no step: what it held was lost")
    return [_step(line, kind, f"{path}:{i}") for i, line in enumerate(lines, start=1)]


def _step(line: bytes, kind: Callable[..., _Metrics], where: str) -> _Metrics:
    try:
        return kind(**json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a line of this version's {getattr(kind, '__name__', kind)}"
        ) from error


class MetricsWriter:
    """Appends steps to metrics.jsonl and to a TensorBoard file.

    Args:
      out_dir: the run's directory.
      done: the step that was restored, 0 in a new run.  What either file holds of later
        steps, which will be taken again, is dropped; but a new run moves the file of
        one that left no checkpoint out of its way.
      say: takes a line about what is not as it should be.
      retry_every: steps between two attempts to write, once one has failed.
    """

    def __init__(
        self,
        out_dir: Path,
        done: int,
        say: Callable[[str], None] = print,
        retry_every: int = 1,
    ):
        self.path = out_dir / "metrics.jsonl"
        self._say, self._retry_every = say, retry_every
        moved = None if done else _moved_aside(self.path)
        if moved is not None:
            say(f"steps of a run without checkpoints are now in {moved}")
        for line in keep_steps(self.path, done):
            say(line)
        self._lines = files.Appender(self.path)
        events = tensorboard.new_file(out_dir / "tensorboard")
        self._events = files.Appender(events, "x")
        self._head: bytes | None = tensorboard.head(done + 1)
        self._failed: OSError | None = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        for file in (self._lines, self._events):
            file.close()
            if file.waiting or file.lost:
                count = len(file.waiting) + file.lost
                self._say(f"{file.path} lacks {count:,} records that the disk refused")

    @property
    def unwritten(self) -> list[bytes]:
        """Lines of metrics.jsonl that are not in it yet."""
        return list(self._lines.waiting)

    def write(self, metrics: AnyMetrics) -> None:
        """Record one step; it is in the operating system's hands on return.

        Unless the system refuses: then it is said once, and tried again later.
        """
        values = metrics._asdict()
        self._lines.add(json.dumps(values).encode() + b"\n")
        numbers = {k: v for k, v in values.items() if k != "step" and v is not None}
        event = tensorboard.scalars(metrics.step, numbers)
        self._events.add((self._head or b"") + event)
        self._head = None
        if self._failed is None or metrics.step % self._retry_every == 0:
            self.flush()

    def flush(self) -> None:
        """Write what waits, if that is possible now."""
        failed = None
        for file in (self._lines, self._events):
            try:
                file.flush()
            except OSError as error:
                failed = error
                if self._failed is None:
                    self._say(
                        f"{files.why_not(file.path, error)}; the run goes on, and its "
                        "metrics wait in memory until they can be written"
                    )
                    self._failed = error
        if self._failed is not None and failed is None:
            self._say("metrics can be written again; what waited is written")
        self._failed = failed


def _moved_aside(path: Path) -> Path | None:
    """To the first free name; None where there is nothing to move."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def keep_steps(path: Path, done: int) -> list[str]:
    """Drop what a metrics file holds of later steps, and what is no step.

    Args:
      path: of the file; it need not exist.
      done: the last step to keep.

    Returns:
      Lines that say what was damaged, and which steps are not there.
    """
    content = path.read_bytes() if path.exists() else b""
    kept, steps, damaged = [], set(), 0
    for line in content.splitlines(True):
        step = _step_of(line)
        if step is None:
            damaged += 1
        elif step <= done:
            kept.append(line.lstrip(b"\0"))
            steps.add(step)
    whole = b"".join(kept)
    if content.startswith(whole):
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    else:
        files.write_whole(path, whole.decode())
    said = []
    if damaged:
        said.append(f"{path}: cut {damaged:,} damaged line(s)")
    missing = sorted(set(range(1, done + 1)) - steps)
    if missing:
        said.append(
            f"{path} lacks {len(missing):,} of the {done:,} steps done, {missing[0]} "
            "the first: their metrics are lost, but not what they learned"
        )
    return said


def _step_of(line: bytes) -> int | None:
    """Number of a line's step; None if it is cut short, or something else.

    What a loss of power leaves are zeros, also in front of what was written later.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        step = json.loads(line.lstrip(b"\0"))["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
