"""Groups of settings, `section.group.key`, and old keys, wherever keys are written."""

import dataclasses
from pathlib import Path
from typing import Annotated

import pytest

from jaxmem.base.ranges import reals
from jaxmem.data.config import DataConfig
from jaxmem.train import configuration, keys, renamed_keys
from jaxmem.train.configuration import ConfigError
from jaxmem.train.jobs import JOBS, JobConfig
from jaxmem.train.renamed_keys import Renamed
from jaxmem.train.state import resuming
from tests.helpers.own_job import Ema


@dataclasses.dataclass(frozen=True)
class Curve:
    """Shape of the average's rate over the run."""

    start: Annotated[float, reals(0), "rate at the first step"] = 0.5
    factors: Annotated[dict[str, float] | None, "factors of the rate by name"] = None


@dataclasses.dataclass(frozen=True)
class EmaConfig:
    """The average of past weights."""

    rate: Annotated[float, reals(0, below=1), "weight of the newest weights"] = 0.1
    curve: Annotated[Curve, "shape of the rate"] = Curve(start=0.25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig(JobConfig):
    """The sections of a job with a group of settings."""

    data: DataConfig
    ema: EmaConfig = EmaConfig()


class Grouped(Ema):
    Config = GroupedConfig


@pytest.fixture(autouse=True)
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(JOBS, "grouped", Grouped)
    Path("a.gin").write_text("run.job = 'grouped'\n")


def load(*overrides, text=""):
    Path("b.gin").write_text(f"include 'a.gin'\n{text}")
    return configuration.load("b.gin", overrides)[0]


def test_group_is_set_in_files_overrides_and_calls():
    expected = Curve(0.75, {"x": 2.0})
    lines = "ema.curve.start = 0.75\nema.curve.factors = {'x': 2.0}"
    block = "S = 0.75\nema.curve:\n  start = %S\n  factors = {'x': 2.0}"
    words = "ema.curve.start=0.75", "ema.curve.factors={'x': 2.0}"
    curve = {"start": 0.75, "factors": {"x": 2.0}}
    for config in (
        load(text=lines),
        load(text=block),
        load(*words),
        configuration.make("a.gin", ema={"curve": curve}),
        configuration.make("grouped", ema={"curve": curve}),
    ):
        assert config.ema == EmaConfig(curve=expected)
    assert load().ema.curve == load("ema.curve.start=None").ema.curve == Curve(0.25)


def test_text_and_keys_have_the_whole_path():
    config, text = configuration.load("a.gin", ["ema.curve.start=0.5"])
    assert "\nema.rate = 0.1\nema.curve.start = 0.5\n" in text
    Path("again.gin").write_text(text)
    assert configuration.load("again.gin") == (config, text)
    assert "ema.curve.start = 0.5" in keys.differing(config).splitlines()
    assert list(configuration.describe_keys("ema", "a.gin")) == [
        "# ema: The average of past weights.",
        "ema.rate = 0.1  # float; weight of the newest weights",
        "# ema.curve: Shape of the average's rate over the run.",
        "ema.curve.start = 0.5  # float; rate at the first step",
        "ema.curve.factors = None  # dict or None; factors of the rate by name",
    ]
    assert config.replaced({"ema.curve.start": 1.0}).ema.curve.start == 1.0


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("ema.curve.start=-1.0", "ema.curve.start must be at least 0, got -1.0"),
        ("ema.curve.start=x", "ema.curve.start must be float, got 'x' (str)"),
        ("ema.curve.start=1e999", "ema.curve.start must be finite, got inf"),
        ("ema.curve=1", "unknown key 'ema.curve'; it is a group of keys, as in "
         "ema.curve.start"),
        ("ema.curve.strat=1", "unknown key 'ema.curve.strat'; did you mean "
         "ema.curve.start?"),
        ("ema.start=1", "unknown key 'ema.start'; did you mean ema.curve.start?"),
        ("ema.crve.zzz=1", "unknown key 'ema.crve.zzz'; the nearest keys are "
         "ema.curve.start, ema.curve.factors; `jaxmem train --keys ema` lists all"),
    ],
)  # fmt: skip
def test_mistake_in_a_group_names_the_whole_path(override, error):
    with pytest.raises(ConfigError) as raised:
        load(override)
    assert str(raised.value) == f"override {override!r}: {error}"


def test_group_cannot_be_a_value_in_a_call():
    with pytest.raises(ConfigError, match="'ema.curve'; it is a group of keys"):
        configuration.make("grouped", ema={"curve": 3})


# ------------------------------------------------------------------- old keys


@pytest.fixture
def renamed(monkeypatch):
    """Two keys with old names, the second of which is no longer read."""
    for old, new, version in (
        ("ema.start", "ema.curve.start", "9.0"),
        ("ema.speed", "ema.rate", "0.1"),
    ):
        monkeypatch.setitem(renamed_keys.RENAMED, old, Renamed(new, version))


def test_old_key_is_read_and_the_new_one_printed(renamed, capsys):
    said = "ema.start is now ema.curve.start; old names are read up to version 9.0"
    for load_old, source in (
        (lambda: load(text="ema.start = 1.0"), "b.gin"),
        (lambda: load("ema.start=1.0"), "override 'ema.start=1.0'"),
        (
            lambda: configuration.make("grouped", ema={"start": 1.0}),
            "configuration.make",
        ),
    ):
        assert load_old().ema.curve.start == 1.0
        assert capsys.readouterr().err == f"jaxmem: {source}: {said}\n"


def test_old_and_new_key_are_one(renamed):
    with pytest.raises(ConfigError, match="ema.curve.start is already set on line 2"):
        load(text="ema.start = 1.0\nema.curve.start = 2.0")
    both = load("ema.start=2.0", text="ema.curve.start = 1.0")
    assert both.ema.curve.start == 2.0


def test_key_of_an_older_version_is_an_error_that_names_the_new_one(renamed):
    with pytest.raises(ConfigError) as raised:
        load("ema.speed=0.5")
    assert str(raised.value) == (
        "override 'ema.speed=0.5': unknown key 'ema.speed'; since version 0.1 it is "
        "ema.rate"
    )


def test_file_with_many_old_keys_is_one_line(monkeypatch):
    names = [f"ema.old{i}" for i in range(8)]
    for name in names:
        monkeypatch.setitem(renamed_keys.RENAMED, name, Renamed("ema.rate", "9.0"))
    line = renamed_keys.note("operative.gin", names)
    assert line.count(" is now ema.rate") == 5 and "3 more keys have new names" in line


def test_run_saved_with_an_old_key_is_resumed(renamed, tmp_path):
    saved = {"ema": {"start": 0.5}, "changeable": {"ema": {"rate": 0.1}}}
    settings = {"ema": {"curve.start": 0.5}}, {"ema": {"rate": 0.2}}, "run.steps"
    changes = resuming.changes(saved, settings, tmp_path, 1, 2)
    assert changes == ["ema.rate was 0.1, is 0.2"]
    other = ({"ema": {"curve.start": 0.75}}, *settings[1:])
    with pytest.raises(ValueError, match="ema.curve.start was 0.5, is 0.75"):
        resuming.changes(saved, other, tmp_path, 1, 2)


def test_new_names_of_old_keys_exist():
    """Names of versions before this one are only in errors."""
    known = configuration._settings(JOBS)
    for old, new in renamed_keys.RENAMED.items():
        assert old not in known and new.key in known
