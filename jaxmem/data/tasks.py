"""Tasks of a policy: prompts of a file, or generated sums.

    "3+8=" -> "1", the sum's last digit; or "11<eos>", the sum

Problem i of a seed is always the same, so the position of a job in its data is one
number.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from jaxmem.base import user_code
from jaxmem.base.fields import check
from jaxmem.base.ranges import integers, reals
from jaxmem.base.rules import left_out, must, wrong
from jaxmem.data import mixing
from jaxmem.head.maths.random_streams import Stream

VOCABULARY = ("<pad>", "<eos>", *"0123456789", "+", "=")
PAD_ID, EOS_ID = 0, 1
# Fields about reward functions.
_OF_FUNCTIONS = "reward reward_weights reward_errors unrewarded"
_OF_SUMS = "exact", "prefix"  # rewards
# Fields that change no value of a step: they affect its time, or end the run.
_WITHOUT_VALUES = "reward_errors", "unrewarded", "workers"
_TURNS = 4  # of an environment's conversation, unless `max_turns` says otherwise
_IDS = {word: i for i, word in enumerate(VOCABULARY)}


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The prompts of a task, and the rewards of completions."""

    source: Annotated[
        str | tuple[str, ...],
        'prompts: "arithmetic" (generated sums of two numbers), or paths, globs and '
        "folders of .jsonl, .csv, .parquet and other files of records",
    ] = "arithmetic"
    reward: Annotated[
        str | tuple[str, ...],
        user_code.Named(),
        'name of a reward function. For sums: "exact" (1 for the answer, else 0) or '
        '"prefix" (share of the answer that is right from its start). For files: '
        "exact, prefix, regex, number, gsm8k, math, json_schema, unit_tests, length, "
        'overlong, "file.py:function" or "package.module:function", or a tuple of '
        "several",
    ] = "exact"
    reward_weights: Annotated[
        tuple[float, ...] | None, "factor of each reward. None: 1 each"
    ] = None
    timeout: Annotated[
        float | None,
        reals(above=0),
        "maximum seconds of one call of a reward or an environment, and of "
        "task.rollout from one completion to the next. None: no limit",
    ] = None
    reward_errors: Annotated[
        Literal["raise", "mask"],
        'if a reward function raises an error or takes too long: "raise" ends the '
        'run, "mask" leaves its completions out of their groups and the loss',
    ] = "raise"
    unrewarded: Annotated[
        Literal["mask", "raise"],
        'if all reward functions return None for a completion: "mask" leaves it out '
        'of its group and the loss, "raise" ends the run',
    ] = "mask"
    recorded: Annotated[
        bool,
        "True: records are completions that were sampled before, with prompt_ids, "
        "completion_ids, logprobs, a reward and perhaps masks, turns and supports",
    ] = False
    environment: Annotated[
        str | None,
        user_code.Named(),
        'environment that replies between turns: "calculator", or "file.py:Class" or '
        '"package.module:Class" with reset and step. Its rewards replace task.reward. '
        "None: one completion per prompt",
    ] = None
    rollout: Annotated[
        str | None,
        user_code.Named(),
        'function that holds a whole conversation: "file.py:function" or '
        '"package.module:function", called with a record and `complete`, which '
        "samples the model's turns. Its rewards replace task.reward. None: no such "
        "function is called",
    ] = None
    max_turns: Annotated[
        int | None,
        integers(1, limit=2**10),
        "maximum number of completions in a conversation with an environment or of "
        "task.rollout, or in a recorded one. None: 4 with an environment or "
        "task.rollout, otherwise 1",
    ] = None
    max_reply_tokens: Annotated[
        int, integers(1, limit=2**20), "maximum tokens of a reply to a completion"
    ] = 64
    environment_errors: Annotated[
        Literal["raise", "end", "mask"],
        'if an environment fails: "raise" ends the run, "end" ends its conversation '
        'and keeps the rewards so far, "mask" leaves the conversation out of its '
        "group and the loss",
    ] = "raise"
    workers: Annotated[
        int,
        integers(1, limit=2**12),
        "maximum number of simultaneous calls of environments; while data are read, "
        "maximum number of open environments",
    ] = 64
    weights: Annotated[
        tuple[float, ...] | None,
        "share of each entry of task.source in the prompts. Each entry is repeated as "
        "often as needed, in a new order each time. None: an epoch contains each "
        "prompt once",
    ] = None
    held_out: Annotated[
        float,
        reals(0, below=1),
        "fraction of a file's prompts, in [0, 1), that is kept out of training for "
        "evaluation. 0.0: if the source is a folder, its files named validation, "
        "valid, val or dev, or else test, are held out",
    ] = 0.0
    max_prompt_tokens: Annotated[
        int,
        integers(1, limit=2**24),
        "maximum tokens of a file's prompt; a longer prompt is an error",
    ] = 512
    stop: Annotated[
        str | None,
        "token that ends a completion. None: the tokenizer's end-of-sequence token",
    ] = None
    chat_template: Annotated[
        str | None,
        "path of a Jinja template for messages. None: the checkpoint's template",
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        'variables of the chat template, as in {"enable_thinking": False}',
    ] = None
    columns: Annotated[
        dict[str, str] | None,
        'names of the records\' columns, as in {"prompt": "my_question"}',
    ] = None
    ignored: Annotated[
        tuple[str, ...], "columns, and keys of messages, that are ignored"
    ] = ()
    digits: Annotated[
        int, integers(1, 18), "maximum digits of each number of a sum"
    ] = 1
    answer: Annotated[
        Literal["last_digit", "sum"],
        'answer of a sum: "last_digit" is its last digit, one token and nothing after '
        'it; "sum" is all digits and <eos>',
    ] = "last_digit"
    shuffle: Annotated[
        bool,
        "True: each epoch has a file's prompts in a new order. False: in the order of "
        "the file",
    ] = True
    seed: Annotated[
        int,
        integers(0, below=2**31),
        "seed of the generated sums, and of the orders of a file's prompts",
    ] = 0

    RULES = (
        *mixing.RULES,
        must(
            "reward",
            f"one of {_OF_SUMS}",
            lambda task: not task.is_arithmetic or task.reward in _OF_SUMS,
        ),
        left_out(
            "shuffle",
            "for task.source='arithmetic', which draws new sums each time",
            lambda task: task.is_arithmetic,
        ),
        wrong(
            "reward_weights",
            "and held_out need a task.source of prompts: sums have one reward, and are "
            "never the same twice; otherwise set task.held_out=0 and "
            "task.reward_weights=None",
            lambda task: (
                task.is_arithmetic
                and (task.reward_weights is not None or task.held_out)
            ),
        ),
        must(
            "reward_weights",
            "{reward_count} finite numbers, one for each reward",
            lambda task: (
                task.reward_weights is None
                or len(task.reward_weights) == task.reward_count
                and all(map(_is_finite, task.reward_weights))
            ),
        ),
        must("reward", "at least one function", lambda task: task.rewards),
        must(
            "reward",
            "functions that are each named once",
            lambda task: len(set(task.rewards)) == task.reward_count,
        ),
        left_out(
            "reward_errors unrewarded",
            "for task.source='arithmetic', where every sum has a reward",
            lambda task: task.is_arithmetic,
        ),
        left_out(
            "environment_errors workers",
            "without an environment",
            lambda task: task.environment is None,
        ),
        left_out(
            "max_turns",
            "without an environment, task.rollout or recorded rollouts",
            # as older versions wrote it into settings
            lambda task: not task.has_turns and task.max_turns != _TURNS,
        ),
        left_out(
            "max_reply_tokens",
            "without an environment, task.rollout or recorded rollouts",
            lambda task: not task.has_turns,
        ),
        must(
            "environment",
            "None for task.source='arithmetic', which has no records",
            lambda task: task.environment is None or not task.is_arithmetic,
        ),
        left_out(
            _OF_FUNCTIONS,
            "with an environment",
            lambda task: task.environment is not None,
        ),
        must(
            "rollout",
            "None for task.source='arithmetic', which has no records",
            lambda task: task.rollout is None or not task.is_arithmetic,
        ),
        left_out(
            f"environment {_OF_FUNCTIONS}",
            "with task.rollout",
            lambda task: task.rollout is not None,
        ),
        must(
            "recorded",
            "False for task.source='arithmetic', which is sampled",
            lambda task: not task.recorded or not task.is_arithmetic,
        ),
        left_out(
            f"environment rollout held_out weights {_OF_FUNCTIONS}",
            "if rollouts are recorded",
            lambda task: task.recorded,
        ),
    )

    def __post_init__(self):
        check(self)

    @property
    def has_turns(self) -> bool:
        """True if conversations are held, or were recorded."""
        return self.is_dialogue or self.recorded

    @property
    def is_dialogue(self) -> bool:
        """True if an environment or a rollout function holds conversations."""
        return self.environment is not None or self.rollout is not None

    @property
    def default_turns(self) -> int:
        """Most completions of a conversation, unless `max_turns` says otherwise."""
        return _TURNS if self.is_dialogue else 1

    @property
    def turns(self) -> int:
        """Most completions of a conversation."""
        if not (self.is_dialogue or self.recorded):
            return 1
        return self.default_turns if self.max_turns is None else self.max_turns

    def conversation_length(self, max_new_tokens: int) -> int:
        """Most tokens after the prompt, of completions and of replies to them."""
        return max_new_tokens * self.turns + self.max_reply_tokens * (self.turns - 1)

    def fixed(self) -> dict[str, Any]:
        """The fields that a resumed run must share with the saved one."""
        fields = dataclasses.asdict(self)
        for name in _WITHOUT_VALUES:
            del fields[name]
        if self.shuffle:
            del fields["shuffle"]
        if self.turns == self.default_turns:  # as in runs from before None was possible
            fields["max_turns"] = _TURNS
        for name in ("chat_template_kwargs", "columns", "ignored", "weights"):
            if not fields[name]:  # as in runs from before there were these
                del fields[name]
        return fields

    @property
    def is_arithmetic(self) -> bool:
        """True if problems are generated."""
        return self.source == "arithmetic"

    @property
    def rewards(self) -> tuple[str, ...]:
        """Names of the reward functions."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward

    @property
    def reward_count(self) -> int:
        """Number of reward functions."""
        return len(self.rewards)

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return 2 * self.digits + 2 if self.is_arithmetic else self.max_prompt_tokens

    @property
    def answer_length(self) -> int:
        """Tokens of the longest answer, including <eos>; 1 if it is not known."""
        if not self.is_arithmetic or self.answer == "last_digit":
            return 1
        return self.digits + 2


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


class Problems(NamedTuple):
    """Prompts and answers, right-padded with `PAD_ID`: int32 arrays."""

    prompts: np.ndarray  # [N, prompt_length]
    prompt_lengths: np.ndarray  # [N]
    answers: np.ndarray  # [N, answer_length]
    answer_lengths: np.ndarray  # [N]


def problems(config: TaskConfig, start: int, count: int) -> Problems:
    """Generate the problems with the numbers from `start` to `start + count - 1`.

    Args:
        config: kind of problems.
        start: number of the first, at least 0.
        count: how many.

    Returns:
        `Problems`, independent of other calls.

    >>> sums = problems(TaskConfig(answer="sum"), start=7, count=2)
    >>> [text(prompt) for prompt in sums.prompts]
    ['6+9=', '0+7=']
    >>> [text(answer) for answer in sums.answers]
    ['15<eos>', '7<eos>']
    """
    pairs = [_problem(config, number) for number in range(start, start + count)]
    prompts, answers = zip(*pairs, strict=True)
    return Problems(
        *_padded(prompts, config.prompt_length),
        *_padded(answers, config.answer_length),
    )


def _problem(config: TaskConfig, number: int) -> tuple[list[int], list[int]]:
    rng = Stream.PROBLEMS.generator(config.seed, number)
    a, b = rng.integers(0, 10**config.digits, 2).tolist()
    total = str(a + b)
    answer = [*total, "<eos>"] if config.answer == "sum" else [total[-1]]
    return _ids(f"{a}+{b}="), _ids(answer)


def _ids(words: Iterable[str]) -> list[int]:
    return [_IDS[word] for word in words]


def _padded(rows: tuple[list[int], ...], width: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.full((len(rows), width), PAD_ID, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, lengths


def text(ids: Iterable[int]) -> str:
    """The text of ids, without padding; "?" for ids outside the vocabulary."""
    known = dict(enumerate(VOCABULARY))
    return "".join(known.get(int(i), "?") for i in ids if i != PAD_ID)


class TaskRewards(NamedTuple):
    """Rewards of completions: float32 arrays [N]."""

    rewards: np.ndarray  # by `TaskConfig.reward`
    exact: np.ndarray  # 1 if the completion is the answer, else 0


def score(
    config: TaskConfig, sums: Problems, tokens: np.ndarray, lengths: np.ndarray
) -> TaskRewards:
    """Compare completions with the answers.

        exact_i = [completion_i = answer_i]
        prefix_i = correct tokens before the first wrong one / tokens of the answer

    Args:
        config: `reward`, "exact" or "prefix".
        sums: the problem of each completion.
        tokens: completions [N, R], including <eos>.
        lengths: tokens of each completion, [N]; the rest of a row is ignored.

    Returns:
        The scores.

    >>> config = TaskConfig(answer="sum", reward="prefix")
    >>> sums = problems(config, start=22, count=1)  # "2+8="
    >>> completion = np.array([[3, 3, EOS_ID, PAD_ID]])
    >>> scores = score(config, sums, completion, np.array([3]))
    >>> print(text(completion[0]), scores.rewards, scores.exact)
    11<eos> [0.33333334] [0.]
    """
    width = sums.answers.shape[1]
    shared = tokens[:, :width]
    shared = np.pad(shared, ((0, 0), (0, width - shared.shape[1])))
    columns = np.arange(width)
    inside = columns < np.minimum(lengths, sums.answer_lengths)[:, None]
    right = (shared == sums.answers) & inside
    leading = np.cumprod(right, axis=1).sum(axis=1)
    whole = (leading == sums.answer_lengths) & (lengths == sums.answer_lengths)
    exact = whole.astype(np.float32)
    if config.reward == "exact":
        return TaskRewards(exact, exact)
    return TaskRewards((leading / sums.answer_lengths).astype(np.float32), exact)
