"""Metrics on the disk: a line of metrics.jsonl and a TensorBoard event per step.

A failed write neither ends nor blocks a run: the metrics stay in memory and are written
when the disk has room again.
"""

import functools
import itertools
import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import files
from jaxmem.base.fields import accepts
from jaxmem.train.metrics import AnyMetrics, StepMetrics
from jaxmem.train.output import tensorboard
from jaxmem.train.output.wandb_writer import WandbWriter


def read_history(
    path: Path, kind: Any = StepMetrics, unwritten: Iterable[bytes] = ()
) -> list[Any]:
    """The steps of a metrics file and of `unwritten` lines, in order.

    Raises:
        ValueError: a line is no step of this version; the message names the line.
    """
    content = path.read_bytes() if path.exists() else b""
    lines = (content + b"".join(unwritten)).splitlines()
    return [
        _parse_step(line, kind, f"{path}:{i}") for i, line in enumerate(lines, start=1)
    ]


def _parse_step(line: bytes, kind: Callable[..., Any], where: str) -> Any:
    try:
        step = kind(**_gathered(json.loads(line), kind))
        for name, annotation in _field_types(kind).items():
            if not accepts(annotation, getattr(step, name)):
                raise TypeError(name)
        return step
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a line of this version's {getattr(kind, '__name__', kind)}"
        ) from error


def _spread(metrics: Any) -> dict[str, Any]:
    """The values of a step, with entries of the field that its type spreads."""
    values, name = metrics._asdict(), getattr(metrics, "spread", None)
    return values if name is None else values | (values.pop(name) or {})


def _gathered(values: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The arguments of a step, of values as `_spread` returns them."""
    if (name := getattr(kind, "spread", None)) is None:
        return values
    entries = {k: v for k, v in values.items() if "@" in k}
    own = {k: v for k, v in values.items() if k not in entries}
    return own | ({name: entries} if entries else {})


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


class MetricsWriter:
    """Appends steps to metrics.jsonl and to a TensorBoard file, and tells wandb.

    After a restored step, later ones are removed from metrics.jsonl; a new run (done 0)
    renames the file of an earlier run without checkpoints.
    """

    def __init__(
        self,
        out_dir: Path,
        done: int,
        log: Callable[[str], None] = print,
        retry_every: int = 1,
        wandb: WandbWriter | None = None,
    ):
        self.path = out_dir / "metrics.jsonl"
        self._log, self._retry_every, self._wandb = log, retry_every, wandb
        moved = None if done else _move_aside(self.path)
        if moved is not None:
            log(f"steps of a run without checkpoints are now in {moved}")
        for line in repair(self.path, done):
            log(line)
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
            if file.pending or file.dropped:
                count = len(file.pending) + file.dropped
                self._log(f"{file.path}: {count:,} records could not be written")

    @property
    def unwritten(self) -> list[bytes]:
        """Lines that are not in metrics.jsonl yet."""
        return list(self._lines.pending)

    def write(
        self, metrics: AnyMetrics, samples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Pass one step to the operating system; if that fails, keep it in memory.

        Weights & Biases gets `samples`, completions as of `Job.samples`, besides.

        The first failure is logged; later steps retry every `retry_every` steps.
        """
        values = _spread(metrics)
        self._lines.add(json.dumps(values).encode() + b"\n")
        numbers = _flatten_scalars(values)
        if self._wandb is not None:
            self._wandb.write(metrics.step, numbers, samples)
        event = tensorboard.scalars(metrics.step, numbers)
        self._events.add((self._head or b"") + event)
        self._head = None
        if self._failed is None or metrics.step % self._retry_every == 0:
            self.flush()

    def flush(self) -> None:
        """Try to write everything that is pending."""
        failed = None
        if self._lines.was_removed:
            self._log(
                f"{self.path} was removed; jaxmem creates it again, from this step on"
            )
        for file in (self._lines, self._events):
            try:
                file.flush()
            except OSError as error:
                failed = error
                if self._failed is None:
                    self._log(
                        f"{files.describe_failure(file.path, error)}; training goes "
                        "on, and metrics are kept in memory until they can be written"
                    )
                    self._failed = error
        if self._failed is not None and failed is None:
            self._log(
                "metrics can be written again; the metrics kept in memory are written"
            )
        self._failed = failed


def _flatten_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers by name, those of a group by "group/name", without texts and None."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            present = {k: v for k, v in value.items() if v is not None}
            numbers |= {f"{name}/{k}": v for k, v in present.items()}
        elif not (value is None or isinstance(value, str) or name == "step"):
            numbers[name] = value
    return numbers


def _move_aside(path: Path) -> Path | None:
    """Rename a file to the first free name; None for an absent or empty file."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def repair(path: Path, done: int) -> list[str]:
    """Remove damaged lines and steps after `done` from a metrics file.

    Returns:
        Messages on damaged lines and on steps whose metrics are missing.
    """
    content = path.read_bytes() if path.exists() else b""
    kept, steps, damaged = [], set(), 0
    for line in content.splitlines(True):
        step = _step_number(line)
        if step is None:
            damaged += 1
        elif step <= done:
            kept.append(line.lstrip(b"\0"))
            steps.add(step)
    whole = b"".join(kept)
    if content.startswith(whole):
        if len(whole) < len(content):
            files.truncate(path, len(whole))
    else:
        files.write_whole(path, whole.decode())
    messages = []
    if damaged:
        messages.append(f"{path}: removed {damaged:,} damaged line(s)")
    missing = sorted(set(range(1, done + 1)) - steps)
    if missing:
        messages.append(
            f"{path}: the metrics of {len(missing):,} of {done:,} steps are missing "
            f"(the first is step {missing[0]}); the weights are not affected"
        )
    return messages


def _step_number(line: bytes) -> int | None:
    """Return the step of a line, None if the line is truncated or not a step.

    A power loss leaves NUL bytes, which may precede a line written later.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        step = json.loads(line.lstrip(b"\0"))["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
