"""Sample(k, forward="int8"): logits in 8 bits, corrected by entries that are kept."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import Sample
from jaxmem.head.maths import eight_bits
from jaxmem.head.maths.call_report import TracedCall
from jaxmem.head.maths.column_sampling import token_keys
from tests.helpers import oracle
from tests.helpers.cases import Case, slow
from tests.helpers.described import described
from tests.helpers.programs import compiled

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V, K, VOCABULARY = 4, 48, 300, 16, 290
KEY = jax.random.key(7)
INT8 = Sample(K, forward="int8")
FLOATS = ("logprob", "entropy", "logsumexp", "sum_pi_squared")


def objective(stats, weight):
    smooth = 0.3 * stats.entropy + 0.1 * stats.logsumexp**2 - stats.sum_pi_squared
    told = {"entropy": stats.entropy, "logsumexp": stats.logsumexp}
    return weight * (smooth - stats.logprob), told


@functools.cache
def problem(std=2.0, n=N):
    """In bfloat16, with channels that 8 bits cannot hold beside the others."""
    h, W, y = Case(n, D, V, std=std).make()
    h[:, 3] *= 30
    W[:, 3] /= 30
    W[:, 5] *= 30
    h[:, 5] /= 30
    y = (y % VOCABULARY).astype(np.int32)
    g = np.linspace(0.5, 1.5, n, dtype=np.float32)
    return jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16), y, g


def token_stats(h, W, y, g, **options):
    stats = described(jaxmem.token_stats)(h, W, y, **options)
    return sum(jnp.sum(g * getattr(stats, k)) for k in FLOATS), stats._asdict()


def logprobs(h, W, y, g, **options):
    values = described(jaxmem.logprobs)(h, W, y, **options)
    return jnp.sum(g * values), {"logprob": values}


def token_loss(h, W, y, g, **options):
    g = jnp.broadcast_to(g, y.shape)
    return described(jaxmem.token_loss)(objective, h, W, y, g, normalizer=1, **options)


VERBS = {f.__name__: f for f in (token_stats, logprobs, token_loss)}


@functools.partial(jax.jit, static_argnames=("verb", "copies", "layout"))
def values_and_gradients(verb, keys, copies=1, layout="vd"):
    """(values of the tokens, gradients by hidden and W) of copies of the problem."""
    h, W, y, g = problem()
    h, y, g = (jnp.tile(jnp.asarray(x), (copies,) + (1,) * (x.ndim - 1))
               for x in (h, y, g))  # fmt: skip
    y = y.at[2::N].set(-1)
    h = h.at[2::N].set(jnp.nan)
    given = {"vocab_size": VOCABULARY, "layout": layout}

    def value(h, W):
        W = W if layout == "vd" else W.T
        return VERBS[verb](h, W, y, g, gradient=INT8, key=keys, chunk=64, **given)

    (_, told), slopes = jax.value_and_grad(value, (0, 1), has_aux=True)(h, W)
    return told, slopes


@functools.cache
def exact(verb):
    """Values and gradients in float64."""
    h, W, y, g = problem()
    y = np.where(np.arange(N) == 2, -1, y)
    g = np.float64(g)
    first, _ = oracle.head(h, W, y, {k: 0 * g for k in FLOATS}, vocab_size=VOCABULARY)
    cotangents = {
        "token_stats": dict.fromkeys(FLOATS, g),
        "logprobs": {"logprob": g},
        "token_loss": {"logprob": -g, "entropy": 0.3 * g, "sum_pi_squared": -g,
                       "logsumexp": 0.2 * g * first["logsumexp"]},
    }[verb]  # fmt: skip
    return oracle.head(h, W, y, cotangents, vocab_size=VOCABULARY)


@pytest.mark.full
@pytest.mark.parametrize("verb, layout", [
    ("token_loss", "dv"), ("token_loss", "vd"), ("token_stats", "vd"),
    ("token_stats", "dv"), ("logprobs", "vd"),
])  # fmt: skip
def test_mean_of_draws_exact_to_second_order(verb, layout):
    """The band of 256 draws, and for ratios of sums the square of their deviation."""
    copies, (want, slopes) = 256, exact(verb)
    keys = jax.random.split(KEY, (copies, N))
    told, (many, total) = values_and_gradients(verb, keys.reshape(-1), copies, layout)
    for name in set(told) & set(FLOATS):
        x = np.asarray(told[name], np.float64).reshape(copies, N)
        deviation, error = x.std(0), x.mean(0) - want[name]
        assert np.all(np.abs(error) <= 5 * deviation / copies**0.5 + 3 * deviation**2)
        assert 1e-5 < deviation[[0, 1, 3]].min() and deviation.max() < 0.05
        assert not x[:, 2].any()  # masked
    x = np.asarray(many, np.float64).reshape(copies, N, D)
    z = (x.mean(0) - slopes[0]) / np.maximum(x.std(0) / copies**0.5, 1e-6)
    # 0.4% of a value are the rounding to bfloat16, which each draw repeats.
    rounding = 0.004 * np.abs(slopes[0]) / np.maximum(x.std(0) / copies**0.5, 1e-6)
    assert np.all(np.abs(z) < 5 + rounding) and not x[:, 2].any()
    one = jnp.tile(keys[0], copies)
    few = np.float64(values_and_gradients(verb, one, copies, layout)[1][1]) / copies
    error = np.linalg.norm(np.float64(total) / copies - slopes[1])
    assert error < 0.3 * np.linalg.norm(few - slopes[1])
    assert not np.any(np.asarray(total)[VOCABULARY:])


@pytest.mark.full
def test_reported_error_is_normaliser_deviation():
    copies = 256
    keys = jax.random.split(KEY, (copies, N)).reshape(-1)
    metrics = values_and_gradients("token_loss", keys, copies, "dv")[0]
    metrics = {k: np.float64(v).reshape(copies, N) for k, v in metrics.items()}
    told, found = metrics[eight_bits.ERROR], metrics["logsumexp"].std(0)
    root = np.sqrt(np.mean(told**2, 0))
    assert not told[:, 2].any()
    ratio = root[[0, 1, 3]] / found[[0, 1, 3]]
    assert np.all((0.7 < ratio) & (ratio < 2))


@pytest.mark.parametrize("verb", ["logprobs", "token_loss"])
@pytest.mark.slow
def test_values_independent_of_chunk_and_remat(verb, optimized):
    h, W, y, g = problem(n=48)
    run = functools.partial(VERBS[verb], y=y, g=g, gradient=INT8)
    keys = token_keys(KEY, (48,))

    def value(h, W, key=KEY, chunk=48):
        return run(h, W, key=key, chunk=chunk)

    taken, slopes = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))(h, W)
    other = jax.checkpoint(functools.partial(value, key=keys, chunk=16))
    # The derivative is of the recomputed forward pass; values are of the first one.
    alone, again = jax.jit(jax.value_and_grad(other, (0, 1), has_aux=True))(h, W)
    jax.tree.map(np.testing.assert_array_equal, alone[1], taken[1])
    jax.tree.map(np.testing.assert_array_equal, slopes, again)


@pytest.mark.slow
def test_eight_bits_need_channels_in_16_bits():
    h, W, *_ = problem()
    want = exact("logprobs")[0]["logprob"]
    keys = jax.random.split(KEY, 256 * N)
    told, _ = values_and_gradients("token_stats", keys, 256)
    assert np.abs(told["logprob"][:N] - want).max() < 0.1
    every = eight_bits.rounded(h, jnp.arange(2)), eight_bits.rounded(W, jnp.arange(2))
    z = np.float64(h) @ np.float64(W).T
    low = [np.float64(x.values) * np.float64(x.scale)[:, None] for x in every]
    low = low[0] @ low[1].T + np.float64(h)[:, :2] @ np.float64(W)[:, :2].T
    assert np.sqrt(np.mean((low - z) ** 2)) > 0.2


@pytest.mark.parametrize("n, d, v", [slow(40, 64, 500), (3, 33, 130)])
def test_channels_are_the_largest_of_both(n, d, v):
    h, W, y = Case(n, d, v).make()
    h[:, [1, 9]] *= 20
    W[:, [30, 2]] *= 20
    h[0] = np.nan  # masked
    spec = jaxmem.head.maths.spec.Spec(v, v, 64, (), np.dtype(jnp.bfloat16), "vd")
    active = jnp.arange(n) > 0
    source = eight_bits.Factors(
        jnp.asarray(h, jnp.bfloat16), jnp.asarray(W, jnp.bfloat16), None
    )
    rows = eight_bits.TokenRows(jnp.asarray(y), active, None)
    made = jax.jit(eight_bits.of_call, static_argnums=0)(spec, source, rows)
    channels = list(np.asarray(made.channels))
    assert len(set(channels)) == eight_bits.CHANNELS
    assert {1, 9, 30, 2} <= set(channels)
    assert not np.asarray(made.W.values)[:, [30, 2]].any()
    np.testing.assert_array_equal(
        np.asarray(made.W.wide, np.float32),
        np.asarray(source.W, np.float32)[:, channels],
    )
    rest = np.delete(np.arange(d), [x for x in channels])
    back = np.asarray(made.W.values, np.float64) * np.asarray(made.W.scale)[:, None]
    far = np.abs(back - np.float64(source.W))[:, rest]
    assert np.all(far <= 0.501 * np.asarray(made.W.scale)[:, None])


@pytest.mark.slow
def test_micro_batches_round_W_once():
    """XLA moves what depends on W alone out of the loop."""
    h, W, y, _ = problem(n=64)
    hs, ys = h.reshape(4, 16, D), y.reshape(4, 16)

    def step(W, hs, ys):
        def one(W, h, y, i):
            key = jax.random.fold_in(KEY, i)
            return -jnp.sum(jaxmem.logprobs(h, W, y, gradient=INT8, key=key))

        def add(total, given):
            return total + jax.grad(one)(W, *given), None

        zeros = jnp.zeros(W.shape, jnp.float32)
        return jax.lax.scan(add, zeros, (hs, ys, jnp.arange(4)))[0]

    text = compiled(step, W, hs, ys).as_text()
    loops, entry = text.split("\nENTRY ")
    made = re.compile(rf"= s8\[{V},{D}\]\S* fusion\(")
    assert len(made.findall(entry)) == 1 and not made.search(loops)


@pytest.mark.parametrize("verb", ["logprobs", "token_loss"])
@pytest.mark.slow
def test_memory_as_documented(verb):
    n, d, v, k, chunk = 1024, 32, 8192, 16, 64

    def loss(h, W, y, key):
        options = {"chunk": chunk, "gradient": Sample(k, "int8"), "key": key}
        return VERBS[verb](h, W, y, jnp.ones(y.shape), **options)[0]

    operands = [
        jax.ShapeDtypeStruct((n, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((v, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.eval_shape(lambda: KEY),
    ]
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()
    temp = program.memory_analysis().temp_size_in_bytes
    forward = 4 * chunk * v * (2 + 2 / 16) + 512 * chunk * k
    copy = eight_bits.copy_bytes(v, d)
    assert temp < 1.1 * (forward + 4 * v * d + copy + 12 * n * k + 24 * n * (k + 1))
    assert temp > 4 * chunk * v + copy


SOFTCAP = jaxmem.Head(problem()[1], softcap=30.0)
BIAS = jaxmem.Head(problem()[1], bias=jnp.zeros(V))


@pytest.mark.parametrize("change, message", [
    (dict(W=BIAS), "a head without bias"),
    (dict(W=SOFTCAP), "a head without softcap"),
    (dict(temperature=0.5), "temperature=1.0"),
    (dict(h=problem()[0].astype(jnp.float32)), "bfloat16 hidden.*is float32"),
    (dict(h=problem()[0].astype(jnp.float16)), "bfloat16 hidden.*is float16"),
    (dict(h=problem()[0][:, :31], W=problem()[1][:, :31]), "32 channels.*D=31"),
    (dict(vocab_groups=2), "vocab_groups cannot be combined"),
    (dict(implementation="hopper"), "hopper"),
])  # fmt: skip
def test_unsupported_options_are_named(change, message):
    h, W, y, _ = problem()
    options = {"h": h, "W": W} | change
    h, W = options.pop("h"), options.pop("W")
    with pytest.raises(NotImplementedError, match=message):
        jaxmem.logprobs(h, W, y, gradient=INT8, key=KEY, **options)


def test_divergence_and_split_vocabulary_refused():
    h, W, y, _ = problem()
    target = jaxmem.ReverseKL(jaxmem.Teacher(h, W))
    with pytest.raises(NotImplementedError, match="forward='exact'"):
        jaxmem.divergence(h, W, target, gradient=INT8, key=KEY)
    with pytest.raises(NotImplementedError, match="forward='exact'"):
        jaxmem.topk(h, W, 2, gradient=INT8, key=KEY)
    mesh = jax.make_mesh((2,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jaxmem.sharding.parallel(jaxmem.logprobs, mesh, vocab="v")
    with pytest.raises(NotImplementedError, match="the whole vocabulary"):
        split(h, W, y, gradient=INT8, key=KEY)


@pytest.mark.slow
def test_over_devices_that_share_the_tokens():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    stats, want = exact("token_loss")
    h, W, y, g = problem()
    each = 0.3 * stats["entropy"] + 0.1 * stats["logsumexp"] ** 2
    each = g * (each - stats["sum_pi_squared"] - stats["logprob"])
    y = np.where(np.arange(N) == 2, -1, y)
    h, y, g = (np.tile(x, (200,) + (1,) * (x.ndim - 1)) for x in (h, y, g))
    public = jaxmem.sharding.parallel(jaxmem.token_loss, mesh, tokens="t")

    def loss(h, W):
        W, options = jaxmem.Head(W, vocab_size=VOCABULARY), {"normalizer": 1}
        return public(objective, h, W, y, g, gradient=INT8, key=KEY, **options)[0]

    value, got = jax.jit(jax.value_and_grad(loss, (0, 1)))(h, W)
    assert 0 < abs(value / 200 - each.sum()) < 2e-3 * abs(each.sum())
    means = np.float64(got[0]).reshape(200, N, D).mean(0), np.float64(got[1]) / 200
    for mean, exact_one in zip(means, want, strict=False):
        far = np.linalg.norm(mean - exact_one)
        assert far < 0.1 * np.linalg.norm(exact_one)


@pytest.mark.parametrize("forward", ["int4", None, 8])
def test_unknown_forward_is_refused(forward):
    with pytest.raises(
        ValueError, match="Sample.forward must be one of 'exact', 'int8'"
    ):
        Sample(8, forward=forward)


def test_metric_named_as_the_error_is_refused():
    h, W, y, _ = problem()

    def loss_fn(stats):
        return -stats.logprob, {eight_bits.ERROR: stats.entropy}

    with pytest.raises(ValueError, match="forward_error"):
        jaxmem.token_loss(loss_fn, h, W, y, gradient=INT8, key=KEY)


def test_no_tokens_have_no_error():
    h, W, y, _ = problem()
    loss, told = jaxmem.token_loss(
        objective, h[:0], W, y[:0], y[:0].astype(np.float32), gradient=INT8, key=KEY
    )
    assert loss == 0 and set(told) == {"entropy", "logsumexp", eight_bits.ERROR}
    assert told[eight_bits.ERROR].shape == (0,)


def test_report_names_logits_in_8_bits():
    h, W, y, _ = problem()
    with jaxmem.report() as calls:
        run = functools.partial(jaxmem.logprobs, gradient=INT8, key=KEY)
        jax.eval_shape(run, h, W, y)
    assert "16 entries a token, logits in int8" in str(calls.calls[0])


@pytest.mark.parametrize(
    ("tokens", "channels", "is_small"),
    [(1024, 4096, True), (1025, 4096, False), (4096, 640, True), (4096, 641, False)],
)
def test_report_names_calls_that_8_bits_slow_down(tokens, channels, is_small):
    shapes = {"hidden": (2, tokens // 2, channels), "W": (9, channels)}
    if tokens % 2:
        shapes["hidden"] = (tokens, channels)
    call = TracedCall("logprobs", shapes, "xla", "", 64, 0, 16, "int8")
    said = "logits in int8, which take longer than exact ones for at most 1,024 tokens"
    assert (said in str(call)) == is_small
    exact = dataclasses.replace(call, forward="exact")
    assert "longer" not in str(exact)
