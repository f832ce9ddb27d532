"""Transcripts: one form of a completion, its line of JSON, and what it refuses."""

import json

import numpy as np
import pytest

from jaxmem.data.completion_ends import Ends
from jaxmem.data.prompts import PromptRecord
from jaxmem.data.records import DataError
from jaxmem.models.decoder import ModelConfig
from jaxmem.train.jobs.rollout.prompts import PromptIds
from jaxmem.train.jobs.rollout.samples import sampled_of
from jaxmem.train.jobs.rollout.transcripts import (
    Transcript,
    TranscriptLimits,
    TranscriptNeeds,
)

ROUTES = np.arange(12, dtype=np.uint8).reshape(6, 2, 1) % 4
WHOLE = dict(
    prompt_ids=[1, 4],
    completion_ids=[7, 8, 9, 9, 2],
    logprobs=[-0.1, 0, 0, -1 / 3, -2],
    reward=0.75,
    rewards={"f": 1.5, "g": None},
    mask=[1, 0, 0, 1, 1],
    turns=[0, 0, 0, 1, 1],
    turn_rewards=[0.25, 0.5],
    supports=[[7, 6], [], [], [9], [9, 2]],
    routes=ROUTES,
    versions=[(3, 2), (4, 3)],
    where="a.jsonl:1",
)  # fmt: skip
EXPERTS = ModelConfig().replaced(
    {
        "layers": 2,
        "hidden": 8,
        "ff": 8,
        "heads": 1,
        "kv_heads": 1,
        "vocab_size": 10,
        "experts.count": 4,
        "experts.ff": 8,
        "experts.per_token": 1,
        "feed_forwards": ("experts",),
    }
)


def limits(**changes):
    given = dict(
        prompt_tokens=3, completion_tokens=6, turns=3, support=2,
        ends=Ends(10, (2,), 0), needs=TranscriptNeeds(True, EXPERTS),
    )  # fmt: skip
    return TranscriptLimits(**(given | changes))


def test_json_keeps_every_field():
    made = Transcript(**WHOLE)
    fields = made.to_json()
    assert set(fields) == set(WHOLE)
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    again = Transcript.of_json(fields)
    for name, value in WHOLE.items():
        found = getattr(again, name)
        if name in ("logprobs", "routes"):
            np.testing.assert_array_equal(np.float32(found), np.float32(value))
        elif name == "versions":
            assert list(map(tuple, found)) == value
        else:
            assert found == value, name
    assert again.routes is not None and again.routes.dtype == np.uint8
    limits().check(again)
    least = {"prompt_ids": [1], "completion_ids": [5], "logprobs": [-1.0]}
    assert Transcript.of_json(least, "b:2").to_json() == {
        **least, "reward": None, "where": "b:2",
    }  # fmt: skip


def test_turns_without_numbers_are_runs_of_the_mask():
    some = {k: WHOLE[k] for k in ("prompt_ids", "completion_ids", "logprobs", "mask")}
    made = Transcript(**some)
    assert made.turn_count == 2 and made.turn_of_token.tolist() == [0, 0, 0, 1, 1]
    told = Transcript(**some | {"mask": [0, 1, 0, 1, 1], "logprobs": [0] * 5})
    assert told.turn_of_token[told.sampled].tolist() == [0, 1, 1]
    assert Transcript([1], [5, 6], [-1, -1]).turn_count == 1


