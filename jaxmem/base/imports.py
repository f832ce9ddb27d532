"""Lazy imports of submodules, and clear errors about missing third-party packages."""

import importlib
import importlib.metadata
import importlib.util
import json
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
    """The command that installs an extra of the jaxmem that runs.

    It names the clone, if jaxmem runs from one; otherwise the address and the commit
    that pip installed, as direct_url.json records them (PEP 610).
    """
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    try:
        distribution = importlib.metadata.distribution("jaxmem")
    except importlib.metadata.PackageNotFoundError:  # files that somebody has copied
        return f"pip install 'jaxmem[{extra}]'"
    source = _installed_from(
        json.loads(distribution.read_text("direct_url.json") or "{}")
    )
    return f"pip install {shlex.quote(f'jaxmem[{extra}]{source}')}"


def _installed_from(direct_url: dict[str, Any]) -> str:
    """The end of a requirement that names an address; of an index's package, none."""
    address = direct_url.get("url")
    if address is None:
        return ""
    if "vcs_info" not in direct_url:
        return f" @ {address}"
    version = direct_url["vcs_info"]
    return f" @ {version['vcs']}+{address}@{version['commit_id']}"
