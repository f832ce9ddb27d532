"""Every error that a user can see from the public verbs, word for word."""

import functools
import inspect
import itertools
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.head.maths import checks
from tests.cases import one_at_a_time, slow
from tests.described import described

pytestmark = pytest.mark.usefixtures("quick_compilation", "on_one_device")

N, D, V = 3, 8, 5
_HIDDEN = jnp.linspace(-1, 1, N * D).reshape(N, D)
_W = jnp.linspace(-1, 1, V * D).reshape(V, D)
_LABELS = jnp.array([0, 1, 4])
_LOGITS = jnp.linspace(-1, 1, N * V).reshape(N, V)

# Arguments with which each verb runs.
GOOD = {
    "logprobs": {"hidden": _HIDDEN, "W": _W, "labels": _LABELS},
    "token_stats": {"hidden": _HIDDEN, "W": _W, "labels": _LABELS},
    "entropy": {"hidden": _HIDDEN, "W": _W},
    "logprobs_from_logits": {"logits": _LOGITS, "labels": _LABELS},
    "token_stats_from_logits": {"logits": _LOGITS, "labels": _LABELS},
}
WITH_LABELS = sorted(GOOD.keys() - {"entropy"})


def call(verb, **changes):
    function = getattr(jaxmem, verb)
    function = function if "logits" in GOOD[verb] else described(function)
    return function(**(GOOD[verb] | changes))


class Traced(NamedTuple):
    """A value that the verb is to meet inside jax.jit."""

    value: Any


class _Object:
    def __repr__(self):
        return "<an object>"


WRONG_W = "W must be [V, D] or [D, V], with a token at least, got shape"
FLOATS = "(float32, bfloat16, float16)"
TRACED = "a traced array (close over the number, or mark it static for jax.jit)"
NOT_NUMBERS = "list that is ragged or holds something else than 64-bit numbers"
SQUARE = (
    "layout is ambiguous: W is square, (8, 8); pass jaxmem.Head(W, layout='vd') if its "
    "rows are tokens (an embedding table), or 'dv' if its columns are (a Dense or "
    "nnx.Linear kernel)"
)
CONVERT_LABELS = "; convert them with labels.astype('int32')"
ZERO_TEMPERATURE = "; for greedy decoding use token_stats(...).is_argmax"


def _chunk(got):
    return f"chunk must be a positive number of tokens, None or 'auto', got {got}"


def _labels_below(vocab_size, got):
    return (
        f"labels must be below vocab_size={vocab_size}, got {got}; mark padding with a "
        "negative label or with where="
    )


def _temperature(got):
    return f"temperature must be positive and finite, got {got}{ZERO_TEMPERATURE}"


def _vocab_size(got):
    return (
        "vocab_size must be an integer from 1 to 5, the columns there are, got " + got
    )


