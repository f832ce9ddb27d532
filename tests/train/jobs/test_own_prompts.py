"""GRPO on a file of prompts with functions as rewards: it learns and resumes."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxmem import losses
from jaxmem.data.records import DataError
from jaxmem.data.rewards import RewardError, TrainerState
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs import rollout_metrics
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.metrics import PolicyMetrics
from tests.helpers import runs, texts
from tests.helpers.kills import kill_before
from tests.helpers.runs import refused

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ' ' + m.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' a ' }}{% endif %}"
)
# Completions are of random letters: the share of vowels can be learned in a few steps.
REWARDS = """
import pathlib

def score(prompts, completions, letter, trainer_state, **columns):
    with open("states.txt", "a") as states:
        print(trainer_state.global_step, trainer_state.max_steps, file=states)
    lines = pathlib.Path("cut/metrics.jsonl")
    if pathlib.Path("break").exists() and lines.exists():
        if lines.read_text().count("\\n") == 7:
            raise RuntimeError("the judge is away")
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [t.count(x) / 4 for t, x in zip(texts, letter)]

def some(completions, **columns):
    # None for a whole group, and for two more completions of each.
    return [None if i < 8 or i % 8 in (1, 2) else i * i % 7 + 0.0
            for i in range(len(completions))]

def none(completions, **columns):
    return [None] * len(completions)

async def short(prompts, completions, **columns):
    return [None if i % 2 else 0.0 for i in range(len(prompts))]
