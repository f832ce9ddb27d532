"""Rollouts on disk: all of them, once each after a kill, and learned from again."""

import base64
import io
import json
import pathlib

import numpy as np
import pytest

from jaxmem.models.sampling import Samples
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.rollout.packed import Completions
from jaxmem.train.jobs.rollout.prompts import Graded, PromptIds
from jaxmem.train.jobs.rollout.samples import ByTurn, Sampled, SlotUse
from jaxmem.train.jobs.rollout.saved_rollouts import RolloutFiles, records
from jaxmem.train.metrics import PolicyMetrics
from jaxmem.train.output.history import read_history
from tests.helpers import runs, texts

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
SFT = pathlib.Path(__file__).parents[3] / "configs" / "sft_stdlib.gin"
GIN = """
model.checkpoint = "llama"
task.source = "prompts.jsonl"
task.reward = "rewards.py:score"
task.max_prompt_tokens = 6
sampling.max_new_tokens = 4
grpo.prompts = 2
grpo.group_size = 4
grpo.minibatches = 1
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
run.job = "grpo"
run.steps = 2
run.compare_heads = False
run.out_dir = "run"
run.save_rollouts = True
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    runs.write("prompts.jsonl", [{"prompt": a} for a in "abcd"])
    pathlib.Path("rewards.py").write_text(
        "def score(prompts, completion_ids, **_):\n"
        "    both = zip(prompts, completion_ids, strict=True)\n"
        "    return [None if sum(i) % 5 == 0 else 0.5 if p in 'ab'\n"
        "            else sum(i) % 7 / 7 for p, i in both]\n"
    )
    pathlib.Path("grpo.gin").write_text(GIN)
    return tmp_path


def saved(folder="run/rollouts"):
    """Records by file."""
    paths = sorted(pathlib.Path(folder).iterdir())
    return {
        path.name: list(map(json.loads, path.read_text().splitlines()))
        for path in paths
    }


def test_run_is_repeated_from_its_own_rollouts():
    runs.train("grpo.gin")
    files = saved()
    assert list(files) == ["step-000001.jsonl", "step-000002.jsonl"]
    for step, rows in enumerate(files.values(), start=1):
        assert len(rows) == 8 and all(row["kept"] for row in rows)
        for row in rows:
            length = len(row["completion_ids"])
            assert row["versions"] == [[step - 1, length]]
            assert len(row["logprobs"]) == length and "mask" not in row
            expected = sum(row["completion_ids"])
            assert (row["reward"] is None) == (expected % 5 == 0)
            assert row["where"].startswith("prompts.jsonl:")
    again = [
        "task.recorded=True", "task.source=run/rollouts", "run.out_dir=again",
        'task.reward="exact"', "run.save_rollouts=False",
    ]  # fmt: skip
    runs.train("grpo.gin", *again)
    ours, theirs = (
        read_history(pathlib.Path(run) / "metrics.jsonl", PolicyMetrics)
        for run in ("again", "run")
    )
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "reward", "unrewarded", "mismatch_max"):
            assert getattr(one, name) == getattr(other, name), name


def test_groups_that_are_not_kept_are_on_disk():
    job, made = runs.rolled_out("grpo.gin", "grpo.resample=3", "task.shuffle=False")
    (rows,) = saved().values()
    kept = [row["kept"] for row in rows]
    assert len(rows) > 8 and sum(kept) == 8
    assert made.sampled["resampled"] == len(rows) // 8 - 1
    learned = [row["completion_ids"] for row in rows
               if row["kept"] and row["reward"] is not None]  # fmt: skip
    lengths = made.completions.lengths
    assert learned == [
        ids[:n].tolist()
        for ids, n in zip(made.completions.sampled, lengths, strict=True)
    ]
    overrides = [
        "task.recorded=True", "task.source=run/rollouts", 'task.reward="exact"',
        "run.save_rollouts=False",
    ]  # fmt: skip
    reads = jobs.job_of(configuration.load("grpo.gin", overrides)[0]).reads
    assert reads.task.size == 2
    (line,) = [x for x in reads.lines() if "did not keep" in x]
    assert line.startswith(
        f"rollouts that the run did not keep are left out: {len(rows) - 8}"
    )


def test_killed_run_leaves_each_step_once(tmp_path):
    folder = tmp_path / "rollouts"
    first = RolloutFiles(str(tmp_path))
    for step in (1, 2, 3):
        first.write(step, iter([{"reward": step}]))
    (folder / "notes.txt").touch()  # of the user
    resumed = RolloutFiles(str(tmp_path))  # after step 1
    resumed.write(2, iter([{"reward": 20}, {"reward": 21}]))
    (folder / "notes.txt").unlink()
    assert saved(folder) == {
        "step-000001.jsonl": [{"reward": 1}],
        "step-000002.jsonl": [{"reward": 20}, {"reward": 21}],
    }


def test_conversation_has_mask_turns_routes_and_supports():
    class Task:
        def described(self, prompts, i):
            return f"a.jsonl:{i + 1}", ""

    prompts = PromptIds(np.array([[1, 4, 0]]), np.array([2]), [None])
    own = np.array([[True, False, True, False]])
    routes = np.arange(8, dtype=np.uint8).reshape(1, 4, 1, 2)
    tokens, lengths = np.array([[7, 8, 9, 0]]), np.array([3], np.int32)
    logprobs = np.array([[-0.1, 0, -1 / 3, 0]], np.float32)
    supports = np.array([[[7, 6], [-1, -1], [9, -1], [-1, -1]]])
    sampled = Sampled(
        prompts=prompts,
        completions=Completions.of(*prompts[:2], tokens, lengths, own, routes),
        samples=Samples(tokens, own, logprobs, supports, lengths),
        graded=Graded(
            np.array([np.nan], np.float32), np.array([np.nan]),
            {"f": np.array([0.1], np.float32), "g": np.array([np.nan], np.float32)},
        ),
        truncated=np.array([False]),
        turns=np.array([2]),
        decoded=SlotUse(0, 0),
        conversation=ByTurn(np.array([[0.25, 1, 0]]), np.array([[0, 0, 1, 0]])),
    )  # fmt: skip
    (record,) = records(Task(), [sampled], np.array([False]), version=4)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    found = np.load(io.BytesIO(base64.b64decode(record.pop("routes"))))
    np.testing.assert_array_equal(found, routes[0])
    told = np.array(record.pop("logprobs"), np.float32)
    np.testing.assert_array_equal(told, logprobs[0, :3])
    assert record == {
        "prompt_ids": [1, 4], "completion_ids": [7, 8, 9], "reward": None,
        "where": "a.jsonl:1", "versions": [[4, 3]], "rewards": {"f": 0.1, "g": None},
        "mask": [1, 0, 1], "supports": [[7, 6], [], [9]], "turn_rewards": [0.25, 1],
        "turns": [0, 0, 1], "kept": False,
    }  # fmt: skip


def test_job_without_rollouts_refuses_to_save_them():
    with pytest.raises(
        ValueError, match="save_rollouts=True must stay False for run.j"
    ):
        jobs.job_of(configuration.load(SFT, ["run.save_rollouts=True"])[0])
