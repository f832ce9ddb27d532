"""Conversations of several turns: a model's completions and an environment's replies.

    prompt | completion | reply | completion | ...

Tokens are appended and never tokenised again: what was sampled stays as it was, and a
reply is the text that the chat template puts after a completion, or a string.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxmem.base import processes
from jaxmem.data import rewards
from jaxmem.data.chat import END, START, Templates
from jaxmem.data.environments import Environments, Episode, Turn
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.records import DataError
from jaxmem.data.rewards import RewardError
from jaxmem.data.tasks import TaskConfig
from jaxmem.head.maths.recorded import RecordedEntries
from jaxmem.models.sampling import Samples
from jaxmem.train.jobs.rollout.completing import Complete, TurnCompletion, joined
from jaxmem.train.jobs.rollout.entries import no_entries
from jaxmem.train.jobs.rollout.nested_rows import take
from jaxmem.train.jobs.rollout.samples import ByTurn
from jaxmem.train.jobs.rollout.transcripts import Transcript

# Completes prompts [N, P] of lengths [N] in a turn (its number), on the host; a row of
# length 0 gets no token.
Sample = Callable[[np.ndarray, np.ndarray, int], Samples]
# Stands for a completion in a rendered template; no text has these characters.
_FILLER = "\ue000\ue001"


class Played(NamedTuple):
    """N conversations after their prompts, as `Samples` of R slots."""

    # tokens and lengths include what environments said; there, mask is False,
    # log-probabilities are 0 and supports are empty
    samples: Samples
    truncated: np.ndarray  # [N] bool, True where the last completion has no end
    turns: np.ndarray  # [N] completions of each
    by_turn: ByTurn  # rewards, NaN where it has none; and the turns of tokens


class ConversationLimits(NamedTuple):
    """Bounds of a conversation."""

    turns: int  # completions
    completion: int  # tokens of each
    slots: int  # tokens after the prompt
    width: int  # tokens that `Sample` reads


class Replies:
    """Turns replies of environments, or of rollout functions, into tokens."""

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: tokenizers.Tokenizer,
        template: Templates,
        eos_ids: tuple[int, ...],
        tools: Sequence[Any] | None = None,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._template, self._eos_ids, self._tools = template, eos_ids, tools
        self._user, self._key = f"environment {config.environment}", "task.environment"
        if config.rollout is not None:
            self._user, self._key = f"rollout {config.rollout}", "task.rollout"
        self._ends = [tokenizer.decode([i], skip_special_tokens=False) for i in eos_ids]

    def has_end(self, ids: Sequence[int]) -> bool:
        """True if a completion ends with one of the ids that end completions."""
        return ids[-1] in self._eos_ids

    def text(self, ids: Sequence[int]) -> str:
        """A completion as its environment gets it: without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def ids(self, conversation: Episode, reply: Any) -> list[int]:
        """The tokens that follow a completion, which has ended.

        Raises:
            RewardError: they are more than `task.max_reply_tokens`.
        """
        text = (
            reply if isinstance(reply, str) else self._render_reply(conversation, reply)
        )
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > (most := self._config.max_reply_tokens):
            raise RewardError(
                f"{self._user} ({conversation.where}): a reply has {len(ids)} tokens; "
                f"raise task.max_reply_tokens={most}, or shorten the reply"
            )
        return ids

    def _render_reply(self, conversation: Episode, reply: list[Any]) -> str:
        """The text of a reply that the template writes behind a completion's end."""
        before = conversation.said[:-1]
        suffix = self._render_after_answer(before, reply)
        other = [{"role": "user", "content": "x"}]
        if suffix != self._render_after_answer(other, reply):
            raise DataError(
                f"{self._key} ({conversation.where}): what the chat template writes "
                "after a completion depends on the messages before it; use a "
                "task.chat_template that does not"
            )
        end = next((end for end in self._ends if suffix.startswith(end)), None)
        if end is None:
            raise DataError(
                f"{self._key} ({conversation.where}): the chat template ends a "
                f"completion with {suffix[:20]!r}, but the sampler ends it with "
                f"{self._ends}; set task.stop"
            )
        return suffix.removeprefix(end)

    def _render_after_answer(self, before: Sequence[Any], reply: list[Any]) -> str:
        """The text that the template writes behind an answer to the messages before."""
        answer = {"role": "assistant", "content": _FILLER}
        messages = [*before, answer, *reply]
        text = self._template().render(
            messages, add_generation_prompt=True, tools=self._tools
        )
        text = text.replace(START, "").replace(END, "")
        _, filler, after = text.rpartition(_FILLER)
        if not filler:
            raise DataError(
                f"{self._key}: the chat template leaves out the model's text"
            )
        return after


