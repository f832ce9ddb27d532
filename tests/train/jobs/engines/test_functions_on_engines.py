"""Rollout functions whose turns an engine samples, each at its own pace."""

import json
import pathlib
import threading

import pytest

from jaxmem.base import user_code
from jaxmem.data.rewards import RewardError
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.rollout.engines.protocol import EngineAnswer, EngineError
from tests.helpers import runs, texts
from tests.helpers.sampler_pool import SamplerPool

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
GIN = """
model.checkpoint = "llama"
task.source = "records.jsonl"
task.rollout = "agent.py:play"
task.max_prompt_tokens = 6
task.max_turns = 3
task.max_reply_tokens = 4
sampling.max_new_tokens = 4
grpo.prompts = 2
grpo.group_size = 4
grpo.turn_rewards = True
grpo.correction = "ratio"
grpo.max_tokens_train = 128
grpo.max_tokens_forward = 128
grpo.loss = "dapo"
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
rollouts.engine = "vllm"
rollouts.urls = "http://localhost:1"
rollouts.weights = "weights"
rollouts.max_staleness = 1
run.job = "grpo"
run.steps = 2
run.compare_heads = False
run.save_rollouts = True
run.out_dir = "run"
"""
AGENT = """
import asyncio

async def play(record, complete):
    parts, rewards, said = [], [], list(record["prompt_ids"])
    for turn in range(record["turns"]):
        if turn:
            parts.append(complete.encode("bc"))
            said += parts[-1]
        parts.append(await complete(said, max_tokens=3))
        await asyncio.sleep(0.001 * record["turns"])
        said += parts[-1].ids
        rewards.append(complete.decode(parts[-1].ids).count("a") / 4)
    return {**complete.joined(*parts), "turn_rewards": rewards}
"""


@pytest.fixture(autouse=True)
def pools(tmp_path, monkeypatch):
    """The pools that runs have connected to."""
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    rows = [{"prompt": a, "turns": 1 + i % 3} for i, a in enumerate("abcdef")]
    runs.write("records.jsonl", rows)
    pathlib.Path("agent.py").write_text(AGENT)
    pathlib.Path("grpo.gin").write_text(GIN)
    connected = []

    def connect(kind, urls, options):
        connected.append(SamplerPool(options))
        return connected[-1]

    monkeypatch.setattr(grpo, "connect", connect)
    return connected


def rows_of(step):
    path = pathlib.Path(f"run/rollouts/step-{step:06d}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_steps_equal_those_that_are_recorded(pools):
    result, _ = runs.train("grpo.gin")
    requests = pools[0].requests
    assert {x.count for x in requests} == {1}
    assert {x.max_tokens for x in requests} == {3}
    assert len({x.seed for x in requests}) == len(requests)
    for number, step in enumerate(result.history, start=1):
        assert step.staleness_max <= 1 < step.turns
        for row in rows_of(number):
            assert sum(count for _, count in row["versions"]) == len(row["mask"])
            assert len(row["turn_rewards"]) == 1 + max(row["turns"])
            assert {version for version, _ in row["versions"]} <= {
                number - 2,
                number - 1,
            }
    assert result.history[0].mismatch_max < 1e-4
    other, _ = runs.train(
        "grpo.gin", "task.source=run/rollouts/*.jsonl", "task.recorded=True",
        "run.out_dir=again", "rollouts.engine=None", "rollouts.urls=()",
        "rollouts.weights=None", "rollouts.max_staleness=0", "task.rollout=None",
        "run.save_rollouts=False",
    )  # fmt: skip
    for name in ("loss", "grad_norm", "reward", "turns", "mismatch_max"):
        ours = [getattr(step, name) for step in result.history]
        assert ours == [getattr(step, name) for step in other.history], name


class StuckPool(SamplerPool):
    """A pool whose requests for further turns end when it is closed."""

    def __init__(self, options):
        super().__init__(options)
        self.closed = threading.Event()

    def generate(self, request):
        if len(request.prompt_ids) > 2:
            assert self.closed.wait(20)
            raise EngineError("the run ends")
        (end,) = self.options.eos_ids
        return [EngineAnswer([3, end], [-1.0, -1.0], True, versions=[(0, 2)])]

    def close(self):
        super().close()
        self.closed.set()


GAME = """
import time

OPEN, CLOSED = [], []

class Game:
    def reset(self, record):
        OPEN.append(self)
        return record["prompt"]

    def step(self, said):
        if said[0] == "a":
            raise OSError("away")
        return "bc", 0.0, False

    def close(self):
        time.sleep(0.3)
        CLOSED.append(self)
"""


def test_environments_close_when_another_ends_the_run(monkeypatch):
    pathlib.Path("game.py").write_text(GAME)
    monkeypatch.setattr(grpo, "connect", lambda *x: StuckPool(x[-1]))
    settings = ["task.rollout=None", "task.environment=game.py:Game"]
    settings += ["task.shuffle=False"]
    with pytest.raises(RewardError, match=r"records.jsonl:1\): step raised .* OSError"):
        runs.train("grpo.gin", *settings)
    game = user_code.load("game.py:Game", "task.environment").reset.__globals__
    assert len(game["OPEN"]) == len(game["CLOSED"]) > 6


def test_function_that_fails_is_named():
    text = AGENT.replace("rewards.append(", "rewards.append(1 / 0 + ", 1)
    pathlib.Path("agent.py").write_text(text)
    with pytest.raises(RewardError) as raised:
        runs.train("grpo.gin")
    text = str(raised.value)
    assert text.startswith("rollout agent.py:play (records.jsonl:") and "\n" not in text
    assert text.endswith("raised (line 13) ZeroDivisionError: division by zero")
