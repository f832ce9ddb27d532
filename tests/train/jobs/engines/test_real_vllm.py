"""GRPO with a real vLLM server, which `.ci/engine` installs."""

import concurrent.futures
import json
import pathlib
import re
import time
import urllib.request

import numpy as np
import pytest

from jaxmem.train.jobs.rollout.engines import (
    EngineError,
    EnginePool,
    SamplingRequest,
)
from jaxmem.train.jobs.rollout.engines.vllm import Vllm
from tests.helpers import engines, runs, served
from tests.helpers.engine_conversation import PROMPT, VOCAB
from tests.helpers.vllm_server import (
    ADAPTERS,
    PROCESSED,
    VllmServer,
    write_adapter,
    write_checkpoint,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("quick_compilation", "no_picture"),
]
LARGEST_RATIO = 1e-3  # |ln ratio| of a token, both sides in float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoints of this module: two of the same sizes."""
    folder = tmp_path_factory.mktemp("vllm")
    for seed, name in enumerate(("policy", "other")):
        write_checkpoint(folder / name, seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """A server of `policy`, which takes adapters as well."""
    flags = *PROCESSED, *ADAPTERS, "--max-num-seqs", "256"
    with VllmServer(folder / "policy", folder / "log", flags) as started:
        yield started


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settings(folder, server, *more):
    """Overrides of a run from `policy`, with that server."""
    return (
        *start(folder),
        "rollouts.engine=vllm",
        f"rollouts.urls={server.url}",
        *more,
    )


def start(folder, name="policy"):
    """Overrides that take the model from a checkpoint, sizes included."""
    return (f"model.checkpoint={folder}/{name}", "model.head_dim=None",
            "model.embedding.scaled=None")  # fmt: skip


def small(*more):
    """Overrides of a run of a few steps, whose completions have several tokens."""
    task = "task.answer='sum'", "task.reward='prefix'", "sampling.max_new_tokens=6"
    return *task, "grpo.prompts=8", "grpo.group_size=8", "run.out_dir=run", *more


def steps(out_dir="run"):
    lines = pathlib.Path(out_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def column(name, out_dir="run"):
    return np.array([step[name] for step in steps(out_dir)])


@pytest.fixture(scope="module")
def updated(folder, server, tmp_path_factory):
    """The directory of a run of four steps, and what it printed."""
    out = tmp_path_factory.mktemp("updated")
    overrides = settings(folder, server, *small(f"run.out_dir={out}", "run.steps=4"))
    return out, runs.train("grpo_arithmetic.gin", *overrides)[1]


def test_ratios_are_one_before_and_after_updates(updated, server):
    out, printed = updated
    assert "its log-probabilities differ from the trainer's by" in printed
    assert (column("mismatch_max", out) < LARGEST_RATIO).all()
    assert (column("staleness_max", out) == 0).all()
    assert (column("push_seconds", out) > 0).all()
    assert len({*column("loss", out)}) > 2
    with urllib.request.urlopen(f"{server.url}/weight_info") as answer:
        assert json.load(answer) == {"weight_version": f"{out.name}:3"}


def test_killed_server_costs_no_step(folder, server, updated, monkeypatch):
    """It is ended at a request of the third step, and starts again."""
    whole, _ = updated
    generate, requests = EnginePool.generate, []

    def killing(pool, request):
        requests.append(request)
        if len(requests) == 2 * 8 + 2:
            server.kill()
            server.start()
        return generate(pool, request)

    monkeypatch.setattr(EnginePool, "generate", killing)
    overrides = settings(folder, server, *small("run.steps=4"))
    printed = " ".join(runs.train("grpo_arithmetic.gin", *overrides)[1].split())
    assert f"rollouts.urls: {server.url} /" in printed
    assert "has restarted, as its weights have no version; version 2 is" in printed
    assert "answers again, after it failed" in printed
    for name in ("reward", "tokens"):
        assert column(name).tolist() == column(name, whole).tolist()
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(column(name), column(name, whole), rtol=1e-3)
    assert (column("mismatch_max") < LARGEST_RATIO).all()


def test_truncated_samples_have_ratio_one(folder, server):
    """Supports come from the engine's log-probabilities."""
    truncation = "sampling.temperature=2.0", "sampling.top_k=3"
    overrides = settings(folder, server, *small("run.steps=2", *truncation))
    runs.train("grpo_arithmetic.gin", *overrides)
    assert (column("mismatch_max") < LARGEST_RATIO).all()


@pytest.fixture
def base(folder, server):
    """Gives the server the weights of `policy` back, which adapters are for."""
    arguments = {"weights_path": f"{folder}/policy"}
    body = {"method": "reload_weights", "kwargs": arguments}
    request = urllib.request.Request(
        f"{server.url}/collective_rpc",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).close()


@pytest.mark.usefixtures("base")
def test_adapters_are_updated(folder, server):
    overrides = settings(folder, server, *small("run.steps=3", "model.lora_rank=4"))
    runs.train("grpo_arithmetic.gin", *overrides)
    assert (column("mismatch_max") < LARGEST_RATIO).all()
    assert len({*column("loss")}) > 1


def test_stale_completions_state_their_versions(folder, server):
    """Requests are in flight at an update, and go on with the new weights."""
    ahead = "rollouts.max_staleness=1", "grpo.correction=ratio"
    overrides = settings(folder, server, *small("run.steps=4", *ahead))
    runs.train("grpo_arithmetic.gin", *overrides)
    first, *others = column("staleness_max").tolist()
    # A group that waits in the server until the update is of new weights alone.
    assert first == 0 and {*others} <= {0, 1} and 1 in others


@pytest.mark.usefixtures("base")
def test_request_in_flight_keeps_its_adapter(folder, server):
    """All its tokens are of the version that it states, before and after an update."""
    chosen, _ = engines.options(
        eos_ids=(), vocab_size=VOCAB, timeout=60.0, wants_spans=True
    )
    engine = Vllm(server.url, chosen)
    engine.wait_ready()
    names = [write_adapter(folder / f"a{i}", folder / "policy", seed=i) for i in (1, 2)]
    request = SamplingRequest(PROMPT, 32, served.LONGEST - len(PROMPT), seed=7)
    engine.load_weights(names[0], 1, adapter=True)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        older = threads.submit(engine.generate, request)
        time.sleep(0.1)  # a token takes milliseconds
        engine.load_weights(names[1], 2, adapter=True)
        assert not older.done()
        newer = engine.generate(request)
    for version, answers in ((1, older.result()), (2, newer)):
        for answer in answers[::8]:
            assert answer.versions == [(version, request.max_tokens)]
            expected = served.trainer_logprobs(
                folder / "policy", PROMPT, answer.ids, adapter=names[version - 1]
            )
            np.testing.assert_allclose(answer.logprobs, expected, atol=LARGEST_RATIO)


def test_adapter_of_a_higher_rank_is_refused(folder, server):
    overrides = settings(folder, server, *small("run.steps=2", "model.lora_rank=32"))
    with pytest.raises(EngineError, match=r"max_lora_rank.* does --max-lora-rank"):
        runs.train("grpo_arithmetic.gin", *overrides)


@pytest.mark.usefixtures("base")
def test_adapter_of_another_base_is_refused(folder, server):
    """The server's own checkpoint is not the run's."""
    overrides = settings(folder, server, *small("run.steps=2", "model.lora_rank=4"))
    overrides += start(folder, "other")
    with pytest.raises(EngineError) as error:
        runs.train("grpo_arithmetic.gin", *overrides)
    assert re.search(r"differ from the trainer's by 0\.\d+ nats on", str(error.value))
    assert f"serve model.checkpoint='{folder}/other'" in str(error.value)
    assert not pathlib.Path("run", "metrics.jsonl").exists()  # no step was taken


def test_arithmetic_is_learned(folder, server):
    """The shipped job through the engine learns as with the run's own sampler."""
    overrides = settings(folder, server, "run.steps=80", "run.out_dir=engine")
    runs.train("grpo_arithmetic.gin", *overrides)
    own = *start(folder), "run.steps=80", "run.out_dir=own"
    runs.train("grpo_arithmetic.gin", *own)
    rewards = [column("reward", name)[-10:].mean() for name in ("engine", "own")]
    assert min(rewards) > 0.9 and abs(rewards[0] - rewards[1]) < 0.05
    assert column("reward", "engine")[0] < 0.2
    assert (column("mismatch_max", "engine") < LARGEST_RATIO).all()


@pytest.fixture(scope="module")
def raw(folder):
    """A server with vLLM's default: log-probabilities at temperature 1."""
    with VllmServer(folder / "policy", folder / "raw", ()) as started:
        yield started


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ("temperature=0.1", r"at temperature 1 without truncation \(\S+e-\d+ nats\)"),
        (
            "top_k=3",
            r"drawn from 3 ids with the probability 0\.\d+ in sum instead of 1",
        ),
    ],
)
def test_untempered_server_is_refused(folder, raw, sampling, reason):
    overrides = small("run.steps=2", f"sampling.{sampling}")
    with pytest.raises(EngineError) as error:
        runs.train("grpo_arithmetic.gin", *settings(folder, raw, *overrides))
    assert re.search(reason, str(error.value))
    assert "--logprobs-mode processed_logprobs" in str(error.value)
    assert not pathlib.Path("run", "metrics.jsonl").exists()


def test_checkpoint_of_other_sizes_is_refused(folder, raw):
    """The server cannot load it, and may not survive that: this comes last."""
    write_checkpoint(folder / "wide", hidden=128)
    overrides = settings(folder, raw, *small("run.steps=2"))
    overrides += *start(folder, "wide"), "model.hidden=None"
    with pytest.raises(EngineError, match="it cannot load .*; serve the run's model"):
        runs.train("grpo_arithmetic.gin", *overrides)