class _Rows:
    """The tokens of N conversations, which grow to at most R after the prompts."""

    def __init__(self, prompts: np.ndarray, lengths: np.ndarray, slots: int):
        rows = len(lengths)
        self.read = np.zeros((rows, prompts.shape[1] + slots), np.int32)
        self.read[:, : prompts.shape[1]] = prompts
        self.first, self.lengths = lengths.astype(np.int64), np.zeros(rows, np.int64)
        self.mask = np.zeros((rows, slots), bool)
        self.logprobs = np.zeros((rows, slots), np.float32)
        self.turns = np.zeros((rows, slots), np.int32)
        self.supports: np.ndarray | None = None
        self.routes: np.ndarray | None = None
        self.entries: RecordedEntries | None = None

    def append(self, i: int, ids: np.ndarray) -> slice:
        """Append ids to row `i`; return their slots."""
        start = self.lengths[i]
        self.lengths[i] += len(ids)
        column = self.first[i] + start
        self.read[i, column : column + len(ids)] = ids
        return slice(start, self.lengths[i])

    def add_sampled(self, i: int, samples: Samples, turn: int) -> list[int]:
        """Append the completion of row `i` in a turn; return its tokens."""
        length = int(samples.lengths[i])
        ids = np.asarray(samples.tokens)[i, :length]
        slots = self.append(i, ids)
        self.mask[i, slots], self.turns[i, slots] = True, turn
        self.logprobs[i, slots] = samples.logprobs[i, :length]
        if samples.support_ids is not None:
            if self.supports is None:
                limit = samples.support_ids.shape[2]
                self.supports = np.full((*self.mask.shape, limit), -1, np.int32)
            self.supports[i, slots] = samples.support_ids[i, :length]
        if samples.entries is not None:
            if self.entries is None:
                rows, _, k = samples.entries.columns.shape
                self.entries = no_entries((rows, self.mask.shape[1]), k)
            for ours, theirs in zip(self.entries, samples.entries, strict=True):
                ours[i, slots] = theirs[i, :length]
        if samples.routes is not None:  # of the whole conversation
            if self.routes is None:
                self.routes = np.zeros_like(samples.routes)
            self.routes[i] = samples.routes[i]
        return ids.tolist()

    def prompts(self, width: int, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [N, width] and lengths [N] to complete; 0 for rows that have ended."""
        lengths = np.where(live, self.first + self.lengths, 0)
        return self.read[:, :width], lengths.astype(np.int32)

    def samples(self) -> Samples:
        """The tokens after the prompts, as `Samples`."""
        tokens = np.zeros(self.mask.shape, np.int32)
        for row, read, first, length in zip(
            tokens, self.read, self.first, self.lengths, strict=True
        ):
            row[:length] = read[first : first + length]
        lengths = self.lengths.astype(np.int32)
        arrays: Any = (
            tokens, self.mask, self.logprobs, self.supports, lengths, None, self.routes,
            self.entries,
        )  # fmt: skip
        return Samples(*arrays)


class Answer(NamedTuple):
    """An environment's answer to a completion."""

    reward: float  # NaN: the conversation has none
    done: bool  # the conversation has ended
    ids: Sequence[int]  # tokens of the reply; none after the end


class Partners:
    """Environments of N conversations, in one process."""

    def __init__(
        self,
        environments: Environments,
        replies: Replies,
        items: Sequence[PromptRecord],
    ):
        self.replies = replies
        self._environments, self._items = environments, items
        self._conversations: list[Episode] = []
        self._opened = contextlib.ExitStack()

    def __len__(self) -> int:
        return len(self._items)

    def open(self) -> None:
        """Make the environments, and reset them.

        Raises:
            RewardError: an environment fails, or `reset` returns another prompt for a
                record than before.
        """
        items = self._items
        records, where = zip(*((x.columns, x.where) for x in items), strict=True)
        opened = self._environments.opened(records, where)
        self._conversations = self._opened.enter_context(opened)
        for conversation, item in zip(self._conversations, items, strict=True):
            if conversation.prompt not in (None, item.prompt):  # None: it failed
                raise RewardError(
                    f"environment {self._environments.name} ({item.where}): reset "
                    "returned two prompts for one record; completions of a prompt are "
                    "compared, so reset must read what varies from the record"
                )

    def answer(
        self, completions: Mapping[int, Sequence[int]], last: Collection[int]
    ) -> list[Answer]:
        """Let environments answer completions.

        Args:
            completions: tokens, by the index of the conversation.
            last: indices of conversations that end whatever the answer is.

        Raises:
            RewardError: an environment fails, and `task.environment_errors` is "raise".
        """
        for i, ids in completions.items():
            self._conversations[i].complete(self.replies.text(ids))
        going = [self._conversations[i] for i in completions]
        answers = [
            Answer(turn.reward, True, [])
            if turn.done or i in last
            else self._encode_reply(self._conversations[i], turn)
            for i, turn in zip(completions, self._environments.step(going), strict=True)
        ]
        both = zip(going, answers, strict=True)
        self._environments.close([c for c, answer in both if answer.done])
        return answers

    def _encode_reply(self, conversation: Episode, turn: Turn) -> Answer:
        try:
            ids = self.replies.ids(conversation, turn.reply)
        except RewardError as error:
            reward = self._environments.fail(error, reward=turn.reward)
            return Answer(reward, True, [])
        conversation.hear(turn.reply)
        return Answer(turn.reward, False, ids)

    def check_returns(self, returns: np.ndarray) -> None:
        """Raise a RewardError unless sums of rewards [N, T] are usable; NaN is none."""
        sums = np.nan_to_num(returns).tolist()
        for item, of_turns in zip(self._items, sums, strict=True):
            try:
                rewards.checked(max(of_turns, key=abs))
            except ValueError as error:
                raise RewardError(
                    f"environment {self._environments.name} ({item.where}): the sum of "
                    f"its rewards is {error}"
                ) from error

    def close(self) -> None:
        """Close the environments that are open."""
        self._opened.close()


def play(
    partners: Partners,
    prompts: tuple[np.ndarray, np.ndarray],
    sample: Sample,
    limits: ConversationLimits,
) -> Played:
    """Let a model and environments speak in turn, until all conversations have ended.

    The first process alone calls environments; all get the same rewards, replies and
    failures. A conversation ends when its environment ends it, after the last turn, or
    after a completion without an end. Prompts beyond the number of partners get no
    completion and are not returned.
    """
    with contextlib.closing(partners):
        processes.by_first(partners.open, RewardError)
        return _speak_in_turn(partners, prompts, sample, limits)


def _speak_in_turn(
    partners: Partners,
    prompts: tuple[np.ndarray, np.ndarray],
    sample: Sample,
    limits: ConversationLimits,
) -> Played:
    rows = _Rows(*prompts, limits.slots)
    live = np.arange(len(prompts[1])) < len(partners)
    truncated, turns = np.zeros(len(live), bool), np.zeros(len(live), np.int32)
    given = np.zeros((len(live), limits.turns), np.float32)
    for turn in range(limits.turns):
        samples = sample(*rows.prompts(limits.width, live), turn)
        completions = {
            i: rows.add_sampled(i, samples, turn) for i in np.flatnonzero(live).tolist()
        }
        for i, ids in completions.items():
            turns[i] += 1
            truncated[i] = not partners.replies.has_end(ids)
        last = {i for i in completions if truncated[i] or turn == limits.turns - 1}
        answer_all = functools.partial(partners.answer, completions, last)
        answers = processes.by_first(answer_all, RewardError)
        for i, answer in zip(
            completions, itertools.starmap(Answer, answers), strict=True
        ):
            given[i, turn], live[i] = answer.reward, not answer.done
            rows.append(i, np.array(answer.ids, np.int32))
        if not live.any():
            break
    played = Played(rows.samples(), truncated, turns, ByTurn(given, rows.turns))
    played = take(played, np.arange(len(partners)))
    partners.check_returns(played.by_turn.returns)
    return played


def converse(
    partners: Partners,
    item: PromptRecord,
    complete: Complete,
    limits: ConversationLimits,
) -> Transcript:
    """Let a model and the environment of one conversation speak in turn.

    The conversation ends as in `play`. Processes do not communicate, so that many
    conversations can go on in threads, each at its own pace.

    Args:
        partners: of this conversation alone.
        item: its record.
        complete: completes turns.
        limits: bounds of the conversation.
    """
    parts: list[TurnCompletion | Sequence[int]] = []
    ids, values = item.ids.tolist(), []
    with contextlib.closing(partners):
        partners.open()
        for turn in range(limits.turns):
            completion = complete(list(ids), limits.completion)
            is_last = turn == limits.turns - 1
            ends = is_last or not partners.replies.has_end(completion.ids)
            (answer,) = partners.answer({0: completion.ids}, {0} if ends else ())
            values.append(answer.reward)
            parts.append(completion)
            if answer.done:
                break
            parts.append(answer.ids)
            ids += [*completion.ids, *answer.ids]
    by_turn = ByTurn(np.array([values], np.float32), np.zeros((1, 0), np.int32))
    partners.check_returns(by_turn.returns)
    return Transcript(
        prompt_ids=item.ids.tolist(),
        reward=_number(by_turn.returns[0, 0]),
        turn_rewards=[_number(x) for x in values],
        where=item.where,
        **joined(parts),
    )


def _number(value: float) -> float | None:
    """The number, or None for NaN."""
    return None if math.isnan(value) else float(value)
