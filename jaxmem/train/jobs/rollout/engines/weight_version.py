"""Versions of weights as servers state them: the run's name and a number."""

import re

from jaxmem.base import messages
from jaxmem.train.jobs.rollout.engines.patience import EngineError

UNVERSIONED = -1  # of weights of before the run

_FORM = re.compile(r"(?P<run>.+):(?P<number>\d+)", re.DOTALL)


def check_run(run: str) -> None:
    """Raise a ValueError unless a run's name can be part of a version."""
    if not run or not run.isprintable():
        raise ValueError(messages.must_be("the run's name", "printable text", run))


def text(run: str, version: int) -> str:
    """The form that servers keep, as in "arithmetic:7"."""
    return f"{run}:{version}"


def number(stated: str | None, run: str, url: str) -> int | None:
    """The number in a version of this run; None if no run has set the version.

    Raises:
        EngineError: another run has set it.
    """
    match = _FORM.fullmatch(stated or "")
    if match is None:
        return None
    if match["run"] != run:
        raise EngineError(
            f"rollouts.urls: {url} has the weights {messages.short(stated)} of another "
            f"run than {messages.short(run)}; give each run engines of its own"
        )
    return int(match["number"])
