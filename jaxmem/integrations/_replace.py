"""Functions of another package replaced, wherever they were imported to, and put back.

A replacement is written against one version's function, its arguments and their
meaning; another version, or other arguments, are refused with the reason.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jaxmem.integrations._head import Options


class IntegrationError(RuntimeError):
    """A package that is not as this integration knows it; the message says how."""


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One attribute of one module.

    Attributes:
        where: "package.module:function" or "package.module:Class.method".
        make: (original, options, say) to what takes its place; `say` tells the user,
            once, why a call is left to the original.
        parameters: names that the original must have, in order; None: not a function.
    """

    where: str
    make: Callable[[Any, Options, Callable[[str], None]], Any]
    parameters: tuple[str, ...] | None


class Integration:
    """A package's replacements, together on or off.

    Args:
        name: of the package, as it is imported.
        distributions: names that it may be installed under.
        replacements: by version, which a release must start with: "0.1.7", or "" for
            any, where the package has no releases and arguments alone decide.
    """

    def __init__(
        self,
        name: str,
        distributions: tuple[str, ...],
        replacements: dict[str, tuple[Replacement, ...]],
    ):
        self._name, self._distributions = name, distributions
        self._by_version = replacements
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._said: set[str] = set()

    def apply(self, options: Options) -> None:
        """Replace, and print what.

        Raises:
            IntegrationError: the package is missing, or not as it is known here.
            RuntimeError: it has been applied already.
        """
        if self._undo:
            raise RuntimeError(f"{self._name} has been applied; undo() it first")
        version, replacements = self._known()
        found = [(r, *self._find(r, version)) for r in replacements]
        for replacement, owner, name, original in found:
            made = replacement.make(original, options, self._say)
            self._set(owner, name, original, made)
            self._set_aliases(original, made)
            print(f"jaxmem: {self._name} {version}: {replacement.where} is replaced")

    def undo(self) -> None:
        """Put back what was there, also where it has been imported to since.

        Raises:
            RuntimeError: nothing has been applied.
        """
        if not self._undo:
            raise RuntimeError(f"{self._name} has not been applied")
        for owner, name, original, made in reversed(self._undo):
            if vars(owner).get(name) is made:
                setattr(owner, name, original)
            self._restore_aliases(made, original)
        self._undo, self._said = [], set()

    @contextlib.contextmanager
    def applied(self, options: Options) -> Iterator[None]:
        """`apply` for a while."""
        self.apply(options)
        try:
            yield
        finally:
            self.undo()

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            print(f"jaxmem: {self._name}: left as it is: {reason}")

    def _known(self) -> tuple[str, tuple[Replacement, ...]]:
        for distribution in self._distributions:
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            for known, replacements in self._by_version.items():
                if version == known or not known or version.startswith(known + "."):
                    return version, replacements
            raise IntegrationError(
                f"{distribution} {version} is installed; jaxmem.integrations knows "
                f"{', '.join(self._by_version)}, and what another release expects of "
                "these functions is not known"
            )
        raise IntegrationError(f"{self._distributions[0]} is not installed")

    def _find(self, replacement: Replacement, version: str) -> tuple[Any, str, Any]:
        """The object that holds an attribute, its name, and what it is."""
        module, _, path = replacement.where.partition(":")
        try:
            owner = importlib.import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            original = vars(owner)[name]
        except (ImportError, AttributeError, KeyError) as error:
            raise IntegrationError(
                f"{self._name} {version} has no {replacement.where} ({error})"
            ) from error
        if replacement.parameters is not None:
            has = tuple(inspect.signature(original).parameters)
            if has != replacement.parameters:
                raise IntegrationError(
                    f"{self._name} {version}: {replacement.where} takes "
                    f"({', '.join(has)}), not ({', '.join(replacement.parameters)}) as "
                    "known here"
                )
        return owner, name, original

    def _set(self, owner: Any, name: str, original: Any, made: Any) -> None:
        setattr(owner, name, made)
        self._undo.append((owner, name, original, made))

    def _set_aliases(self, original: Any, made: Any) -> None:
        """Where `from module import function` has put it, within the package."""
        for module in _modules(self._name):
            for name, value in list(vars(module).items()):
                if value is original and inspect.isroutine(inspect.unwrap(original)):
                    self._set(module, name, original, made)

    def _restore_aliases(self, made: Any, original: Any) -> None:
        for module in _modules(self._name):
            for name, value in list(vars(module).items()):
                if value is made:
                    setattr(module, name, original)


def _modules(package: str) -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and (name == package or name.startswith(package + "."))
    ]
