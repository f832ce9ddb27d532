"""Models that a configuration names: by directory for a job, by name for its records.

A job reads directories. Records of a run (operative.gin, checkpoints, what processes
compare) have the Hub's name with its commit instead, which any machine finds.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmem.base import hub, processes
from jaxmem.train.settings import JobConfig

KEYS = "model.checkpoint", "model.adapter", "distill.teacher"


def with_directories(
    config: JobConfig, patterns: tuple[str, ...] = hub.WHOLE, **options: Any
) -> JobConfig:
    """The configuration with local copies of the models of the Hub that it names.

    Raises:
        HubError: as `hub.local_directory`, which has the same options.
    """
    directories = {
        key: hub.local_directory(name, patterns, **options)
        for key, name in _named(config)
    }
    return config.replaced(directories)


def of_run(config: JobConfig) -> JobConfig:
    """The configuration, with the commits of the run that is resumed, if there is one.

    A model that is named without a revision keeps the commit that its run has recorded
    in operative.gin. All processes of a run call this.
    """
    recorded = processes.by_first(lambda: _recorded_names(config.run.out_dir))
    return config.replaced(
        {
            key: recorded[key]
            for key, name in _named(config)
            if key in recorded and _is_of(name, recorded[key])
        }
    )


def recorded(config: JobConfig) -> JobConfig:
    """The configuration with names of models that any machine finds."""
    return config.replaced({key: hub.recorded(name) for key, name in _named(config)})


def recorded_text(text: str, config: JobConfig) -> str:
    """The text of operative.gin, with the names that `recorded` gives."""
    for key, name in _named(config):
        if hub.model_of(name) is not None:
            line = rf"^{re.escape(key)} = (?:\\\n)?.*$"  # gin continues long lines
            named = f"{key} = {hub.recorded(name)!r}"
            text = re.sub(line, lambda _, named=named: named, text, flags=re.M)
    return text


def recorded_settings(settings: Mapping[str, Mapping]) -> dict[str, dict[str, Any]]:
    """Settings by section and field, with the names that `recorded` gives."""
    return {
        section: {
            field: hub.recorded(value)
            if f"{section}.{field}" in KEYS and value
            else value
            for field, value in fields.items()
        }
        for section, fields in settings.items()
    }


def _named(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Keys and names of the models that a configuration has."""
    for key in KEYS:
        section, _, field = key.partition(".")
        name = getattr(getattr(config, section, None), field, None)
        if name is not None:
            yield key, name


def _recorded_names(out_dir: str) -> dict[str, str]:
    """Models of the Hub in a run's operative.gin, by key."""
    path = os.path.join(os.path.expanduser(out_dir), "operative.gin")
    if not os.path.isfile(path):  # of a name that no file can have, too
        return {}
    lines = re.findall(
        r"^(\w+\.\w+) = '(hf://[^'\n]+)'$",
        Path(path).read_text("utf-8", "replace"),
        re.M,
    )
    return {key: name for key, name in lines if key in KEYS}


def _is_of(name: str, recorded: str) -> bool:
    """True if a name has no revision, and is of the recorded model."""
    model, saved = hub.parse(name), hub.parse(recorded)
    return (
        model is not None
        and saved is not None
        and model == dataclasses.replace(saved, revision=None)
    )
