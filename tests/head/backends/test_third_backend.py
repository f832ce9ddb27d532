"""A backend of one's own runs every function, and no rule calls another one's loops."""

import sys
import types

import jax
import numpy as np
import pytest

import jaxmem
from jaxmem.head import reference
from jaxmem.head.backends import choose
from tests.helpers.cases import full
from tests.helpers.crossing import SAMPLE, Setting, check, problem, run, trained_of
from tests.helpers.dense_backend import DENSE
from tests.helpers.functions import CASES, FUNCTIONS, VOCAB, Named, make

pytestmark = pytest.mark.usefixtures("quick_compilation")


HEAD = {"softcap": 5.0, "vocab_size": VOCAB}


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
        check(name, Setting(layout="vd"), Named("dense"))
    assert {call.implementation for call in calls.calls} == {"dense"}


@pytest.mark.parametrize(
    "name",
    [full("logprobs"), full("topk"), "divergence ReverseKL teacher",
     full("token_loss"), full("divergence_loss ReverseKL teacher")],
)  # fmt: skip
def test_dense_backend_runs_frozen_heads(name, only_dense):
    check(name, Setting(gradient="frozen"), Named("dense"))


SAMPLED = [name for name, function in FUNCTIONS.items() if function.samples]


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLED)
def test_dense_backend_samples_as_xla(name, request):
    setting = Setting(gradient=SAMPLE)
    operands = name, setting, trained_of(name, setting), problem(setting)
    want = run(jaxmem, *operands)
    request.getfixturevalue("only_dense")
    got = run(Named("dense"), *operands)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(assert_near, got, want)


def assert_near(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


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
