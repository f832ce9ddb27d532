"""Bad arguments of the verbs, and the error of each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmem

N, D, V = 3, 8, 5
HIDDEN = jnp.linspace(-1, 1, N * D).reshape(N, D)
W = jnp.linspace(-1, 1, V * D).reshape(V, D)
LABELS = jnp.array([0, 1, 4])
LOGITS = jnp.linspace(-1, 1, N * V).reshape(N, V)
# Arguments with which each verb runs.
GOOD = {
    "logprobs": {"hidden": HIDDEN, "W": W, "labels": LABELS},
    "token_stats": {"hidden": HIDDEN, "W": W, "labels": LABELS},
    "entropy": {"hidden": HIDDEN, "W": W},
    "logprobs_from_logits": {"logits": LOGITS, "labels": LABELS},
    "token_stats_from_logits": {"logits": LOGITS, "labels": LABELS},
}


class Traced(NamedTuple):
    """A value that the verb is to meet inside jax.jit."""

    value: Any


class _Object:
    def __repr__(self):
        return "<an object>"


WRONG_W = "W must be [V, D] or [D, V], with at least one token, got shape"
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
        "vocab_size must be an integer from 1 to 5, the number of columns, got " + got
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
    ({"hidden": {"h": HIDDEN}}, TypeError,
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
    ({"W": {"kernel": W}}, TypeError, "W must be an array of numbers, got dict"),
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
    ({"W": W.T, "layout": "vd"}, ValueError,
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
     "gradient must be None, jaxmem.Recompute(blocks), jaxmem.Sample(k) or "
     "jaxmem.Recorded(entries), got 2"),
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
     "key must not be given without gradient=jaxmem.Sample(k): only this gradient "
     "draws random numbers"),
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
