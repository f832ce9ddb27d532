"""Rewards of the completions of a file, and the choice of those that are kept."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmem.base import user_code
from jaxmem.data import rewards
from jaxmem.data.record_reader import RecordReader
from jaxmem.data.records import RawRecord
from jaxmem.data.rewards import RewardArguments, Scorer
from jaxmem.generate.completions import Completion
from jaxmem.generate.config import GradingOptions

_NAMED = "--reward", "--in"  # in place of task.reward and task.source, in errors


class Grading(GradingOptions):
    """Rewards of completions, and the choice of those that are kept."""

    def digest(self) -> list[Any]:
        """Values that identify the options and the code of the reward."""
        if self.reward is None:
            return []
        code = ""
        if user_code.names_code(self.reward):
            code = user_code.digest(self.reward, _NAMED[0])
        return [self.reward, code]

    def check(
        self, source: str, records: Sequence[RawRecord], reader: RecordReader
    ) -> None:
        """Raise a RewardError unless the reward can be loaded and has its columns."""
        if self.reward is not None:
            columns = [reader.prompt(record)[1] for record in records]
            self._scorer().check({source: columns})

    def _scorer(self) -> Scorer:
        assert self.reward is not None
        return Scorer([self.reward], named=_NAMED)

    def rewards(
        self,
        records: Sequence[RawRecord],
        completions: Sequence[Completion],
        room: Sequence[int],
        reader: RecordReader,
    ) -> list[float | None]:
        """Rewards of completions, one for each record; None for none.

        Args:
            records: the prompt of each completion.
            completions: as they were sampled.
            room: maximum tokens of each.
            reader: of the prompts.

        Raises:
            RewardError: the function fails.
        """
        asked, columns = zip(*map(reader.prompt, records), strict=True)
        names = dict.fromkeys(name for own in columns for name in own)
        values: dict[str, list[Any]] = {
            name: [own.get(name) for own in columns] for name in names
        }
        values["completion_ids"] = [completion.ids for completion in completions]
        values["max_new_tokens"] = list(room)
        arguments = RewardArguments(
            [record.where for record in records],
            [prompt.prompt for prompt in asked],
            [
                rewards.in_form_of(prompt.prompt, completion.text)
                for prompt, completion in zip(asked, completions, strict=True)
            ],
            values,
        )
        # A scorer of its own, as batches without a reward are no reason to stop here.
        total = self._scorer()(arguments).total
        return [None if np.isnan(x) else float(x) for x in total]

    def kept(
        self, records: Iterable[Mapping[str, Any]], samples: int
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the records of the output that are kept.

        Args:
            records: all of them, `samples` in a row for each prompt.
            samples: completions of a prompt.
        """
        group: list[Mapping[str, Any]] = []
        for record in records:
            group.append(record)
            if len(group) == samples:
                yield from self._kept_of(group)
                group = []

    def _kept_of(self, group: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if self.keep_best:
            rewarded = [record for record in group if record["reward"] is not None]
            # The first of several that are equally good.
            group = [max(rewarded, key=lambda r: r["reward"])] if rewarded else []
        least = self.min_reward
        if least is None:
            return group
        return [r for r in group if r["reward"] is not None and r["reward"] >= least]

    def line(self, records: Sequence[Mapping[str, Any]], samples: int) -> str | None:
        """A line on rewards, and on the completions that are kept; None without any."""
        if self.reward is None:
            return None
        known = [r["reward"] for r in records if r["reward"] is not None]
        mean = f"mean reward {np.mean(known):.3f}" if known else "no reward"
        line = f"{mean} of {len(known):,} completions"
        if unrewarded := len(records) - len(known):
            line += f"; {unrewarded:,} have no reward"
        if self.keep_best or self.min_reward is not None:
            kept = sum(1 for _ in self.kept(records, samples))
            line += f"; kept {kept:,} of {len(records):,}"
        return line
