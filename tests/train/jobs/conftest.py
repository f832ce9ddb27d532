"""Runs of one config that share a program."""

import dataclasses
import functools

import pytest

from jaxmem.train.jobs import distill, dpo, grpo, sft

# No program depends on these of the section `run`.
IRRELEVANT = {
    "out_dir": "", "checkpoint_every": 1, "keep": 1, "log_every": 1,
    "compare_heads": False,
}  # fmt: skip
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
    _share(monkeypatch)


@pytest.fixture(scope="module")
def programs_of_module():
    """The same among all tests of a module, none of which changes what is compiled."""
    with pytest.MonkeyPatch.context() as patched:
        _share(patched)
        yield


def _share(patched):
    for module, name, methods in PROGRAMS:
        kind = getattr(module, name)
        for method in methods:
            patched.setattr(kind, method, functools.cache(getattr(kind, method)))
        patched.setattr(module, name, _once_for_a_config(kind))


def _once_for_a_config(kind):
    programs = {}

    def make(config, *others):
        run = dataclasses.replace(config.run, **IRRELEVANT)
        key = repr(dataclasses.replace(config, run=run)), others
        if key not in programs:
            programs[key] = kind(config, *others)
        return programs[key]

    return make
