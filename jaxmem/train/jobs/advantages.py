"""Advantages of a rollout's completions, by the names of a gin file.

`grpo.advantage` names a row of `ADVANTAGES`, or a function of one's own by
"file.py:name".
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmem import losses
from jaxmem.base import guests, messages, processes, user_code

Compare = Callable[[np.ndarray], np.ndarray]
# Functions of rewards [prompts, samples] and of booleans `where` of that shape, False
# for completions to leave out, which get 0.
ADVANTAGES: dict[str, Callable[..., jax.Array]] = {
    "grpo": losses.grpo_advantages,
    "dr_grpo": functools.partial(losses.grpo_advantages, normalize_std=False),
    "rloo": losses.rloo_advantages,
    "reinforce_plus_plus": losses.reinforce_plus_plus_advantages,
    "batch_std": losses.batch_std_advantages,
}


def load(name: str) -> Compare:
    """The function that a name stands for, from rewards to advantages.

    Both are float32 [prompts, samples]. Rewards are NaN for completions to leave out,
    whose advantages are 0 whatever a user's function returns for them.

    Raises:
        UserCodeError: it cannot be loaded. The function raises it, too, where the
            user's raises, or returns anything but a finite number for each completion
            with a reward.
    """
    function = user_code.load(name, "grpo.advantage", ADVANTAGES)
    if name in ADVANTAGES:
        compiled = jax.jit(lambda rewards, where: function(rewards, where=where))
        return lambda rewards: np.asarray(compiled(rewards, ~np.isnan(rewards)))

    def compare(rewards: np.ndarray) -> np.ndarray:
        if np.isnan(rewards).all():  # a turn that no conversation with a reward has
            return np.zeros_like(rewards)
        # One process calls the function, which may be random, and all get its numbers.
        values = processes.by_first(
            lambda: _call_own(name, function, rewards).tolist(), user_code.UserCodeError
        )
        return np.array(values, np.float32)

    return compare


def _call_own(name: str, function: Callable, rewards: np.ndarray) -> np.ndarray:
    """Advantages that a user's function returns, checked."""
    setting = f"grpo.advantage={messages.short(name)}"
    try:
        with guests.received():
            returned = function(rewards.copy())
    except BaseException as error:
        guests.raise_if_of_the_user(error)
        said = user_code.described(error, function)
        raise user_code.UserCodeError(f"{setting} raised{said}") from error
    values = _as_floats(returned)
    if values is None or values.shape != rewards.shape:
        got = messages.short(returned)
        if values is not None and values.ndim:
            got = f"shape {values.shape}"
        raise user_code.UserCodeError(
            f"{setting} must return an advantage for each of the rewards, numbers of "
            f"shape {rewards.shape}, got {got}"
        )
    values = np.where(np.isnan(rewards), 0, values)
    if (unfit := ~np.isfinite(values)).any():
        prompt, sample = np.argwhere(unfit)[0]
        raise user_code.UserCodeError(
            f"{setting} must return finite numbers of float32, got "
            f"{values[prompt, sample]} for sample {sample} of prompt {prompt} of the "
            f"step, whose rewards are {messages.short(rewards[prompt].tolist())}"
        )
    return values


def _as_floats(returned: Any) -> np.ndarray | None:
    """A function's result as a float32 array; None if it cannot be one."""
    try:
        return np.asarray(returned).astype(np.float32)
    except (TypeError, ValueError):
        return None
