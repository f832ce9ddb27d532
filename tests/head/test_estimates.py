"""Sample(k) of every function that takes it: exact values, gradients without bias."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxmem
from jaxmem import Sample
from jaxmem.planning import collectives
from tests.helpers import crossing, functions
from tests.helpers.cases import Case, full, slow
from tests.helpers.crossing import Setting, problem
from tests.helpers.estimates import (
    KEY,
    SAMPLED,
    SETTING,
    check_every_column_kept,
    check_mean,
    check_results,
)
from tests.helpers.functions import FUNCTIONS, N
from tests.helpers.meshes import OnMesh

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

FIRSTS = functions.each_once(SAMPLED)


def later(case):
    """One tier below: the quick case in `.ci/run`, others once a day."""
    return full(case) if isinstance(case, str) else slow(*case.values)


@pytest.mark.parametrize("name", [x if x == "token_loss" else later(x) for x in FIRSTS])
def test_mean_of_draws_is_exact_gradient(name):
    check_mean(name)


@pytest.mark.parametrize("name", ["logprobs", full("divergence ReverseKL teacher")])
def test_each_token_has_draws_of_its_own(name):
    """Tokens that are alike have other gradients, whose errors average out."""
    p = problem(dataclasses.replace(SETTING, mask="none"))
    one = p["labels"].argmax()
    p = {k: np.resize(x[one], x.shape) if len(x) == N else x for k, x in p.items()}
    _, gradients = crossing.run(jaxmem, name, SETTING, ("hidden",), p)
    rows = gradients["hidden"] / functions.cotangents(np.zeros(N, "f"))[:, None]
    assert len(np.unique(np.round(rows, 4), axis=0)) > N / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "token_loss", "selected_logprobs", "divergence ReverseKL teacher",
    "divergence ForwardKL columns", "divergence_loss JSD columns",
])  # fmt: skip
def test_mean_over_parts_of_the_vocabulary(name):
    """Each device draws from its own part."""
    check_mean(name, dataclasses.replace(SETTING, columns=37), OnMesh("2x4"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_same_draws_however_tokens_are_split(name):
    """On five devices' tokens, of which one more is padding, as on one."""
    setting = dataclasses.replace(SETTING, tokens=(5,))
    trained, p = crossing.trained_of(name, setting), problem(setting)
    split = OnMesh("2x4", changes=(("vocab", None),))
    results = [crossing.run(x, name, setting, trained, p) for x in (split, jaxmem)]
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_results_are_those_without_samples_to_the_bit(name, optimized):
    check_results(name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jaxmem.JSD, jaxmem.ForwardKL])
def test_gradient_is_exact_with_every_column_kept(kind):
    check_every_column_kept(kind)


@pytest.mark.slow
def test_keys_share_a_program_and_old_kind_agrees():
    p = problem(SETTING)

    @jax.jit
    def run(key):
        trained = "hidden", "W", "bias"
        return crossing.run(jaxmem, "logprobs", SETTING, trained, p | {"key": key})

    first, second, again = map(run, (KEY, jax.random.key(8), jax.random.PRNGKey(7)))
    assert np.any(first[1]["hidden"] != second[1]["hidden"])
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert run._cache_size() == 2  # of each kind of key


@pytest.mark.parametrize("options, error, message", [
    (dict(gradient=Sample(40), key=KEY), ValueError, "from 1 to 39.*exact"),
    (dict(gradient=Sample(8)), ValueError, "key must be given with gradient=Sample"),
    (dict(key=KEY), ValueError, "key must not be given without gradient"),
    (dict(gradient=Sample(8), key=3), TypeError, "key must be a PRNG key.*got 3"),
    (dict(gradient=Sample(8), key=np.ones(4)), TypeError, "PRNG key.*got float"),
    (dict(gradient=Sample(8), key=jax.random.split(KEY, 3)), ValueError, "got.*3"),
])  # fmt: skip
@pytest.mark.parametrize("name", [x for x in FIRSTS if isinstance(x, str)])
def test_bad_arguments_are_refused_by_name(name, options, error, message):
    p = problem(Setting(mask="none", bias=False)) | {"vocab_size": None}
    head = jaxmem.Head(p["W"], layout="vd")
    with pytest.raises(error, match=message):
        FUNCTIONS[name].call(jaxmem, p, head, options)


def test_sample_of_padded_vocabulary_is_below_its_size():
    head = jaxmem.Head(np.ones((40, 8), np.float32), vocab_size=35)
    with pytest.raises(ValueError, match="from 1 to 34"):
        jaxmem.entropy(np.ones((2, 8), np.float32), head, gradient=Sample(35), key=KEY)


@pytest.mark.parametrize("name", [x for x in FIRSTS if isinstance(x, str)])
def test_report_names_sampled_gradients(name):
    p = problem(Setting(mask="none", bias=False)) | {"vocab_size": None}
    head = jaxmem.Head(p["W"], layout="vd")

    def run(hidden, **options):
        return FUNCTIONS[name].call(jaxmem, p | {"hidden": hidden}, head, options)

    with jaxmem.report() as calls:
        jax.eval_shape(run, p["hidden"])
        jax.eval_shape(functools.partial(run, gradient=Sample(8), key=KEY), p["hidden"])
    exact, drawn = calls.calls
    assert (exact.gradient_samples, drawn.gradient_samples) == (None, 8)
    assert "sampled" not in str(exact)
    assert "gradients sampled: 8 entries a token" in str(drawn)


@pytest.mark.full
@pytest.mark.parametrize(
    "vocab, layout, n", [("v", "dv", 5), (None, "dv", 5), (None, "vd", 4)]
)
def test_few_tokens_on_mesh_send_parts_of_dw(vocab, layout, n):
    """As without a mesh of tokens, with no all-reduce of the gradient."""
    mesh = jax.make_mesh((2, 2), ("t", "v"), axis_types=(AxisType.Auto,) * 2)
    h, W, y = Case(n, 8, 60, std=1.5).make()
    W, bias = (W.T if layout == "dv" else W), np.linspace(-0.5, 0.5, 60, dtype="f")
    g, where = np.linspace(0.5, 1.5, n, dtype=np.float32), np.arange(n) != 1

    def program(tokens):
        verb = jaxmem.sharding.parallel(
            jaxmem.logprobs, mesh, tokens=tokens, vocab=vocab
        )

        def loss(h, W, bias):
            head = jaxmem.Head(W, bias, vocab_size=50, layout=layout)
            got = verb(h, head, y % 50, where=where, gradient=Sample(8), key=KEY)
            return jnp.sum(g * got)

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(h, W, bias).compile()

    split = program("t")
    for a, b in zip(split(h, W, bias), program(None)(h, W, bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    sent = [(c.kind, c.payload) for c in collectives.of(split)]
    whole = 4 * W.size // (1 if vocab is None else 2)
    assert ("all-gather", whole) in sent
    assert all(size < whole for kind, size in sent if kind == "all-reduce")
