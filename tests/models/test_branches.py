"""A prompt that several continuations share, against each of them with its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.models import attention, branches, positions
from jaxmem.models.decoder import ModelConfig
from jaxmem.models.positions import Branches, Sight
from jaxmem.packing.plan import pack
from jaxmem.packing.shared_prefixes import PrefixGroups, pack_branches
from tests.helpers import decoders
from tests.helpers.cases import slow

SMALL = ModelConfig(
    layers=2, hidden=32, ff=48, heads=4, kv_heads=2, head_dim=8, vocab_size=61
)
LAYOUT = Branches(5, 4)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def problem():
    """Sequences of three prompts, one of a single token, and what they are worth."""
    rng = np.random.default_rng(0)
    shared, rest = [5, 5, 5, 5, 2, 2, 0], [4, 1, 3, 2, 4, 4, 3]
    groups = np.array([0, 0, 0, 0, 1, 1, 2])
    prompts = rng.integers(0, 61, (3, 5))
    tokens = [
        np.concatenate([prompts[g, :p], rng.integers(0, 61, n)]).astype(np.int32)
        for g, p, n in zip(groups, shared, rest, strict=True)
    ]
    lengths = np.array([len(row) for row in tokens])
    worth = [
        np.where(np.arange(len(row)) < p, 0, rng.normal(size=len(row))).astype("f4")
        for row, p in zip(tokens, shared, strict=True)
    ]
    return PrefixGroups(lengths, np.array(shared), groups), tokens, worth


def results(model, tokens, worth, packed, layout=None):
    """Hidden states by sequence, and a sum's gradients of all weights."""
    definition, weights = nnx.split(model)

    @jax.jit
    def run(weights, batch, placed, worth):
        def loss(weights):
            given = placed, batch.segment_ids, batch.positions
            hidden = nnx.merge(definition, weights)(*given, layout)
            return jnp.sum(jnp.sin(hidden) * worth[..., None]), hidden

        return jax.value_and_grad(loss, has_aux=True)(weights)

    hidden, total = [], None
    each = packed.micro_batches, packed.place(tokens), packed.place(worth)
    for arrays in zip(*each, strict=True):
        (_, states), slopes = run(weights, *arrays)
        hidden.append(states)
        total = slopes if total is None else jax.tree.map(jnp.add, total, slopes)
    return packed.unpack(hidden), total


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        slow(
            {
                "qk_norm.enabled": True,
                "self_attn.softcap": 2.0,
                "self_attn.sinks": True,
            },
            "full",
        ),
        ({"embedding.positions": 16, "pattern": ("unrotated", "global")}, "none"),
    ],
)
def test_shared_prompts_equal_repeated_prompts(changes, policy):
    config = SMALL.replaced(changes)
    model = decoders.drawn(config, policy=policy)
    parts, tokens, worth = problem()
    shared = pack_branches(parts, 26, LAYOUT, (13,))
    alone = pack(parts.lengths, 18, row_lengths=(9,))
    got, gradients = results(model, tokens, worth, shared, LAYOUT)
    expected, wanted = results(model, tokens, worth, alone)
    for ours, theirs, first in zip(got, expected, parts.shared, strict=True):
        np.testing.assert_allclose(ours[first:], theirs[first:], atol=2e-5)
    ours, theirs = (jax.tree.leaves(x) for x in (gradients, wanted))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max() + 1))
    assert sum(float(jnp.abs(b).max()) > 1e-3 for b in theirs) > 10


def test_cudnn_gets_mask_of_earlier_keys(cudnn_on_xla):
    rng = np.random.default_rng(1)
    ids = jnp.array([[1, 1, 2, 0], [1, 2, 2, 2]])
    prefix = jnp.array([[True, True, False], [True, False, False]])
    query = jnp.asarray(rng.normal(size=(2, 4, 4, 8)), jnp.float32)
    key, value = (
        jnp.asarray(rng.normal(size=(2, 7, 2, 8)), jnp.float32) for _ in range(2)
    )
    given = query, key, value, Sight(ids, prefix=prefix[:, None])
    got, want = (
        jax.jit(functools.partial(attend, scale=0.3))(*given)
        for attend in (attention.attend_by_cudnn, attention.attend)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("sees", [3, slow(12)])
def test_cudnn_gets_window_of_one_document(sees, cudnn_on_xla):
    """In a loop whose layers have it or see the whole row; and no mask of T x T."""
    config = SMALL.replaced(
        {
            "pattern": ("local", "global"),
            "self_attn.window": 3,
            "attention": "cudnn",
            "dtype": "bfloat16",
        }
    )
    sight = positions.documents(config, np.zeros((2, 12), int), None)(int(sees == 3))
    sight = jax.tree.map(jnp.asarray, sight)
    assert sight.mask is None and sight.window == sees
    rng = np.random.default_rng(1)
    shapes = (2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    plain = functools.partial(attention.attend, scale=0.3)
    cudnn = functools.partial(attention.attend_by_cudnn, scale=0.3, window=3)
    whole = Sight(jnp.zeros((2, 12), int), sees)

    @jax.jit
    def both(*given):
        got, pull = jax.vjp(lambda *x: cudnn(*x, sight), *given)
        want, pull_plain = jax.vjp(lambda *x: plain(*x, whole), *given)
        return (got, *pull(got)), (want, *pull_plain(got))

    for a, b in zip(*both(*given), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_plan_reads_prompt_once_per_row():
    parts, tokens, _ = problem()
    packed = pack_branches(parts, 26, LAYOUT, (9, 13))
    assert packed.shapes == {(2, 13), (2, 9)}
    prompts = sum(int((b.segment_ids[:, :5] > 0).sum()) for b in packed.micro_batches)
    # Ten tokens in blocks of four are three blocks: a row of two and one of one.
    assert prompts == 5 + 5 + 2 + 0
    for batch, placed in zip(packed.micro_batches, packed.place(tokens), strict=True):
        live = batch.segment_ids > 0
        for token, i, place in zip(
            placed[live], batch.sequence[live], batch.positions[live], strict=True
        ):
            assert token == tokens[i][place]
    rest = sum(int((b.segment_ids[:, 5:] > 0).sum()) for b in packed.micro_batches)
    assert rest == (parts.lengths - parts.shared).sum()
    assert 0 < packed.padding < 0.5


@pytest.mark.parametrize(
    ("changes", "sequence", "expected"),
    [
        (
            {"pattern": ("local", "global"), "self_attn.window": 3},
            1,
            "model.pattern=.* windows",
        ),
        ({}, 2, "mesh.sequence=2 is above 1"),
    ],
)
def test_models_that_cannot_share_prompts_are_refused(changes, sequence, expected):
    with pytest.raises(ValueError, match=f"grpo.share_prompts.*{expected}"):
        branches.check(SMALL.replaced(changes), sequence)
