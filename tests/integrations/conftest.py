"""Fixtures that the tests of integrations share."""

import sys
import types

import pytest

from jaxmem.integrations import _replace

# They hold no function of the packages, and have most of what modules hold.
_OTHERS = {"jax", "jaxlib", "pandas", "orbax", "numpy", "flax", "perfetto", "_pytest"}


@pytest.fixture(autouse=True)
def fewer_modules(request, monkeypatch):
    """A replaced function is looked for in fewer modules, except in `test_replace`.

    The search through all of them would be most of the time of these tests.
    """
    if request.path.stem != "test_replace":
        monkeypatch.setattr(_replace, "sys", types.SimpleNamespace(modules=_Modules()))


class _Modules:
    def values(self):
        loaded = list(sys.modules.items())
        return [x for name, x in loaded if name.partition(".")[0] not in _OTHERS]
