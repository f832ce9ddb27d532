"""CPU devices in the place of planned ones: everything but the compiler is real."""

import contextlib
import importlib
import types
import zlib

import jax
import pytest

from jaxmem import devices
from jaxmem.devices import targets
from jaxmem.head.kernels import row_sums


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


@pytest.fixture
def numbered(monkeypatch):
    """No program is compiled: its bytes are a number that no other text has."""

    def compiled(lowered, **_):
        number = zlib.crc32(lowered.as_text().encode())
        kinds = "argument", "output", "temp", "alias", "host_temp"
        sizes = {f"{kind}_size_in_bytes": number for kind in kinds}
        account = types.SimpleNamespace(**sizes)
        return types.SimpleNamespace(
            memory_analysis=lambda: account, as_text=lambda: ""
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
