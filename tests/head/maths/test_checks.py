"""Every error that a user can see from the public verbs, word for word."""

import functools
import inspect
import traceback
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.maths import checks
from tests.helpers.argument_errors import (
    ERRORS,
    GOOD,
    HIDDEN,
    LABELS,
    D,
    N,
    Traced,
    V,
)
from tests.helpers.cases import full, slow
from tests.helpers.described import described

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")


WITH_LABELS = sorted(GOOD.keys() - {"entropy"})


def call(verb, **changes):
    function = getattr(jaxmem, verb)
    function = function if "logits" in GOOD[verb] else described(function)
    return function(**(GOOD[verb] | changes))


def _parameters(verb):
    return set(inspect.signature(getattr(jaxmem, verb)).parameters)


def _cases():
    for number, (changes, exception, message) in enumerate(ERRORS):
        for verb in GOOD:
            if changes.keys() <= _parameters(verb):
                name = f"{verb}-{'-'.join(changes)}-{number}"
                yield pytest.param(verb, changes, exception, message, id=name)


@pytest.mark.parametrize(("verb", "changes", "exception", "message"), [*_cases()])
def test_error(verb, changes, exception, message):
    hidden_from_view = {k: v.value for k, v in changes.items() if isinstance(v, Traced)}
    plain = {k: v for k, v in changes.items() if k not in hidden_from_view}
    with pytest.raises((TypeError, ValueError)) as caught:
        if hidden_from_view:
            jax.jit(lambda traced: call(verb, **plain, **traced))(hidden_from_view)
        else:
            call(verb, **plain)
    assert type(caught.value) is exception
    assert str(caught.value) == message
    # Said by us, before anything reaches jax.
    origin = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert Path(origin).parent.name in ("maths", "backends")


def test_every_argument_has_an_error_case():
    tested = {name for changes, *_ in ERRORS for name in changes}
    for verb in GOOD:
        assert _parameters(verb) <= tested


@pytest.mark.parametrize("verb", GOOD)
def test_options_are_keyword_only(verb):
    positional = [*GOOD[verb].values(), 1024]
    with pytest.raises(TypeError, match="positional arguments? but"):
        getattr(jaxmem, verb)(*positional, jnp.ones(N, bool))


# What is no error, though it nearly is one.


@pytest.mark.parametrize("verb", GOOD)
@pytest.mark.parametrize("change", [
    {"chunk": np.int64(2)}, {"chunk": "auto"}, {"chunk": None}, {"chunk": 10**9},
    {"temperature": np.float32(1)}, {"temperature": 1}, {"temperature": [1, 1, 1]},
    {"softcap": None}, {"where": True}, {"where": [True]}, {"where": np.ones(N, bool)},
    {"vocab_size": np.int32(V)}, {"implementation": "xla"},
], ids=str)  # fmt: skip
def test_spellings_of_the_defaults(verb, change):
    run = jax.eval_shape if verb != "token_stats" else lambda call: call()
    got, expected = (jax.tree.leaves(run(lambda x=x: call(verb, **x)))
                     for x in (change, {}))  # fmt: skip
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if verb == "token_stats":  # the others' values come the same way
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "depth", "columns", "expected"),
    [
        (8192, 4096, 151936, 1024),
        (8192, 7168, 129280, 1024),
        (16384, 576, 49152, 2048),  # an eighth of the tokens
        (65536, 576, 49152, 5456),  # 1 GiB
        (131072, 576, 32000, 7280),  # 2^22 / 576
        (16384, 1024, 151936, 1760),  # 1 GiB
        (16384, 640, 262144, 1024),
        (16384, 640, 2**20, 256),  # 1 GiB, although the chunk is short
        (2048, 576, 49152, 1024),
        (100, 576, 49152, 112),  # all tokens
        (16384, None, 32768, 8192),  # from logits, 1 GiB
    ],
)
def test_auto_chunk_by_shape(tokens, depth, columns, expected):
    assert checks.check_chunk("auto", tokens, columns, depth) == expected


def test_auto_chunk_of_calls():
    def chunk_of(verb, *shapes):
        with jaxmem.report() as calls:
            structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
            labels = jax.ShapeDtypeStruct(shapes[0][:-1], jnp.int32)
            run = functools.partial(verb, chunk="auto")
            jax.eval_shape(run, *structs, labels)
        return calls.calls[0].chunk

    assert chunk_of(jaxmem.logprobs, (2, 8192, 512), (1024, 512)) == 2048
    assert chunk_of(jaxmem.logprobs_from_logits, (2, 8192, 1024)) == 16384
    hidden, W = np.ones((16384, 512), "f4"), np.ones((65536, 512), "f4")
    teacher = jaxmem.Teacher(np.ones((16384, 8), "f4"), np.ones((65536, 8), "f4"))
    with jaxmem.report() as calls:
        jax.eval_shape(
            lambda: jaxmem.divergence(
                hidden, W, jaxmem.ForwardKL(teacher), chunk="auto"
            )
        )
    assert calls.calls[0].chunk == 2048  # 1 GiB of both heads' logits


