"""GRPO with an engine: its steps, ages of completions, resumption, and refusals."""

import dataclasses
import json
import pathlib
import signal
import threading
import time

import pytest

from jaxmem import checkpoints
from jaxmem.train import configuration, jobs
from jaxmem.train.jobs.grpo import job as grpo
from jaxmem.train.jobs.rollout.engine_source import EngineSource, seed_of
from jaxmem.train.jobs.rollout.engines.protocol import EngineError
from jaxmem.train.jobs.rollout.prompt_tasks import ends_of
from tests.helpers import runs, texts
from tests.helpers.cases import slow
from tests.helpers.runs import refused
from tests.helpers.sampler_pool import SamplerPool

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_picture")
GIN = """
model.checkpoint = "llama"
task.source = "prompts.jsonl"
task.reward = "rewards.py:score"
task.max_prompt_tokens = 6
sampling.max_new_tokens = 4
grpo.prompts = 2
grpo.group_size = 4
grpo.max_tokens_train = 64
grpo.max_tokens_forward = 64
grpo.loss = "dapo"
head.chunk = 32
optimizer.learning_rate = 1e-2
optimizer.warmup_steps = 0
rollouts.engine = "vllm"
rollouts.urls = "http://localhost:1"
rollouts.weights = "weights"
run.job = "grpo"
run.steps = 3
run.compare_heads = False
run.out_dir = "run"
"""
AHEAD = ["rollouts.max_staleness=1", "grpo.correction=tis"]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts.checkpoint("llama", tmp_path)
    runs.write("prompts.jsonl", [{"prompt": a} for a in "abcdefgh"])
    pathlib.Path("rewards.py").write_text(
        "def score(completion_ids, **_):\n"
        "    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
    )
    pathlib.Path("grpo.gin").write_text(GIN)
    return tmp_path


@pytest.fixture
def pools(monkeypatch):
    """The pools that runs have connected to."""
    connected = []

    def connect(kind, urls, options):
        assert (kind, urls) == ("vllm", ("http://localhost:1",))
        connected.append(SamplerPool(options, base="llama"))
        return connected[-1]

    monkeypatch.setattr(grpo, "connect", connect)
    return connected


def metrics_of(out_dir="run"):
    lines = pathlib.Path(out_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "overrides", [[], slow(['head.gradient=("recorded", 8)'])], ids=str
)
def test_steps_equal_those_of_the_recorded_completions(overrides, pools):
    """Also of updates from entries, which an old pass records in both runs."""
    result, printed = runs.train("grpo.gin", "run.save_rollouts=True", *overrides)
    pool = pools[0]
    assert [version for _, version, _ in pool.loaded] == [0, 1, 2]
    assert [name for name, *_ in pool.loaded] == ["v000000", "v000001", "v000002"]
    assert len(pool.requests) == 6 and pool.is_closed
    assert not [*pathlib.Path("weights").glob("*/v*")]
    assert "its log-probabilities differ from the trainer's by" in printed
    steps = metrics_of()
    assert [step["staleness_max"] for step in steps] == [0, 0, 0]
    assert all(step["mismatch_max"] < 1e-4 for step in steps)
    assert steps[0]["push_seconds"] > steps[0]["push_seconds_by_phase"]["write"] > 0
    assert steps[0]["push_seconds_by_phase"]["reload"] == 0.25
    assert steps[0]["engine_tokens_per_second"] > 0
    other, _ = runs.train(
        "grpo.gin", "task.source=run/rollouts/*.jsonl", "task.recorded=True",
        "run.out_dir=again", "rollouts.engine=None", "rollouts.urls=()",
        "rollouts.weights=None", "task.reward='exact'", *overrides,
    )  # fmt: skip
    for name in ("loss", "grad_norm", "reward", "mismatch_max", "head_error"):
        ours = [getattr(step, name) for step in result.history]
        assert ours == [getattr(step, name) for step in other.history], name


class PunctualPool(SamplerPool):
    """Samples all groups that have been asked for before it loads other weights.

    Args:
        asked: the number of requests before each version is loaded.
    """

    def __init__(self, options, asked, **more):
        super().__init__(options, **more)
        self.asked, self.answered = asked, threading.Condition()
        self.count = 0

    def wait(self, count):
        """Wait until so many requests are answered."""
        with self.answered:
            assert self.answered.wait_for(lambda: self.count >= count, 60)

    def load_weights(self, directory, version, adapter):
        self.wait(self.asked(version))
        return super().load_weights(directory, version, adapter)

    def generate(self, request):
        answers = super().generate(request)
        with self.answered:
            self.count += 1
            self.answered.notify()
        return answers


