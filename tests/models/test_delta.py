"""The gated delta rule against a loop over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models import delta
from jaxmem.models.decoder import ModelConfig
from tests.helpers import decoders
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


def drawn(length, documents, heads=2, keys=6, values=5):
    rng = np.random.default_rng(0)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    shape = len(documents), length, heads
    return delta.DeltaInputs(
        unit(*shape, keys) * keys**-0.5,
        unit(*shape, keys),
        rng.normal(size=(*shape, values)),
        -rng.exponential(0.3, shape),
        rng.uniform(size=shape),
        documents,
    )


def one_by_one(inputs):
    """Outputs and last states of a loop over tokens."""
    rows, length, heads, keys = inputs.query.shape
    out = np.zeros(inputs.value.shape)
    states = np.zeros((rows, heads, keys, inputs.value.shape[-1]))
    for row, head in np.ndindex(rows, heads):
        state, document = states[row, head], inputs.documents[row, 0]
        for t in range(length):
            query, key, value, decay, rate = (x[row, t, head] for x in inputs[:-1])
            if inputs.documents[row, t] != document:
                state, document = 0 * state, inputs.documents[row, t]
            state = np.exp(decay) * state
            state = state + np.outer(key, rate * (value - key @ state))
            out[row, t, head] = query @ state
        states[row, head] = state
    return out, states


@pytest.mark.parametrize(
    ("length", "ends"),
    [(150, ((40, 64, 65, 130), ())), slow(64, ((), (63,))), slow(7, ((3,), (1, 2)))],
)
def test_delta_chunks_equal_loop_over_tokens(length, ends):
    documents = np.array([np.searchsorted(e, np.arange(length), "right") for e in ends])
    inputs = drawn(length, documents)
    expected, last = one_by_one(inputs)
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)
    single = single._replace(documents=jnp.asarray(documents, jnp.int32))
    out, state = jax.jit(delta.run)(single)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6)
    np.testing.assert_allclose(state, last, rtol=0, atol=3e-6)


def test_delta_gradients_equal_those_of_single_steps():
    documents = np.zeros((1, 70), int)
    inputs = drawn(70, documents)
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), inputs)
    single = single._replace(documents=jnp.zeros((1, 70), jnp.int32))

    def chunked(arrays):
        out, state = delta.run(single._replace(**arrays))
        return jnp.sum(jnp.sin(out)) + jnp.sum(state**2)

    def stepped(arrays):
        moved = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in single._replace(**arrays)]

        def step(state, token):
            out, state = delta.step(state, delta.DeltaInputs(*token))
            return state, jnp.sum(jnp.sin(out))

        state, sums = jax.lax.scan(step, jnp.zeros((1, 2, 6, 5)), tuple(moved))
        return jnp.sum(sums) + jnp.sum(state**2)

    arrays = {k: v for k, v in single._asdict().items() if k != "documents"}
    ours, theirs = (
        jax.jit(jax.grad(chunked))(arrays),
        jax.jit(jax.grad(stepped))(arrays),
    )
    for name, expected in theirs.items():
        bound = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=bound)


@pytest.mark.slow
def test_delta_prompts_of_several_lengths_as_alone():
    config = ModelConfig().replaced(
        {
            "layers": 2,
            "hidden": 16,
            "ff": 24,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "vocab_size": 31,
            "mixers": ("delta", "attention"),
            "delta.heads": 2,
            "delta.key_dim": 8,
            "delta.value_dim": 4,
            "self_attn.gate": True,
        }
    )
    decoder = decoders.drawn(config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 31, (3, 12)), jnp.int32)
    lengths = np.array([1, 2, 7])  # the convolution reads more than the first two have
    got, _ = decoders.stepwise(decoder, tokens, lengths, 7)
    every = decoders.whole(decoder, tokens)
    for row, length in enumerate(lengths):
        expected = every[row, length - 1 : length + 5]
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=2e-5)
