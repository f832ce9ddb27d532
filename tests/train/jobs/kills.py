"""A run that ends between two steps, without the start of another process.

A process that SIGKILL ends anywhere is in test_sft: the runtime is the same one for
every job, but not what a job saves.
"""

import pytest


class Killed(BaseException):
    """Ends a run between two steps and lets it save nothing, as a kill does."""


def kill_before(step, job, monkeypatch, train):
    """`train()`, killed before that step of the job (a class with `step`)."""
    take = job.step

    def killed(self, number, state):
        if number == step:
            raise Killed
        return take(self, number, state)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(job, "step", killed)
        train()
