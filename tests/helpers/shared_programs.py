"""Runs of one config share programs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxmem.train.jobs import dpo, sft
from jaxmem.train.jobs.distill import job as distill
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.rollout.turns import SamplePrograms
from jaxmem.train.program import DecoderProgram

# No program depends on these of the section `run`.
IRRELEVANT = {
    "out_dir": "", "checkpoint_every": 1, "keep": 1, "log_every": 1,
    "compare_heads": False,
}  # fmt: skip
PROGRAMS = (
    (sft, "SftProgram", ("compile_step",)),
    (dpo, "DpoProgram", ("compile_step",)),
    (grpo, "PolicyProgram", ("compile",)),
    (distill, "DistillProgram", ("compile",)),
)


@pytest.fixture
def one_program(monkeypatch):
    """Runs of one config, in other directories, compile once.

    For tests that start runs again, of which this process would compile the same.
    Processes of their own do in test_sft.
    """
    _share(monkeypatch)


@pytest.fixture(scope="module")
def programs_of_module():
    """Share programs among all tests of a module, none of which changes a program."""
    with pytest.MonkeyPatch.context() as patched:
        _share(patched)
        yield


def _share(patched):
    for module, name, methods in PROGRAMS:
        kind = getattr(module, name)
        for method in methods:
            patched.setattr(kind, method, functools.cache(getattr(kind, method)))
        patched.setattr(module, name, _once_for_a_config(kind))
    compiled = functools.cache(SamplePrograms.of.__func__)
    patched.setattr(SamplePrograms, "of", classmethod(compiled))
    for method in ("initial_state", "initial_params", "frozen"):
        drawn = _drawn_once(getattr(DecoderProgram, method))
        patched.setattr(DecoderProgram, method, drawn)


def _once_for_a_config(kind):
    programs = {}

    def make(config, *others):
        irrelevant, optimizer = IRRELEVANT, config.optimizer
        if optimizer.schedule == "constant" and optimizer.warmup_steps is not None:
            irrelevant = irrelevant | {"steps": 1}
        run = dataclasses.replace(config.run, **irrelevant)
        key = repr(dataclasses.replace(config, run=run)), others
        if key not in programs:
            programs[key] = kind(config, *others)
        return programs[key]

    return make


def _drawn_once(method):
    """Weights of a program, which runs consume, from copies."""

    @functools.cache
    def drawn(program):
        made = method(program)
        return jax.device_get(made), jax.tree.map(lambda x: x.sharding, made)

    def copied(program):
        arrays, places = drawn(program)
        return jax.device_put(jax.tree.map(np.array, arrays), places)

    return copied