def test_sampled_of_has_arrays_of_the_limits():
    first = Transcript(**WHOLE)
    other = Transcript(
        [1], [5], [-1], None, {"f": None, "g": 1.0}, [1], [0], [None], [[5]],
        ROUTES[:1], None,
    )  # fmt: skip
    items = [PromptRecord(str(i), "", {}, np.array([1])) for i in range(2)]
    prompts = PromptIds(np.array([[1, 4, 0], [1, 0, 0]]), np.array([2, 1]), items)
    got = sampled_of([first, other], prompts, limits())
    assert np.asarray(got.samples.tokens).tolist() == [
        [7, 8, 9, 9, 2, 0], [5, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    own = np.array([[1, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    np.testing.assert_array_equal(got.completions.own, own)
    np.testing.assert_array_equal(got.samples.mask, own)
    np.testing.assert_array_equal(
        np.asarray(got.samples.support_ids)[0, :, 0], [7, -1, -1, 9, 9, -1]
    )
    assert [len(x) for x in got.completions.routes] == [6, 1]
    assert got.truncated.tolist() == [False, True] and got.turns.tolist() == [2, 1]
    assert got.by_turn is not None
    np.testing.assert_array_equal(
        got.by_turn.rewards, np.float32([[0.25, 0.5, 0], [np.nan, 0, 0]])
    )
    np.testing.assert_array_equal(got.graded.rewards, np.float32([0.75, np.nan]))
    np.testing.assert_array_equal(got.graded.right, np.float32([1, np.nan]))
    assert list(got.graded.parts) == ["f", "g"]
    plain = sampled_of(
        [Transcript([1], [5, 2], [-1, -1], 0.5)] * 2, prompts,
        limits(support=None, needs=TranscriptNeeds()),
    )  # fmt: skip
    assert plain.completions.own is None and plain.by_turn is None
    assert plain.graded.parts is None and plain.samples.support_ids is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": "12"}, "prompt_ids must be a list of ids, got '12'"),
        ({"completion_ids": [7, -8, 9, 9, 2]}, "completion_ids must be a list of ids"),
        (
            {"mask": [1, 0]},
            "mask must be 5 numbers 0 or 1, one per token of completion",
        ),
        ({"mask": [0] * 5}, "mask is 0 everywhere, so that nothing is learned"),
        ({"mask": [1, 0, 0, 1, 2]}, "mask must be 5 numbers 0 or 1"),
        ({"logprobs": [-0.1, 0, 0, float("nan"), -2]}, "logprobs must be 5 log-prob"),
        ({"logprobs": [-0.1, -1, 0, -1, -2]}, "logprobs must be 0 where mask is 0, g"),
        ({"turns": [0, 0, 0, 2, 2]}, "turns of sampled tokens must be 0, 1, ... with"),
        ({"turns": [1, 0, 0, 1, 1]}, "turns of sampled tokens must be 0, 1, ... with"),
        ({"turns": [0, 0]}, "turns must be 5 indices, one per token of completion_ids"),
        ({"turn_rewards": [1.0]}, "turn_rewards must be 2 finite numbers or null, one"),
        ({"turn_rewards": [1.0, None]}, "turn_rewards has null, so that reward must"),
        ({"turn_rewards": [1.0, 1e20]}, "reward is 1e+20; advantages are computed in"),
        ({"rewards": [1.0]}, "rewards must be numbers or null by function, got [1.0]"),
        ({"supports": [[7]]}, "supports must be 5 lists of ids, one per token of"),
        ({"supports": [[7, 6], [8], [], [9], [9, 2]]}, "supports must be [] where ma"),
        ({"supports": [[6], [], [], [9], [2]]}, "the support of token 7 must contain"),
        ({"routes": ROUTES[1:]}, "routes must be integers [6 tokens, layers, experts]"),
        ({"routes": ROUTES / 2}, "and of completion_ids without the last, got float"),
        ({"versions": [[3, 4]]}, "versions must be [version, number of tokens] of ea"),
        ({"versions": [[3, 5, 0]]}, "of each span, 5 tokens in all, got [[3, 5, 0]]"),
        ({"versions": [[3, 0], [4, 5]]}, "of each span, 5 tokens in all, got"),
    ],
)  # fmt: skip
def test_transcript_refuses_fields_that_contradict(change, message):
    with pytest.raises(DataError) as raised:
        Transcript(**WHOLE | change)
    assert str(raised.value).startswith("a.jsonl:1: ")
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("routes", ["no", "", 5, "AAAA"])
def test_routes_that_are_no_array_are_refused(routes):
    fields = Transcript(**WHOLE).to_json() | {"routes": routes}
    with pytest.raises(DataError, match="1: routes must be a .npy file in base64: "):
        Transcript.of_json(fields)


@pytest.mark.parametrize(
    ("change", "limit", "message"),
    [
        ({"completion_ids": [7, 10, 9, 9, 2]}, {}, "completion_ids must be ids in [0,"),
        ({"supports": [[7, 10], [], [], [9], [2]]}, {}, "supports must be ids in [0, "),
        ({}, {"prompt_tokens": 1}, "prompt_ids has 2 ids; at most 1 are possible: ta"),
        ({}, {"completion_tokens": 4}, "completion_ids has 5 ids; at most 4 are poss"),
        ({}, {"turns": 1}, "2 turns; at most task.max_turns=1 are possible"),
        ({}, {"support": 1}, "a support must have at most 1 ids, by sampling.top_k"),
        ({}, {"support": None}, "supports need sampling.top_k, top_p or min_p with"),
        ({"supports": None}, {}, "supports must be 5 lists of ids, one per token of"),
        ({"turn_rewards": None}, {}, 'no "turn_rewards", which grpo.turn_rewards=Tr'),
        ({"routes": None}, {}, 'no "routes", which grpo.replay_routing=True replays'),
        ({"routes": ROUTES[:, :1]}, {},
         "routes must be (6, 2, 1), [tokens, layers with experts, experts of a toke"),
        ({"routes": ROUTES + 1}, {}, "routes must be numbers of experts in [0, 4)"),
    ],
)  # fmt: skip
def test_limits_refuse_what_a_run_cannot_learn_from(change, limit, message):
    made = Transcript(**WHOLE | change)
    with pytest.raises(DataError) as raised:
        limits(**limit).check(made)
    assert str(raised.value).startswith(f"a.jsonl:1: {message}")
