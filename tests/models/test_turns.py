"""Completions after completions: a cache that is kept, and one that is made again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models.sampling import (
    Sampler,
    SamplingConfig,
    row_keys,
    samples_of,
)
from tests.models.test_refill import LONG, OTHER_PARTS
from tests.models.test_sampling import EOS, LENGTHS, PAD, PROMPTS, decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")
TURNS, NEW, REPLY = 3, 6, 4
ROWS, WIDTH = PROMPTS.shape
ROOM = WIDTH + TURNS * NEW + (TURNS - 1) * REPLY - 1


@functools.partial(jax.jit, static_argnames="config")
def of_rows(model, ids, lengths, key, config):
    records = model.config.experts is not None
    made = Sampler(config, (EOS,), PAD, records=records)
    return made.complete(model, ids, lengths, key)


def again(model, said, config, turn):
    """Completions of all that was said, by `sample`."""
    ids, lengths = np.zeros((ROWS, ROOM), np.int32), np.array([len(x) for x in said])
    for row, words in zip(ids, said, strict=True):
        row[: len(words)] = words
    return of_rows(model, ids, lengths, jax.random.key(turn), config)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (LONG, dict(top_k=1)),
        (dict(pattern=("local", "chunked"), window=3), dict(top_k=5)),
        (dict(learned_positions=64, mixers=("attention", "reuse")), {}),
        (OTHER_PARTS, {}),
    ],
)
def test_what_is_sampled_after_a_reply_does_not_depend_on_a_kept_cache(
    changes, settings
):
    model, config = decoder(**changes), SamplingConfig(max_new_tokens=NEW, **settings)
    records, rng = model.config.experts is not None, np.random.default_rng(0)
    sampler = Sampler(config, (EOS,), PAD, room=ROOM, records=records)
    said = [list(np.asarray(row)[:n]) for row, n in zip(PROMPTS, LENGTHS, strict=True)]

    def keys(turn):
        return row_keys(jax.random.key(turn), jnp.arange(ROWS))

    @jax.jit
    def first(model):
        state = sampler.start(model, PROMPTS, LENGTHS, keys(0))
        return sampler.advance(model, state, NEW)

    @jax.jit
    def further(model, cache, ids, lengths, keys):
        state = sampler.resume(model, cache, ids, lengths, keys)
        return sampler.advance(model, state, NEW)

    state = first(model)
    for turn in range(TURNS):
        made, wanted = samples_of(state), again(model, said, config, turn)
        for name in ("tokens", "mask", "support_ids", "lengths"):
            ours, theirs = getattr(made, name), getattr(wanted, name)
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_allclose(made.logprobs, wanted.logprobs, atol=1e-5)
        ids, lengths = np.zeros((ROWS, 1 + REPLY), np.int32), np.zeros(ROWS, np.int32)
        for i in range(ROWS):
            drawn = list(np.asarray(made.tokens)[i, : made.lengths[i]])
            if not said[i] or (turn == 0 and i == 1):  # it ends after its first turn
                said[i] = []
                continue
            reply = list(rng.integers(0, 7, rng.integers(1, REPLY + 1)))
            said[i] += drawn + reply
            read = len(said[i]) - len(reply) - 1
            if records:
                ours, theirs = (x.routes[i, :read] for x in (made, wanted))
                np.testing.assert_array_equal(ours, theirs)
            lengths[i] = 1 + len(reply)
            ids[i, : lengths[i]] = [drawn[-1], *reply]
        assert len({*lengths}) > 2  # rows of several lengths, and one that has ended
        if turn < TURNS - 1:
            state = further(model, state.cache, ids, lengths, keys(turn + 1))
    assert int(state.cache.slot) <= state.cache.max_length


def test_a_reply_that_the_cache_has_no_room_for_is_nan():
    model = decoder()
    _, cache = model.prefill(PROMPTS, LENGTHS, WIDTH + 3)
    ids = jnp.ones((ROWS, 4), int)
    hidden, _ = model.extend(ids, jnp.full(ROWS, 2), cache)
    assert jnp.isnan(hidden).all()
    hidden, _ = model.extend(ids[:, :3], jnp.full(ROWS, 2), cache)
    assert jnp.isfinite(hidden).all()
