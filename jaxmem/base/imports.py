"""Lazy imports of submodules, and clear errors about missing third-party packages."""

import importlib
import importlib.util
import shlex
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy(
    package: str, *names: str, **functions: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`: submodules load at their first use.

    `names` are submodules, and `functions` say in which of them each is. A package
    defines both in the `else` of an `if typing.TYPE_CHECKING` that imports the same
    names: a type checker that saw a `__getattr__` would take any name for an `Any`.
    """

    def getattr_(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        if name in functions:
            module = importlib.import_module(f"{package}.{functions[name]}")
            return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_, public_dir(package, *names, *functions)


def public_dir(package: str, *names: str) -> Callable[[], list[str]]:
    """A package's `__dir__`: without modules that it has imported, but with `names`."""

    def dir_() -> list[str]:
        own = vars(importlib.import_module(package)).items()
        public = [k for k, value in own if not isinstance(value, types.ModuleType)]
        return sorted({*public, *names})

    return dir_


def require(package: str, extra: str, *modules: str) -> None:
    """Raise unless the third-party modules that a package of ours needs are installed.

    Raises:
        ModuleNotFoundError: one is not; the message names the extra that has it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{package} needs {', '.join(missing)}, which is not installed; run: "
            f"{how_to_install(extra)}",
            name=missing[0],
        )


def how_to_install(extra: str) -> str:
    """The command that installs an extra: of the clone, where the package is in one."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install 'jaxmem[{extra}]'"