def connect_to(monkeypatch, make):
    """Let runs use a pool made by `make(options)`; the pools that were made."""
    made = []

    def connect(kind, urls, options):
        made.append(make(options))
        return made[-1]

    monkeypatch.setattr(grpo, "connect", connect)
    return made


def stopped(overrides, after, wait=lambda: None):
    """Train some steps of a run; `wait` is called before the last is saved."""

    def on_step(metrics):
        if metrics.step == after:
            wait()
        return metrics.step < after

    config, text = configuration.load("grpo.gin", overrides)
    jobs.train(config, text, on_step=on_step)


def test_staleness_one_samples_a_step_ahead_and_no_further(monkeypatch):
    """All groups of steps 1 and 2 are of version 0, those of step 3 of version 1."""
    asked = {0: 0, 1: 4, 2: 6, 3: 8}  # groups begun before each version
    connect_to(monkeypatch, lambda x: PunctualPool(x, asked.__getitem__))
    runs.train("grpo.gin", *AHEAD, "run.steps=4")
    steps = metrics_of()
    assert [step["staleness_mean"] for step in steps] == [0, 1, 1, 1]
    assert [step["staleness_max"] for step in steps] == [0, 1, 1, 1]
    assert {step["versions_per_completion"] for step in steps} == {1}
    assert steps[0]["mismatch_max"] < 1e-4 < steps[1]["mismatch_max"]
    assert "Updates since tokens were sampled" in pathlib.Path(
        "run/report.html"
    ).read_text("utf-8")


def test_next_step_is_sampled_while_a_step_is_recorded(monkeypatch):
    """No update lies between its tokens and its weights, also after an interruption."""
    made = connect_to(monkeypatch, lambda x: PunctualPool(x, lambda _: 0))
    seen = []

    def on_step(metrics):
        pool = made[-1]
        if metrics.step < 3:
            pool.wait(2 * metrics.step + 2)
        seen.append(pool.loaded[-1][1])

    config, text = configuration.load("grpo.gin", ["run.out_dir=whole"])
    whole = jobs.train(config, text, on_step=on_step)
    assert seen == [1, 2, 2]  # nothing samples from the weights of the last step
    assert [step["staleness_max"] for step in metrics_of("whole")] == [0, 0, 0]
    saving = ["run.checkpoint_every=1"]
    stopped(saving, after=1, wait=lambda: made[-1].wait(4))
    result, _ = runs.train("grpo.gin", *saving)
    assert [version for _, version, _ in made[-1].loaded] == [1, 2]
    assert len(made[-1].requests) == 2  # those of step 2 were saved
    assert [step["staleness_max"] for step in metrics_of()] == [0, 0, 0]
    assert [x.loss for x in result.history] == [x.loss for x in whole.history]


@pytest.mark.full
def test_weights_that_an_engine_refuses_end_the_next_step(monkeypatch):
    class Refusing(SamplerPool):
        def load_weights(self, directory, version, adapter):
            if version == 1:
                raise EngineError("http://localhost:1: no room for version 1")
            return super().load_weights(directory, version, adapter)

    connect_to(monkeypatch, Refusing)
    with pytest.raises(EngineError, match="no room for version 1"):
        runs.train("grpo.gin", "run.checkpoint_every=3")
    assert [step["step"] for step in metrics_of()] == [1]
    assert pathlib.Path("run/checkpoints/1").is_dir()


def test_a_resumed_run_takes_over_the_groups_that_were_sampled_ahead(monkeypatch):
    asked = {0: 0, 1: 4, 2: 6, 3: 8}
    connect_to(monkeypatch, lambda x: PunctualPool(x, asked.__getitem__))
    whole, _ = runs.train("grpo.gin", *AHEAD, "run.steps=4", "run.out_dir=whole")
    saving = [*AHEAD, "run.steps=4", "run.checkpoint_every=1"]
    first = connect_to(monkeypatch, lambda x: PunctualPool(x, asked.__getitem__))
    # The groups of steps 3 and 4, of versions 1 and 2, are done when step 2 is saved.
    state = EngineSource.state

    def settled(source):
        for attempt in source._starts:
            source._groups.result(attempt)
        return state(source)

    with monkeypatch.context() as patch:
        patch.setattr(EngineSource, "state", settled)
        stopped(saving, after=2)
    assert len(first[0].requests) == 8
    second = connect_to(monkeypatch, SamplerPool)
    result, _ = runs.train("grpo.gin", *saving)
    assert [version for _, version, _ in second[0].loaded] == [2, 3]
    assert len(second[0].requests) == 0
    assert [x.loss for x in result.history] == [x.loss for x in whole.history]


