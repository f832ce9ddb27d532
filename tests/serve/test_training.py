"""GRPO whose rollouts come from `jaxmem serve`, as from vLLM."""

import json
import pathlib

import pytest

from jaxmem.serve import command
from tests.helpers import runs, served, texts

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
GIN = """
model.checkpoint = "llama"
task.source = "prompts.jsonl"
task.reward = "rewards.py:score"
task.max_prompt_tokens = 6
sampling.max_new_tokens = 24
grpo.prompts = 2
grpo.group_size = 4
grpo.max_tokens_train = 128
grpo.max_tokens_forward = 128
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
rollouts.engine = "vllm"
rollouts.weights = "weights"
run.job = "grpo"
run.steps = 3
run.compare_heads = False
run.out_dir = "run"
"""


@pytest.fixture
def server(tmp_path, monkeypatch, request):
    name, options = getattr(request, "param", ("llama", {}))
    monkeypatch.chdir(tmp_path)
    directory = texts.checkpoint(name, tmp_path)
    runs.write("prompts.jsonl", [{"prompt": a} for a in "abcdefgh"])
    pathlib.Path("rewards.py").write_text(
        "def score(completion_ids, **_):\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    pathlib.Path("grpo.gin").write_text(GIN.replace("llama", name))
    monkeypatch.setenv("JAXMEM_ENGINE_TOKEN", "secret")
    folder = tmp_path / "weights"
    folder.mkdir()
    sizes = dict(slots=8, max_len=32, weights=(str(folder),))
    with command.served(served.options(directory, **sizes, **options)) as running:
        yield running


def train(server, *overrides):
    runs.train("grpo.gin", f"rollouts.urls={server.url}", *overrides)
    lines = pathlib.Path("run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), marks=pytest.mark.full),
        pytest.param(
            ("sampling.top_p=0.8", "sampling.support=38"), marks=pytest.mark.slow
        ),
        pytest.param(
            ("model.lora_rank=2", "sampling.temperature=0.8"), marks=pytest.mark.slow
        ),
    ],
)
def test_sampler_and_trainer_agree_in_each_step(server, overrides):
    steps = train(server, *overrides)
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert step["mismatch_max"] < 1e-5, number
        assert step["staleness_max"] == 0
        assert step["versions_per_completion"] == 1
    assert not server.loop.is_paused
    assert len({step["reward"] for step in steps}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "server", [("mixtral", {"enable_return_routed_experts": True})], indirect=True
)
def test_trainer_replays_experts_of_the_server(server):
    steps = train(server, "grpo.replay_routing=True")
    assert all(step["mismatch_max"] < 1e-5 for step in steps)


@pytest.mark.slow
def test_asynchronous_training_names_every_version(server):
    ahead = "rollouts.max_staleness=1", "grpo.correction=tis", "run.steps=6"
    steps = train(server, *ahead)
    assert {step["staleness_max"] for step in steps} <= {0, 1}
    assert steps[0]["mismatch_max"] < 1e-5
