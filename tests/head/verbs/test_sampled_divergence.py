"""Sample(k) of divergences: exact values, and gradients with the exact mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxmem
from jaxmem import Sample
from tests.helpers.cases import slow
from tests.helpers.sampled_divergence import (
    KEY,
    VERBS,
    K,
    N,
    V,
    check_every_column_kept,
    check_values,
    in_loss,
    loss_of,
    mixture,
    operands_of,
    problem,
    selected,
)
from tests.helpers.targets import (
    loss_of_columns,
    of_columns,
    of_two_heads,
    reverse_kl,
)

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


SOME = {
    "temperature": np.float32([0.5, 1, 2, 1.5]),
    "softcap": 3.0,
    "bias": np.linspace(-0.5, 0.5, V, dtype=np.float32),
    "vocab_size": 50,
    "where": np.array([True, True, False, True]),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "verb, options",
    [
        ("jsd", SOME),
        ("selected of draws", SOME),
        ("loss of jsd, warm", SOME),
        ("loss of draws, warm", SOME),
        slow("loss of columns", SOME),
        slow("reverse_kl", SOME),
        slow("forward_kl of columns", SOME),  # a test of shards has it without options
        slow("jsd of columns", {}),
        slow("forward_kl of draws", SOME),
        slow("topk", SOME),
        slow("loss of forward_kl", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "some" if x else "plain",
)
def test_mean_of_draws_is_exact_gradient(verb, options):
    check_mean(verb, options)


def check_mean(verb, options, drawn_by=None):
    """The exact gradient of a verb, and the mean of draws of it or of another."""
    operands = operands_of(verb)
    g, copies = np.linspace(0.5, 1.5, N, dtype=np.float32), 256
    value, (dh, dW) = loss_of(verb, g, **options)(*operands)

    def repeated(x):  # what each token has, not W
        return np.tile(x, (copies, 1, 1)) if len(x) == N else x

    options = options | {"gradient": Sample(K), "key": KEY}
    if "temperature" in options:
        options["temperature"] = np.tile(options["temperature"], (copies, 1))
    run = loss_of(drawn_by or verb, g, **options)
    values, (drawn, total) = run(*jax.tree.map(repeated, operands))
    np.testing.assert_allclose(values / copies, value, rtol=1e-5)
    drawn = np.asarray(drawn, np.float64)
    z = (drawn.mean(0) - dh) / np.maximum(drawn.std(0) / copies**0.5, 1e-6)
    assert np.abs(z).max() < 5 and np.mean(z**2) < 2
    assert drawn.std(0)[[0, 1, 3]].min() > 1e-5  # there is something random
    error = np.linalg.norm(np.asarray(total) / copies - dW)
    assert error <= 0.2 * np.linalg.norm(dW)
    if options.get("vocab_size"):
        assert not np.any(drawn[:, 2]) and not np.any(np.asarray(total)[50:])


@pytest.mark.slow
def test_values_equal_exact_path_bitwise(optimized):
    check_values()


@pytest.mark.parametrize("verb", ["jsd", "forward_kl"])
@pytest.mark.slow
def test_gradient_exact_with_every_column_kept(verb):
    check_every_column_kept(verb)


@pytest.mark.slow
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


@pytest.mark.parametrize("verb", ["divergence", "loss", "selected"])
@pytest.mark.slow
def test_vocabulary_shards_draw_from_their_parts(verb):
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    split = functools.partial(
        jaxmem.sharding.parallel, mesh=mesh, tokens=PartitionSpec("t"), vocab="v"
    )
    if verb == "divergence":
        made = of_columns("forward_kl", split(jaxmem.divergence))
        check_mean("forward_kl of columns", {}, made)
    elif verb == "loss":
        of = functools.partial(jaxmem.divergence_loss, mixture)
        made = in_loss(loss_of_columns("reverse_kl", mixture, split(of)))
        check_mean("loss of columns", {}, made)
    else:
        of = split(jaxmem.selected_logprobs)
        check_mean("selected of draws", {}, functools.partial(selected, verb=of))


@pytest.mark.parametrize("options, error, message", [
    (dict(gradient=Sample(60), key=KEY), ValueError, "from 1 to 59.*exact"),
    (dict(gradient=Sample(8)), ValueError, "key must be given with gradient=Sample"),
    (dict(key=KEY), ValueError, "key must not be given without gradient"),
    (dict(gradient=Sample(8), key=3), TypeError, "key must be a PRNG key.*got 3"),
])  # fmt: skip
@pytest.mark.parametrize("verb", VERBS)
def test_bad_arguments_are_refused_by_name(verb, options, error, message):
    with pytest.raises(error, match=message):
        VERBS[verb](*operands_of(verb), **options)


def test_report_names_sampled_gradients():
    with jaxmem.report() as calls:
        run = functools.partial(reverse_kl, gradient=Sample(8), key=KEY)
        jax.eval_shape(run, *problem())
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
