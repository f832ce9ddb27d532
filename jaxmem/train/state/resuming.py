"""Settings that a resumed run must keep, and advice on resuming for its errors."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import user_code
from jaxmem.train import renamed_keys
from jaxmem.train.metrics import AnyMetrics
from jaxmem.train.state.checkpoint import Checkpoints, RunCheckpointError

CHANGEABLE = "changeable"  # key in the saved settings
EVALUATIONS = "evaluations"  # key in the saved settings: those so far
CODE = "code"  # key in the changeable settings: digests of the user's code by name


@contextlib.contextmanager
def advising(saved: int) -> Iterator[None]:
    """Add advice on resuming to errors of steps and of checkpoints."""
    then = f"resumes the run after step {saved}" if saved else "starts anew"
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error}; the same command {then}: add a lower optimizer.learning_rate"
        ) from error
    except RunCheckpointError as error:
        raise RunCheckpointError(
            f"{error}; free some space; the same command {then}"
        ) from error


def check_finite(
    step_metrics: AnyMetrics, checkpoints: Checkpoints, saved: int
) -> None:
    """Raise if a step's loss or gradient is not finite, with advice on resuming.

    Numbers of the first step after a checkpoint come from the weights that were saved,
    so that no learning rate would help: the checkpoint is renamed. If they are finite,
    older checkpoints are no longer needed.
    """
    first = step_metrics.step == saved + 1
    values = {"loss": step_metrics.loss, "gradient's norm": step_metrics.grad_norm}
    for name, value in values.items():
        if math.isfinite(value):
            continue
        problem = f"the {name} of step {step_metrics.step} is {value}"
        if step_metrics.step == 1:
            raise FloatingPointError(
                f"{problem}, from the initial weights and the first batch"
            )
        if first:
            moved = checkpoints.reject(saved)
            problem += f", so checkpoint {saved} is renamed to {moved}"
            saved = checkpoints.latest() or 0
        with advising(saved):
            raise FloatingPointError(problem)
    if first:
        checkpoints.prune()


def changes(
    saved: dict[str, Any],
    settings: tuple[Mapping[str, Mapping], Mapping[str, Mapping], str],
    out_dir: Path,
    done: int,
    steps: int,
) -> list[str]:
    """A message for each allowed difference from the saved settings; others raise."""
    fixed, changeable, length_key = settings
    saved = dict(saved)
    saved.pop(EVALUATIONS, None)
    old, new = dict(saved.pop(CHANGEABLE, {})), dict(changeable)
    code = user_code.changes(old.pop(CODE, {}), new.pop(CODE, {}))
    saved, old = renamed_keys.settings(saved), renamed_keys.settings(old)
    where = f"run.out_dir={str(out_dir)!r}"
    check_same_config(saved, fixed, out_dir)
    if done > steps:
        raise ValueError(
            f"run.steps={steps} is below the {done} steps that {where} has "
            f"done; raise {length_key}, or name another run.out_dir"
        )
    changed = differences(old, new, common=True)
    ignored = [change for change in changed if not change.startswith("run.steps ")]
    if ignored and done == steps:
        raise ValueError(
            f"{where} has done its {steps} steps, so other settings have no "
            f"effect: {'; '.join(ignored)}. Restore the old values, raise "
            f"{length_key} to train on with the new ones, or name another run.out_dir"
        )
    return changed + code


def check_same_config(
    saved: Mapping[str, Mapping], current: Mapping[str, Mapping], directory: Path
) -> None:
    """Raise a ValueError that names the changed settings of a run's model or data."""
    differing = differences(saved, current)
    if differing:
        raise ValueError(
            f"run.out_dir={str(directory)!r} contains checkpoints of another run: "
            f"{'; '.join(differing)}. Restore the old values to resume it, or name "
            "another run.out_dir to start anew."
        )


def differences(
    saved: Mapping[str, Mapping], current: Mapping[str, Mapping], common: bool = False
) -> list[str]:
    """Return a message for each field that differs, with both values as gin has them.

    With `common`, fields that only one of them has are ignored.
    """
    was, now = _literals_by_key(saved), _literals_by_key(current)
    keys = was.keys() & now.keys() if common else was.keys() | now.keys()
    return [
        f"{key} was {was.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted(keys)
        if was.get(key) != now.get(key)
    ]


def _literals_by_key(config: Mapping[str, Mapping]) -> dict[str, str]:
    """The Python literal of each value by "section.field", as after a JSON round trip.

    Settings have tuples where JSON has lists.
    """
    return {
        f"{section}.{field}": repr(_with_tuples(json.loads(json.dumps(value))))
        for section, fields in config.items()
        for field, value in fields.items()
    }


def _with_tuples(value: Any) -> Any:
    """A JSON value whose lists are tuples."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
