"""Packages that are imported at first use, and what to install where one is missing."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def lazy(
    package: str, *names: str, **functions: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose submodules load at first use.

    Args:
        package: its name.
        names: of its submodules.
        functions: name to the submodule that has it.
    """

    def getattr_(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        if name in functions:
            module = importlib.import_module(f"{package}.{functions[name]}")
            return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_() -> list[str]:
        own = vars(importlib.import_module(package))
        return sorted({*own, *names, *functions})

    return getattr_, dir_


def require(package: str, extra: str, *modules: str) -> None:
    """Refuse to import a package of ours without the third-party modules it needs.

    Raises:
        ModuleNotFoundError: one is not installed; the message names the extra.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{package} needs {', '.join(missing)}, which is not installed; run: "
            f"pip install 'jaxmem[{extra}]'",
            name=missing[0],
        )
