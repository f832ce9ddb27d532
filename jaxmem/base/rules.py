"""Conditions on several settings: the rows of a section's table `RULES`.

    RULES = (
        must("clip_high", "at least clip_low={clip_low}", lambda c: c.high >= c.low),
        needs("offload", "an elementwise optimizer", lambda c: c.name != "muon"),
        left_out("workers", "without an environment", lambda c: c.environment is None),
    )

The functions get the section, or for rules across sections the whole configuration of
the job, whose settings are `run.steps`. Errors name a setting by its path, and may
quote others: `{heads}` stands for the value of `heads`. The setting itself has
`{path}`, `{value}`, its `{default}`, and `{short}`, the value cut to a line. A setting
is set if it differs from its default. `base.fields.check` evaluates the table in its
order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmem.base import fields, messages

Condition = Callable[[Any], Any]  # of a configuration; true or false in effect


class _Quoted(dict):
    """Facts of one setting by name, and the attributes of its configuration."""

    def __init__(self, config: Any, **facts: Any):
        super().__init__(facts)
        self._config = config

    def __missing__(self, name: str) -> Any:
        return getattr(self._config, name)


@dataclasses.dataclass(frozen=True)
class SettingsRule:
    """A condition on each of some settings, and the error of one that breaks it."""

    settings: tuple[str, ...]  # paths
    error: str  # follows the path
    where: Condition  # true of a configuration: an error
    if_set: bool = False  # True: settings that have their defaults are no error

    def fault(self, config: Any, prefix: str) -> str | None:
        """See `base.fields.JointConstraint`."""
        if not self.where(config):
            return None
        for path in self.settings:
            value, default = fields.value_of(config, path), _default(config, path)
            if not self.if_set or value != default:
                facts = _Quoted(
                    config, path=path, value=value, default=default,
                    short=messages.short(value),
                )  # fmt: skip
                return f"{prefix}{path}{self.error.format_map(facts)}"
        return None


def wrong(
    settings: str, text: str, where: Condition, *, if_set: bool = False
) -> SettingsRule:
    """The error "KEY TEXT" of these settings where a condition is true."""
    return SettingsRule(tuple(settings.split()), f" {text}", where, if_set)


def refused(settings: str, text: str, where: Condition) -> SettingsRule:
    """The error "KEY=VALUE TEXT" of these settings where a condition is true."""
    return SettingsRule(tuple(settings.split()), f"={{value!r}} {text}", where)


def must(setting: str, be: str, good: Condition) -> SettingsRule:
    """The error "KEY must be BE, got VALUE" where `good` is false."""
    return wrong(
        setting, f"must be {be}, got {{short}}", lambda config: not good(config)
    )


def unfit(settings: str, text: str, where: Condition) -> SettingsRule:
    """The error "KEY=VALUE TEXT" of those that are set, where a condition is true."""
    return SettingsRule(tuple(settings.split()), f"={{value!r}} {text}", where, True)


def needs(
    settings: str, what: str, having: Condition = lambda _: False
) -> SettingsRule:
    """The error "KEY=VALUE needs WHAT" of those that are set, if not `having`."""
    return unfit(settings, f"needs {what}", lambda config: not having(config))


def excludes(settings: str, what: str, where: Condition) -> SettingsRule:
    """The error "KEY=VALUE cannot be combined with WHAT" of those that are set."""
    return unfit(settings, f"cannot be combined with {what}", where)


def unread(settings: str, why: str, where: Condition) -> SettingsRule:
    """The error "KEY=VALUE has no effect WHY" of those that are set."""
    return unfit(settings, f"has no effect {why}", where)


def left_out(settings: str, why: str, where: Condition) -> SettingsRule:
    """The error "KEY must be left out, or DEFAULT, WHY, got VALUE" of those set."""
    text = f"must be left out, or {{default!r}}, {why}, got {{short}}"
    return wrong(settings, text, where, if_set=True)


def stays(
    setting: str, expected: Any, why: str, where: Condition = lambda _: True
) -> SettingsRule:
    """The error "KEY=VALUE must stay EXPECTED WHY" of another value."""
    text = repr(expected).replace("{", "{{").replace("}", "}}")
    return refused(
        setting,
        f"must stay {text} {why}",
        lambda config: where(config) and fields.value_of(config, setting) != expected,
    )


def is_set(config: Any, path: str) -> bool:
    """True if a setting differs from its default."""
    return fields.value_of(config, path) != _default(config, path)


def _default(config: Any, path: str) -> Any:
    return fields.settings(type(config))[path].default
