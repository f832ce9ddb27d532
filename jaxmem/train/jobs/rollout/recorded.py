"""Rollouts that another engine sampled, read from JSON Lines.

    {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "reward": 1.0}

Consecutive records of one prompt are a group. `supports` has the ids that each token
was drawn from, where the sampler truncates. `run.save_rollouts` writes such files, in
which a reward may be null, for none, and `kept` false, for groups that are left out.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from jaxmem.base import messages
from jaxmem.data import rewards
from jaxmem.data.completion_ends import Ends
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.record_reader import decides_loss
from jaxmem.data.records import DataError, RawRecord, read_records
from jaxmem.data.rendering import Notes
from jaxmem.data.source_files import numbered_files
from jaxmem.data.tasks import TaskConfig
from jaxmem.models.sampling import Samples, SamplingConfig
from jaxmem.train.jobs.rollout.nested_rows import padded
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import FilePrompts, Graded, PromptIds
from jaxmem.train.jobs.rollout.samples import Sampled, SlotUse

_KEYS = ("prompt_ids", "completion_ids", "logprobs", "reward")
_ABOUT = ("where", "versions", "rewards", "kept")  # describe a record for others


class RecordedRollouts(FilePrompts):
    """Prompts and completions of a file, group by group."""

    def __init__(
        self,
        config: TaskConfig,
        sampling: SamplingConfig,
        tokenizer: tokenizers.Tokenizer,
        group_size: int,
        ends: Ends,
    ):
        super().__init__(config, tokenizer)
        self._sampling, self._group_size = sampling, group_size
        self._vocab_size, self._eos_ids = ends.size, ends.eos_ids
        self.notes = Notes()
        self._records = [
            record
            for _, path in numbered_files(config.source, "task.source")
            for record in read_records(path, "task.source")
        ]
        for record in self._records:
            self._check_record(record)
        self._records = [r for r in self._records if self._is_kept(r)]
        self.size = self._check_groups()

    def _is_kept(self, record: RawRecord) -> bool:
        """False, with a note, for a group that its run did not learn from."""
        if record.fields.get("kept") is not False:
            return True
        self.notes.add("rollouts that the run did not keep are left out", record.where)
        return False

    def _check_groups(self) -> int:
        """The number of groups; raises unless each has one prompt."""
        groups, ungrouped = divmod(len(self._records), self._group_size)
        if ungrouped or not groups:
            raise DataError(
                f"task.source: {len(self._records)} rollouts are not a multiple of "
                f"grpo.group_size={self._group_size}"
            )
        for start in range(0, len(self._records), self._group_size):
            first, *others = self._records[start : start + self._group_size]
            for other in others:
                if other.fields["prompt_ids"] != first.fields["prompt_ids"]:
                    raise DataError(
                        f"{other.where}: prompt_ids differ from those of {first.where};"
                        f" grpo.group_size={self._group_size} records in turn have one "
                        "prompt"
                    )
        return groups

    def _check_record(self, record: RawRecord) -> None:
        fields, max_tokens = record.fields, self._sampling.max_new_tokens
        for key in _KEYS:
            if key not in fields:
                raise DataError(f'{record.where}: no "{key}"')
        limits = {
            "prompt_ids": self._config.max_prompt_tokens,
            "completion_ids": max_tokens,
        }
        named = {"prompt_ids": "task.max_prompt_tokens",
                 "completion_ids": "sampling.max_new_tokens"}  # fmt: skip
        for key, limit in limits.items():
            _check_ids(record, key, fields[key], self._vocab_size)
            if not 1 <= len(fields[key]) <= limit:
                raise DataError(
                    f"{record.where}: {key} has {len(fields[key])} ids; at least 1 and "
                    f"at most {named[key]}={limit} are possible"
                )
        length = len(fields["completion_ids"])
        logprobs = fields["logprobs"]
        good = isinstance(logprobs, list) and len(logprobs) == length
        if not (good and all(_is_number(x) and x <= 1e-3 for x in logprobs)):
            raise DataError(
                f"{record.where}: logprobs must be {length} log-probabilities, one a "
                f"token of completion_ids, got {messages.short(logprobs)}"
            )
        if fields["reward"] is not None and not _is_number(fields["reward"]):
            raise DataError(
                f"{record.where}: reward must be a finite number or null, got "
                f"{messages.short(fields['reward'])}"
            )
        try:
            rewards.checked(fields["reward"] or 0.0)
        except ValueError as error:
            raise DataError(f"{record.where}: reward is {error}") from error
        self._check_supports(record, length)
        for key, value in fields.items():
            left_out = key in self._config.ignored or value is None
            if key not in (*_KEYS, *_ABOUT, "supports") and not left_out:
                if decides_loss(key):
                    raise DataError(
                        f"{record.where}: rollouts do not use {messages.short(key)}, "
                        "and all of completion_ids is learned; remove the column, or "
                        "name it in task.ignored"
                    )
                note = f"the column {messages.short(key)} is not used"
                self.notes.add(note, record.where)

    def _check_supports(self, record: RawRecord, length: int) -> None:
        supports, limit = record.fields.get("supports"), self._sampling.support_size
        if limit is None and supports is not None:
            raise DataError(
                f"{record.where}: supports need sampling.top_k, top_p or min_p with "
                "the values of the other engine"
            )
        if limit is None:
            return
        if not isinstance(supports, list) or len(supports) != length:
            raise DataError(
                f"{record.where}: supports must be {length} lists of ids, one per "
                "token of completion_ids, because sampling truncates"
            )
        for token, ids in zip(record.fields["completion_ids"], supports, strict=True):
            _check_ids(record, "supports", ids, self._vocab_size)
            if token not in ids or len(set(ids)) < len(ids) or len(ids) > limit:
                raise DataError(
                    f"{record.where}: the support of token {token} must contain the "
                    f"token, each id once, and at most {limit} ids, got "
                    f"{messages.short(ids)}"
                )

    def sampled(self, start: int, count: int) -> Sampled:
        """Groups `start` to `start + count - 1` of the file, which repeats."""
        size = self._group_size
        records = [
            self._records[i % len(self._records)]
            for i in range(start * size, (start + count) * size)
        ]
        prompts, samples = self._prompts_of(records), self._samples_of(records)
        completions = Completions.of_samples(prompts, samples)
        values = np.array([r.fields["reward"] for r in records], np.float32)
        right = np.where(np.isnan(values), values, values >= 1).astype(np.float32)
        last_ids = np.array([r.fields["completion_ids"][-1] for r in records])
        return Sampled(
            prompts=prompts,
            completions=completions,
            samples=samples,
            graded=Graded(values, right),
            truncated=~np.isin(last_ids, self._eos_ids),
            turns=np.ones(len(records), np.int32),
            decoded=SlotUse(0, 0),
        )

    def _prompts_of(self, records: Sequence[RawRecord]) -> PromptIds:
        items = []
        for record in records:
            ids = np.array(record.fields["prompt_ids"], np.int32)
            items.append(PromptRecord(record.where, self.text(ids), {}, ids))
        return self._pad_prompts(items)

    def _samples_of(self, records: Sequence[RawRecord]) -> Samples:
        slots, limit = self._sampling.max_new_tokens, self._sampling.support_size
        fields = [record.fields for record in records]
        tokens, lengths = padded([f["completion_ids"] for f in fields], slots)
        logprobs = np.zeros(tokens.shape, np.float32)
        for row, f in zip(logprobs, fields, strict=True):
            row[: len(f["logprobs"])] = f["logprobs"]
        supports = None
        if limit is not None:
            supports = np.full((*tokens.shape, limit), -1, np.int32)
            for i, f in enumerate(fields):
                for t, ids in enumerate(f["supports"]):
                    supports[i, t, : len(ids)] = ids
        mask = np.arange(slots) < lengths[:, None]
        arrays: Any = (tokens, mask, logprobs, supports, lengths)
        return Samples(*arrays)

    def ask(self, start: int, count: int) -> PromptIds:
        """See `Task`: prompts of groups."""
        size = self._group_size
        firsts = range(start * size, (start + count) * size, size)
        return self._prompts_of([self._records[i % len(self._records)] for i in firsts])

    def fingerprint(self) -> str:
        """A digest of the rollouts in their order."""
        return digest([record.fields for record in self._records])

    def described(self, prompts: PromptIds, i: int) -> tuple[str, str]:
        return prompts.items[i].where, f"{self._group_size} completions"

    def statistics(self) -> str:
        lengths = [len(r.fields["completion_ids"]) for r in self._records]
        return (
            f"{len(lengths):,} rollouts of {self.size:,} prompts; {min(lengths):,} to "
            f"{max(lengths):,} tokens, of at most sampling.max_new_tokens="
            f"{self._sampling.max_new_tokens}"
        )


def digest(values: Sequence[Any]) -> str:
    """A digest of a list of JSON values, in hexadecimal."""
    content = hashlib.sha256()
    for value in values:
        content.update(json.dumps(value, sort_keys=True).encode())
    return content.hexdigest()[:24]


def _check_ids(record: RawRecord, key: str, ids: Any, vocab_size: int) -> None:
    if not isinstance(ids, list) or not all(
        type(i) is int and 0 <= i < vocab_size for i in ids
    ):
        raise DataError(
            f"{record.where}: {key} must be ids in [0, {vocab_size}), got "
            f"{messages.short(ids)}"
        )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
