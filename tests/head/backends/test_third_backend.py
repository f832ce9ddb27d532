"""A backend of one's own runs every function, and no rule calls another one's loops."""

import sys
import types

import jax
import pytest

import jaxmem
from jaxmem.head import reference
from jaxmem.head.backends import choose
from tests.helpers.cases import full
from tests.helpers.dense_backend import DENSE
from tests.helpers.functions import (
    CASES,
    FUNCTIONS,
    VOCAB,
    assert_near,
    make,
    values_and_gradients,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

HEAD = {"softcap": 5.0, "vocab_size": VOCAB}
SAMPLE = {"gradient": jaxmem.Sample(6), "key": jax.random.key(1)}


@pytest.fixture
def only_dense(monkeypatch):
    """The dense backend is the only one, and functions of all others raise."""
    monkeypatch.setattr(choose, "BACKENDS", (DENSE,))
    for name, module in list(sys.modules.items()):
        if name.startswith(("jaxmem.head.backends.xla", "jaxmem.head.backends.hopper")):
            for key, value in vars(module).items():
                if isinstance(value, types.FunctionType):
                    monkeypatch.setattr(module, key, _refuse)


def _refuse(*args, **kwargs):
    raise AssertionError("a rule calls another backend's function")


@pytest.mark.parametrize("name", CASES)
def test_dense_backend_runs_every_function(name, only_dense):
    with jaxmem.report() as calls:
        made = values_and_gradients(jaxmem, name, make(), HEAD, {})
    assert {call.implementation for call in calls.calls} == {"dense"}
    assert_near(made, values_and_gradients(reference, name, make(), HEAD, {}))


@pytest.mark.parametrize(
    "name",
    [full("logprobs"), full("topk"), "divergence ReverseKL teacher",
     full("token_loss"), full("divergence_loss ReverseKL teacher")],
)  # fmt: skip
def test_dense_backend_runs_frozen_heads(name, only_dense):
    operands = name, make(), HEAD, {}, ("hidden",)
    want = values_and_gradients(reference, *operands)
    assert_near(values_and_gradients(jaxmem, *operands), want)


SAMPLED = [name for name, function in FUNCTIONS.items() if function.samples]


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLED)
def test_dense_backend_samples_as_xla(name, request):
    want = values_and_gradients(jaxmem, name, make(), HEAD, SAMPLE)
    request.getfixturevalue("only_dense")
    assert_near(values_and_gradients(jaxmem, name, make(), HEAD, SAMPLE), want)


def test_dense_backend_runs_recorded_entries(only_dense):
    """The old pass, and results and gradients from what it recorded."""
    p, key = make(), jax.random.key(1)
    head = jaxmem.Head(p["W"], bias=p["bias"], **HEAD)
    entries = jaxmem.record_entries(p["hidden"], head, p["labels"], 6, key)

    def total(hidden, head):
        gradient = jaxmem.Recorded(entries)
        stats = jaxmem.token_stats(hidden, head, p["labels"], gradient=gradient)
        return (stats.logprob - stats.entropy).sum(), stats

    with jaxmem.report() as calls:
        slopes, stats = jax.grad(total, (0, 1), has_aux=True)(p["hidden"], head)
    assert [call.implementation for call in calls.calls] == ["dense"]
    want = reference.token_stats(p["hidden"], head, p["labels"])
    assert_near(stats.logprob, want.logprob)  # no weight has changed
    assert_near(stats.entropy, want.entropy)
    assert all(abs(x).max() > 0 for x in jax.tree.leaves(slopes))
