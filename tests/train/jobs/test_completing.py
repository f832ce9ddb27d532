"""Fields of a transcript, made of completions and of what others said."""

import numpy as np
import pytest

from jaxmem.train.jobs.rollout.completing import TurnCompletion, joined
from jaxmem.train.jobs.rollout.transcripts import Transcript

FIRST = TurnCompletion(
    [5, 2], [-1.0, -0.5], True, [[5, 6], [2]], np.zeros((3, 1, 1), int), [(3, 2)]
)
LAST = TurnCompletion(
    [6, 7, 2], [-1.0, -2.0, 0.0], True, [[6], [7], [2]], np.ones((9, 1, 1), int),
    [(3, 1), (4, 2)],
)  # fmt: skip


def test_joined_has_the_fields_of_a_transcript():
    fields = joined([[8], FIRST, [9], (9,), LAST])
    made = Transcript(prompt_ids=[1, 4], reward=1.0, **fields)
    assert made.completion_ids == [8, 5, 2, 9, 9, 6, 7, 2]
    assert made.logprobs == [0, -1, -0.5, 0, 0, -1, -2, 0]
    assert made.mask == [0, 1, 1, 0, 0, 1, 1, 1]
    assert made.turns == [0, 0, 0, 0, 0, 1, 1, 1]
    assert made.supports == [[], [5, 6], [2], [], [], [6], [7], [2]]
    assert made.versions == [(3, 6), (4, 2)]
    assert made.routes is LAST.routes


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([FIRST, LAST._replace(supports=None)], "supports"),
        ([FIRST._replace(versions=None), LAST], "versions"),
        ([FIRST, [9]], "routes"),
        ([LAST._replace(routes=None)], "routes"),
    ],
)
def test_joined_leaves_out_what_a_part_lacks(parts, missing):
    names = {"supports", "versions", "routes"} - joined(parts).keys()
    assert names == {missing}
