"""Runs that are cut between two steps, in this process.

Each job saves other things, so each is cut and resumed. A process that SIGKILL ends at
any point is in test_sft alone, because all jobs have one runtime.
"""

import pytest


class Killed(BaseException):
    """Ends a run between two steps and lets it save nothing, as a kill does."""


def kill_before(step, job, monkeypatch, train):
    """`train()`, killed before that step of the job, a class."""
    take = job.step

    def killed(self, number, state):
        if number == step:
            raise Killed
        return take(self, number, state)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(job, "step", killed)
        train()
