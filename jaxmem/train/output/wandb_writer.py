"""Metrics to Weights & Biases, from a thread that training never waits for."""

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.base import files, imports

_MAX_PENDING = 10_000  # steps
_FINISH_SECONDS = 60.0


def check(project: str) -> None:
    """Raise a ValueError unless wandb is installed and, online, has an API key."""
    try:
        import wandb  # pyright: ignore
    except ModuleNotFoundError as error:
        raise ValueError(
            f"run.wandb={project!r} needs wandb, which is not installed; run: "
            f"{imports.how_to_install('wandb')}"
        ) from error
    mode = wandb.setup().settings.mode
    offline = mode not in ("online", "shared")
    # Never asks for a key: the terminal belongs to the progress bar.
    if not offline and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            f"run.wandb={project!r}: wandb has no API key; run `wandb login`, or set "
            "the environment variable WANDB_MODE=offline and run `wandb sync` later"
        )


class WandbWriter:
    """Sends steps to one run of a project, until a failure, which is logged once.

    The run's id is kept in `out_dir`, so that a resumed run continues the same curves;
    wandb drops steps that it has already. Another thread may call `log`.
    """

    def __init__(
        self,
        project: str,
        out_dir: Path,
        done: int,
        settings: Mapping[str, Mapping],
        log: Callable[[str], None] = print,
    ):
        self._log, self._out_dir = log, out_dir
        self._options = {
            "project": project,
            "name": out_dir.resolve().name,
            "id": _run_id(out_dir / "wandb_id", new=not done),
            "dir": str(out_dir),
            "config": {name: dict(fields) for name, fields in settings.items()},
            "resume": "allow",
        }
        self._steps: queue.Queue = queue.Queue(_MAX_PENDING)
        self._failed, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def __enter__(self) -> "WandbWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait at most `_FINISH_SECONDS` for steps that are pending."""
        with contextlib.suppress(queue.Full):
            self._steps.put_nowait(None)
        self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            self._warn_once(f"not all was sent within {_FINISH_SECONDS:.0f} s")

    def write(
        self,
        step: int,
        numbers: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Queue the scalars and completions of a step, without waiting or errors."""
        try:
            if not self._failed:
                self._steps.put_nowait((step, dict(numbers), samples))
        except queue.Full:
            self._warn_once(
                f"step {step} is left out: {_MAX_PENDING:,} steps wait to be sent"
            )

    def _send_all(self) -> None:
        try:
            import wandb  # pyright: ignore

            with _open_run(wandb, self._options) as run:
                while (entry := self._steps.get()) is not None:
                    step, numbers, samples = entry
                    if samples:
                        numbers["samples"] = _table(wandb, samples)
                    run.log(numbers, step=step)
        except BaseException as error:  # whatever it is, training goes on
            self._warn_once(f"{type(error).__name__}: {error}")

    def _warn_once(self, problem: str) -> None:
        with self._lock:
            first, self._failed = not self._failed, True
        if first:
            self._log(
                f"Weights & Biases: {problem}; training goes on, and {self._out_dir} "
                "has every step in metrics.jsonl"
            )


_COLUMNS = ["prompt", "completion", "reward", "length"]


def _table(wandb: Any, samples: Sequence[Mapping[str, Any]]) -> Any:
    rows = [
        [sample["prompt"], "".join(sample["tokens"]), sample["reward"],
         sample["length"]]
        for sample in samples
    ]  # fmt: skip
    return wandb.Table(columns=_COLUMNS, data=rows)


@contextlib.contextmanager
def _open_run(wandb: Any, options: Mapping[str, Any]) -> Iterator[Any]:
    settings = wandb.Settings(
        silent=True,
        console="off",  # the progress bar's control characters are no log
        finish_timeout=_FINISH_SECONDS / 2,
        disable_git=True,
        save_code=False,
    )
    run = wandb.init(settings=settings, **options)
    try:
        yield run
    finally:
        run.finish()


def _run_id(path: Path, new: bool) -> str:
    """The run's id, from its file; a new id, written there, for a new run."""
    if not new and path.exists():
        return path.read_text().strip()
    identifier = uuid.uuid4().hex[:8]
    with contextlib.suppress(OSError):  # a full disk; then a resumed run is a new one
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, identifier + "\n")
    return identifier