# What is wrong, the exception, all that it says. Each row holds for every verb that has
# these arguments.
ERRORS = [
    # hidden
    ({"hidden": None}, TypeError, "hidden must be an array of numbers, got NoneType"),
    ({"hidden": "text"}, TypeError, "hidden must be an array of numbers, got str"),
    ({"hidden": b"text"}, TypeError, "hidden must be an array of numbers, got bytes"),
    ({"hidden": _Object()}, TypeError,
     "hidden must be an array of numbers, got _Object"),
    ({"hidden": {"h": _HIDDEN}}, TypeError,
     "hidden must be an array of numbers, got dict"),
    ({"hidden": [[1.0] * D, [1.0]]}, TypeError,
     f"hidden must be an array of numbers, got {NOT_NUMBERS}"),
    ({"hidden": np.full((N, D), None)}, TypeError,
     "hidden must be an array of numbers, got ndarray of object"),
    ({"hidden": jax.ShapeDtypeStruct((N, D), jnp.float32)}, TypeError,
     "hidden must be an array of numbers, got ShapeDtypeStruct"),
    ({"hidden": jnp.ones((N, D), jnp.int32)}, TypeError,
     f"hidden must be floating point {FLOATS}, got int32"),
    ({"hidden": jnp.ones((N, D), jnp.complex64)}, TypeError,
     f"hidden must be floating point {FLOATS}, got complex64"),
    ({"hidden": jnp.ones((N, D), jnp.float8_e4m3fn)}, TypeError,
     "hidden must be float32, bfloat16 or float16, got float8_e4m3fn; convert it "
     "with hidden.astype"),
    ({"hidden": 1.0}, ValueError,
     "hidden must have a last axis that is not empty, got shape ()"),
    ({"hidden": jnp.ones((N, 0))}, ValueError,
     "hidden must have a last axis that is not empty, got shape (3, 0)"),
    # W and layout
    ({"W": None}, TypeError, "W must be an array of numbers, got NoneType"),
    ({"W": {"kernel": _W}}, TypeError, "W must be an array of numbers, got dict"),
    ({"W": jnp.ones((V, D), jnp.int32)}, TypeError,
     f"W must be floating point {FLOATS}, got int32"),
    ({"W": jnp.ones(D)}, ValueError, f"{WRONG_W} (8,)"),
    ({"W": jnp.ones((1, V, D))}, ValueError, f"{WRONG_W} (1, 5, 8)"),
    ({"W": jnp.ones((V, D - 1))}, ValueError,
     "W must be [V, 8] or [8, V] to match hidden's last axis D=8, got shape (5, 7)"),
    ({"W": jnp.ones((0, D))}, ValueError, f"{WRONG_W} (0, 8)"),
    ({"W": jnp.ones((D, D))}, ValueError, SQUARE),
    ({"layout": "dv"}, ValueError,
     "W must be [8, V] to match hidden's last axis D=8 and layout='dv', "
     "got shape (5, 8)"),
    ({"W": _W.T, "layout": "vd"}, ValueError,
     "W must be [V, 8] to match hidden's last axis D=8 and layout='vd', "
     "got shape (8, 5)"),
    ({"layout": "vD"}, ValueError, "layout must be 'vd', 'dv' or None, got 'vD'"),
    ({"layout": ["vd"]}, ValueError, "layout must be 'vd', 'dv' or None, got ['vd']"),
    # logits
    ({"logits": None}, TypeError, "logits must be an array of numbers, got NoneType"),
    ({"logits": jnp.ones((N, V), jnp.int32)}, TypeError,
     f"logits must be floating point {FLOATS}, got int32"),
    ({"logits": jnp.ones((N, V), jnp.float8_e5m2)}, TypeError,
     "logits must be float32, bfloat16 or float16, got float8_e5m2; convert it "
     "with logits.astype"),
    ({"logits": 1.0}, ValueError,
     "logits must have a last axis that is not empty, got shape ()"),
    ({"logits": jnp.ones((N, 0))}, ValueError,
     "logits must have a last axis that is not empty, got shape (3, 0)"),
    # labels
    ({"labels": None}, TypeError, "labels must be an array of numbers, got NoneType"),
    ({"labels": _Object()}, TypeError,
     "labels must be an array of numbers, got _Object"),
    ({"labels": ["the", "cat", "sat"]}, TypeError,
     f"labels must be an array of numbers, got {NOT_NUMBERS}"),
    ({"labels": [0, 1, 2**70]}, TypeError,
     f"labels must be an array of numbers, got {NOT_NUMBERS}"),
    ({"labels": [[0, 1], [2]]}, TypeError,
     f"labels must be an array of numbers, got {NOT_NUMBERS}"),
    ({"labels": jnp.zeros(N)}, TypeError,
     f"labels must be integers, got float32{CONVERT_LABELS}"),
    ({"labels": [0.0, 1.0, 2.0]}, TypeError,
     f"labels must be integers, got float64{CONVERT_LABELS}"),
    ({"labels": np.zeros(N, bool)}, TypeError,
     f"labels must be integers, got bool{CONVERT_LABELS}"),
    ({"labels": Traced(np.zeros(N, np.float32))}, TypeError,
     f"labels must be integers, got float32{CONVERT_LABELS}"),
    ({"labels": jnp.zeros(N + 1, jnp.int32)}, ValueError,
     "labels must have one entry per token, shape (3,), got (4,)"),
    ({"labels": jnp.zeros((N, 1), jnp.int32)}, ValueError,
     "labels must have one entry per token, shape (3,), got (3, 1)"),
    ({"labels": 0}, ValueError,
     "labels must have one entry per token, shape (3,), got ()"),
    ({"labels": jnp.array([0, 1, V])}, ValueError, _labels_below(5, "5")),
    ({"labels": np.array([0, 1, V], np.uint8)}, ValueError, _labels_below(5, "5")),
    ({"labels": [0, 1, V]}, ValueError, _labels_below(5, "5")),
    ({"labels": [0, 1, 3], "vocab_size": 3}, ValueError, _labels_below(3, "3")),
    ({"labels": np.array([0, 1, 2**31 + 1])}, ValueError, _labels_below(5,
     "2147483649")),
    ({"labels": np.array([0, 1, 2**32 + 1])}, ValueError, _labels_below(5,
     "4294967297")),
    ({"labels": np.array([0, 1, 2**64 - 1], np.uint64)}, ValueError, _labels_below(5,
     "18446744073709551615")),
    ({"labels": [9, 1, 7], "where": [False, True, True]}, ValueError, _labels_below(5,
     "7")),
    # chunk
    ({"chunk": 0}, ValueError, _chunk("0")),
    ({"chunk": -1}, ValueError, _chunk("-1")),
    ({"chunk": 1.5}, ValueError, _chunk("1.5")),
    ({"chunk": True}, ValueError, _chunk("True")),
    ({"chunk": "big"}, ValueError, _chunk("'big'")),
    ({"chunk": np.array([1, 2])}, ValueError, _chunk("an array of int64, shape (2,)")),
    ({"chunk": jnp.array(2)}, ValueError, _chunk("an array of int32, shape ()")),
    ({"chunk": Traced(2)}, ValueError, _chunk(TRACED)),
    # where
    ({"where": "all"}, TypeError, "where must be an array of numbers, got str"),
    ({"where": jnp.ones(N)}, TypeError,
     "where must be boolean, got float32; compare it, as in where != 0"),
    ({"where": np.ones(N, np.int32)}, TypeError,
     "where must be boolean, got int32; compare it, as in where != 0"),
    ({"where": jnp.ones(N - 1, bool)}, ValueError,
     "where must broadcast to the tokens' shape (3,), got shape (2,)"),
    ({"where": jnp.ones((2, N), bool)}, ValueError,
     "where must broadcast to the tokens' shape (3,), got shape (2, 3)"),
    # temperature
    ({"temperature": None}, TypeError,
     "temperature must be an array of numbers, got NoneType"),
    ({"temperature": "hot"}, TypeError,
     "temperature must be an array of numbers, got str"),
    ({"temperature": True}, TypeError,
     "temperature must be a real number or an array of them, got bool"),
    ({"temperature": 1j}, TypeError,
     "temperature must be a real number or an array of them, got complex128"),
    ({"temperature": Traced(1j)}, TypeError,
     "temperature must be a real number or an array of them, got complex64"),
    ({"temperature": 0}, ValueError, _temperature("0")),
    ({"temperature": -1.0}, ValueError, _temperature("-1.0")),
    ({"temperature": float("nan")}, ValueError, _temperature("nan")),
    ({"temperature": float("inf")}, ValueError, _temperature("inf")),
    ({"temperature": jnp.array([1.0, 0.0, 1.0])}, ValueError, _temperature("0.0")),
    ({"temperature": [1.0, 1.0, -2.0]}, ValueError, _temperature("-2.0")),
    ({"temperature": [1.0, 1.0]}, ValueError,
     "temperature must be a scalar or one per token, shape (3,), got shape (2,)"),
    ({"temperature": jnp.ones((1, N))}, ValueError,
     "temperature must be a scalar or one per token, shape (3,), got shape (1, 3)"),
    # softcap
    ({"softcap": 0}, ValueError, "softcap must be positive and finite, got 0"),
    ({"softcap": -1}, ValueError, "softcap must be positive and finite, got -1"),
    ({"softcap": float("nan")}, ValueError,
     "softcap must be positive and finite, got nan"),
    ({"softcap": float("inf")}, ValueError,
     "softcap must be positive and finite, got inf"),
    ({"softcap": jnp.ones(2)}, ValueError,
     "softcap must be positive and finite, got an array of float32, shape (2,)"),
    ({"softcap": "soft"}, TypeError,
     "softcap must be a Python number or None, got 'soft'"),
    ({"softcap": True}, TypeError, "softcap must be a Python number or None, got True"),
    ({"softcap": _Object()}, TypeError,
     "softcap must be a Python number or None, got <an object>"),
    ({"softcap": Traced(30.0)}, TypeError,
     f"softcap must be a Python number or None, got {TRACED}"),
    # bias
    ({"bias": "some"}, TypeError, "bias must be an array of numbers, got str"),
    ({"bias": jnp.ones(V, jnp.int32)}, TypeError,
     f"bias must be floating point {FLOATS}, got int32"),
    ({"bias": jnp.ones(D)}, ValueError,
     "bias must have one entry per token of the vocabulary, shape (5,), "
     "got shape (8,)"),
    ({"bias": 1.0}, ValueError,
     "bias must have one entry per token of the vocabulary, shape (5,), got shape "
     "()"),
    # vocab_size
    ({"vocab_size": 0}, ValueError, _vocab_size("0")),
    ({"vocab_size": V + 1}, ValueError, _vocab_size("6")),
    ({"vocab_size": 2.0}, ValueError, _vocab_size("2.0")),
    ({"vocab_size": True}, ValueError, _vocab_size("True")),
    ({"vocab_size": "5"}, ValueError, _vocab_size("'5'")),
    ({"vocab_size": Traced(4)}, ValueError, _vocab_size(TRACED)),
    # gradient
    ({"gradient": 2}, TypeError,
     "gradient must be None, jaxmem.Recompute(blocks) or jaxmem.Sample(k), got 2"),
    # vocab_groups
    ({"vocab_groups": 6}, ValueError,
     "vocab_groups must be a power of two, at least 2, or None, got 6"),
    ({"vocab_groups": 2}, ValueError,
     "vocab_groups must divide the 5 columns of W, got 2; pad W to 6 columns and "
     "pass jaxmem.Head(W, vocab_size=…)"),
    # gradient and key
    ({"gradient": jaxmem.Sample(5)}, ValueError,
     "gradient=Sample(k) must have k from 1 to 4, less than the vocabulary, got 5; "
     "leave gradient out for the exact one"),
    ({"gradient": jaxmem.Sample(2)}, ValueError,
     "key must be given with gradient=Sample(k=2, forward='exact'), such as "
     "jax.random.fold_in(jax.random.key(seed), step)"),
    ({"key": 3}, ValueError,
     "key must not be given without gradient=jaxmem.Sample(k): the exact gradient "
     "draws no random numbers"),
    # axis_name
    ({"axis_name": 3}, TypeError,
     "axis_name must be the name of a mesh axis, or a tuple of different names, got "
     "3"),
    ({"axis_name": ()}, TypeError,
     "axis_name must be the name of a mesh axis, or a tuple of different names, got "
     "()"),
    ({"axis_name": ("a", "a")}, TypeError,
     "axis_name must be the name of a mesh axis, or a tuple of different names, got "
     "('a', 'a')"),
    ({"axis_name": "tensor"}, ValueError,
     "axis_name='tensor' must be bound by an enclosing jax.shard_map, and there is "
     "none here; for arrays that are not split by hand use jaxmem.sharding.parallel"),
    # implementation
    ({"implementation": "cuda"}, ValueError,
     "implementation must be None or one of 'xla', 'hopper', got 'cuda'"),
    ({"implementation": ["xla"]}, TypeError,
     "implementation must be a name or None, got ['xla']"),
]  # fmt: skip


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


