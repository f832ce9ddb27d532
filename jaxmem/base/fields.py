"""Sections of a configuration: dataclasses whose annotations have all facts of fields.

    @dataclasses.dataclass(frozen=True)
    class PolicyConfig:
        prompts: Annotated[int, integers(1), "number of prompts in a rollout"] = 32
        scale: Annotated[Literal["group", "batch"], "divisor of rewards"] = "group"
        rope: Annotated[RopeConfig, "rotary position embedding"] = RopeConfig()

        RULES = (needs("scale", "several prompts", lambda self: self.prompts > 1),)

        def __post_init__(self):
            check(self)

A text is the help that `jaxmem train --keys` prints. An object with a method `fault` is
a constraint on the value: `base.ranges.Range`, `Must`, `base.user_code.Named`. The
choices of a Literal are checked too. A field that is a dataclass is a group of
settings, which are named by their whole path: `rope.theta`. `RULES` are conditions that
several settings have to meet together (`base.rules`); a class adds its own to those of
its bases.
"""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

from jaxmem.base import messages
from jaxmem.base.ranges import integers, reals

_T = TypeVar("_T")
_Kind = TypeVar("_Kind")


@typing.runtime_checkable
class Constraint(Protocol):
    """A constraint on the value of one field, in its annotation."""

    def fault(self, value: Any, optional: bool) -> str | None:
        """The fault of a value, as in "must be above 0"; None for a good value.

        `optional` is True if the field may be None; `value` is then not None.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Must:
    """A constraint in words, with the function that is True of good values."""

    be: str  # as in "a directory, or None"
    is_good: Callable[[Any], bool] = dataclasses.field(repr=False)

    def fault(self, value: Any, optional: bool) -> str | None:
        """See `Constraint`."""
        return None if self.is_good(value) else f"must be {self.be}"


@dataclasses.dataclass(frozen=True)
class _LiteralChoice:
    """The constraint of a Literal, perhaps with None."""

    annotation: Any

    def fault(self, value: Any, optional: bool) -> str | None:
        """See `Constraint`."""
        is_good = accepts(self.annotation, value)
        return None if is_good else f"must be {describe(self.annotation)}"


class JointConstraint(Protocol):
    """A condition on several settings of a section; `base.rules` has its kinds."""

    def fault(self, config: Any, prefix: str) -> str | None:
        """The error of a configuration; None if the condition is met.

        `prefix` stands before the paths of settings: "ModelConfig.", or "".
        """
        ...


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a section, or of a group within it, with all of its facts."""

    path: str  # within the section, as in "rope.theta"
    annotation: Any  # without its metadata: the type
    default: Any  # dataclasses.MISSING for none
    facts: tuple[Any, ...] = ()  # the annotation's metadata

    @property
    def help(self) -> str:
        """The help of the field, on one line; empty for none."""
        return " ".join(fact for fact in self.facts if isinstance(fact, str))

    @functools.cached_property
    def is_optional(self) -> bool:
        """True if the value may be None."""
        return type(None) in typing.get_args(self.annotation)

    @functools.cached_property
    def group(self) -> type | None:
        """The dataclass of a field that is a group of settings; else None."""
        kind = self.annotation
        is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        return kind if is_group else None

    @functools.cached_property
    def constraints(self) -> tuple[Constraint, ...]:
        """The constraints on the value; that of a Literal is the last one."""
        own = tuple(fact for fact in self.facts if isinstance(fact, Constraint))
        is_choice = _is_choice(self.annotation)
        return (*own, _LiteralChoice(self.annotation)) if is_choice else own

    def fact(self, kind: type[_Kind]) -> _Kind | None:
        """The first fact of a class; None without one."""
        return next((fact for fact in self.facts if isinstance(fact, kind)), None)

    def fault(self, value: Any) -> str | None:
        """The fault of a value; None for a good one."""
        if value is None and self.is_optional:
            return None
        faults = (each.fault(value, self.is_optional) for each in self.constraints)
        return next((fault for fault in faults if fault is not None), None)


@functools.cache
def fields(section: type) -> tuple[Setting, ...]:
    """The fields of a dataclass in their order; a group is one of them."""
    hints = typing.get_type_hints(section, include_extras=True)
    return tuple(
        _setting_of(field, hints[field.name])
        for field in dataclasses.fields(section)
        if field.init
    )


@functools.cache
def settings(section: type) -> Mapping[str, Setting]:
    """The settings of a dataclass and of its groups, by their path."""
    return types.MappingProxyType({s.path: s for s in _settings(section)})


def groups(section: type) -> dict[str, type]:
    """The dataclasses of a section by their path: its own at "", then its groups."""
    inner = (field for field in fields(section) if field.group is not None)
    return {"": section} | {
        f"{field.path}.{path}".rstrip("."): group
        for field in inner
        for path, group in groups(typing.cast(type, field.group)).items()
    }


def value_of(config: Any, path: str) -> Any:
    """The value of a setting."""
    return operator.attrgetter(path)(config)


def values_of(config: Any) -> dict[str, Any]:
    """The value of every setting of a section, by path."""
    return {path: value_of(config, path) for path in settings(type(config))}


