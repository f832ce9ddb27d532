"""Log-probabilities of given ids, in the vocabulary and in a support, to float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from tests.helpers import oracle
from tests.helpers.cases import full, slow
from tests.helpers.selected import (
    CHUNK,
    D,
    K,
    N,
    V,
    changed,
    cotangents,
    exact,
    make,
    ours,
)

VERBS = ("selected", "support")


# These programs are tiny: all their time would go into optimizing them.
pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


def below(limit, operands):
    h, W, y, ids = operands
    ids = np.stack([np.random.default_rng(i).permutation(limit)[:K] for i in range(N)])
    return h, W, ids[:, 2].astype(np.int32), ids.astype(np.int32)


@pytest.mark.parametrize("verb", VERBS)
def test_confident_ids_keep_their_digits(verb):
    """1 + Σ others rounds to 1, and so does p: what is left is below epsilon."""
    h, W, y, ids = make()
    h = np.eye(D, dtype=np.float32)[np.arange(N) % D]
    W = np.zeros_like(W)
    np.fill_diagonal(W, 25.0)
    y = (np.arange(N) % D).astype(np.int32)
    ids = np.where(np.arange(K) == 2, y[:, None], y[:, None] + 1 + np.arange(K)) % V
    g = np.float32(np.arange(K) == 2) + np.zeros((N, 1), np.float32)
    g = g if verb == "selected" else g[:, 2]
    operands = h, W, y, ids.astype(np.int32)
    want, (dh, _, _) = exact(verb, g, operands)
    value, (got, _) = ours(operands, g, {}, verb)
    at_label = np.index_exp[:, 2] if verb == "selected" else np.index_exp[:]
    assert -1e-8 < want[at_label].max() < 0
    in_order = 128 * 2.0**-24  # what float32 may lose of a block's equal terms
    np.testing.assert_allclose(value, want, rtol=in_order)
    np.testing.assert_allclose(got, dh, rtol=2 * in_order)


@pytest.mark.parametrize("verb", ["selected", slow("support")])
def test_one_id_or_full_support_equals_logprobs(verb):
    h, W, y, _ = make(3.0)
    ids = np.where(np.arange(K) == 0, y[:, None], -1)
    if verb == "support":
        ids = np.tile(np.arange(V, dtype=np.int32)[::-1], (N, 1))
    g = np.ones((N, K)) if verb == "selected" else np.ones(N)
    got, gradients = ours((h, W, y, ids), g, {}, verb)
    want, need = oracle.head(h, W, y, {"logprob": np.ones(N)})
    got = got[:, 0] if verb == "selected" else got
    np.testing.assert_allclose(got, want["logprob"], rtol=1e-5)
    for a, b in zip(gradients, need, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_support_of_label_alone_is_certain():
    h, W, y, _ = make(3.0)
    alone = np.where(np.arange(K) == 2, y[:, None], -1)
    got, gradients = ours((h, W, y, alone), np.ones(N), {}, "support")
    assert not got.any() and not any(x.any() for x in gradients)


@pytest.mark.full
@pytest.mark.parametrize("verb", VERBS)
def test_masked_tokens_give_exactly_nothing(verb):
    h, W, y, ids = make()
    where = np.arange(N) % 4 == 0
    h[~where] = np.nan
    y[1], ids[1] = V + 5, V + 7  # nobody looks
    bias = np.full(V, 200.0, np.float32)  # e^200, were a row of zeros not left out
    g, operands = cotangents(verb), (h, W, y, ids)
    arrays = {"where": where, "bias": bias}
    value, (dh, dW, dbias) = ours(operands, g, arrays, verb)
    assert not value[~where].any() and value[where].all()
    assert not dh[~where].any() and dh[where].any(1).all()
    _, need = exact(verb, g[where], [h[where], W, y[where], ids[where]])
    np.testing.assert_allclose(dW, need[1], atol=1e-5)
    np.testing.assert_allclose(dbias, need[2], atol=1e-5)
    arrays["where"] = np.zeros(N, bool)
    value, gradients = ours(operands, g, arrays, verb)
    assert not value.any() and not any(x.any() for x in gradients)


@pytest.mark.parametrize("verb", [full("selected"), "support"])
def test_tokens_that_a_bias_rules_out(verb):
    """As in a head without them."""
    h, W, y, ids = below(V - 20, make())
    bias = np.where(np.arange(V) < V - 20, 0, -np.inf).astype(np.float32)
    ids[:, 5] = V - 1
    g = cotangents(verb)
    if verb == "selected":
        g[:, 5] = 0
    arrays = {"where": np.ones(N, bool), "bias": bias}
    value, (dh, dW, dbias) = ours((h, W, y, ids), g, arrays, verb)
    kept = np.where(ids == V - 1, -1, ids)
    want, need = exact(verb, g, (h, W[: V - 20], y, kept), vocab_size=V - 20)
    if verb == "selected":
        assert np.isneginf(value[:, 5]).all()
        value, want = value[:, :5], want[:, :5]
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(dh, need[0], atol=2e-6)
    assert np.isfinite(dW).all() and not dbias[V - 20 :].any()


def test_label_outside_support_is_nan():
    h, W, y, ids = make()
    ids[7, 2] = ids[7, 0]
    value, (dh, _) = ours((h, W, y, ids), np.ones(N), {}, "support")
    np.testing.assert_array_equal(np.isnan(value), np.arange(N) == 7)
    np.testing.assert_array_equal(np.isnan(dh).any(1), np.arange(N) == 7)


def test_selected_of_no_tokens_or_ids():
    h, W, _, _ = make()
    none = jnp.zeros((0, D)), W, jnp.zeros(0, jnp.int32), jnp.zeros((0, K), jnp.int32)
    assert jaxmem.support_logprobs(*none).shape == (0,)
    assert jaxmem.selected_logprobs(none[0], W, none[3]).shape == (0, K)
    assert jaxmem.selected_logprobs(h, W, jnp.zeros((N, 0), jnp.int32)).shape == (N, 0)


# What is refused, and how.

H, W_, Y, IDS = make()
SELECTED = {"hidden": H, "W": W_, "ids": IDS}
SUPPORT = {"hidden": H, "W": W_, "labels": Y, "support_ids": IDS}


ERRORS = [
    ("selected_logprobs", {"ids": H}, TypeError,
     "ids must be integers, got float32; convert them with ids.astype('int32')"),
    ("selected_logprobs", {"ids": Y}, ValueError,
     "ids must have entries per token, shape (37,) and one more axis, got (37,)"),
    ("selected_logprobs", {"ids": IDS[:5]}, ValueError,
     "ids must have entries per token, shape (37,) and one more axis, got (5, 6)"),
    ("selected_logprobs", {"ids": changed(IDS, (3, 1), V)}, ValueError,
     "ids must be below vocab_size=130, got 130; mark absent entries with a "
     "negative id, or exclude the token with where="),
    ("selected_logprobs", {"ids": "text"}, TypeError,
     "ids must be an array of numbers, got str"),
    ("selected_logprobs", {"where": np.ones(3, bool)}, ValueError,
     "where must broadcast to the tokens' shape (37,), got shape (3,)"),
    ("selected_logprobs", {"implementation": "hopper"}, NotImplementedError,
     "implementation='hopper' has no selected_logprobs: its kernels reduce one head's "
     "logits to the statistics of token_stats and keep no row of them; pass "
     "implementation=None"),
    ("support_logprobs", {"support_ids": IDS[:, :0]}, ValueError,
     "support_ids must contain at least one id per token, got none"),
    ("support_logprobs", {"support_ids": changed(IDS, (3, 1), V)}, ValueError,
     "support_ids must be below vocab_size=130, got 130; mark absent entries "
     "with a negative id, or exclude the token with where="),
    ("support_logprobs", {"labels": changed(Y, 3, V)}, ValueError,
     "labels must be below vocab_size=130, got 130; mark padding with a negative label "
     "or with where="),
    ("support_logprobs", {"support_ids": changed(IDS, (3, 2), -1)}, ValueError,
     f"labels must be among the support_ids of their token, but {Y[3]} at (3,) is "
     "not; mark padding with a negative label or with where="),
    ("support_logprobs", {"labels": Y[:5]}, ValueError,
     "labels must have one entry per token, shape (37,), got (5,)"),
    ("support_logprobs", {"where": np.ones(3, bool)}, ValueError,
     "where must broadcast to the tokens' shape (37,), got shape (3,)"),
    ("support_logprobs", {"chunk": 0}, ValueError,
     "chunk must be a positive number of tokens, None or 'auto', got 0"),
    ("support_logprobs", {"temperature": 0.0}, ValueError,
     "temperature must be positive and finite, got 0.0; for greedy decoding use "
     "token_stats(...).is_argmax"),
]  # fmt: skip


@pytest.mark.parametrize("verb,changes,kind,message", ERRORS, ids=lambda x: str(x)[:30])
def test_errors(verb, changes, kind, message):
    good = SELECTED if verb == "selected_logprobs" else SUPPORT
    with pytest.raises(kind) as error:
        getattr(jaxmem, verb)(**(good | changes))
    assert str(error.value) == message


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int64", "uint64"])
def test_any_integer_type(dtype):
    ids, y = IDS % 100, Y % 100
    with jax.enable_x64(dtype.endswith("64")):
        got = jaxmem.selected_logprobs(H, W_, ids.astype(dtype), CHUNK)
        want = jaxmem.selected_logprobs(H, W_, ids, CHUNK)
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="below vocab_size=130, got 4294967296"):
        jaxmem.support_logprobs(H, W_, y, np.full((N, K), 2**32))
