"""Rollouts of a run on disk: one file a step, which `task.recorded` reads.

RUN/rollouts/step-000012.jsonl, a line for each completion, group by group:
{"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "reward": 1.0, ...}
"""

import base64
import contextlib
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.base import files, processes
from jaxmem.train.jobs.rollout.prompts import Task
from jaxmem.train.jobs.rollout.samples import Sampled

FOLDER = "rollouts"
_NAME = re.compile(r"step-(\d+)\.jsonl")


class RolloutFiles:
    """Files of the rollouts of a run, which the first process writes.

    A file is written whole. A step that is taken again after a kill replaces its file,
    and files of later steps are removed when the first step of a process is written.
    """

    def __init__(self, out_dir: str):
        self._folder = Path(out_dir).expanduser().absolute() / FOLDER
        self._has_written = False

    def write(self, step: int, records: Iterator[dict[str, Any]]) -> None:
        """Write the file of a step; all processes call it.

        Raises:
            ValueError: it cannot be written, in the processes beside the first.
            WriteError: likewise, in the first one.
        """
        processes.by_first(lambda: self._write(step, records))

    def _write(self, step: int, records: Iterator[dict[str, Any]]) -> None:
        path = self._folder / f"step-{step:06d}.jsonl"
        with files.write_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._has_written:
                self._remove_from(step)
        lines = [json.dumps(record, separators=(",", ":")) for record in records]
        files.write_whole(path, "\n".join([*lines, ""]))
        self._has_written = True

    def _remove_from(self, step: int) -> None:
        """Remove the files of this and later steps, of a process that was killed."""
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[1]) >= step:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def records(
    task: Task, parts: Sequence[Sampled], kept: np.ndarray, version: int
) -> Iterator[dict[str, Any]]:
    """Yield the records of all completions of a step, group by group.

    Args:
        task: of the prompts.
        parts: the rollouts of the step.
        kept: [N] booleans, True for completions of groups that are learned from.
        version: updates that the sampling weights have had, in steps.
    """
    flags = iter(kept.tolist())
    for part in parts:
        for i in range(len(part.completions.lengths)):
            yield _record(task, part, i, version) | {"kept": next(flags)}


def _record(task: Task, part: Sampled, i: int, version: int) -> dict[str, Any]:
    completions, samples, graded = part.completions, part.samples, part.graded
    length = int(completions.lengths[i])
    prompt = part.prompts.ids[i, : part.prompts.lengths[i]]
    record: dict[str, Any] = {
        "prompt_ids": prompt.tolist(),
        "completion_ids": completions.sampled[i, :length].tolist(),
        "logprobs": [_number(x) for x in np.asarray(samples.logprobs)[i, :length]],
        "reward": _number(graded.rewards[i]),
        "where": task.described(part.prompts, i)[0],
        "versions": [[version, length]],
    }
    if graded.parts is not None:
        record["rewards"] = {k: _number(x[i]) for k, x in graded.parts.items()}
    if completions.own is not None:
        record["mask"] = completions.own[i, :length].astype(int).tolist()
    if samples.support_ids is not None:
        supports = np.asarray(samples.support_ids)[i, :length]
        record["supports"] = [ids[ids >= 0].tolist() for ids in supports]
    if part.conversation is not None:
        rewards = part.conversation.rewards[i, : part.turns[i]]
        record["turn_rewards"] = [_number(x) for x in rewards]
        record["turns"] = part.conversation.of_token[i, :length].tolist()
    if completions.routes is not None:
        record["routes"] = _encoded(completions.routes[i])
    return record


def _number(value: Any) -> float | None:
    """A float32 in as few digits as identify it; None for NaN."""
    number = float(str(np.float32(value)))
    return None if math.isnan(number) else number


def _encoded(array: np.ndarray) -> str:
    """An array as a .npy file in base64."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array))
    return base64.b64encode(file.getvalue()).decode("ascii")