@pytest.mark.full
def test_groups_under_way_are_sampled_again_with_their_seeds(monkeypatch):
    begun, ending = [], threading.Event()

    class Slow(SamplerPool):
        def generate(self, request):
            begun.append(request)
            if len(begun) == 4:
                ending.wait(60)
            return super().generate(request)

    saving = [*AHEAD, "run.checkpoint_every=1", "rollouts.concurrency=1"]
    connect_to(monkeypatch, Slow)

    def fourth_begins():
        for _ in range(600):
            if len(begun) == 4:
                return
            time.sleep(0.1)

    stopped(saving, after=1, wait=fourth_begins)
    assert len(begun) == 4
    ending.set()
    made = connect_to(monkeypatch, SamplerPool)
    runs.train("grpo.gin", *saving, "run.steps=2")
    assert made[0].requests == [begun[3]]


@pytest.mark.full
def test_a_run_of_other_sampling_samples_groups_again(monkeypatch):
    asked = {0: 0, 1: 4, 2: 6}
    made = connect_to(monkeypatch, lambda x: PunctualPool(x, asked.__getitem__))
    saving = [*AHEAD, "run.checkpoint_every=1"]
    stopped(saving, after=1)
    seeds = {request.seed for request in made[0].requests[2:4]}
    made = connect_to(monkeypatch, SamplerPool)
    runs.train("grpo.gin", *saving, "sampling.temperature=0.5")
    assert len(made[0].requests) == 4
    assert {request.seed for request in made[0].requests} > seeds


@pytest.mark.full
def test_own_sampler_continues_where_an_engine_was(monkeypatch):
    asked = {0: 0, 1: 4, 2: 6}
    connect_to(monkeypatch, lambda x: PunctualPool(x, asked.__getitem__))
    saving = [*AHEAD, "run.checkpoint_every=1"]
    stopped(saving, after=1)
    own = ["rollouts.engine=None", "rollouts.urls=()", "rollouts.weights=None"]
    saved = ["run.checkpoint_every=1", *own, "run.save_rollouts=True"]
    runs.train("grpo.gin", *saved)
    runs.train("grpo.gin", *saved, "run.out_dir=own")
    assert prompts_of("run", 2) == prompts_of("own", 2)