"""
GIN = """
task.source = "prompts.jsonl"
task.reward = "rewards.py:score"
task.max_prompt_tokens = 12
task.held_out = 0.25
sampling.max_new_tokens = 4
grpo.prompts = 4
grpo.group_size = 8
grpo.max_tokens_train = 128
grpo.max_tokens_forward = 128
grpo.loss = "dr_grpo"
head.chunk = 32
optimizer.learning_rate = 2e-2
optimizer.warmup_steps = 0
optimizer.weight_decay = 0.0
run.job = "grpo"
run.steps = 12
run.checkpoint_every = 5
run.compare_heads = False
run.out_dir = "run"
eval.every = 4
eval.prompts = 40
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A checkpoint, 16 prompts of two forms, rewards and a configuration."""
    monkeypatch.chdir(tmp_path)
    model = texts.checkpoint("llama", tmp_path)
    named = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    rows = [
        {"prompt": f"{word} now", "letter": "a"} if i % 2 else
        {"prompt": [{"role": "user", "content": word}], "letter": "a"}
        for i, word in enumerate(a + b for a in "abcd" for b in "wxyz")
    ]  # fmt: skip
    write(rows)
    pathlib.Path("rewards.py").write_text(REWARDS)
    pathlib.Path("grpo.gin").write_text(GIN + f'model.checkpoint = "{model}"\n')
    return tmp_path


write = functools.partial(runs.write, "prompts.jsonl")
train = functools.partial(runs.train, "grpo.gin")
steps = functools.partial(runs.steps, kind=PolicyMetrics)


@pytest.mark.slow
@pytest.mark.usefixtures("one_program")
def test_own_rewards_are_learned_and_resume_bitwise(directory):
    result, said = train()
    rewards = [step.reward for step in result.history]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    assert "saved in run/model" in said and "step 12/12  reward" in said
    states = pathlib.Path("states.txt").read_text().splitlines()
    assert states[:7] == [*(f"{n} 12" for n in range(4)), "4 12", "4 12", "5 12"]
    held_out = {s.step: s.held_out_reward for s in result.history}
    assert [n for n, x in held_out.items() if x is not None] == [4, 8, 12]
    assert (
        held_out[12] > held_out[4] and result.history[3].held_out_accuracy < held_out[4]
    )
    best = max((x, -n) for n, x in held_out.items() if x is not None)[1]
    kept = [p.name for p in (directory / "run" / "best").iterdir() if p.name.isdigit()]
    assert kept == [str(-best)]
    # The same again, but the function raises in the middle: nothing is lost.
    pathlib.Path("break").touch()
    with pytest.raises(
        RewardError, match=r"rewards.py:score, prompt .*: raised \(line"
    ):
        train("run.out_dir=cut")
    assert len(steps("cut")) == 7
    pathlib.Path("break").unlink()
    _, said = train("run.out_dir=cut")
    assert "resuming cut at step 7" in said
    assert steps("cut") == steps("run")
    assert "saved in cut/best/model" in said


@pytest.mark.full
def test_patience_counts_evaluations_of_held_out_prompts():
    patience = "eval.every=1", "eval.patience=1", "eval.min_delta=2", "eval.prompts=4"
    result, said = train(*patience, "eval.at_start=True")
    rewards = [step.held_out_reward for step in result.history]
    assert len(rewards) == 2 and result.ended_by == "eval.patience"
    assert result.summary["best_held_out"] == max(rewards)
    initial = result.summary["initial_held_out"]
    assert f"before step 1 held out reward {initial:.3f}\n" in said
    assert f"step 1 held out reward {rewards[0]:.3f} (best, step 1)" in said
    assert "did not improve by more than 2 (best reward " in said


@pytest.mark.parametrize("setting", ["eval.patience=1", "eval.at_start=True"])
def test_evaluation_without_held_out_prompts_is_refused(setting):
    with pytest.raises(ValueError, match=f"^{setting} has nothing to evaluate"):
        train(setting, "task.held_out=0")


def own_prompts(*overrides):
    return jobs.job_of(configuration.load("grpo.gin", overrides)[0]).reads.task


def test_several_rewards_are_told_apart():
    three = '("rewards.py:score", "rewards.py:short", "length")'
    task = own_prompts(f"task.reward={three}", "task.reward_weights=(1.0, 1.0, 0.5)")
    asked = task.ask(0, 2)
    sampled = np.array([[3, 3, 4, 2], [4, 2, 0, 0]])  # "aab", the end; "b", the end
    made = Completions.of(*asked[:2], sampled, np.array([4, 2]))
    graded = task.grade(asked, made)
    assert graded.rewards.tolist() == [0.5 - 0.5, 0 - 0.25]
    assert rollout_metrics.of_grades(graded, 2)["rewards"] == {
        "rewards.py:score": 0.25, "rewards.py:short": 0, "length": -0.75
    }  # fmt: skip
    assert task.shown(asked, made, 0)[1] == "a a b </s>"  # it has no decoder


def test_files_of_other_columns_share_a_run():
    runs.write("code.jsonl", [{"prompt": str(i), "tests": "x"} for i in range(9)])
    before = {p.where for p in own_prompts().held_out().items}
    source = 'task.source=("prompts.jsonl", "code.jsonl")'
    task = own_prompts(source, 'task.reward=("rewards.py:short", "unit_tests")')
    task.check()
    items = [*task.ask(0, task.size).items, *task.held_out().items]
    columns = {tuple(item.columns.items()) for item in items}
    assert columns == {
        (("letter", "a"), ("tests", None)), (("letter", None), ("tests", "x"))
    }  # fmt: skip
    # A column that only another file has does not change which prompts are held out.
    kept = {p.where for p in task.held_out().items if "code" not in p.where}
    assert kept <= before or before <= kept
    assert any(line.startswith("unit_tests: ") for line in task.lines())


def test_prompts_that_memory_cannot_hold_are_named(monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("jaxmem.data.prompts.read_records", full)
    message = "task.source: the host's memory cannot hold prompts.jsonl; name files of "
    with pytest.raises(DataError, match=message + "fewer records$"):
        own_prompts()


def test_grade_leaves_out_failures_and_passes_state():
    task = own_prompts('task.reward_errors="mask"')
    task.trainer_state = TrainerState(3, 12)
    asked = task.ask(0, 2)
    made = Completions.of(*asked[:2], np.array([[3, 2], [4, 2]]), np.array([2, 2]))
    assert task.grade(asked, made).rewards.tolist() == [0.25, 0]
    assert pathlib.Path("states.txt").read_text() == "3 12\n"
    task.trainer_state = None
    with pytest.warns(UserWarning, match="'NoneType' object has no attribute 'global"):
        assert np.isnan(task.grade(asked, made).rewards).all()


def test_column_that_is_left_out_may_have_any_name():
    write([{"prompt": str(i), "letter": "a", "completions": i} for i in range(9)])
    task = own_prompts('task.ignored=("completions",)')
    assert task.ask(0, 1).items[0].columns == {"letter": "a"}


def test_prompt_order_changes_with_epoch():
    task = own_prompts()
    epochs = [[p.where for p in task.ask(12 * e, 12).items] for e in (0, 1)]
    assert epochs[0] != epochs[1] and set(epochs[0]) == set(epochs[1])
    assert task.ask(5, 9).items == task.ask(0, 14).items[5:]
    assert {p.where for p in task.held_out().items}.isdisjoint(epochs[0])
    for prompt in task.ask(0, 12).items:
        text = prompt.prompt
        if not isinstance(text, str):
            text = f"u {text[0]['content']} a "
        letters = [texts.LETTERS.index(c) + 3 for c in text]
        assert prompt.ids.tolist() == [1, *letters]


def test_prompts_without_shuffling_keep_file_order():
    task = own_prompts("task.shuffle=False")
    lines = [int(p.where.rpartition(":")[2]) for p in task.ask(0, 24).items]
    assert lines == sorted(lines[:12]) * 2
    assert task.ask(5, 9).items == task.ask(0, 14).items[5:]


def test_other_prompts_do_not_resume_a_run():
    task = own_prompts()
    state = task.state(7)
    assert own_prompts().position(state) == 7
    lines = pathlib.Path("prompts.jsonl").read_text().splitlines(True)
    pathlib.Path("prompts.jsonl").write_text("".join(lines[1:] + lines[:1]))
    with pytest.raises(DataError, match="belongs to other prompts than task.source"):
        own_prompts().position(state)


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([{"text": "a"}], [], "\"instruction\" or \"prompt\"; got the keys 'text'"),
        ([], [], "task.source: prompts.jsonl contains no prompt"),
        ([{"prompt": "a", "letter": "a"}, {"prompt": "a"}], [],
         'prompts.jsonl:2: the record has no "letter", but prompts.jsonl:1 has; write'),
        ([{"prompt": "a"}], [], "rewards.py:score requires the argument 'letter', whi"),
        ([{"prompt": "a"}], ["task.held_out=0.0", "task.reward=gsm8k"],
         "task.reward: gsm8k reads the column 'answer', which has no value in any"),
        ([{"prompt": "a" * 12}], [],
         "prompts.jsonl:1: the prompt has 13 tokens; raise task.max_prompt_tokens"),
        ([{"prompt": "a"}, {"prompt": "b", "completion_ids": 3}], [],
         'prompts.jsonl:1: the record has no "completion_ids", but'),
        *(([{"prompt": "a", name: 3}], [],
           f"prompts.jsonl:1: the column {name!r} has the name of an argument that ")
          for name in ("prompts", "completions", "completion_ids", "max_new_tokens")),
        ([{"prompt": "a"}], ["task.held_out=0.5"], "evaluation: only 1 are distinct"),
        ([{"prompt": str(i)} for i in range(9)], ["task.stop=<end>"],
         "task.stop='<end>' is not a token of"),
        ([{"prompt": "a"}], ["task.reward=no.py:f"], "cannot import no.py: no such"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_used(rows, overrides, message):
    write(rows)
    with pytest.raises((ValueError, DataError)) as raised:
        train("task.held_out=0.0", *overrides) if not overrides else train(*overrides)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.checkpoint=None"], "task.source='prompts.jsonl' needs model.checkp"),
        (["task.reward_weights=(1.0, 2.0)"], "reward_weights must be 1 finite numbers"),
        (["task.timeout=0"], "task.timeout must be above 0"),
        (["task.source=arithmetic"], "task.reward must be one of ('exact', 'prefix')"),
        (["eval.every=0"], "eval.every must be"),
    ],
)
def test_settings_that_do_not_go_together(overrides, message):
    refused("grpo.gin", overrides, message)


def test_unrewarded_completions_are_left_out():
    job, made = runs.rolled_out("grpo.gin", "task.reward=rewards.py:some")
    assert job.task.trainer_state == TrainerState(0, 12)
    given = np.array([i * i % 7 for i in range(32)], "f4").reshape(4, 8)
    given = given[1:, [0, *range(3, 8)]]
    np.testing.assert_array_equal(made.graded.rewards, given.ravel())
    compare = functools.partial(losses.grpo_advantages, normalize_std=False)
    wanted = jax.jit(compare)(given)
    np.testing.assert_allclose(made.advantages, wanted.ravel(), rtol=1e-5)
    assert made.sampled["unrewarded"] == 8 + 3 * 2
    assert made.sampled["reward"] == pytest.approx(given.mean())
    assert made.sampled["accuracy"] == pytest.approx((given >= 1).mean())
    for array in (made.samples.tokens, made.truncated, made.prompts.lengths):
        assert len(array) == 18 == len(made.completions.tokens)
    prompts = [item.where for item in job.task.ask(1, 3).items]
    assert [item.where for item in made.prompts.items[::6]] == prompts
    minibatches = list(job._minibatches(1, 18))
    assert sorted(np.concatenate(minibatches).tolist()) == list(range(18))


def test_step_without_rewards_ends_a_run_by_name():
    with pytest.raises(RewardError) as raised:
        runs.rolled_out("grpo.gin", "task.reward=rewards.py:none")
    assert str(raised.value).startswith(
        "step 1: 0 of 32 completions have a reward, fewer than grpo.minibatches=1, and"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_program")
def test_run_with_left_out_completions_resumes_bitwise(monkeypatch):
    overrides = "task.reward=rewards.py:some", "grpo.minibatches=2", "run.steps=5"
    result, _ = train(*overrides)
    for step in result.history:
        assert step.unrewarded == 14 and np.isfinite([step.loss, step.grad_norm]).all()
    evaluated = result.history[3]
    # The first group of four held-out prompts is all that there is.
    assert evaluated.held_out_unrewarded == 4 and evaluated.held_out_reward is None
    again = "run.out_dir=cut", *overrides
    kill_before(3, grpo.Grpo, monkeypatch, lambda: train(*again))
    train(*again)
    assert steps("cut") == steps("run")