@pytest.mark.parametrize(
    "softcap", [30, np.float32(30), np.array(30.0), "jax"], ids=str
)
def test_softcap_may_be_any_number(softcap):
    softcap = jnp.array(30.0) if softcap == "jax" else softcap
    made = checks.check_softcap(softcap)
    assert type(made) is float and made == 30


TYPES = {
    "floats": (jnp.bfloat16, jnp.float16, jnp.float32),
    "integers": (jnp.int8, jnp.uint8, jnp.int32),
    "too narrow": (jnp.float8_e4m3fn, jnp.int4),
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_hidden_and_of_numbers(name):
    for dtype in TYPES[name]:
        array = jax.ShapeDtypeStruct((N, D), dtype)
        for check, takes in (
            (checks.check_hidden, name == "floats"),
            (functools.partial(checks.check_number, "x"), name != "too narrow"),
        ):
            with nullcontext() if takes else pytest.raises(TypeError):
                check(array)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 4],
        (0, 1, 4),
        np.array([0, 1, 4]),
        np.array([0, 1, 4], np.uint64),
        np.array([0, 1, 4], np.int8),
        jnp.array([0, 1, 4], jnp.uint32),
        jnp.array([0, 1, 4], jnp.int4),
        [jnp.array(0), 1, 4],
    ],
    ids=lambda labels: f"{type(labels).__name__}-{getattr(labels, 'dtype', '')}",
)
@pytest.mark.parametrize("verb", WITH_LABELS)
def test_labels_of_any_integer_type(verb, labels):
    for got, expected in zip(
        jax.tree.leaves(call(verb, labels=labels)),
        jax.tree.leaves(call(verb)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("argument", ["hidden", "W", "logits"])
def test_float64_numpy_is_taken_as_float32(argument):
    for verb, good in GOOD.items():
        if argument in good:
            wide = np.asarray(good[argument], np.float64)
            for leaf in jax.tree.leaves(call(verb, **{argument: wide})):
                assert leaf.dtype in (jnp.float32, jnp.bool_)


@pytest.mark.parametrize("padding", [-1, -100, -(2**31), -(2**32) + 1])
def test_any_negative_label_is_padding(padding):
    got = call("token_stats", labels=np.array([0, padding, 4]))
    assert [field[1] for field in got] == [0, 0, 0, 0, False]
    np.testing.assert_array_equal(got.logprob[::2], call("logprobs")[::2])


# Labels that do not exist, where nobody could see them.


def test_unseen_label_is_nan_in_logprob_only():
    """Errors of verbs of logits; head/verbs/test_api has the other verbs."""
    labels = LABELS.at[1].set(V)
    verb = "token_stats_from_logits"
    got = jax.jit(lambda labels: call(verb, labels=labels))(labels)
    expected = call(verb)
    assert np.isnan(got.logprob[1])
    assert not got.is_argmax[1]
    np.testing.assert_array_equal(got.logprob[::2], expected.logprob[::2])
    for name in ("entropy", "logsumexp", "sum_pi_squared"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("wide", [2**31 + 1, 2**32 + 1, 2**62])
def test_unseen_label_beyond_32_bits_does_not_wrap(wide):
    with jax.enable_x64(True):
        labels = jnp.array([0, wide, -wide], jnp.int64)
        got = jax.jit(lambda labels: call("logprobs", labels=labels))(labels)
    np.testing.assert_array_equal(np.isnan(got), [False, True, False])
    assert got[2] == 0


@pytest.mark.parametrize("verb, labels_are_seen, where_is_seen", [
    ("token_stats", True, False), ("token_stats", False, True),
    full("token_stats", True, True), full("token_stats", False, False),
    *(slow(x, False, True) for x in WITH_LABELS if x != "token_stats"),
])  # fmt: skip
def test_masked_label_out_of_range_is_padding(verb, labels_are_seen, where_is_seen):
    labels, where = np.array([0, 9, 4]), np.array([True, False, True])
    seen = {"labels": labels} if labels_are_seen else {}
    seen |= {"where": where} if where_is_seen else {}
    both = {"labels": labels, "where": where}
    unseen = {k: v for k, v in both.items() if k not in seen}
    got = jax.jit(lambda unseen: call(verb, **seen, **unseen))(unseen)
    expected = call(verb, labels=[0, -1, 4])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_labels_closed_over_by_jit_are_checked():
    for labels in ([0, 1, V], np.array([0, 1, V])):
        with pytest.raises(ValueError, match="below vocab_size=5, got 5"):
            jax.jit(lambda h, y=labels: call("logprobs", hidden=h, labels=y))(HIDDEN)


# Temperatures that are not positive, where nobody could see them.


NOT_POSITIVE = [0.0, -1.0, float("nan"), float("-inf")]


@pytest.mark.parametrize(
    ("verb", "temperature"),
    [
        *(("token_stats", temperature) for temperature in NOT_POSITIVE),
        *(full(verb, 0.0) for verb in GOOD if verb != "token_stats"),
    ],
)  # fmt: skip
def test_unseen_temperature_not_positive_is_nan(verb, temperature):
    per_token = jnp.array([1.0, temperature, 1.0])
    got = jax.jit(lambda t: call(verb, temperature=t))(per_token)
    for leaf, expected in zip(
        jax.tree.leaves(got), jax.tree.leaves(call(verb)), strict=True
    ):
        if leaf.dtype == jnp.bool_:
            assert not leaf[1]
        else:
            assert np.isnan(leaf[1])
            np.testing.assert_allclose(leaf[::2], expected[::2], rtol=1e-6)


# Derivatives that there are none of.


def _total(verb, **changes):
    return sum(
        jnp.sum(leaf)
        for leaf in jax.tree.leaves(call(verb, **changes))
        if leaf.dtype != jnp.bool_
    )


@pytest.mark.parametrize("verb", GOOD)
def test_gradient_of_temperature_says_what_to_do(verb):
    for temperature in (2.0, jnp.ones(N)):
        with pytest.raises(
            NotImplementedError,
            match=r"^jaxmem: temperature is not differentiable here; wrap it in "
            r"jax.lax.stop_gradient, or divide hidden \(and bias\) by it and pass 1",
        ):
            jax.grad(lambda t: _total(verb, temperature=t))(temperature)
    stopped = lambda t: _total(verb, temperature=jax.lax.stop_gradient(t))  # noqa: E731
    assert jax.eval_shape(jax.grad(stopped), 2.0).shape == ()


@pytest.mark.parametrize("second", [
    lambda f, x: jax.hessian(f)(x),
    lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(x),
    lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x))))(x),
], ids=["hessian", "grad-of-grad", "jvp-of-grad", "jit"])  # fmt: skip
@pytest.mark.parametrize("verb", GOOD)
def test_second_derivative_says_what_to_do(verb, second):
    first = next(iter(GOOD[verb]))
    with pytest.raises(
        NotImplementedError,
        match="^jaxmem: second derivatives of the head are not supported; .* apply "
        "jax.nn.log_softmax to materialised logits",
    ):
        second(lambda x: _total(verb, **{first: x}), GOOD[verb][first])


