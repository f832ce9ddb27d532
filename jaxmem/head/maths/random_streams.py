"""Random streams: a constant for each kind of draw, so that no two share numbers."""

import enum

import jax
import numpy as np
from jax.typing import ArrayLike


class Stream(enum.IntEnum):
    """A purpose of random numbers; the constants are four letters each.

    Initial weights have the seed's own key, into which `nnx.Rngs` folds numbers far
    below every constant here; shuffles on the host have generators of the seed alone.
    """

    COMPLETIONS = 0x636F6D70  # of `jaxmem generate`
    ENTRIES = 0x656E7472  # columns that are recorded of a sampled token's softmax
    GRADIENTS = 0x68656164  # columns of the head's sampled gradients
    KEPT_TOKENS = 0x746F6B65  # the tokens that an update learns from
    MINIBATCHES = 0x6D696E69  # which samples are in which minibatch
    PAIRS = 0x70616972  # the order of preferences
    PREFIXES = 0x70726566  # where completions are cut
    PROBES = 0x70726265  # tokens at which a head that estimates is compared
    PROBLEMS = 0x70726F62  # generated arithmetic
    PROMPTS = 0x70726F6D  # the order of prompts
    ROLLOUTS = 0x726F6C6C  # a policy's samples
    SOURCES = 0x736F7572  # the orders of several sources
    TEACHER = 0x74656163  # ids that `jaxmem score` draws for a student

    def key(self, seed: ArrayLike, *numbers: ArrayLike) -> jax.Array:
        """The key of one draw, which no other stream or numbers give.

            fold_in(... fold_in(fold_in(key(seed), stream), n_1) ..., n_k)

        The seed and the numbers, of the step and the like, may be traced.
        """
        key = jax.random.fold_in(jax.random.key(seed), self.value)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    def generator(self, seed: int, *numbers: int) -> np.random.Generator:
        """A generator for a draw on the host; a stream always takes as many numbers."""
        return np.random.default_rng([self.value, seed, *numbers])
