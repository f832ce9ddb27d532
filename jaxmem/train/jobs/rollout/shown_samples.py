"""Samples of a rollout, as a report shows them."""

from typing import Any

import numpy as np

from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import PromptIds, Task

_MOST_TOKENS = 256  # of a completion
_MOST_CHARACTERS = 600  # of a prompt, from its end


def table(
    task: Task,
    prompts: PromptIds,
    completions: Completions,
    rewards: np.ndarray | None,
    logprobs: np.ndarray,
    count: int,
) -> list[dict[str, Any]]:
    """At most `count` samples as JSON.

    A sample has its prompt, first tokens, their log-probabilities, any reward, and the
    length of its completion, which may have more tokens.
    Tokens that an environment said have None for log-probabilities.
    """
    count = min(count, len(logprobs))
    stride = len(logprobs) // count
    rows = []
    for i in range(0, count * stride, stride):
        length = min(int(completions.lengths[i]), _MOST_TOKENS)
        prompt = task.text(prompts.ids[i, : prompts.lengths[i]])
        reward = None
        if rewards is not None and not np.isnan(rewards[i]):
            reward = float(rewards[i])
        mask = np.ones(length, bool) if completions.own is None else completions.own[i]
        rows.append(
            {
                "prompt": prompt[-_MOST_CHARACTERS:],
                "tokens": _token_texts(task, completions.sampled[i, :length]),
                "logprobs": [
                    float(x) if sampled else None
                    for x, sampled in zip(logprobs[i, :length], mask, strict=False)
                ],
                "reward": reward,
                "length": int(completions.lengths[i]),
            }
        )
    return rows


def _token_texts(task: Task, ids: np.ndarray) -> list[str]:
    """The text of each token; the last token of a character has all of it."""
    pieces, before = [], ""
    for length in range(1, len(ids) + 1):
        text = task.text(ids[:length])
        if length < len(ids):
            text = text.rstrip("\ufffd")
        pieces.append(text[len(before) :])
        before = text if len(text) > len(before) else before
    return pieces
