"""Entries that a sampler records of its softmax, beside the tokens that it draws."""

import jax
import numpy as np
import pytest

from jaxmem.head.maths import recorded
from jaxmem.models.sampling import Sampler, SamplingConfig
from tests.helpers.decoders import whole
from tests.helpers.sampling import EOS, LENGTHS, PAD, PROMPTS, decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")
K, TEMPERATURE = 5, 0.05


def model():
    return decoder(vocab_size=40)


def complete(entries, temperature=TEMPERATURE, **settings):
    config = SamplingConfig(max_new_tokens=12, temperature=temperature, **settings)
    sampler = Sampler(config, (EOS,), PAD, entries=entries)
    samples = jax.jit(sampler.complete)(model(), PROMPTS, LENGTHS, jax.random.key(6))
    return jax.device_get(samples)


def scaled_logits(samples):
    """Logits [B, R, V] that the samples were drawn by, divided by the temperature."""
    rows, slots = samples.tokens.shape
    at = np.arange(rows)[:, None], LENGTHS[:, None] + np.arange(slots)
    tokens = np.pad(PROMPTS, ((0, 0), (0, slots)))
    tokens[at] = samples.tokens
    hidden = whole(model(), tokens)[at[0], at[1] - 1]
    return np.asarray(model().logits(hidden)) / TEMPERATURE


def test_entries_are_of_the_softmax_that_tokens_were_drawn_from():
    plain, samples = complete(None), complete(K)
    assert plain.entries is None
    for name in ("tokens", "mask", "logprobs", "lengths"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(samples, name))
    live, entries = samples.mask, samples.entries
    assert entries.columns.shape == (*samples.tokens.shape, K)
    z = scaled_logits(samples)[live].astype(np.float64)
    ln_z = np.log(np.exp(z).sum(-1))
    np.testing.assert_allclose(entries.logsumexp[live], ln_z, atol=2e-4)
    recorded_logprobs = (entries.label_logit - entries.logsumexp)[live]
    np.testing.assert_allclose(recorded_logprobs, samples.logprobs[live], atol=2e-4)
    columns, size = entries.columns[live], z.shape[-1]
    used = columns < size
    of_columns = np.take_along_axis(z, np.where(used, columns, 0), axis=-1)
    np.testing.assert_allclose(entries.logits[live][used], of_columns[used], atol=2e-4)
    assert not (columns == samples.tokens[live][:, None]).any()
    p = np.exp(z - ln_z[:, None])
    certain = p * recorded.sampling_of(K, size).rate > 1
    np.put_along_axis(certain, samples.tokens[live][:, None], False, axis=-1)
    kept = np.zeros_like(certain)
    row, slot = np.nonzero(used)
    kept[row, columns[row, slot]] = True
    assert certain.any() and kept[certain].all() and (kept & ~certain).any()
    counts = used.sum(axis=1)
    assert counts.max() <= K


def test_entries_of_a_refilled_slot_are_those_of_its_row():
    at_once, refilled = complete(K), complete(K, slots=2)
    live = at_once.mask
    np.testing.assert_array_equal(refilled.tokens, at_once.tokens)
    for first, second in zip(at_once.entries, refilled.entries, strict=True):
        np.testing.assert_allclose(first[live], second[live], atol=2e-4)


def test_rows_and_steps_draw_different_entries():
    """With equal probabilities, only draws and labels decide which are recorded."""
    samples = complete(K, temperature=1e6)
    columns = samples.entries.columns[samples.mask]
    patterns = {tuple(row) for row in columns}
    assert len(columns) > 40 and len(patterns) > 15  # one draw has K + 1 of them
