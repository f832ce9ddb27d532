"""Errors of settings, word for word: one of each range, and of each row of `RULES`."""

import contextlib
import io
from pathlib import Path

import pytest

from jaxmem.base import fields
from jaxmem.base.fields import Must, Setting
from jaxmem.base.ranges import Range
from jaxmem.base.rules import SettingsRule
from jaxmem.train import configuration
from jaxmem.train.configuration import ConfigError
from jaxmem.train.jobs import JOBS
from jaxmem.train.jobs.pair_objective import DpoConfig

LINES = Path(__file__).with_name("refused_settings.txt").read_text().splitlines()[1:]
ERRORS = dict(zip(LINES[::2], map(str.strip, LINES[1::2]), strict=True))


def refused(command, directory):
    """The error of a job with some overrides, without the place of a setting."""
    job, *overrides = command.split()
    file = directory / "a.gin"
    file.write_text(f"run.job = {job!r}\n")
    with (
        pytest.raises(ConfigError) as raised,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        configuration.load(file, overrides)
    text = str(raised.value).removeprefix(f"{file}:1: ")
    for override in overrides:
        text = text.removeprefix(f"override {override!r}: ")
    return text


@pytest.mark.parametrize("command", ERRORS)
def test_load_refuses_with_these_words(command, tmp_path):
    assert refused(command, tmp_path) == ERRORS[command]


def test_every_range_and_rule_has_an_error_here(tmp_path, monkeypatch):
    broken = set()

    def recorded(kind):
        own = kind.fault

        def fault(self, *arguments):
            text = own(self, *arguments)
            broken.update([id(self)] if text else [])
            return text

        monkeypatch.setattr(kind, "fault", fault)

    recorded(Setting)
    recorded(SettingsRule)
    for command in ERRORS:
        refused(command, tmp_path)
    kinds = [
        kind
        for section in configuration.sections().values()
        for kind in fields.groups(section).values()
    ]
    ranges = [
        (f"{kind.__name__}.{setting.path}", setting)
        for kind in kinds
        for setting in fields.fields(kind)
        if setting.fact(Range) or setting.fact(Must)
    ]
    rules = [
        (f"{kind.__name__}.{rule.settings[0]}{rule.error}", rule)
        for kind in [*kinds, *(job.Config for job in JOBS.values())]
        for rule in (*fields.rules(kind), *getattr(kind, "LOSS_RULES", ()))
        if kind is not DpoConfig  # tests of a loss of one's own have them
    ]
    missing = [name for name, each in ranges + rules if id(each) not in broken]
    assert not missing, missing
