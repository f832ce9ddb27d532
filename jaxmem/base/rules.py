"""Conditions on several settings: the rows of a section's table `RULES`.

    RULES = (
        must("clip_high", "at least clip_low={clip_low}", lambda c: c.high >= c.low),
        needs("offload", "an elementwise optimizer", lambda c: c.name != "muon"),
        left_out("workers", "without an environment", lambda c: c.environment is None),
    )

The functions get the section, or for rules across sections the whole configuration of
the job, whose settings are `run.steps`. Errors name a setting by its path, and may
quote others: `{heads}` stands for the value of `heads`. A setting is set if it differs
from its default. `base.fields.check` evaluates the table in its order.
"""

import dataclasses
import string
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.base import fields, messages

Condition = Callable[[Any], Any]  # of a configuration; true or false in effect


class _Quoted(Mapping):
    """Attributes of a configuration by name, for the text of an error."""

    def __init__(self, config: Any):
        self._config = config

    def __getitem__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __iter__(self):
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class SettingsRule:
    """A condition on each of some settings, and the error of one that breaks it."""

    settings: tuple[str, ...]  # paths
    # follows the path; {0} stands for the value, {1} for its short form, {2} for the
    # default
    error: str
    breaks: Callable[[Any, str], Any]  # true for a configuration and a path: an error

    def fault(self, config: Any, prefix: str) -> str | None:
        """See `base.fields.JointConstraint`."""
        for path in self.settings:
            if self.breaks(config, path):
                value = fields.value_of(config, path)
                facts = value, messages.short(value), _default(config, path)
                text = string.Formatter().vformat(self.error, facts, _Quoted(config))
                return f"{prefix}{path}{text}"
        return None


def must(setting: str, be: str, good: Condition) -> SettingsRule:
    """KEY must be BE, got VALUE: unless `good` is true."""
    return SettingsRule(
        (setting,), f" must be {be}, got {{1}}", lambda config, _: not good(config)
    )


def refused(settings: str, text: str, where: Condition) -> SettingsRule:
    """KEY=VALUE TEXT: for a set one of these settings where a condition is true."""
    return SettingsRule(
        tuple(settings.split()),
        f"={{0!r}} {text}",
        lambda config, path: is_set(config, path) and where(config),
    )


def needs(settings: str, what: str, having: Condition) -> SettingsRule:
    """KEY=VALUE needs WHAT: for a set one of these settings unless `having` is true."""
    return refused(settings, f"needs {what}", lambda config: not having(config))


def left_out(settings: str, why: str, where: Condition) -> SettingsRule:
    """KEY must be left out, or DEFAULT, WHY, got VALUE: for set ones in a condition."""
    return SettingsRule(
        tuple(settings.split()),
        f" must be left out, or {{2!r}}, {why}, got {{1}}",
        lambda config, path: is_set(config, path) and where(config),
    )


def stays(setting: str, expected: Any, why: str, where: Condition) -> SettingsRule:
    """KEY=VALUE must stay EXPECTED WHY: for another value where a condition is true."""
    return SettingsRule(
        (setting,),
        f"={{0!r}} must stay {_escaped(repr(expected))} {why}",
        lambda config, path: (
            fields.value_of(config, path) != expected and where(config)
        ),
    )


def is_set(config: Any, path: str) -> bool:
    """True if a setting differs from its default."""
    return fields.value_of(config, path) != _default(config, path)


def _default(config: Any, path: str) -> Any:
    return fields.settings(type(config))[path].default


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