def prompts_of(out_dir, step):
    path = next(pathlib.Path(out_dir, "rollouts").glob(f"*{step}.jsonl"))
    return [json.loads(line)["where"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "sampled, shift, remedy",
    [
        (
            {"temperature": 1.0},
            0.0,
            "vLLM with --logprobs-mode processed_logprobs",
        ),
        ({}, 0.5, "serve model.checkpoint='llama' with its own tokenizer"),
    ],
    ids=["untempered", "other model"],
)
def test_another_distribution_is_refused_before_training(
    monkeypatch, sampled, shift, remedy
):
    def make(options):
        sampling = dataclasses.replace(options.sampling, **sampled)
        return SamplerPool(dataclasses.replace(options, sampling=sampling), shift=shift)

    connect_to(monkeypatch, make)
    with pytest.raises(EngineError) as raised:
        runs.train("grpo.gin", "sampling.temperature=2.5")
    message = str(raised.value)
    assert message.startswith("rollouts.urls: http://localhost:1: in the first 8 tok")
    assert remedy in message and "Nothing was trained" in message
    assert "\n" not in message
    assert not pathlib.Path("run/metrics.jsonl").exists()


@pytest.mark.full
def test_adapters_alone_are_loaded(pools):
    runs.train("grpo.gin", "model.lora_rank=2", "run.steps=2")
    assert [entry[1:] for entry in pools[0].loaded] == [(0, True), (1, True)]
    assert all(step["mismatch_max"] < 1e-4 for step in metrics_of())


ENVIRONMENT = """
class Game:
    def reset(self, record):
        self.left = 1 + ord(record["word"][0]) % 3
        return record["word"]

    def step(self, said):
        self.left -= 1
        return "bc", said[-1].count("a") / 4, self.left == 0
"""


def test_conversations_equal_those_that_are_recorded(pools):
    """Each turn is a request; a conversation has as many as it needs."""
    pathlib.Path("game.py").write_text(ENVIRONMENT)
    runs.write("words.jsonl", [{"word": a} for a in "abcdef"])
    settings = [
        "task.source=words.jsonl", "task.environment=game.py:Game", "task.reward=exact",
        "task.max_turns=3", "task.max_reply_tokens=4", "grpo.turn_rewards=True",
        "grpo.max_tokens_train=256", "grpo.max_tokens_forward=256",
    ]  # fmt: skip
    result, _ = runs.train("grpo.gin", *settings, "run.save_rollouts=True")
    requests = pools[0].requests
    assert {x.count for x in requests} == {1}
    assert len(requests) == sum(round(8 * step.turns) for step in result.history)
    assert len({x.seed for x in requests}) == len(requests)
    assert all(step.mismatch_max < 1e-4 for step in result.history)
    other, _ = runs.train(
        "grpo.gin", "task.source=run/rollouts/*.jsonl", "task.recorded=True",
        "run.out_dir=again", "rollouts.engine=None", "rollouts.urls=()",
        "rollouts.weights=None", "task.reward='exact'", *settings[3:],
    )  # fmt: skip
    for name in ("loss", "grad_norm", "reward", "turns"):
        ours = [getattr(step, name) for step in result.history]
        assert ours == [getattr(step, name) for step in other.history], name


@pytest.mark.full
def test_an_engine_that_is_lost_leaves_a_checkpoint(monkeypatch):
    class Lost(SamplerPool):
        def generate(self, request):
            if len(self.requests) == 4:
                raise EngineError("rollouts.urls: http://localhost:1: lost")
            return super().generate(request)

    saving = ["run.checkpoint_every=50", "rollouts.concurrency=1"]
    connect_to(monkeypatch, Lost)
    with pytest.raises(EngineError, match="lost"):
        runs.train("grpo.gin", *saving)
    made = connect_to(monkeypatch, SamplerPool)
    result, _ = runs.train("grpo.gin", *saving)
    assert [step.step for step in result.history] == [1, 2, 3]
    assert len(made[0].requests) == 2


def test_a_signal_ends_the_wait_for_completions(monkeypatch, capfd):
    """All finished steps and groups are saved."""
    ending = threading.Event()

    class Hanging(SamplerPool):
        def generate(self, request):
            if len(self.requests) == 3:
                signal.raise_signal(signal.SIGTERM)
                ending.wait(60)
            return super().generate(request)

    saving = ["run.checkpoint_every=50", "rollouts.concurrency=1"]
    connect_to(monkeypatch, Hanging)
    with pytest.raises(SystemExit) as raised:
        runs.train("grpo.gin", *saving)
    ending.set()
    assert raised.value.code == 128 + signal.SIGTERM
    made = connect_to(monkeypatch, SamplerPool)
    result, _ = runs.train("grpo.gin", *saving)
    assert [step.step for step in result.history] == [1, 2, 3]
    assert len(made[0].requests) == 3  # the second group of step 2, and step 3


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["rollouts.max_staleness=1"],
            "rollouts.max_staleness=1 needs grpo.correction, because completions are",
        ),
        (["rollouts.engine=None"], "rollouts.urls must be left out, or (), without"),
        (["rollouts.urls=()"], "rollouts.urls must be addresses as in"),
        (["rollouts.urls='http://me:pw@a:1'"], "rollouts.urls must be addresses as in"),
        (["rollouts.urls='localhost:8000'"], "rollouts.urls must be addresses as in"),
        (
            ["rollouts.urls=('http://a:1', 'http://a:1')"],
            "rollouts.urls must be addresses as in",
        ),
        (
            ["rollouts.urls='http://gpu7:8000'", "rollouts.weights=None"],
            "rollouts.weights must be a folder that the servers of other hosts read",
        ),
        (["rollouts.engine='tgi'"], "rollouts.engine must be 'vllm' or 'sglang' or"),
        (
            ["task.recorded=True", "task.reward='exact'"],
            "task.recorded=True must stay False for rollouts.engine='vllm', which",
        ),
        (["sampling.slots=4"], "sampling.slots"),
        (
            ["model.checkpoint=None", "task.source=None", "task.reward='exact'"],
            "rollouts.engine='vllm' needs model.checkpoint",
        ),
        (["rollouts.timeout=0"], "rollouts.timeout"),
    ],
)
def test_settings_that_an_engine_cannot_have_are_refused(overrides, message):
    refused("grpo.gin", overrides, message)


def test_ends_count_the_rows_of_the_model():
    """A model may have more rows than its tokenizer has tokens, and sample all."""
    path = pathlib.Path("llama/tokenizer.json")
    text = json.loads(path.read_text())
    words = text["model"]["vocab"]
    del words[max(words, key=words.get)]
    path.write_text(json.dumps(text))
    config, _ = configuration.load("grpo.gin", [])
    tokens = checkpoints.load_vocabulary("llama").tokenizer.get_vocab_size()
    assert ends_of(config.task, "llama").size == 40 == tokens + 1


def test_seeds_of_groups_lie_apart():
    seeds = {seed_of(run, number) for run in range(20) for number in range(50)}
    assert len({seed // 2**16 for seed in seeds}) == 1000
    assert max(seeds) < 2**62 <= 4 * max(seeds)
