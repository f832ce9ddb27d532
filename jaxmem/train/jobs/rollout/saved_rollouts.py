"""Rollouts of a run on disk: one file a step, which `task.recorded` reads.

RUN/rollouts/step-000012.jsonl, a line for each completion, group by group:
{"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "reward": 1.0, ...}
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.base import files, processes
from jaxmem.train.jobs.rollout.prompts import Task
from jaxmem.train.jobs.rollout.samples import Sampled
from jaxmem.train.jobs.rollout.transcripts import Transcript

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
        version: updates that the sampling weights have had, in steps; transcripts that
            `parts` have know their own.
    """
    flags = iter(kept.tolist())
    for part in parts:
        for i in range(len(part.completions.lengths)):
            transcript = _transcript(task, part, i, version)
            yield transcript.to_json() | {"kept": next(flags)}


def _transcript(task: Task, part: Sampled, i: int, version: int) -> Transcript:
    """The transcript of completion `i`, with the rewards that it has got."""
    completions, samples, graded = part.completions, part.samples, part.graded
    parts = None
    if graded.parts is not None:
        parts = {name: _number(values[i]) for name, values in graded.parts.items()}
    reward, length = _number(graded.rewards[i]), int(completions.lengths[i])
    versions = [(version, length)]
    if part.transcripts is not None:
        transcript = part.transcripts[i]
        if transcript.versions is not None:
            versions = transcript.versions
        return dataclasses.replace(
            transcript, reward=reward, rewards=parts, versions=versions
        )
    mask = supports = turns = turn_rewards = None
    if completions.own is not None:
        mask = completions.own[i, :length].astype(int).tolist()
    if samples.support_ids is not None:
        ids = np.asarray(samples.support_ids)[i, :length]
        supports = [of_token[of_token >= 0].tolist() for of_token in ids]
    if part.conversation is not None:
        rewards = part.conversation.rewards[i, : part.turns[i]]
        turn_rewards = [_number(x) for x in rewards]
        turns = part.conversation.of_token[i, :length].tolist()
    return Transcript(
        prompt_ids=part.prompts.ids[i, : part.prompts.lengths[i]].tolist(),
        completion_ids=completions.sampled[i, :length].tolist(),
        logprobs=np.asarray(samples.logprobs)[i, :length].tolist(),
        reward=reward,
        rewards=parts,
        mask=mask,
        turns=turns,
        turn_rewards=turn_rewards,
        supports=supports,
        routes=None if completions.routes is None else completions.routes[i],
        versions=versions,
        where=task.described(part.prompts, i)[0],
    )


def _number(value: Any) -> float | None:
    """The number, or None for NaN."""
    return None if np.isnan(value) else float(value)
