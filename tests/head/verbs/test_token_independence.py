"""A loss of each token that would read other tokens is refused before it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jaxmem
from jaxmem.heads.linen import LMHead as LinenHead
from jaxmem.heads.nnx import LMHead

CHUNK, D, V, K = 16, 16, 16, 5  # all equal, as they are by chance
RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((32, D)).astype(np.float32)
HEAD = jaxmem.Head(RNG.standard_normal((V, D)).astype(np.float32), layout="vd")
LABELS = RNG.integers(V, size=32)
ROWS = RNG.standard_normal((32, K)).astype(np.float32)
IDS = RNG.integers(K, size=32)
ADVANTAGES, ALL = jnp.arange(16.0), jnp.arange(32.0)
TABLE, SCALE = jnp.linspace(0.5, 1.0, V), np.float32(2.0)
CLOSES = (
    r"^loss_fn must take any number of tokens, but takes 16 only: it closes over an "
    r"array, float32\[16\], whose entries do not belong to the tokens in a chunk; pass "
    r"a per-token array as an argument, as in token_loss\(loss_fn, hidden, W, labels, "
    r"array\)"
)
COMBINES = "combines the tokens of a chunk, by "
POSITION = "depends on a token's position in its chunk, by "
NUMBER = "depends on the number of tokens in a chunk, by a number that is "


def closing(stats, *_):
    return -ADVANTAGES * stats.logprob


def token_loss(loss_fn):
    return jaxmem.token_loss(loss_fn, HIDDEN, HEAD, LABELS, ROWS, IDS, chunk=CHUNK)


def traced(loss_fn):
    """Trace a call, which computes nothing."""
    jax.eval_shape(lambda: token_loss(loss_fn))


@pytest.mark.parametrize(("loss_fn", "message"), [
    (closing, CLOSES),
    (lambda s, *_: s.logprob * np.ones(CHUNK, np.float32), CLOSES),
    (lambda s, *_: (s.logprob, {"a": s.logprob + ADVANTAGES}), CLOSES),
    (lambda s, x, i: s.logprob + (x * ADVANTAGES[:, None])[:, 0], CLOSES),
    (lambda s, *_: jax.jit(lambda x: x * ADVANTAGES)(s.logprob), CLOSES),
    (lambda s, *_: s.logprob.reshape(2, 8).cumsum(1).reshape(-1),
     "takes 16 only: for another number it raises TypeError.'cannot reshape"),
    (lambda s, *_: s.logprob * ALL[: len(s.logprob)], POSITION + "slice of"),
    (lambda s, *_: s.logprob * ALL[jnp.arange(len(s.logprob))], POSITION + "iota"),
    (lambda s, *_: s.logprob * np.arange(len(s.logprob)), POSITION + "an array"),
    (lambda s, *_: jnp.where(jnp.arange(len(s[0])) < 3, 0, s[0]), POSITION + "iota"),
    (lambda s, *_: s[0] + jax.random.normal(jax.random.key(0), s[0].shape),
     POSITION + "random_bits"),
    (lambda s, *_: s.logprob / len(s.logprob), NUMBER + "17.0 for 17 tokens;"),
    (lambda s, *_: s.logprob / s.logprob.shape[0], NUMBER),
    (lambda s, *_: s.logprob - s.logprob.mean(), COMBINES + r"reduce_sum of float32.C"),
    (lambda s, *_: (s.logprob, {"a": s.entropy.max() + s.entropy}), COMBINES),
    (lambda s, *_: jnp.cumsum(s.logprob), COMBINES + "cumsum"),
    (lambda s, *_: jnp.roll(s.logprob, 1), COMBINES + "slice"),
    (lambda s, x, i: s[0] + lax.map(lambda row: row @ row, x, batch_size=4),
     COMBINES + "slice of .*; jax.lax.map over tokens with a batch_size looks the "
     "same to this check: leave batch_size out, or use jax.vmap; compute"),
    (lambda s, *_: s.logprob * jnp.tile(TABLE[:2], len(s[0])).reshape(2, -1)[0],
     POSITION + "tile"),
    (lambda s, *_: s.logprob[::-1], COMBINES + "rev"),
    (lambda s, *_: jnp.sort(s.logprob), COMBINES + "sort"),
    (lambda s, x, i: s.logprob[i], COMBINES + "gather"),
    (lambda s, *_: s.logprob.at[0].set(0.0), COMBINES + "scatter"),
    (lambda s, x, i: s.logprob + (x @ x.T).sum(1), COMBINES + r".*\[C, C\]"),
    (lambda s, *_: lax.scan(lambda c, x: (c + x, c), 0.0, s[0])[1],
     COMBINES + "a scan"),
], ids=lambda x: "")  # fmt: skip
def test_loss_of_other_tokens_is_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        traced(loss_fn)


@pytest.mark.parametrize("loss_fn", [
    lambda s, *_: -SCALE * s.logprob * jnp.float32(3) + np.ones(1, np.float32),
    lambda s, x, i: s.logprob * TABLE[i] + jnp.take(TABLE, i),
    lambda s, x, i: s.logprob * (jax.nn.one_hot(i, V) @ TABLE),
    lambda s, x, i: s.logprob + jax.nn.log_softmax(x)[jnp.arange(len(i)), i],
    lambda s, x, i: s.logprob + x[np.arange(len(i)), i],
    lambda s, x, i: s.logprob + jnp.take_along_axis(x, i[:, None], axis=1)[:, 0],
    lambda s, x, i: s.logprob + x.at[jnp.arange(len(i)), i].set(0.0).sum(1),
    lambda s, x, i: s.logprob + jnp.cumsum(jnp.sort(x), axis=1)[:, ::-1].max(1),
    lambda s, x, i: s.logprob + lax.fori_loop(0, K, lambda k, a: a + x[:, k], s[1]),
    lambda s, x, i: s.logprob + lax.map(lambda row: row @ row, x),
    lambda s, x, i: jax.vmap(lambda a, b, c: a + b[c])(s.logprob, x, i),
    lambda s, x, i: s.logprob + TABLE[i[:, None] + jnp.arange(3)].reshape(-1, 3).sum(1),
    lambda s, x, i: jnp.where(s.is_argmax, jnp.zeros(len(i)), jnp.full_like(s[0], 2.0)),
    lambda s, *_: s.logprob * np.ones(len(s.logprob), np.float32),
    lambda s, *_: s.logprob * jnp.tile(TABLE[:1], len(s[0])) + jnp.empty(len(s[0])),
    lambda s, *_: lax.while_loop(  # until all tokens have converged
        lambda x: (x[0] < s.entropy).any(),
        lambda x: (x[0] + 1, jnp.where(x[0] < s.entropy, 2 * x[1], x[1])),
        (jnp.zeros_like(s.entropy), jnp.ones_like(s.entropy)))[1],
    lambda s, *_: jax.vmap(  # the same, of one token
        lambda a: lax.while_loop(lambda x: x[0] < a, lambda x: (x[0] + 1, 2 * x[1]),
                                 (0.0, 1.0))[1])(s.entropy),
    lambda s, *_: lax.cond(TABLE[0] > 0, lambda a: a, jnp.negative, s.logprob),
    jax.checkpoint(lambda s, x, i: s.logprob * TABLE[0] + jax.nn.relu(x).sum(-1)),
    lambda s, *_: (jax.debug.print("{}", s.logprob.mean()), s.logprob)[1],
], ids=lambda x: "")  # fmt: skip
def test_loss_of_each_token_alone_passes(loss_fn):
    traced(loss_fn)


@pytest.mark.parametrize("wrap", [
    jax.jit, jax.grad,
    lambda f: lambda h: lax.scan(lambda c, x: (c, f(x)), 0, h[None])[1],
    lambda f: lambda h: jax.vmap(f)(h[None]),
    lambda f: lambda h: jax.vmap(f, in_axes=None, axis_size=2)(h),
    jax.checkpoint,
], ids=["jit", "grad", "scan", "vmap", "vmap of nothing", "checkpoint"])  # fmt: skip
def test_closed_over_array_refused_when_transformed(wrap):
    def run(h):
        per_token = h[:16, 0]  # traced
        return jaxmem.token_loss(
            lambda s: per_token * s.logprob, h, HEAD, LABELS, chunk=CHUNK
        )[0]

    with pytest.raises(ValueError, match=CLOSES):
        jax.eval_shape(wrap(run), HIDDEN)


def test_closure_refused_with_mask_and_one_chunk():
    with pytest.raises(ValueError, match=CLOSES):
        jaxmem.token_loss(
            lambda s: ADVANTAGES * s[0], HIDDEN[:16], HEAD, LABELS[:16],
            where=np.arange(16) > 3,
        )  # fmt: skip


def test_divergence_loss_refuses_a_closed_array():
    target = jaxmem.ForwardKL(jaxmem.Teacher(HIDDEN, HEAD))
    with pytest.raises(ValueError, match=CLOSES):
        jaxmem.divergence_loss(
            lambda s, d: ADVANTAGES * d, HIDDEN, HEAD, LABELS, target, chunk=CHUNK
        )


def test_heads_refuse_a_closed_array():
    head = LMHead(D, V, rngs=nnx.Rngs(0), chunk=CHUNK)
    target = jaxmem.ForwardKL(head.teacher(HIDDEN))
    linen = LinenHead(features=V, chunk=CHUNK)
    variables = jax.eval_shape(linen.init, jax.random.key(0), HIDDEN)
    calls = (
        lambda: head.token_loss(closing, HIDDEN, LABELS),
        lambda: head.divergence_loss(closing, HIDDEN, LABELS, target),
        lambda: jax.eval_shape(
            lambda v: linen.apply(v, closing, HIDDEN, LABELS, method="token_loss"),
            variables,
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match=CLOSES):
            call()


def test_parallel_refuses_a_closed_global_array():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    verb = jaxmem.sharding.parallel(
        functools.partial(jaxmem.token_loss, closing), mesh, tokens="data"
    )
    with pytest.raises(ValueError, match=CLOSES):
        verb(HIDDEN[:16], HEAD, LABELS[:16])  # 8 tokens on each device, padded to 16

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def run(h):
        closed = h[:, 0]
        loss, _ = jaxmem.token_loss(
            lambda s: closed * s.logprob, h, HEAD, LABELS[:16], normalizer=1
        )
        return lax.psum(loss, "data")

    with pytest.raises(ValueError, match=CLOSES):
        jax.eval_shape(run, HIDDEN)
