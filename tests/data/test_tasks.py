"""Generated arithmetic: right answers, whatever was made before, and fair rewards."""

import dataclasses

import numpy as np
import pytest

from jaxmem.data import tasks
from jaxmem.data.tasks import EOS_ID, PAD_ID, VOCABULARY, TaskConfig


def read(problems):
    return [
        (tasks.text(prompt), tasks.text(answer))
        for prompt, answer in zip(problems.prompts, problems.answers, strict=True)
    ]


@pytest.mark.parametrize("answer", ["last_digit", "sum"])
@pytest.mark.parametrize("digits", [1, 3, 18])
def test_task_answers_and_lengths_are_right(answer, digits):
    config = TaskConfig(digits=digits, answer=answer)
    made = tasks.problems(config, 0, 200)
    for row, (prompt, said) in enumerate(read(made)):
        a, b = map(int, prompt.removesuffix("=").split("+"))
        total = str(a + b)
        assert said == (f"{total}<eos>" if answer == "sum" else total[-1])
        assert made.prompt_lengths[row] == len(prompt) <= config.prompt_length
        right = made.answers[row][: made.answer_lengths[row]]
        assert PAD_ID not in right and len(right) <= config.answer_length
    assert made.prompts.shape == (200, config.prompt_length)
    assert made.answers.shape == (200, config.answer_length)
    lengths = set(made.prompt_lengths.tolist())
    assert len(lengths) > 1 if digits == 3 else max(lengths) == config.prompt_length


def test_problem_depends_on_number_and_seed_only():
    whole = tasks.problems(TaskConfig(digits=3), 0, 40)
    part = tasks.problems(TaskConfig(digits=3), 25, 10)
    for all_, some in zip(whole, part, strict=True):
        np.testing.assert_array_equal(all_[25:35], some)
    assert len(set(read(whole))) > 35
    other = tasks.problems(TaskConfig(digits=3, seed=1), 0, 40)
    assert read(whole) != read(other)


def test_every_one_digit_sum_comes_up():
    made = read(tasks.problems(TaskConfig(), 0, 1500))
    assert len(set(made)) == 100


def test_decode_gives_question_marks_for_foreign_ids():
    assert VOCABULARY[PAD_ID] == "<pad>" and VOCABULARY[EOS_ID] == "<eos>"
    assert tasks.text([3, 12, 4, 13, 0, 1, 99]) == "1+2=<eos>?"


def scores(reward, answer, completion, right="12<eos>"):
    """The rewards of one completion, padded to any width, whose answer is known."""

    def row(word):
        ids = tasks._ids([*word.removesuffix("<eos>")])
        return ids + [EOS_ID] * word.endswith("<eos>")

    wanted, given = row(right), row(completion)
    made = tasks.Problems(
        np.zeros((1, 4), np.int32),
        np.array([4], np.int32),
        np.array([wanted + [PAD_ID] * 2], np.int32),
        np.array([len(wanted)], np.int32),
    )
    for padding in (0, 3):
        # Whatever lies behind a completion is not part of it.
        tokens = np.array([given + [EOS_ID] * padding], np.int32)
        config = TaskConfig(answer=answer, reward=reward)
        result = tasks.score(config, made, tokens, np.array([len(given)]))
        assert result.rewards.dtype == result.exact.dtype == np.float32
    return float(result.rewards[0]), float(result.exact[0])


@pytest.mark.parametrize(
    ("completion", "prefix", "exact"),
    [
        ("12<eos>", 1, 1),
        ("12", 2 / 3, 0),
        ("1<eos>", 1 / 3, 0),
        ("02<eos>", 0, 0),
        ("123<eos>", 2 / 3, 0),
        ("<eos>", 0, 0),
        ("1212", 2 / 3, 0),
    ],
)
def test_rewards_of_several_tokens(completion, prefix, exact):
    assert scores("exact", "sum", completion) == (exact, exact)
    assert scores("prefix", "sum", completion) == (pytest.approx(prefix), exact)


def test_last_digit_is_one_token():
    assert scores("exact", "last_digit", "7", right="7") == (1, 1)
    assert scores("exact", "last_digit", "6", right="7") == (0, 0)
    assert scores("exact", "last_digit", "7<eos>", right="7") == (0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(digits=0), "TaskConfig.digits must be from 1 to 18, got 0"),
        (
            dict(answer="product"),
            "TaskConfig.answer must be 'last_digit' or 'sum', got 'product'",
        ),
        (dict(reward="none"), "TaskConfig.reward must be one of .*got 'none'"),
        (dict(seed=-1), "TaskConfig.seed must be in .*got -1"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        TaskConfig(**changes)


def test_fixed_has_nothing_that_decides_no_value():
    """Runs from before there were such fields go on, and others may change them."""
    config = TaskConfig(source="x.jsonl", environment="calculator")
    assert dataclasses.replace(config, workers=3).fixed() == config.fixed()
    config = TaskConfig(source="x.jsonl", reward="number")
    for changes in (dict(reward_errors="mask"), dict(unrewarded="raise")):
        assert dataclasses.replace(config, **changes).fixed() == config.fixed()
    assert not {"workers", "reward_errors", "unrewarded"} & config.fixed().keys()
