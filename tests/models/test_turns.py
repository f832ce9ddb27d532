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
from tests.helpers.cases import slow
from tests.helpers.sampling import (
    EOS,
    LAYERS_OF_ATTENTION,
    LENGTHS,
    LONG,
    OTHER_PARTS,
    PAD,
    PROMPTS,
    decoder,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
TURNS, NEW, REPLY = 3, 6, 4
ROWS, WIDTH = PROMPTS.shape
ROOM = WIDTH + TURNS * NEW + (TURNS - 1) * REPLY - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (LONG, dict(top_k=1)),
        slow(LAYERS_OF_ATTENTION | {"embedding.positions": 64}, dict(top_k=5)),
        slow(OTHER_PARTS, {}),
    ],
)
def test_turn_tokens_independent_of_kept_cache(changes, settings):
    model, config = decoder(**changes), SamplingConfig(max_new_tokens=NEW, **settings)
    records, rng = model.config.experts.count is not None, np.random.default_rng(0)
    sampler = Sampler(config, (EOS,), PAD, room=2 * ROOM, records=records)
    said = [list(np.asarray(row)[:n]) for row, n in zip(PROMPTS, LENGTHS, strict=True)]

    def keys(turn):
        return row_keys(jax.random.key(turn), jnp.arange(ROWS))

    @jax.jit
    def anew(model, ids, lengths, keys):
        state = sampler.start(model, ids, lengths, keys)
        return sampler.advance(model, state, NEW)

    def whole(turn):
        ids = [[*words, *[0] * (ROOM - len(words))] for words in said]
        lengths = np.array([*map(len, said)])
        return anew(model, np.array(ids, np.int32), lengths, keys(turn))

    @jax.jit
    def further(model, cache, ids, lengths, keys):
        state = sampler.resume(model, cache, ids, lengths, keys)
        return sampler.advance(model, state, NEW)

    state = whole(0)
    for turn in range(TURNS):
        made, wanted = samples_of(state), samples_of(whole(turn))
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


def test_reply_beyond_cache_is_nan():
    @functools.partial(jax.jit, static_argnums=1)
    def extended(model, tokens):
        _, cache = model.prefill(PROMPTS, LENGTHS, WIDTH + 3)
        ids = np.ones((ROWS, tokens), np.int32)
        return model.extend(ids, np.full(ROWS, 2), cache)[0]

    assert jnp.isnan(extended(decoder(), 4)).all()
    assert jnp.isfinite(extended(decoder(), 3)).all()