def build(
    section: type[_T],
    values: Mapping[str, Any],
    base: Any = None,
    name: str | None = None,
) -> _T:
    """The dataclass of some settings, by path, and of defaults for all others.

    Args:
        section: the dataclass.
        values: settings by path.
        base: an object whose settings are the defaults; None: those of the class.
        name: the name that errors begin with; None: that of the class.

    Raises:
        TypeError: a path names no setting, or a group has a value of its own.
        ValueError: a value cannot be used. The message names it by its whole path, as
            in `ModelConfig.rope.theta`.
    """
    name = section.__name__ if name is None else name
    known = {field.path: field for field in fields(section)}
    for path, value in values.items():
        first, _, rest = path.partition(".")
        group = known[first].group if first in known else None
        if first not in known or (rest and group is None):
            raise TypeError(f"{_join(name, path)!r} is not a setting")
        if group is not None and not rest and not isinstance(value, group):
            example = _join(name, f"{path}.{fields(group)[0].path}")
            raise TypeError(
                f"{_join(name, path)!r} is a group of settings; name one of them, as "
                f"in {example!r}"
            )
    own = {path: value for path, value in values.items() if "." not in path}
    inner: dict[str, dict[str, Any]] = {}  # by the first part of their paths
    for path in values.keys() - own.keys():
        first, _, rest = path.partition(".")
        inner.setdefault(first, {})[rest] = values[path]
    for field in fields(section):
        if field.path not in inner or field.group is None:
            continue
        default = field.default if base is None else getattr(base, field.path)
        whole = _join(name, field.path)
        try:
            own[field.path] = build(
                field.group,
                inner[field.path],
                None if default is dataclasses.MISSING else default,
                whole,
            )
        except ValueError as error:
            text = str(error).replace(f"{field.group.__name__}.", f"{whole}.")
            raise ValueError(text) from error
    return section(**own) if base is None else dataclasses.replace(base, **own)


def check(config: Any, name: str | None = None) -> None:
    """Raise a ValueError that names the first setting that cannot be used.

    Constraints of single settings come first, then the conditions of `RULES`; those of
    a group come before those of the section that it is in.

    Args:
        config: the dataclass.
        name: the name that errors begin with; None: that of its class.
    """
    name = type(config).__name__ if name is None else name
    _raise_first(_faults(config, name))


def check_rules(config: Any, rules: Iterable[JointConstraint]) -> None:
    """Raise a ValueError for the first of some conditions that is not met."""
    name = type(config).__name__
    _raise_first(_joint_faults(config, rules, name))


@functools.cache
def rules(section: type) -> tuple[JointConstraint, ...]:
    """The conditions of a dataclass, after those of its bases."""
    classes = reversed(section.__mro__)
    return tuple(rule for kind in classes for rule in vars(kind).get("RULES", ()))


def _raise_first(faults: Iterator[str]) -> None:
    for fault in faults:
        raise ValueError(fault)


def _faults(config: Any, name: str) -> Iterator[str]:
    for field in fields(type(config)):
        if not field.constraints and field.group is None:
            continue
        value, path = getattr(config, field.path), _join(name, field.path)
        if field.group is not None:
            yield from _faults(value, path)
        elif fault := field.fault(value):
            yield f"{path} {fault}, got {messages.short(value)}"
    yield from _joint_faults(config, rules(type(config)), name)


def _joint_faults(
    config: Any, rules: Iterable[JointConstraint], name: str
) -> Iterator[str]:
    for rule in rules:
        if fault := rule.fault(config, _join(name, "")):
            yield fault


def _join(name: str, path: str) -> str:
    return f"{name}.{path}" if name else path


def _settings(section: type) -> Iterator[Setting]:
    for field in fields(section):
        if field.group is None:
            yield field
            continue
        for setting in settings(field.group).values():
            path, default = f"{field.path}.{setting.path}", setting.default
            if field.default is not dataclasses.MISSING:
                default = value_of(field.default, setting.path)
            yield dataclasses.replace(setting, path=path, default=default)


def _setting_of(field: dataclasses.Field, annotation: Any) -> Setting:
    facts = ()
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *facts = typing.get_args(annotation)
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Setting(field.name, annotation, default, tuple(facts))


def check_field(config: object, name: str, good: bool, expected: str) -> None:
    """Raise a ValueError unless a field is good; `expected` describes good values."""
    if not good:
        field = f"{type(config).__name__}.{name}"
        raise ValueError(messages.must_be(field, expected, value_of(config, name)))


def problem_of(value: Any) -> str | None:
    """The fault of a value that no option may have; None for any other value.

    Such values are numbers outside of float32 or int64, and text that UTF-8 cannot
    encode or that contains a NUL character.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "must be text that UTF-8 can encode"
        return "must not contain a NUL character" if "\0" in value else None
    if type(value) not in (int, float):
        return None
    return (integers() if type(value) is int else reals()).problem(value)


def accepts(annotation: Any, value: Any) -> bool:
    """True if a value has the type that a field declares."""
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return accepts(choices[0], value)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(choice, value) for choice in choices)
    if origin is Literal:
        return any(type(value) is type(c) and value == c for c in choices)
    if annotation is float:
        return type(value) in (int, float)
    return type(value) is (origin or annotation)


def describe(annotation: Any) -> str:
    """The type that a field declares, in words."""
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe(choices[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(choice) for choice in choices)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in choices)
    if annotation is types.NoneType:
        return "None"
    if origin is tuple and ... not in choices:
        return f"({', '.join(map(describe, choices))})"
    return (origin or annotation).__name__


def _is_choice(annotation: Any) -> bool:
    """True for a Literal, and for a Literal or None."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    kinds = [kind for kind in kinds if kind is not types.NoneType]
    return all(typing.get_origin(kind) is Literal for kind in kinds)
