"""Prompts of a rollout, what completions are worth, and a task, which has both."""

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
    items: Any  # what a task scores them by

    def repeated(self, count: int) -> "PromptIds":
        """Each prompt `count` times, one after the other."""
        return take(self, np.repeat(np.arange(len(self.lengths)), count))

    def first(self, count: int) -> "PromptIds":
        """The first prompts; only of lists of items."""
        return PromptIds(*(x[:count] for x in self))

    def parts(self, rows: int) -> Iterator[tuple["PromptIds", int]]:
        """Parts of exactly so many prompts, and how many of each are not repeated."""
        for start in range(0, len(self.lengths), rows):
            chosen = np.arange(start, min(start + rows, len(self.lengths)))
            yield take(self, np.resize(chosen, rows)), len(chosen)


class Graded(NamedTuple):
    """Rewards of completions: float32 arrays [N], NaN for those that have none."""

    rewards: np.ndarray
    right: np.ndarray  # 1 where the (first) reward is 1 or more, else 0
    parts: dict[str, np.ndarray] | None = None  # by reward function, of several

    @property
    def rewarded(self) -> np.ndarray:
        """Booleans [N], False for completions that nothing is learned from."""
        return ~np.isnan(self.rewards)


class Task(abc.ABC):
    """Where a run's prompts come from."""

    size: int | None = None  # prompts to train on; None if they have no end
    sources: Sequence[int] = ()  # number of each prompt's entry in `task.source`
    trainer_state = TrainerState()  # of the run, for reward functions

    @abc.abstractmethod
    def ask(self, start: int, count: int) -> PromptIds:
        """Prompts of the numbers from `start` to `start + count - 1`."""

    def held_out(self) -> PromptIds | None:
        """Prompts that are never trained on; None without any."""
        return None

    def grade(self, asked: PromptIds, completions: Completions) -> Graded:
        """What one completion of each prompt is worth."""
        raise NotImplementedError

    @abc.abstractmethod
    def question(self, asked: PromptIds, i: int) -> str:
        """A prompt, as it reads; of a conversation, its last message."""

    @abc.abstractmethod
    def text(self, ids: np.ndarray) -> str:
        """Tokens as text, special ones too."""

    def shown(
        self, asked: PromptIds, completions: Completions, i: int
    ) -> tuple[str, str]:
        """The ends of a prompt and of its completion, a line each."""
        said = completions.sampled[i, : completions.lengths[i]]
        texts = self.question(asked, i), self.text(said)
        prompt, answer = (" ".join(text.split())[-60:] for text in texts)
        return prompt, answer

    def fingerprint(self) -> str | None:
        """Identifies a file's prompts; None where the settings say it all."""
        return None

    @abc.abstractmethod
    def described(self, asked: PromptIds, i: int) -> tuple[str, str]:
        """Where a prompt is from, and what comes with it."""

    def check(self) -> None:
        """Raise a ValueError if prompts lack what rewards are computed from."""
        return None

    def lines(self) -> list[str]:
        """Sentences about how completions are rewarded."""
        return []

    def agree(self) -> None:
        """Raise a ValueError in every process if the prompts differ between them."""
        if prints := self.fingerprint():
            processes.agree({"the content of task.source": prints})

    @abc.abstractmethod
    def statistics(self) -> str:
        """All prompts in a line."""

    def state(self, place: int) -> dict[str, Any]:
        """Where a run stands in the prompts, as JSON-able values."""
        prints = self.fingerprint()
        return {"next_problem": place} | ({"fingerprint": prints} if prints else {})

    def place(self, state: Mapping[str, Any]) -> int:
        """The number of the next prompt, if the state belongs to these prompts."""
        if state.get("fingerprint") != self.fingerprint():
            raise DataError(
                "the saved position belongs to other prompts than task.source has now; "
                "restore them, or start a new run"
            )
        return state["next_problem"]


class FilePrompts(Task):
    """A task whose prompts are those of a file's records."""

    def __init__(self, config: TaskConfig, tokenizer: tokenizers.Tokenizer):
        self._config, self._tokenizer = config, tokenizer

    def _asked(self, items: list[PromptRecord]) -> PromptIds:
        rows = [item.ids for item in items]
        return PromptIds(*padded(rows, self._config.max_prompt_tokens), items)

    def question(self, asked: PromptIds, i: int) -> str:
        prompt = asked.items[i].prompt
        return prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))

    def text(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
