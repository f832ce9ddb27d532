"""Replaces functions of another package, and restores them.

A replacement is written for the function of one version, with its arguments and their
meaning; other versions or arguments are rejected with the reason. It replaces the
function in every module of its package that holds it, under any name. Modules of other
packages may hold it on purpose, for example to compare; they are not changed, and a
warning lists them.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxmem.head.maths.spec import Chunk, Implementation
from jaxmem.integrations._head import NotServed, Options


class IntegrationError(RuntimeError):
    """A package that is not supported by this integration; the message says why."""


class Tally:
    """Calls of one replaced function: the served ones, and why the others were not.

    A jitted caller counts where it is traced, not where its compiled step runs.
    """

    def __init__(self, where: str, say: Callable[[str, str], None]):
        self._where, self._print_once = where, say
        self._served, self._refused = 0, collections.Counter[str]()
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Count a call that jaxmem answered."""
        with self._lock:
            self._served += 1

    def refuse(self, reason: str) -> None:
        """Count a call that is left to the original, and say why."""
        with self._lock:
            self._refused[reason] += 1
        self._print_once(self._where, reason)

    def status(self) -> "FunctionStatus":
        """The counts so far."""
        with self._lock:
            return FunctionStatus(self._where, self._served, dict(self._refused))


@dataclasses.dataclass(frozen=True)
class FunctionStatus:
    """Calls of a replaced function since `apply`, counted where they are traced."""

    name: str  # "package.module:function" or "package.module:Class.method"
    served: int  # by jaxmem
    refused: dict[str, int]  # left to the package's own function, by reason

    def __str__(self) -> str:
        if not self.served and not self.refused:
            return f"{self.name}: not called"
        parts = [f"served {self.served}"]
        parts += [f"not served {n}: {reason}" for reason, n in self.refused.items()]
        return f"{self.name}: {'; '.join(parts)}"


@dataclasses.dataclass(frozen=True)
class IntegrationStatus:
    """Calls of a package's replaced functions since `apply`."""

    name: str  # of the integration
    version: str  # of the package
    is_applied: bool  # False after `undo`
    functions: tuple[FunctionStatus, ...]
    left_out: dict[str, str]  # functions that are not replaced, and the reason

    def __str__(self) -> str:
        head = (
            f"{self.name} {self.version}: {'applied' if self.is_applied else 'undone'}"
        )
        left_out = [
            f"{name}: not replaced: {why}" for name, why in self.left_out.items()
        ]
        return "\n  ".join([head, *map(str, self.functions), *left_out])


def or_original(
    original: Callable,
    tally: Tally,
    convert: Callable[[Any], Any] = lambda argument: argument,
) -> Callable[[Callable], Callable]:
    """Decorate a replacement: where it raises `NotServed`, the original is called.

    `tally` counts both, and `convert` makes an argument of the original from one of the
    replacement.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
            except NotServed as reason:
                tally.refuse(str(reason))
            else:
                tally.serve()
                return result
            named = {name: convert(value) for name, value in kwargs.items()}
            return original(*map(convert, args), **named)

        vars(call)["jaxmem_original"] = original
        return call

    return decorate


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One attribute of one module, and its replacement."""

    where: str  # "package.module:function" or "package.module:Class.method"
    # maps (original, options, tally) to the replacement, which counts its calls there
    make: Callable[[Any, Options, Tally], Any]
    # names that the original must have, in order; None if it is not a function
    parameters: tuple[str, ...] | None
    # True: it is left alone, and the reason printed, if its module needs a package that
    # is not installed
    optional: bool = False


class ReplacedCall(NamedTuple):
    """The original and the options that a replacement gets beside its arguments."""

    original: Callable
    options: Options
    tally: Tally  # as in `Replacement.make`
    # objects that need not be traced in every step, and why they are not served
    refused: weakref.WeakKeyDictionary[Any, str]


