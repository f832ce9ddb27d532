"""CPU devices in the place of planned ones: everything but the compiler is real."""

import contextlib
import importlib

import jax
import pytest

from jaxmem import devices
from jaxmem.devices import targets
from jaxmem.kernels import row_sums


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(
        targets, "of", lambda device, count, hosts: jax.devices()[:count]
    )
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "")
    # Programs for these devices, unlike those for absent ones, are read back.
    module = importlib.import_module("jaxmem.devices.current")
    monkeypatch.setattr(module, "_no_persistent_cache", contextlib.nullcontext)
    # XLA for CPUs cannot compile the kernels of two heads' sums.
    monkeypatch.setattr(row_sums, "supports", lambda *of: False)
