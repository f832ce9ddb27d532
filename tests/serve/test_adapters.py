"""Adapters of a server: loaded, replaced while requests run, and refused."""

import concurrent.futures
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from jaxmem import generate
from jaxmem.models.sampling import SamplingConfig
from jaxmem.serve import command
from jaxmem.serve.request_error import RequestError
from jaxmem.serve.served_weights import ServedWeights
from jaxmem.train.jobs.rollout.engines import (
    EngineOptions,
    SamplingRequest,
    connect,
)
from tests.helpers import served, texts
from tests.helpers.served import EOS, VOCAB, send

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPT = [5, 12, 6, 13]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return texts.checkpoint("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(model, quick_compilation):
    options = served.options(model, max_waiting=24, weights=(str(model),))
    with command.served(options) as running:
        yield running


@pytest.fixture(scope="module")
def second(model):
    """Another adapter of the same shapes."""
    made = Path(shutil.copytree(model / "adapter", model / "second"))
    served.change_weights(made)
    return made


def test_client_loads_and_replaces_an_adapter(server, model, second):
    options = EngineOptions(
        sampling=SamplingConfig(max_new_tokens=16), eos_ids=(EOS,), vocab_size=VOCAB,
        run="sums", timeout=30, wants_spans=True, token=None,
    )  # fmt: skip
    pool = connect("vllm", [server.url], options)
    request = SamplingRequest(PROMPT, 2, 16, seed=7)
    tokens = [[answer.ids for answer in pool.generate(request)]]
    for version, adapter in enumerate((model / "adapter", second)):
        pool.load_weights(adapter, version, True)
        answers = pool.generate(request)
        for answer in answers:
            expected = served.trainer_logprobs(
                model, PROMPT, answer.ids, adapter=adapter
            )
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
            assert answer.versions == [(version, len(answer.ids))]
        tokens.append([answer.ids for answer in answers])
    assert tokens[0] != tokens[1] != tokens[2]

    def models():
        listed = send(server.url, "/v1/models")[1]["data"]
        return [(x["id"], x["parent"]) for x in listed]

    assert models() == [("policy", None), ("sums:1", "policy")]
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(second)}}
    status, answer = send(server.url, "/collective_rpc", body)
    assert status == 400
    assert "unload the adapters or start the server" in answer["error"]["message"]
    pool.close()
    assert models() == [("policy", None)]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"lora_name": "policy"}, 400, "lora_name='policy' is the name of the model"),
        ({"load_inplace": 1}, 400, "load_inplace must be true or false"),
        ({"lora_path": "blocks"}, 403, "; start the server with --weights of a folder"),
        ({"lora_path": "none"}, 500, "(the old weights stay)"),
    ],
)
def test_impossible_adapters_are_refused(server, model, fields, status, message):
    body = {"lora_name": "other", "lora_path": str(model / "adapter")} | fields
    if fields.get("lora_path") == "none":
        body["lora_path"] = str(model / "none")
    got, answer = send(server.url, "/v1/load_lora_adapter", body)
    assert got == status
    assert message in answer["error"]["message"]
    assert "other" not in server.loop.weights.names


def test_adapters_are_few(server, model, monkeypatch):
    monkeypatch.setattr("jaxmem.serve.served_weights._MOST_ADAPTERS", 0)
    body = {"lora_name": "another", "lora_path": str(model / "adapter")}
    status, answer = send(server.url, "/v1/load_lora_adapter", body)
    assert status == 400
    assert "0 adapters are loaded, and no more may be" in answer["error"]["message"]


def test_rows_in_progress_keep_an_unloaded_adapter(server, model, second):
    """It serves no further request, and goes once the rows have ended."""
    for name, adapter in (("first", model / "adapter"), ("second", second)):
        body = {"lora_name": name, "lora_path": str(adapter)}
        assert send(server.url, "/v1/load_lora_adapter", body)[0] == 200
    send(server.url, "/pause?mode=keep", {})
    sent = {"model": "first", "prompt": PROMPT, "max_tokens": 16, "seed": 7,
            "logprobs": 0, "return_token_ids": True}  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor() as threads:
        answer = threads.submit(send, server.url, "/v1/completions", sent)
        while server.loop.is_idle:
            time.sleep(0.01)
        unload = "/v1/unload_lora_adapter", {"lora_name": "first"}
        assert send(server.url, *unload)[0] == 200
        assert "first" not in server.loop.weights.names
        assert server.loop.weights.decoder("first") is not None
        send(server.url, "/resume", {})
        (choice,) = answer.result()[1]["choices"]
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    expected = served.trainer_logprobs(model, PROMPT, ids, adapter=model / "adapter")
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    status, refusal = send(server.url, "/v1/completions", sent)
    assert status == 404 and "`first` does not exist" in refusal["error"]["message"]
    status, refusal = send(server.url, *unload)
    assert status == 404 and "'first' cannot be found" in refusal["error"]["message"]
    assert send(server.url, "/v1/completions", sent | {"model": "second"})[0] == 200
    with pytest.raises(KeyError):  # the slots are the other adapter's now
        server.loop.weights.decoder("first")


def test_rows_in_progress_keep_their_adapter_and_its_version(
    server, model, second, monkeypatch
):
    """The next adapter is loaded, named and asked for before they end."""

    def load(name, adapter):
        body = {"lora_name": name, "lora_path": str(adapter)}
        assert send(server.url, "/v1/load_lora_adapter", body)[0] == 200
        send(server.url, "/update_weight_version", {"new_version": name})

    def ask(name):
        sent = {"model": name, "prompt": PROMPT, "max_tokens": 40, "seed": 7,
                "logprobs": 0, "return_token_ids": True,
                "ignore_eos": True}  # fmt: skip
        return send(server.url, "/v1/completions", sent)[1]["choices"][0]

    load("run:1", model / "adapter")
    ask("run:1")  # compiles
    gate = served.Gate(server, monkeypatch, parts=2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        answer = threads.submit(ask, "run:1")
        assert gate.reached.wait(20)
        load("run:2", second)
        last = ask("run:2")
        choice = answer.result()
    for made, name, adapter in (
        (choice, "run:1", model / "adapter"), (last, "run:2", second),
    ):  # fmt: skip
        assert made["weight_versions"] == [[name, 40]]
        ids, logprobs = made["token_ids"], made["logprobs"]["token_logprobs"]
        expected = served.trainer_logprobs(model, PROMPT, ids, adapter=adapter)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert send(server.url, "/weight_info")[1] == {"weight_version": "run:2"}
    for name in ("run:1", "run:2"):
        send(server.url, "/v1/unload_lora_adapter", {"lora_name": name})


def test_model_with_an_adapter_takes_no_other(model):
    loaded = generate.load(model, adapter=model / "adapter", dtype="float32")
    weights = ServedWeights("policy", loaded)
    with pytest.raises(RequestError) as raised:
        weights.load_adapter("other", model / "adapter", False)
    assert str(raised.value).startswith("policy has an adapter of its own, and cannot")
    assert raised.value.status == 400