def replacing(
    where: str,
    convert: Callable[[Any], Any] = lambda argument: argument,
    optional: bool = False,
    parameters: tuple[str, ...] | None = None,
) -> Callable[[Callable], Replacement]:
    """Make a function of a `ReplacedCall` and the original's arguments a `Replacement`.

    The original must have the same parameters, or `parameters`; `convert` is that of
    `or_original`, and the others are those of `Replacement`.
    """

    def decorate(function: Callable) -> Replacement:
        def make(original: Callable, options: Options, tally: Tally):
            call = ReplacedCall(original, options, tally, weakref.WeakKeyDictionary())
            decorate = or_original(original, tally, convert)
            return decorate(functools.partial(function, call))

        names = parameters or tuple(inspect.signature(function).parameters)[1:]
        return Replacement(where, make, names, optional)

    return decorate


class Integration:
    """A package's replacements, which are applied and undone together.

    Args:
        name: name of the package, for messages.
        known: replacements by the name of a distribution, of which the first installed
            one counts, and by version: a release must start with it, as in "0.1.7"; ""
            accepts any release whose functions have the expected arguments.
    """

    def __init__(self, name: str, known: dict[str, dict[str, tuple[Replacement, ...]]]):
        self._name, self._by_distribution = name, known
        everything = (r for by_version in known.values() for r in by_version.values())
        self._packages = {r.where.partition(".")[0] for rs in everything for r in rs}
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._functions: list[tuple[str, Any]] = []  # (`Replacement.where`, value)
        self._messages: set[str] = set()
        self._version, self._is_strict = "", False
        self._tallies: list[Tally] = []  # since the last `apply`
        self._left_out: dict[str, str] = {}

    def apply(
        self,
        *,
        chunk: Chunk = 1024,
        implementation: Implementation | None = None,
        strict: bool = False,
    ) -> None:
        """Replace the package's functions until `undo`, and print their names.

        Args:
            chunk: tokens whose logits may exist at once, over all rows.
            implementation: as in `jaxmem.logprobs`.
            strict: True for an `IntegrationError` wherever a call is not served, False
                for the package's own function and a message.

        Warns:
            RuntimeWarning: a module outside the package holds a replacement, and
                continues to call it.

        Raises:
            IntegrationError: the package is missing, or is not as expected.
            RuntimeError: it has been applied already.
        """
        if self._undo:
            raise RuntimeError(
                f"{self._name} is already applied; call its undo() first"
            )
        options = Options(chunk, implementation)
        version, replacements = self._known_release()
        self._version, self._is_strict = version, strict
        self._tallies, self._left_out = [], {}
        replacements = [r for r in replacements if self._is_importable(r)]
        originals = [(r, *self._find_original(r, version)) for r in replacements]
        # Warn before replacing anything, because a warning may be raised as an error.
        for replacement, *_, original in originals:
            self._warn_of_others("apply()", replacement.where, original)
        for replacement, owner, name, original in originals:
            tally = Tally(replacement.where, self._refuse_call)
            function = replacement.make(original, options, tally)
            self._tallies.append(tally)
            # Also what `from module import function` copied within the package.
            for holder in ((owner, name), *self._find_holders(original, within=True)):
                self._undo.append((*holder, original, function))
                setattr(*holder, function)
            self._functions.append((replacement.where, function))
            print(f"jaxmem: {self._name} {version}: {replacement.where} is replaced")
        if self not in _APPLIED:
            _APPLIED.append(self)

    def undo(self) -> None:
        """Restore the originals, also in modules that imported a replacement since.

        Warns:
            RuntimeWarning: a module outside the package holds a replacement, and
                continues to call it.

        Raises:
            RuntimeError: nothing has been applied.
        """
        if not self._undo:
            raise RuntimeError(f"{self._name} is not applied; call its apply() first")
        for owner, name, original, function in reversed(self._undo):
            if vars(owner).get(name) is function:
                setattr(owner, name, original)
            for holder in self._find_holders(function, within=True):
                setattr(*holder, original)
        replaced, self._functions = self._functions, []
        self._undo, self._messages = [], set()
        for where, function in replaced:
            self._warn_of_others("undo()", where, function)

    @contextlib.contextmanager
    def applied(
        self,
        *,
        chunk: Chunk = 1024,
        implementation: Implementation | None = None,
        strict: bool = False,
    ) -> Iterator[None]:
        """Apply inside a `with` block, as `apply` does, and undo at its end."""
        self.apply(chunk=chunk, implementation=implementation, strict=strict)
        try:
            yield
        finally:
            self.undo()

    def status(self) -> IntegrationStatus:
        """Calls of the replaced functions since the last `apply`."""
        functions = tuple(tally.status() for tally in self._tallies)
        applied = bool(self._undo)
        return IntegrationStatus(
            self._name, self._version, applied, functions, dict(self._left_out)
        )

    def _refuse_call(self, where: str, reason: str) -> None:
        if not self._undo:
            return  # a function that outlives `undo` is expected to do no more
        if self._is_strict:
            raise IntegrationError(f"{self._name}: {where} is not served: {reason}")
        self._print_once(reason)

    def _print_once(self, reason: str) -> None:
        if reason not in self._messages:
            self._messages.add(reason)
            print(f"jaxmem: {self._name}: not patched: {reason}")

    def _known_release(self) -> tuple[str, tuple[Replacement, ...]]:
        for distribution, by_version in self._by_distribution.items():
            try:
                version = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            for known, replacements in by_version.items():
                if version == known or not known or version.startswith(known + "."):
                    return version, replacements
            raise IntegrationError(
                f"{distribution} {version} is installed, but jaxmem.integrations "
                f"supports only {', '.join(by_version)}; install one of these releases"
            )
        names = " or ".join(self._by_distribution)
        raise IntegrationError(f"{names} is not installed")

    def _is_importable(self, replacement: Replacement) -> bool:
        """False if a package that an optional replacement needs is not installed."""
        if not replacement.optional:
            return True
        try:
            importlib.import_module(replacement.where.partition(":")[0])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in self._packages:
                return True  # `_find` raises
            self._left_out[replacement.where] = str(error)
            self._print_once(f"{replacement.where} ({error})")
            return False
        return True

    def _find_original(
        self, replacement: Replacement, version: str
    ) -> tuple[Any, str, Any]:
        """The object that holds an attribute, the attribute's name, and its value."""
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
                    f"({', '.join(has)}), but jaxmem expects "
                    f"({', '.join(replacement.parameters)})"
                )
        return owner, name, original

    def _warn_of_others(self, call: str, where: str, value: Any) -> None:
        names = [
            f"{module.__name__}.{name}"
            for module, name in self._find_holders(value, within=False)
        ]
        if names:
            warnings.warn(
                f"jaxmem: {', '.join(names)} was imported before {call} and stays as "
                f"it was; import it afterwards, or call {where} through its module",
                RuntimeWarning,
                stacklevel=3,
            )

    def _find_holders(self, value: Any, within: bool) -> list[tuple[Any, str]]:
        """Modules and names of attributes that hold `value`, in or outside the package.

        The list is empty for a module object, which every user of the package holds.
        """
        if isinstance(value, types.ModuleType):
            return []
        return [
            (module, name)
            for module in list(sys.modules.values())
            if isinstance(module, types.ModuleType)
            and (module.__name__.partition(".")[0] in self._packages) == within
            for name, held in list(vars(module).items())
            if held is value
        ]


_APPLIED: list[Integration] = []  # in the order of their first `apply`


def status() -> tuple[IntegrationStatus, ...]:
    """Calls of each integration that has been applied, served or not and why.

    The counts begin at the last `apply`, and stay after `undo`. A jitted caller counts
    where it is traced.
    """
    return tuple(integration.status() for integration in _APPLIED)
