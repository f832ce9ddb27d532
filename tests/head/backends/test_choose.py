"""A backend of one's own: one entry in the list of them, and nothing else."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.head.backends import choose, hopper
from jaxmem.models.training_head import HeadConfig
from tests.helpers.cases import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

XLA = choose.BACKENDS[-1]
H = jnp.linspace(-1, 1, 40 * 8).reshape(40, 8).astype(jnp.bfloat16)
W = jnp.cos(jnp.arange(300 * 8.0)).reshape(300, 8).astype(jnp.bfloat16)
Y = jnp.arange(40) * 7
KEY = jax.random.key(0)
OPTIONS = {
    "plain": {},
    "blocks": {"gradient": jaxmem.Recompute(2)},
    "samples": {"gradient": jaxmem.Sample(4), "key": KEY},
}


@pytest.fixture
def register(monkeypatch):
    """Adds a copy of "xla" under another name, before all others."""

    def add(**changes):
        toy = dataclasses.replace(
            XLA, name="toy", advantage="a toy", stores_logits=False, **changes
        )
        monkeypatch.setattr(choose, "BACKENDS", (toy, *choose.BACKENDS))

    return add


def program(implementation, options):
    """The text of a call with gradients, which need not be compiled."""

    def total(h, W):
        run = jaxmem.logprobs(h, W, Y, implementation=implementation, **options)
        return run.sum()

    return jax.jit(jax.value_and_grad(total, (0, 1))).lower(H, W).as_text()


@pytest.mark.parametrize("name", ["plain", slow("blocks"), slow("samples")])
def test_registered_backend_compiles_as_xla(name, register):
    register()
    assert program("xla", OPTIONS[name]) == program("toy", OPTIONS[name])


def test_it_is_preferred_and_said_why(register):
    register()
    with jaxmem.report() as calls:
        jax.eval_shape(jaxmem.logprobs, H, W, Y)
    assert calls.calls[0].implementation == "toy" and calls.calls[0].why == "a toy"
    assert calls.calls[0].live_logits_bytes == 0
    assert HeadConfig(implementation="toy").implementation == "toy"


def test_unproven_float16_may_overflow():
    of = types.SimpleNamespace(compute_dtype=jnp.float16)
    assert "which large weights overflow" in (hopper.unproven(of, None) or "")


@pytest.mark.parametrize("ability", ["blocks", "sampler"])
def test_it_is_not_asked_for_what_it_cannot_do(ability, register):
    register(**{ability: None})
    name, said = {"blocks": ("blocks", "several"), "sampler": ("samples", "Sample")}[
        ability
    ]
    program(None, OPTIONS[name])  # by another one
    said = f"'toy' cannot run this call: it has no loops for {said}"
    with pytest.raises(NotImplementedError, match=said):
        program("toy", OPTIONS[name])


def test_it_runs_single_columns_if_it_has_loops_for_them(register):
    register()
    with jaxmem.report() as calls:
        jax.eval_shape(lambda h, W: jaxmem.topk(h, W, 3), H, W)
    assert calls.calls[0].implementation == "toy" and calls.calls[0].why == "a toy"
    assert not calls.calls[0].is_sole_backend


def test_it_is_not_asked_for_single_columns_without_loops(register):
    register(columns=None)
    with jaxmem.report() as calls:
        jax.eval_shape(lambda h, W: jaxmem.topk(h, W, 3), H, W)
    assert calls.calls[0].implementation == "xla" and calls.calls[0].is_sole_backend
    with pytest.raises(NotImplementedError, match="implementation='toy' has no topk"):
        jaxmem.topk(H, W, 3, implementation="toy")


def test_choose_names_every_reason(register, monkeypatch):
    register(blocks=None)
    monkeypatch.setattr(choose, "BACKENDS", choose.BACKENDS[:2])
    said = "'toy' does not: it has no loops .*; 'hopper' does not: it needs"
    with pytest.raises(NotImplementedError, match=f"no backend runs this call: {said}"):
        program(None, OPTIONS["blocks"])


def test_names_are_those_that_exist():
    with pytest.raises(ValueError, match="None or one of 'xla', 'hopper', got 'toy'"):
        jaxmem.logprobs(H, W, Y, implementation="toy")
    with pytest.raises(ValueError, match="implementation .*'hopper' or None.*'toy'"):
        HeadConfig(implementation="toy")
