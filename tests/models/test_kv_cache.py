"""A token at a time against whole sequences, and what the cache may cost."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models import kv_cache
from jaxmem.models.decoder import ModelConfig
from tests.helpers import decoders
from tests.helpers.cases import slow
from tests.helpers.decoders import stepwise, whole

SMALL = ModelConfig(
    layers=2, hidden=32, ff=48, heads=4, kv_heads=2, head_dim=8, vocab_size=61
)
LENGTHS = np.array([2, 5, 1, 4], np.int32)
WIDTH, NEW = 5, 3


# These programs are tiny: all their time would go into optimizing them.
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def decoder(**changes):
    return decoders.drawn(SMALL.replaced(changes))


def random_tokens(seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, SMALL.vocab_size, (len(LENGTHS), WIDTH + NEW), np.int32)


def at_steps(hidden, lengths):
    return np.asarray(hidden)[
        np.arange(len(lengths))[:, None], lengths[:, None] - 1 + np.arange(NEW + 1)
    ]


# ---------------------------------------------------------------- promises


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="grouped queries", marks=pytest.mark.slow),
        pytest.param(
            {"kv_heads": 1, "qk_norm.enabled": True},
            id="one kv head, Qwen's norms",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "kv_heads": 4,
                "embedding.scaled": True,
                "mlp.activation": "gelu",
                "rope.theta": 50.0,
            },
            id="as many kv heads, Gemma's scale",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "pattern": ("local", "global"),
                "self_attn.window": 3,
                "self_attn.softcap": 0.5,
                "self_attn.scale": 0.9,
                "norm.post": True,
                "norm.offset": True,
            },
            id="a window in every other layer, capped scores",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "pattern": ("local",),
                "self_attn.window": 2,
                "self_attn.qkv_bias": True,
                "rope.scaling": "llama3",
                "rope.factor": 8.0,
                "rope.original_length": 16,
            },
            id="a window in every layer, biases, scaled wavelengths",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "pattern": ("global", "local"),
                "self_attn.window": 4,
                "rope.local_theta": 10.0,
                "rope.scaling": "linear",
                "rope.factor": 4.0,
            },
            id="local layers with wavelengths of their own",
        ),
    ],
)
def test_cached_tokens_equal_whole_sequence(changes):
    model, tokens = decoder(**changes), random_tokens()
    got, _ = stepwise(model, tokens, LENGTHS, WIDTH)
    expected = at_steps(whole(model, tokens), LENGTHS)
    # One softmax of at most 8 terms, summed in another order, in two layers.
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert np.abs(expected[:, 1:] - expected[:, :-1]).max() > 0.1


def test_prefill_ignores_padding():
    tokens, model = random_tokens(1), decoder()
    prompts = tokens[:, :WIDTH].copy()
    prefill = jax.jit(lambda *args: model.prefill(*args, WIDTH + NEW))
    decode = jax.jit(lambda *args: model.decode(*args)[0])
    before, cache = prefill(prompts, LENGTHS)
    before = before, decode(tokens[:, 0], cache)
    prompts[np.arange(WIDTH) >= LENGTHS[:, None]] = 10**6  # no token: NaN if read
    after, cache = prefill(prompts, LENGTHS)
    after = after, decode(tokens[:, 0], cache)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_rows_do_not_meet():
    tokens = random_tokens(2)
    before, _ = stepwise(decoder(), tokens, LENGTHS, WIDTH)
    tokens[1] = random_tokens(3)[1]
    lengths = LENGTHS.copy()
    lengths[1] = 3
    after, _ = stepwise(decoder(), tokens, lengths, WIDTH)
    others = [0, 2, 3]
    np.testing.assert_array_equal(before[np.array(others)], after[np.array(others)])
    assert float(jnp.max(jnp.abs(before[1] - after[1]))) > 0.1


def test_cache_lengths_and_filled_slots():
    _, cache = stepwise(decoder(), random_tokens(), LENGTHS, WIDTH)
    np.testing.assert_array_equal(cache.lengths, LENGTHS + NEW)
    assert int(cache.slot) == cache.max_length == WIDTH + NEW
    slots = np.arange(WIDTH + NEW)
    expected = (slots < LENGTHS[:, None]) | (slots >= WIDTH)
    np.testing.assert_array_equal(cache.filled, expected)


@pytest.mark.slow
def test_bfloat16_is_cached_as_such():
    model, tokens = decoder(dtype="bfloat16"), random_tokens()
    got, cache = stepwise(model, tokens, LENGTHS, WIDTH)
    assert got.dtype == cache.layers["blocks"].keys.dtype
    assert got.dtype == jnp.bfloat16
    exact = at_steps(whole(decoder(), tokens), LENGTHS)
    at_once = at_steps(whole(model, tokens), LENGTHS).astype(np.float32)
    error = np.abs(got.astype(np.float32) - exact).max()
    assert error < 2 * np.abs(at_once - exact).max()


def test_attention_of_a_token_against_float64():
    rng = np.random.default_rng(0)
    kv_heads, group, slots, width = 2, 3, 6, 4
    query = rng.normal(size=(2, 1, kv_heads * group, width)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, kv_heads, slots + 1, width))
    filled = np.array([[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]], bool)
    token = (x[:, :, -1:].astype(np.float32) for x in (keys, values))
    # What no row may see must not reach a result, whatever it is.
    cached = (
        np.where(filled[:, None, :, None], x[:, :, :-1], 1e9).astype(np.float32)
        for x in (keys, values)
    )
    layers = kv_cache.Layer(*token), kv_cache.Layer(*cached)
    got = np.asarray(jax.jit(kv_cache.attend)(query, *layers, filled))
    for row in range(2):
        seen = [*np.flatnonzero(filled[row]), slots]
        for head in range(kv_heads * group):
            K, V = (x[row, head // group, seen] for x in (keys, values))
            weights = np.exp(K @ query[row, 0, head] / math.sqrt(width))
            expected = weights / weights.sum() @ V
            np.testing.assert_allclose(got[row, 0, head], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("norm_offset", [False, True])
def test_weights_cast_beforehand_are_equal(norm_offset):
    # The sampler does so. If a layer computed in the stored type, this would show.
    model = decoder(
        dtype="bfloat16", **{"qk_norm.enabled": True, "norm.offset": norm_offset}
    )
    definition, weights = nnx.split(model)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: w + rng.standard_normal(w.shape) * 0.3, weights)
    model, tokens = nnx.merge(definition, weights), random_tokens()
    definition, cast = model.in_compute_type()
    assert "bfloat16" in {str(w.dtype) for w in jax.tree.leaves(cast)}
    narrow = nnx.merge(definition, cast)
    hidden = whole(model, tokens)
    np.testing.assert_array_equal(whole(narrow, tokens), hidden)
    np.testing.assert_array_equal(narrow.logits(hidden), model.logits(hidden))


# ------------------------------------------------------------------ logits


@pytest.mark.full
@pytest.mark.parametrize(("tied", "softcap"), [slow(True, None), (False, 0.3)])
def test_logits_are_those_inside_the_head(tied, softcap):
    model = decoder(tied=tied, dtype="bfloat16", **{"logits.softcap": softcap})
    hidden = whole(model, random_tokens())[:, 0]
    labels = np.array([0, 60, 7, 30])
    logits = model.logits(hidden)
    assert (logits.shape, logits.dtype) == ((4, 61), jnp.float32)
    exact = model.head.logprobs(hidden, labels)
    got = jax.nn.log_softmax(logits)[np.arange(4), labels]
    np.testing.assert_allclose(got, exact, atol=2e-6)
    rounded = jax.nn.log_softmax(model.head(hidden).astype(jnp.float32))
    assert np.abs(rounded[np.arange(4), labels] - exact).max() > 1e-5


# ------------------------------------------------------------------ memory


@pytest.mark.full
def test_cache_exists_once_and_is_never_copied(optimized):
    config = dataclasses.replace(
        SMALL, layers=3, hidden=16, ff=16, heads=8, kv_heads=1, head_dim=16
    )
    rows, slots = 4, 2048
    model = decoders.drawn(config)

    def loop(model, prompts, lengths):
        definition, weights = nnx.split(model)

        def step(_, carry):
            hidden, cache = nnx.merge(definition, weights).decode(*carry)
            return jnp.argmax(hidden, -1).astype(jnp.int32), cache

        _, cache = model.prefill(prompts, lengths, slots)
        return jax.lax.fori_loop(0, 100, step, (prompts[:, 0], cache))[0]

    args = model, jnp.ones((rows, 4), jnp.int32), jnp.full((rows,), 4)
    compiled = jax.jit(loop).lower(*args).compile()
    cache = 4 * 2 * config.layers * rows * slots * config.kv_heads * config.head_dim
    one_layer = cache / config.layers
    used = compiled.memory_analysis().temp_size_in_bytes
    assert cache < used < cache + 2 * one_layer


# ------------------------------------------------------------------ errors


def test_cache_smaller_than_prompts_is_refused():
    with pytest.raises(ValueError, match="max_length must be at least the 5 .*got 4"):
        decoder().prefill(random_tokens()[:, :WIDTH], LENGTHS, 4)


def test_invalid_length_is_nan_in_its_row():
    tokens, lengths = random_tokens(), LENGTHS.copy()
    lengths[[0, 2]] = 0, WIDTH + 1

    @jax.jit
    def run(model, lengths):
        hidden, cache = model.prefill(tokens[:, :WIDTH], lengths, WIDTH)
        return hidden, model.decode(tokens[:, 0], cache)[0]

    hidden, beyond = run(decoder(), lengths)
    np.testing.assert_array_equal(
        jnp.isnan(hidden).any(axis=1), [True, False, True, False]
    )
    assert jnp.isnan(beyond).all()  # the cache is full
