"""Runs of one config in one test that share a program."""

import dataclasses
import functools

import pytest

from jaxmem.train.jobs import distill, dpo, grpo, sft

# Of the sections `run` and `eval`: what no program depends on.
IRRELEVANT = {"out_dir": "", "checkpoint_every": 1, "keep": 1, "log_every": 1}
PROGRAMS = (
    (sft, "Program", ("compile_step",)),
    (dpo, "Program", ("compile_step",)),
    (grpo, "PolicyProgram", ("compile",)),
    (distill, "DistillProgram", ("compile",)),
)


@pytest.fixture
def one_program(monkeypatch):
    """Runs of one config, in other directories, compile once.

    For tests that start runs again, of which this process would compile the same.
    Processes of their own do in test_sft.
    """
    for module, name, methods in PROGRAMS:
        kind = getattr(module, name)
        for method in methods:
            monkeypatch.setattr(kind, method, functools.cache(getattr(kind, method)))
        monkeypatch.setattr(module, name, _once_for_a_config(kind))


def _once_for_a_config(kind):
    made = {}

    def make(config, *others):
        run = dataclasses.replace(config.run, **IRRELEVANT)
        key = repr(dataclasses.replace(config, run=run)), others
        if key not in made:
            made[key] = kind(config, *others)
        return made[key]

    return make
