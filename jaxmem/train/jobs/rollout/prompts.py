"""Prompts of a rollout, rewards of completions, and tasks, which have both."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem.base import processes
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.records import DataError
from jaxmem.data.rewards import TrainerState
from jaxmem.data.tasks import TaskConfig
from jaxmem.train.jobs.rollout.nested_rows import padded, take
from jaxmem.train.jobs.rollout.packed import Completions


class PromptIds(NamedTuple):
    """Prompts of a rollout, as ids of the model."""

    ids: np.ndarray  # int32 [N, P], right-padded
    lengths: np.ndarray  # int32 [N]
    items: Any  # the task's record of each prompt, for rewards

    def repeated(self, count: int) -> "PromptIds":
        """These prompts, each `count` times in a row."""
        return take(self, np.repeat(np.arange(len(self.lengths)), count))

    def first(self, count: int) -> "PromptIds":
        """The first `count` prompts; `items` must be a list."""
        return PromptIds(*(x[:count] for x in self))

    def parts(self, rows: int) -> Iterator[tuple["PromptIds", int]]:
        """Parts of exactly `rows` prompts, the last one filled up by repetition.

        Each part comes with the number of its prompts that are not repetitions.
        """
        for start in range(0, len(self.lengths), rows):
            chosen = np.arange(start, min(start + rows, len(self.lengths)))
            yield take(self, np.resize(chosen, rows)), len(chosen)


class Graded(NamedTuple):
    """Rewards of completions: float32 arrays [N], NaN for those that have none."""

    rewards: np.ndarray
    right: np.ndarray  # 1 where the (first) reward is 1 or more, else 0
    parts: dict[str, np.ndarray] | None = None  # by reward function, of several
    # bool [N], True for completions without an answer that a reward function can read;
    # None where no function tells that
    unparsed: np.ndarray | None = None

    @property
    def rewarded(self) -> np.ndarray:
        """Booleans [N], True for completions that have a reward."""
        return ~np.isnan(self.rewards)


class Task(abc.ABC):
    """Prompts of a run, with the rewards of their completions."""

    size: int | None = None  # prompts to train on; None if they have no end
    sources: Sequence[int] = ()  # index of each prompt's entry in `task.source`
    trainer_state = TrainerState()  # of the run, for reward functions

    @abc.abstractmethod
    def ask(self, start: int, count: int) -> PromptIds:
        """Prompts `start` to `start + count - 1`."""

    def held_out(self) -> PromptIds | None:
        """Prompts that are never trained on; None without any."""
        return None

    def grade(self, prompts: PromptIds, completions: Completions) -> Graded:
        """Rewards of one completion of each prompt."""
        raise NotImplementedError

    @abc.abstractmethod
    def question(self, prompts: PromptIds, i: int) -> str:
        """The text of prompt `i`; of a conversation, its last message."""

    @abc.abstractmethod
    def text(self, ids: np.ndarray) -> str:
        """The text of tokens, special ones included."""

    def shown(
        self, prompts: PromptIds, completions: Completions, i: int
    ) -> tuple[str, str]:
        """The last characters of prompt `i` and of its completion, on a line each."""
        ids = completions.sampled[i, : completions.lengths[i]]
        texts = self.question(prompts, i), self.text(ids)
        prompt, answer = (" ".join(text.split())[-60:] for text in texts)
        return prompt, answer

    def fingerprint(self) -> str | None:
        """A digest of a file's prompts; None where settings alone determine them."""
        return None

    @abc.abstractmethod
    def described(self, prompts: PromptIds, i: int) -> tuple[str, str]:
        """The source of prompt `i`, and a note on its answer or columns."""

    def check(self) -> None:
        """Raise a ValueError if rewards need columns that prompts do not have."""
        return None

    def lines(self) -> list[str]:
        """Sentences about how completions are rewarded."""
        return []

    def agree(self) -> None:
        """Raise a ValueError in every process if the prompts differ between them."""
        if digest := self.fingerprint():
            processes.agree({"the content of task.source": digest})

    @abc.abstractmethod
    def statistics(self) -> str:
        """A line on the number and lengths of all prompts."""

    def state(self, position: int) -> dict[str, Any]:
        """The next prompt's number and the prompts' digest, as JSON-able values."""
        digest = self.fingerprint()
        return {"next_problem": position} | ({"fingerprint": digest} if digest else {})

    def position(self, state: Mapping[str, Any]) -> int:
        """The number of the next prompt, of a state that belongs to these prompts.

        Raises:
            DataError: the state belongs to other prompts.
        """
        if state.get("fingerprint") != self.fingerprint():
            raise DataError(
                "the saved position belongs to other prompts than task.source "
                "contains now; restore them, or start a new run"
            )
        return state["next_problem"]


class FilePrompts(Task):
    """A task with the prompts of a file's records."""

    def __init__(self, config: TaskConfig, tokenizer: tokenizers.Tokenizer):
        self._config, self._tokenizer = config, tokenizer

    def _pad_prompts(self, items: list[PromptRecord]) -> PromptIds:
        rows = [item.ids for item in items]
        return PromptIds(*padded(rows, self._config.max_prompt_tokens), items)

    def question(self, prompts: PromptIds, i: int) -> str:
        prompt = prompts.items[i].prompt
        return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))

    def text(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