@pytest.mark.parametrize("verb", GOOD)
def test_forward_mode_says_what_to_do(verb):
    first, value = next(iter(GOOD[verb].items()))
    with pytest.raises(
        TypeError,
        match="^jaxmem: forward-mode autodiff .* not supported, .*; use reverse mode",
    ):
        jax.jvp(lambda x: _total(verb, **{first: x}), (value,), (value,))


def test_sample_error_for_vocabulary_of_one():
    with pytest.raises(ValueError, match="a vocabulary of 1, .* leave gradient out"):
        jaxmem.logprobs(
            jnp.ones((2, 8)), jnp.ones((1, 8)), jnp.zeros(2, jnp.int32),
            gradient=jaxmem.Sample(1), key=jax.random.key(0),
        )  # fmt: skip


def test_linearize_is_refused_when_applied():
    _, slope = jax.linearize(lambda x: _total("logprobs", hidden=x), HIDDEN)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        slope(HIDDEN)


def test_forward_mode_under_jit_fails_in_jax():
    def tangent(x):
        return jax.jvp(lambda x: _total("logprobs", hidden=x), (x,), (x,))

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jit(tangent)(HIDDEN)


# Numbers that only another process could read.


def test_unaddressable_array_is_not_checked():
    class Elsewhere(jax.Array):  # as an array of a larger mesh looks from one host
        dtype, shape, is_fully_addressable = jnp.dtype(jnp.int32), (N,), False

    Elsewhere.__abstractmethods__ = frozenset()
    checks.check_labels(Elsewhere(), None, (N,), V)
    checks.check_temperature(Elsewhere(), (N,))


@pytest.mark.parametrize("value", [1, np.int32(7), 2**31 - 1])
def test_counts_that_int32_can_represent(value):
    assert checks.check_count("k", value) == value


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, True, "3", None])
def test_check_count_refuses(value):
    with pytest.raises(ValueError, match="k must be an integer, at least 1"):
        checks.check_count("k", value)


def test_check_count_from_0():
    assert checks.check_count("n", 0, low=0) == 0


@pytest.mark.parametrize("value", [0.0, 1e-30, 3])
def test_normalizers(value):
    checks.check_normalizer(np.asarray(value))


@pytest.mark.parametrize("value", [-1.0, np.inf, np.nan, 1e39])
def test_check_normalizer_refuses(value):
    with pytest.raises(ValueError, match="normalizer must be finite and not negative"):
        checks.check_normalizer(np.asarray(value))


def test_check_softcap_and_vocab_size_accept_least():
    assert checks.check_softcap(0.5) == 0.5
    assert checks.check_vocab_size(1, V) == 1
