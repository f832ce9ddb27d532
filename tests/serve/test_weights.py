"""New weights for a server: requests in flight, adapters, folders, broken files."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmem.models.sampling import SamplingConfig
from jaxmem.serve import command
from jaxmem.train.jobs.rollout.engines import (
    EngineOptions,
    SamplingRequest,
    connect,
)
from tests.helpers import served, texts
from tests.helpers.served import EOS, VOCAB, at_once, send

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPT = [5, 12, 6, 13]
BODY = dict(
    prompt=PROMPT, max_tokens=48, n=3, seed=7, logprobs=0, return_token_ids=True,
    ignore_eos=True, stop_token_ids=[EOS],
)  # fmt: skip


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    return served.write_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served_folder(versions, quick_compilation):
    folder = versions[0].parent
    options = served.options(versions[0], max_waiting=24, weights=(str(folder),))
    with command.served(options) as running:
        yield running


@pytest.fixture
def server(served_folder, versions):
    """The server with the first weights, which have no name."""
    yield served_folder
    assert reload(served_folder, versions[0])[0] == 200


def reload(server, directory):
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    return send(server.url, "/collective_rpc", body)


def name_version(server, version):
    body = {"new_version": version}
    assert send(server.url, "/update_weight_version", body)[0] == 200


def pool_of(server):
    return connect(
        "vllm",
        [server.url],
        EngineOptions(
            sampling=SamplingConfig(max_new_tokens=48), eos_ids=(EOS,), token=None,
            vocab_size=VOCAB, run="sums", timeout=30, wants_spans=True,
        ),
    )  # fmt: skip


def check_spans(versions, choice, names):
    """Each span has the log-probabilities of its weights, over the whole prefix."""
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert sum(count for _, count in choice["weight_versions"]) == len(ids)
    start = 0
    for name, count in choice["weight_versions"]:
        span = slice(start, start := start + count)
        directory = versions[names.index(name)]
        expected = served.trainer_logprobs(directory, PROMPT, ids)[span]
        np.testing.assert_allclose(logprobs[span], expected, atol=1e-5)


@pytest.mark.parametrize("reset", [False, True])
def test_rows_in_flight_go_on_with_new_weights(server, versions, monkeypatch, reset):
    name_version(server, "sums:0")
    gate = served.Gate(server, monkeypatch, parts=2)

    def update():
        assert gate.reached.wait(20)
        assert send(server.url, "/pause?mode=keep", {})[1] == {"status": "paused"}
        assert send(server.url, "/is_paused")[1] == {"is_paused": True}
        assert reload(server, versions[1]) == (200, {"results": [None]})
        assert send(server.url, "/weight_info")[1] == {"weight_version": "default"}
        name_version(server, "sums:1")
        if reset:
            path = "/reset_prefix_cache?reset_running_requests=true"
            assert send(server.url, path, {}) == (200, {"success": True})
        assert send(server.url, "/resume", {})[1] == {"status": "resumed"}

    (status, answer), _ = at_once(
        lambda: send(server.url, "/v1/completions", BODY), update
    )
    assert status == 200
    counts = [dict(choice["weight_versions"]) for choice in answer["choices"]]
    assert any(len(spans) == 2 for spans in counts)
    for choice in answer["choices"]:
        check_spans(versions, choice, ["sums:0", "sums:1"])
    # The draws are those of the seeds, so what differs is what the weights are.
    alone = send(server.url, "/v1/completions", BODY)[1]["choices"]
    assert {tuple(x["weight_versions"][0])[0] for x in alone} == {"sums:1"}
    for choice in alone:
        check_spans(versions, choice, ["sums:0", "sums:1"])


def test_client_updates_weights_while_requests_run(server, versions, monkeypatch):
    pool, gate = pool_of(server), served.Gate(server, monkeypatch, parts=2)
    request = SamplingRequest(PROMPT, 3, 48, seed=7)
    pool.load_weights(versions[0], 0, False)

    def update():
        assert gate.reached.wait(20)
        return pool.load_weights(versions[1], 1, False)

    answers, seconds = at_once(lambda: pool.generate(request), update)
    assert pool.versions() == [1]
    assert {*seconds} == {"pause", "reload", "version", "reset", "resume", "check"}
    assert [0, 1] in [[version for version, _ in x.versions] for x in answers]
    for answer in answers:
        start = 0
        for version, count in answer.versions:
            span = slice(start, start := start + count)
            expected = served.trainer_logprobs(versions[version], PROMPT, answer.ids)
            np.testing.assert_allclose(answer.logprobs[span], expected[span], atol=1e-5)
    pool.close()


def test_new_weights_are_not_compiled_for(server, versions):
    body = BODY | {"max_tokens": 4}
    assert send(server.url, "/v1/completions", body)[0] == 200
    programs = server.loop._pool._programs
    compiled = programs.place._cache_size(), programs.advance._cache_size()
    assert reload(server, versions[1])[0] == 200
    assert send(server.url, "/v1/completions", body)[0] == 200
    assert server.loop._pool._programs is programs
    assert (programs.place._cache_size(), programs.advance._cache_size()) == compiled


def test_checksums_are_those_of_the_weights(server, versions):
    def checksums():
        answer = send(server.url, "/weight_checker", {"action": "checksum"})[1]
        return answer["checksums"]

    first = checksums()
    assert reload(server, versions[1])[0] == 200
    second = checksums()
    assert first.keys() == second.keys()
    assert all(first[path] != second[path] for path in first)
    assert reload(server, versions[0])[0] == 200
    assert checksums() == first


def test_paused_requests_wait(server):
    assert send(server.url, "/pause?mode=wait", {})[0] == 200
    sent = threading.Event()

    def late():
        sent.set()
        return send(server.url, "/v1/completions", BODY)

    def resume():
        assert sent.wait(20)
        name_version(server, "sums:5")
        return send(server.url, "/resume", {})

    (status, answer), _ = at_once(late, resume)
    assert status == 200 and send(server.url, "/is_paused")[1] == {"is_paused": False}
    assert answer["choices"][0]["weight_versions"][0][0] == "sums:5"


def test_abort_ends_rows_in_flight(server, monkeypatch):
    gate = served.Gate(server, monkeypatch, parts=1)

    def abort():
        assert gate.reached.wait(20)
        return send(server.url, "/pause", {})

    (status, answer), _ = at_once(
        lambda: send(server.url, "/v1/completions", BODY), abort
    )
    send(server.url, "/resume", {})
    assert status == 200
    reasons = {choice["finish_reason"] for choice in answer["choices"]}
    assert "abort" in reasons
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) < 48


# ------------------------------------------------------------------ what is refused


def damaged(versions, tmp_name, damage):
    made = Path(shutil.copytree(versions[0], versions[0].parent / tmp_name))
    damage(made)
    return made


def cut(directory):
    for path in directory.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-7])


def narrow(directory):
    for path in directory.glob("*.safetensors"):
        weights = load_file(path)
        weights["model.norm.weight"] = weights["model.norm.weight"][:8]
        save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "damage", "status"),
    [
        ("cut", cut, 500),
        ("narrow", narrow, 500),
        ("no_config", lambda x: (x / "config.json").unlink(), 500),
        ("no_weights", lambda x: [p.unlink() for p in x.glob("*.safe*")], 500),
        ("not_json", lambda x: (x / "config.json").write_text("{"), 500),
        ("away", shutil.rmtree, 500),
    ],
)
def test_old_weights_stay_after_a_broken_folder(server, versions, name, damage, status):
    before = send(server.url, "/v1/completions", BODY)[1]["choices"]
    name_version(server, "sums:3")
    made = damaged(versions, name, damage)
    got, answer = reload(server, made)
    assert got == status
    assert answer["error"]["message"].endswith("(the old weights stay)")
    assert name in answer["error"]["message"]
    assert send(server.url, "/weight_info")[1] == {"weight_version": "sums:3"}
    after = send(server.url, "/v1/completions", BODY)[1]["choices"]
    ids = [[x["token_ids"] for x in choices] for choices in (before, after)]
    assert ids[0] == ids[1]


def test_other_architecture_is_refused(server, versions):
    other = texts.checkpoint("qwen3", versions[0].parent / "other")
    status, answer = reload(server, other)
    assert status == 400
    message = answer["error"]["message"]
    assert "send weights of the served model's architecture" in message


def test_only_named_folders_are_read(server, versions, tmp_path):
    outside = Path(shutil.copytree(versions[0], tmp_path / "outside"))
    root = versions[0].parent
    link = root / "link"
    link.symlink_to(outside)
    file_link = Path(shutil.copytree(versions[0], root / "file_link"))
    (file_link / "model.safetensors").unlink()
    (file_link / "model.safetensors").symlink_to(outside / "model.safetensors")
    for path in (
        outside, link, file_link, root, f"{root}/../outside", "llama", "\0", "/",
        "\ud800",
    ):  # fmt: skip
        status, answer = reload(server, path)
        assert status == (400 if path in ("\0", "\ud800") else 403), path
        assert answer["error"]["message"].startswith("weights_path="), path
    assert reload(server, f"{root}/second/../llama")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/collective_rpc", {"method": "exit"}, "method must be 'reload_weights'"),
        ("/collective_rpc", {"method": "reload_weights"}, 'must be {"weights_path": D'),
        (
            "/collective_rpc",
            {"method": "reload_weights", "args": [1], "kwargs": {"weights_path": "/"}},
            'kwargs must be {"weights_path": DIR}, without args',
        ),
        ("/pause?mode=sleep", {}, "mode must be one of abort, wait, keep"),
        ("/update_weight_version", {"new_version": 7}, "new_version must be a text"),
        ("/update_weight_version", {"new_version": "7" * 257}, "at most 256 character"),
        ("/weight_checker", {"action": "compare"}, "action must be 'checksum'"),
        ("/reset_prefix_cache?reset_external=x", {}, "must be true or false"),
        ("/resume", {"now": 1}, "'now' is unknown; this route reads nothing"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, "lora_path must be a text"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "policy", "lora_path": "."},
            "lora_path='.' is not below a folder of --weights",
        ),
    ],
)
def test_impossible_requests_are_refused(server, path, body, message):
    status, answer = send(server.url, path, body)
    assert status in (400, 403)
    assert message in answer["error"]["message"]
