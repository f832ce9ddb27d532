"""gradient=Sample(k): exact results, and gradients whose mean is the exact gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem import Sample
from jaxmem.planning import collectives
from tests.helpers.cases import Case, slow
from tests.helpers.described import described

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V, K = 4, 8, 60, 8
KEY = jax.random.key(7)


def objective(stats, weight):
    smooth = 0.3 * stats.entropy + 0.1 * stats.logsumexp**2 - stats.sum_pi_squared
    return weight * (smooth - stats.logprob), {"entropy": stats.entropy}


def logprobs(h, W, y, g, **options):
    return jnp.sum(g * described(jaxmem.logprobs)(h, W, y, **options))


def entropy(h, W, y, g, **options):
    return jnp.sum(g * described(jaxmem.entropy)(h, W, **options))


def token_stats(h, W, y, g, **options):
    return jnp.sum(objective(described(jaxmem.token_stats)(h, W, y, **options), g)[0])


def token_loss(h, W, y, g, **options):
    g = jnp.broadcast_to(g, y.shape)
    return described(jaxmem.token_loss)(objective, h, W, y, g, normalizer=1, **options)[
        0
    ]


VERBS = {f.__name__: f for f in (logprobs, entropy, token_stats, token_loss)}
SOME = {
    "temperature": np.float32([0.5, 1, 2, 1.5]),
    "softcap": 3.0,
    "bias": np.linspace(-0.5, 0.5, V, dtype=np.float32),
    "vocab_size": 50,
    "where": np.array([True, True, False, True]),
}
OPTIONS = {
    "plain": {}, "some": SOME, "dv": {**SOME, "layout": "dv"}, "frozen": {},
}  # fmt: skip


@functools.cache
def problem(std=1.5, n=N):
    h, W, y = Case(n, D, V, std=std).make()
    g = np.linspace(0.5, 1.5, n, dtype=np.float32)
    return h, W, (y % 50).astype(np.int32), g


@functools.partial(
    jax.jit, static_argnames=("verb", "copies", "names", "facts", "frozen")
)
def gradients(verb, copies, names, facts, arrays, keys, frozen):
    """Value and gradients by hidden and W of so many copies of the problem."""
    h, W, y, g = map(jnp.asarray, problem())
    options = dict(facts) | dict(zip(names, arrays, strict=True))
    if copies:
        h, y = (jnp.tile(x, (copies,) + (1,) * x.ndim) for x in (h, y))
        if "temperature" in options:
            options["temperature"] = jnp.broadcast_to(options["temperature"], y.shape)
    if options.get("layout") == "dv":
        W = W.T
    if keys is not None:
        options |= {"gradient": Sample(K), "key": keys}

    def value(h, W):
        W = jax.lax.stop_gradient(W) if frozen else W
        return VERBS[verb](h, W, y, g, chunk=64, **options)

    return jax.value_and_grad(value, (0, 1))(h, W)


def run(verb, name, copies=0, keys=None):
    options = OPTIONS[name]
    names = tuple(k for k in options if isinstance(options[k], np.ndarray))
    facts = tuple((k, v) for k, v in options.items() if k not in names)
    arrays = [options[k] for k in names]
    return gradients(verb, copies, names, facts, arrays, keys, name == "frozen")


# test_xla_sampled tests the same of each statistic.
@pytest.mark.parametrize("verb, name", [
    ("token_loss", "dv"), slow("token_loss", "frozen"), slow("token_stats", "plain"),
    slow("entropy", "some"), slow("logprobs", "dv"),
])  # fmt: skip
def test_mean_of_draws_is_exact_gradient(verb, name):
    copies = 256
    value, (dh, dW) = run(verb, name)
    keys = jax.random.split(KEY, (copies, N))
    values, (many, total) = run(verb, name, copies, keys)
    np.testing.assert_allclose(values / copies, value, rtol=1e-5)
    many = np.asarray(many, np.float64)
    deviation = many.std(0) / copies**0.5
    z = (many.mean(0) - dh) / np.maximum(deviation, 1e-6)
    assert np.abs(z).max() < 5 and np.mean(z**2) < 2
    assert many.std(0)[[0, 1, 3]].min() > 1e-4  # there is something random
    eight = jnp.tile(keys[:8], (copies // 8, 1))
    few = np.asarray(run(verb, name, copies, eight)[1][1]) / copies - dW
    error = np.linalg.norm(np.asarray(total) / copies - dW)
    assert error <= 0.3 * np.linalg.norm(few)  # 1/5.7 is expected
    if name == "frozen":
        assert not np.any(total)
    if name == "dv" or name == "some":
        assert not np.any(many[:, 2])  # masked
        off = np.asarray(total).T if name == "dv" else total
        assert not np.any(off[50:])


@pytest.mark.parametrize("verb", ["token_loss", "logprobs"])
@pytest.mark.slow
def test_results_are_the_exact_path_s_to_the_bit(verb, optimized):
    h, W, y = Case(50, 16, 300, std=2.0).make()
    y[::7] = -1
    g = np.linspace(0, 1, 50, dtype=np.float32)

    f = functools.partial(VERBS[verb], y=y, g=g, chunk=16)
    drawn = functools.partial(f, gradient=Sample(20), key=KEY)
    exact = jax.jit(f)(h, W)
    np.testing.assert_array_equal(jax.jit(drawn)(h, W), exact)
    np.testing.assert_array_equal(jax.jit(jax.value_and_grad(drawn))(h, W)[0], exact)


@pytest.mark.slow
def test_keys_share_a_program_and_old_kind_agrees():
    h, W, y, _ = problem()
    f = jax.jit(jax.grad(
        lambda h, key: jnp.sum(jaxmem.logprobs(h, W, y, gradient=Sample(8), key=key))
    ))  # fmt: skip
    made = [f(h, key) for key in (KEY, *jax.random.split(KEY, 2))]
    assert f._cache_size() == 1 and np.any(np.asarray(made[0]) != made[1])
    np.testing.assert_array_equal(f(h, jax.random.PRNGKey(7)), made[0])


@pytest.mark.parametrize("verb, tokens, vocab", [
    ("token_loss", "t", "v"), ("logprobs", "t", "v"), ("token_loss", "t", None),
    ("token_loss", None, "v"),
])  # fmt: skip
@pytest.mark.slow
def test_over_a_mesh(verb, tokens, vocab):
    """However tokens are split, the same draws; parts of a vocabulary draw their own.

    There is more than one token in a hundred copies that no device's part divides.
    """
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    h, W, y, g = problem(n=5)
    h, y, g = (np.tile(x, (40,) + (1,) * (x.ndim - 1)) for x in (h, y, g))

    def gradient(split, **options):
        public = getattr(jaxmem, verb)
        if split:
            public = jaxmem.sharding.parallel(public, mesh, tokens=tokens, vocab=vocab)

        def loss(h, W):
            if verb == "logprobs":
                return jnp.sum(g * public(h, W, y, **options))
            return public(objective, h, W, y, g, normalizer=1, **options)[0]

        return jax.jit(jax.grad(loss, (0, 1)))(h, W)

    samples = {"gradient": Sample(K), "key": KEY}
    got, exact = gradient(True, **samples), gradient(False)
    if vocab is None:
        alone = gradient(False, **samples)
        for a, b in zip(got, alone, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, exact, strict=True):
        error = np.asarray(a - b).reshape(-1, 5, D).mean(0)  # of copies, or of rows
        assert 1e-4 < np.abs(error).max() < 0.35 * np.abs(b).max()


@pytest.mark.parametrize("options, error, message", [
    (dict(gradient=Sample(60), key=KEY), ValueError, "from 1 to 59.*exact.*"),
    (dict(gradient=Sample(50), key=KEY, vocab_size=50), ValueError, "from 1 to 49"),
    (dict(gradient=Sample(8)), ValueError, "key must be given with gradient=Sample"),
    (dict(key=KEY), ValueError, "key must not be given without gradient"),
    (dict(gradient=Sample(8), key=3), TypeError, "key must be a PRNG key.*got 3"),
    (dict(gradient=Sample(8), key=np.ones(4)), TypeError, "PRNG key.*got float"),
    (dict(gradient=Sample(8), key=jax.random.split(KEY, 3)), ValueError, r"\[4\].*\[3"),
])  # fmt: skip
def test_bad_arguments_are_refused_by_name(options, error, message):
    h, W, y, _ = problem()
    with pytest.raises(error, match=message):
        described(jaxmem.logprobs)(h, W, y, **options)


def test_second_derivative_and_forward_mode_refused():
    h, W, y, _ = problem()

    def f(h):
        return jnp.sum(jaxmem.logprobs(h, W, y, gradient=Sample(8), key=KEY))

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda h: jnp.sum(jax.grad(f)(h) ** 2))(h)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (jnp.asarray(h),), (jnp.asarray(h),))


def test_report_names_sampled_gradients():
    h, W, y, _ = problem()
    with jaxmem.report() as calls:
        jax.eval_shape(jaxmem.logprobs, h, W, y)
        drawn = functools.partial(jaxmem.logprobs, gradient=Sample(8), key=KEY)
        jax.eval_shape(drawn, h, W, y)
    exact, drawn = calls.calls
    assert (exact.gradient_samples, drawn.gradient_samples) == (None, 8)
    assert "sampled" not in str(exact)
    assert "gradients sampled: 8 entries a token" in str(drawn)


@pytest.mark.parametrize(
    "verb, n",
    [("logprobs", 256), ("logprobs", 1024), ("entropy", 256), ("token_loss", 256)],
)
@pytest.mark.slow
def test_memory_as_documented(verb, n):
    d, v, k, chunk = 32, 8192, 16, 64

    def loss(h, W, y, key):
        g = jnp.ones(y.shape)
        options = {"chunk": chunk, "gradient": Sample(k), "key": key}
        return VERBS[verb](h, W, y, g, **options)

    operands = [
        jax.ShapeDtypeStruct((n, d), jnp.float32),
        jax.ShapeDtypeStruct((v, d), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.eval_shape(lambda: KEY),
    ]
    program = jax.jit(jax.grad(loss, (0, 1))).lower(*operands).compile()
    temp = program.memory_analysis().temp_size_in_bytes
    held = 1 if verb == "logprobs" else 3
    forward = 4 * chunk * v * (held + 2 / 16) + 512 * chunk * k
    entries, backward = 8 * n * k, 24 * n * (k + 1) + 4 * min(2**22, v * d)
    assert temp < 1.1 * (forward + entries + backward) + 2**18
    assert temp > 4 * chunk * v


@pytest.mark.full
@pytest.mark.parametrize(
    "vocab, layout, n", [("v", "dv", 5), (None, "dv", 5), (None, "vd", 4)]
)
def test_few_tokens_on_mesh_send_parts_of_dw(vocab, layout, n):
    """As without a mesh of tokens, with no all-reduce of the gradient."""
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    h, W, y, g = problem(n=n)
    W, bias = (W.T if layout == "dv" else W), np.float32(SOME["bias"])
    where = np.arange(n) != 1

    def program(tokens):
        verb = jaxmem.sharding.parallel(
            jaxmem.logprobs, mesh, tokens=tokens, vocab=vocab
        )

        def loss(h, W, bias):
            head = jaxmem.Head(W, bias, vocab_size=50, layout=layout)
            made = verb(h, head, y, where=where, gradient=Sample(K), key=KEY)
            return jnp.sum(g * made)

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(h, W, bias).compile()

    split = program("t")
    for a, b in zip(split(h, W, bias), program(None)(h, W, bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    sent = [(c.kind, c.payload) for c in collectives.of(split)]
    whole = 4 * W.size // (1 if vocab is None else 2)
    assert ("all-gather", whole) in sent
    assert all(size < whole for kind, size in sent if kind == "all-reduce")