def test_every_argument_has_an_error():
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
    "softcap", [30, np.float32(30), np.array(30.0), "jax"], ids=str
)
def test_a_softcap_is_any_number(softcap):
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


def test_unseen_label_beyond_the_vocabulary_is_nan_logprob_only():
    """Of logits; head/verbs/test_api has the other verbs."""
    labels = _LABELS.at[1].set(V)
    verb = "token_stats_from_logits"
    got = jax.jit(lambda labels: call(verb, labels=labels))(labels)
    expected = call(verb)
    assert np.isnan(got.logprob[1])
    assert not got.is_argmax[1]
    np.testing.assert_array_equal(got.logprob[::2], expected.logprob[::2])
    for name in ("entropy", "logsumexp", "sum_pi_squared"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize("wide", [2**31 + 1, 2**32 + 1, 2**62])
def test_unseen_label_beyond_32_bits_does_not_wrap_into_range(wide):
    with jax.enable_x64(True):
        labels = jnp.array([0, wide, -wide], jnp.int64)
        got = jax.jit(lambda labels: call("logprobs", labels=labels))(labels)
    np.testing.assert_array_equal(np.isnan(got), [False, True, False])
    assert got[2] == 0


@pytest.mark.parametrize("verb, labels_are_seen, where_is_seen", [
    *(("token_stats", *seen) for seen in itertools.product((True, False), repeat=2)),
    *(slow(x, False, True) for x in WITH_LABELS if x != "token_stats"),
])  # fmt: skip
def test_masked_label_beyond_the_vocabulary_is_padding(
    verb, labels_are_seen, where_is_seen
):
    labels, where = np.array([0, 9, 4]), np.array([True, False, True])
    seen = {"labels": labels} if labels_are_seen else {}
    seen |= {"where": where} if where_is_seen else {}
    both = {"labels": labels, "where": where}
    unseen = {k: v for k, v in both.items() if k not in seen}
    got = jax.jit(lambda unseen: call(verb, **seen, **unseen))(unseen)
    expected = call(verb, labels=[0, -1, 4])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_labels_that_jit_closes_over_are_still_seen():
    for labels in ([0, 1, V], np.array([0, 1, V])):
        with pytest.raises(ValueError, match="below vocab_size=5, got 5"):
            jax.jit(lambda h, y=labels: call("logprobs", hidden=h, labels=y))(_HIDDEN)


# Temperatures that are not positive, where nobody could see them.


@pytest.mark.parametrize(
    ("verb", "temperature"),
    one_at_a_time(GOOD, [0.0, -1.0, float("nan"), float("-inf")]),
)
def test_unseen_temperature_that_is_not_positive_is_nan(verb, temperature):
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


def test_sample_of_a_vocabulary_of_one_says_what_to_do():
    with pytest.raises(ValueError, match="a vocabulary of 1, .* leave gradient out"):
        jaxmem.logprobs(
            jnp.ones((2, 8)), jnp.ones((1, 8)), jnp.zeros(2, jnp.int32),
            gradient=jaxmem.Sample(1), key=jax.random.key(0),
        )  # fmt: skip


def test_linearize_is_refused_where_its_function_is_applied():
    _, slope = jax.linearize(lambda x: _total("logprobs", hidden=x), _HIDDEN)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        slope(_HIDDEN)


def test_forward_mode_under_jit_is_an_error_of_jax():
    def tangent(x):
        return jax.jvp(lambda x: _total("logprobs", hidden=x), (x,), (x,))

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jit(tangent)(_HIDDEN)


# Numbers that only another process could read.


def test_what_cannot_be_read_is_not_checked():
    class Elsewhere(jax.Array):  # as an array of a larger mesh looks from one host
        dtype, shape, is_fully_addressable = jnp.dtype(jnp.int32), (N,), False

    Elsewhere.__abstractmethods__ = frozenset()
    checks.check_labels(Elsewhere(), None, (N,), V)
    checks.check_temperature(Elsewhere(), (N,))


@pytest.mark.parametrize("value", [1, np.int32(7), 2**31 - 1])
def test_counts_that_int32_can_represent(value):
    assert checks.check_count("k", value) == value


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, True, "3", None])
def test_no_counts(value):
    with pytest.raises(ValueError, match="k must be an integer, at least 1"):
        checks.check_count("k", value)


def test_a_count_from_0():
    assert checks.check_count("n", 0, low=0) == 0


@pytest.mark.parametrize("value", [0.0, 1e-30, 3])
def test_normalizers(value):
    checks.check_normalizer(np.asarray(value))


@pytest.mark.parametrize("value", [-1.0, np.inf, np.nan, 1e39])
def test_no_normalizers(value):
    with pytest.raises(ValueError, match="normalizer must be finite and not negative"):
        checks.check_normalizer(np.asarray(value))


def test_the_least_values_are_accepted():
    assert checks.check_softcap(0.5) == 0.5
    assert checks.check_vocab_size(1, V) == 1
