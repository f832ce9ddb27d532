"""Rollouts that were sampled before, read from JSON Lines.

    {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "reward": 1.0}

Consecutive records of one prompt are a group. The other fields are those of
`Transcript`. `run.save_rollouts` writes such files, in which a reward may be null, for
none, and `kept` false, for groups that are left out.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxmem.base import messages
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.record_reader import decides_loss
from jaxmem.data.records import DataError, RawRecord, read_records
from jaxmem.data.rendering import Notes
from jaxmem.data.source_files import numbered_files
from jaxmem.data.tasks import TaskConfig
from jaxmem.train.jobs.rollout.prompts import FilePrompts, PromptIds
from jaxmem.train.jobs.rollout.samples import Sampled, sampled_of
from jaxmem.train.jobs.rollout.transcripts import (
    FIELDS,
    Transcript,
    TranscriptLimits,
)


class RecordedRollouts(FilePrompts):
    """Prompts and completions of a file, group by group."""

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: tokenizers.Tokenizer,
        group_size: int,
        limits: TranscriptLimits,
    ):
        super().__init__(config, tokenizer)
        self._limits, self._group_size = limits, group_size
        self.notes = Notes()
        records = [
            record
            for _, path in numbered_files(config.source, "task.source")
            for record in read_records(path, "task.source")
        ]
        read = [(record, self._read(record)) for record in records]
        kept = [(record, t) for record, t in read if self._is_kept(record)]
        self._digest = digest([record.fields for record, _ in kept])
        self._transcripts = self._with_common_fields([t for _, t in kept])
        self.size = self._check_groups()

    def _is_kept(self, record: RawRecord) -> bool:
        """False, with a note, for a group that its run did not learn from."""
        if record.fields.get("kept") is not False:
            return True
        self.notes.add("rollouts that the run did not keep are left out", record.where)
        return False

    def _read(self, record: RawRecord) -> Transcript:
        """The transcript of a record, with the fields that the run reads."""
        self._check_columns(record)
        transcript = Transcript.of_json(record.fields, record.where)
        self._limits.check(transcript)
        if transcript.routes is not None and self._limits.needs.routes is None:
            note = "routes are not used, because grpo.replay_routing=False"
            self.notes.add(note, record.where)
            return dataclasses.replace(transcript, routes=None)
        return transcript

    def _check_columns(self, record: RawRecord) -> None:
        """Raise for a column that would have to be read; note those that are not."""
        if "reward" not in record.fields:
            raise DataError(f'{record.where}: no "reward"')
        for key, value in record.fields.items():
            left_out = key in self._config.ignored or value is None
            if key in FIELDS or key == "kept" or left_out:
                continue
            if decides_loss(key):
                raise DataError(
                    f"{record.where}: rollouts do not use {messages.short(key)}; name "
                    "the column mask if it is 1 for sampled tokens and 0 for others; "
                    "otherwise remove it, or name it in task.ignored"
                )
            note = f"the column {messages.short(key)} is not used"
            self.notes.add(note, record.where)

    def _with_common_fields(self, transcripts: list[Transcript]) -> list[Transcript]:
        """Transcripts that all have masks and rewards by function, or all have none."""
        if any(each.mask is not None for each in transcripts):
            transcripts = [each.with_mask() for each in transcripts]
        names = [tuple(each.rewards or ()) for each in transcripts]
        if len(set(names)) > 1:
            other = next(i for i, each in enumerate(names) if each != names[0])
            note = "rewards by function are not used, because their names differ"
            self.notes.add(note, transcripts[other].where)
            transcripts = [dataclasses.replace(t, rewards=None) for t in transcripts]
        return transcripts

    def _check_groups(self) -> int:
        """The number of groups; raises unless each has one prompt."""
        groups, ungrouped = divmod(len(self._transcripts), self._group_size)
        if ungrouped or not groups:
            raise DataError(
                f"task.source: {len(self._transcripts)} rollouts are not a multiple of "
                f"grpo.group_size={self._group_size}"
            )
        for start in range(0, len(self._transcripts), self._group_size):
            first, *others = self._transcripts[start : start + self._group_size]
            for other in others:
                if other.prompt_ids != first.prompt_ids:
                    raise DataError(
                        f"{other.where}: prompt_ids differ from those of {first.where};"
                        f" grpo.group_size={self._group_size} records in turn have one "
                        "prompt"
                    )
        return groups

    def sampled(self, start: int, count: int) -> Sampled:
        """Groups `start` to `start + count - 1` of the file, which repeats."""
        size, every = self._group_size, self._transcripts
        numbers = range(start * size, (start + count) * size)
        transcripts = [every[i % len(every)] for i in numbers]
        prompts = self._prompts_of(transcripts)
        return sampled_of(transcripts, prompts, self._limits)

    def _prompts_of(self, transcripts: Sequence[Transcript]) -> PromptIds:
        items = []
        for transcript in transcripts:
            ids = np.array(transcript.prompt_ids, np.int32)
            items.append(PromptRecord(transcript.where, self.text(ids), {}, ids))
        return self._pad_prompts(items)

    def ask(self, start: int, count: int) -> PromptIds:
        """See `Task`: prompts of groups."""
        size, every = self._group_size, self._transcripts
        firsts = range(start * size, (start + count) * size, size)
        return self._prompts_of([every[i % len(every)] for i in firsts])

    def fingerprint(self) -> str:
        """A digest of the rollouts in their order."""
        return self._digest

    def described(self, prompts: PromptIds, i: int) -> tuple[str, str]:
        return prompts.items[i].where, f"{self._group_size} completions"

    def statistics(self) -> str:
        lengths = [len(each.completion_ids) for each in self._transcripts]
        most = self._limits.completion_tokens
        source = "sampling.max_new_tokens"
        if self._limits.turns > 1:
            source = f"task.max_turns={self._limits.turns} completions and replies"
        limit = f"{source}={most}" if self._limits.turns == 1 else f"{most} ({source})"
        return (
            f"{len(lengths):,} rollouts of {self.size:,} prompts; {min(lengths):,} to "
            f"{max(lengths):,} tokens, of at most {limit}"
        )


def digest(values: Sequence[Any]) -> str:
    """A digest of a list of JSON values, in hexadecimal."""
    content = hashlib.sha256()
    for value in values:
        content.update(json.dumps(value, sort_keys=True).encode())
    return content.hexdigest()[:24]
