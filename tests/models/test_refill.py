"""More rows than slots: the tokens of each, and which is decoded when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models import refill
from jaxmem.models.decoder import Decoder
from jaxmem.models.sampling import SampledTokens, SamplingConfig, sample
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
    run,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.full
@pytest.mark.parametrize(
    ("slots", "changes", "settings"),
    [
        (2, {}, dict(top_p=0.7, support=7)),
        slow(1, LONG, {}),
        slow(5, LAYERS_OF_ATTENTION | {"embedding.positions": 16}, dict(top_k=5)),
        slow(2, OTHER_PARTS, {}),
    ],
)
def test_row_tokens_independent_of_slot_and_start(slots, changes, settings):
    model = decoder(**changes)
    at_once = run(model, seed=18, **settings)
    made = run(model, seed=18, slots=slots, **settings)
    # Slots of the cache are in another order, so that sums are rounded otherwise.
    for name in ("tokens", "mask", "support_ids", "lengths", "routes"):
        np.testing.assert_array_equal(getattr(made, name), getattr(at_once, name))
    assert (made.routes is None) == (changes is not OTHER_PARTS)
    np.testing.assert_allclose(made.logprobs, at_once.logprobs, atol=1e-5)
    assert len(set(made.lengths)) > 2 and made.lengths.max() == 12
    assert (made.steps > 11) == (slots < 3)  # then rows wrote behind the last slot
    assert (made.starts.max() > 0) == (slots < 5)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [None, 2])
def test_rows_without_tokens_take_no_step(slots):
    config, live = SamplingConfig(max_new_tokens=12, slots=slots), np.arange(5) != 1
    model = decoder()  # is kept, so it cannot be made in a trace

    @jax.jit
    def draw(live):
        lengths = jnp.where(live, LENGTHS, 0)
        given = model, PROMPTS, lengths, jax.random.key(1), config
        return sample(*given, eos_id=EOS, pad_id=PAD)

    whole, made = jax.device_get((draw(live | True), draw(live)))
    assert whole.lengths.argmax() == 1 and made.steps < whole.steps
    assert made.lengths[1] == 0 and not made.mask[1].any()
    for name in ("tokens", "mask", "lengths"):
        ours, theirs = getattr(made, name), getattr(whole, name)
        np.testing.assert_array_equal(ours[live], theirs[live])
    np.testing.assert_allclose(made.logprobs[live], whole.logprobs[live], atol=1e-5)


@pytest.mark.full
def test_refill_takes_no_idle_step(monkeypatch):
    calls, decode = [], Decoder.decode

    def counted(self, tokens, cache, live, **options):
        jax.debug.callback(lambda: calls.append(len(tokens)))
        return decode(self, tokens, cache, live, **options)

    monkeypatch.setattr(Decoder, "decode", counted)
    made = jax.device_get(run(decoder(), slots=2, seed=3))
    jax.effects_barrier()
    assert calls == [2] * made.steps
    # At any step at most two rows are decoded, and one waits for no free slot.
    live = np.zeros(made.steps + 1, int)
    for start, length in zip(made.starts, made.lengths, strict=True):
        live[start : start + length - 1] += 1
    assert live.max() == 2
    assert (live[: made.starts.max()] == 2).all()


def started(lengths, groups, slots):
    """Steps before each row, where rows are known to end at these lengths."""
    prompts = np.array([[1 + group, 1] for group in groups], np.int32)
    split, rows = nnx.split(decoder()), len(groups)

    def draw(wanted, steps, logits, none):
        zeros = jnp.zeros_like(steps)
        drawn = SampledTokens(zeros, ~none, zeros.astype(float), None)
        return drawn, none | (steps + 1 == wanted)

    @jax.jit
    def run(*given):
        nothing = jnp.zeros((rows, 9))
        nothing = SampledTokens(
            nothing.astype(int), nothing.astype(bool), nothing, None
        )
        given = refill.RefillPrompts(*given)
        return refill.Refill(split, given, slots, 9, draw, unroll=False).run(nothing)

    made = run(prompts, np.full(rows, 2), np.array(lengths))
    np.testing.assert_array_equal(made.lengths, lengths)
    np.testing.assert_array_equal(made.drawn.mask.sum(1), lengths)
    return made.starts.tolist()


@pytest.mark.slow
def test_order_starts_new_then_long_prompts():
    # Two slots, and one row of each prompt in turn; then those of the longest prompt.
    starts = started([3, 3, 9, 9, 2, 2], [0, 0, 1, 1, 2, 2], 2)
    # Rows 0 and 2 begin; row 4 follows on row 0, and row 3 on it. Row 2 ends in step 8.
    assert starts == [0, 8, 0, 3, 2, 10]
    # The first of four slots hold two rows of a prompt and one of each other, not three
    # of the first; so all rows of the longest have begun two steps sooner.
    starts = started([6] * 6 + [9] * 3, [0] * 3 + [1] * 3 + [2] * 3, 4)
    assert starts == [0, 0, 5, 0, 5, 10, 0, 5, 8]
    # Rows of one token take no step, and leave their slot at once.
    assert started([1, 1, 4, 1, 1, 2], range(6), 2) == [0] * 6


@pytest.mark.parametrize("slots", [0, 6])
def test_slots_that_cannot_be_are_refused(slots):
    with pytest.raises(ValueError, match=f"slots must be at .*, got {slots}"):
        run(decoder(), slots=slots)
