"""Log-probabilities of ids and in supports, where the table has no row: digits, NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import packing
from tests.helpers import oracle
from tests.helpers.cases import full

VERBS = ("selected", "support")
N, D, V, K, CHUNK = 37, 24, 130, 6, 16
MAX_IDS = 11  # between widths, of which 4 and 8 are below
ENTRIES = N * MAX_IDS + 9  # of every ragged support here, so that all run one program

# These programs are tiny: all their time would go into optimizing them.
pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


def make(std=1.0, v=V):
    """hidden, W, labels, and K distinct ids a token, the label among them."""
    rng = np.random.default_rng(0)
    h = rng.standard_normal((N, D), np.float32)
    W = rng.standard_normal((V, D), np.float32) * std / D**0.5
    ids = np.stack([rng.permutation(v)[:K] for _ in range(N)]).astype(np.int32)
    return h, W.astype(np.float32), ids[:, 2].copy(), ids


def exact(verb, g, operands, **options):
    """The result in float64, and the gradients of hidden, W and bias by hand."""
    h, W, y, ids = operands
    logits = oracle.Logits.of(h, W, **{"vocab_size": V} | options)
    if verb == "selected":
        values, pull = oracle.selected(logits.z, ids)
    else:
        values, pull = oracle.support(logits.z, y, ids)
    return values, logits.gradients(pull(g))


@functools.partial(jax.jit, static_argnames=("verb", "chunk"))
def ours(operands, g, verb, bias=None, offsets=None, chunk=CHUNK):
    """Value, and the gradients of hidden, W and bias, if any."""
    h, W, y, ids = operands
    ragged = {} if offsets is None else {"offsets": offsets, "max_ids": MAX_IDS}

    def call(h, W, bias):
        head = jaxmem.Head(W, bias, layout="vd")
        if verb == "selected":
            return jaxmem.selected_logprobs(h, head, ids, chunk)
        return jaxmem.support_logprobs(h, head, y, ids, chunk, **ragged)

    value, pull = jax.vjp(call, h, W, bias)
    return value, jax.tree.leaves(pull(g))


def cotangents(verb):
    g = np.random.default_rng(1).standard_normal((N, K)).astype(np.float32)
    return g if verb == "selected" else g[:, 0]


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


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
    value, (got, _) = ours(operands, g, verb)
    at_label = np.index_exp[:, 2] if verb == "selected" else np.index_exp[:]
    assert -1e-8 < want[at_label].max() < 0
    in_order = 128 * 2.0**-24  # what float32 may lose of a block's equal terms
    np.testing.assert_allclose(value, want, rtol=in_order)
    np.testing.assert_allclose(got, dh, rtol=2 * in_order)


def test_support_of_label_alone_is_certain():
    h, W, y, _ = make(3.0)
    alone = np.where(np.arange(K) == 2, y[:, None], -1)
    got, gradients = ours((h, W, y, alone), np.ones(N), "support")
    assert not got.any() and not any(x.any() for x in gradients)


@pytest.mark.parametrize("verb", [full("selected"), "support"])
def test_tokens_that_a_bias_rules_out(verb):
    """As in a head without them."""
    h, W, y, ids = make(v=V - 20)
    bias = np.where(np.arange(V) < V - 20, 0, -np.inf).astype(np.float32)
    ids[:, 5] = V - 1
    g = cotangents(verb)
    if verb == "selected":
        g[:, 5] = 0
    value, (dh, dW, dbias) = ours((h, W, y, ids), g, verb, bias)
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
    value, (dh, _) = ours((h, W, y, ids), np.ones(N), "support")
    np.testing.assert_array_equal(np.isnan(value), np.arange(N) == 7)
    np.testing.assert_array_equal(np.isnan(dh).any(1), np.arange(N) == 7)


def test_selected_of_no_tokens_or_ids():
    h, W, _, _ = make()
    none = jnp.zeros((0, D)), W, jnp.zeros(0, jnp.int32), jnp.zeros((0, K), jnp.int32)
    assert jaxmem.support_logprobs(*none).shape == (0,)
    assert jaxmem.selected_logprobs(none[0], W, none[3]).shape == (0, K)
    assert jaxmem.selected_logprobs(h, W, jnp.zeros((N, 0), jnp.int32)).shape == (N, 0)


# Ragged supports.


def make_ragged(after=7):
    """hidden, W, labels, ids and offsets of supports of 1 to MAX_IDS ids."""
    return ragged(make_dense(), after)


def make_dense():
    """Supports of each width, with absent ids."""
    h, W, _, _ = make()
    rng = np.random.default_rng(1)
    counts = rng.integers(1, MAX_IDS + 1, N)
    counts[:8] = 1, 2, 4, 5, 8, 9, MAX_IDS - 1, MAX_IDS
    ids = np.stack([rng.permutation(V)[:MAX_IDS] for _ in range(N)])
    ids = np.where(np.arange(MAX_IDS) < counts[:, None], ids, -1).astype(np.int32)
    return h, W, ids[np.arange(N), counts // 2].copy(), ids


def ragged(operands, after=7):
    """The operands with a CSR support, with entries of no token at both ends."""
    h, W, y, dense = operands
    ids, offsets = packing.support_to_csr(dense)
    before = ENTRIES - len(ids) - after
    noise = np.resize([-7, V], before), np.full(after, V + 5)
    ids = np.concatenate([noise[0], ids, noise[1]]).astype(np.int32)
    return h, W, y, ids, offsets + before


def ours_ragged(operands, g, bias=None):
    bias = np.zeros(V, np.float32) if bias is None else bias  # all share a program
    return ours(operands[:4], g, "support", bias, operands[4])


@pytest.mark.full
def test_equal_widths_equal_dense_form_bitwise():
    h, W, y, dense = make_dense()
    dense[:] = np.where(dense < 0, (dense[:, :1] + np.arange(MAX_IDS)) % V, dense)
    g = cotangents("support")
    want, of_dense = ours((h, W, y, dense), g, "support")
    value, (dh, dW, _) = ours_ragged(ragged((h, W, y, dense)), g)
    np.testing.assert_array_equal(value, want)
    for got, exact_one in zip((dh, dW), of_dense, strict=True):
        np.testing.assert_array_equal(got, exact_one)


def poisoned(operands, bad):
    """Check that exactly these tokens are NaN, and others not where g does not ask."""
    g, bad = cotangents("support"), np.isin(np.arange(N), bad)
    value, (dh, *_) = ours_ragged(operands, g)
    np.testing.assert_array_equal(np.isnan(value), bad)
    np.testing.assert_array_equal(np.isnan(dh).any(1), bad)
    _, unused = ours_ragged(operands, np.where(bad, 0, g))
    assert all(np.isfinite(x).all() for x in unused)


def test_invalid_ragged_support_is_nan_in_its_token():
    h, W, y, dense = make_dense()
    dense[7], dense[9, dense[9] == y[9]] = -1, -1  # empty; without its label
    dense[11, 0] = V
    poisoned(ragged((h, W, y, dense)), [7, 9, 11])


def test_too_many_ids_poison_only_their_tokens():
    h, W, y, dense = make_dense()
    more = np.full((N, 1), -1)
    more[[7, 20]] = np.setdiff1d(np.arange(V), dense[[7, 20]])[0]
    dense = np.concatenate([dense, more], axis=1).astype(np.int32)
    counts = (dense >= 0).sum(1)
    poisoned(ragged((h, W, y, dense)), np.flatnonzero(counts > MAX_IDS))


def test_invalid_offsets_are_nan_in_their_tokens():
    h, W, y, ids, offsets = make_ragged(after=0)
    first, offsets[20] = offsets[20], offsets[19] - 1
    poisoned((h, W, y, ids, offsets), [19, 20])  # which overlap
    offsets[20] = first
    offsets[-1] = ENTRIES + 1
    poisoned((h, W, y, ids, offsets), [N - 1])
    offsets[-1], offsets[:2] = ENTRIES, (-(2**31) + 1, -1)
    poisoned((h, W, y, ids, offsets), [0, 1])


def test_label_excluded_by_bias_is_impossible():
    """-inf, and its gradient moves mass to no place that is not a number."""
    h, W, y, dense = make_dense()
    bias = np.zeros(V, np.float32)
    bias[y[3]] = -np.inf
    of_label = y == y[3]
    value, gradients = ours_ragged(
        ragged((h, W, y, dense)), cotangents("support"), bias
    )
    np.testing.assert_array_equal(np.isneginf(value), of_label)
    assert np.isfinite(value[~of_label]).all()
    assert all(np.isfinite(x).all() for x in gradients[:2])


def test_ragged_support_without_ids():
    h, W, y, _ = make_dense()
    none = np.zeros(0, np.int32), np.zeros(N + 1, np.int32)
    for labels, bad in ((y, True), (np.full(N, -1), False)):
        run = jax.jit(functools.partial(jaxmem.support_logprobs, max_ids=3))
        value = run(h, W, labels, none[0], offsets=none[1])
        assert np.isnan(value).all() if bad else not value.any()
    empty = jaxmem.support_logprobs(h[:0], W, y[:0], none[0], offsets=[0], max_ids=3)
    assert empty.shape == (0,)


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
RAGGED = dict(
    zip(("hidden", "W", "labels", "support_ids", "offsets"), make_ragged(), strict=True)
) | {"max_ids": MAX_IDS}
CSR, OFFSETS, LABELS = RAGGED["support_ids"], RAGGED["offsets"], RAGGED["labels"]

OF_RAGGED = [
    ({"max_ids": None}, ValueError,
     "max_ids must be given with offsets: the most ids that a token may have, such as "
     "the sampler's top_k"),
    ({"max_ids": 0}, ValueError,
     "max_ids must be an integer, at least 1 and below 2**31, got 0"),
    ({"offsets": None}, ValueError,
     "max_ids must be None without offsets, got 11; a dense support has as many ids as "
     "its last axis"),
    ({"support_ids": CSR[None]}, ValueError,
     "support_ids must have one axis with offsets, which say where each token's ids "
     f"begin, got shape (1, {len(CSR)})"),
    ({"support_ids": CSR * 0.5}, TypeError,
     "support_ids must be integers, got float64; convert them with "
     "support_ids.astype('int32')"),
    ({"offsets": OFFSETS * 1.0}, TypeError,
     "offsets must be integers, got float64; convert them with "
     "offsets.astype('int32')"),
    ({"offsets": OFFSETS[1:]}, ValueError,
     "offsets must have one entry per token and one more, shape (38,), got (37,)"),
    ({"offsets": changed(OFFSETS, 5, 0)}, ValueError,
     f"offsets must not decrease, got {OFFSETS[4]} and then 0 at 5"),
    ({"offsets": OFFSETS - OFFSETS[0] - 1}, ValueError,
     f"offsets must be from 0 to {len(CSR)}, the entries of support_ids, got -1 to "
     f"{OFFSETS[-1] - OFFSETS[0] - 1}"),
    ({"offsets": changed(OFFSETS, -1, 2**31 - 1)}, ValueError,
     f"offsets must be from 0 to {len(CSR)}, the entries of support_ids, got "
     f"{OFFSETS[0]} to 2147483647"),
    ({"max_ids": 10}, ValueError,
     "offsets must give a token at most max_ids=10 ids, got 11 at token 7; raise "
     "max_ids, or mask the token with where="),
    ({"support_ids": changed(CSR, OFFSETS[0] + 2, V)}, ValueError,
     "support_ids must be below vocab_size=130, got 130; mark absent entries "
     "with a negative id, or exclude the token with where="),
    ({"labels": changed(LABELS, 3, (LABELS[3] + 1) % V)}, ValueError,
     f"labels must be among the support_ids of their token, but {LABELS[3] + 1} at "
     "(3,) is not; mark padding with a negative label or with where="),
]  # fmt: skip


@pytest.mark.parametrize("verb,changes,kind,message", [
    *ERRORS, *(("ragged", *case) for case in OF_RAGGED),
], ids=lambda x: str(x)[:30])  # fmt: skip
def test_errors(verb, changes, kind, message):
    good = {"selected_logprobs": SELECTED, "ragged": RAGGED}.get(verb, SUPPORT)
    verb = "support_logprobs" if verb == "ragged" else verb
    with pytest.raises(kind) as error:
        getattr(jaxmem, verb)(**(good | changes))
    assert str(error.value) == message


def test_masked_ids_are_not_checked():
    where = np.arange(N) != 7
    masked = RAGGED | {"where": where}
    masked["support_ids"] = changed(CSR, slice(OFFSETS[7], OFFSETS[8]), V)
    assert jax.eval_shape(lambda: jaxmem.support_logprobs(**masked)).shape == (N,)


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
