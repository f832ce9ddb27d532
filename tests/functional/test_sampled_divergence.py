"""Sample(k) of divergences: exact values, and gradients with the exact mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem import Sample
from jaxmem.core import column_sampling
from tests.cases import Case, slow
from tests.targets import forward_kl, of_two_heads, reverse_kl

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V, K = 4, 8, 60, 8
KEY = jax.random.key(7)
VERBS = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd": of_two_heads("jsd 0.3"),
}
SOME = {
    "temperature": np.float32([0.5, 1, 2, 1.5]),
    "softcap": 3.0,
    "bias": np.linspace(-0.5, 0.5, V, dtype=np.float32),
    "vocab_size": 50,
    "where": np.array([True, True, False, True]),
}


@functools.cache
def problem(n=N, d=D, v=V):
    h, W, _ = Case(n, d, v, std=1.5).make()
    other_h, other_W, _ = Case(n, d + 4, v, std=1.5).make(seed=3)
    return h, W, other_h, other_W


def loss_of(verb, g, **options):
    def loss(h, W, other_h, other_W):
        made = VERBS[verb](h, W, other_h, other_W, **options)
        return jnp.sum(g * made)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.parametrize(
    "verb, options",
    [
        slow("reverse_kl", {}),
        ("jsd", SOME),
        slow("forward_kl", SOME),
        slow("reverse_kl", SOME),
        slow("forward_kl", {}),
        slow("jsd", {}),
    ],
    ids=[
        "reverse_kl",
        "jsd, some",
        "forward_kl, some",
        "kl, some",
        "forward_kl",
        "jsd",
    ],
)
def test_the_mean_of_draws_is_the_exact_gradient(verb, options):
    h, W, other_h, other_W = problem()
    g, copies = np.linspace(0.5, 1.5, N, dtype=np.float32), 256
    value, (dh, dW) = loss_of(verb, g, **options)(h, W, other_h, other_W)
    many = [np.tile(x, (copies, 1, 1)) for x in (h, other_h)]
    options = options | {"gradient": Sample(K), "key": KEY}
    if "temperature" in options:
        options["temperature"] = np.tile(options["temperature"], (copies, 1))
    values, (drawn, total) = loss_of(verb, g, **options)(many[0], W, many[1], other_W)
    np.testing.assert_allclose(values / copies, value, rtol=1e-5)
    drawn = np.asarray(drawn, np.float64)
    z = (drawn.mean(0) - dh) / np.maximum(drawn.std(0) / copies**0.5, 1e-6)
    assert np.abs(z).max() < 5 and np.mean(z**2) < 2
    assert drawn.std(0)[[0, 1, 3]].min() > 1e-5  # there is something random
    error = np.linalg.norm(np.asarray(total) / copies - dW)
    assert error <= 0.2 * np.linalg.norm(dW)
    if options.get("vocab_size"):
        assert not np.any(drawn[:, 2]) and not np.any(np.asarray(total)[50:])


@pytest.mark.parametrize("verb", ["jsd", slow("reverse_kl"), slow("forward_kl")])
def test_values_are_the_exact_path_s_to_the_bit(verb, optimized):
    operands = problem(50, 16, 300)
    exact = jax.jit(lambda *a: jnp.sum(VERBS[verb](*a, chunk=16)))(*operands)
    drawn = loss_of(verb, 1.0, chunk=16, gradient=Sample(20), key=KEY)(*operands)[0]
    np.testing.assert_array_equal(drawn, exact)


@pytest.mark.parametrize("verb", ["jsd", slow("forward_kl"), slow("reverse_kl")])
def test_with_every_column_kept_the_gradient_is_exact(verb):
    """Two of three columns have a probability of at least 1/K each."""
    W = np.log(np.array([[0.5], [0.3], [0.2]], np.float32))
    other = np.log(np.array([[0.2], [0.3], [0.5]], np.float32))
    ones = np.ones((2, 1), np.float32)
    options = {"vocab_size": 3, "layout": "vd"}
    pad = np.zeros((9, 1), np.float32)  # so that K < V may exceed what is kept
    W, other = np.concatenate([W, pad]), np.concatenate([other, pad])
    want = loss_of(verb, 1.0, **options)(ones, W, ones, other)[1]
    options = options | {
        "vocab_size": 12,
        "bias": np.where(np.arange(12) < 3, 0, -1e9),
        "teacher_bias": np.where(np.arange(12) < 3, 0, -1e9),
    }
    options = {k: np.float32(v) if "bias" in k else v for k, v in options.items()}
    drawn = options | {"gradient": Sample(8), "key": KEY}
    got = loss_of(verb, 1.0, **drawn)(ones, W, ones, other)[1]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# test_xla_sampled tests the same of one head, and test_sampled_blocks of the kernels.
@pytest.mark.slow
def test_neither_chunk_nor_other_tokens_change_what_is_drawn(optimized):
    h, W, other_h, other_W = problem(48, 16, 300)
    keys = column_sampling.token_keys(KEY, (48,))

    def gradients(rows, **options):
        run = loss_of("reverse_kl", 1.0, gradient=Sample(8), **options)
        return run(h[rows], W, other_h[rows], other_W)[1]

    want = gradients(slice(None), key=KEY, chunk=48)
    got = gradients(slice(None), key=keys, chunk=16)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    few = gradients(slice(9, 20), key=keys[9:20])
    np.testing.assert_array_equal(few[0], want[0][9:20])


def test_parallel_draws_what_one_device_draws():
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    h, W, other_h, other_W = problem(6)
    verb = jaxmem.sharding.parallel(jaxmem.divergence, mesh, tokens="t", vocab="v")
    verb = of_two_heads("reverse_kl", verb)

    def gradient(verb):
        def loss(h, W):
            made = verb(h, W, other_h, other_W, gradient=Sample(K), key=KEY)
            return jnp.sum(made)

        return jax.jit(jax.grad(loss, (0, 1)))(h, W)

    for a, b in zip(gradient(verb), gradient(reverse_kl), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options, error, message", [
    (dict(gradient=Sample(60), key=KEY), ValueError, "from 1 to 59.*exact"),
    (dict(gradient=Sample(8)), ValueError, "key must be given with gradient=Sample"),
    (dict(key=KEY), ValueError, "key must not be given without gradient"),
    (dict(gradient=Sample(8), key=3), TypeError, "key must be a PRNG key.*got 3"),
])  # fmt: skip
@pytest.mark.parametrize("verb", VERBS)
def test_bad_arguments_are_refused_by_name(verb, options, error, message):
    with pytest.raises(error, match=message):
        VERBS[verb](*problem(), **options)


def test_the_report_says_that_gradients_are_sampled():
    with jaxmem.report() as calls:
        reverse_kl(*problem(), gradient=Sample(8), key=KEY)
    assert calls.calls[0].gradient_samples == 8


def test_memory_as_documented():
    n, d, v, k, chunk = 256, 32, 8192, 16, 64
    run = loss_of("jsd", 1.0, gradient=Sample(k), key=KEY, chunk=chunk)
    shapes = [(n, d), (v, d), (n, d), (v, d)]
    program = run.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    temp = program.compile().memory_analysis().temp_size_in_bytes
    forward = 20 * chunk * v + 512 * chunk * k
    backward = 24 * n * (k + 1) + 4 * min(2**22, v * d)
    assert 8 * chunk * v < temp < 1.1 * (forward + 8 * n * k + backward) + 2**18
