"""CPU devices in the place of planned ones: everything but the compiler is real."""

import jax
import pytest

from jaxmem import devices
from jaxmem.devices import targets


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(
        targets, "of", lambda device, count, hosts: jax.devices()[:count]
    )
    monkeypatch.setattr(devices, "compiler_missing", lambda device: "")
