"""Problems whose answers can be checked, generated: nothing is downloaded.

    "3+8=" -> "1", the sum's last digit; or "11<eos>", the sum

Problem i of a seed is always the same one, so that a job's place in its data is a
number.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from jaxmem.core.fields import check_field, check_numbers
from jaxmem.core.ranges import integers

VOCABULARY = ("<pad>", "<eos>", *"0123456789", "+", "=")
PAD_ID, EOS_ID = 0, 1
_RANGES = {"digits": integers(1, 18), "seed": integers(0, below=2**31)}
_IDS = {word: i for i, word in enumerate(VOCABULARY)}


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Sums of two numbers, and what counts as a right answer."""

    digits: int = 1  # most digits of each number
    # last_digit: of the sum, one token and nothing after it; sum: its digits and <eos>
    answer: Literal["last_digit", "sum"] = "last_digit"
    # exact: 1 for the answer, else 0; prefix: share of it that is right from the start
    reward: Literal["exact", "prefix"] = "exact"
    seed: int = 0  # which problems

    def __post_init__(self):
        """Refuse impossible values, by name."""
        check_numbers(self, _RANGES)
        answers, rewards = ("last_digit", "sum"), ("exact", "prefix")
        check_field(self, "answer", self.answer in answers, f"one of {answers}")
        check_field(self, "reward", self.reward in rewards, f"one of {rewards}")

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return 2 * self.digits + 2

    @property
    def answer_length(self) -> int:
        """Tokens of the longest answer, <eos> included."""
        return 1 if self.answer == "last_digit" else self.digits + 2


class Problems(NamedTuple):
    """Prompts and answers, right-padded with `PAD_ID`: int32 arrays."""

    prompts: np.ndarray  # [N, prompt_length]
    prompt_lengths: np.ndarray  # [N]
    answers: np.ndarray  # [N, answer_length]
    answer_lengths: np.ndarray  # [N]


def problems(config: TaskConfig, start: int, count: int) -> Problems:
    """Make the problems with the numbers from `start` to `start + count - 1`.

    Args:
      config: what kind of problems.
      start: number of the first, at least 0.
      count: how many.

    Returns:
      `Problems`, the same whatever else was made before.

    >>> made = problems(TaskConfig(answer="sum"), start=7, count=2)
    >>> [text(prompt) for prompt in made.prompts]
    ['7+0=', '3+7=']
    >>> [text(answer) for answer in made.answers]
    ['7<eos>', '10<eos>']
    """
    made = [_problem(config, number) for number in range(start, start + count)]
    prompts, answers = zip(*made, strict=True)
    return Problems(
        *_padded(prompts, config.prompt_length),
        *_padded(answers, config.answer_length),
    )


def _problem(config: TaskConfig, number: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng([config.seed, number])
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
    """Ids as they read, without padding; "?" for what is not in the vocabulary."""
    known = dict(enumerate(VOCABULARY))
    return "".join(known.get(int(i), "?") for i in ids if i != PAD_ID)


class Scores(NamedTuple):
    """What completions are worth: float32 arrays [N]."""

    rewards: np.ndarray  # as the config defines them
    exact: np.ndarray  # 1 where the completion is the answer, else 0


def score(
    config: TaskConfig, made: Problems, tokens: np.ndarray, lengths: np.ndarray
) -> Scores:
    """Compare completions with the answers.

        exact_i = [completion_i = answer_i]
        prefix_i = tokens right before the first wrong one / tokens of the answer

    Args:
      config: which reward.
      made: the problem of each completion.
      tokens: [N, R] completions, <eos> included.
      lengths: [N] tokens of each; the rest of a row is ignored.

    >>> config = TaskConfig(answer="sum", reward="prefix")
    >>> made = problems(config, start=8, count=1)  # "3+7="
    >>> completion = np.array([[3, 3, EOS_ID, PAD_ID]])
    >>> scores = score(config, made, completion, np.array([3]))
    >>> print(text(completion[0]), scores.rewards, scores.exact)
    11<eos> [0.33333334] [0.]
    """
    width = made.answers.shape[1]
    shared = tokens[:, :width]
    shared = np.pad(shared, ((0, 0), (0, width - shared.shape[1])))
    place = np.arange(width)
    inside = place < np.minimum(lengths, made.answer_lengths)[:, None]
    right = (shared == made.answers) & inside
    leading = np.cumprod(right, axis=1).sum(axis=1)
    whole = (leading == made.answer_lengths) & (lengths == made.answer_lengths)
    exact = whole.astype(np.float32)
    if config.reward == "exact":
        return Scores(exact, exact)
    return Scores((leading / made.answer_lengths).astype(np.float32), exact)
