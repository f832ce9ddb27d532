"""Answers of an evaluation, recorded so that a killed command goes on after them."""

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmem.score.journal import Journal


class _AnsweredGroup(NamedTuple):
    """The answers to a group of requests; a `ScoreResult` of the journal."""

    inputs: str  # a hash
    answers: list[Any]

    def record(self) -> dict[str, Any]:
        return self._asdict()


class RecordedAnswers:
    """Answers to groups of requests.

    The harness makes the same requests in the same order when it runs again with the
    same options, so that the groups are equal as well: answers do not depend on where
    the process was killed.

    Args:
        journal: continued or new; each group is one record.
    """

    def __init__(self, journal: Journal):
        self._journal = journal
        self._recorded = iter([*journal.records()])

    def of_group(self, inputs: Any, compute: Callable[[], list[Any]]) -> list[Any]:
        """The recorded answers to a group, or else new ones, which are recorded.

        Args:
            inputs: all that the answers depend on, as JSON-able values.
            compute: returns the answers, as JSON-able values.

        Raises:
            ValueError: the recorded answers are those to other requests.
            WriteError: the disk is full; earlier groups are unchanged.
        """
        digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:24]
        record = next(self._recorded, None)
        if record is None:
            group = _AnsweredGroup(digest, compute())
            self._journal.append([group])
            return group.answers
        if record["inputs"] != digest:
            raise ValueError(
                f"{self._journal.path} contains answers to other requests, as of tasks "
                "whose files have changed; delete it, or name another --out"
            )
        return record["answers"]
